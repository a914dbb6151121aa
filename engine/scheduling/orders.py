"""The commands of one event as they come up, and how a policy is asked for a decision."""

from collections.abc import Callable
from typing import Any

from engine.commands import Command, DiscardGroups
from engine.errors import PolicyError
from engine.ids import EventId, GroupId
from engine.policies.registry import PolicySet


class Orders:
    """Collects what one event leads to. `cause` is that event's id."""

    __slots__ = ("_commands", "_discards", "cause")

    def __init__(self) -> None:
        self.cause: EventId = -1
        self._commands: list[Command] = []
        self._discards: list[GroupId] = []

    def begin(self, cause: EventId) -> None:
        self.cause = cause
        self._commands = []
        self._discards = []

    def add(self, command: Command) -> None:
        self._commands.append(command)

    def discard(self, group: GroupId) -> None:
        """The trajectories of a group will not be asked for again; one command tells of all."""
        self._discards.append(group)

    def take(self, last: Command | None = None) -> tuple[Command, ...]:
        if self._discards:
            self._commands.append(DiscardGroups(groups=tuple(self._discards), cause=self.cause))
        if last is not None:
            self._commands.append(last)
        return tuple(self._commands)


def ask(policies: PolicySet, decision: str, question: Callable[[], Any], kinds: tuple[type, ...]) -> Any:
    """Put a question to a policy. The answer is of one of `kinds` exactly.

    Raises `PolicyError`, which names the policy, for an answer of another kind and for whatever the policy raised.
    """
    try:
        answer = question()
    except PolicyError:
        raise
    except Exception as error:
        name = policies.names[decision]
        raise PolicyError(
            f"the {decision} policy {name!r} raised {type(error).__name__}: {error}", decision=decision, policy=name
        ) from error
    if type(answer) not in kinds:
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise refuse(policies, decision, answer, f"it must answer with {expected}")
    return answer


def refuse(policies: PolicySet, decision: str, answer: Any, law: str) -> PolicyError:
    """The error for a decision that would break a law."""
    name = policies.names[decision]
    return PolicyError(
        f"the {decision} policy {name!r} decided {answer!r}: {law}", decision=decision, policy=name, answer=repr(answer)
    )
