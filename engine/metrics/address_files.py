"""The files that announce the address of a run's metrics endpoint while the run is running.

The scheduler actor writes them. `engine top` and Prometheus (file-based service discovery) read them, so Prometheus
scrapes a new run and drops one that ended. A killed run leaves its file behind, which triggers the alert; the next run
in the same folder deletes the file.

A running run holds a lock on its file. The operating system releases the lock however the process ends.
"""

import fcntl
import json
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from engine.errors import ConfigError
from engine.record.files import make_directory, private_opener

FILE = "endpoint.json"
"""File name in the run's directory."""
MAX_BYTES = 1 << 16
FOLDER = ".endpoints"
"""Folder beside the runs, with one file for each running run. In Prometheus' pattern only the last part may hold a `*`.
"""
HOST = "__host__"
"""Label with the machine of the run. Prometheus drops labels with this prefix after reading them."""


def announce(places: Sequence[Path], address: str, run: str) -> ExitStack:
    """Write the address (`host:port`) of `run` to each of `places`. The run counts as running until the returned stack
    is closed or this process ends. Raises: OSError."""
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
            with suppress(OSError):  # some file systems have no locks; there, `remove_dead` deletes nothing
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.replace(temporary, place)
        return files.pop_all()


def remove_dead(folder: Path) -> None:
    """Delete the files in `folder` that killed runs of this machine left. Files of running runs, of other machines and
    users, and files that no run wrote stay."""
    for place in sorted(folder.glob("*.json")):
        with suppress(OSError):
            handle = os.open(place, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while a running run holds it
                of_this_machine = _run_and_host(os.read(handle, MAX_BYTES)) == (place.stem, socket.gethostname())
                if of_this_machine and os.path.samestat(os.fstat(handle), place.lstat()):
                    place.unlink()
            finally:
                os.close(handle)


def _run_and_host(text: bytes) -> tuple[str, str] | None:
    """The run and the host of a file that `announce` wrote; None for any other file."""
    try:
        (group,) = json.loads(text)
        return group["labels"]["run"], group["labels"][HOST]
    except (ValueError, LookupError, TypeError):
        return None


def withdraw(places: Sequence[Path]) -> None:
    """Delete the file of a run that ended. A file that cannot be deleted stays."""
    for place in places:
        with suppress(OSError):
            place.unlink(missing_ok=True)


def address_of(directory: Path, shown: str) -> str:
    """`host:port` of the run in a directory. Raises: ConfigError if the run has ended or never had an endpoint."""
    try:
        with (directory / FILE).open("rb") as file:
            groups = json.loads(file.read(MAX_BYTES))
        return str(groups[0]["targets"][0])
    except FileNotFoundError:
        law = "is not running: it is still starting, has ended, or was started without metrics"
        raise ConfigError("RUN", shown, law, f"read the record of an ended run with `engine replay {shown}`") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        fix = f"list what it waits for with `engine waits {shown}`; the next resume of the run writes a new file"
        raise ConfigError("RUN", shown, f"has an unreadable {FILE}: {error}", fix) from None
