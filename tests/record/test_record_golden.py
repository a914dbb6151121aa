"""Records of every format version that was released, and of the present one: they are read, and they replay.

Once a format is released, a failure here means that records of users cannot be read or replayed: never mend it by
writing the golden files again. Until then `make_golden.py` writes them again, and the commit says why.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from make_golden import GOLDEN

from engine.commands import COMMANDS, Command
from engine.events import EVENTS, Event
from engine.record import FORMAT_VERSION, read, replay
from engine.record.codec import pack, unpacker
from engine.record.snapshots import declarations

VERSIONS = sorted(path.name for path in GOLDEN.glob("v*"))
RECORDS = sorted(path.relative_to(GOLDEN).as_posix() for path in GOLDEN.glob("v*/*/"))
REPLAYED = [record for record in RECORDS if record.startswith(f"v{FORMAT_VERSION}/")]
"""The records of the present format: no older format was ever released."""
CLASSES: dict[str, dict[str, type[Event] | type[Command]]] = {
    "events": {cls.__name__: cls for cls in EVENTS}, "commands": {cls.__name__: cls for cls in COMMANDS}
}  # fmt: skip


def every_type(version: str) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads((GOLDEN / version / "every_type.json").read_text(encoding="utf-8"))
    return plain


def built(cls: type[Any], plain: dict[str, Any]) -> Any:
    return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()})


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
    records = {name: read(GOLDEN / name) for name in REPLAYED}
    snapshots = [(name, record.snapshot(place)) for name, record in records.items() for place in record.snapshots()]
    stale = {name for name, snapshot in snapshots if snapshot.plain[0] != declarations()}
    assert snapshots and not stale, "python tests/record/make_golden.py makes them again"


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_bytes_decode(version: str) -> None:
    for table, entries in every_type(version).items():
        for name, entry in entries.items():
            cls = CLASSES[table][name]
            assert unpacker(cls)(bytes.fromhex(entry["bytes"])) == built(cls, entry["fields"])


def test_the_present_version_writes_what_it_wrote() -> None:
    golden = every_type(f"v{FORMAT_VERSION}")
    assert {table: set(entries) for table, entries in golden.items()} == {
        table: set(classes) for table, classes in CLASSES.items()
    }
    for table, entries in golden.items():
        for name, entry in entries.items():
            assert pack(built(CLASSES[table][name], entry["fields"])).hex() == entry["bytes"]
