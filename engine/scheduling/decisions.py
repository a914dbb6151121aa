"""Asks a policy for a decision and validates the answer. An exception or an unlawful answer changes nothing.

Called by the other modules of this package for every decision of a run. An answer is used only if it breaks no law.
Otherwise a `PolicyError` that names the policy and what it saw stops the run.
"""

from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

import msgpack

from engine.errors import PolicyError, describe_error
from engine.events import GroupGenerated
from engine.policies.registry import DEFAULTS, METHODS, PolicySet
from engine.states.group import Group
from engine.states.state import State
from engine.states.view import View, view_group

SEQUENCES = ("batching", "sync", "resume")
"""Decisions whose answer is an iterable."""
IDS = ("batching", "sync")
"""Of these, those whose answer has ids."""
SHOWN = 200
"""Maximum length of an answer in an error, in characters."""
MEMORY_LAW = "it may hold only None, bool, int, float, str, list and dict with text keys"
Unlawful = Callable[[Any], str]
"""Returns the law that an answer breaks; empty if it breaks none."""
_pack = msgpack.Packer(use_bin_type=True, strict_types=True).pack


class Decisions:
    """The policies of one run, their memories and their errors."""

    def __init__(self, policies: PolicySet, state: State, view: View) -> None:
        self.state = state
        self.view = view
        self._methods: dict[str, Callable[..., Any]] = {}
        self._remembering: dict[str, Any] = {}
        """Policies with a memory, by decision."""
        self.use(policies)

    def use(self, policies: PolicySet) -> None:
        """Use these policies from now on. A policy object that is already in use keeps its memory."""
        self.policies = policies
        self._custom_filter = any(name.startswith("filter ") for name in policies.custom)
        self._methods.update({decision: _method(policies, decision) for decision in DEFAULTS})
        for decision in DEFAULTS:
            policy = getattr(policies, decision)
            if self._remembering.get(decision) is not policy:
                if self._remembering.pop(decision, None) is not None:
                    self.state.policies.memory.pop(decision, None)
                self.remember(decision, policy)

    def add(self, decision: str, policy: Any, method: Callable[..., Any]) -> None:
        """Add a decision of an extension: whether groups enter an added state."""
        self._methods[decision] = method
        self.remember(decision, policy)

    def remember(self, decision: str, policy: Any) -> None:
        """Give a policy that declares a memory the one that the run keeps; else a copy of its initial memory, because
        instances may share that, or an empty one. Raises: `PolicyError` for an initial memory that cannot be
        stored."""
        if not has_memory(policy):
            return
        given, kept = getattr(policy, "memory", None), self.state.policies.memory.get(decision)
        policy.memory = (deepcopy(given) if isinstance(given, dict) else {}) if kept is None else _unpack(kept)
        self._remembering[decision] = policy
        try:
            self._keep(decision)
        except _MemoryRefused as error:
            raise self._policy_error(decision, error) from error

    def ask(
        self, decision: str, given: tuple[Any, ...], kinds: tuple[type, ...], unlawful: Unlawful | None = None
    ) -> Any:
        """Ask a policy. The answer has exactly one of the types `kinds` and breaks no law.

        Raises: `PolicyError`, which names the policy, if it raised an error or its answer is invalid.
        """
        try:
            answer = self._methods[decision](self.view, *given)
            if decision in SEQUENCES and answer is not None:
                answer = tuple(answer)
            if type(answer) not in kinds:
                raise _Refused(answer, f"it must return {' or '.join(kind.__name__ for kind in kinds)}")
            if decision in IDS and answer is not None and any(type(id) is not int for id in answer):
                raise _Refused(answer, "it must return ids of type int")
            if unlawful is not None and (law := unlawful(answer)):
                raise _Refused(answer, law)
            if self._remembering and decision in self._remembering:
                self._keep(decision)
        except BaseException as error:  # user code must not end the process, for example with SystemExit
            raise self._policy_error(decision, error) from error
        return answer

    def keeps(self, outcome: GroupGenerated) -> bool:
        """Ask the filter about a group. A user's filter gets a copy, because it could change the event before it is
        recorded."""
        kept: bool = self.ask("filter", (copy(outcome) if self._custom_filter else outcome,), (bool,))
        return kept

    def another_attempt(self, group: Group, cause: str) -> bool:
        """Count a lost attempt. Returns whether the group gets another one: the retry policy decides, within
        `Limits.most_attempts`."""
        if cause == "data":
            group.data_failures += 1
            failures = group.data_failures
            self.state.ending.note_judged(self.state.limits.failures_in_a_row, failed=True)
        else:
            group.infrastructure_failures += 1
            failures = group.infrastructure_failures
        again: bool = self.ask("retry", (view_group(group), cause), (bool,))
        return again and failures < self.state.limits.most_attempts(cause)

    def describe_view(self) -> str:
        """A summary of what every policy sees now."""
        view = self.view
        counts = ", ".join(f"{count} {phase}" for phase, count in view.phase_counts().items())
        return f"step {view.step}, version {view.latest_version}, {counts}, {view.capacity()} could start"

    def _policy_error(self, decision: str, error: BaseException) -> PolicyError:
        name = self.policies.names.get(decision, decision)
        who = f"the policy of {decision}" if name == decision else f"the {decision} policy {name!r}"
        if isinstance(error, _Refused):
            shown = _shown(error.answer)
            did, answer = f"decided {shown}: {error.law}", shown
        elif isinstance(error, _MemoryRefused):
            did, answer = f"left a memory that cannot be stored ({error}): {MEMORY_LAW}", ""
        else:
            did, answer = f"raised {describe_error(error)}", ""
        seen = self.describe_view()
        did = did.encode("utf-8", "replace").decode("utf-8")  # the record holds only valid Unicode
        return PolicyError(
            f"{who} {did}; it saw {seen}", decision=decision, policy=name, answer=answer, view=seen
        )  # fmt: skip

    # memories

    def _keep(self, decision: str) -> None:
        """Store a policy's memory after an answer. Raises: `_MemoryRefused` if msgpack cannot hold it."""
        memory = self._remembering[decision].memory
        if type(memory) is not dict:
            raise _MemoryRefused(f"it is a {type(memory).__name__}, not a dict")
        try:
            packed = _pack(memory)
            if packed != self.state.policies.memory.get(decision):
                _unpack(packed)
                self.state.policies.memory[decision] = packed
        except (TypeError, ValueError, OverflowError) as error:
            raise _MemoryRefused(str(error)) from error


class _Refused(Exception):
    """The answer of a policy is invalid."""

    def __init__(self, answer: Any, law: str) -> None:
        super().__init__(law)
        self.answer = answer
        self.law = law


class _MemoryRefused(Exception):
    """A policy left a memory that msgpack cannot hold."""


def has_memory(policy: Any) -> bool:
    """Whether a policy's class declares `memory: dict[str, Any]`."""
    return any("memory" in getattr(cls, "__annotations__", ()) for cls in type(policy).__mro__)


def _method(policies: PolicySet, decision: str) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(getattr(policies, decision), METHODS[decision])
    return method


def _shown(answer: Any) -> str:
    """An answer as text for an error, also if its `repr` raises."""
    try:
        shown = repr(answer)
    except BaseException:
        return f"an object of type {type(answer).__name__}"
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"


def _unpack(packed: bytes) -> Any:
    return msgpack.unpackb(packed, raw=False, strict_map_key=True)
