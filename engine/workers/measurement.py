"""Measures validation prompts on one replica, in chunks of rows, and reports the number of right answers.

Called by `replica.py`. Must never report a chunk with a row that was answered under another version, report a chunk
twice, or leave an order unanswered.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

from engine.commands import MeasureRows, StopMeasuring
from engine.errors import ConfigError, DataFailure, EngineError, are, reason_of
from engine.events import NO_ANSWER, Event, OrderProgressed, RowsFailed, RowsMeasured
from engine.ids import GroupId, ValidationId, Version
from engine.protocols import Generated, Generator, GroupWork
from engine.protocols.user_code import awaited
from engine.trajectory import Prompt, TrajectoryGroup
from engine.workers.group_reports import judged_problem
from engine.workers.plan import Answer, Plan, Rollout
from engine.workers.sample_keeper import HeldOutRow, SampleKeeper
from engine.workers.threads import contained, from_any_thread, on_a_thread
from engine.workers.worker import Worker

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The validation prompts of a run, and the generator that answers them on a replica."""

    prompts: Sequence[Prompt]
    """The prompt of each row; a prompt with several responses is repeated."""
    evaluator: Generator
    rows: Sequence[HeldOutRow]
    """Set, prompt and response of each row."""
    answers: Mapping[str, Answer] = field(default_factory=dict)
    """The function that extracts answers, by the name of the set, for sets with a majority vote."""
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The reported parts of a set's reward, by the name of the set."""
    correct: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The parts that say whether a response is right (`Trajectory.is_right`), by the name of the set."""
    samples: SampleKeeper | None = None
    """Keeps samples of the answers."""


def held_out_of(plan: Plan, rollout: Rollout, samples: SampleKeeper | None) -> HeldOut | None:
    """The validation prompts that a replica may measure. Raises: `ConfigError` if it has no evaluator."""
    limits = plan.limits.validation
    if limits is None:
        return None
    if rollout.evaluator is None:
        law = "validation needs an evaluator, but the plan's rollouts have none"
        raise ConfigError("limits.validation", f"{len(plan.held_out)} rows", law, "add one, or use None")
    places = map(limits.place, range(limits.rows))
    return HeldOut(
        prompts=plan.held_out, evaluator=rollout.evaluator,
        rows=[HeldOutRow(one.name, prompt, sample, one.prompts) for one, prompt, sample in places],
        answers=rollout.answers, samples=samples,
        parts={one.name: one.parts for one in limits.measured_sets},
        correct={one.name: one.correct for one in limits.measured_sets},
    )  # fmt: skip


def held_out_group(validation: ValidationId, rows: int, row: int) -> GroupId:
    """The group id of a row in a validation: negative, and never used twice."""
    return -1 - (validation * rows + row)


@dataclass(slots=True, eq=False)
class Measurement:
    """One order, from its arrival to its report."""

    order: MeasureRows
    groups: list[GroupId] = field(default_factory=list)
    """Group ids of the rows being answered."""
    unwanted: bool = False
    task: asyncio.Task[None] = field(init=False)


class Measurements:
    """The chunks of one life of a replica. `version()` returns the weights version that it samples from."""

    def __init__(self, worker: Worker, held_out: HeldOut | None, version: Callable[[], Version]) -> None:
        self._worker = worker
        self._held_out = held_out
        self._version = version
        self._running: dict[asyncio.Task[None], Measurement] = {}
        self._progress_every_s = worker.progress_every_s(MeasureRows)
        self._newest = -1
        """Number of the newest order; a repeat has no higher one. The orders of a life arrive in ascending order of
        their numbers: the executor sends them in the order of the book, and `wire.InOrder` restores it."""

    def measure(self, order: MeasureRows, after: "asyncio.Task[None] | None") -> None:
        """Measure a chunk once `after`, the last weights order, has ended. A newer attempt cancels an older one."""
        if order.number <= self._newest:
            return
        self._newest = order.number
        measurement = Measurement(order)
        waits = [after] if after is not None else []
        for earlier in [m for m in self._running.values() if m.order.chunk == order.chunk]:
            # A generator tells rows apart, not attempts, so only one attempt may run.
            self._stop(earlier)
            waits.append(earlier.task)
        measurement.task = self._worker.spawn(self._run(measurement, waits))
        self._running[measurement.task] = measurement
        measurement.task.add_done_callback(lambda task: self._running.pop(task, None))

    def stop(self, order: StopMeasuring) -> None:
        """Stop the running chunks of a validation that were ordered before this, without a report."""
        for measurement in self._running.values():
            if measurement.order.validation == order.validation and measurement.order.number < order.number:
                self._stop(measurement)

    def _stop(self, measurement: Measurement) -> None:
        measurement.unwanted = True
        self._worker.spawn(self._end(measurement))

    async def wait_for_stopped(self) -> None:
        """Return once every stopped chunk has ended."""
        stopped = [m.task for m in self._running.values() if m.unwanted]
        if stopped:
            await asyncio.wait(stopped)

    def close(self) -> None:
        for measurement in self._running.values():
            measurement.unwanted = True

    async def _run(self, measurement: Measurement, waits: "list[asyncio.Task[None]]") -> None:
        order = measurement.order
        try:
            if waits:
                await asyncio.wait(waits)
            event: Event = await self._measured(measurement)
        except asyncio.CancelledError as error:
            if measurement.unwanted:
                return
            event = self._failed(order, error)
        except Exception as error:
            event = self._failed(order, error)
        if not measurement.unwanted:
            self._worker.peers.emit(event)

    async def _measured(self, measurement: Measurement) -> Event:
        order, held_out = measurement.order, self._held_out
        if held_out is None:
            raise EngineError("this run has no validation prompts, or no evaluator to answer them")
        prompts = held_out.prompts[order.first : order.first + order.count]
        if len(prompts) < order.count:
            raise EngineError(
                f"rows {order.first} to {order.first + order.count - 1} do not exist: there are "
                f"{len(held_out.prompts)} validation prompts"
            )
        self._require_version(order)
        rows = range(order.first, order.first + order.count)
        measurement.groups = [held_out_group(order.validation, len(held_out.prompts), row) for row in rows]
        progressed = from_any_thread(partial(self._take_progress, measurement))
        works = [
            GroupWork(
                group=group, attempt=order.attempt, prompt=prompt.copy(), samples=1, held_out=True,
                validation_set=held_out.rows[row].set, progress=progressed,
            )
            for group, prompt, row in zip(measurement.groups, prompts, rows, strict=True)
        ]  # fmt: skip
        attempts = (self._answered(held_out.evaluator, work) for work in works)
        outcomes = await asyncio.gather(*attempts, return_exceptions=True)
        measurement.groups = []
        judged = [_reward(prompt, outcome) for prompt, outcome in zip(prompts, outcomes, strict=True)]
        rewards = [None if isinstance(one, str) else one for one in judged]
        problems = [(prompt.row, one) for prompt, one in zip(prompts, judged, strict=True) if isinstance(one, str)]
        reason = f"row {problems[0][0]}: {problems[0][1]}" if problems else ""
        if problems:
            more = f"; {are(len(problems) - 1, 'further row')} not measured either" if problems[1:] else ""
            log.warning("validation row %d cannot be measured: %s%s", *problems[0], more)
        self._require_version(order)
        by_row = zip(rows, outcomes, rewards, strict=True)
        groups = {row: o.group for row, o, r in by_row if r is not None and isinstance(o, Generated)}
        answers = await self._answers(held_out, groups)
        if held_out.samples is not None:
            await held_out.samples.keep_chunk(order, groups, held_out.rows, answers)
        measured = {row: reward for row, reward in zip(rows, rewards, strict=True) if reward is not None}
        right_rows, parts = _parts(held_out, groups)
        return RowsMeasured(
            **_place(order), version=order.version, measured=len(measured), right=len(right_rows),
            reward=sum(measured.values(), 0.0), rows=tuple(measured), rewards=tuple(measured.values()),
            answers=tuple(answer_number(answers.get(row)) for row in measured),
            right_rows=right_rows, part_rows=tuple(row for row, _, _ in parts),
            part_places=tuple(place for _, place, _ in parts), part_values=tuple(value for _, _, value in parts),
            reason=reason,
        )  # fmt: skip

    async def _answered(self, evaluator: Generator, work: GroupWork) -> Generated:
        generated = await awaited(evaluator.generate, work)
        work.progress()
        return generated

    def _take_progress(self, measurement: Measurement) -> None:
        self._worker.reports.within(self._progress_every_s, self._report, measurement)

    def _report(self, measurement: Measurement) -> None:
        """Report that rows of a chunk have progressed, if the chunk still runs."""
        if not measurement.unwanted and not measurement.task.done():
            self._worker.peers.emit(OrderProgressed(order=measurement.order.number))

    async def _answers(self, held_out: HeldOut, groups: Mapping[int, TrajectoryGroup]) -> dict[int, str]:
        """The answer of each response that has one, where its set has a majority vote. On a thread: it is user code."""
        voted = {
            row: (held_out.answers[name], group)
            for row, group in groups.items()
            if (name := held_out.rows[row].set) in held_out.answers
        }
        return await on_a_thread(_extracted, voted) if voted else {}

    def _require_version(self, order: MeasureRows) -> None:
        if self._version() != order.version:
            raise EngineError(
                f"the replica has version {self._version()}, but version {order.version} must be measured"
            )

    def _failed(self, order: MeasureRows, error: BaseException) -> Event:
        which = (order.first, order.first + order.count - 1, order.version)
        log.warning("validation rows %d to %d could not be measured under version %d", *which, exc_info=error)
        return RowsFailed(**_place(order), reason=reason_of(error))

    async def _end(self, measurement: Measurement) -> None:
        if measurement.groups and self._held_out is not None:
            try:
                await awaited(self._held_out.evaluator.abort, measurement.groups)
            except Exception:
                log.warning("validation rows could not be aborted", exc_info=True)
        measurement.task.cancel()


def answer_number(answer: str | None) -> int:
    """A number that stands for an answer in the record: equal for equal texts."""
    if answer is None:
        return NO_ANSWER
    return int.from_bytes(blake2b(answer.encode("utf-8", "replace"), digest_size=8).digest(), "little") >> 1 or 1


def _extracted(voted: Mapping[int, tuple[Answer, TrajectoryGroup]]) -> dict[int, str]:
    found = {}
    for row, (extract, group) in voted.items():
        try:
            answer = contained(extract, group.prompt, group.rollouts[0][-1])
        except Exception as error:
            log.warning("the answer of validation row %d cannot be extracted: %s", group.prompt.row, reason_of(error))
            continue
        if answer is not None and str(answer).strip():
            found[row] = str(answer).strip()
    return found


def _parts(
    held_out: HeldOut, groups: Mapping[int, TrajectoryGroup]
) -> tuple[tuple[int, ...], list[tuple[int, int, float]]]:
    """The rows with a right response; and (row, place of the part in its set, value) of each part of a reward."""
    right, parts = [], []
    for row, group in groups.items():
        response, name_of_set = group.trajectories[0], held_out.rows[row].set
        if response.is_right(held_out.correct.get(name_of_set, ())):
            right.append(row)
        for place, name in enumerate(held_out.parts.get(name_of_set, ())):
            if name in response.reward_parts:
                parts.append((row, place, response.reward_parts[name]))
    return tuple(right), parts


def _place(order: MeasureRows) -> dict[str, int]:
    return {
        "validation": order.validation, "chunk": order.chunk, "attempt": order.attempt, "replica": order.replica,
        "life": order.life,
    }  # fmt: skip


def _reward(prompt: Prompt, outcome: Any) -> float | str:
    """The reward of a validation prompt, or the reason if the prompt or its reward failed. Raises the failure of a
    replica."""
    if isinstance(outcome, DataFailure):
        return reason_of(outcome)
    if isinstance(outcome, BaseException):
        raise outcome
    if not isinstance(outcome, Generated) or not isinstance(outcome.group, TrajectoryGroup):
        law = "generate() must return Generated(group=TrajectoryGroup(...))"
        raise EngineError(f"validation row {prompt.row}: {law}, not {type(outcome).__name__}")
    if outcome.aborted:
        raise EngineError(f"validation row {prompt.row} was aborted")
    if not outcome.group.trajectories:
        return "it has no reward"
    problem = contained(judged_problem, outcome.group.trajectories[0])
    return problem or outcome.group.trajectories[0].reward or 0.0
