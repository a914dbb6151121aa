"""Writes a timeline for other tools: a Perfetto trace, OpenTelemetry spans, a Parquet table.

Called by `engine timeline`. The packages that it needs are imported only here, when a format needs them. The run's
times are seconds since it began; the first two formats want nanoseconds.
"""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from struct import Struct, pack
from typing import Any

from engine.errors import EngineError
from engine.inspect.timeline import Timeline
from engine.record.files import private_opener
from engine.version import __version__

SUFFIXES = {"perfetto": ".pftrace", "otlp": ".otlp.jsonl", "parquet": ".parquet"}
"""The suffix of each format's file."""
PACKAGES = {"perfetto": "perfetto", "otlp": "opentelemetry", "parquet": "pyarrow"}
"""The package that each format needs."""
SPANS_AT_ONCE = 2048
ROWS_AT_ONCE = 1 << 16


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


# -- Perfetto ----------------------------------------------------------------------------------------------------------


SEQUENCE = 1
"""The one writer of the trace."""
COUNTERS = "idle slots"
"""The process of the counters: idle slots by cause."""


def write_perfetto(timeline: Timeline, path: Path) -> None:
    """Write a trace for https://ui.perfetto.dev: replicas as processes, slots as tracks, arrows as flows. Its millions
    of events are encoded here, because messages of the package `perfetto` take twice as long."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import DebugAnnotation, TracePacket, TrackEvent

    encoder = _EventEncoder(TracePacket, TrackEvent, DebugAnnotation)
    with open(path, "wb", opener=private_opener) as file:
        for packet in _descriptors(timeline, TracePacket):
            file.write(_framed(packet.SerializeToString()))
        for data in _events(timeline, encoder):
            file.write(data)
        for data in _counts(timeline, encoder):
            file.write(data)


def _descriptors(timeline: Timeline, packet_type: Any) -> Iterator[Any]:
    """A packet for each process, track and counter. The uuid of track `n` is n + 1; those of the others follow."""
    names = list(dict.fromkeys(track.process for track in timeline.tracks))
    uuids = {name: len(timeline.tracks) + 1 + place for place, name in enumerate([*names, COUNTERS])}
    first = True
    for name, uuid in uuids.items():
        packet = packet_type(trusted_packet_sequence_id=SEQUENCE)
        if first:
            packet.sequence_flags = packet_type.SEQ_INCREMENTAL_STATE_CLEARED
            first = False
        descriptor = packet.track_descriptor
        descriptor.uuid = uuid
        descriptor.process.pid = uuid
        descriptor.process.process_name = name
        descriptor.sibling_order_rank = uuid
        descriptor.child_ordering = descriptor.EXPLICIT
        yield packet
    for place, track in enumerate(timeline.tracks):
        packet = packet_type(trusted_packet_sequence_id=SEQUENCE)
        packet.track_descriptor.uuid = place + 1
        packet.track_descriptor.parent_uuid = uuids[track.process]
        packet.track_descriptor.name = track.name
        packet.track_descriptor.sibling_order_rank = place
        yield packet
    for place, cause in enumerate(timeline.history.idle_s):
        packet = packet_type(trusted_packet_sequence_id=SEQUENCE)
        packet.track_descriptor.uuid = _counter(timeline, place)
        packet.track_descriptor.parent_uuid = uuids[COUNTERS]
        packet.track_descriptor.name = cause
        packet.track_descriptor.counter.unit_name = "slots"
        yield packet


def _counter(timeline: Timeline, place: int) -> int:
    """The uuid of a counter: after those of tracks and processes, of which there are at most as many."""
    return 2 * len(timeline.tracks) + 2 + place


def _events(timeline: Timeline, encoder: "_EventEncoder") -> Iterator[bytes]:
    """The packets of each slice, for its begin and its end. Readers sort them by time; for equal times, they keep this
    order, in which a slice ends before the next one of its track begins."""
    slices, fixed, packet, note = timeline.slices, Struct("<Q").pack, encoder.packet, encoder.note
    outgoing, incoming = encoder.head("flow_ids", FIXED), encoder.head("terminating_flow_ids", FIXED)
    flows: list[bytes] = [b""] * len(slices)
    for number, (source, target) in enumerate(timeline.arrows, start=1):
        flows[source] += outgoing + fixed(number)
        flows[target] += incoming + fixed(number)
    named, kind_head, track_head = (encoder.head(*field) for field in (("name", BYTES), ("categories", BYTES), TRACK))
    kinds = {kind: kind_head + _sized(kind.encode()) for kind in {slice.kind for slice in slices}}
    tracks = [track_head + _varint(place + 1) for place in range(len(timeline.tracks))]
    for slice, flow in zip(slices, flows, strict=True):
        track, facts = tracks[slice.track], timeline.details(slice)
        names = named + _sized(timeline.title(slice).encode()) + kinds[slice.kind]
        notes = b"".join(map(note, facts, facts.values()))
        yield packet(slice.start, encoder.begins + track + names + flow + notes)
        yield packet(slice.end, encoder.ends + track)


def _counts(timeline: Timeline, encoder: "_EventEncoder") -> Iterator[bytes]:
    """A packet for each change of a counter."""
    track, value, number = encoder.head(*TRACK), encoder.head("double_counter_value", FIXED), Struct("<d")
    heads = {
        cause: encoder.counts + track + _varint(_counter(timeline, place)) + value
        for place, cause in enumerate(timeline.history.idle_s)
    }
    shown = dict.fromkeys(heads, -1.0)
    for span in timeline.history.idle:
        idle = dict(span.idle_s)
        for cause, head in heads.items():
            slots = round(idle.get(cause, 0.0) / (span.end - span.start), 3)
            if slots != shown[cause]:
                shown[cause] = slots
                yield encoder.packet(span.start, head + number.pack(slots))


WHOLE, FIXED, BYTES = 0, 1, 2
"""Types of fields on the wire: a whole number; 8 bytes; a length and that many bytes."""
TRACK = ("track_uuid", WHOLE)
KEPT = 1 << 16
"""Maximum number of encoded facts that are kept for the next slices."""


class _EventEncoder:
    """Encodes packets of track events. Numbers of fields come from the schema."""

    def __init__(self, packet_type: Any, event_type: Any, note_type: Any) -> None:
        self._events = event_type.DESCRIPTOR.fields_by_name
        self._notes = note_type.DESCRIPTOR.fields_by_name
        fields = packet_type.DESCRIPTOR.fields_by_name
        self._stamp = _head(fields["timestamp"], WHOLE)
        sequence = _head(fields["trusted_packet_sequence_id"], WHOLE) + _varint(SEQUENCE)
        self._event = sequence + _head(fields["track_event"], BYTES)
        kind = self.head("type", WHOLE)
        self.begins = kind + _varint(event_type.TYPE_SLICE_BEGIN)
        self.ends = kind + _varint(event_type.TYPE_SLICE_END)
        self.counts = kind + _varint(event_type.TYPE_COUNTER)
        self._note_head = self.head("debug_annotations", BYTES)
        self._fact_heads: dict[tuple[str, str], bytes] = {}
        self.note = lru_cache(KEPT, typed=True)(self._encode_note)
        """A fact as an annotation of an event."""

    def packet(self, at: float, event: bytes) -> bytes:
        """A packet with an event at a time."""
        return _framed(self._stamp + _varint(_ns(at)) + self._event + _sized(event))

    def head(self, name: str, kind: int) -> bytes:
        """What a field of an event begins with."""
        return _head(self._events[name], kind)

    def _encode_note(self, name: str, value: Any) -> bytes:
        if isinstance(value, int):
            field = "bool_value" if isinstance(value, bool) else "int_value"
            fact = self._fact_head(name, field, WHOLE) + _varint(value & (1 << 64) - 1)
        elif isinstance(value, float):
            fact = self._fact_head(name, "double_value", FIXED) + pack("<d", value)
        else:
            fact = self._fact_head(name, "string_value", BYTES) + _sized(str(value).encode())
        return self._note_head + _sized(fact)

    def _fact_head(self, name: str, field: str, kind: int) -> bytes:
        """An annotation up to its value."""
        head = self._fact_heads.get((name, field))
        if head is None:
            named = _head(self._notes["name"], BYTES) + _sized(name.encode())
            head = self._fact_heads[name, field] = named + _head(self._notes[field], kind)
        return head


def _framed(packet: bytes) -> bytes:
    """A packet as a field of the trace."""
    return b"\n" + _sized(packet)


def _head(field: Any, kind: int) -> bytes:
    return _varint(field.number << 3 | kind)


def _sized(value: bytes) -> bytes:
    size = len(value)
    return (SMALL[size] if size < 1 << 14 else _varint(size)) + value


def _varint(value: int) -> bytes:
    """A whole number, 7 bits in each byte, the lowest first."""
    if value < 1 << 14:
        return SMALL[value]
    if value < 1 << 28:
        return LOW[value & 16383] + SMALL[value >> 14]
    return LOW[value & 16383] + LOW[value >> 14 & 16383] + _varint(value >> 28)


SMALL = [bytes((low,)) if low < 128 else bytes((low & 127 | 128, low >> 7)) for low in range(16384)]
LOW = [bytes((low & 127 | 128, low >> 7 | 128)) for low in range(16384)]
"""Two bytes that more bytes follow."""


# -- OpenTelemetry -----------------------------------------------------------------------------------------------------


def write_otlp(timeline: Timeline, path: Path) -> None:
    """Write spans as lines of OTLP JSON, as OpenTelemetry's file exporter does."""
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    with open(path, "w", encoding="utf-8", opener=private_opener) as file:
        for spans in _span_batches(timeline):
            request = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
            file.write(json.dumps(_with_hex_ids(request), ensure_ascii=False) + "\n")


def send_otlp(timeline: Timeline, endpoint: str) -> int:
    """Send spans to a collector (OTLP over HTTP). Its headers, certificate and timeout are OpenTelemetry's environment
    variables. Returns the number of spans. Raises: `EngineError` if it refuses them."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces")
    sent = 0
    try:
        for spans in _span_batches(timeline):
            if exporter.export(spans) is not SpanExportResult.SUCCESS:
                raise EngineError(f"{endpoint} took {sent} spans, but not the next {len(spans)}; see the lines above")
            sent += len(spans)
    finally:
        exporter.shutdown()
    return sent


def _with_hex_ids(value: Any) -> Any:
    """OTLP JSON has ids as hexadecimal digits, not in base64 as other JSON of protobuf messages."""
    from base64 import b64decode

    if isinstance(value, dict):
        return {
            key: b64decode(one).hex() if key in ("traceId", "spanId", "parentSpanId") else _with_hex_ids(one)
            for key, one in value.items()
        }
    return [_with_hex_ids(one) for one in value] if isinstance(value, list) else value


def _span_batches(timeline: Timeline) -> Iterator[Sequence[Any]]:
    """All spans: the run's own, then one for each slice, with links to its causes."""
    batch: list[Any] = []
    for span in _spans(timeline):
        batch.append(span)
        if len(batch) == SPANS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def _spans(timeline: Timeline) -> Iterator[Any]:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

    history = timeline.history
    trace = int.from_bytes(hashlib.sha256(history.run.encode()).digest()[:16], "big") or 1
    scope = InstrumentationScope("step-engine", __version__)
    resources = {
        track.process: Resource({"service.name": track.process, "service.namespace": "step-engine", "run": history.run})
        for track in timeline.tracks
    }
    resources[""] = Resource({"service.name": "run", "service.namespace": "step-engine", "run": history.run})
    begin = _ns(began_at(history.run))
    causes = defaultdict(list)
    for arrow in timeline.arrows:
        causes[arrow.target].append(arrow.source)

    def context(number: int) -> SpanContext:
        return SpanContext(trace, number, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def span(
        number: int, name: str, process: str, times: tuple[float, float], facts: dict[str, Any], **more: Any
    ) -> Any:
        return ReadableSpan(
            name=name, context=context(number), parent=None if number == 1 else context(1), attributes=facts,
            resource=resources[process], instrumentation_scope=scope, kind=SpanKind.INTERNAL,
            start_time=begin + _ns(times[0]), end_time=begin + _ns(times[1]), **more,
        )  # fmt: skip

    yield span(1, history.run, "", (0.0, history.end), {"outcome": history.outcome, "reason": history.reason})
    for place, slice in enumerate(timeline.slices):
        track, facts = timeline.tracks[slice.track], timeline.details(slice)
        failed = facts.get("outcome") in ("failed", "lost")
        status = Status(StatusCode.ERROR, str(facts.get("reason", ""))) if failed else Status()
        links = [Link(context(source + 2)) for source in causes.get(place, ())]
        facts = {"track": track.name, "kind": slice.kind, **facts}
        times = (slice.start, slice.end)
        yield span(place + 2, timeline.title(slice), track.process, times, facts, links=links, status=status)


def began_at(run: str) -> float:
    """Seconds since 1970 at which a run began, from its id; 0 if the id has no time."""
    found = re.match(r"\d{8}-\d{6}", run)
    try:
        return datetime.strptime(found[0], "%Y%m%d-%H%M%S").replace(tzinfo=UTC).timestamp() if found else 0.0
    except ValueError:
        return 0.0


# -- Parquet -----------------------------------------------------------------------------------------------------------


INTEGERS = (
    "group", "attempt", "replica", "step", "validation", "chunk", "sync", "steps", "rows", "groups", "version",
    "oldest_version", "newest_version", "tokens", "sampled", "deadline", "staleness", "staleness_max", "incarnation",
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


WRITERS = {"perfetto": write_perfetto, "otlp": write_otlp, "parquet": write_parquet}
"""By format."""
