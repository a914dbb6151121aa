"""Every failure the engine names. Each says whose fault it is, carries its story, and pickles (they cross Ray).

`ConfigError`, `DataFailure` and `RecordError` are about what the user gave; the others about the engine itself.
"""

import errno
from typing import Any

from engine.redaction import described, shortened

LONGEST_LAW = 4000
"""Characters of the law in a `ConfigError`, and of the allowed values."""


class EngineError(Exception):
    """Base of all. Keyword details become attributes and survive pickling."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.details)


def message_of(error: BaseException) -> str:
    """The message of an exception, also of a user's own class whose `__str__` raises."""
    try:
        return str(error)
    except BaseException:
        return "(its message cannot be shown)"


def describe_error(error: BaseException) -> str:
    """`Type: message` of an exception."""
    return f"{type(error).__name__}: {message_of(error)}".removesuffix(": ")


def _rebuild(cls: type[EngineError], message: str, details: dict[str, Any]) -> EngineError:
    error = cls.__new__(cls)
    EngineError.__init__(error, message, **details)
    return error


class ConfigError(EngineError):
    """A configuration that cannot run: the field, its value, the law it breaks and the allowed values.

    The value is shown without secrets and shortened.
    """

    def __init__(self, field: str, value: Any, law: str, would_hold: str = "") -> None:
        field, shown = shortened(field), described(field, value)
        law, would_hold = shortened(law, LONGEST_LAW), shortened(would_hold, LONGEST_LAW)
        hint = f"; {would_hold}" if would_hold else ""
        super().__init__(f"{field} = {shown}: {law}{hint}", field=field, value=shown, law=law, would_hold=would_hold)


class RunFinished(ConfigError):
    """The run has finished and cannot be resumed."""


class DataFailure(EngineError):
    """The prompt, its data or its reward is at fault: costs the group one attempt of the `data` budget."""


class RecordError(EngineError):
    """A schedule record that cannot be read: the file, the byte offset and what is wrong there."""

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(f"{path}: at byte {offset}: {reason}", path=path, offset=offset, reason=reason)


class RecordHeld(RecordError):
    """A schedule record that another process is writing."""


class RunDamaged(RecordError):
    """Something that a run's record refers to is missing, damaged or not what it must be: its path, and what to do."""

    def __init__(self, path: str, reason: str) -> None:
        EngineError.__init__(self, f"{path} {reason}", path=path, offset=0, reason=reason)


class RecordNotBegun(RecordError):
    """A schedule record without a header: the run ended before it did anything."""


class StorageFull(EngineError):
    """A disk, or what of it may be used, is full: the directory, the bytes that are there, and what to do."""

    def __init__(self, directory: str, bytes: int, reason: str, remedy: str = "make room, then resume the run") -> None:
        super().__init__(
            f"{directory}: {reason}; {bytes} bytes are there; {remedy}",
            directory=directory, bytes=bytes, reason=reason, remedy=remedy,
        )  # fmt: skip


FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the operating system says when nothing more can be written."""


class IllegalTransition(EngineError):
    """A trigger that its machine does not allow from the present state: a defect of the engine, never of the user."""

    def __init__(self, machine: str, id: int, state: str, trigger: str) -> None:
        super().__init__(
            f"{machine} {id} is {state}: it cannot {trigger}", machine=machine, id=id, state=state, trigger=trigger
        )


class InvariantViolated(EngineError):
    """A law does not hold: a defect of the engine. Says which law and with what figures."""


class PolicyError(EngineError):
    """A policy raised or decided something illegal; its name, the decision and the view it saw."""


class RunFailed(EngineError):
    """The run stopped before its end: the cause that ended it."""


class RayProcessEnded(RunFailed):
    """A process of Ray on the launching node ended, without which the run cannot continue: which one, and whether the
    run can be resumed."""
