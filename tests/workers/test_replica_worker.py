"""`ReplicaWorker`: what it reports, in what order, and what it makes of generators that do wrong."""

import asyncio
import gc
import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from event_loops import played
from msgspec import structs
from token_generator import TokenGenerator
from worker_bench import AT_ONCE, Bench, Distant, plan_of

from engine.commands import (
    AbortGroup,
    InstallWeights,
    ParkGroup,
    PauseReplica,
    ResumeGroup,
    ResumeReplica,
    StageWeights,
    StartGroup,
    TruncateGroup,
)
from engine.errors import DataFailure, EngineError
from engine.events import (
    Event,
    GroupAborted,
    GroupFailed,
    GroupGenerated,
    OrderDone,
    OrderProgressed,
    PrefixStored,
    ProcessUp,
    ReplicaPaused,
    SyncFailed,
    WeightsInstalled,
    WeightsStaged,
)
from engine.ids import NO_VERSION
from engine.protocols import Generated, GroupWork
from engine.runtime.local import SimpleGenerator, response
from engine.runtime.local.local_processes import LocalTrajectories
from engine.runtime.trajectory_service import PackedTrajectories, TrajectoryService
from engine.storage.group_codec import pack_group, unpack_group
from engine.trajectory import Prompt, Span, Trajectory, TrajectoryGroup
from engine.workers.group_reports import all_finite
from engine.workers.replica import ReplicaWorker

PROMPT = Prompt(row=3, text="2 + 2")
WHO = {"replica": 0, "life": 1, "cause": 0}


class Stage(Bench):
    """A replica on stage: its generator, its stores, and what it has emitted."""

    def __init__(
        self,
        generator: Any,
        samples: int = 2,
        prefixes: int = 0,
        trajectories: Any = None,
        limits: Mapping[str, Any] = {},
        **changes: Any,
    ) -> None:
        self.generator = generator
        self.done: list[tuple[int, ...]] = []
        """The orders of each `OrderDone`, which are not among the events."""
        self._numbers: dict[tuple[int, int], int] = {}
        plan = plan_of(generator, limits=limits, samples=samples, prefix_every_tokens=prefixes, slots=4, **changes)
        super().__init__(ReplicaWorker, plan, trajectories)

    def take(self, event: Event) -> None:
        if isinstance(event, OrderDone):
            self.done.append(event.orders)
        else:
            super().take(event)

    def _number(self, group: int, attempt: int) -> int:
        """In the order book, from 100 on; a repeated order has the number of the first."""
        return self._numbers.setdefault((group, attempt), 100 + len(self._numbers))

    def start(self, group: int = 0, attempt: int = 1) -> None:
        number = self._number(group, attempt)
        self.worker.carry_out(StartGroup(group=group, attempt=attempt, number=number, **WHO), PROMPT)

    def resume(self, group: int = 0, attempt: int = 2, truncate: bool = False) -> None:
        number = self._number(group, attempt)
        order = ResumeGroup(group=group, attempt=attempt, truncate=truncate, number=number, **WHO)
        self.worker.carry_out(order, PROMPT)

    def pause(self, mode: str, version: int = 1, attempt: int = 1) -> None:
        self.worker.carry_out(PauseReplica(version=version, mode=mode, attempt=attempt, **WHO))

    async def swap(self, version: int, mode: str = "keep", attempt: int = 1) -> None:
        """Bring a version in, as the scheduler would order it."""
        self.weights.store.put(version, f"weights {version}")
        before = len(self.events)
        self.worker.carry_out(StageWeights(version=version, attempt=attempt, **WHO))
        self.pause(mode, version, attempt)
        self.worker.carry_out(InstallWeights(version=version, attempt=attempt, **WHO))
        self.worker.carry_out(ResumeReplica(attempt=attempt, number=0, **WHO))
        await self.until(before + 3)
        await self.settle()


@played
async def test_a_group_is_kept_before_it_is_reported() -> None:
    class Noting(Stage):
        def take(self, event: Event) -> None:
            kept_at_report.append(self.trajectories.store.stats().groups == 1)
            super().take(event)

    kept_at_report: list[bool] = []
    stage = await Noting(TokenGenerator(length=3)).open()
    stage.worker.join()
    stage.start()
    await stage.settle()
    stage.generator.tick(3)
    joined, generated = await stage.until(2)
    assert joined == ProcessUp(kind="replica", index=0, life=1, slots=4, samples=2, version=0)
    assert generated == GroupGenerated(
        group=0, attempt=1, replica=0, life=1, tokens=6, oldest_version=0, newest_version=0, trainable=2,
        reward_mean=0.5, reward_spread=1.0, longest=3,
    )  # fmt: skip
    assert kept_at_report == [False, True]
    assert stage.worker.running == 0


@played
async def test_a_repeated_order_and_one_for_another_life_change_nothing() -> None:
    stage = await Stage(TokenGenerator(length=2, free=True)).open()
    stage.start()
    stage.start()
    stage.worker.carry_out(structs.replace(StartGroup(group=9, attempt=1, **WHO), life=2), PROMPT)
    await stage.until(1)
    stage.start()
    await stage.settle()
    assert [type(e) for e in stage.events] == [GroupGenerated]
    assert len(stage.generator.works) == 1


@played
async def test_repeated_orders_about_weights_and_cuts_change_nothing_after_their_end() -> None:
    """As a scheduler does that has been built again from its record."""
    stage = await Stage(TokenGenerator(length=6)).open()
    stage.start(0)
    stage.start(1)
    await stage.settle()
    await stage.swap(1)
    for again in (StageWeights(version=1, attempt=1, **WHO), InstallWeights(version=1, attempt=1, **WHO)):
        stage.worker.carry_out(again)
    stage.pause("keep")
    stage.worker.carry_out(ResumeReplica(attempt=1, number=0, **WHO))
    stage.worker.carry_out(TruncateGroup(group=0, attempt=1, **WHO))
    stage.worker.carry_out(TruncateGroup(group=0, attempt=1, **WHO))
    stage.worker.carry_out(AbortGroup(group=1, attempt=1, number=0, **WHO))
    stage.worker.carry_out(AbortGroup(group=1, attempt=1, number=0, **WHO))
    stage.generator.tick(6)
    await stage.settle()
    stage.worker.carry_out(TruncateGroup(group=0, attempt=1, **WHO))
    stage.start(0)
    stage.start(1)
    await stage.settle()
    assert [type(e) for e in stage.events] == [WeightsStaged, ReplicaPaused, WeightsInstalled, GroupGenerated]
    assert stage.worker.running == 0


@played
async def test_abort_reports_all_partials_before_the_pause_and_another_replica_continues() -> None:
    first = await Stage(TokenGenerator(length=6)).open()
    second = await Stage(TokenGenerator(length=6, free=True), trajectories=first.trajectories).open()
    first.start(0)
    first.start(1)
    await first.settle()
    first.generator.tick(4)
    first.pause("abort")
    events = await first.until(3)
    assert [type(e) for e in events] == [GroupAborted, GroupAborted, ReplicaPaused]
    assert {e.group for e in events[:2]} == {0, 1}
    assert all(e.tokens == 8 and (e.oldest_version, e.newest_version) == (0, 0) for e in events[:2])

    second.weights.store.put(1, "weights 1")
    await second.swap(1)
    second.resume(0)
    (generated,) = (await second.until(4))[3:]
    assert (generated.tokens, generated.oldest_version, generated.newest_version) == (12, 0, 1)
    (group,) = await first.trajectories.get([0])
    for trajectory in group.trajectories:
        assert trajectory.token_ids == [0, 1, 2, 3, 4, 5]
        assert trajectory.logprobs == [0.0] * 4 + [-1.0] * 2
        assert trajectory.spans == [Span(0, 4, 0), Span(4, 6, 1)]


@played
async def test_prefixes_are_stored_on_the_way_and_another_replica_goes_on_from_them() -> None:
    first = await Stage(TokenGenerator(length=6), prefixes=2).open()
    second = await Stage(TokenGenerator(length=6, free=True), trajectories=first.trajectories).open()
    first.start()
    await first.settle()
    first.generator.tick(2)
    (stored,) = await first.until(1)
    assert stored == PrefixStored(
        group=0, attempt=1, replica=0, life=1, tokens=4, oldest_version=0, newest_version=0, unfinished=2
    )
    first.generator.tick(1)  # what is not stored dies with the replica
    second.resume()
    (generated,) = await second.until(1)
    assert isinstance(generated, GroupGenerated) and generated.tokens == 12
    (work,) = second.generator.works
    assert [len(t.token_ids) for t in work.partial.trajectories] == [2, 2]
    await first.worker.close()


@played
async def test_a_group_that_has_ended_is_freed_without_a_garbage_collection() -> None:
    """It may be large, and a collection stops the process."""

    class Text(str):
        """Can be referred to weakly."""

    class OneToken(SimpleGenerator):
        async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
            return [response([1], reward=1.0, version=version)]

    gc.disable()
    try:
        stage = await Stage(OneToken(), samples=1, prefixes=1).open()
        prompt = Prompt(row=0, text=Text("2 + 2"))
        text = weakref.ref(prompt.text)
        stage.worker.carry_out(StartGroup(group=0, attempt=1, number=0, **WHO), prompt)
        del prompt
        await stage.until(1)
        await stage.trajectories.discard([0])
        await stage.settle()
        assert text() is None
    finally:
        gc.enable()


@played
async def test_groups_that_progress_are_reported_together_and_only_while_they_run() -> None:
    class Progresses(TokenGenerator):
        def __init__(self) -> None:
            super().__init__(length=2, free=True)
            self.works: list[GroupWork] = []
            self.leave = asyncio.Event()

        async def generate(self, work: GroupWork) -> Generated:
            self.works.append(work)
            await self.leave.wait()
            return await super().generate(work)

    stage = await Stage(generator := Progresses(), limits={"timeouts": AT_ONCE}).open()
    stage.worker.join()
    stage.start(0)
    stage.start(1)
    await stage.settle()
    for work in (*generator.works, *generator.works):
        work.progress()
    _, *reported = await stage.until(3)
    assert reported == [OrderProgressed(order=100), OrderProgressed(order=101)]
    generator.leave.set()
    await stage.until(5)
    generator.works[0].progress()
    await stage.settle()
    assert len(stage.events) == 5, "the group has ended"


class Ends(TokenGenerator):
    """Groups of which the test says how many trajectories have ended."""

    async def generate(self, work: GroupWork) -> Generated:
        self.works.append(work)
        await asyncio.Event().wait()
        raise AssertionError


@played
async def test_ended_trajectories_are_reported_once_they_make_room_for_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.workers.replica.FINISHED_S", 0.0)
    stage = await Stage(generator := Ends(), samples=4).open()
    stage.worker.join()
    for group in range(3):
        stage.start(group)
    await stage.settle()
    first, second, third = generator.works

    async def reported() -> list[tuple[int, int]]:
        await stage.settle()
        news = [(event.order - 100, event.finished) for event in stage.events if isinstance(event, OrderProgressed)]
        stage.events.clear()
        return news

    first.finished(2)
    second.finished(1)
    first.finished(1)
    assert not await reported(), "three of four, and an older count"
    third.finished(1)
    assert await reported() == [(0, 2), (1, 1), (2, 1)]
    third.finished(4)
    assert await reported() == [(2, 4)], "all of its own: it waits for its rewards"
    second.finished(2)
    assert await reported() == [(1, 2)]
    stage.worker.carry_out(AbortGroup(group=2, attempt=1, number=1, **WHO))
    await stage.settle()
    third.finished(4)
    assert not await reported(), "the scheduler has given it up"
    first.finished(3)
    second.finished(3)
    assert not await reported(), "6 of 8: as many groups as the 4 reported"
    first.finished(4)
    assert await reported() == [(0, 4), (1, 3)]
    second.finished(4)
    assert await reported() == [(1, 4)]
    for odd in (5, -1, 2.0, "2", True, None):
        with pytest.raises(EngineError, match=r"finished\(.*\) of group 0: give a whole number from 0 to 4, how many"):
            first.finished(odd)
    await stage.worker.close()


@played
async def test_a_generator_may_report_from_any_thread_and_in_numbers_of_numpy() -> None:
    stage = await Stage(TokenGenerator(length=4), prefixes=2, limits={"timeouts": AT_ONCE}).open()
    stage.start()
    await stage.settle()
    (work,) = stage.generator.works
    await asyncio.to_thread(work.finished, numpy.int64(2))
    (ended,) = await stage.until(1)
    assert isinstance(ended, OrderProgressed) and type(ended.finished) is int and ended.finished == 2
    kept = response([1, 2], reward=0.0, version=numpy.int64(0))  # type: ignore[arg-type]
    prefix = TrajectoryGroup(group=numpy.int64(0), prompt=PROMPT, trajectories=[kept])  # type: ignore[arg-type]
    assert work.save is not None
    await asyncio.to_thread(work.save, prefix)
    *_, stored = await stage.until(2)
    assert isinstance(stored, PrefixStored) and stored.tokens == 2
    assert {type(number) for number in (stored.group, stored.oldest_version)} == {int}
    await asyncio.to_thread(work.progress)
    *_, progressed = await stage.until(3)
    assert isinstance(progressed, OrderProgressed)
    with pytest.raises(EngineError, match=r"finished\(3\) of group 0: "):
        await asyncio.to_thread(work.finished, 3)
    await stage.worker.close()


@played
async def test_a_saved_prefix_writes_only_the_new_tokens(tmp_path: Path) -> None:
    service = TrajectoryService(tmp_path)
    store = PackedTrajectories(service, lambda process: nullcontext())
    stage = await Stage(TokenGenerator(length=2000), prefixes=100, trajectories=store).open()
    stage.start()
    await stage.settle()
    for saved in range(1, 20):
        stage.generator.tick(100)
        await stage.until(saved)
    packed = await service.partial(0)
    assert packed is not None
    group = unpack_group(packed)
    assert group.tokens == 2 * 1900
    assert (await service.stats()).disk_bytes < 1.5 * len(pack_group(group))
    await stage.worker.close()
    await service.close()


@played
async def test_while_the_store_is_busy_only_the_newest_prefix_waits_and_the_end_comes_last() -> None:
    stage = await Stage(TokenGenerator(length=5), prefixes=1).open()
    gate, puts = asyncio.Event(), []
    put = stage.trajectories.put

    async def slow(group: TrajectoryGroup, attempt: int, **others: Any) -> None:
        puts.append(group.tokens)
        await gate.wait()
        await put(group, attempt)

    stage.trajectories.put = slow  # type: ignore[method-assign]
    stage.start()
    await stage.settle()
    for _ in range(4):
        stage.generator.tick(1)
        await stage.settle()
    assert puts == [2]
    stage.generator.tick(1)
    await stage.settle()
    gate.set()
    *stored, generated = await stage.until(2)
    assert puts == [2, 10], "what it had on the way is not worth storing once it has ended"
    assert [type(event) for event in stored] == [PrefixStored] and isinstance(generated, GroupGenerated)


@played
async def test_a_prefix_of_an_attempt_nobody_wants_is_not_left_in_the_store() -> None:
    stage = await Stage(TokenGenerator(length=5), prefixes=1).open()
    gate = asyncio.Event()
    put = stage.trajectories.put

    async def slow(group: TrajectoryGroup, attempt: int, **others: Any) -> None:
        await gate.wait()
        await put(group, attempt)

    stage.trajectories.put = slow  # type: ignore[method-assign]
    stage.start()
    await stage.settle()
    stage.generator.tick(1)
    await stage.settle()
    stage.worker.carry_out(AbortGroup(group=0, attempt=1, number=0, **WHO))
    await stage.settle()
    gate.set()
    await stage.settle()
    assert stage.events == [] and stage.trajectories.store.stats().groups == 0


@played
async def test_a_partial_newer_than_the_replica_is_given_back_for_one_that_is_as_new() -> None:
    ahead = await Stage(TokenGenerator(length=6), prefixes=2).open()
    behind = await Stage(TokenGenerator(length=6, free=True), trajectories=ahead.trajectories).open()
    await ahead.swap(1)
    ahead.start()
    await ahead.settle()
    ahead.generator.tick(2)
    await ahead.until(4)
    behind.resume()
    (event,) = await behind.until(1)
    assert event == GroupAborted(
        group=0, attempt=2, replica=0, life=1, tokens=4, oldest_version=1, newest_version=1, unfinished=2
    )
    assert behind.generator.works == []
    await ahead.worker.close()


@played
async def test_a_malformed_prefix_is_not_stored_and_costs_nothing() -> None:
    stage = await Stage(TokenGenerator(length=4), prefixes=2).open()
    stage.start()
    await stage.settle()
    (work,) = stage.generator.works
    wrong = TrajectoryGroup(group=0, prompt=PROMPT, trajectories=[Trajectory(token_ids=[1], logprobs=[-1.0])])
    work.save(wrong)
    await stage.settle()
    assert stage.events == [] and stage.trajectories.store.stats().groups == 0
    stage.generator.tick(4)
    *_, last = await stage.until(2)
    assert isinstance(last, GroupGenerated) and not stage.worker.broken


@played
async def test_a_failed_resume_leaves_the_partial_as_it_was() -> None:
    class Spoiler(TokenGenerator):
        async def generate(self, work: GroupWork) -> Generated:
            if work.partial is not None and work.attempt == 2:
                work.partial.trajectories[0].token_ids.append(99)
                raise RuntimeError("out of memory")
            return await super().generate(work)

    stage = await Stage(Spoiler(length=3)).open()
    stage.start()
    await stage.settle()
    stage.generator.tick(2)
    stage.pause("abort")
    await stage.until(2)
    stage.worker.carry_out(ResumeReplica(attempt=1, number=0, **WHO))
    stage.resume(attempt=2)
    assert (await stage.until(3))[2].cause == "infrastructure"
    stage.resume(attempt=3)
    await stage.settle()
    stage.generator.tick(1)
    assert (await stage.until(4))[3].tokens == 6


@played
async def test_wait_lets_groups_end_before_the_pause_and_keep_freezes_them() -> None:
    stage = await Stage(TokenGenerator(length=3)).open()
    stage.start()
    await stage.settle()
    stage.pause("wait")
    await stage.settle()
    assert stage.events == []
    stage.generator.tick(3)
    assert [type(e) for e in await stage.until(2)] == [GroupGenerated, ReplicaPaused]

    stage = await Stage(TokenGenerator(length=4)).open()
    stage.start()
    await stage.settle()
    stage.generator.tick(2)
    await stage.swap(1, "keep")
    assert [type(e) for e in stage.events] == [WeightsStaged, ReplicaPaused, WeightsInstalled]
    assert stage.generator.calls == ["stage 1", "pause keep", "install 1", "resume"]
    stage.generator.tick(2)
    (generated,) = (await stage.until(4))[3:]
    assert (generated.oldest_version, generated.newest_version, generated.tokens) == (0, 1, 8)


@played
async def test_a_group_that_comes_during_an_abort_is_given_back_unbegun() -> None:
    stage = await Stage(TokenGenerator(length=3, free=True)).open()
    stage.pause("abort")
    stage.start(5)
    await stage.settle()
    events = await stage.until(2)
    assert {type(e) for e in events} == {GroupAborted, ReplicaPaused}
    (aborted,) = (e for e in events if isinstance(e, GroupAborted))
    assert (aborted.tokens, aborted.oldest_version) == (0, NO_VERSION)
    assert stage.generator.works == []


@played
async def test_truncate_finishes_a_group_with_what_it_has() -> None:
    stage = await Stage(TokenGenerator(length=9)).open()
    stage.start()
    await stage.settle()
    stage.generator.tick(4)
    stage.worker.carry_out(TruncateGroup(group=0, attempt=1, **WHO))
    (generated,) = await stage.until(1)
    assert generated.tokens == 8
    (group,) = await stage.trajectories.get([0])
    assert [t.finish_reason for t in group.trajectories] == ["truncated", "truncated"]

    stage.resume(group=0, attempt=2, truncate=True)
    assert isinstance((await stage.until(2))[1], GroupGenerated)
    assert stage.generator.works[-1].truncate


@played
async def test_an_aborted_group_is_never_heard_of_again() -> None:
    stage = await Stage(TokenGenerator(length=3)).open()
    stage.start(0)
    stage.start(1)
    await stage.settle()
    stage.worker.carry_out(AbortGroup(group=0, attempt=1, number=0, **WHO))
    await stage.settle()
    stage.generator.tick(3)
    await stage.until(1)
    await stage.settle()
    assert [e.group for e in stage.events] == [1]
    assert stage.trajectories.store.stats().groups == 1
    # It ended while the order was on its way: what it left is forgotten.
    stage.worker.carry_out(AbortGroup(group=1, attempt=1, number=0, **WHO))
    await stage.settle()
    assert stage.trajectories.store.stats().groups == 0


@played
async def test_a_group_that_is_aborted_while_it_is_stored_is_not_kept() -> None:
    distant = Distant()
    stage = await Stage(TokenGenerator(length=3, free=True), trajectories=distant).open()
    stage.start(0)
    await stage.settle()
    stage.worker.carry_out(AbortGroup(group=0, attempt=1, number=0, **WHO))
    await stage.settle()
    distant.gate.set()
    await stage.settle()
    assert stage.events == [] and stage.trajectories.store.stats().groups == 0


@played
async def test_a_group_that_is_parked_ends_with_what_it_has_and_the_others_go_on() -> None:
    generator = TokenGenerator()
    stage = await Stage(generator).open()
    stage.start(0)
    stage.start(1)
    await stage.settle()
    generator.tick(2)
    order = ParkGroup(group=0, attempt=1, **WHO)
    stage.worker.carry_out(ParkGroup(group=1, attempt=7, **WHO))
    stage.worker.carry_out(order)
    stage.worker.carry_out(order)
    (parked,) = await stage.until(1)
    assert isinstance(parked, GroupAborted) and (parked.group, parked.tokens, parked.unfinished) == (0, 4, 2)
    assert stage.trajectories.store.partial(0) is not None
    generator.tick(4)
    assert isinstance((await stage.until(2))[1], GroupGenerated)


@played
async def test_a_group_that_its_generator_does_not_give_up_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf(TokenGenerator):
        async def abort(self, groups: Sequence[int]) -> None: ...

    monkeypatch.setattr("engine.workers.replica.PARK_S", 0.0)
    stage = await Stage(Deaf()).open()
    stage.start()
    await stage.settle()
    stage.worker.carry_out(ParkGroup(group=0, attempt=1, **WHO))
    (failed,) = await stage.until(1)
    assert isinstance(failed, GroupFailed) and failed.cause == "infrastructure"


@played
async def test_a_late_abort_of_an_old_attempt_leaves_what_a_newer_one_left_elsewhere() -> None:
    stage = await Stage(TokenGenerator(length=3)).open()
    newer = TrajectoryGroup(group=0, prompt=PROMPT, trajectories=[])
    await stage.trajectories.put(newer, attempt=2)
    stage.worker.carry_out(AbortGroup(group=0, attempt=1, number=0, **WHO))
    await stage.settle()
    assert stage.trajectories.store.partial(0) == newer


@played
async def test_an_attempt_aborted_while_it_is_kept_leaves_what_a_newer_one_left_elsewhere() -> None:
    newer = TrajectoryGroup(group=0, prompt=PROMPT, trajectories=[])

    class Overtaken(LocalTrajectories):
        """A put that takes until the group has been aborted here and done anew on another replica."""

        async def put(self, group: TrajectoryGroup, attempt: int, *, urgent: bool = True) -> None:
            stage.worker._running[0].unwanted = True
            await super().put(newer, attempt=2)
            await super().put(group, attempt)

    stage = await Stage(TokenGenerator(length=2, free=True), trajectories=Overtaken()).open()
    stage.start()
    await stage.settle()
    assert stage.worker.running == 0 and stage.events == []
    assert stage.trajectories.store.partial(0) == newer


@played
async def test_a_new_attempt_waits_for_the_end_of_the_old_one_and_only_it_reports() -> None:
    stage = await Stage(TokenGenerator(length=3)).open()
    stage.start(attempt=1)
    await stage.settle()
    stage.start(attempt=2)
    await stage.settle()
    stage.generator.tick(3)
    await stage.until(1)
    await stage.settle()
    assert [(e.group, e.attempt) for e in stage.events] == [(0, 2)]


@played
async def test_a_stale_put_never_replaces_what_a_later_attempt_left() -> None:
    trajectories = LocalTrajectories()
    late, newer = (TrajectoryGroup(group=0, prompt=PROMPT, trajectories=[good()] * count) for count in (1, 2))

    await trajectories.put(newer, attempt=2)
    await trajectories.put(late, attempt=1)
    assert trajectories.store.partial(0) == newer
    await trajectories.discard([0])
    assert trajectories.store.stats().bytes == 0
    with pytest.raises(EngineError, match=r"does not hold groups \[0\]"):
        await trajectories.get([0])


# -- generators that do wrong ------------------------------------------------------------------------------------------


class Pair:
    """A value that looks like a number and is none, as a tensor of two elements does."""

    def __float__(self) -> float:
        raise RuntimeError("only one element can be converted")


class Leaving:
    """A reward that ends the process if it is read."""

    def __float__(self) -> float:
        raise SystemExit(3)


def test_log_probs_may_be_finite_while_their_sum_is_not() -> None:
    assert all_finite([-1e308, -1e308])
    assert not all_finite([-1e308, -math.inf]) and not all_finite([0.0, "text"])


def good(**changes: Any) -> Trajectory:
    return replace(response([7, 8], reward=1.0, version=0), **changes)


@pytest.mark.parametrize(
    ("returned", "cause", "words"),
    [
        ("nothing", "infrastructure", "must return Generated"),
        ([good()], "infrastructure", "1 trajectories, not the 2 asked for"),
        ([good(), "text"], "infrastructure", "it is a str, not a Trajectory"),
        ([good(), good(logprobs=[0.0])], "infrastructure", "2 token_ids, 1 logprobs and 2 loss_mask"),
        ([good(), good(token_ids=(7, 8))], "infrastructure", "token_ids is a tuple, not a list"),
        ([good(), good(logprobs=[0.0, math.nan])], "infrastructure", "a log-prob is not a finite number"),
        ([good(), good(token_ids=[7, -8])], "infrastructure", "token_ids holds -8; a token id is an int from 0 to"),
        ([good(), good(token_ids=[7, 2**40])], "infrastructure", "token_ids must hold only ints from 0"),
        ([good(), good(token_ids=[7, None])], "infrastructure", "token_ids must hold only ints"),
        ([good(), good(prompt_ids=["a"])], "infrastructure", "prompt_ids must hold only ints"),
        ([good(), good(text=None)], "infrastructure", "text is a NoneType, not a str"),
        ([good(), good(finish_reason=1)], "infrastructure", "finish_reason is a int, not a str"),
        ([good(), good(continues=0)], "infrastructure", "continues is a int, not a bool"),
        ((good(), good()), "infrastructure", "trajectories as a tuple, not as a list"),
        (None, "infrastructure", "trajectories as a NoneType, not as a list"),
        ([good(), good(reward=math.inf)], "data", "its reward is inf, not a finite number"),
        ([good(), good(reward=10**400)], "data", "its reward is 1000"),
        ([good(), good(loss_mask=[1, 2])], "infrastructure", "must hold only 0 and 1"),
        ([good(), good(spans=[Span(0, 1, 0)])], "infrastructure", "spans cover 1 of 2 tokens"),
        ([good(), good(spans=[Span(1, 2, 0)])], "infrastructure", "must start at 0, where the previous span ends"),
        ([good(), good(spans=[Span(0, 2, 5)])], "infrastructure", "have version 5, but it must be 0 to 0"),
        ([good(), good(spans=[(0, 2, 0)])], "infrastructure", "span (0, 2, 0) is a tuple, not a Span"),
        ([good(), good(finish_reason="")], "infrastructure", "it has no finish_reason"),
        ([good(), good(reward=None)], "data", "prompt row 3): it has no reward"),
        ([good(), good(reward=math.nan)], "data", "its reward is nan, not a finite number"),
        ([good(), good(reward="high")], "data", "its reward is 'high' of type str, not a finite number"),
        ([good(), good(reward=Pair())], "data", "of type Pair, not a finite number"),
        ([good(), good(reward_parts=None)], "data", "its reward_parts have figures as a NoneType, not"),
        ([good(), good(reward_parts={"a": "b"})], "data", "the figure 'a' as 'b' of type str, not a finite number"),
        ([good(), good(reward_parts={"a": math.nan})], "data", "its reward_parts have the figure 'a' as nan, not"),
        ([good(), good(reward_parts={1: 1.0})], "data", "a figure named 1, a int; a name must be a str"),
        ([good(), good(figures=[1.0])], "data", "its figures have figures as a list, not as a mapping"),
        ([good(), good(figures={"turns": None})], "data", "its figures have the figure 'turns' as None"),
        (
            [good(), good(unparsable=0.5)],
            "infrastructure",
            "(prompt row 3): unparsable is a float, not a bool",
        ),
        ([good(), good(step_rewards=None)], "data", "its step_rewards have None, which must be"),
        ([good(reward=1.0), good(reward=-1e308)], "data", "its reward is -1e+308 (beyond 1e+300), not a finite"),
        (RuntimeError("CUDA out of memory"), "infrastructure", "RuntimeError: CUDA out of memory"),
        (DataFailure("row 3 has no answer"), "data", "row 3 has no answer"),
        (asyncio.CancelledError("my own task"), "infrastructure", "CancelledError: my own task"),
        (ValueError("\ud800 broken text"), "infrastructure", "ValueError: ? broken text"),
        (SystemExit(3), "infrastructure", "SystemExit: 3"),
        (KeyboardInterrupt("stop"), "infrastructure", "KeyboardInterrupt: stop"),
        (GeneratorExit("enough"), "infrastructure", "GeneratorExit: enough"),
        ([good(), good(reward=Leaving())], "infrastructure", "SystemExit: 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@played
async def test_what_a_generator_does_wrong_is_named(
    returned: Any, cause: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(SimpleGenerator):
        async def generate(self, work: GroupWork) -> Generated:
            if isinstance(returned, BaseException):
                raise returned
            if isinstance(returned, str):
                return returned  # type: ignore[return-value]
            return Generated(group=TrajectoryGroup(group=work.group, prompt=work.prompt, trajectories=returned))

    caplog.set_level(logging.WARNING)
    stage = await Stage(Wrong()).open()
    stage.start()
    (failed,) = await stage.until(1)
    assert isinstance(failed, GroupFailed)
    assert (failed.cause, failed.attempt) == (cause, 1)
    assert words in failed.reason
    assert stage.trajectories.store.stats().groups == 0
    assert any(record.exc_info for record in caplog.records), "the full story is in the log"


@played
async def test_a_group_that_comes_without_its_prompt_fails_for_no_fault_of_its_data() -> None:
    stage = await Stage(TokenGenerator(length=3)).open()
    stage.worker.carry_out(StartGroup(group=4, attempt=1, number=0, **WHO), None)
    (failed,) = await stage.until(1)
    assert isinstance(failed, GroupFailed) and failed.cause == "infrastructure"
    assert "group 4 has no prompt" in failed.reason


@played
async def test_tokens_of_weights_older_than_the_replica_had_are_refused() -> None:
    class Stuck(SimpleGenerator):
        async def sample(self, work: GroupWork, weights: Any, version: int) -> list[Trajectory]:
            return [response([1], reward=1.0, version=0) for _ in range(work.samples)]

    stage = await Stage(Stuck()).open()
    await stage.swap(1)
    stage.start()
    failed = (await stage.until(4))[3]
    assert "have version 0, but it must be 1 to 1 there" in failed.reason


@pytest.mark.parametrize(("call", "events"), [("stage", 1), ("pause", 2), ("install", 3)])
@pytest.mark.parametrize("error", [RuntimeError, SystemExit, asyncio.CancelledError])
@played
async def test_a_failing_sync_is_reported_and_the_replica_goes_on(
    call: str, events: int, error: type[BaseException]
) -> None:
    generator = TokenGenerator(length=2)
    stage = await Stage(generator).open()

    async def fails(*arguments: Any) -> None:
        raise error(f"{call} broke")

    setattr(generator, call, fails)
    stage.weights.store.put(1, "w")
    orders = [
        StageWeights(version=1, attempt=1, **WHO),
        PauseReplica(version=1, mode="keep", attempt=1, **WHO),
        InstallWeights(version=1, attempt=1, **WHO),
    ]
    for order in orders[:events]:
        stage.worker.carry_out(order)
    failed = (await stage.until(events))[-1]
    assert isinstance(failed, SyncFailed)
    assert (failed.version, failed.attempt) == (1, 1)
    assert f"{error.__name__}: {call} broke" in failed.reason
    stage.worker.carry_out(StageWeights(version=7, attempt=2, **WHO))
    assert "does not hold version 7" in (await stage.until(events + 1))[-1].reason or call == "stage"
    stage.worker.carry_out(ResumeReplica(attempt=1, number=0, **WHO))
    stage.start()
    await stage.settle()
    generator.tick(2)
    assert isinstance((await stage.until(events + 2))[-1], GroupGenerated)
    assert not stage.worker.broken


@played
async def test_close_ends_everything_without_a_word() -> None:
    stage = await Stage(TokenGenerator()).open()
    stage.start(0)
    stage.start(1)
    await stage.settle()
    await stage.worker.close()
    stage.start(2)
    await stage.settle()
    assert stage.events == []
    assert stage.generator.calls == ["close"]
