"""The timeline of a run, and the files of other tools that it is written to."""

import json
import stat
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cli import main
from engine.errors import visible
from engine.inspect.history_reader import read_history
from engine.inspect.timeline import Arrow, Slice, Timeline, Track, timeline_of
from engine.inspect.timeline_files import WRITERS, write_perfetto
from engine.metrics.history import ProcessLife
from tests.inspect.recorded_worlds import faulty_record, recorded


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    faulty_record(directory=directory / "schedule")
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


class Drawn(NamedTuple):
    """A slice as a reader of the trace draws it."""

    process: str
    track: str
    title: str
    start: int
    end: int
    args: dict[str, Any]


def trace_in(path: Path) -> tuple[list[Drawn], list[tuple[int, int]], dict[str, list[tuple[int, float]]]]:
    """Slices, arrows between their places, and counters, as Perfetto reads them: by time, in the file's order for equal
    times. An arrow starts and ends at the slice that is open on its thread."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    names = {(e["name"], e.get("tid", e["pid"])): e["args"].get("name") for e in events if e["ph"] == "M"}
    slices: list[Drawn] = []
    open_on: dict[int, int] = {}
    arrows: dict[int, list[int]] = defaultdict(list)
    counts: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for event in sorted((event for event in events if event["ph"] != "M"), key=itemgetter("ts")):
        kind, process, tid = event["ph"], names["process_name", event["pid"]], event.get("tid", 0)
        if kind == "B":
            assert tid not in open_on, "slices of a thread do not overlap"
            open_on[tid] = len(slices)
            slices.append(Drawn(process, names["thread_name", tid], event["name"], event["ts"], -1, event["args"]))
        elif kind == "E":
            place = open_on.pop(tid)
            slices[place] = slices[place]._replace(end=event["ts"])
        elif kind == "C":
            counts[event["name"]].append((event["ts"], event["args"]["slots"]))
        else:
            assert kind == ("f" if event["id"] in arrows else "s")
            arrows[event["id"]].append(open_on[tid])
    assert not open_on
    return slices, [(source, target) for _, (source, target) in sorted(arrows.items())], counts


def expected(timeline: Timeline) -> list[Drawn]:
    return [
        Drawn(*timeline.tracks[one.track], timeline.title(one), us(one.start), us(one.end), timeline.details(one))
        for one in timeline.slices
    ]


def us(seconds: float) -> int:
    return round(seconds * 1e6)


def test_a_perfetto_trace_has_every_slice_arrow_and_counter(
    run: Path, tmp_path: Path, timeline: Timeline, capsys: Any
) -> None:
    out = tmp_path / "t.json"
    assert main(["timeline", str(run), "--out", str(out)]) == 0
    assert f"{len(timeline.slices)} slices and {len(timeline.arrows)} arrows are in {out}" in capsys.readouterr().out
    slices, arrows, counts = trace_in(out)
    assert (slices, arrows) == (expected(timeline), list(timeline.arrows))
    group = next(one for one in slices if one.title == "group 3")
    details = {"tokens", "version", "oldest_version", "staleness", "step", "outcome", "cause", "ended_by"}
    assert details <= set(group.args) and group.process.startswith("replica ")
    end = us(timeline.history.end)
    for cause, seconds in timeline.history.idle_s.items():
        changes = [*counts[cause], (end, 0.0)]
        drawn = sum((after - at) / 1e6 * slots for (at, slots), (after, _) in pairwise(changes))
        assert drawn == pytest.approx(seconds, abs=0.001 * timeline.history.end)


@given(
    st.lists(st.lists(st.sampled_from((0.0, 3e-7, 7e-7, 1.5)), max_size=6), min_size=1, max_size=3),
    st.text(st.characters()),
    st.data(),
)
def test_slices_of_any_length_and_text_reach_perfetto_as_they_are(
    timeline: Timeline, gaps: list[list[float]], reason: str, data: st.DataObject
) -> None:
    life = ProcessLife("replica", 0, 1, 0.0, 0.0, 1.0, "lost", reason, 1, 2)
    times = [(*ends, track) for track, gap in enumerate(gaps) for ends in pairwise(accumulate(gap))]
    slices = tuple(Slice(track, "up", start, end, life) for start, end, track in sorted(times))
    pairs = [Arrow(source, target) for target in range(len(slices)) for source in range(target)]
    arrows = data.draw(st.lists(st.sampled_from(pairs))) if pairs else []
    tracks = tuple(Track("replica 0", f"slot {number}") for number in range(len(gaps)))
    made = replace(timeline, tracks=tracks, slices=slices, arrows=tuple(arrows))
    with TemporaryDirectory() as place:
        write_perfetto(made, Path(place) / "t")
        drawn, text = trace_in(Path(place) / "t"), (Path(place) / "t").read_text(encoding="utf-8")
    shown = [one._replace(args=one.args | {"reason": visible(reason)}) for one in expected(made)]
    assert drawn[:2] == (shown, arrows)
    assert not slices or json.dumps(visible(reason), ensure_ascii=False) in text, "Perfetto refuses escaped emoji"


def test_a_parquet_table_has_a_row_for_each_slice(run: Path, tmp_path: Path, timeline: Timeline) -> None:
    out = tmp_path / "t.parquet"
    assert main(["timeline", str(run), "--format", "parquet", "--out", str(out)]) == 0
    rows = pq.read_table(out).to_pylist()
    assert len(rows) == len(timeline.slices)
    details = set().union(*(timeline.details(slice) for slice in timeline.slices))
    assert details - set(rows[0]) == set()
    sampled = sum(row["sampled"] for row in rows if row["kind"] == "generating")
    assert sampled == sum(timeline.history.tokens.values())


@pytest.mark.parametrize("format", WRITERS)
def test_a_timeline_is_for_its_user_alone(run: Path, tmp_path: Path, format: str) -> None:
    assert main(["timeline", str(run), "--format", format, "--out", str(tmp_path / "t")]) == 0
    assert stat.S_IMODE((tmp_path / "t").stat().st_mode) == 0o600


def test_wrong_arguments_of_timeline_are_refused(run: Path, tmp_path: Path, capsys: Any) -> None:
    for arguments, message in (
        ([str(tmp_path / "none")], "does not exist"),
        ([str(run), "--out", str(tmp_path / "no" / "file")], "cannot be written: No such file or directory"),
    ):
        assert main(["timeline", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_a_missing_package_is_named_with_the_command_that_installs_it(run: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("engine.extras.find_spec", lambda name: None)
    assert main(["timeline", str(run), "--format", "parquet"]) == 2
    error = capsys.readouterr().err
    assert "this needs the package pyarrow, which is not installed; run `" in error and "train" in error


def test_a_running_run_has_a_timeline(tmp_path: Path) -> None:
    recorded(seed=1, steps=2, directory=tmp_path / "schedule")
    assert main(["timeline", str(tmp_path), "--out", str(tmp_path / "t")]) == 0
    assert any(one.args.get("outcome") == "running" for one in trace_in(tmp_path / "t")[0])
