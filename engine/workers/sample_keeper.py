"""Selects responses, and keeps them as samples for people to read: `engine samples`.

Called by the worker of the trainer, right after a train step and before the step is reported, by replicas after a
chunk of a validation or a failed reward, and by `runtime.filtered_samples` for groups that the filter dropped. Trainer
and replicas have the texts anyway, so nothing is sent for their samples, and only selected rows are built. The samples
of a step are on disk before the step is reported. A step that is trained again replaces them with the same selection,
which is a pure function of the seed, the step and the responses' rewards, lengths and ends. Must never fail, or delay
training for long: if a file cannot be written, or not in time, this is reported once, and the run continues.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from engine.commands import MeasureRows
from engine.errors import reason_of
from engine.ids import StepId, Version
from engine.protocols import Batch, RolloutFigures
from engine.storage.samples import (
    FAILED,
    FILTERED,
    FOLDER,
    MERGE_EVERY,
    TRAIN,
    VALIDATION,
    SampleFiles,
    SamplePolicy,
    SampleRow,
    lacks_pyarrow,
)
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup
from engine.workers.group_reports import reward_figures
from engine.workers.response_figures import is_cut_off, tokens_of
from engine.workers.threads import on_a_thread

WORST, BEST, RANDOM, LONGEST, TRUNCATED = "worst", "best", "random", "longest", "truncated"
REASONS = (WORST, BEST, RANDOM, LONGEST, TRUNCATED)
"""Why a response is selected, in the order in which the reasons choose."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the selection knows of a response."""

    reward: float | None
    tokens: int
    truncated: bool
    """Whether it was cut off, at the token budget or by the deadline policy."""


def select(seed: int, step: int, candidates: Sequence[Candidate], count: int) -> dict[int, tuple[str, ...]]:
    """At most `count` indices into `candidates`, in ascending order, each with its reasons.

    The reasons choose in turn until `count` responses are selected. Each takes the first of its ranking that is not
    selected yet. A response also gets every reason whose ranking it leads. Equal candidates are ranked at random, by
    the seed and the step.
    """
    rankings = _rankings(candidates, shuffled(seed, f"step {step}", len(candidates)))
    reasons: dict[int, set[str]] = {}
    turns = {reason: iter(ranking) for reason, ranking in rankings.items()}
    while turns and len(reasons) < count:
        for reason in list(turns):
            index = _next(turns[reason], reasons)
            if index is None:
                del turns[reason]
            elif len(reasons) < count:
                reasons[index] = {reason}
    for reason, ranking in rankings.items():
        if ranking and ranking[0] in reasons:
            reasons[ranking[0]].add(reason)
    return {index: tuple(reason for reason in REASONS if reason in reasons[index]) for index in sorted(reasons)}


def shuffled(seed: int, purpose: str, count: int) -> list[int]:
    """The numbers below `count` in a random order: a pure function of its arguments, the same in every Python."""
    random = Random(f"{seed} {purpose}")
    keys = [random.random() for _ in range(count)]  # Python promises that these never change, unlike `shuffle`
    return sorted(range(count), key=keys.__getitem__)


def _rankings(candidates: Sequence[Candidate], order: Sequence[int]) -> dict[str, list[int]]:
    """Indices for each reason, the most fitting first. Nothing is best or worst if all rewards are equal."""
    rewards = {index: reward for index in order if (reward := candidates[index].reward) is not None}
    differ = len(set(rewards.values())) > 1
    return {
        WORST: sorted(rewards, key=lambda index: rewards[index]) if differ else [],
        BEST: sorted(rewards, key=lambda index: -rewards[index]) if differ else [],
        RANDOM: list(order),
        LONGEST: sorted(order, key=lambda index: -candidates[index].tokens),
        TRUNCATED: [index for index in order if candidates[index].truncated],
    }


def _next(ranking: Iterator[int], taken: dict[int, set[str]]) -> int | None:
    return next((index for index in ranking if index not in taken), None)


log = logging.getLogger(__name__)

LONGEST_S = 30.0
"""Seconds after which a write counts as hung. Nothing more is written until it has ended."""

FILTERED_GROUPS = 4
"""Maximum number of filtered groups whose responses are kept before each train step."""

Rollout = Sequence[Trajectory]
"""The segments of one response."""


class HeldOutRow(NamedTuple):
    """A row of a validation: one response to a prompt of a set."""

    set: str
    prompt: int
    """Number of the prompt in its set. The number of the response follows, from 0."""
    sample: int
    prompts: int
    """Prompts of the set."""


class SampleKeeper:
    """Writes the samples of one process into the directory of a run."""

    def __init__(self, run_dir: Path, policy: SamplePolicy) -> None:
        self.policy = policy
        self._files = SampleFiles(run_dir / FOLDER)
        self._failed = False
        self._failures: Counter[Version] = Counter()
        """Number of failed responses that were kept, by weights version."""
        self._hung: asyncio.Task[None] | None = None

    async def keep_step(self, batch: Batch, figures: Sequence[Sequence[RolloutFigures]]) -> None:
        """Keep samples of a train step. `figures`: figures of each group and rollout, or empty. Never raises."""
        if self.policy.per_step:
            await self._keep(f"of train step {batch.step}", self._write_step, batch, figures)

    async def keep_chunk(
        self,
        order: MeasureRows,
        groups: Mapping[int, TrajectoryGroup],
        places: Sequence[HeldOutRow],
        answers: Mapping[int, str],
    ) -> None:
        """Keep samples of a chunk of a validation. `groups`, `places` and `answers` are by row. Never raises."""
        if self.policy.validation != 0:
            whose = f"of validation {order.validation}"
            await self._keep(whose, self._write_chunk, order, groups, places, answers)

    async def keep_failed(self, group: TrajectoryGroup, attempt: int, version: Version, error: str) -> None:
        """Keep responses of an attempt whose reward failed, a bounded number for each weights version. Never raises."""
        room = self.policy.per_step - self._failures[version]
        rollouts = group.rollouts[:room]
        if rollouts:
            self._failures[version] += len(rollouts)
            whose = f"of group {group.group}, attempt {attempt}"
            await self._keep(whose, self._write_failure, group, rollouts, attempt, version, error)

    async def keep_filtered(self, group: TrajectoryGroup, step: StepId, filter: str) -> None:
        """Keep responses of a group that a filter dropped before the end of train step `step`, if there is room: an
        earlier process may have kept some. Never raises."""
        await self._keep(f"of filtered group {group.group}", self._write_filtered, group, step, filter)

    @property
    def filtered_groups(self) -> int:
        """Maximum number of filtered groups of which a response is kept before each train step."""
        return self.policy.per_step // self._of_filtered if self.policy.per_step else 0

    @property
    def _of_filtered(self) -> int:
        """Maximum number of responses of a filtered group."""
        return -(-self.policy.per_step // FILTERED_GROUPS)

    async def _keep(self, whose: str, write: Callable[..., None], *given: Any) -> None:
        if self._hung is not None and not self._hung.done():
            return
        task = asyncio.get_running_loop().create_task(self._written(whose, write, *given))
        _, unfinished = await asyncio.wait([task], timeout=LONGEST_S)
        if unfinished:
            self._hung = task
            self._report(whose, f"the write has taken {LONGEST_S:g} s")

    async def _written(self, whose: str, write: Callable[..., None], *given: Any) -> None:
        try:
            await on_a_thread(write, *given)
        except Exception as error:
            self._report(whose, reason_of(error))

    def _report(self, whose: str, reason: str) -> None:
        if not self._failed:
            self._failed = True
            story = "samples %s cannot be written to %s: %s. The run continues. This is not reported again."
            log.warning(story, whose, self._files.directory, reason)

    def _write_step(self, batch: Batch, figures: Sequence[Sequence[RolloutFigures]]) -> None:
        rollouts = [group.rollouts for group in batch.groups]
        places = [(group, place) for group, own in enumerate(rollouts) for place in range(len(own))]
        candidates = [candidate(rollouts[group][place]) for group, place in places]
        known = _known(figures, [len(own) for own in rollouts])
        rows = []
        for index, reasons in select(self.policy.seed, batch.step, candidates, self.policy.per_step).items():
            group, place = places[index]
            measured = known[group][place] if known else RolloutFigures()
            rows.append(
                SampleRow(
                    kind=TRAIN, step=batch.step, group=batch.groups[group].group, sample=place, reasons=reasons,
                    staleness=batch.staleness[group], advantage=measured.advantage, logprob_gap=measured.logprob_gap,
                    **self._texts(batch.groups[group].prompt, rollouts[group][place]),
                )
            )  # fmt: skip
        self._files.write_step(batch.step, rows)
        if batch.step % MERGE_EVERY == 0:
            self._files.merge()

    def _write_chunk(
        self,
        order: MeasureRows,
        groups: Mapping[int, TrajectoryGroup],
        places: Sequence[HeldOutRow],
        answers: Mapping[int, str],
    ) -> None:
        kept, chosen = [], dict[str, set[int]]()
        for row, group in groups.items():
            of = places[row]
            if of.set not in chosen:
                order_of_prompts = shuffled(self.policy.seed, "validation", of.prompts)
                chosen[of.set] = set(order_of_prompts[: self.policy.validation])
            if of.prompt in chosen[of.set] and group.rollouts:
                kept.append(
                    SampleRow(
                        kind=VALIDATION, validation=order.validation, chunk=order.chunk, version=order.version,
                        validation_set=of.set, sample=of.sample, reasons=(VALIDATION,), answer=answers.get(row),
                        **self._texts(group.prompt, group.rollouts[0]),
                    )
                )  # fmt: skip
        if kept:
            self._files.write_chunk(order.validation, order.chunk, kept)

    def _write_failure(
        self, group: TrajectoryGroup, rollouts: Sequence[Rollout], attempt: int, version: Version, error: str
    ) -> None:
        rows = [
            SampleRow(
                kind=FAILED, group=group.group, sample=number, attempt=attempt, version=version, reasons=(FAILED,),
                error=shortened(error, self.policy.max_characters), **self._texts(group.prompt, rollout),
            )
            for number, rollout in enumerate(rollouts)
        ]  # fmt: skip
        self._files.write_failure(group.group, attempt, rows)

    def _write_filtered(self, group: TrajectoryGroup, step: StepId, filter: str) -> None:
        if len({row["group"] for row in self._files.rows(FILTERED, [step])}) >= self.filtered_groups:
            return
        rollouts = group.rollouts
        trainable, mean, spread = reward_figures(group)
        seen = f"{trainable} trainable responses, mean reward {mean:.4g}, largest minus smallest reward {spread:.4g}"
        chosen = select(self.policy.seed, step, [candidate(rollout) for rollout in rollouts], self._of_filtered)
        rows = [
            SampleRow(
                kind=FILTERED, step=step, group=group.group, sample=number, reasons=(FILTERED, *reasons),
                filter=f"{filter}: {seen}", **self._texts(group.prompt, rollouts[number]),
            )
            for number, reasons in chosen.items()
        ]  # fmt: skip
        self._files.write_filtered(step, group.group, rows)

    def _texts(self, prompt: Prompt, rollout: Rollout) -> dict[str, Any]:
        """The columns that every row has."""
        versions = [span.version for trajectory in rollout for span in trajectory.spans]
        return {
            "source": prompt.source or None,
            "prompt_row": prompt.row,
            "prompt": shortened(rollout[0].shown_prompt or prompt_text(prompt), self.policy.max_characters),
            "response": shortened(response_text(rollout), self.policy.max_characters),
            "reward": None if rollout[-1].reward is None else float(rollout[-1].reward),
            "reward_parts": json.dumps(rollout[-1].reward_parts) if rollout[-1].reward_parts else None,
            "tokens": tokens_of(rollout),
            "figures": json.dumps(rollout[0].figures) if rollout[0].figures else None,
            "segments": len(rollout),
            "oldest_version": min(versions, default=None),
            "newest_version": max(versions, default=None),
            "finish_reason": rollout[-1].finish_reason,
        }


def keeper_of(run_dir: Path | None, policy: SamplePolicy) -> SampleKeeper | None:
    """None if the run keeps no samples: it has no directory, `policy` keeps none, or pyarrow is not installed."""
    if run_dir is None or not policy.keeps_any or lacks_pyarrow():
        return None
    return SampleKeeper(run_dir, policy)


# -- responses as rows -------------------------------------------------------------------------------------------------


def _known(figures: Sequence[Sequence[RolloutFigures]], rollouts: Sequence[int]) -> list[list[RolloutFigures]]:
    """The figures that a trainer returned, as plain numbers; empty unless there is one for each rollout of each group.
    `rollouts`: number of rollouts in each group."""
    try:
        known = [[RolloutFigures(_number(f.advantage), _number(f.logprob_gap)) for f in own] for own in figures]
    except Exception as error:  # a user's trainer may return anything
        log.warning("rollout_figures() returned something else, which is left out: %s", reason_of(error))
        return []
    return known if [len(own) for own in known] == list(rollouts) else []


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def candidate(rollout: Rollout) -> Candidate:
    reward = None if rollout[-1].reward is None else float(rollout[-1].reward)
    return Candidate(reward=reward, tokens=tokens_of(rollout), truncated=is_cut_off(rollout))


def prompt_text(prompt: Prompt) -> str:
    """The prompt as a person reads it. A chat is shown as its messages with their roles."""
    messages = prompt.fields.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        return prompt.text
    lines = (f"{message.get('role', '')}: {message.get('content', '')}" for message in messages)
    return "\n".join(lines) or prompt.text


def response_text(rollout: Rollout) -> str:
    """The text of all segments."""
    return "".join(_segments(rollout))


def _segments(rollout: Rollout) -> Iterator[str]:
    for number, trajectory in enumerate(rollout, start=1):
        if number > 1:
            yield f"\n[segment {number} of {len(rollout)}: the history was rewritten]\n"
        yield trajectory.text


def shortened(text: str, limit: int) -> str:
    """Valid UTF-8 text of about `limit` characters: the middle of a longer one is left out."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
