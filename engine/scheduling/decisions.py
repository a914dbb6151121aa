"""How a policy is asked: decide, validate, apply. What it raises or decides against a law changes nothing.

Called by the other modules of this package for every decision of a run. An answer is used only once it was found
lawful. Otherwise the policy's memory is put back as it was, and either the run ends with a `PolicyError` that names the
policy and what it saw (`on_error: stop`), or the decision's built-in policy is asked instead (`builtin`).
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import msgpack

from engine.errors import EngineError, PolicyError, describe_error
from engine.policies.registry import DEFAULTS, METHODS, PolicySet
from engine.states.group import Group
from engine.states.state import State
from engine.states.tree import digest
from engine.states.view import View, view_group

SEQUENCES = ("batching", "sync", "resume")
"""Decisions that are answered with several things; any iterable will do."""
IDS = ("batching", "sync")
"""Of these, those that are answered with ids."""
SHOWN = 200
"""Characters of an answer that go into an error."""
Unlawful = Callable[[Any], str]
"""The law that an answer breaks; empty where it breaks none."""
_pack = msgpack.Packer(use_bin_type=True, strict_types=True).pack


class Decisions:
    """The policies of one run, what they remember, and what was wrong with them."""

    def __init__(self, policies: PolicySet, state: State, view: View) -> None:
        self.state = state
        self.view = view
        self.rescuing = False
        """The built-in policies decide everything: those of the run have started nothing where they had to."""
        self._builtin = PolicySet.from_names({})
        self._methods: dict[str, Callable[..., Any]] = {}
        self._remembering: dict[str, Any] = {}
        """Policies with a memory, by decision."""
        self.use(policies)

    def use(self, policies: PolicySet) -> None:
        """Take these policies from now on, with memories of their own; one that decides already keeps its memory."""
        self.policies = policies
        self._methods.update({decision: _method(policies, decision) for decision in DEFAULTS})
        for decision in DEFAULTS:
            policy = getattr(policies, decision)
            if self._remembering.get(decision) is not policy:
                self._remembering.pop(decision, None)
                self.state.policy_memory.pop(decision, None)
                self.remember(decision, policy)
        self._count()

    def add(self, decision: str, policy: Any, method: Callable[..., Any]) -> None:
        """A decision that only runs with an extension have: whether groups enter an added state."""
        self._methods[decision] = method
        self.remember(decision, policy)

    def remember(self, decision: str, policy: Any) -> None:
        """Give a policy that declares a memory one that is empty, or what it was made with: a copy, since what its
        class gives is every instance's."""
        if not has_memory(policy):
            return
        given = getattr(policy, "memory", None)
        policy.memory = deepcopy(given) if isinstance(given, dict) else {}
        self._remembering[decision] = policy
        self._keep(decision)

    def ask(
        self, decision: str, given: tuple[Any, ...], kinds: tuple[type, ...], unlawful: Unlawful | None = None
    ) -> Any:
        """Put a question to a policy. The answer is of one of `kinds` exactly, and breaks no law.

        Raises: `PolicyError`, which names the policy, for whatever it raised and for an answer that is neither.
        """
        if self.rescuing:
            return self._instead(decision, given, kinds, unlawful)
        try:
            answer = self._methods[decision](self.view, *given)
            if decision in SEQUENCES and answer is not None:
                answer = tuple(answer)
            if type(answer) not in kinds:
                raise _Refused(answer, f"it must answer with {' or '.join(kind.__name__ for kind in kinds)}")
            if decision in IDS and answer is not None and any(type(id) is not int for id in answer):
                raise _Refused(answer, "it must hold ids, which are of type int")
            if unlawful is not None and (law := unlawful(answer)):
                raise _Refused(answer, law)
            if self._remembering and decision in self._remembering:
                self._keep(decision)
        except BaseException as error:  # a user's code: it may not end the process either
            told = self._told(decision, error)
            self._forget(decision)
            if self.policies.on_error == "stop":
                raise told from error
            self.note(told)
            return self._instead(decision, given, kinds, unlawful)
        return answer

    def another_attempt(self, group: Group, cause: str) -> bool:
        """Count an attempt that was lost, and say whether the group gets another one: as the retry policy decides, up
        to the most attempts that there may be."""
        if cause == "data":
            group.data_failures += 1
            failures = group.data_failures
        else:
            group.infrastructure_failures += 1
            failures = group.infrastructure_failures
        again: bool = self.ask("retry", (view_group(group), cause), (bool,))
        return again and failures < self.state.limits.most_attempts(cause)

    def note(self, error: EngineError) -> None:
        """Count what was wrong with a policy whose built-in stands in."""
        self.state.policy_errors += 1
        self.state.last_policy_error = str(error)
        self._count()

    def seen(self) -> str:
        """What every policy sees at the moment, in a few figures."""
        view = self.view
        counts = ", ".join(f"{count} {phase}" for phase, count in view.phase_counts().items())
        return f"step {view.step}, version {view.latest_version}, {counts}, {view.capacity()} could start"

    def _instead(
        self, decision: str, given: tuple[Any, ...], kinds: tuple[type, ...], unlawful: Unlawful | None
    ) -> Any:
        """The answer of the decision's built-in policy; a group enters every added state.

        Raises: `PolicyError` where even that is against a law.
        """
        if decision not in DEFAULTS:
            return True
        answer = _method(self._builtin, decision)(self.view, *given)
        if decision in SEQUENCES and answer is not None:
            answer = tuple(answer)
        law = "" if unlawful is None else unlawful(answer)
        if law or type(answer) not in kinds:
            raise PolicyError(f"the built-in {decision} policy decided {answer!r}: {law}", decision=decision)
        return answer

    def _told(self, decision: str, error: BaseException) -> PolicyError:
        if isinstance(error, PolicyError):
            return error
        name = self.policies.names.get(decision, decision)
        if isinstance(error, _Refused):
            shown = _shown(error.answer)
            did, answer = f"decided {shown}: {error.law}", shown
        else:
            did, answer = f"raised {describe_error(error)}", ""
        seen = self.seen()
        did = did.encode("utf-8", "replace").decode("utf-8")  # as every codec can hold it
        return PolicyError(
            f"the {decision} policy {name!r} {did}; it saw {seen}", decision=decision, policy=name, answer=answer,
            view=seen,
        )  # fmt: skip

    # memories

    def _keep(self, decision: str) -> None:
        """Take over what a policy remembers after an answer. Raises: TypeError, ValueError for what is not plain."""
        packed = _pack(self._remembering[decision].memory)
        if packed != self.state.policy_memory.get(decision):
            if type(_unpack(packed)) is not dict:
                raise TypeError("its memory is no dict")
            self.state.policy_memory[decision] = packed
            self._count()

    def recall(self) -> None:
        """Give every policy back what it remembered after its last lawful answer."""
        for decision in self._remembering:
            self._forget(decision)
        self._count()

    def _forget(self, decision: str) -> None:
        """Put a memory back to what it was before the question."""
        if decision in self._remembering:
            self._remembering[decision].memory = _unpack(self.state.policy_memory[decision])

    def _count(self) -> None:
        """What policies remember, and what was wrong with them, is part of the state and so of its hash."""
        memories = self.state.policy_memory
        self.state.policy_books = digest(sorted(memories.items())) if memories else 0


class _Refused(Exception):
    """An answer that cannot be used."""

    def __init__(self, answer: Any, law: str) -> None:
        super().__init__(law)
        self.answer = answer
        self.law = law


def has_memory(policy: Any) -> bool:
    """Whether a policy's class declares `memory: dict[str, Any]`."""
    return any("memory" in getattr(cls, "__annotations__", ()) for cls in type(policy).__mro__)


def _method(policies: PolicySet, decision: str) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(getattr(policies, decision), METHODS[decision])
    return method


def _shown(answer: Any) -> str:
    """An answer as an error shows it, also one whose `repr` raises."""
    try:
        shown = repr(answer)
    except BaseException:
        return f"an object of type {type(answer).__name__}"
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"


def _unpack(packed: bytes) -> Any:
    return msgpack.unpackb(packed, raw=False, strict_map_key=True)
