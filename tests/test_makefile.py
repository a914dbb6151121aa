"""`make` with an interpreter that is too old: which one it refuses, and which environment it replaces."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OLD = '#!/bin/sh\ncase "$*" in *version_info*) exit 1;; esac\n'
NEW = '#!/bin/sh\necho called with: $*\ncase "$*" in *venv*) exit 1;; esac\n'


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def made(project: Path, python: Path) -> str:
    done = subprocess.run(["make", f"PYTHON={python}", "run"], cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    return done.stdout + done.stderr


def test_an_interpreter_that_is_too_old_is_refused_before_anything_is_made(project: Path) -> None:
    old = program(project / "old" / "python3.10", OLD)
    assert f"{old} is not Python 3.11 or newer" in made(project, old)
    assert not (project / ".venv").exists()


def test_an_environment_of_an_old_interpreter_is_replaced(project: Path) -> None:
    program(project / ".venv" / "bin" / "python", OLD)
    assert "called with: -m venv --clear .venv" in made(project, program(project / "new" / "python3", NEW))
