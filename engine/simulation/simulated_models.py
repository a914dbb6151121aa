"""The user's side of a simulated run: a generator, a trainer, a scorer and the work of added states. They take virtual
time and fail at random.

`world.World` makes them, and the real workers run them. They implement only the protocols of `engine.protocols`.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import count
from math import ceil
from random import Random
from typing import Any

from engine.errors import DataFailure, EngineError
from engine.ids import GroupId, StepId, Version
from engine.protocols import Batch, CallFigures, Generated, GroupWork, Scores
from engine.simulation.run_settings import Setting
from engine.simulation.shared_hardware import Hardware
from engine.simulation.simulated_calls import SimCalls
from engine.states.limits import REWARDING
from engine.storage.trajectories import copy_group
from engine.trajectory import Span, Trajectory, TrajectoryGroup
from engine.workers.clock import INSTANT_S
from engine.workers.plan import Restore

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
    """The random draws of one world, from the figures of its setting."""

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

    def seconds(self, task: str, tokens: int = 0) -> float:
        """The duration of a piece of work: `train` on a batch with this number of response tokens, `score`, `publish`,
        `stage`, `pause`, `install`, `measure` a validation row, `prefill` groups that start together, `prompt` for each
        of them, `overhead` of a group after its last token, or the name of an added state."""
        setting = self.setting
        match task:
            case "train":
                return self.vary(setting.train_s)
            case "score" | "publish" | "stage" | "pause" | "install":
                return self.vary(setting.sync_s)
            case "measure":
                return self.vary(setting.measure_s)
            case "prefill" | "prompt" | "overhead":
                return 0.0
            case _:
                return self.vary(setting.state_s)

    def token_s(self, responses: int) -> float:
        """The duration of a token on a replica that samples this number of responses."""
        return self.setting.token_s

    token_size = 1
    """Tokens that each simulated token stands for."""
    share_of_replica = 0.0
    share_of_trainer = 0.0
    """Shares of common hardware that a process uses while it works."""
    trainer_slower = 1.0
    """How many times as much as a replica the trainer slows down when these are used up."""
    rewards_at_once = 1
    """Calls of reward functions that a replica runs at once."""

    def waiting_share(self, responses: int) -> float:
        """Share of the time in which a response waits for tools, if this number is sampled."""
        return 0.0

    def reward_calls(self) -> Sequence[float]:
        """The durations of the calls of reward functions for a group."""
        return ()

    def ends(self, group: GroupId) -> Sequence[float]:
        """The lengths of a group's trajectories, the shortest first. The same for every run with this seed."""
        longest = self.length(group)
        return ((longest + 1) // 2, longest)

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
    ends: Sequence[float]
    """Lengths of the trajectories, the shortest first."""
    zero: float
    """`SimGenerator.clock` at which it had no tokens."""
    stuck: bool
    cut: str
    done: "asyncio.Future[None]"
    """Completed when every trajectory has its full length, or the group is aborted or truncated."""
    saved: float
    """Tokens in its newest prefix."""
    finished: int = 0
    """Number of trajectories that have their full length."""
    running: int = 0
    """Number of its trajectories in `SimGenerator.running`."""
    reported: int = 0
    """Finished trajectories that `GroupWork.finished` was called with."""
    unwritten: list[tuple[int, Version]] = field(default_factory=list)
    """For each earlier version used since the last `_write`: the length of the longest trajectory at its last token."""


class SimGenerator:
    """A `protocols.Generator` that samples a token of every trajectory in the same time, which may depend on their
    number. All trajectories of a replica so share one clock, which counts tokens."""

    def __init__(self, dice: Dice, fail: Callable[[Exception], None], hardware: Hardware | None = None) -> None:
        """`fail`: ends the run with the error of a broken law."""
        self._dice = dice
        self._fail = fail
        self._setting = dice.setting
        self._hardware = hardware or Hardware()
        self._hardware.watch(self._repace)
        self._rewarded = all(state.name != REWARDING for state in dice.setting.limits.added_states)
        self._calls = SimCalls(dice.rewards_at_once)
        self.version: Version = 0
        self.frozen = False
        self.groups: dict[GroupId, Sampling] = {}
        self.running = 0
        """Trajectories that are being sampled."""
        self.measuring = 0
        """Validation rows that are being answered."""
        self.clock = 0.0
        """Tokens that a trajectory would have that was sampled from the start."""
        self._advanced_at = 0.0
        """When `clock` was last updated; in the future while prompts are read and nothing is sampled."""
        self._prefilled_at = -1.0
        self._pace = 1.0
        """Seconds of a token since then."""
        self._due: list[tuple[float, int, Sampling]] = []
        """The heap of what comes next in each group: at which clock a trajectory ends or a prefix is due."""
        self._entries = count()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def token_s(self) -> float:
        """Duration of a token from now on."""
        return self._dice.token_s(self.running + self.measuring)

    async def generate(self, work: GroupWork) -> Generated:
        if work.held_out:
            return await self._answer(work)
        group = TrajectoryGroup(group=work.group, prompt=work.prompt, trajectories=[])
        if work.partial is not None:
            group = copy_group(work.partial)
        group.trajectories += [Trajectory() for _ in range(work.samples - len(group.trajectories))]
        self._advance()
        reached = max(len(one.token_ids) for one in group.trajectories)
        sampling = Sampling(
            group, work, self._dice.ends(work.group), self.clock - reached,
            self._dice.chance(self._setting.faults.stick), "truncate" if work.truncate else "",
            asyncio.get_running_loop().create_future(), reached,
        )  # fmt: skip
        self.groups[work.group] = sampling
        self._count(sampling)
        self._continue(sampling)
        self._check_slots()
        if self._dice.waiting_share(self.running):
            self._calls.changed()
        self._prefill()
        self._repace()
        try:
            await sampling.done
        finally:
            self._advance()
            del self.groups[work.group]
            self.running -= sampling.running
            sampling.running = 0
            self._repace()
        if sampling.cut == "abort":
            self._write(sampling)
            return Generated(group=group, aborted=True)
        if not sampling.cut:
            self._fail_by_chance()
        self._finish(sampling)
        calls, overhead_s = self._dice.reward_calls(), self._dice.seconds("overhead")
        if calls or overhead_s:
            work.finished(len(sampling.ends))
            await self._calls.judge(calls)
            await asyncio.sleep(overhead_s)
        return Generated(group=group)

    def _prefill(self) -> None:
        """Read a prompt: nothing is sampled meanwhile. Prompts that come at the same time are read together."""
        now = _now()
        seconds = self._dice.seconds("prompt")
        if now != self._prefilled_at:
            self._prefilled_at, seconds = now, seconds + self._dice.seconds("prefill")
        self._advanced_at += seconds * self._hardware.slowdown

    def call_figures(self) -> list[CallFigures]:
        return self._calls.figures(round(len(self.groups) * self._dice.waiting_share(self.running)))

    def watch_calls(self, changed: Callable[[], None]) -> None:
        self._calls.watch(changed)

    # the clock

    def _advance(self) -> None:
        """Count the tokens up to the present."""
        now = _now()
        if now > self._advanced_at:
            if not self.frozen:
                self.clock += (now - self._advanced_at) / self._pace
            self._advanced_at = now

    def _repace(self) -> None:
        """Sample at another speed from now on, and wake up for what comes next."""
        self._advance()
        self._hardware.use(self, self._dice.share_of_replica if self.running and not self.frozen else 0.0)
        self._pace = self.token_s * self._hardware.slowdown
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._due and self._due[0][2].done.done():
            heappop(self._due)
        if self._due and not self.frozen:
            wait_s = max(0.0, self._due[0][0] - self.clock) * self._pace + self._advanced_at - _now()
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._act_on_timer)

    def _act_on_timer(self) -> None:
        self._timer = None
        self._advance()
        while self._due and self._due[0][0] <= self.clock + self._rounding:
            sampling = heappop(self._due)[2]
            if not sampling.done.done():
                self._count(sampling)
                self._continue(sampling)
        self._repace()

    @property
    def _rounding(self) -> float:
        """Tokens that may be missing when a timer fires."""
        return max(ROUNDING, 2 * INSTANT_S / self._pace)

    def _progress(self, sampling: Sampling) -> float:
        """Tokens of a group's longest trajectory, with the fraction of the next one."""
        return sampling.saved if sampling.stuck else min(max(0.0, self.clock - sampling.zero), sampling.ends[-1])

    def _continue(self, sampling: Sampling) -> None:
        """End a group, or note when its next trajectory ends or its next prefix is due."""
        if sampling.cut or sampling.finished == len(sampling.ends):
            if not sampling.done.done():
                sampling.done.set_result(None)
            return
        if sampling.stuck:
            return
        self._save(sampling)
        if sampling.reported < sampling.finished:
            sampling.reported = sampling.finished
            sampling.work.finished(sampling.finished)
        tokens, every = sampling.ends[sampling.finished], sampling.work.save_every_tokens
        if every:
            tokens = min(tokens, sampling.saved + every)
        due = sampling.zero + tokens
        if self._dice.token_size > 1:
            due = ceil(due)  # responses that end at about the same time end together: fewer events
        heappush(self._due, (due, next(self._entries), sampling))

    def _count(self, sampling: Sampling) -> None:
        """Update the number of running trajectories after a group has begun, grown or been cut."""
        sampling.finished = bisect_right(sampling.ends, self._progress(sampling) + self._rounding)
        running = 0 if sampling.cut else len(sampling.ends) - sampling.finished
        self.running += running - sampling.running
        sampling.running = running

    def _check_slots(self) -> None:
        """Check law 2: the run fails if more trajectories are sampled than the slots allow."""
        most = self._setting.slots * self._setting.samples
        if self.running > most:
            self._fail(EngineError(f"law 2: {self.running} trajectories are sampled, but the slots allow only {most}"))

    def cache_used(self) -> float:
        return min(1.0, self.needed())

    def needed(self) -> float:
        """Tokens of the running trajectories, as a share of those for which the cache has room."""
        self._advance()
        held = sum(self._progress(sampling) * sampling.running for sampling in self.groups.values())
        return held / self._setting.cache_tokens

    def _save(self, sampling: Sampling) -> None:
        save, every = sampling.work.save, sampling.work.save_every_tokens
        progress = self._progress(sampling)
        if save is not None and progress - sampling.saved >= every - self._rounding:
            sampling.saved = progress
            self._write(sampling)
            save(copy_group(sampling.group))

    def _note_version(self) -> None:
        """Note which tokens were sampled so far, before another version samples the others."""
        self._advance()
        for sampling in self.groups.values():
            sampling.unwritten.append((int(self._progress(sampling) + ROUNDING), self.version))

    def _write(self, sampling: Sampling, unfinished: str = "") -> None:
        """Append the sampled tokens to the trajectories. `unfinished`: the finish reason of those without their full
        length."""
        sampling.unwritten.append((int(self._progress(sampling) + ROUNDING), self.version))
        for one, end in zip(sampling.group.trajectories, map(ceil, sampling.ends), strict=True):
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
        self._repace()
        try:
            await asyncio.sleep(self._dice.seconds("measure"))
        finally:
            self.measuring -= 1
            self._repace()
        if self._dice.chance(self._setting.faults.fail_rows):
            raise Fault("fault")
        reward = row_reward(work.prompt.row, self.version)
        if reward is None:
            raise DataFailure("this row cannot be measured")
        answer = Trajectory(finish_reason="stop", reward=reward)
        return Generated(group=TrajectoryGroup(group=work.group, prompt=work.prompt, trajectories=[answer]))

    async def abort(self, groups: Sequence[GroupId]) -> None:
        self._cut(groups, "abort")

    async def truncate(self, groups: Sequence[GroupId]) -> None:
        self._cut(groups, "truncate")

    def _cut(self, groups: Sequence[GroupId], how: str) -> None:
        self._advance()
        for group in groups:
            sampling = self.groups.get(group)
            if sampling is not None:
                sampling.cut = sampling.cut or how
                self._count(sampling)
                self._continue(sampling)
        self._repace()

    async def pause(self, mode: str) -> None:
        await self._sync("pause")
        if mode == "abort":
            self._cut(list(self.groups), "abort")
        if mode != "wait":
            self._advance()
            self.frozen = True
            self._repace()

    async def stage(self, version: Version, weights: Any) -> None:
        await self._sync("stage")

    async def install(self, version: Version) -> None:
        await self._sync("install")
        self._note_version()
        self.version = version

    async def _sync(self, task: str) -> None:
        await asyncio.sleep(self._dice.seconds(task))
        if self._dice.chance(self._setting.faults.fail_sync):
            raise Fault("fault")

    async def resume(self) -> None:
        self._advance()
        self.frozen = False
        self._repace()

    async def close(self) -> None:
        self._hardware.use(self, 0.0)


def _now() -> float:
    return asyncio.get_running_loop().time()


class SimTrainer:
    """A `protocols.Trainer` whose weights are the number of trained steps."""

    def __init__(self, dice: Dice, busy: Callable[[float], None], hardware: Hardware | None = None) -> None:
        """`busy`: called with the seconds of each piece of work."""
        self._dice = dice
        self._setting = dice.setting
        self._busy = busy
        self._hardware = hardware or Hardware()
        self._progressed: Callable[[], None] = lambda: None
        self.steps = 0

    def watch_progress(self, progressed: Callable[[], None]) -> None:
        self._progressed = progressed

    async def score(self, batch: Batch, task: str) -> None:
        await self._work(self._dice.seconds("score"))

    async def train(self, batch: Batch) -> dict[str, float]:
        tokens = sum(group.tokens for group in batch.groups)
        await self._work(self._dice.seconds("train", tokens), self._setting.train_reports)
        self.steps = batch.step + 1
        return {"optimizer_steps": 1}

    async def weights(self) -> int:
        seconds = self._dice.seconds("publish")
        self._hardware.use(self, self._dice.share_of_trainer)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._hardware.use(self, 0.0)
        self._done(seconds)
        return self.steps

    def save(self, directory: str, step: StepId) -> None:
        self._fail_by_chance()

    async def _work(self, seconds: float, reports: int = 0) -> None:
        for _ in range(reports):
            await self._compute(seconds / (reports + 1))
            self._progressed()
        await self._compute(seconds / (reports + 1))
        self._done(seconds)

    async def _compute(self, seconds: float) -> None:
        await self._hardware.work(self, self._dice.share_of_trainer, seconds, self._dice.trainer_slower)

    def _done(self, seconds: float) -> None:
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
        await asyncio.sleep(self._dice.seconds("score"))
        if self._dice.chance(self._dice.setting.faults.fail_trainer):
            raise Fault("fault")
        return [[[0.0] * sum(one.loss_mask) for one in group.trajectories] for group in batch.groups]

    def load(self, weights: Any) -> None: ...


def work_of(dice: Dice, state: str) -> Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup]]:
    """The work of an added state, which assigns the rewards if the state is `rewarding`."""

    async def work(group: TrajectoryGroup) -> TrajectoryGroup:
        await asyncio.sleep(dice.seconds(state))
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
        await asyncio.sleep(dice.seconds("inspection"))
        if dice.chance(dice.setting.faults.fail_state):
            raise Fault("fault")

    return work
