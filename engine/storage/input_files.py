"""`inputs/` in the directory of a run: what it reads, for its resumes.

    inputs/0    SHA-256 (32) | msgpack of an `InputIdentity`: what the run began with; 1, 2, ...: changes of its data

A change counts once the record has its event: a resume that failed before that is made again.
"""

from hashlib import sha256
from pathlib import Path

from msgspec import msgpack, structs

from engine.errors import RunDamaged
from engine.ids import GroupId
from engine.input_identity import InputIdentity
from engine.record.files import make_directory, open_regular, replace_whole

INPUTS = "inputs"


def read_inputs(run_dir: Path) -> list[InputIdentity]:
    """What a run began with, then each change. Raises: `RunDamaged`."""
    found: list[InputIdentity] = []
    while (path := run_dir / INPUTS / str(len(found))).exists():
        with open_regular(path) as file:
            digest, data = file.read(32), file.read()
        if sha256(data).digest() != digest:
            raise RunDamaged(str(path), "is damaged; restore it from a copy")
        found.append(msgpack.decode(data, type=InputIdentity))
    return found


def write_inputs(run_dir: Path, number: int, identity: InputIdentity) -> None:
    """Raises: `OSError`."""
    path = run_dir / INPUTS / str(number)
    make_directory(path.parent)
    data = msgpack.encode(identity)
    with replace_whole(path) as file:
        file.write(sha256(data).digest() + data)


def begins_inputs(run_dir: Path, events: int, branches: bool) -> bool:
    """Whether the resume of a record with so many events begins a change: one that the record does not have yet; or
    the newest again, because the run `branches` and generates groups again whose rows may be gone. Raises:
    `RunDamaged`."""
    found = read_inputs(run_dir)
    return len(found) > 1 and (branches or not 0 <= found[-1].event < events)


def begin_inputs(run_dir: Path, events: int, drawn: int, again: tuple[GroupId, ...]) -> None:
    """Let the newest change count after so many events. Earlier ones that the record does not have are dropped."""
    found = read_inputs(run_dir)
    number = sum(index == 0 or 0 <= one.event < events for index, one in enumerate(found))
    write_inputs(run_dir, number, structs.replace(found[-1], event=events, drawn=drawn, again=again))
    for later in range(len(found) - 1, number, -1):
        (run_dir / INPUTS / str(later)).unlink()
