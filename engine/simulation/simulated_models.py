"""The user's side of a simulated run: a generator, a trainer, a scorer and the work of added states. They take virtual
time and fail at random.

`world.World` makes them, and the real workers run them. They implement only the protocols of `engine.protocols`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import Any

from engine.errors import DataFailure, EngineError
from engine.ids import GroupId, StepId, Version
from engine.protocols import Batch, Generated, GroupWork, Scores
from engine.simulation.run_settings import Setting
from engine.states.limits import REWARDING
from engine.storage.trajectories import copy_group
from engine.trajectory import Span, Trajectory, TrajectoryGroup
from engine.workers.plan import Restore

SAMPLES = 2
"""Trajectories of a group. The first has half of the group's length, rounded up."""
ROUNDING = 1e-6
"""Tolerance in tokens: sums of durations are rounded."""
PARETO = 1.5
"""Shape of the distribution of lengths: a longer tail for a smaller one."""


class Fault(RuntimeError):
    """A fault that the setting requested."""


def row_reward(row: int, version: Version) -> float | None:
    """The reward of a validation row under a version, its only inputs; None for a row that cannot be measured."""
    return None if row % 11 == 10 else float((row * 7 + version * 3) % 5 < 2)


class Dice:
    """The random draws of one world, and sleeps of random length."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.random = Random(setting.seed)

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def vary(self, seconds: float) -> float:
        """A duration of 0.5 to 1.5 times `seconds`."""
        return seconds * self.random.uniform(0.5, 1.5) if seconds else 0.0

    def tick_size(self) -> int:
        """The maximum number of events in the next tick."""
        return self.setting.tick_size or self.random.randint(1, 64)

    async def work(self, seconds: float) -> None:
        """Sleep for about `seconds`."""
        await asyncio.sleep(self.vary(seconds))

    def length(self, group: GroupId) -> int:
        """The length of a group's longest trajectory in tokens. It depends on the seed and the group alone."""
        bits = blake2b(b"%d %d" % (self.setting.seed, group), digest_size=8).digest()
        share = (int.from_bytes(bits) + 1) / (1 << 64)  # seeding a generator would take ten times as long
        draw: float = share ** (-1 / PARETO)
        length = max(1, round(self.setting.mean_tokens / 3 * draw))
        return length if self.setting.max_tokens is None else min(length, self.setting.max_tokens)

    def reward(self, group: GroupId, index: int) -> float:
        """The reward of a group's trajectory, if the group has different rewards."""
        return float(index)


@dataclass(slots=True)
class Sampling:
    """A group that is being sampled."""

    group: TrajectoryGroup
    """Its trajectories have the tokens only after `SimGenerator._write`."""
    work: GroupWork
    ends: tuple[int, int]
    """Length of each trajectory."""
    progress: float
    """Tokens of the longest trajectory so far, with the fraction of the next one."""
    since: float
    """Time at which `progress` was last updated."""
    stuck: bool
    cut: str
    done: "asyncio.Future[None]"
    """Completed when every trajectory has its full length, or the group is aborted or truncated."""
    saved: float
    finished: int = 0
    """Number of trajectories that have their full length."""
    running: int = 0
    """Number of its trajectories in `SimGenerator.running`."""
    reported: int = 0
    """Finished trajectories that `GroupWork.finished` was called with."""
    unwritten: list[tuple[int, Version]] = field(default_factory=list)
    """For each version used since the last `_write`: the length of the longest trajectory at its last token."""
    timer: asyncio.TimerHandle | None = None
    """Fires when the next trajectory ends or a prefix is due."""


class SimGenerator:
    """A `protocols.Generator` that samples a token of every trajectory each `token_s`."""

    def __init__(self, dice: Dice, fail: Callable[[Exception], None]) -> None:
        """`fail`: ends the run with the error of a broken law."""
        self._dice = dice
        self._fail = fail
        self._setting = dice.setting
        self._rewarded = all(state.name != REWARDING for state in dice.setting.limits.added_states)
        self.version: Version = 0
        self.frozen = False
        self.groups: dict[GroupId, Sampling] = {}
        self.running = 0
        """Trajectories that are being sampled."""
        self.measuring = 0
        """Validation rows that are being answered."""

    @property
    def token_s(self) -> float:
        """Current duration of a token."""
        return self._setting.token_s

    async def generate(self, work: GroupWork) -> Generated:
        if work.held_out:
            return await self._answer(work)
        group = TrajectoryGroup(group=work.group, prompt=work.prompt, trajectories=[])
        if work.partial is not None:
            group = copy_group(work.partial)
        group.trajectories += [Trajectory() for _ in range(work.samples - len(group.trajectories))]
        reached = max(len(one.token_ids) for one in group.trajectories)
        sampling = Sampling(
            group, work, _ends(self._dice.length(work.group)), reached, _now(),
            self._dice.chance(self._setting.faults.stick), "truncate" if work.truncate else "",
            asyncio.get_running_loop().create_future(), reached,
        )  # fmt: skip
        self.groups[work.group] = sampling
        self._count(sampling)
        self._continue(sampling)
        self._check_slots()
        try:
            await sampling.done
        finally:
            del self.groups[work.group]
            self.running -= sampling.running
            if sampling.timer is not None:
                sampling.timer.cancel()
        if sampling.cut == "abort":
            self._write(sampling)
            return Generated(group=group, aborted=True)
        if not sampling.cut:
            self._fail_by_chance()
        self._finish(sampling)
        return Generated(group=group)

    def _continue(self, sampling: Sampling) -> None:
        """Sample the tokens up to the present; then end the group, or set the timer for what comes next."""
        if sampling.timer is not None:
            sampling.timer.cancel()
            sampling.timer = None
        self._sample(sampling, _now())
        if sampling.cut or sampling.finished == SAMPLES:
            if not sampling.done.done():
                sampling.done.set_result(None)
            return
        self._save(sampling)
        if sampling.reported < sampling.finished:
            sampling.reported = sampling.finished
            sampling.work.finished(sampling.finished)
        if not (self.frozen or sampling.stuck):
            tokens = sampling.ends[sampling.finished] - sampling.progress
            every = sampling.work.save_every_tokens
            if every:
                tokens = min(tokens, max(sampling.saved + every - sampling.progress, 0.0))
            sampling.timer = asyncio.get_running_loop().call_later(tokens * self.token_s, self._act_on_timer, sampling)

    def _act_on_timer(self, sampling: Sampling) -> None:
        sampling.timer = None
        self._continue(sampling)

    def _count(self, sampling: Sampling) -> None:
        """Update the number of running trajectories after a group has begun, grown or been cut."""
        reached = sampling.progress + ROUNDING
        short, long = sampling.ends
        sampling.finished = (short <= reached) + (long <= reached)
        running = 0 if sampling.cut else SAMPLES - sampling.finished
        self.running += running - sampling.running
        sampling.running = running

    def _check_slots(self) -> None:
        """Check law 2: the run fails if more trajectories are sampled than the slots allow."""
        most = self._setting.slots * SAMPLES
        if self.running > most:
            self._fail(EngineError(f"law 2: {self.running} trajectories are sampled, but the slots allow only {most}"))

    def cache_used(self) -> float:
        return min(1.0, self.needed())

    def needed(self) -> float:
        """Tokens of the running trajectories, as a share of those for which the cache has room."""
        self.sample_all()
        held = sum(sampling.progress * sampling.running for sampling in self.groups.values())
        return held / self._setting.cache_tokens

    def _sample(self, sampling: Sampling, now: float) -> None:
        """Sample the tokens up to the present."""
        if now == sampling.since:
            return
        if not (self.frozen or sampling.stuck):
            grown = sampling.progress + (now - sampling.since) / self.token_s
            sampling.progress = min(grown, float(sampling.ends[-1]))
            unwritten, tokens = sampling.unwritten, int(sampling.progress + ROUNDING)
            if unwritten and unwritten[-1][1] == self.version:
                unwritten[-1] = (tokens, self.version)
            else:
                unwritten.append((tokens, self.version))
            self._count(sampling)
        sampling.since = now

    def _save(self, sampling: Sampling) -> None:
        save, every = sampling.work.save, sampling.work.save_every_tokens
        if save is not None and sampling.progress - sampling.saved >= every - ROUNDING:
            sampling.saved = sampling.progress
            self._write(sampling)
            save(copy_group(sampling.group))

    def _write(self, sampling: Sampling, unfinished: str = "") -> None:
        """Append the sampled tokens to the trajectories. `unfinished`: the finish reason of those without their full
        length."""
        for one, end in zip(sampling.group.trajectories, sampling.ends, strict=True):
            before = reached = len(one.token_ids)
            spans = []
            for stop, version in sampling.unwritten:
                if min(stop, end) > reached:
                    spans.append(Span(reached - before, min(stop, end) - before, version))
                    reached = min(stop, end)
            one.extend([0] * (reached - before), [0.0] * (reached - before), spans)
            one.finish_reason = "stop" if reached >= end else unfinished
        sampling.unwritten.clear()

    def _finish(self, sampling: Sampling) -> None:
        spread = not sampling.cut and not self._dice.chance(1.0 - self._setting.spread)
        self._write(sampling, unfinished="truncated")
        for index, one in enumerate(sampling.group.trajectories):
            one.reward = self._dice.reward(sampling.work.group, index) if spread or sampling.cut else 0.5
            one.reward_parts = dict.fromkeys(self._setting.rewards, one.reward)
            if not self._rewarded:
                one.reward = None

    def _fail_by_chance(self) -> None:
        if self._dice.chance(self._setting.faults.fail_group):
            raise Fault("fault")
        if self._dice.chance(self._setting.faults.fail_data):
            raise DataFailure("fault")

    async def _answer(self, work: GroupWork) -> Generated:
        """Answer a validation row. It needs no slot of a group, and a pause does not delay it."""
        self.measuring += 1
        try:
            await self._dice.work(self._setting.measure_s)
        finally:
            self.measuring -= 1
        if self._dice.chance(self._setting.faults.fail_rows):
            raise Fault("fault")
        reward = row_reward(work.prompt.row, self.version)
        if reward is None:
            raise DataFailure("this row cannot be measured")
        answer = Trajectory(finish_reason="stop", reward=reward)
        return Generated(group=TrajectoryGroup(group=work.group, prompt=work.prompt, trajectories=[answer]))

    def sample_all(self) -> None:
        """Sample the tokens of every group up to the present, before the weights or the pace change."""
        now = _now()
        for sampling in self.groups.values():
            self._sample(sampling, now)

    async def abort(self, groups: Sequence[GroupId]) -> None:
        self._cut(groups, "abort")

    async def truncate(self, groups: Sequence[GroupId]) -> None:
        self._cut(groups, "truncate")

    def _cut(self, groups: Sequence[GroupId], how: str) -> None:
        for group in groups:
            sampling = self.groups.get(group)
            if sampling is not None:
                self._sample(sampling, _now())
                sampling.cut = sampling.cut or how
                self._count(sampling)
                self._continue(sampling)

    async def pause(self, mode: str) -> None:
        await self._sync()
        if mode == "abort":
            self._cut(list(self.groups), "abort")
        if mode != "wait":
            self.sample_all()
            self.frozen = True

    async def stage(self, version: Version, weights: Any) -> None:
        await self._sync()

    async def install(self, version: Version) -> None:
        await self._sync()
        self.sample_all()
        self.version = version

    async def _sync(self) -> None:
        await self._dice.work(self._setting.sync_s)
        if self._dice.chance(self._setting.faults.fail_sync):
            raise Fault("fault")

    async def resume(self) -> None:
        self.sample_all()
        self.frozen = False
        for sampling in self.groups.values():
            if sampling.timer is None:  # any other timer is early by the pause, and is then set again
                self._continue(sampling)

    async def close(self) -> None: ...


def _now() -> float:
    return asyncio.get_running_loop().time()


def _ends(longest: int) -> tuple[int, int]:
    """Length of each trajectory of a group."""
    return ((longest + 1) // 2, longest)


class SimTrainer:
    """A `protocols.Trainer` whose weights are the number of trained steps."""

    def __init__(self, dice: Dice, busy: Callable[[float], None]) -> None:
        """`busy`: called with the seconds of each piece of work."""
        self._dice = dice
        self._setting = dice.setting
        self._busy = busy
        self._progressed: Callable[[], None] = lambda: None
        self.steps = 0

    def watch_progress(self, progressed: Callable[[], None]) -> None:
        self._progressed = progressed

    async def score(self, batch: Batch, task: str) -> None:
        await self._work(self._setting.sync_s)

    async def train(self, batch: Batch) -> dict[str, float]:
        await self._work(self._setting.train_s, self._setting.train_reports)
        self.steps = batch.step + 1
        return {"optimizer_steps": 1}

    async def weights(self) -> int:
        await self._work(self._setting.sync_s)
        return self.steps

    def save(self, directory: str, step: StepId) -> None:
        self._fail_by_chance()

    async def _work(self, seconds: float, reports: int = 0) -> None:
        seconds = self._dice.vary(seconds)
        for _ in range(reports):
            await asyncio.sleep(seconds / (reports + 1))
            self._progressed()
        await asyncio.sleep(seconds / (reports + 1))
        self._busy(seconds)
        self._fail_by_chance()

    def _fail_by_chance(self) -> None:
        if self._dice.chance(self._setting.faults.fail_trainer):
            raise Fault("fault")


def restore(trainer: Any, begin: Restore) -> None:
    trainer.steps = begin.steps


class SimScorer:
    """A `protocols.Scorer` that scores every token with 0."""

    def __init__(self, dice: Dice) -> None:
        self._dice = dice

    async def score(self, batch: Batch, task: str) -> Scores:
        await self._dice.work(self._dice.setting.sync_s)
        if self._dice.chance(self._dice.setting.faults.fail_trainer):
            raise Fault("fault")
        return [[[0.0] * sum(one.loss_mask) for one in group.trajectories] for group in batch.groups]

    def load(self, weights: Any) -> None: ...


def work_of(dice: Dice, state: str) -> Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup]]:
    """The work of an added state, which assigns the rewards if the state is `rewarding`."""

    async def work(group: TrajectoryGroup) -> TrajectoryGroup:
        await dice.work(dice.setting.state_s)
        if dice.chance(dice.setting.faults.fail_state):
            raise Fault("fault") if dice.chance(0.5) else DataFailure("fault")
        if state == REWARDING:
            spread = dice.chance(dice.setting.spread)
            for index, one in enumerate(group.trajectories):
                one.reward = dice.reward(group.group, index) if spread else 0.5
        return group

    return work


def inspection_of(dice: Dice) -> Callable[[Any], Awaitable[None]]:
    """The work of an added state of train steps, which lets everything pass: a refusal would end the run."""

    async def work(given: Any) -> None:
        await dice.work(dice.setting.state_s)
        if dice.chance(dice.setting.faults.fail_state):
            raise Fault("fault")

    return work
