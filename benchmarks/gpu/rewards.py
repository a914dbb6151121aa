"""A reward that a model with random weights can raise or lower."""

from engine.trajectory import Prompt, Trajectory


def even_share(prompt: Prompt, trajectory: Trajectory) -> float:
    """The share of response tokens with an even id."""
    ids = trajectory.token_ids
    return sum(token % 2 == 0 for token in ids) / max(1, len(ids))
