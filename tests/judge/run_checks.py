"""Checks a simulated run independently of the scheduler: it counts for itself what the processes did.

Used by the world and by the property tests. A finding has a class: `correctness` (a law is broken) or `liveness` (no
event is left, but the run has not ended).
"""

from collections import Counter
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, Protocol

from engine.commands import Command, FinishRun, TrainStep
from engine.events import Event, RunResumed, WeightsInstalled
from engine.ids import GroupId, ReplicaId, StepId, ValidationId, Version
from engine.policies import DEFAULTS, PolicySet
from engine.simulation.simulated_models import row_reward
from engine.simulation.world import Finding
from engine.states.limits import Limits
from engine.states.state import State
from tests.judge.run_ledger import RunLedger

__all__ = ["Finding", "Judge", "Store"]


class Store(Protocol):
    """The true contents of a trajectory store."""

    @property
    def spans(self) -> MutableMapping[GroupId, list[tuple[int, Version]]]:
        """(tokens, version) of every stored group, in the order sampled."""

    @property
    def discarded(self) -> set[GroupId]:
        """Groups that were discarded for good."""


class Judge:
    """Checks every event and command of a run by its ledger and by the contents of the processes."""

    def __init__(self, limits: Limits, policies: PolicySet, store: Store) -> None:
        self.limits = limits
        self.store = store
        self.ledger = RunLedger(limits, policies.names)
        self.validations: dict[ValidationId, tuple[str, Version, float | None]] = {}
        """Validations that ended: outcome, version, accuracy."""
        self.trained_at: dict[StepId, float] = {}
        """Time at which each step was first sent to the trainer."""
        self.installed_at: dict[tuple[int, Version], float] = {}
        """Time at which each replica first reported each version."""
        self.regular = policies.names["validation"] == DEFAULTS["validation"]
        """Whether `limits.validation` decides which versions are measured, not a custom policy."""

    def observe(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """Check one tick of the record. Raises: `Finding`."""
        for event in events:
            if isinstance(event, RunResumed):
                self._resume(event)
            if isinstance(event, WeightsInstalled):
                self.installed_at.setdefault((event.replica, event.version), event.at)
        self.ledger.observe(events, commands)
        for command in commands:
            if isinstance(command, TrainStep):
                self.trained_at.setdefault(command.step, events[0].at)
                self._compare_tokens(command)

    def _compare_tokens(self, command: TrainStep) -> None:
        """The tokens in the store are those that were reported."""
        for group in command.groups:
            versions = [version for _, version in self.store.spans.get(group, ())]
            self._expect(versions == sorted(versions), f"group {group} has versions going back: {versions}", command)
            if versions:
                reported = self.ledger.books.groups[group].oldest
                wrong = f"group {group} has tokens of {versions}, but version {reported} was reported"
                self._expect(versions[0] == reported, wrong, command)

    def begin_task(self, sleepers: Iterable[ReplicaId], idle: Callable[[ReplicaId], bool], command: Command) -> None:
        """A task of the trainer starts in a pool where these replicas are to sleep meanwhile. `idle(replica)`: it does
        nothing."""
        for replica in sleepers:
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
        """Forget the contents of the store that were lost."""
        for group in list(self.store.spans) if not event.kept else event.missing:
            self.store.spans.pop(group, None)
        if not event.kept:
            self.store.discarded.update(id for id, step in self.ledger.books.taken.items() if step < event.steps)
            self.store.discarded.difference_update((*event.consumed, *event.released))

    def close(self, state: State, outcome: FinishRun, total: int) -> None:
        """Check the end of a run whose data source had `total` prompts."""
        if outcome.outcome != "finished":
            return
        drawn = self.ledger.books.drawn
        if state.limits.max_steps is None:
            self._expect(drawn == total, f"{drawn} of {total} prompts were drawn", outcome)
        left = {*range(drawn)} - self.store.discarded
        self._expect(not left, f"groups {sorted(left)} are still in the store", outcome)
        newest = self.ledger.books.newest
        self._close_validations(state, newest)

    def _close_validations(self, state: State, newest: Version) -> None:
        wanted, results = self.limits.validation, self.validations
        self._expect(len(results) == state.validations.facts.created, "a validation has not ended", results)
        measured = [version for _, version, _ in results.values()]
        self._expect(len(set(measured)) == len(measured), "a version was validated twice", results)
        if wanted is not None and wanted.at_end:
            self._expect(newest in measured, "the last version was not validated", results)
        if wanted is not None and wanted.every and self.regular and self.limits.sync_every == 1:
            steps, every = self.ledger.books.steps_in, wanted.every
            due = {v for v in steps if v and steps[v] // every > steps[v - 1] // every}
            self._expect(due <= set(measured), f"of versions {due} some were not validated", results)

    def _expect(self, holds: bool, what: str, story: object) -> None:
        if not holds:
            raise Finding(f"correctness: {what}; {story}")
