"""Where a run can be asked what it is doing: a small file that a run leaves while it lasts.

Written by the scheduler actor, read by `engine top` and, since it has the form of Prometheus' file-based service
discovery, by Prometheus itself: a run that begins is scraped, and one that has ended is not missed. A run that was
killed leaves its file behind, which is how its loss is noticed; the next run in the same folder deletes the file.

A live run holds a lock on its file, which the operating system takes back when the process ends, however it ends.
"""

import fcntl
import json
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from engine.errors import ConfigError
from engine.private_files import make_directory, private_opener

FILE = "endpoint.json"
"""In the run's directory."""
MAX_BYTES = 1 << 16
FOLDER = ".endpoints"
"""Beside the runs, with a file for each that is going on: the last part of Prometheus' pattern may hold a `*`, no part
before it."""
HOST = "__host__"
"""The label that says on which machine the run is. Prometheus drops labels that begin so once it has read them."""


def announce(places: Sequence[Path], address: str, run: str) -> ExitStack:
    """Say in each of `places` that `run` answers at `address` (`host:port`). The run counts as live until the returned
    stack is closed or this process ends. Raises: OSError."""
    labels = {"run": run, HOST: socket.gethostname()}
    text = json.dumps([{"targets": [address], "labels": labels}]) + "\n"
    with ExitStack() as files:
        for place in places:
            shared = place.parent.name == FOLDER
            if shared and not place.parent.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.parent.chmod(0o755)
            elif not shared:
                make_directory(place.parent)
            temporary = place.with_name(f".{place.name}.tmp")
            file = files.enter_context(open(temporary, "w", encoding="utf-8", opener=private_opener))
            file.write(text)
            file.flush()
            if shared:  # Prometheus may be another user's, and an address is no secret
                temporary.chmod(0o644)
            with suppress(OSError):  # some file systems have no locks; there, nobody gets one to delete the file either
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.replace(temporary, place)
        return files.pop_all()


def remove_dead(folder: Path) -> None:
    """Delete the files that runs of this machine left in `folder` when they were killed. Files of live runs, of other
    machines and users, and those that no run wrote stay."""
    for place in sorted(folder.glob("*.json")):
        with suppress(OSError):
            handle = os.open(place, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while a live run holds it
                of_this_machine = _run_and_host(os.read(handle, MAX_BYTES)) == (place.stem, socket.gethostname())
                if of_this_machine and os.path.samestat(os.fstat(handle), place.lstat()):
                    place.unlink()
            finally:
                os.close(handle)


def _run_and_host(text: bytes) -> tuple[str, str] | None:
    """Of a file that `announce` wrote; None for any other."""
    try:
        (group,) = json.loads(text)
        return group["labels"]["run"], group["labels"][HOST]
    except (ValueError, LookupError, TypeError):
        return None


def withdraw(places: Sequence[Path]) -> None:
    """The run has ended. A file that cannot be removed stays."""
    for place in places:
        try:
            place.unlink(missing_ok=True)
        except OSError:
            continue


def address_of(directory: Path, shown: str) -> str:
    """`host:port` of the run in a directory. Raises: ConfigError where it has ended, or never had an endpoint."""
    try:
        with (directory / FILE).open("rb") as file:
            told = json.loads(file.read(MAX_BYTES))
        return str(told[0]["targets"][0])
    except FileNotFoundError:
        law = "is not running: it is still starting, has ended, or was started without metrics"
        raise ConfigError("RUN", shown, law, f"read the record of an ended run with `engine replay {shown}`") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError("RUN", shown, f"has an unreadable {FILE}: {error}") from None
