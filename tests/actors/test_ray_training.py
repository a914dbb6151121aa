"""Short real training runs through Ray: the embedded sampler, the torch trainer, their weights and metrics."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from ray_plans import TRAIN_BATCH, TRAIN_STEPS, check_record, events_of, training
from weight_observers import watched_rollout, watched_trainer

from engine.actors.launch import start
from engine.config.loading import parse_config
from engine.events import CheckpointSaved, GroupGenerated, PublishFailed, SyncFailed, WeightsInstalled
from engine.plans.configured_plan import plan_of
from engine.record import read

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made")


def test_a_training_run_keeps_every_law_and_its_weights_are_the_trainers_own(made: Path) -> None:
    """Weights are sent over torch.distributed; that those of the object store are the trainer's own is shown in
    `test_sync_equality`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_dir = made / "run"
    run_dir.mkdir()
    config = training(made, replicas=1, slots=12, transport="distributed", bucket_mb=1, transport_timeout_s=30.0)
    config["trainer"]["weight_decay"] = 0.5  # weights change in a step whose rewards are all equal, too
    planned = plan_of(parse_config(config), run_dir)
    watched = replace(
        planned,
        make_trainer=partial(watched_trainer, planned.make_trainer, run_dir),
        make_rollout=partial(watched_rollout, planned.make_rollout, run_dir),
    )
    with start(watched) as run:
        last = run.wait()
    assert (last.outcome, last.step, last.version) == ("finished", TRAIN_STEPS, TRAIN_STEPS)
    assert last.staleness_max is not None
    assert last.staleness_max <= 2
    assert last.accuracy_first is not None
    assert last.accuracy is not None
    scheduler = check_record(run_dir)
    assert scheduler.state.training.steps_trained == TRAIN_STEPS
    assert read(run_dir / "schedule").header.config["rollout"]["sync_mode"] == "keep"
    assert events_of(run_dir, WeightsInstalled)
    assert not events_of(run_dir, SyncFailed, PublishFailed)
    published = {path.name.split("-")[1]: path.read_text() for path in run_dir.glob("published-*")}
    installed = {path.name: path.read_text() for path in run_dir.glob("installed-*")}
    assert len(set(published.values())) == TRAIN_STEPS, "every step changes the weights"
    used = {(e.newest_version, e.replica) for e in events_of(run_dir, GroupGenerated) if e.newest_version > 0}
    assert used and used <= {tuple(map(int, name.split("-")[1:])) for name in installed}
    assert all(read_back == published[name.split("-")[1]] for name, read_back in installed.items())
    check_metrics(run_dir)
    assert [e.steps for e in events_of(run_dir, CheckpointSaved)] == [3, 6, 8]
    kept = sorted((run_dir / "checkpoints").iterdir())
    assert [path.name for path in kept] == ["step-000006", "step-000008"]
    AutoModelForCausalLM.from_pretrained(kept[-1])
    AutoTokenizer.from_pretrained(kept[-1])


def check_metrics(run_dir: Path) -> None:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    measured = [(row["version"], row["steps"], row["outcome"]) for row in rows if "validation" in row]
    outcomes = {version: outcome for version, _, outcome in measured}
    assert outcomes.keys() == {0, 4, TRAIN_STEPS}, "each is due; that of version 4 may be superseded by the last"
    assert outcomes[0] == outcomes[TRAIN_STEPS] == "reported"
    assert all(steps == version for version, steps, _ in measured)
    rows = [row for row in rows if "step" in row]
    assert [row["step"] for row in rows] == list(range(TRAIN_STEPS))
    assert all(row["loss"] is not None and row["groups"] == TRAIN_BATCH for row in rows)
