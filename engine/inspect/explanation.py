"""Why a run took the time it took: a step, a group, a moment, idle time and the whole run, in sentences and as figures.

`engine explain` calls it. Every function takes a `History` and returns an `Explanation`; none reads a record. Each
second of the trainer has one bound and each idle second one cause, so the shares of a table add up to 100 %.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import Any

from msgspec import structs

from engine.errors import ConfigError, counted
from engine.ids import NO_VERSION, GroupId, ReplicaId, StepId
from engine.inspect.counsel import Counsel, percent
from engine.metrics.health import HealthFinding
from engine.metrics.history import (
    FATES,
    RUNNING,
    WAITS,
    GenerationAttempt,
    GroupRow,
    GroupWait,
    History,
    IdleSpan,
    StepRow,
    SyncPhase,
)
from engine.states.causes import BY_NAME, INSPECTING, PUBLISHING, SCORING, TRAINING

READY = "generated"
"""State of a group that waits for its batch."""
COMPLETE = (READY, "batched")
"""States of groups that no step waits for."""
SLOWEST = 3
"""Number of the slowest steps that are named."""
SHOWN = 8
"""Maximum number of groups that a sentence names."""

BOUNDS = {
    **{cause.name: cause.sentence for cause in (TRAINING, SCORING, PUBLISHING, INSPECTING)},
    "generation": "the last group of a batch was generated",
    "stragglers": "a group at its deadline was generated",
    "rewards": "the last group of a batch waited for its rewards or the work of an added state",
    "sync": "the replica of the last group of a batch took new weights",
    "parked": "the last group of a batch was parked, between two attempts",
    "not_started": "the last group of a batch had not started",
    "other": "the start, a restart, a drain, or the end of the run",
}
"""The bottlenecks: what the trainer waited for while it did not work."""
SENTENCES = {cause.name: cause.sentence for cause in BY_NAME.values()}


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a whole."""

    name: str
    amount: float
    share: float
    """Of the whole, from 0 to 1."""
    words: str


@dataclass(frozen=True, slots=True)
class Part:
    """Sentences and a table under a heading."""

    heading: str
    sentences: tuple[str, ...] = ()
    unit: str = ""
    shares: tuple[Share, ...] = ()
    """They add up to 1."""

    def lines(self) -> list[str]:
        lines = [self.heading, *(f"  {sentence}" for sentence in self.sentences)]
        for tenths, one in zip(_tenths(self.shares), self.shares, strict=True):
            lines.append(f"  {tenths / 10:5.1f} %  {_amount(one.amount):>9} {self.unit}  {one.words}")
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The answer to one question about a run."""

    about: Mapping[str, Any]
    """`{"step": 12}`, `{"group": 88}`, `{"at": 40.0}`, `{"idle": True}`, or `{}` for the run."""
    parts: tuple[Part, ...]
    figures: Mapping[str, Any] = field(default_factory=dict)
    advice: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        blocks = [list(self.notes)] if self.notes else []
        return "\n\n".join("\n".join(block) for block in [*blocks, *(part.lines() for part in self.parts)])

    def plain(self) -> dict[str, Any]:
        """The JSON object. Every question has the same keys."""
        parts = [
            {
                "heading": part.heading, "sentences": list(part.sentences), "unit": part.unit,
                "shares": [
                    {"name": one.name, "amount": one.amount, "share": one.share, "words": one.words}
                    for one in part.shares
                ],
            }
            for part in self.parts
        ]  # fmt: skip
        return {
            "about": dict(self.about), "parts": parts, "figures": dict(self.figures), "advice": list(self.advice),
            "notes": list(self.notes),
        }  # fmt: skip


def _part(heading: str, unit: str, amounts: Mapping[str, float], words: Mapping[str, str], *sentences: str) -> Part:
    """A part with a table of the amounts above 0, largest first."""
    whole = sum(amounts.values())
    rows = sorted(((amount, name) for name, amount in amounts.items() if amount > 0), reverse=True)
    return Part(heading, sentences, unit, tuple(Share(n, a, a / whole, words[n]) for a, n in rows))


def _tenths(shares: Sequence[Share]) -> list[int]:
    """Shares in tenths of a percent, rounded so that they add up to 100 %."""
    exact = [1000 * one.share for one in shares]
    tenths = [int(value) for value in exact]
    order = sorted(range(len(exact)), key=lambda i: tenths[i] - exact[i])
    for i in order[: round(sum(exact)) - sum(tenths)]:
        tenths[i] += 1
    return tenths


# -- words -------------------------------------------------------------------------------------------------------------


def seconds(value: float) -> str:
    """`0.042 s`, `3.2 s`, `140 s`."""
    return f"{value:.0f} s" if value >= 99.5 else f"{value:.2g} s"


def moment(at: float) -> str:
    """`12.4 s`: a time since the run began."""
    return f"{at:.1f} s"


def _amount(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ") if value >= 100 else f"{value:.3g}"


def _tokens(count: int) -> str:
    return f"{count:,}".replace(",", " ") + " tokens"


def _few(numbers: Iterable[int]) -> str:
    listed = [str(number) for number in numbers]
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more


# -- what the trainer waited for ---------------------------------------------------------------------------------------


class _Chains:
    """For each train step, the group that completed its batch, and what that group did while the trainer waited."""

    def __init__(self, history: History) -> None:
        self.history = history
        self._ready_at: dict[GroupId, list[float]] = defaultdict(list)
        for wait in history.waits:
            if wait.state == READY:
                self._ready_at[wait.group].append(wait.start)
        self._next = self._next_group()
        last = {self._next, *map(self.last_group, history.steps)}
        self.attempts: dict[GroupId, list[GenerationAttempt]] = _of_groups(history.attempts, last)
        self.waits: dict[GroupId, list[GroupWait]] = _of_groups(history.waits, last)
        self._span_starts = [span.start for span in history.idle]
        self._syncs: dict[ReplicaId, list[SyncPhase]] = defaultdict(list)
        for sync in history.syncs:
            if sync.name != "staging":
                self._syncs[sync.replica].append(sync)

    def last_group(self, step: StepRow) -> GroupId | None:
        """The group of a batch that became ready last. After a branch, groups become ready again for a later batch."""
        formed = next((phase.start for phase in step.phases if phase.name != "collecting"), inf)

        def ready_at(group: GroupId) -> float:
            return max((at for at in self._ready_at[group] if at <= formed), default=-1.0)

        return max(step.groups, key=ready_at, default=None)

    def _next_group(self) -> GroupId | None:
        """The group for which the next batch waits: of those that are not complete, the one due first."""
        rows = (row for row in self.history.groups if row.started_at >= 0 > row.ended_at and row.state not in COMPLETE)
        return min(((row.deadline, row.group) for row in rows), default=(0, None))[1]

    def spans(self, start: float, end: float) -> list[IdleSpan]:
        """The idle spans that overlap a time, cut to it."""
        first = max(0, bisect_right(self._span_starts, start) - 1)
        found = []
        for index in range(first, len(self.history.idle)):
            span = self.history.idle[index]
            if span.start >= end:
                break
            if span.end > start:
                found.append(span._replace(start=max(span.start, start), end=min(span.end, end)))
        return found

    def bounds(self, step: StepRow, start: float, end: float) -> dict[str, float]:
        """Seconds between `start` and `end` by what the trainer did or what bounded the step (`BOUNDS`)."""
        sums = dict.fromkeys(BOUNDS, 0.0)
        group = self.last_group(step) if step.groups else self._next
        for span in self.spans(start, end):
            if span.trainer in WAITS and group is not None:
                bound = "stragglers" if span.trainer == "waiting_for_stragglers" else "generation"
                self._split(group, span.start, span.end, bound, sums)
            else:
                sums[span.trainer if span.trainer in BOUNDS else "other"] += span.end - span.start
        sums["other"] += max(0.0, end - start - sum(sums.values()))  # before the first event
        return sums

    def _split(self, group: GroupId, start: float, end: float, bound: str, sums: dict[str, float]) -> None:
        """Add what a group did between two times: its attempts and waits, which never overlap, and the gaps."""
        at, gap = start, "not_started"
        done: list[GenerationAttempt | GroupWait] = [*self.attempts[group], *self.waits[group]]
        for one in sorted(done, key=attrgetter("start", "end")):
            low = min(max(at, one.start), end)
            high = min(max(low, one.end), end)
            sums[gap] += low - at
            at = high
            if isinstance(one, GenerationAttempt):
                synced = self._synced(one.replica, low, high)
                sums["sync"] += synced
                sums[bound] += high - low - synced
                gap = "parked"
            else:
                sums["other" if one.state == READY else "rewards"] += high - low
                if one.outcome == "batched":
                    gap = "other"
        sums[gap] += end - at

    def _synced(self, replica: ReplicaId, start: float, end: float) -> float:
        """Seconds between two times in which a replica took new weights."""
        syncs = self._syncs[replica]
        sums, index = 0.0, bisect_right(syncs, start, key=lambda sync: sync.end)
        while index < len(syncs) and syncs[index].start < end:
            sums += _overlap(start, end, syncs[index].start, syncs[index].end)
            index += 1
        return sums


def _of_groups(values: Iterable[Any], groups: Container[GroupId | None]) -> dict[GroupId, list[Any]]:
    """The attempts or waits of some groups, by group."""
    found = defaultdict(list)
    for value in values:
        if value.group in groups:
            found[value.group].append(value)
    return found


def _overlap(start: float, end: float, first: float, last: float) -> float:
    return max(0.0, min(end, last) - max(start, first))


def _turns(history: History) -> list[tuple[StepRow, float, float]]:
    """(step, start, end) of each trained step: from the end of the step before it to its own. The first begins with the
    run, and the last ends with the record."""
    steps = sorted((step for step in history.steps if step.phases), key=lambda step: _end_of(step, history))
    turns, start = [], 0.0
    for step in steps:
        end = min(max(_end_of(step, history), start), history.end)
        turns.append((step, start, end))
        start = end
    if turns:
        step, begin, _ = turns[-1]
        turns[-1] = (step, begin, history.end)
    return turns


def _end_of(step: StepRow, history: History) -> float:
    return step.phases[-1].end if step.phases else history.end


# -- a step ------------------------------------------------------------------------------------------------------------


def explain_step(history: History, number: StepId) -> Explanation:
    """What a train step waited for. Raises: `ConfigError` for a step that the record does not have."""
    turns = _turns(history)
    known = [turn for turn in turns if turn[0].step == number]
    if not known:
        last = max((step.step for step, _, _ in turns), default=-1)
        fix = f"use a number from 0 to {last}" if last >= 0 else "try again once it trains"
        raise ConfigError("--step", number, f"does not exist: the record has {counted(last + 1, 'train step')}", fix)
    step, start, end = known[-1]
    chains = _Chains(history)
    bounds = {name: s for name, s in chains.bounds(step, start, end).items() if s > 0}
    bound = any(span.trainer == "waiting_for_stragglers" for span in chains.spans(start, end))
    sentences = [_step_phases(step, start), *_step_wait(chains, step, bounds, bound=bound)]
    if step.groups:
        low, high = min(step.staleness), max(step.staleness)
        stale = f"staleness {low}" if low == high else f"staleness {low} to {high}"
        batch = f"It took {counted(len(step.groups), 'group')} with {_tokens(step.tokens)}, {stale}"
        sentences.append(f"{batch}: {_few(sorted(step.groups))}.")
    if len(known) > 1:
        sentences.append(f"It was trained {len(known)} times, because the run went back to an earlier checkpoint.")
    figures = {
        "step": number, "start": start, "end": end, "seconds": bounds, "groups": list(step.groups),
        "staleness": list(step.staleness), "last_group": chains.last_group(step), "version": step.version,
    }  # fmt: skip
    heading = f"step {number}: {seconds(end - start)}"
    part = _part(heading, "s", bounds, BOUNDS, *sentences)
    return _explanation(history, {"step": number}, (part,), figures)


def _step_phases(step: StepRow, start: float) -> str:
    phases = [f"{phase.name} {seconds(phase.end - phase.start)}" for phase in step.phases if phase.end > phase.start]
    state = "finished" if step.finished_at >= 0 else f"is still {step.phases[-1].name}"
    version = f", as version {step.version}" if step.version >= 0 else ""
    when = f" at {moment(step.finished_at)}" if step.finished_at >= 0 else ""
    return f"The step before it ended at {moment(start)}; it {state}{when}{version}: {', '.join(phases)}."


def _step_wait(chains: _Chains, step: StepRow, bounds: Mapping[str, float], *, bound: bool) -> list[str]:
    """What the trainer waited for, and why no other group could replace it. `bound`: it waited for a deadline."""
    works = ("training", "scoring", "publishing", "inspecting", "other")
    waited = sum(s for name, s in bounds.items() if name not in works)
    group = chains.last_group(step)
    if group is None:
        return ["It has no batch yet."]
    if waited <= 0:
        return [f"The trainer did not wait for groups: group {group}, its last, was ready before the trainer."]
    row = chains.history.groups[group]
    story = f"The trainer waited {seconds(waited)} for group {group}{_story(chains, row)}."
    if bound:
        why = f"No other group could replace it: step {row.deadline} was its deadline."
        return [story, why]
    return [story, f"It was the last of the {counted(len(step.groups), 'group')} of the batch to become ready."]


def _story(chains: _Chains, row: GroupRow) -> str:
    """` on replica 1, started at version 9, 3 100 tokens long, aborted once by a sync`."""
    attempts = chains.attempts[row.group]
    if not attempts:
        return ""
    replicas = list(dict.fromkeys(attempt.replica for attempt in attempts))
    where = f" on replica{'s' * (len(replicas) > 1)} {_few(replicas)}"
    details = [
        f"started at version {attempts[0].version} at {moment(attempts[0].start)}",
        f"{_tokens(row.tokens)} long",
        *_interruptions(attempts),
        *(
            f"{seconds(wait.end - wait.start)} in the state {wait.state}"
            for wait in chains.waits[row.group]
            if wait.state != READY
        ),
    ]
    return f"{where}, {', '.join(details)}"


def _interruptions(attempts: Sequence[GenerationAttempt]) -> list[str]:
    """`aborted once by the sync to version 11`, in words for each reason."""
    counts: dict[str, int] = defaultdict(int)
    for attempt, later in zip(attempts, [*attempts[1:], None], strict=True):
        if attempt.outcome in ("aborted", "failed", "lost"):
            why = _why_it_ended(attempt, later)
            counts[why] += 1
    return [f"{why.format(times=_times(count))}" for why, count in counts.items()]


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _why_it_ended(attempt: GenerationAttempt, later: GenerationAttempt | None) -> str:
    if attempt.outcome == "failed":
        return "failed {times}"
    if attempt.outcome == "lost":
        return "lost {times} with its replica"
    if attempt.reason == "sync":
        version = f" to version {later.version}" if later is not None and later.version > attempt.version else ""
        return f"aborted {{times}} by the sync{version}"
    words = {
        "pool": "aborted {times} for the trainer, which took its pool",
        "drain": "aborted {times} by a drain",
        "timeout": "parked {times} because it exceeded its time limit",
        "moved": "moved {times} to a faster replica",
        "dropped": "dropped",
        "unasked": "aborted {times} by its replica",
    }
    return words[attempt.reason]


# -- a group -----------------------------------------------------------------------------------------------------------


def explain_group(history: History, number: GroupId) -> Explanation:
    """The story of a group. Raises: `ConfigError` for a group that the record does not have."""
    drawn = len(history.groups)
    if not 0 <= number < drawn:
        fix = f"use a number from 0 to {drawn - 1}" if drawn else "try again once it trains"
        raise ConfigError("--group", number, f"does not exist: the record has {counted(drawn, 'group')}", fix)
    row = history.groups[number]
    attempts = [attempt for attempt in history.attempts if attempt.group == number]
    waits = [wait for wait in history.waits if wait.group == number]
    timed = [(row.drawn_at, f"at {moment(row.drawn_at)} it was drawn.")]
    timed += [(attempt.start, _attempt_sentence(attempt, row)) for attempt in attempts]
    timed += [(wait.start, _wait_sentence(wait, row)) for wait in waits]
    sentences = [text[0].upper() + text[1:] for _, text in sorted(timed, key=lambda one: one[0])]
    sentences.append(_end_sentence(row))
    amounts = {"generating": sum(attempt.end - attempt.start for attempt in attempts)}
    for wait in waits:
        amounts[wait.state] = amounts.get(wait.state, 0.0) + wait.end - wait.start
    figures = {**structs.asdict(row), "seconds": amounts, "attempts": [*map(structs.asdict, attempts)]}
    heading = f"group {number}: {row.state}"
    return _explanation(history, {"group": number}, (Part(heading, tuple(sentences)),), figures)


def _attempt_sentence(attempt: GenerationAttempt, row: GroupRow) -> str:
    began = "continued" if attempt.resumed else "began"
    text = f"at {moment(attempt.start)} its attempt {attempt.attempt} {began} on replica {attempt.replica}"
    text += f" at version {attempt.version}, to be trained by step {row.deadline} at the latest"
    took = f"after {seconds(attempt.end - attempt.start)} and {_tokens(attempt.sampled)}"
    if attempt.outcome == "running":
        return f"{text}; it has been running for {seconds(attempt.end - attempt.start)}."
    if attempt.outcome == "aborted":
        return f"{text}; it was {_why_it_ended(attempt, None).format(times='').replace('  ', ' ')} {took}."
    words = {"generated": "was complete", "failed": "failed", "lost": "was lost", "stopped": "was stopped"}
    reason = f": {attempt.reason}" if attempt.reason else ""
    return f"{text}; it {words[attempt.outcome]} {took}{reason}."


def _wait_sentence(wait: GroupWait, row: GroupRow) -> str:
    took = seconds(wait.end - wait.start)
    if wait.state != READY:
        return f"at {moment(wait.start)} it entered the state {wait.state}, for {took}."
    if wait.outcome == "batched":
        return f"at {moment(wait.start)} it was ready, and waited {took} for the batch of step {row.step}."
    return f"at {moment(wait.start)} it was ready; after {took}: {wait.outcome}."


def _end_sentence(row: GroupRow) -> str:
    if row.state == "consumed":
        versions = f"from version {row.oldest_version}"
        if row.newest_version != row.oldest_version:
            versions = f"from versions {row.oldest_version} to {row.newest_version}"
        tokens = f"Its {_tokens(row.tokens)} are {versions}"
        reward = "" if row.reward_mean is None else f"; mean reward {row.reward_mean:.3g}"
        return f"{tokens}; step {row.step} trained on them at staleness {row.staleness}{reward}."
    if row.ended_at >= 0:
        return f"It ended at {moment(row.ended_at)}: {row.state}. Its {_tokens(row.tokens)} were not trained on."
    versions = "" if row.oldest_version == NO_VERSION else f", from version {row.oldest_version} on"
    return f"It has not ended: it is {row.state}, with {_tokens(row.tokens)}{versions}."


# -- a moment ----------------------------------------------------------------------------------------------------------


def explain_moment(history: History, at: float) -> Explanation:
    """What was happening at a time. Raises: `ConfigError` for a time outside the record."""
    if not 0 <= at <= history.end:
        fix = f"use seconds from 0 to {history.end:.1f}"
        raise ConfigError("--at", at, f"is not in the record, which ends at {history.end:.1f} s", fix)
    chains = _Chains(history)
    span = next(iter(chains.spans(at, at + 1e-9) or chains.spans(at - 1e-9, at)), None)
    sentences = [_trainer_then(history, at, span)]
    sentences += [f"Replica {replica}: {text}." for replica, text in sorted(_replicas_then(history, at).items())]
    ready = [wait.group for wait in history.waits if wait.start <= at < wait.end and wait.state == READY]
    inside: dict[str, int] = defaultdict(int)
    for wait in history.waits:
        if wait.start <= at < wait.end and wait.state != READY:
            inside[wait.state] += 1
    sentences += [f"{counted(count, 'group')} in the state {state}." for state, count in inside.items()]
    sentences.append(f"{counted(len(ready), 'group')} ready{f': {_few(sorted(ready))}' if ready else ''}.")
    slots: dict[str, float] = {}
    if span is not None and span.end > span.start:
        whole = next(one for one in history.idle if one.start <= span.start < one.end)
        length = whole.end - whole.start
        slots = {"busy": whole.busy_s / length, **{cause: s / length for cause, s in whole.idle_s}}
    table = _part("slots", "slots", slots, {"busy": "generating or measuring", **SENTENCES})
    figures = {"at": at, "slots": slots, "trainer": "" if span is None else span.trainer, "ready": ready}
    parts = (Part(f"at {at:.1f} s of {history.end:.1f} s", tuple(sentences)), *([table] if table.shares else []))
    return _explanation(history, {"at": at}, parts, figures)


def _trainer_then(history: History, at: float, span: IdleSpan | None) -> str:
    phase = next((p for step in history.steps for p in step.phases if p.start <= at < p.end), None)
    does = "" if span is None else f"; the trainer: {SENTENCES[span.trainer]}"
    return f"No step{does}." if phase is None else f"Step {phase.step} was {phase.name}{does}."


def _replicas_then(history: History, at: float) -> dict[int, str]:
    texts: dict[int, list[str]] = {}
    for life in history.lives:
        if life.kind == "replica" and life.start <= at < life.end:
            up = life.up is not None and life.up <= at
            texts[life.index] = ["up" if up else "starting"]
    running: dict[int, list[int]] = defaultdict(list)
    for attempt in history.attempts:
        if attempt.start <= at < attempt.end:
            running[attempt.replica].append(attempt.group)
    rows: dict[int, int] = defaultdict(int)
    for chunk in history.chunks:
        if chunk.start <= at < chunk.end:
            rows[chunk.replica] += chunk.rows
    for sync in history.syncs:
        if sync.start <= at < sync.end:
            texts.setdefault(sync.replica, []).append(f"{sync.name} version {sync.version}")
    for replica, groups in running.items():
        text = f"{counted(len(groups), 'group')} running ({_few(sorted(groups))})"
        texts.setdefault(replica, []).append(text)
    for replica, count in rows.items():
        texts.setdefault(replica, []).append(f"measuring {counted(count, 'validation row')}")
    return {replica: ", ".join(parts) for replica, parts in texts.items()}


# -- idle time and waste -----------------------------------------------------------------------------------------------


def explain_idle(history: History) -> Explanation:
    """Every idle second of slots and trainer and every token that no step trained on, by cause."""
    return _explanation(history, {"idle": True}, _idle_parts(history), _idle_figures(history))


def _idle_figures(history: History) -> dict[str, Any]:
    return {
        "slots_busy_s": history.busy_s, "slots_idle_s": history.idle_s, "trainer_s": history.trainer_s,
        "tokens": dict(history.tokens),
    }  # fmt: skip


def _idle_parts(history: History) -> tuple[Part, ...]:
    slots = {"busy": history.busy_s, **history.idle_s}
    whole, tokens = sum(slots.values()), sum(history.tokens.values())
    busy = f"{percent(history.busy_s / whole)} of {seconds(whole)} were busy." if whole else "No replica was up."
    trained = history.tokens.get("trained", 0)
    used = f"{percent(trained / tokens)} of {_tokens(tokens)} were trained on." if tokens else "No token was sampled."
    words = {"busy": "generating groups or measuring validation rows", **SENTENCES}
    return (
        _part("slots: where their time went", "slot s", slots, words, busy),
        _part("trainer: where its time went", "s", history.trainer_s, SENTENCES),
        _part("sampled tokens: their fates", "tokens", history.tokens, FATES, used),
    )


# -- the run -----------------------------------------------------------------------------------------------------------


TENSES = {RUNNING: "is", "interrupted": "was"}
"""Verbs of the outcomes of a run; of the others: `has`."""
NO_COUNSEL = Counsel()


def explain_run(
    history: History, health: Sequence[HealthFinding] = (), counsel: Counsel = NO_COUNSEL
) -> Explanation:  # fmt: skip
    """Where the time of a run went, its slowest steps, idle time and waste by cause, problems of its training, and
    advice."""
    chains = _Chains(history)
    turns = _turns(history)
    bounds = [chains.bounds(step, start, end) for step, start, end in turns]
    sums = {name: sum(one[name] for one in bounds) for name in BOUNDS}
    if not turns:
        sums["other"] = history.end
    finished = [one for one in history.trained if one.finished_at >= 0]
    state = f"{history.outcome}{f': {history.reason}' if history.reason else ''}"
    head = Part(
        f"run {history.run}",
        (
            f"It {TENSES.get(history.outcome, 'has')} {state}.",
            f"{counted(len(finished), 'train step')} in {seconds(history.end)}, "
            f"{counted(len(history.groups), 'group')} drawn, {history.events} events.",
        ),
    )
    path = _part("bottlenecks", "s", sums, BOUNDS, *counsel.causes)
    slowest = sorted(zip(turns, bounds, strict=True), key=lambda one: one[0][1] - one[0][2])[:SLOWEST]
    reasons = [_slow_step(chains, turn, bound) for turn, bound in slowest]
    parts = (
        head, path, *([Part("slowest steps", tuple(reasons))] if reasons else []), *_idle_parts(history),
        *([Part("health", tuple(one.text for one in health))] if health else []),
        *([Part("advice", counsel.lines)] if counsel.lines else []),
    )  # fmt: skip
    figures = {
        "outcome": history.outcome, "seconds": history.end, "steps": len(finished), "groups": len(history.groups),
        "events": history.events, "bounds": sums, **_idle_figures(history),
        "slowest": [turn[0].step for turn, _ in slowest], "health": {one.check: one.text for one in health},
    }  # fmt: skip
    return _explanation(history, {}, parts, figures, tuple(one.plain() for one in counsel.advice))


def _slow_step(chains: _Chains, turn: tuple[StepRow, float, float], bounds: Mapping[str, float]) -> str:
    step, start, end = turn
    most = max(bounds, key=lambda name: bounds[name])
    text = f"step {step.step}: {seconds(end - start)}, of which {seconds(bounds[most])}: {BOUNDS[most]}"
    group = chains.last_group(step)
    if group is None or most in ("training", "scoring", "publishing", "other"):
        return f"{text}."
    return f"{text}; group {group}{_story(chains, chains.history.groups[group])}."


def _explanation(
    history: History,
    about: Mapping[str, Any],
    parts: tuple[Part, ...],
    figures: Mapping[str, Any],
    advice: tuple[Mapping[str, Any], ...] = (),
) -> Explanation:
    return Explanation(about=about, parts=parts, figures=figures, advice=advice, notes=history.notes)
