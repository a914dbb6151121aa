"""Makes a log that was closed look as if its writer had been killed."""

from pathlib import Path

from engine.record.segment_log import Index, load_index, store_index


def leave_open(directory: Path, *, listed: bool = True) -> Path:
    """The last segment is not closed, or not even `listed`. Returns its path."""
    index = load_index(directory)
    assert index is not None
    store_index(directory, Index([*index.seals[:-1], *([None] if listed else [])], index.first))
    return max(directory.glob("*.seg"))
