"""`engine tune`: the settings that it finds for workloads whose limits are known, and what it says about bad input."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from engine.cli import main
from engine.config import load_config, parse_config
from engine.config.workload import Workload, workload_of
from engine.simulation import tuning
from engine.simulation.schedule import configured_schedule
from engine.simulation.tuning import RANKS, REPLICAS, SLOTS, S, Search, SearchSpace, Simulator, tune, with_settings
from engine.simulation.what_if import simulate

GENERATION_BOUND: dict[str, Any] = {
    "settings": {
        "scheduler": {"train_batch_size": 2, "samples_per_prompt": 2, "max_staleness_steps": 1},
        "rollout": {"replicas": 1, "slots": 2, "max_tokens": 400},
    },
    "responses": {"tokens": [50, 100, 200], "spread": 0.3},
    "replica": {"step_s": 0.02},
    "trainer": {"step_s": 0.2, "publish_s": 0.02},
    "weights": {"staging_s": 0.02, "installing_s": 0.02},
}
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def few_finalists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests need no close comparison."""
    monkeypatch.setattr(tuning, "FINALISTS", 3)
    monkeypatch.setattr(tuning, "FASTEST", 1)


def found(workload: Workload, *, trials: int = 10, progress: Callable[[int], object] = int, **bounds: Any) -> Search:
    config = workload.config()
    simulator = Simulator(config.model_dump(mode="json"), [workload] * 3)
    return tune(simulator, SearchSpace.of(config, **bounds), trials=trials, progress=progress)


def test_more_slots_are_found_where_generation_is_the_limit() -> None:
    workload = workload_of(GENERATION_BOUND, "test")
    search = found(workload)
    best = search.recommended()
    assert dict(best.settings)[SLOTS] > 2
    assert best.speed.low > 1.5 * search.base.speed.high
    again = found(workload)
    assert (again.front(), again.recommended()) == (search.front(), best), "the same arguments, the same result"


def test_no_settings_break_the_bound_on_staleness() -> None:
    search = found(workload_of(GENERATION_BOUND, "test"), staleness=0)
    assert search.recommended().settings, "the run itself breaks the bound"
    for one in search.front():
        assert dict(one.settings)[S] == one.oldest == 0


def test_ranks_and_replicas_share_the_gpus_as_the_work_needs() -> None:
    """A trainer that takes most of the time gets the GPUs that the second replica does not need."""
    tree = {**GENERATION_BOUND, "trainer": {"step_s": 20.0, "rank_speedup": 1.0}}
    settings = dict(found(workload_of(tree, "test"), gpus=4, trials=8).recommended().settings)
    assert settings[RANKS] > 1 and settings[RANKS] + settings.get(REPLICAS, 1) <= 4


@pytest.mark.parametrize("scheduler", [{}, {"async_ratio": 0.5}, {"policies": {"sync": "rolling"}}])
def test_every_drawn_configuration_is_valid_and_within_the_bounds(scheduler: dict[str, Any]) -> None:
    import optuna

    tree = workload_of(GENERATION_BOUND, "test").config().model_dump(mode="json")
    tree["scheduler"] |= scheduler | {"max_concurrent_groups": 2}
    config = parse_config(tree)
    space = SearchSpace.of(parse_config(tree), gpus=5, over_sample=1.0)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    drawn = {space.drawn(study.ask()) for _ in range(40)}
    assert len(drawn) > 30
    for point in drawn:
        assert space.admits(point)
        changed = parse_config(with_settings(tree, point))
        assert changed.rollout.replicas + changed.trainer.ranks <= 5
        assert (changed.rollout.sync_order == config.rollout.sync_order) or "policies" not in scheduler


def test_an_interrupt_keeps_the_best_so_far() -> None:
    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    search = found(workload_of(GENERATION_BOUND, "test"), progress=interrupt)
    assert search.stopped and search.recommended().speed.median > 0
    assert len(search.searched) == 1


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a run of 12 train steps."""
    directory: Path = tmp_path_factory.mktemp("run") / "recorded"
    directory.mkdir()
    workload = workload_of(GENERATION_BOUND, "test")
    simulate(configured_schedule(workload.config()), workload, seed=3, steps=12, directory=directory)
    return directory


def test_a_run_is_tuned_into_a_configuration_a_table_and_a_picture(
    run_dir: Path, tmp_path: Path, capsys: Capture
) -> None:
    out, picture = tmp_path / "tuned.yaml", tmp_path / "front.svg"
    arguments = ["tune", str(run_dir), "--trials", "4", "--out", str(out), "--picture", str(picture)]
    assert main([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    config = load_config(out)
    assert config.rollout.slots == said["recommended"][SLOTS] > 2
    assert said["calibration"]["recorded"]["groups_per_s"] > 0
    ratios = [one["ratio"] for one in said["front"]]
    assert ratios == sorted(ratios, reverse=True) and ratios[0] > 1
    assert len(ElementTree.parse(picture).findall(".//{*}circle/{*}title")) >= len(ratios)


BAD = {
    "too few GPUs": (["w.yaml", "--gpus", "1"], "--gpus 1 is too few: a replica needs 1"),
    "a bound below async_ratio": (
        ["ratio.yaml", "--staleness", "0"],
        "--staleness 0 is below scheduler.async_ratio",
    ),
    "a file that cannot be written": (["w.yaml", "--out", "none/tuned.yaml"], "--out 'none/tuned.yaml' cannot be"),
    "real runs of a workload": (["w.yaml", "--verify"], "--verify 3 is only for a run"),
    "over-sampling below 0": (["w.yaml", "--most-over-sample", "-1"], "--most-over-sample is -1.0"),
    "a record that is too short": (["short"], "has 2 finished train steps"),
    "nothing": (["none.yaml"], "none.yaml"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    workload = workload_of(GENERATION_BOUND, "test")
    Path("w.yaml").write_text(yaml.safe_dump(GENERATION_BOUND))
    ratio = with_settings(GENERATION_BOUND, [("settings.scheduler.async_ratio", 1.0)])
    Path("ratio.yaml").write_text(yaml.safe_dump(ratio))
    if case == "a record that is too short":
        Path("short").mkdir()
        simulate(configured_schedule(workload.config()), workload, seed=3, steps=2, directory=Path("short"))
    arguments, message = BAD[case]
    assert main(["tune", *arguments, "--trials", "1"]) == 2
    assert message in capsys.readouterr().err
