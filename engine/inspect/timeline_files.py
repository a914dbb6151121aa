"""Writes a timeline for other tools: a trace for Perfetto, or a Parquet table. Called by `engine timeline`."""

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from engine.errors import visible
from engine.inspect.timeline import Timeline
from engine.metrics.journal import plain
from engine.record.files import private_opener

SUFFIXES = {"perfetto": ".trace.json", "parquet": ".parquet"}
"""The suffix of each format's file."""
ROWS_AT_ONCE = 1 << 16


# -- Perfetto ----------------------------------------------------------------------------------------------------------


COUNTERS = "idle slots"
"""The process of the counters: idle slots by cause."""
ARROW = '"name":"cause","cat":"cause"'
"""Perfetto joins the ends of an arrow by these and its number."""
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""Perfetto refuses the escapes of characters such as emoji."""


def write_perfetto(timeline: Timeline, path: Path) -> None:
    """Write a trace for https://ui.perfetto.dev, in Chrome's JSON format: replicas as processes, slots as threads,
    arrows as flows. Times are whole microseconds."""
    processes = {name: pid for pid, name in enumerate([*{track.process: 0 for track in timeline.tracks}, COUNTERS], 1)}
    places = [  # Perfetto wants threads that no other process has
        (processes[track.process], tid) for tid, track in enumerate(timeline.tracks, len(processes) + 1)
    ]
    with open(path, "w", encoding="utf-8", opener=private_opener) as file:
        file.write('{"traceEvents":[')
        separator = "\n"
        for event in chain(
            _names(timeline, processes, places), _events(timeline, places), _counts(timeline, processes[COUNTERS])
        ):
            file.write(separator + event)
            separator = ",\n"
        file.write("\n]}\n")


def _names(timeline: Timeline, processes: dict[str, int], places: list[tuple[int, int]]) -> Iterator[str]:
    """The names and the order of processes and threads."""
    for name, pid in processes.items():
        yield _encode({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        yield _encode({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
    for track, (pid, tid) in zip(timeline.tracks, places, strict=True):
        yield _encode({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track.name}})
        yield _encode({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})


def _events(timeline: Timeline, places: list[tuple[int, int]]) -> Iterator[str]:
    """Begin, arrows and end of each slice. Readers sort them by time; for equal times they keep this order, in which a
    slice ends before the next one of its track begins. Complete events (`X`) would be sorted by length as well."""
    arrows: dict[int, list[str]] = defaultdict(list)
    for number, (source, target) in enumerate(timeline.arrows, start=1):
        arrows[source].append(f'{{"ph":"s",{ARROW},"id":{number}')
        arrows[target].append(f'{{"ph":"f","bp":"e",{ARROW},"id":{number}')
    for number, slice in enumerate(timeline.slices):
        pid, tid = places[slice.track]
        begin, details = _us(slice.start), timeline.details(slice).items()
        args = {name: visible(detail) if isinstance(detail, str) else plain(detail) for name, detail in details}
        what = {"name": timeline.title(slice), "cat": slice.kind, "pid": pid, "tid": tid, "ts": begin, "args": args}
        yield _encode({"ph": "B", **what})
        for arrow in arrows.pop(number, ()):
            yield f'{arrow},"pid":{pid},"tid":{tid},"ts":{begin}}}'
        yield f'{{"ph":"E","pid":{pid},"tid":{tid},"ts":{_us(slice.end)}}}'


def _counts(timeline: Timeline, pid: int) -> Iterator[str]:
    """An event for each change of a counter."""
    shown = dict.fromkeys(timeline.history.idle_s, -1.0)
    for span in timeline.history.idle:
        idle = dict(span.idle_s)
        for cause, before in shown.items():
            slots = round(idle.get(cause, 0.0) / (span.end - span.start), 3)
            if slots != before:
                shown[cause] = slots
                yield _encode({"ph": "C", "name": cause, "pid": pid, "ts": _us(span.start), "args": {"slots": slots}})


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


# -- Parquet -----------------------------------------------------------------------------------------------------------


INTEGERS = (
    "group", "attempt", "replica", "step", "validation", "chunk", "sync", "steps", "rows", "groups", "version",
    "oldest_version", "newest_version", "tokens", "sampled", "deadline", "staleness", "staleness_max", "life",
    "cause", "ended_by", "ordered_by",
)  # fmt: skip
NUMBERS = ("start", "end", "reward_mean", "staleness_mean", "accuracy")
TEXTS = ("process", "track", "kind", "title", "outcome", "reason", "became", "mode")


def write_parquet(timeline: Timeline, path: Path) -> None:
    """Write a table with a row for each slice. A column without a value for a slice is null there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [(name, pa.string()) for name in TEXTS]
        + [(name, pa.float64()) for name in NUMBERS]
        + [(name, pa.int64()) for name in INTEGERS]
        + [("resumed", pa.bool_())]
    )
    with open(path, "wb", opener=private_opener) as file, pq.ParquetWriter(file, schema) as writer:
        for first in range(0, len(timeline.slices), ROWS_AT_ONCE):
            rows = [
                _table_row(timeline, place) for place in range(first, min(first + ROWS_AT_ONCE, len(timeline.slices)))
            ]
            writer.write_table(pa.Table.from_pylist(rows, schema))


def _table_row(timeline: Timeline, place: int) -> dict[str, Any]:
    slice = timeline.slices[place]
    track = timeline.tracks[slice.track]
    own = {
        "process": track.process, "track": track.name, "kind": slice.kind, "title": timeline.title(slice),
        "start": slice.start, "end": slice.end,
    }  # fmt: skip
    return timeline.details(slice) | own


WRITERS = {"perfetto": write_perfetto, "parquet": write_parquet}
"""By format."""
