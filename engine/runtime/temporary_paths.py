"""Keeps the path of the directory for temporary files short, because its sockets are limited to 107 bytes.

Ray, vLLM and `multiprocessing` put Unix sockets into it. Batch systems set `TMPDIR` to a long path. The processes of a
run call `shorten_temporary_paths` before they start these libraries. Files stay on the disk that the user chose.
"""

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from engine.errors import ConfigError

SOCKET_BYTES = 107
"""Maximum length of the path of a Unix socket."""
LONGEST = SOCKET_BYTES - len("/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
"""Maximum length of the directory. The longest path in it is Ray's."""
VARIABLES = ("RAY_TMPDIR", "TMPDIR")
PLACES = ("/tmp", "/var/tmp")


def shorten_temporary_paths(places: tuple[str, ...] = PLACES) -> None:
    """If a variable of `VARIABLES` is too long, replace it, for this process and those that it starts, by a link to the
    same directory in one of `places`. Raises: `ConfigError` if no link can be made."""
    for variable in VARIABLES:
        path = os.environ.get(variable, "")
        if len(os.fsencode(path)) > LONGEST:
            os.environ[variable] = _link_to(variable, os.path.abspath(path), places)
            tempfile.tempdir = None  # Python would keep the long path


def _link_to(variable: str, path: str, places: tuple[str, ...]) -> str:
    name = f"step-engine-{os.getuid()}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:6]}"
    for link in (Path(place, name) for place in places):
        with suppress(OSError):
            link.symlink_to(path)
        with suppress(OSError):
            if link.readlink() == Path(path) and link.lstat().st_uid == os.getuid():
                return str(link)
    law = (
        f"must have at most {LONGEST} bytes, because the paths of Unix sockets in it have at most {SOCKET_BYTES}, and "
        f"no link to it can be made in {' or '.join(places)}"
    )
    raise ConfigError(variable, path, law, f"set {variable} to a directory with a shorter path")
