"""What goes wrong in the systems that the presets are named after, and must not here.

Tested elsewhere: the same order every epoch (tasks/test_dataset), the tail of the data and what is parked when it ends,
a filter that keeps its places, a checkpoint short of the last step, a train step and a publication that fail
(core/test_scenarios, core/test_decisions); a validation that others wait for (core/test_validation); validation prompts
without a reward (actors/test_ray_validation); data that begin anew after a resume (core/test_recovery); a rollout that
raises, a crash reported as success, a scheduler or store that dies (actors/test_ray_runs, local/test_local_runs);
checkpoints half written (training/test_trainer_checkpoints).
"""

import json
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.commands import DiscardGroups, MeasureRows, StageWeights, StartGroup, TrainStep
from engine.events import GroupAborted, ReplicaPaused, WeightsInstalled
from engine.record.frames import Header
from engine.record.recorder import MemoryRecorder
from engine.runtime.prompt_sources import CountedPrompts
from engine.simulation.world import Setting
from engine.states.limits import Limits, Pool, ValidationLimits
from engine.tasks.dataset import Dataset, PromptSource
from tests.core.scripted import Scripted
from tests.judge.judged_world import JudgedWorld
from tests.modes.course import Course, course_of


class Interrupted(Scripted):
    """B = 1 on one replica of two slots: group 0 is interrupted by every new version, another one fills each step."""

    def __init__(self, staleness: int) -> None:
        figures = {"train_batch_size": 1, "max_staleness_steps": staleness, "max_concurrent_groups": 2}
        super().__init__(slots=2, sync_mode="abort", **figures)

    def step(self) -> None:
        self.finish(next(id for id in self.running() if id != 0))
        self.train()
        self.publish()
        self.install(pause=False)
        replica = self.state.replicas.by_id[0]
        for group in [self.state.groups.live[id] for id in self.state.replicas.running(replica)]:
            oldest = replica.version if group.oldest_version < 0 else group.oldest_version
            self.tell(
                GroupAborted(
                    group=group.id, attempt=group.attempt, replica=0, life=1, tokens=group.tokens + 5,
                    oldest_version=oldest, newest_version=replica.version,
                )
            )  # fmt: skip
        place = {"replica": 0, "life": 1, "attempt": replica.sync_attempt}
        self.tell(ReplicaPaused(**place))
        self.tell(WeightsInstalled(**place, version=self.state.training.latest_version))


def test_a_partial_group_is_as_old_as_its_oldest_token_whatever_it_went_on_under() -> None:
    """The first version of verl-recipe's partial rollout (pull request 58) compares with a stamp that is set once."""
    run = Interrupted(staleness=3)
    run.step()
    run.step()
    assert run.state.groups.live[0].resumes_from == 1, "it has tokens of versions 0 and 1, and continues under 2"
    run.finish(0)
    assert run.ordered(TrainStep)[-1].groups == (0,)
    assert run.ordered(TrainStep)[-1].staleness == (2,)


def test_a_group_that_spans_ten_versions_and_more_is_trained_on() -> None:
    """The first version of verl-recipe's partial rollout (pull request 58) drops such prompts without a word."""
    run = Interrupted(staleness=12)
    for _ in range(11):
        run.step()
    run.finish(0)
    assert (run.ordered(TrainStep)[-1].groups, run.ordered(TrainStep)[-1].staleness) == ((0,), (11,))
    assert run.state.groups.ledger.released == 0


def test_the_last_step_is_validated_though_no_version_was_due() -> None:
    """dots.rl never validates the last. Here 4 steps at k = 3 make versions of 3 and 4 steps."""
    validation = ValidationLimits(rows=1, at_start=False, every=0, at_end=True)
    run = Scripted(
        train_batch_size=1, max_staleness_steps=2, max_concurrent_groups=1, sync_every=3, max_steps=4,
        validation=validation,
    )  # fmt: skip
    for _ in range(3):
        run.finish(*run.running())
        run.train()
    run.publish()
    run.install()
    run.train_on(*run.running())
    assert run.state.ending.outcome is None, "the run waits for it"
    run.install()
    assert [(order.version, order.count) for order in run.ordered(MeasureRows)] == [(2, 1)]


def test_a_slow_trainer_makes_nobody_drop_what_is_ready() -> None:
    """verl's fully asynchronous queue drops its oldest when it is full; here it cannot be more than full."""
    run = Scripted(train_batch_size=2, max_staleness_steps=2, max_concurrent_groups=6)
    while run.running():
        run.finish(*run.running())
    assert (run.state.groups.ledger.ready, run.state.groups.ledger.batched, run.state.groups.ledger.released) == (
        4,
        2,
        0,
    )
    assert not run.ordered(DiscardGroups)
    assert len(run.ordered(StartGroup)) == 6, "nothing more is started, and nothing waits in vain"


def test_an_epoch_ends_without_a_barrier_and_without_a_short_step(tmp_path: Path) -> None:
    """SkyRL drains at the end of an epoch and leaves its tail untrained. 6 rows in 3 epochs make 4 whole steps of 4 and
    one of 2, the second of them across the first border; each epoch is another order of all rows."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(6)))
    source = PromptSource(Dataset.load(file, prompt_field="prompt"), seed=1, epochs=3)
    prompts = CountedPrompts(source.total, source.prompt)
    run = Scripted(prompts=source.total or 0, train_batch_size=4, max_staleness_steps=1, max_concurrent_groups=8)
    assert {command.group for command in run.ordered(StartGroup)} == set(range(8)), "two epochs run beside each other"
    while run.state.ending.outcome is None:
        run.train_on(*run.running())
        run.install()
    sizes = [len(order.groups) for order in run.ordered(TrainStep)]
    assert sizes == [4, 4, 4, 4, 2]
    orders = [[prompts.prompt(epoch * 6 + place).text for place in range(6)] for epoch in range(3)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_no_replica_waits_for_another_to_take_new_weights() -> None:
    """verl and SkyRL stop every replica for a sync: the slowest has all of them wait."""
    run = Scripted(replicas=2, slots=1, train_batch_size=1, max_staleness_steps=1, max_concurrent_groups=2)
    run.train_on(0)
    assert {order.replica for order in run.ordered(StageWeights)} == {0, 1}
    assert [(order.group, order.replica) for order in run.ordered(StartGroup)] == [(0, 0), (1, 1)], "no third place"
    run.install(0)
    assert [(order.group, order.replica) for order in run.ordered(StartGroup)][2:] == [(2, 0)], "the other runs on"


@given(seed=st.integers(0, 2**31), every=st.integers(1, 4), prompts=st.integers(1, 40), batch=st.integers(1, 5))
@settings(max_examples=20)
def test_the_end_of_the_data_ends_the_run_with_everything_trained(
    seed: int, every: int, prompts: int, batch: int
) -> None:
    """dots.rl's end signal leads back to waiting; verl-recipe's partial rollout abandons what runs at the end."""
    limits = Limits(
        train_batch_size=batch, max_staleness_steps=every, max_concurrent_groups=batch, sync_every=every,
        sync_mode="abort", scoring_tasks=("ref_logprobs", "old_logprobs"),
        validation=ValidationLimits(rows=4, every=2),
    )  # fmt: skip
    recorder = MemoryRecorder(Header(run="end", limits=limits.to_plain()))
    outcome = JudgedWorld(Setting(limits=limits, prompts=prompts, seed=seed), recorder=recorder).run()
    assert outcome.outcome == "finished"
    course = course_of(recorder)
    assert sorted(group for taken in course.batches for group in taken) == list(range(prompts))
    assert max(course.steps_in.values()) == len(course.steps), "the last step is published"


LAYOUTS = {
    "two halves": (("old_logprobs", "ref_logprobs", "train"), ("rollout",)),
    "separate reference": (("old_logprobs", "train"), ("ref_logprobs",), ("rollout",)),
    "all separate": (("old_logprobs",), ("train",), ("ref_logprobs",), ("rollout",)),
}
"""dots.rl's task groups."""


def scored_in(layout: Sequence[Sequence[str]], seed: int, train_s: float, steps: int = 6) -> Course:
    """A run whose every batch is scored by both, in a world."""
    limits = Limits(
        train_batch_size=2, max_staleness_steps=2, max_concurrent_groups=4, max_steps=steps,
        scoring_tasks=("ref_logprobs", "old_logprobs"),
        pools=tuple(Pool(tasks=tuple(tasks), replicas=(0, 1) if "rollout" in tasks else ()) for tasks in layout),
    )  # fmt: skip
    recorder = MemoryRecorder(Header(run="scored", limits=limits.to_plain()))
    world = JudgedWorld(Setting(limits=limits, prompts=100, seed=seed, train_s=train_s), recorder=recorder)
    assert world.run().outcome == "finished"
    return course_of(recorder)


@given(layout=st.sampled_from(sorted(LAYOUTS)), seed=st.integers(0, 2**31), train_s=st.sampled_from([0.5, 10.0, 100.0]))
@settings(max_examples=30)
def test_a_scorer_apart_from_the_trainer_scores_every_step(layout: str, seed: int, train_s: float) -> None:
    """dots.rl stops at its second step where log-probs have nodes of their own. They wait for the weights of the step
    before, and everything is scored before its step is trained."""
    course = scored_in(LAYOUTS[layout], seed, train_s)
    assert len(course.steps) == 6
    for step in course.steps:
        scored = {task: (ordered, done) for ordered, done, of, task in course.scored if of == step}
        assert scored.keys() == {"ref_logprobs", "old_logprobs"}
        assert all(done <= course.training(step).cause for _, done in scored.values())
        assert step == 0 or scored["old_logprobs"][0] >= course.training(step - 1).ended_by
