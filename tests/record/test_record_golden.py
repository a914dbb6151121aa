"""Records of every format version that was released, and of the present one: they are read, and they replay.

Once a format is released, a failure here means that records of users cannot be read or replayed: never mend it by
writing the golden files again. Until then `make_golden.py` writes them again, and the commit says why.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from make_golden import GOLDEN
from record_samples import decode_command, decode_event, encode_command, encode_event

from engine.commands import COMMANDS
from engine.events import EVENTS
from engine.record import FORMAT_VERSION, read, replay
from engine.record.frames import Snapshot
from engine.record.snapshots import declarations

VERSIONS = sorted(path.name for path in GOLDEN.glob("v*"))
RECORDS = sorted(path.relative_to(GOLDEN).as_posix() for path in GOLDEN.glob("v*/*/"))
REPLAYED = [record for record in RECORDS if record.startswith(f"v{FORMAT_VERSION}/")]
"""The records of the present format: no older format was ever released."""
EVENTS_BY_NAME = {cls.__name__: cls for cls in EVENTS.values()}
COMMANDS_BY_NAME = {cls.__name__: cls for cls in COMMANDS.values()}


def every_type(version: str) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads((GOLDEN / version / "every_type.json").read_text(encoding="utf-8"))
    return plain


def built(cls: type[Any], plain: dict[str, Any], **more: Any) -> Any:
    return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()}, **more)


def test_the_present_version_has_its_records() -> None:
    assert f"v{FORMAT_VERSION}" in VERSIONS, "python tests/record/make_golden.py makes them"
    assert all(any(record.startswith(f"{version}/") for record in RECORDS) for version in VERSIONS)


@pytest.mark.parametrize("name", REPLAYED)
def test_golden_records_replay(name: str) -> None:
    record = read(Path(GOLDEN / name))
    report = replay(record)
    assert report.identical, f"{name}: {report}"
    assert report.torn is None and report.events > 50


def test_the_snapshots_of_the_present_version_are_of_this_engine() -> None:
    """A replay does not compare snapshots that another engine version wrote."""
    frames = [frame for name in REPLAYED for frame in read(GOLDEN / name).frames_and_snapshots()]
    snapshots = [frame for frame in frames if isinstance(frame, Snapshot)]
    stale = {frame.path for frame in snapshots if frame.plain[0] != declarations()}
    assert snapshots and not stale, "python tests/record/make_golden.py makes them again"


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_bytes_decode(version: str) -> None:
    golden = every_type(version)
    for name, entry in golden["events"].items():
        assert decode_event(bytes.fromhex(entry["bytes"])) == built(EVENTS_BY_NAME[name], entry["fields"])
    for name, entry in golden["commands"].items():
        assert decode_command(bytes.fromhex(entry["bytes"]), 0) == built(
            COMMANDS_BY_NAME[name], entry["fields"], cause=0
        )


def test_the_present_version_writes_what_it_wrote() -> None:
    golden = every_type(f"v{FORMAT_VERSION}")
    assert set(golden["events"]) == set(EVENTS_BY_NAME) and set(golden["commands"]) == set(COMMANDS_BY_NAME)
    for name, entry in golden["events"].items():
        assert encode_event(built(EVENTS_BY_NAME[name], entry["fields"])).hex() == entry["bytes"]
    for name, entry in golden["commands"].items():
        assert encode_command(built(COMMANDS_BY_NAME[name], entry["fields"], cause=0)).hex() == entry["bytes"]
