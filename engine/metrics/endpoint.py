"""Where a run can be asked what it is doing: a small file that a run leaves while it lasts.

Written by the scheduler actor, read by `engine top` and, since it has the form of Prometheus' file-based service
discovery, by Prometheus itself: a run that begins is scraped, and one that has ended is not missed. A run that was
killed leaves its file behind, which is how its loss is noticed.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from engine.errors import ConfigError
from engine.private_files import make_directory, write_private

FILE = "endpoint.json"
"""In the run's directory."""
MAX_BYTES = 1 << 16
FOLDER = ".endpoints"
"""Beside the runs, with a file for each that is going on: the last part of Prometheus' pattern may hold a `*`, no part
before it."""


def announce(places: Sequence[Path], address: str, run: str) -> None:
    """Say in each of `places` that `run` answers at `address` (`host:port`). Raises: OSError."""
    text = json.dumps([{"targets": [address], "labels": {"run": run}}]) + "\n"
    for place in places:
        shared = place.parent.name == FOLDER
        if shared and not place.parent.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.parent.chmod(0o755)
        elif not shared:
            make_directory(place.parent)
        temporary = place.with_name(f".{place.name}.tmp")
        write_private(temporary, text)
        if shared:  # Prometheus may be another user's, and an address is no secret
            temporary.chmod(0o644)
        os.replace(temporary, place)


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
        law = "is not going on: it is still starting, has ended, or was started without metrics"
        raise ConfigError("RUN", shown, law, f"`engine replay {shown}` looks into a run that has ended") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError("RUN", shown, f"its {FILE} cannot be read: {error}") from None
