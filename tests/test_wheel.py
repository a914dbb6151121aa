"""What `pip install step-engine` gives without any extra: the wheel in an environment of its own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from engine.record.reader import read

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.xdist_group("wheel")  # two builds in the same clone would disturb each other
GOLDEN = ROOT / "tests" / "record" / "golden" / "v1" / "keep"


def call(*command: object, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run a program that knows nothing of this environment."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run([*map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True, check=False)


def done(*command: object, cwd: Path) -> str:
    result = call(*command, cwd=cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def needed(distribution: Distribution) -> dict[str, Distribution]:
    """What a distribution depends on without extras, and so on, as this environment has it."""
    found: dict[str, Distribution] = {}
    left = [distribution]
    while left:
        for text in left.pop().requires or ():
            requirement = Requirement(text)
            if requirement.name not in found and (not requirement.marker or requirement.marker.evaluate({"extra": ""})):
                found[requirement.name] = Distribution.from_name(requirement.name)
                assert found[requirement.name].version in requirement.specifier
                left.append(found[requirement.name])
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that holds the wheel and what it depends on, and nothing else. Its packages are links
    to those of this environment."""
    place = tmp_path_factory.mktemp("wheel")
    pip: Sequence[object] = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    done(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", place, ROOT, cwd=place)
    done(sys.executable, "-m", "venv", "--without-pip", place / "venv", cwd=place)
    (wheel,) = place.glob("*.whl")
    python = place / "venv" / "bin" / "python"
    done(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=place)
    (packages,) = place.glob("venv/lib/python*/site-packages")
    (own,) = Distribution.discover(name="step-engine", path=[str(packages)])
    for distribution in needed(own).values():
        for name in {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(distribution.locate_file(name))
    return python.parent


def test_the_wheel_alone_schedules_a_users_own_trainer_and_replays_records(bare: Path, tmp_path: Path) -> None:
    assert "finished: 20 train steps" in done(bare / "python", ROOT / "examples" / "embed.py", cwd=tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "schedule").symlink_to(GOLDEN)
    events = len(list(read(GOLDEN).events()))
    assert f"identical: {events} events" in done(bare / "engine", "replay", "run", cwd=tmp_path)
    done(bare / "engine", "init", "mine", "--preset", "sync", cwd=tmp_path)
    assert "ok: B <= K" in done(bare / "engine", "check", "mine/config.yaml", cwd=tmp_path)
    done(bare / "engine", "dashboards", "boards", cwd=tmp_path)
    shipped = {file.relative_to(tmp_path / "boards") for file in (tmp_path / "boards").rglob("*.*") if file.is_file()}
    assert shipped == {
        file.relative_to(ROOT / "dashboards") for file in (ROOT / "dashboards").rglob("*.*")
        if file.suffix in (".yml", ".yaml", ".json") and file.name != "alerts_test.yml"
    }  # fmt: skip
    listed = (
        "from engine.cli.shipped_files import shipped_folder as folder\n"
        "print(*sorted(file.name for file in (folder('configs') / 'workloads').iterdir()))"
    )
    workloads = sorted(file.name for file in (ROOT / "configs" / "workloads").iterdir())
    assert done(bare / "python", "-c", listed, cwd=tmp_path).split() == workloads
    heavy = "import importlib.util as u; print([m for m in ('ray', 'torch', 'transformers') if u.find_spec(m)])"
    assert done(bare / "python", "-c", heavy, cwd=tmp_path).strip() == "[]"


def test_a_command_that_needs_an_extra_names_it_and_makes_nothing(bare: Path, tmp_path: Path) -> None:
    refused = call(bare / "engine", "run", ROOT / "configs" / "quickstart.yaml", cwd=tmp_path)
    assert refused.returncode == 2 and not [*tmp_path.iterdir()]
    (line,) = refused.stderr.strip().splitlines()
    wheel = next(bare.parents[1].glob("*.whl"))
    command = f"{bare / 'python'} -m pip install '{wheel}[ray,train]'"
    assert line == f"engine: this needs the package ray, which is not installed; run `{command}`"
    trained = call(bare / "python", "-c", "import engine; engine.train('m', [{}], print)", cwd=tmp_path)
    (line,) = trained.stderr.strip().splitlines()[-1:]
    assert line == f"ModuleNotFoundError: this needs the package ray, which is not installed; run `{command}`"
    assert not [*tmp_path.iterdir()]


def test_the_wheel_alone_checks_a_configuration_with_data_of_ones_own(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def score(prompt, trajectory): return 1.0\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+2?", "answer": "4"}\n')
    config = "model: {path: some/model}\ndata: {path: rows.jsonl}\nreward: {function: rewards:score}\n"
    (tmp_path / "run.yaml").write_text(config)
    said = done(bare / "engine", "check", "run.yaml", cwd=tmp_path)
    assert "ok: data.path has 1 prompt\n" in said and "ok: reward.function rewards:score can be imported" in said
    assert "note: prompts and reward are not tested: this needs the package transformers" in said
