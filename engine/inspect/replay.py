"""`engine replay RUN`: whether a fresh scheduler decides what the recorded one did."""

from pathlib import Path

from engine.errors import ConfigError
from engine.schedule import Record, read, replay


def open_record(run: str | Path) -> Record:
    """The record of a run, by its directory or by the directory of the record itself.

    Raises: `ConfigError` where there is none, `RecordError` where it cannot be read.
    """
    path = Path(run)
    if not path.is_dir():
        raise ConfigError("RUN", str(run), "is not a directory", "give the directory of a run")
    record = read(path / "schedule" if (path / "schedule").is_dir() else path)
    record.require_index()
    return record


def replay_text(run: str | Path) -> tuple[str, int]:
    """What a replay says, and the exit code: 0 identical, 1 diverged.

    Raises: as `open_record`, and `RecordError` for damage further on.
    """
    report = replay(open_record(run))
    return str(report), 0 if report.identical else 1
