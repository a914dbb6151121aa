"""Address and token of a run's control endpoint: `control.json` in its directory, readable by its user alone.

A run writes the file at the start and removes it at the end; the command line reads it. Symbolic links are
refused. The token is new for each start of a run and is stored nowhere else.
"""

import json
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError

FILE = "control.json"
MAX_BYTES = 4096


@dataclass(frozen=True, slots=True, repr=False)
class ControlPlace:
    """`url` without a path. Its representation does not show the token."""

    url: str
    token: str


def new_token() -> str:
    return secrets.token_urlsafe(32)


def announce(run_dir: Path, place: ControlPlace) -> None:
    """Write the file atomically, readable by this user alone. Raises: OSError."""
    temporary = run_dir / f".{FILE}.{os.getpid()}.tmp"
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps({"url": place.url, "token": place.token}) + "\n")
        os.replace(temporary, run_dir / FILE)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def withdraw(run_dir: Path) -> None:
    """Remove the file of a run that has ended. A file that cannot be removed stays: its token is no longer valid."""
    with suppress(OSError):
        (run_dir / FILE).unlink(missing_ok=True)


def place_of(run_dir: Path, shown: str) -> ControlPlace:
    """Read the address and token of a run. Raises: `ConfigError` if the run is not running, or the file is invalid."""
    path = run_dir / FILE
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        law = "is not running, or runs with control.enabled: false"
        raise ConfigError("RUN", shown, law, f"resume a run that has stopped with `engine resume {shown}`") from None
    except OSError as error:
        law = f"has an unreadable {FILE}: {error.strerror or error}"
        raise ConfigError("RUN", shown, law, "run the command as the user who started the run") from None
    try:
        return _read(handle)
    except (OSError, ValueError, LookupError, TypeError) as error:
        fix = f"send SIGTERM to its launching process, then run `engine resume {shown}`, which writes a new file"
        raise ConfigError("RUN", shown, f"has an invalid {FILE}: {error}", fix) from None
    finally:
        os.close(handle)


def _read(handle: int) -> ControlPlace:
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is not a regular file")
    if found.st_uid != os.geteuid() and os.geteuid() != 0:
        raise ValueError("it belongs to another user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ValueError("others may read or write it")
    text = os.read(handle, MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES} bytes")
    content = json.loads(text)
    url, token = content["url"], content["token"]
    if not (isinstance(url, str) and url.startswith("http://") and isinstance(token, str) and token):
        raise ValueError("it has no valid url and token")
    return ControlPlace(url, token)
