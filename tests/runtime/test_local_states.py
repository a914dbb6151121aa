"""Added states in runs in this process: what generators, trainers and policies see of their work, refusals, resumes."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from engine import policies
from engine.commands import TrainStep
from engine.control.client import tell
from engine.control.requests import Drain, Operation, Stop
from engine.errors import DataFailure, RunFailed
from engine.protocols import Batch, GroupWork, PublishedWeights
from engine.record import read
from engine.record.replayer import replay
from engine.runtime.local import RunResult, SimpleGenerator, SimpleTrainer, response, run
from engine.states.limits import Limits
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup


class Odd:
    def enters(self, view: Any, group: Any) -> bool:
        return bool(group.id % 2)


class Fetch(Odd):
    async def work(self, group: TrajectoryGroup) -> TrajectoryGroup:
        if group.prompt.row == 3:
            raise DataFailure("there is no page 3")
        fields = {"page": group.prompt.fields.get("page", "") + str(group.prompt.row)}
        group.prompt = replace(group.prompt, text=f"{group.prompt.text}!", fields=fields)
        return group


class Seen:
    """What a state, and a filter after it, see of each group."""

    groups: ClassVar[dict[int, list[Any]]] = {}

    def enters(self, view: Any, group: Any) -> bool:
        self.note(group)
        return False

    def note(self, group: Any) -> None:
        seen = [group.source, dict(group.fields), group.lengths, dict(group.rewards)]
        self.groups.setdefault(group.id, []).append(seen)


policies.add_state(
    machine="group", state="seeing-first", phase="waiting", between=("queued", "generating"), policy=Seen, concurrency=1
)
policies.add_state(
    machine="group", state="seeing", phase="parked", between=("generated", "batched"), policy=Seen, concurrency=1
)


@policies.register("filter", "seeing")
class SeeingFilter(Seen):
    def keep(self, view: Any, outcome: Any) -> bool:
        self.note(view.group(outcome.group))
        return True


class Named(SimpleGenerator):
    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        both = [response([1] * (2 + index), reward=1.0, version=version) for index in range(work.samples)]
        for index, one in enumerate(both):
            one.reward_parts = {"math": float(index)} | ({"style": 0.5} if index else {})
        return both


class Nothing(SimpleTrainer):
    def train(self, batch: Batch) -> dict[str, float]:
        return {}

    def weights(self) -> None: ...


def test_states_and_filters_see_source_columns_lengths_and_rewards_by_name() -> None:
    Seen.groups.clear()
    long, odd = "x" * 201, object()
    fields = {"level": 3, "tag": "easy", "hard": True, "long": long, "odd": odd, "other": 1}
    prompts = [Prompt(row=row, text="?", fields=fields, source="algebra") for row in range(4)]
    limits = Limits(
        train_batch_size=2, max_staleness_steps=0, max_concurrent_groups=2,
        added_states=policies.added_states(("seeing-first", "seeing")),
    )  # fmt: skip
    result = run(
        generators=[Named()], trainer=Nothing(), prompts=prompts, limits=limits, samples=2,
        policies={"filter": "seeing"}, policy_fields=["level", "tag", "hard", "long", "odd", "absent"],
    )  # fmt: skip
    known = ["algebra", {"level": 3, "tag": "easy", "hard": True}]
    generated = [*known, (2, 3), {"math": 0.5, "style": 0.5}]
    assert Seen.groups == {group: [[*known, (), {}], generated, generated] for group in range(4)}
    assert result.record is not None and replay(read(result.record)).identical


for state in ("fetching-page", "fetching-more"):
    policies.add_state(
        machine="group", state=state, phase="waiting", between=("queued", "generating"), policy=Fetch, concurrency=2
    )
STATES = policies.added_states(("fetching-page", "fetching-more"))


class Reader(SimpleGenerator):
    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        marks = 2 * (work.group % 2)
        assert work.prompt.text == f"question {work.prompt.row}" + "!" * marks
        assert work.prompt.fields.get("page", "") == str(work.prompt.row) * marks
        return [response([1, 2], reward=float(index), version=version) for index in range(work.samples)]


class Pages(SimpleTrainer):
    def __init__(self) -> None:
        self.pages: list[str] = []

    def train(self, batch: Batch) -> dict[str, float]:
        self.pages += [group.prompt.fields.get("page", "") for group in batch.groups]
        return {}

    def weights(self) -> int:
        return len(self.pages)

    def save(self, directory: str, step: int) -> None:
        Path(directory, "pages").write_text(" ".join(self.pages))

    def load(self, directory: str) -> None:
        self.pages = Path(directory, "pages").read_text().split(" ")


def fetched(directory: Path, trainer: Pages, **options: Any) -> RunResult:
    limits = Limits(
        train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, added_states=STATES, checkpoint_every=1,
        max_steps=options.pop("steps"),
    )  # fmt: skip
    prompts = [f"question {row}" for row in range(20)]
    return run(generators=lambda replica: Reader(), trainer=trainer, prompts=prompts, limits=limits, samples=2,
               run_dir=directory, **options)  # fmt: skip


def test_generators_and_trainers_see_the_changed_prompt_even_after_a_resume(tmp_path: Path) -> None:
    first = Pages()
    assert fetched(tmp_path, first, steps=4).outcome == "finished"
    last = Pages()
    result = fetched(tmp_path, last, steps=None, resume=True)
    assert result.groups == {"consumed": 19, "filtered": 0, "dropped": 0, "failed": 1}
    assert sorted(last.pages) == sorted(f"{row}{row}" if row % 2 else "" for row in range(20) if row != 3)
    assert replay(read(tmp_path / "schedule")).identical


class Guard:
    """Refuses what `refused` names."""

    refused: ClassVar[str] = ""
    passed: ClassVar[list[tuple[str, Any]]] = []

    def enters(self, view: Any, step: Any) -> bool:
        return True

    async def work(self, given: Batch | PublishedWeights) -> str | None:
        found = ("batch", given.step) if isinstance(given, Batch) else ("weights", given.weights)
        if found[0] == self.refused:
            return "it is closed"
        Guard.passed.append(found)
        return None


policies.add_state(machine="step", state="guarding-batches", between=("scoring", "training"), policy=Guard)
policies.add_state(machine="step", state="guarding-weights", between=("publishing", "finished"), policy=Guard)
GUARDS = policies.added_states(("guarding-batches", "guarding-weights"))


@pytest.mark.parametrize(
    ("refused", "subject"),
    [("batch", "batches refused the batch of train step 0"), ("weights", "weights refused weights version 1, after 1")],
)
def test_a_resume_inspects_a_refused_batch_or_version_again(tmp_path: Path, refused: str, subject: str) -> None:
    sampled: list[int] = []

    class Versions(SimpleGenerator):
        async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
            sampled.append(version)
            return [response([1, 2], reward=float(index), version=version) for index in range(work.samples)]

    def guarded(**options: Any) -> RunResult:
        limits = Limits(train_batch_size=2, max_staleness_steps=0, max_concurrent_groups=2, added_states=GUARDS,
                        checkpoint_every=1, max_steps=2)  # fmt: skip
        return run(generators=lambda replica: Versions(), trainer=Pages(), prompts=["?"] * 8, limits=limits, samples=2,
                   run_dir=tmp_path, **options)  # fmt: skip

    Guard.refused, Guard.passed = refused, []
    with pytest.raises(RunFailed, match=f"state guarding-{subject}.*: it is closed"):
        guarded()
    assert set(sampled) == {0}
    Guard.refused, Guard.passed = "", []
    assert guarded(resume=True).outcome == "finished"
    first = [("weights", 0), ("batch", 0)] if refused == "batch" else []
    assert Guard.passed == [*first, ("weights", 2), ("batch", 1), ("weights", 4)]
    assert replay(read(tmp_path / "schedule")).identical


class Halting:
    """The third work asks the run to end; if the run stops at once, this work never ends."""

    ending: ClassVar[Operation | None] = None
    run_dir: ClassVar[Path]
    began: ClassVar[list[Any]] = []

    def enters(self, view: Any, subject: Any) -> bool:
        return True

    async def work(self, given: TrajectoryGroup | Batch | PublishedWeights) -> Any:
        subject = given.group if isinstance(given, TrajectoryGroup) else getattr(given, "step", given)
        Halting.began.append(subject)
        ending = Halting.ending
        if ending is not None and len(Halting.began) == 3:
            Halting.ending = None
            await asyncio.to_thread(tell, Halting.run_dir, "the run", ending)
            if isinstance(ending, Stop):
                await asyncio.Event().wait()
        return given if isinstance(given, TrajectoryGroup) else None


PLACES: dict[str, dict[str, Any]] = {
    "halting-first": {"machine": "group", "phase": "waiting", "between": ("queued", "generating")},
    "halting-last": {"machine": "group", "phase": "parked", "between": ("generated", "batched")},
    "halting-batches": {"machine": "step", "between": ("scoring", "training")},
    "halting-weights": {"machine": "step", "between": ("publishing", "finished")},
}
for state, place in PLACES.items():
    policies.add_state(state=state, policy=Halting, **place)


@pytest.mark.parametrize("ending", [Stop(reason="now"), Drain(reason="soon")], ids=["stop", "drain"])
@pytest.mark.parametrize("state", PLACES)
def test_a_run_that_ends_while_a_state_works_continues_with_nothing_done_twice(
    tmp_path: Path, state: str, ending: Operation
) -> None:
    def halted(**options: Any) -> RunResult:
        limits = Limits(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, checkpoint_every=1,
                        added_states=policies.added_states((state,)))  # fmt: skip
        return run(generators=lambda replica: Named(), trainer=Pages(), prompts=["?"] * 12, limits=limits, samples=2,
                   run_dir=tmp_path, control_port=0, **options)  # fmt: skip

    Halting.ending, Halting.run_dir, Halting.began = ending, tmp_path, []
    assert halted().outcome == "stopped" and Halting.ending is None
    assert halted(resume=True).groups == {"consumed": 12, "filtered": 0, "dropped": 0, "failed": 0}
    record = read(tmp_path / "schedule")
    assert replay(record).identical
    orders = [command for tick in record.ticks() for command in tick.commands if isinstance(command, TrainStep)]
    batches = {order.step: order.groups for order in orders}
    assert sorted(group for groups in batches.values() for group in groups) == [*range(12)]
    repeated = [subject for subject, times in Counter(map(str, Halting.began)).items() if times > 1]
    assert len(repeated) == isinstance(ending, Stop), "only what the stop interrupted"
