"""A private Ray: who may reach it, and what the environment of its start may be."""

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
import ray

from engine.actors.private_cluster import connect
from engine.errors import ConfigError
from engine.runtime import temporary_paths
from engine.runtime.temporary_paths import LONGEST, shorten_temporary_paths


@pytest.mark.ray
def test_only_this_machine_reaches_a_private_ray(cluster: None) -> None:
    @ray.remote(num_cpus=0)
    def address() -> str:
        return ray.util.get_node_ip_address()

    assert ray.get(address.remote()) == "127.0.0.1"
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = [link.laddr.ip for process in processes for link in links_of(process) if link.status == "LISTEN"]
    assert len(listening) >= 4, "the GCS, the raylet, this process and a worker"
    assert {ip.removeprefix("::ffff:") for ip in listening} <= {"127.0.0.1", "::1"}


def links_of(process: psutil.Process) -> list[psutil._ntuples.pconn]:
    try:
        return process.net_connections("tcp")
    except psutil.NoSuchProcess:
        return []


@pytest.mark.ray
def test_a_private_ray_refuses_callers_without_its_token(cluster: None) -> None:
    assert "RAY_AUTH_TOKEN" not in os.environ, "what this process starts does not get it"
    with grpc.insecure_channel(ray.get_runtime_context().gcs_address) as channel:
        ask = channel.unary_unary("/ray.rpc.InternalKVGcsService/InternalKVGet")
        for headers in ((), (("authorization", f"Bearer {secrets.token_hex(32)}"),)):
            with pytest.raises(grpc.RpcError) as refused:
                ask(b"", metadata=headers, timeout=60)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


START = """
import os, tempfile, urllib.request
import ray
from ray._raylet import AuthenticationTokenLoader
from engine.actors.launcher_watch import RayNode
from engine.actors.private_cluster import connect

connect()

@ray.remote(num_cpus=0)
def seen():
    return tempfile.gettempdir(), urllib.request.proxy_bypass("127.0.0.1:8000")

print(*ray.get(seen.remote()))
RayNode(own=True, run_dir=None, processes={}).close()
print(AuthenticationTokenLoader.instance().get_raw_token())
"""


@pytest.fixture
def long_path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / ("x" * 100)
    path.mkdir()
    yield path
    for place in temporary_paths.PLACES:
        for link in Path(place).glob(f"step-engine-{os.getuid()}-*"):
            if link.is_symlink() and link.readlink() == path:
                link.unlink()


@pytest.mark.ray
def test_ray_starts_under_a_long_path_and_behind_a_proxy(long_path: Path) -> None:
    proxies = {name: "http://127.0.0.1:9" for name in ("http_proxy", "HTTPS_PROXY", "ALL_PROXY", "grpc_proxy")}
    environment = {**os.environ, **proxies, "TMPDIR": str(long_path), "NO_PROXY": "example.org"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}
    done = subprocess.run(
        [sys.executable, "-c", START], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    directory, direct, token = done.stdout.split()
    assert token == "a" * 64, "the private cluster has ended, so the next one may be the user's"
    assert Path(directory).resolve() == long_path.resolve() and len(directory) <= LONGEST and direct == "True"
    assert (long_path / "ray" / "session_latest" / "sockets").is_dir()


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_a_long_path_is_refused_only_where_no_link_can_be_made(
    variable: str, long_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv(variable, str(long_path))
    with pytest.raises(
        ConfigError, match=rf"^{variable} is '.*', but must have at most {LONGEST} bytes.*; set {variable}"
    ):
        shorten_temporary_paths(("/proc/none",))
    shorten_temporary_paths(("/proc/none", "/tmp"))
    assert Path(os.environ[variable]).resolve() == long_path.resolve()
    before = os.environ[variable]
    monkeypatch.setenv(variable, str(long_path))
    shorten_temporary_paths()
    assert os.environ[variable] == before, "one link for each directory"


def test_a_directory_that_ray_cannot_write_is_refused_by_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file"))
    monkeypatch.setattr(temporary_paths, "LONGEST", 1000)
    with pytest.raises(ConfigError, match=r"^RAY_TMPDIR is '.*/file': .*/file/ray: Not a directory; set RAY_TMPDIR to"):
        connect()
