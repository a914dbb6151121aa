"""Joining a Ray cluster, as far as it needs none: who answers, which versions differ, what is sent to its nodes."""

import platform
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from ray._private.runtime_env import packaging
from ray.exceptions import RuntimeEnvSetupError

from engine import __version__
from engine.actors.cluster import find_cluster, refuse_missing, refuse_versions, runtime_env, runtime_env_refusal
from engine.config.loading import parse_config
from engine.errors import ConfigError

MADE = {"model": {"make": "arithmetic"}}


@pytest.fixture
def listening() -> Callable[[], str]:
    """The address of a port that takes connections and never answers."""
    server = socket.create_server(("127.0.0.1", 0))
    return lambda: f"127.0.0.1:{server.getsockname()[1]}"


def test_an_address_that_does_not_answer_is_refused(listening: Callable[[], str]) -> None:
    address = listening()
    with pytest.raises(ConfigError, match=rf"^RAY_ADDRESS '{address}' does not answer within 1 s; give the address"):
        find_cluster("RAY_ADDRESS", address, answer_s=1.0)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:6379"])
def test_an_address_that_cannot_be_reached_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=rf"^cluster\.address '{address}' cannot be reached: .*; give the address"):
        find_cluster("cluster.address", address)


def test_other_versions_are_named_with_their_node() -> None:
    same = {"step-engine": __version__, "Ray": ray.__version__, "Python": platform.python_version()}
    refuse_versions("cluster.address", "here:1", {"node a": same, "the cluster": {"Ray": ray.__version__}})
    others = {"node a": same, "node b": {**same, "step-engine": "missing"}, "node c": {**same, "Python": "3.9.1"}}
    with pytest.raises(ConfigError) as caught:
        refuse_versions("cluster.address", "here:1", others)
    said = str(caught.value)
    assert f"node b has step-engine missing (here {__version__}); node c has Python 3.9.1 (here " in said
    assert "node a" not in said and said.endswith("install the same versions on every node")
    with pytest.raises(ConfigError, match=r"the cluster has Ray 1\.0"):
        refuse_versions("cluster.address", "here:1", {"the cluster": {"Ray": "1.0"}})


def test_a_path_that_a_node_does_not_see_is_named_with_the_node() -> None:
    paths = {"model.path": "/models/m", "run.dir": "/runs/r"}
    refuse_missing(paths, {"a": [], "b": []})
    with pytest.raises(ConfigError, match=r"^run\.dir '/runs/r' is not shared with node b of the cluster; put it on"):
        refuse_missing(paths, {"a": [], "b": ["run.dir"]})


def test_the_nodes_get_the_users_code_without_runs_and_inputs(tmp_path: Path) -> None:
    config = parse_config(
        {
            "model": {"path": str(tmp_path / "models" / "m")},
            "data": {"path": str(tmp_path / "train.jsonl"), "validation_path": "/far/away.jsonl"},
            "reward": {"function": "mine:score"},
            "run": {"dir": str(tmp_path / "runs"), "code_dir": str(tmp_path)},
            "cluster": {"runtime_env": {"env_vars": {"A": "1"}}},
        }
    )
    sent = runtime_env(config)
    assert (sent["working_dir"], sent["env_vars"]) == (str(tmp_path), {"A": "1"})
    assert {"/runs", "/models/m", "/train.jsonl", ".venv"} <= set(sent["excludes"])
    assert not any("far" in pattern or pattern in ("/", "/.") for pattern in sent["excludes"])


def test_code_that_is_too_large_for_the_nodes_is_named_by_its_largest_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in {"a.py": 9, "data/large.bin": 4_000_000, "data/small.bin": 2_000_000, "runs/old.pt": 9}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    monkeypatch.setattr(packaging, "GCS_STORAGE_MAX_SIZE", 1_000_000)
    with pytest.raises(ValueError) as large:  # as for a directory of this size
        packaging.upload_package_to_gcs("gcs://package.zip", bytes(1_000_001))
    error = RuntimeEnvSetupError(f"Failed to upload working_dir {tmp_path} to the Ray cluster: {large.value}")
    said = str(runtime_env_refusal({"working_dir": str(tmp_path), "excludes": ["/runs"]}, error))
    assert f"sends {tmp_path} to the nodes, which is larger than 1.0 MB when it is compressed" in said
    assert "the largest files: data/large.bin (4.0 MB), data/small.bin (2.0 MB), a.py" in said and ".rayignore" in said
    other = str(runtime_env_refusal({"pip": ["none"]}, RuntimeEnvSetupError("no such package")))
    assert other.startswith("cluster.runtime_env {'pip': ['none']} cannot be set up:") and "no such package" in other


def test_what_the_nodes_get_can_be_chosen() -> None:
    def sent(**given: object) -> dict[str, object]:
        return runtime_env(parse_config({**MADE, "cluster": {"runtime_env": given}}))

    assert sent(working_dir="s3://bucket/code.zip") == {"working_dir": "s3://bucket/code.zip"}
    assert sent(working_dir=None) == {}
