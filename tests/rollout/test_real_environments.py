"""Adapters of environments with the real packages, each in a Python environment of its own (`make torture`)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"verifiers": "verifiers==0.4.0", "skyrl_gym": "skyrl-gym==0.4.0"}
"""As docs/AGENTS.md names them."""


@pytest.mark.parametrize("adapter", PACKAGES)
def test_an_episode_is_played_with_the_real_package(adapter: str, tmp_path: Path) -> None:
    python = tmp_path / "own" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "own"], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PACKAGES[adapter]]
    installed = subprocess.run(install, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"{PACKAGES[adapter]} cannot be installed here: {installed.stderr.strip()[-300:]}")
    script = Path(__file__).with_name("real_environments.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    played = subprocess.run(
        [python, script, adapter], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert played.returncode == 0, played.stdout + played.stderr
    assert played.stdout.strip().endswith("played")
