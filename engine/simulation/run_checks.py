"""Checks a simulated run independently of the scheduler: it counts for itself what the processes did.

Used by the world and by the property tests. A finding has a class: `correctness` (a law is broken) or `liveness` (no
event is left, but the run has not ended).
"""

from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Protocol

from engine.commands import Command, DeleteCheckpoint, DiscardGroups, FinishRun, PublishWeights, TrainStep
from engine.errors import EngineError
from engine.events import (
    CheckpointSaved,
    Event,
    ProcessLost,
    PromptsDrawn,
    RunResumed,
    SettingChanged,
    WeightsInstalled,
    WeightsPublished,
)
from engine.ids import GroupId, ReplicaId, StepId, ValidationId, Version
from engine.simulation.simulated_models import row_reward
from engine.states.limits import Limits
from engine.states.pool import PoolLease
from engine.states.process import TRAINER
from engine.states.state import State


class Finding(EngineError):
    """A simulated run broke a law or deadlocked. The message starts with the class of the finding."""


class Store(Protocol):
    """The true contents of a trajectory store."""

    @property
    def spans(self) -> MutableMapping[GroupId, list[tuple[int, Version]]]:
        """(tokens, version) of every stored group, in the order sampled."""

    @property
    def discarded(self) -> set[GroupId]:
        """Groups that were discarded for good."""


class Judge:
    """Checks every event and command of a run. `worst_staleness`: the largest staleness of a consumed group."""

    def __init__(self, limits: Limits, store: Store) -> None:
        self.limits = limits
        self.store = store
        self.taken: dict[GroupId, StepId] = {}
        self.steps_in: dict[Version, int] = {0: 0}
        self.drawn = 0
        self.worst_staleness = -1
        self.validations: dict[ValidationId, tuple[str, Version, float | None]] = {}
        """Validations that ended: outcome, version, accuracy."""
        self.trained_at: dict[StepId, float] = {}
        """Time at which each step was first sent to the trainer."""
        self.installed_at: dict[tuple[int, Version], float] = {}
        """Time at which each replica first reported each version."""
        self._publishing: dict[int, PublishWeights] = {}
        self.regular = True
        """Whether `limits.validation` decides which versions are measured, not a custom policy."""
        self.loosest = limits.max_staleness_steps
        """The largest S so far."""
        self.saved = 0
        """Train steps in the newest checkpoint that was reported to the scheduler."""
        self._trainer_life = 0
        """The newest incarnation of the trainer that ended."""
        self._resumed = False
        """The next version contains the weights that the run resumed from, so it need not contain a new step."""

    def observe(self, event: Event, commands: Sequence[Command]) -> None:
        """Check one frame of the record. Raises: `Finding`."""
        if isinstance(event, RunResumed):
            self._resume(event)
        if isinstance(event, SettingChanged) and event.setting == "scheduler.max_staleness_steps":
            self.loosest = max(self.loosest, int(event.value))
        if isinstance(event, CheckpointSaved):
            self.saved = max(self.saved, event.steps)
        if isinstance(event, WeightsPublished) and event.attempt in self._publishing:
            self._publish(self._publishing.pop(event.attempt))
        if isinstance(event, ProcessLost) and event.kind == TRAINER and event.incarnation > self._trainer_life:
            self.saved = max(self.saved, *event.saved, 0)
            self._trainer_life = event.incarnation
            lost, self._publishing = self._publishing, {}
            for order in lost.values():
                if order.version <= event.published:
                    self._publish(order)
        if isinstance(event, WeightsInstalled):
            self.installed_at.setdefault((event.replica, event.version), event.at)
        if isinstance(event, PromptsDrawn):
            self.drawn = max(self.drawn, event.first + event.count)
        for command in commands:
            if isinstance(command, PublishWeights):
                self._publishing[command.attempt] = command
            elif isinstance(command, DiscardGroups):
                self._discard(command)
            elif isinstance(command, DeleteCheckpoint):
                self._expect(command.steps < self.saved, "the newest checkpoint is deleted", command)
            elif isinstance(command, TrainStep):
                self.trained_at.setdefault(command.step, event.at)
                self._train(command)

    def _publish(self, order: PublishWeights) -> None:
        new = order.steps > self.steps_in[order.version - 1]
        self._expect(new or self._resumed, "a version holds no new step", order)
        self._resumed = False
        self.steps_in[order.version] = order.steps

    def _discard(self, command: DiscardGroups) -> None:
        """If batches are kept, none may be discarded before a checkpoint contains its step."""
        early = (
            [id for id in command.groups if self.taken.get(id, -1) >= self.saved] if self.limits.keeps_batches else ()
        )
        self._expect(not early, f"groups {early} are discarded before a checkpoint contains them", command)

    def begin_task(self, lease: PoolLease, idle: Callable[[ReplicaId], bool], command: Command) -> None:
        """A task of the trainer starts in a pool: no other task may run there. `idle(replica)`: it does nothing."""
        for replica in lease.replicas if lease.shared else ():
            self._expect(
                idle(replica), f"replica {replica} works in the pool while a task of the trainer runs there", command
            )

    def changed(self, machine: str, record: Any, source: str, trigger: str) -> None:
        """The scheduler's observer: compares the result of a validation with the rewards of its rows."""
        if machine != "validation" or record.state not in ("reported", "cancelled", "failed"):
            return
        self._expect(record.id not in self.validations, f"validation {record.id} ends twice", record.state)
        self.validations[record.id] = (record.state, record.version, record.accuracy)
        if record.state == "reported":
            rewards = [row_reward(row, record.version) for row in range(record.rows)]
            true = Counter(reward for reward in rewards if reward is not None)
            claimed = (record.measured, record.right, record.reward)
            self._expect(
                claimed == (true.total(), true[1.0], float(true[1.0])),
                f"validation {record.id} of version {record.version} counts {claimed}", dict(true),
            )  # fmt: skip
        else:
            self._expect(bool(record.reason), f"validation {record.id} is {record.state} without a reason", record.id)

    def _resume(self, event: RunResumed) -> None:
        """Remove what a resumed run repeats from the books. The run must repeat nothing else."""
        for group in event.consumed:
            self._expect(self.taken.get(group, -1) >= event.steps, f"group {group} is trained again", event)
        again = {group for group, step in self.taken.items() if step >= event.steps and not event.kept}
        for group in again:
            del self.taken[group]
        for group in (*event.consumed, *event.released):
            terminal = group in self.store.discarded or group in again
            self._expect(terminal, f"group {group} had not ended", event)
        for group in list(self.store.spans) if not event.kept else event.missing:
            self.store.spans.pop(group, None)
        if not event.kept:
            self.store.discarded.update(self.taken)
            self.store.discarded.difference_update((*event.consumed, *event.released))
        self.steps_in = {version: min(steps, event.steps) for version, steps in self.steps_in.items()}
        self._publishing.clear()
        self.saved = max(self.saved, event.checkpoint) if event.kept else event.steps
        self._resumed = True

    def _train(self, command: TrainStep) -> None:
        full = self.limits.train_batch_size
        self._expect(0 < len(command.groups) <= full, f"a step takes {len(command.groups)} groups", command)
        for group, claimed in zip(command.groups, command.staleness, strict=True):
            self._expect(group not in self.store.discarded, f"group {group} was discarded before its step", command)
            step = self.taken.setdefault(group, command.step)
            self._expect(step == command.step, f"group {group} is trained by steps {step} and {command.step}", command)
            versions = [version for _, version in self.store.spans[group]]
            self._expect(versions == sorted(versions), f"group {group} has versions going back: {versions}", command)
            if not versions:
                continue
            staleness = command.step - self.steps_in[versions[0]]
            wrong = f"group {group} is {staleness} stale, but the order says {claimed}"
            self._expect(staleness == claimed, wrong, command)
            self._expect(staleness <= self.loosest, f"group {group} is {staleness} stale", command)
            self.worst_staleness = max(self.worst_staleness, staleness)

    def close(self, state: State, outcome: FinishRun, total: int) -> None:
        """Check the end of a run whose data source had `total` prompts."""
        if outcome.outcome != "finished":
            return
        ledger = state.ledger
        self._expect(ledger.drawn == ledger.consumed + ledger.released, "a prompt has not ended", ledger.count)
        self._expect(ledger.consumed == len(self.taken), "books of consumed groups differ", ledger.count)
        if state.limits.max_steps is None:
            self._expect(ledger.drawn == total, f"{ledger.drawn} of {total} prompts were drawn", outcome)
        newest = max(self.steps_in)
        discarded = len(self.store.discarded)
        self._expect(discarded == ledger.drawn, f"{discarded} of {ledger.drawn} groups were discarded", outcome)
        self._expect(self.steps_in[newest] == state.steps_trained, "the last step was not published", self.steps_in)
        self._close_validations(state, newest)

    def _close_validations(self, state: State, newest: Version) -> None:
        wanted, results = self.limits.validation, self.validations
        self._expect(len(results) == state.validations.created, "a validation has not ended", results)
        measured = [version for _, version, _ in results.values()]
        self._expect(len(set(measured)) == len(measured), "a version was validated twice", results)
        if wanted is not None and wanted.at_end:
            self._expect(newest in measured, "the last version was not validated", results)
        if wanted is not None and wanted.every and self.regular and self.limits.sync_every == 1:
            steps, every = self.steps_in, wanted.every
            due = {v for v in steps if v and steps[v] // every > steps[v - 1] // every}
            self._expect(due <= set(measured), f"of versions {due} some were not validated", results)

    def _expect(self, holds: bool, what: str, story: object) -> None:
        if not holds:
            raise Finding(f"correctness: {what}; {story}")
