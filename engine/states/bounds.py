"""The smallest and largest allowed value of each setting, defined once for everyone who sets one.

Read by `limits.py`, and so by `engine set`, by the header of a record and by library users; and by the sections of the
configuration. The laws between figures are those of `Limits`. Everything that is counted fits 64 bits with room to
spare, since it goes into records and into the hash of the state.
"""

from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Bound:
    """What one figure may be."""

    path: str
    """Its name in the configuration."""
    least: float
    most: float
    above: bool = False
    """More than `least`; else `least` will do."""
    whole: bool = True
    optional: bool = False
    """It may be None."""

    def check(self, value: Any) -> None:
        """Raises: `ConfigError` for a value that is out of bounds, or no number."""
        if value is None and self.optional:
            return
        if type(value) is int or (type(value) is float and not self.whole):
            low = value > self.least if self.above else value >= self.least
            if low and value <= self.most:
                return
        kind = "a whole number" if self.whole else "a number"
        least, most = (str(int(end)) if end == int(end) else str(end) for end in (self.least, self.most))
        span = f"above {least}, {most} at most" if self.above else f"from {least} to {most}"
        law = f"must be {kind} {span}{', or null' if self.optional else ''}"
        raise ConfigError(self.path, value, law, f"use {'a value' if self.above else 'one'} {span}")

    def as_field(self) -> dict[str, Any]:
        """The same bound as pydantic has it."""
        ends = {"gt" if self.above else "ge": self.least, "le": self.most}
        return {name: int(end) if self.whole else end for name, end in ends.items()}


BOUNDS: dict[str, Bound] = {
    "train_batch_size": Bound("scheduler.train_batch_size", 1, 1_000_000),
    "max_staleness_steps": Bound("scheduler.max_staleness_steps", 0, 10_000),
    "max_concurrent_groups": Bound("scheduler.max_concurrent_groups", 1, 1 << 40),
    "sync_every": Bound("scheduler.sync_every", 1, 10_000),
    "max_steps": Bound("run.max_steps", 1, 1 << 40, optional=True),
    "deadline_timeout_s": Bound("scheduler.deadline_timeout_s", 0, 86_400, above=True, whole=False),
    "max_drops": Bound("scheduler.max_drops", 0, 1_000_000),
    "max_filtered_in_a_row": Bound("scheduler.max_filtered_in_a_row", 1, 1_000_000_000),
    "infrastructure_attempts": Bound("scheduler.infrastructure_attempts", 1, 1000),
    "data_attempts": Bound("scheduler.data_attempts", 1, 1000),
    "checkpoint_every": Bound("trainer.checkpoint_every", 0, 1 << 40),
    "keep_checkpoints": Bound("trainer.keep_checkpoints", 1, 1000),
    "keep_checkpoints_every": Bound("trainer.keep_checkpoints_every", 0, 1_000_000),
    "straggler_factor": Bound("rollout.straggler_factor", 1, 1_000_000, above=True, whole=False, optional=True),
    "drain_s": Bound("durability.drain_s", 0, 86_400, above=True, whole=False, optional=True),
    "replica_restarts": Bound("limits.replica_restarts", 0, 1_000_000),
    "trainer_restarts": Bound("limits.trainer_restarts", 0, 1_000_000),
    "worker_restarts": Bound("limits.worker_restarts", 0, 1_000_000),
    "run_restarts": Bound("limits.run_restarts", 0, 1_000_000),
    "give_up_s": Bound("rollout.give_up_s", 0, 1_000_000, whole=False),
}
"""By the field of `Limits`."""
