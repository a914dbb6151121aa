"""`benchmarks/gpu_smoke.py` where there is no GPU: its parts run, and a part that fails does not stop the others."""

import json
import subprocess
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
PROGRAM = BENCHMARKS / "gpu_smoke.py"


def loaded() -> Any:
    """The program as a module, without its neighbors in the path."""
    spec = spec_from_file_location("gpu_smoke", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu_smoke = loaded()


def test_the_program_measures_and_names_what_it_skips(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    asked = ["--device", "cpu", "--parts", "machine,attention", "--out", str(out)]
    done = subprocess.run([sys.executable, str(PROGRAM), *asked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert out.read_text() == done.stdout
    machine, attention = map(json.loads, done.stdout.splitlines())
    assert machine["part"] == "machine" and machine["device"] == "cpu" and machine["torch"]
    assert attention == {"part": "attention", "skipped": "no GPU"}


def test_weights_are_published_and_offloaded_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu import training
    from gpu.bench import Bench

    def figures_of(part: Callable[[Any], Iterable[Mapping[str, Any]]]) -> dict[str, Any]:
        return dict(ChainMap(*map(dict, part(Bench("cpu", tmp_path)))))

    publication, offload = figures_of(training.publication), figures_of(training.offload)
    assert publication["publish"]["equal"] is True and len(publication["publish"]["gb_per_s"]) == 4
    assert publication["publish"]["bytes"] > 0 and publication["bare copy"]["gb_per_s"]
    assert offload["again"]["equal"] is True and offload["trains_afterwards"] is True


def test_a_run_that_is_too_slow_is_interrupted_before_its_part_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu.bench import Bench
    from gpu.engines import command

    assert 0 < Bench("cpu", tmp_path, 60.0).left_s() < 60.0
    status, said = command(Bench("cpu", tmp_path), 60.0, "--version")
    assert status == 0 and said.strip()
    assert command(Bench("cpu", tmp_path), 0.0, "--version")[0] is None


def test_a_part_that_dies_or_hangs_keeps_its_figures_and_says_how_it_ended(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    file.write_text('{"speed": 3}')

    def ended(code: str, limit_s: float = 60.0) -> dict[str, Any]:
        return gpu_smoke.outcome_of([sys.executable, "-c", f"import os, time; {code}"], file, limit_s)

    aborted, raised, hung = ended("os.abort()"), ended("raise ValueError(7)"), ended("time.sleep(99)", 1.0)
    assert aborted["error"].startswith("SIGABRT") and hung["error"] == "exceeded 1 s"
    assert raised["error"] == "exit status 1: ValueError: 7" and "Traceback" in raised["stderr"]
    assert aborted["speed"] == raised["speed"] == hung["speed"] == 3


def test_a_budget_that_is_used_up_skips_parts_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_smoke.run_all(["machine", "repeat"], "cpu", 0.0, None)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"part": name, "skipped": "the budget of 0 s is used up"} for name in ("machine", "repeat")]


def test_every_part_exists() -> None:
    for part in gpu_smoke.PARTS.values():
        module, function = part.function.split(".")
        assert f"def {function}(bench: Bench)" in (BENCHMARKS / "gpu" / f"{module}.py").read_text()
