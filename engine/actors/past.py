"""What earlier lives of a run left behind: its record, replayed, and the checkpoint that the next life goes on from.

Read by the scheduler actor of a run that is resumed, before it starts any other. What the checkpoint does not hold is
put out of the way, so that nothing of it is taken for what comes in its place.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from engine.actors.plan import Restore
from engine.errors import ConfigError
from engine.events import RunResumed
from engine.hosts.checkpoints import list_checkpoints, verify_checkpoint
from engine.metrics.collector import Transitions
from engine.metrics.journal import cut_rows
from engine.schedule import After, Recovered, read, recover
from engine.schedule.lock import RecordLock


@dataclass(frozen=True, slots=True)
class Past:
    """`lock` is on the record, for the recorder that goes on with it."""

    recovered: Recovered
    lock: RecordLock
    restore: Restore
    damaged: tuple[str, ...] = ()
    """What of the run's files was left out because it could not be read."""

    def __str__(self) -> str:
        event, torn = self.event(0), self.recovered.torn
        source = "the initial weights" if self.restore.checkpoint is None else Path(self.restore.checkpoint).name
        told = [f"resumed from {source}, after {self.recovered.events} events"]
        told += [f"{len(event.consumed)} groups are trained on again"] if event.consumed else []
        return "; ".join([*told, *([f"cut: {torn}"] if torn else []), *self.damaged])

    @property
    def after(self) -> After:
        """Where the record goes on."""
        return After(events=self.recovered.events, torn=self.recovered.torn)

    def event(self, replicas: int) -> RunResumed:
        """With which the run goes on."""
        return self.recovered.resumed(steps=self.restore.steps, replicas=replicas)


def past_of(run_dir: Path, restores: bool, observe: Transitions) -> Past:
    """Take up a run that ended before its time. `restores`: whether its plan can bring a trainer to a checkpoint.

    Raises: `RecordError` where its record cannot be gone on with or another process writes it, `ConfigError` where the
    run has finished, or its newest checkpoint is not what was written or cannot be used.
    """
    schedule = run_dir / "schedule"
    record = read(schedule)
    lock = RecordLock(schedule)
    try:
        recovered = recover(record, observe, books=observe)
        outcome = recovered.scheduler.state.outcome
        if outcome is not None and outcome.outcome == "finished":
            raise ConfigError("RUN", str(run_dir), f"has finished ({outcome.reason}): there is nothing to go on with")
        trained = recovered.scheduler.state.steps_trained
        saved = list_checkpoints(run_dir / "checkpoints")
        steps, checkpoint = next(((s, path) for s, path in reversed(saved) if s <= trained), (0, None))
        if checkpoint is not None:
            if not restores:
                law = "is there, and this plan cannot bring a trainer to it"
                raise ConfigError("Plan.restore_trainer", None, f"{checkpoint.name} {law}", "a function that does")
            verify_checkpoint(checkpoint)
        for later, path in saved:
            if later > steps:
                _put_aside(path)
        damaged: list[str] = []
        rows = cut_rows(run_dir / "metrics.jsonl", steps, damaged.append)
    except BaseException:
        lock.release()
        raise
    restore = Restore(
        steps=steps,
        optimizer_steps=sum(int(n) for row in rows if isinstance(n := row.get("optimizer_steps"), int | float)),
        checkpoint=None if checkpoint is None else str(checkpoint),
    )
    return Past(recovered, lock, restore, tuple(damaged))


def _put_aside(path: Path) -> None:
    """Under a name that nobody takes for a checkpoint of this line of weights."""
    number = 1
    while (aside := path.with_name(f".{path.name}-left-{number}")).exists():
        number += 1
    os.rename(path, aside)
