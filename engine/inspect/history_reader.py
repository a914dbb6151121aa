"""Reads what a record and its history log contain, and gives its `History`.

Called by the commands that show a run. The log has what ended before the newest snapshot; the rest is replayed
(`metrics.history_log`). The first reading of a run without a log writes one.
"""

from operator import attrgetter
from pathlib import Path
from typing import Any

from msgspec import structs

from engine.ids import GroupId, StepId
from engine.inspect.moment import open_record
from engine.metrics.history import FATES, RUNNING, GroupRow, History, Intervals, StepRow
from engine.metrics.history_builder import OpenValues
from engine.metrics.history_log import FILE, keep, replayed_history
from engine.record import Header, Record


def read_history(run: str | Path | Record) -> History:
    """The history of a run: its directory, that of its record, or an open record. A running run is read to its present
    end.

    Raises: `ConfigError` if there is no such directory, `RecordError` if the record cannot be read, `EngineError` if
    this engine decides differently from the record.
    """
    record = run if isinstance(run, Record) else open_record(run)
    directory = Path(record.name)
    path = directory.parent / FILE if directory.name == "schedule" else None
    found = replayed_history(record, path)
    if path is not None:
        keep(found, path)
    ending = found.builder.state.ending.outcome
    outcome, reason = (RUNNING, "") if ending is None else (ending.word, ending.reason)
    found.builder.end()
    torn = (f"cut: {record.torn}",) if record.torn else ()
    return made_history(record.header, found.intervals(), found.builder.open, outcome, reason, torn)


def made_history(
    header: Header, ended: Intervals, open: OpenValues, outcome: str, reason: str = "", notes: tuple[str, ...] = ()
) -> History:
    """The history that consists of these values. `open`: what else is known of the run, once everything has ended."""
    groups, tokens = _groups(ended.groups)
    tokens["lost"], tokens["undone"] = open.lost, tokens["undone"] + open.undone
    return History(
        run=header.run, code=header.code, limits=header.limits, policies=header.policies, config=header.config,
        ticks=open.ticks, events=open.events, end=open.at, outcome=outcome, reason=reason, notes=(*notes, *open.notes),
        slots=open.slots, attempts=_by_end(ended.attempts), chunks=tuple(ended.chunks), waits=_by_end(ended.waits),
        groups=tuple(groups[id] for id in sorted(groups)), steps=_steps(ended.steps), syncs=tuple(ended.syncs),
        validations=tuple(ended.validations), lives=tuple(ended.lives), checkpoints=tuple(ended.checkpoints),
        idle=tuple(ended.idle), tokens=tokens, rows=tuple(ended.rows), failures=tuple(ended.failures),
        functions=open.calls.totals, cores=header.cores, settings=tuple(ended.settings),
    )  # fmt: skip


def _groups(rows: list[GroupRow]) -> tuple[dict[GroupId, GroupRow], dict[str, int]]:
    """(the row of each group, tokens by fate)."""
    groups: dict[GroupId, GroupRow] = {}
    tokens = dict.fromkeys(FATES, 0)
    for row in rows:
        tokens[_fate(row)] += row.tokens
        before = groups.get(row.group)
        if before is not None:  # the run has gone back to an earlier checkpoint
            if before.state == "consumed":
                tokens["trained"] -= before.tokens
                tokens["undone"] += before.tokens
            row = _continued(before, row)
        groups[row.group] = row
    return groups, tokens


def _fate(row: GroupRow) -> str:
    if row.ended_at < 0:
        return "open"
    return "trained" if row.state == "consumed" else row.state


def _continued(before: GroupRow, row: GroupRow) -> GroupRow:
    """The row of a group with what an earlier one says of the time before the run went back."""
    known: dict[str, Any] = {"drawn_at": before.drawn_at, "attempts": before.attempts + row.attempts}
    if before.started_at >= 0:
        known["started_at"] = before.started_at
    if row.deadline < 0:
        known["deadline"] = before.deadline
    if row.step < 0:
        known |= {"step": before.step, "staleness": before.staleness}
    if row.reward_mean is None:
        known |= {"reward_mean": before.reward_mean, "reward_spread": before.reward_spread}
    return structs.replace(row, **known)


def _steps(found: list[StepRow | StepId]) -> tuple[StepRow, ...]:
    undone: list[StepRow] = []
    steps: dict[StepId, StepRow] = {}
    for one in found:
        if isinstance(one, StepRow):
            if one.undone:
                undone.append(one)
            else:
                steps[one.step] = one
        else:
            undone += [row._replace(undone=True) for step, row in steps.items() if step >= one]
            steps = {step: row for step, row in steps.items() if step < one}
    return (*undone, *steps.values())


def _by_end(values: list[Any]) -> tuple[Any, ...]:
    return tuple(sorted(values, key=attrgetter("end", "group")))
