"""One pool for replicas and trainer over Ray: replicas sleep while it trains, and no group is lost by it."""

from pathlib import Path

import pytest
from ray_plans import Counter, check_record, events_of, plan
from sleepy_generator import Sleepy, check_asleep_at_each_step

from engine.actors.run import start
from engine.events import GroupAborted, StepFailed, SyncFailed
from engine.runtime.plan import Rollout
from engine.states.limits import Limits, Pool

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

STEPS = 4


def test_replicas_sleep_while_the_trainer_has_their_pool(tmp_path: Path) -> None:
    limits = Limits(
        train_batch_size=4, max_staleness_steps=1, max_concurrent_groups=8, max_steps=STEPS,
        pools=(Pool(tasks=("rollout", "train"), replicas=(0, 1)),),
    )  # fmt: skip
    shared = plan(
        tmp_path, limits=limits, make_trainer=Counter,
        make_rollout=lambda replica: Rollout(generator=Sleepy(length=10, free=True, pace_s=0.002, stretch=60)),
    )  # fmt: skip
    with start(shared) as run:
        status = run.wait()
    assert (status.outcome, status.step) == ("finished", STEPS), status.reason
    assert not events_of(tmp_path, StepFailed, SyncFailed)
    assert events_of(tmp_path, GroupAborted), "some group was parked for a step"
    check_asleep_at_each_step(tmp_path / "schedule", STEPS)
    check_record(tmp_path)
