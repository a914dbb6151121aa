"""The end of a record without the texts of its run: the contents of a bug file.

Called by `engine bug`. It replaces the texts of a snapshot and of the events after it, then lets a scheduler decide
about these events alone, and records its commands. So what a scheduler makes of texts is made of placeholders, and the
file replays like any other record. Every command is compared with the recorded one, apart from the words of reasons.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.errors import ConfigError
from engine.inspect.tick_index import TickIndex
from engine.policies import DEFAULTS
from engine.policies import names as registered
from engine.record.codec import CodecError, pack, unpack
from engine.record.frames import Header, Rejected, Tick
from engine.record.placeholders import Placeholders
from engine.record.reader import Place, Record
from engine.record.recorder import MemoryRecorder
from engine.record.replayer import build_from_header, build_scheduler, compare
from engine.record.snapshots import restore
from engine.scheduling.scheduler import Scheduler
from engine.states.limits import Limits
from engine.states.state import RunFacts

LEAST_EVENTS = 4096
"""A file that does not begin with the first event has at least so many, so that it shows what led to the failure."""
RUN = "bug"
"""The run's name in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BugReport:
    """The record of a bug file, and what is not in it."""

    recorder: MemoryRecorder
    texts: int
    """Number of texts that were replaced."""
    names: tuple[str, ...]
    """Names of the run that stayed."""
    divergence: str = ""
    """Where and how this engine decides differently. The record ends there."""


def report_bug(record: Record, config: Mapping[str, Any], names: Iterable[str], *, whole: bool = False) -> BugReport:
    """The end of a record, from a snapshot on.

    Args: `config`: what the header gets as the configuration; it must have no texts of the run. `names`: as for
    `Placeholders`; those of policies and added states are added. `whole`: from the first event on.
    Raises: `ConfigError` if there is no event, `RecordError`.
    """
    index = TickIndex()
    index.read(record)
    if not len(index):
        raise ConfigError("RUN", record.name, "has no event yet", "try again once it trains")
    limits, head = Limits.from_plain(dict(record.header.limits)), record.header
    states = [added.name for added in limits.added_states]
    chosen = [name for decision in DEFAULTS for name in registered(decision)]
    placeholders = Placeholders([*chosen, *head.policies.values(), *states, *names])
    head = Header(
        run=RUN, limits=placeholders.replaced(limits).to_plain(), policies=head.policies, config=dict(config),
        code=head.code, flags=head.flags, cores=head.cores,
    )  # fmt: skip
    recorder = MemoryRecorder(head)
    for place in () if whole else record.snapshots():
        if place.position > index.first_event(len(index) - 1) - LEAST_EVENTS:
            continue
        plain = _without_texts(record, place, placeholders)
        if plain is not None:
            recorder.next_tick, recorder.next_event = place.ticks, place.position
            recorder.snapshot(plain)
            return _record_ticks(record, place, restore(plain), recorder, placeholders)
    scheduler = build_from_header(record, lambda _: build_scheduler(head))
    return _record_ticks(record, None, scheduler, recorder, placeholders)


def _without_texts(record: Record, place: Place, placeholders: Placeholders) -> list[Any] | None:
    """A snapshot of a record without texts; None if this engine cannot use it."""
    try:
        fields, limits, names, tree = record.snapshot(place).plain
        facts = placeholders.replaced(msgspec.convert(tree, RunFacts))
        limits = placeholders.replaced(Limits.from_plain(limits)).to_plain()
        plain: list[Any] = unpack(pack([fields, limits, names, facts]))
        restore(plain)
    except (CodecError, msgspec.MsgspecError, ValueError):
        return None
    return plain


def _record_ticks(
    record: Record, begin: Place | None, scheduler: Scheduler, recorder: MemoryRecorder, placeholders: Placeholders
) -> BugReport:
    """Record the ticks after a snapshot, with placeholders."""
    divergence = ""
    for frame in record.frames_and_snapshots(begin):
        if isinstance(frame, Rejected):
            recorder.reject(placeholders.replaced(frame.events), placeholders.replaced(frame.reason))
        elif isinstance(frame, Tick):
            tick = placeholders.replaced(frame)
            answer, found = compare(tick, scheduler, reasons=False)
            recorder.write(tick.events, tick.commands if found else answer)
            if found is not None:
                divergence = str(found)
                break
    names = tuple(placeholders.names)
    return BugReport(recorder=recorder, texts=len(placeholders), names=names, divergence=divergence)
