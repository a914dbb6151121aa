"""The timeline of a run, and the files of other tools that it is written to, read by these tools' own schemas."""

import json
import stat
from base64 import b64encode
from collections import Counter, defaultdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow.parquet as pq
import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from engine.cli import main
from engine.inspect.history_reader import read_history
from engine.inspect.timeline import Timeline, Track, timeline_of
from engine.inspect.timeline_files import WRITERS, began_at
from tests.inspect.recorded_worlds import faulty_record, recorded

RUN = "20260131-235959-quickstart"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    faulty_record(directory=directory / "schedule", run=RUN)
    return directory


@pytest.fixture(scope="module")
def timeline(run: Path) -> Timeline:
    return timeline_of(read_history(run))


def test_slices_of_a_track_never_overlap(timeline: Timeline) -> None:
    tracks = defaultdict(list)
    for slice in timeline.slices:
        tracks[slice.track].append(slice)
    assert len(tracks) == len(timeline.tracks) == len(set(timeline.tracks))
    assert all(a.end <= b.start for slices in tracks.values() for a, b in pairwise(slices))
    assert timeline.tracks[0].process == "trainer" and Track("replica 0", "slot 0") in timeline.tracks
    kinds = {slice.kind for slice in timeline.slices}
    assert kinds >= {"generating", "collecting", "training", "publishing", "staging", "installing", "starting", "up"}


def test_every_trained_group_has_an_arrow_to_its_training(timeline: Timeline) -> None:
    arrows = Counter(
        timeline.slices[arrow.target].value.step
        for arrow in timeline.arrows
        if timeline.slices[arrow.target].kind == "training" and timeline.slices[arrow.source].kind == "generating"
    )
    assert all(arrows[step.step] >= len(step.groups) for step in timeline.history.trained)


def test_a_perfetto_trace_has_every_slice_on_its_track_with_its_facts(
    run: Path, tmp_path: Path, timeline: Timeline, capsys: Any
) -> None:
    out = tmp_path / "t.pftrace"
    assert main(["timeline", str(run), "--out", str(out)]) == 0
    assert f"{len(timeline.slices)} slices and {len(timeline.arrows)} arrows are in {out}" in capsys.readouterr().out
    trace = Trace.FromString(out.read_bytes())
    described = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")}
    events = [packet for packet in trace.packet if packet.HasField("track_event")]
    assert all(packet.track_event.track_uuid in described for packet in events)
    assert all(track.parent_uuid in described for track in described.values() if track.parent_uuid)
    begins = [packet for packet in events if packet.track_event.type == TrackEvent.TYPE_SLICE_BEGIN]
    assert sorted(p.timestamp for p in begins) == sorted(round(slice.start * 1e9) for slice in timeline.slices)
    open_on: Counter[int] = Counter()
    for packet in events:  # a reader sorts by time and keeps the order of equal times
        if packet.track_event.type != TrackEvent.TYPE_COUNTER:
            open_on[packet.track_event.track_uuid] += (
                1 if packet.track_event.type == TrackEvent.TYPE_SLICE_BEGIN else -1
            )
            assert open_on[packet.track_event.track_uuid] in (0, 1)
    sources = [(flow, at(packet)) for packet in begins for flow in packet.track_event.flow_ids]
    targets = [(flow, at(packet)) for packet in begins for flow in packet.track_event.terminating_flow_ids]
    arrows = [
        [(round(slice.start * 1e9), timeline.title(slice)) for slice in map(timeline.slices.__getitem__, arrow)]
        for arrow in timeline.arrows
    ]
    assert sorted(sources) == [(number, arrow[0]) for number, arrow in enumerate(arrows, start=1)]
    assert sorted(targets) == [(number, arrow[1]) for number, arrow in enumerate(arrows, start=1)]
    group = next(p.track_event for p in begins if p.track_event.name == "group 3")
    facts = {note.name for note in group.debug_annotations}
    assert facts >= {"tokens", "version", "oldest_version", "staleness", "step", "outcome", "cause", "ended_by"}
    assert described[described[group.track_uuid].parent_uuid].process.process_name.startswith("replica ")


def at(packet: Any) -> tuple[int, str]:
    """When a slice begins, and its title."""
    return packet.timestamp, packet.track_event.name


def test_spans_follow_the_schema_of_opentelemetry(run: Path, tmp_path: Path, timeline: Timeline) -> None:
    out = tmp_path / "t.jsonl"
    assert main(["timeline", str(run), "--format", "otlp", "--out", str(out)]) == 0
    spans = spans_in([ParseDict(with_bytes(json.loads(line)), ExportTraceServiceRequest()) for line in out.open()])
    check_spans(spans, timeline)


def test_spans_are_sent_to_a_collector(run: Path, timeline: Timeline, capsys: Any) -> None:
    requests: list[ExportTraceServiceRequest] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        assert main(["timeline", str(run), "--format", "otlp", "--endpoint", address]) == 0
        server.shutdown()
    assert f"sent {len(timeline.slices) + 1} spans to http://{address}" in capsys.readouterr().out
    check_spans(spans_in(requests), timeline)


def with_bytes(value: Any) -> Any:
    """OTLP JSON as JSON of protobuf messages."""
    if isinstance(value, dict):
        ids = ("traceId", "spanId", "parentSpanId")
        return {k: b64encode(bytes.fromhex(v)).decode() if k in ids else with_bytes(v) for k, v in value.items()}
    return [with_bytes(one) for one in value] if isinstance(value, list) else value


def spans_in(requests: list[ExportTraceServiceRequest]) -> list[Any]:
    scopes = [scope for request in requests for resource in request.resource_spans for scope in resource.scope_spans]
    return [span for scope in scopes for span in scope.spans]


def check_spans(spans: list[Any], timeline: Timeline) -> None:
    root = next(span for span in spans if not span.parent_span_id)
    assert root.name == RUN and root.start_time_unix_nano == round(began_at(RUN) * 1e9)
    assert len(spans) == len(timeline.slices) + 1 and len({span.span_id for span in spans}) == len(spans)
    assert {span.parent_span_id for span in spans if span is not root} == {root.span_id}
    assert sum(len(span.links) for span in spans) == len(timeline.arrows)
    assert {link.span_id for span in spans for link in span.links} <= {span.span_id for span in spans}
    ends = Counter((span.name, span.end_time_unix_nano) for span in spans if span is not root)
    begin = root.start_time_unix_nano
    assert ends == Counter((timeline.title(s), begin + round(s.end * 1e9)) for s in timeline.slices)


def test_a_parquet_table_has_a_row_for_each_slice(run: Path, tmp_path: Path, timeline: Timeline) -> None:
    out = tmp_path / "t.parquet"
    assert main(["timeline", str(run), "--format", "parquet", "--out", str(out)]) == 0
    rows = pq.read_table(out).to_pylist()
    assert len(rows) == len(timeline.slices)
    facts = set().union(*(timeline.details(slice) for slice in timeline.slices))
    assert facts - set(rows[0]) == set()
    sampled = sum(row["sampled"] for row in rows if row["kind"] == "generating")
    assert sampled == sum(timeline.history.tokens.values())


@pytest.mark.parametrize("format", WRITERS)
def test_a_timeline_is_for_its_user_alone(run: Path, tmp_path: Path, format: str) -> None:
    assert main(["timeline", str(run), "--format", format, "--out", str(tmp_path / "t")]) == 0
    assert stat.S_IMODE((tmp_path / "t").stat().st_mode) == 0o600


def test_wrong_arguments_of_timeline_are_refused(run: Path, tmp_path: Path, capsys: Any) -> None:
    for arguments, message in (
        ([str(tmp_path / "none")], "does not exist"),
        ([str(run), "--endpoint", "localhost:1"], "must be used together with --format otlp; add --format otlp"),
        ([str(run), "--format", "otlp", "--endpoint", "http://[bad"], "must be an address of HTTP; use HOST:PORT"),
        ([str(run), "--out", str(tmp_path / "no" / "file")], "cannot be written: No such file or directory"),
    ):
        assert main(["timeline", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_a_missing_package_is_named_with_the_command_that_installs_it(run: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("engine.extras.find_spec", lambda name: None)
    assert main(["timeline", str(run)]) == 2
    error = capsys.readouterr().err
    assert "this needs the package perfetto, which is not installed; run `" in error and "inspect" in error


def test_a_running_run_has_a_timeline(tmp_path: Path) -> None:
    recorded(seed=1, steps=2, directory=tmp_path / "schedule")
    assert main(["timeline", str(tmp_path), "--out", str(tmp_path / "t")]) == 0
    trace = Trace.FromString((tmp_path / "t").read_bytes())
    notes = [note for packet in trace.packet for note in packet.track_event.debug_annotations]
    assert any(note.name == "outcome" and note.string_value == "running" for note in notes)
