"""Which Ray cluster a run joins: the command line, the configuration, RAY_ADDRESS, or none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from engine.config import load_config, parse_config
from engine.config.cluster import ClusterSection
from engine.config.resumption import resumed
from engine.errors import ConfigError

MADE = {"model": {"make": "arithmetic"}}


@pytest.mark.parametrize(
    ("given", "environment", "joined"),
    [
        (None, None, None),
        (None, "10.0.0.1:6379", ("RAY_ADDRESS", "10.0.0.1:6379")),
        (None, "local", None),
        (None, "auto", ("RAY_ADDRESS", "auto")),
        ("local", "10.0.0.1:6379", None),
        ("auto", None, ("cluster.address", "auto")),
        ("auto", "10.0.0.1:6379", ("RAY_ADDRESS", "10.0.0.1:6379")),
        ("head.example:6379", "10.0.0.1:6379", ("cluster.address", "head.example:6379")),
        ("[::1]:6379", None, ("cluster.address", "[::1]:6379")),
    ],
)
def test_the_configuration_comes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, given: str | None, environment: str | None, joined: tuple[str, str] | None
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", environment or "")
    assert ClusterSection(address=given).joined() == joined


def test_an_address_of_ray_client_is_refused_with_the_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"^cluster\.address 'ray://h:1' is an address for Ray Client.* --address auto$"
    ):
        parse_config({**MADE, "cluster": {"address": "ray://h:1"}})
    monkeypatch.setenv("RAY_ADDRESS", "ray://h:1")
    with pytest.raises(ConfigError, match=r"^RAY_ADDRESS 'ray://h:1' is an address for Ray Client"):
        parse_config(MADE).cluster.joined()


@pytest.mark.parametrize("address", ["somewhere", "10.0.0.1", "http://h:1", "h:1/x", ""])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.address"):
        parse_config({**MADE, "cluster": {"address": address}})


@pytest.mark.parametrize("port", [0, 65_536, 99_999])
def test_a_port_that_does_not_exist_is_refused(port: int) -> None:
    """The system would try another port: this one modulo 65 536."""
    with pytest.raises(ConfigError, match=rf"^cluster\.address 'h:{port}' has a port outside 1 to 65535; for example"):
        parse_config({**MADE, "cluster": {"address": f"h:{port}"}})


def test_the_argument_overrides_the_configuration_and_no_answer_leaves_no_files(
    tmp_path: Path,
) -> None:
    """In a process of its own: one that is connected to a cluster already would use that."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**MADE, "cluster": {"address": "127.0.0.1:2"}}))
    command = [sys.executable, "-m", "engine.cli", "run", "config.yaml", "--address", "127.0.0.1:1"]
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:3"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("engine: cluster.address '127.0.0.1:1' cannot be reached")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "runs").exists()


def test_a_resume_may_join_another_cluster_with_another_environment(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**MADE, "cluster": {"address": "auto", "runtime_env": {"pip": ["x"]}}}))
    recorded = load_config(path).model_dump(mode="json")
    config, settings = resumed(path, recorded, ["cluster.address=h:1", "cluster.runtime_env={env_vars: {A: b}}"])
    assert (config.cluster.address, config.cluster.runtime_env, settings) == ("h:1", {"env_vars": {"A": "b"}}, ())
