"""A record that continues after its writer has died: the torn end is cut, the rest stays, one writer at a time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from record_samples import answer, event, header, positions, written

from engine.errors import RecordError
from engine.record import RecordEnd, Recorder, read
from engine.record.segment_log import INDEX, PREAMBLE_BYTES
from tests.killed_writers import leave_open

COUNT = 6


def go_on(directory: Path) -> int:
    """Read to the end, then write three more events; how many were there."""
    record = read(directory)
    there = len(list(record.frames()))
    recorder = Recorder(directory, RecordEnd(ticks=there, events=there, torn=record.torn))
    for n in range(there, there + 3):
        recorder.write((event(n),), answer(n))
    recorder.close()
    return there


def test_a_record_goes_on_wherever_its_last_segment_was_cut(tmp_path: Path) -> None:
    written(tmp_path / "whole", COUNT, segment_bytes=200)
    *closed, last = sorted((tmp_path / "whole").glob("*.seg"))
    assert closed, "there are several segments"
    data = last.read_bytes()
    for cut in range(0, len(data) + 1, 3):
        directory = tmp_path / f"cut-{cut}"
        directory.mkdir()
        for segment in (*closed, tmp_path / "whole" / INDEX):
            (directory / segment.name).write_bytes(segment.read_bytes())
        (directory / last.name).write_bytes(data[:cut])
        if cut < PREAMBLE_BYTES:
            leave_open(directory, listed=False)
        there = go_on(directory)
        assert positions(directory) == list(range(there + 3))
        assert read(directory).header == header()
        record = read(directory)
        ticks = list(record.ticks())
        assert record.torn is None and ticks[-1].commands == answer(there + 2)
        assert go_on(directory) == there + 3, "and again"


def test_one_process_at_a_time_writes_a_record(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, header())
    with pytest.raises(RecordError, match="another process is writing this record"):
        Recorder(tmp_path, RecordEnd(ticks=0, events=0))
    recorder.close()
    Recorder(tmp_path, RecordEnd(ticks=0, events=0)).close()


def test_a_writer_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    code = (
        "import os, sys, signal; sys.path.insert(0, 'tests/record');"
        "from record_samples import header, fill; from engine.record import Recorder;"
        f"r = Recorder({str(tmp_path)!r}, header()); fill(r, 3); r.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env={"PYTHONPATH": str(root)}, check=False)
    assert done.returncode == -9
    assert go_on(tmp_path) == 3


def test_a_record_that_is_not_there_cannot_go_on(tmp_path: Path) -> None:
    for _ in range(2):  # the first one leaves nothing behind
        with pytest.raises(RecordError, match="has no schedule record"):
            Recorder(tmp_path, RecordEnd(ticks=0, events=0))


def test_what_a_killed_writer_left_is_on_disk_before_another_segment_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut could tear it then, and nothing may be torn but the last segment."""
    written(tmp_path, 3)
    synced: list[Path] = []
    fsync = os.fsync

    def watched(handle: int) -> None:
        if not (tmp_path / "00000001.seg").exists():
            synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    Recorder(tmp_path, RecordEnd(ticks=3, events=3)).close()
    assert tmp_path / "00000000.seg" in synced
