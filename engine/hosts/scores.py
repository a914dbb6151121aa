"""Scores of a group as checked arrays and as bytes, between scorer, trajectory store and trainer.

Used by the hosts of scorers and trainers, and by both stores.
"""

from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

from engine.errors import EngineError
from engine.trajectory import TrajectoryGroup

ScoreRow: TypeAlias = "array[float]"
"""Log-probs of the trained tokens of one trajectory, float32."""


def checked_scores(groups: Sequence[TrajectoryGroup], scores: Any) -> list[list[ScoreRow]]:
    """A scorer's result as float32. Raises: `EngineError` unless it has one number for each trained token."""
    if not isinstance(scores, Sequence) or len(scores) != len(groups):
        raise EngineError(f"score() must return a list for each of the {len(groups)} groups")
    checked = []
    for group, own in zip(groups, scores, strict=True):
        if not isinstance(own, Sequence) or len(own) != len(group.trajectories):
            raise EngineError(f"score() must return {len(group.trajectories)} lists for group {group.group}")
        rows = [array("f", row) for row in own]
        for index, (row, trajectory) in enumerate(zip(rows, group.trajectories, strict=True)):
            if len(row) != sum(trajectory.loss_mask):
                story = f"trajectory {index} of group {group.group} has {sum(trajectory.loss_mask)} trained tokens"
                raise EngineError(f"{story}, but score() returned {len(row)} log-probs")
        checked.append(rows)
    return checked


def pack_scores(rows: Sequence[ScoreRow]) -> bytes:
    """Packs the number of trajectories, their lengths (uint32) and all log-probs (float32), in native byte order."""
    lengths = array("I", [len(rows), *map(len, rows)])
    return lengths.tobytes() + b"".join(row.tobytes() for row in rows)


def unpack_scores(data: bytes) -> list[ScoreRow]:
    size = array("I").itemsize
    count = array("I", data[:size])[0]
    first = size * (1 + count)
    values, rows, start = array("f", data[first:]), [], 0
    for length in array("I", data[size:first]):
        rows.append(values[start : start + length])
        start += length
    return rows
