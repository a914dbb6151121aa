"""`engine whatif` and `engine simulate`: a run's durations, found in its record, and what they predict.

The recorded runs are simulated ones with a known workload, so that what is found can be compared with what is true.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.cli import main
from engine.config.workload import Workload, load_workload, quantile, typical, workload_of
from engine.errors import ConfigError
from engine.inspect.history_reader import read_history
from engine.simulation.calibration import calibrate, window_of
from engine.simulation.schedule import Schedule, configured_schedule, recorded_schedule
from engine.simulation.what_if import calibrated, fates_of, figures_of, predicted, simulate

SETTINGS = {
    "scheduler": {"train_batch_size": 8, "samples_per_prompt": 4, "max_staleness_steps": 1},
    "rollout": {"replicas": 2, "slots": 6, "max_tokens": 400},
}
TRUE: dict[str, Any] = {
    "settings": SETTINGS,
    "responses": {"tokens": [20, 40, 60, 120], "spread": 0.4},
    "replica": {"step_s": 0.02, "response_s": 0.001, "prompt_s": 0.05},
    "trainer": {"step_s": 1.0, "token_s": 0.001, "publish_s": 0.2},
    "weights": {"staging_s": 0.3, "pausing_s": 0.01, "installing_s": 0.1},
}
Capture = pytest.CaptureFixture[str]


def workload(**sections: Any) -> Workload:
    """The true workload with other figures in some sections."""
    return workload_of({**TRUE, **{name: TRUE.get(name, {}) | more for name, more in sections.items()}}, "test")


def schedule(*overrides: tuple[str, str, Any]) -> Schedule:
    tree: dict[str, Any] = {"settings": {name: dict(section) for name, section in SETTINGS.items()}}
    for section, name, value in overrides:
        tree["settings"].setdefault(section, {})[name] = value
    return configured_schedule(workload_of({**TRUE, **tree}, "test").config())


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 24 train steps with the true workload."""
    directory: Path = tmp_path_factory.mktemp("run") / "recorded"
    directory.mkdir()
    simulate(schedule(), workload(), seed=3, steps=24, directory=directory)
    return directory


@pytest.fixture
def engine(capsys: Capture) -> Callable[..., tuple[int, str]]:
    """Run a command: (exit code, output)."""

    def run(*arguments: object) -> tuple[int, str]:
        code = main([str(one) for one in arguments])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


# -- from a record -----------------------------------------------------------------------------------------------------


def test_the_durations_of_a_run_are_found_in_its_record(run_dir: Path) -> None:
    history = read_history(run_dir)
    found = calibrate(window_of(history, 64), recorded_schedule(history))
    replica = found.replica
    speed = replica.step_s + 12 * replica.response_s
    assert speed == pytest.approx(0.02 + 12 * 0.001, rel=0.1), "of 12 running responses, which is usual"
    assert typical(found.trainer.step_s) + 2000 * found.trainer.token_s == pytest.approx(3.0, rel=0.02)
    assert typical(found.responses.tokens) == pytest.approx(typical(TRUE["responses"]["tokens"]), rel=0.1)
    assert found.responses.spread == pytest.approx(0.4, abs=0.1)
    for name, seconds in TRUE["weights"].items():
        assert typical(getattr(found.weights, name)) == pytest.approx(seconds, rel=0.01)
    assert typical(found.trainer.publish_s) == pytest.approx(0.2, rel=0.01)
    assert (found.shared.replica, found.shared.trainer) == (0, 0)


def test_long_responses_weigh_as_much_as_in_the_record() -> None:
    """They are cut short by weight syncs more often than others, and a few of them decide when a step ends."""
    tail = [round(20 * (1 - number / 101) ** (-2 / 3), 1) for number in range(101)]
    aborts = schedule(("rollout", "sync_mode", "abort"), ("rollout", "max_tokens", 4000))
    history = simulate(aborts, workload(responses={"tokens": tail}), seed=3, steps=24).history
    assert sum(attempt.resumed for attempt in history.attempts) > 20
    found = calibrate(window_of(history, 64), recorded_schedule(history)).responses
    lengths = [row.tokens / 4 for row in history.groups if row.state == "consumed"]
    assert typical(found.tokens) == pytest.approx(sum(lengths) / len(lengths), rel=0.02)


CHANGES = [
    ("scheduler", "max_staleness_steps", 0), ("scheduler", "max_staleness_steps", 3), ("rollout", "slots", 3),
    ("rollout", "replicas", 4), ("scheduler", "samples_per_prompt", 8), ("rollout", "sync_mode", "wait"),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: f"{change[1]}={change[2]}")
def test_a_changed_run_takes_as_long_as_predicted(run_dir: Path, change: tuple[str, str, Any]) -> None:
    history, changed = read_history(run_dir), schedule(change)
    found = calibrated(history, recorded_schedule(history), steps=64)
    assert found.simulated.step_s == pytest.approx(found.recorded.step_s, rel=0.05)
    true = simulate(changed, workload(), seed=9, steps=24).history
    measured, expected = figures_of(window_of(true, 64)), found.predict(changed)
    assert expected.step_s == pytest.approx(measured.step_s, rel=0.1)
    assert expected.staleness == pytest.approx(measured.staleness, abs=0.3)


def test_processes_on_common_hardware_slow_each_other_down() -> None:
    shared = workload(shared={"replica": 0.5, "trainer": 0.5})
    alone = [predicted(schedule(), workload(), seed=0, steps=8), predicted(schedule(), shared, seed=0, steps=8)]
    assert alone[1].step_s > 1.1 * alone[0].step_s
    in_turn = [predicted(schedule(("scheduler", "max_staleness_steps", 0)), one, seed=0, steps=8) for one in
               (workload(), shared)]  # fmt: skip
    assert in_turn[1].step_s == pytest.approx(in_turn[0].step_s, rel=0.02), "two replicas alone find enough"


def test_lengths_differ_between_groups_within_them_and_over_steps() -> None:
    grows = workload(responses={"growth": 0.05, "max_tokens": 150})
    dice = simulate(schedule(), grows, seed=0, steps=2).dice
    ends = [[end * dice.token_size for end in dice.ends(group)] for group in range(160)]
    early, late = ends[:32], ends[128:]
    assert max(map(max, ends)) <= 150 and len({round(max(one)) for one in ends}) > 50
    assert sum(map(sum, late)) > 1.5 * sum(map(sum, early)), "after 16 steps of 8 groups"
    assert all(one == sorted(one) and (one[0] < one[-1] or one[0] == 150) for one in ends)


def test_a_seed_gives_the_same_record(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        simulate(schedule(), workload(), seed=5, steps=6, directory=tmp_path / name)
    files = [sorted(path for path in (tmp_path / name / "schedule").iterdir()) for name in ("one", "other")]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def test_a_policy_that_drops_late_groups_loses_the_long_ones_of_the_slow_source() -> None:
    sources = {"code": {"share": 0.25, "tokens": [200, 400]}, "math": {"share": 0.75, "tokens": 20}}
    tree = {**TRUE, "sources": sources}
    drops = schedule(
        ("scheduler", "policies", {"deadline": "drop"}), ("scheduler", "deadline_timeout_s", 1.0),
        ("rollout", "max_tokens", 1000),
    )  # fmt: skip
    fates = fates_of(simulate(drops, workload_of(tree, "test"), seed=0, steps=16))
    assert fates["dropped"].tokens > 2 * fates["trained"].tokens
    assert fates["dropped"].sources["code"] > 0.7 * fates["dropped"].groups


# -- the commands ------------------------------------------------------------------------------------------------------


def test_whatif_shows_calibration_and_change_and_writes_a_record(
    run_dir: Path, engine: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    out = tmp_path / "changed"
    changes = ["--set", "scheduler.max_staleness_steps=3", "--set", "rollout.slots=12"]
    code, said = engine("whatif", run_dir, *changes, "--seeds", 2, "--compare", "--out", out)
    assert code == 0 and "recorded and simulated" in said and "seconds per train step" in said
    assert "faster by a factor of" in said and "extrapolated" in said and "changed: trained" in said
    assert engine("explain", out)[0] == engine("replay", out)[0] == engine("status", out)[0] == 0
    assert read_history(out).limits["max_staleness_steps"] == 3
    assert engine("whatif", run_dir, *changes, "--seeds", 1, "--out", out)[0] == 0, "it replaces a simulated run"
    code, said = engine("whatif", run_dir, "--out", run_dir)
    assert code == 2 and "holds no simulated run" in said


def test_whatif_saves_a_workload_that_simulate_runs(
    run_dir: Path, engine: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    saved = tmp_path / "workload.yaml"
    assert engine("whatif", run_dir, "--save", saved)[0] == 0
    figures = figures_of(window_of(read_history(run_dir), 64))
    code, said = engine("simulate", saved, "--seeds", 1, "--json", "--out", tmp_path / "out")
    assert code == 0 and json.loads(said)["seeds"][0]["step_s"] == pytest.approx(figures.step_s, rel=0.1)
    assert load_workload(saved).settings["rollout"]["slots"] == 6
    code, said = engine("simulate", saved, "--set", "rollout.replicas=1", "--seeds", 1, "--out", tmp_path / "out")
    assert code == 0 and "groups per second" in said


def test_whatif_from_a_step_takes_the_steps_from_there_on(
    run_dir: Path, engine: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    arguments = ["--from-step", 5, "--steps", 8, "--seeds", 1, "--set", "rollout.slots=4", "--out", tmp_path / "out"]
    code, said = engine("whatif", run_dir, *arguments)
    assert code == 0 and "train steps 5 to 12" in said


REFUSED = [
    (["--set", "trainer.learning_rate=1"], "trainer.learning_rate", "does not tell"),
    (["--set", "scheduler.max_staleness_steps=x"], "scheduler.max_staleness_steps", "whole number"),
    (["--set", "run.max_steps=9"], "run.max_steps", "does not tell"),
    (["--from-step", "22"], "needs 3", "train longer"),
    (["--seeds", "0"], "--seeds", "from 1"),
]


@pytest.mark.parametrize(("arguments", "field", "law"), REFUSED, ids=[one[1] for one in REFUSED])
def test_whatif_refuses_what_the_record_does_not_tell(
    run_dir: Path, engine: Callable[..., tuple[int, str]], arguments: Sequence[str], field: str, law: str
) -> None:
    try:
        code, said = engine("whatif", run_dir, *arguments)
    except SystemExit as error:  # from the parser of arguments
        code, said = int(str(error.code)), f"{field} {law}"
    assert code == 2 and field in said and law in said


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"replica": {"step_s": 0}}, "replica.step_s"),
    ({"responses": {"tokens": 0}}, "responses.tokens"),
    ({"responses": {"tokens": [5, 3]}}, "responses.tokens"),
    ({"responses": {"tokens": 500}}, "responses.tokens"),
    (
        {"settings": {"pools": [{"tasks": ["rollout"]}, {"tasks": ["train"]}, {"tasks": ["reward"], "slots": 2}]}},
        "states.rewarding",
    ),
    ({"replica": {"speed": 1}}, "replica.speed"),
    ({"sources": {"a": {"share": 0.5, "tokens": 3}}}, "shares"),
    ({"settings": {"rollout": {"replicas": 0}}}, "rollout.replicas"),
    ({"settings": {"scheduler": {"train_batch_size": -1}}}, "scheduler.train_batch_size"),
]


@pytest.mark.parametrize(("change", "named"), WRONG, ids=[named for _, named in WRONG])
def test_a_wrong_workload_is_refused_by_field(
    engine: Callable[..., tuple[int, str]], tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    path = tmp_path / "workload.yaml"
    tree = {name: {**TRUE.get(name, {}), **change.get(name, {})} for name in {**TRUE, **change}}
    path.write_text(yaml.safe_dump(tree))
    code, said = engine("simulate", path, "--steps", 3, "--out", tmp_path / "out")
    assert code == 2 and named in said


def test_a_configuration_needs_durations(engine: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"model": {"make": "arithmetic"}, **SETTINGS}))
    code, said = engine("simulate", config)
    assert code == 2 and "--workload FILE" in said
    path = tmp_path / "workload.yaml"
    path.write_text(yaml.safe_dump(TRUE))
    done = engine("simulate", config, "--workload", path, "--steps", 4, "--seeds", 1, "--out", tmp_path / "out")
    assert done[0] == 0


def test_a_figure_is_a_number_or_the_numbers_at_equal_shares() -> None:
    assert [quantile([1, 2, 4], share) for share in (0.0, 0.25, 0.5, 1.0)] == [1, 1.5, 2, 4]
    assert (quantile(3.0, 0.7), typical([1, 2, 4])) == (3.0, 2.25)
    with pytest.raises(ConfigError, match="sections"):
        workload_of([], "test")
