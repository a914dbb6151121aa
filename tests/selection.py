"""Runs the tests near a change: `make near BASE=main ARGS="-x"`.

Near is a test file that changed, or whose imports reach a changed module in at most two steps. Continuous integration
always runs everything.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STEPS = 2
"""Longest way from a test file to a changed module, in imports."""


def changed_files(base: str) -> set[Path]:
    """Python files that differ from a commit, or that git does not know yet."""
    commands = (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"])
    outputs = [subprocess.run(["git", *one], cwd=ROOT, capture_output=True, text=True, check=True) for one in commands]
    return {ROOT / name for one in outputs for name in one.stdout.splitlines() if name.endswith(".py")}


def imported(path: Path) -> Iterator[Path]:
    """Files of this repository that a file imports, late imports included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            place = Path(*name.split("."))
            candidates = [folder / place for folder in (ROOT, path.parent, *sorted((ROOT / "tests").iterdir()))]
            found = [file for one in candidates for file in (one.with_suffix(".py"), one / "__init__.py")]
            yield from (file for file in found if file.is_file())


def near(changed: set[Path]) -> list[Path]:
    """The test files near changed files."""
    below: dict[Path, set[Path]] = {}

    def reaches(path: Path, steps: int) -> bool:
        if path in changed:
            return True
        if path not in below:
            below[path] = set(imported(path))
        return steps > 0 and any(reaches(file, steps - 1) for file in below[path])

    return [test for test in sorted((ROOT / "tests").rglob("test_*.py")) if reaches(test, STEPS)]


if __name__ == "__main__":
    tests = near(changed_files(os.environ.get("BASE") or "HEAD"))
    print(f"{len(tests)} test files are near the change", flush=True)
    sys.exit(pytest.main([*map(str, tests), *sys.argv[1:]]) if tests else 0)
