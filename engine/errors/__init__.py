"""All exceptions of the engine. Each says whose fault it is, carries its details, and can be pickled, because it
crosses Ray.

`ConfigError`, `DataFailure` and `RecordError` report a problem with the user's input; the others with the engine.
"""

import errno
import re
import traceback
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from engine.errors.redaction import described, shortened

# -- reasons in events -------------------------------------------------------------------------------------------------


LONGEST = 1000
"""Maximum length of a reason, in characters; the log has the full message."""


def reason_of(error: BaseException) -> str:
    """What `describe_error` says of an exception; only the message for the engine's own exceptions."""
    if isinstance(error, EngineError):
        return clean(message_of(error))
    place = clean(place_of(error))
    return clean(type_and_message(error), LONGEST - len(place)) + place


def visible(text: str) -> str:
    """The text with its control characters as escapes, except line ends and tabs: a terminal would obey them."""
    return _UNUSUAL.sub(lambda found: found[0] if found[0].isprintable() else _escaped(found[0]), text)


_UNUSUAL = re.compile(r"[^\x20-\x7e\n\t]+")


def _escaped(text: str) -> str:
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def clean(text: str, longest: int = LONGEST) -> str:
    """Valid UTF-8 text of bounded length, without control characters that a terminal would obey."""
    text = visible(text[: longest + 1].encode("utf-8", "replace").decode("utf-8"))
    return text if len(text) <= longest else text[: longest - 1] + "…"


def counted(count: int, what: str) -> str:
    """`1 group`, `2 groups`."""
    return f"{count} {what}{'s' * (count != 1)}"


def are(count: int, what: str) -> str:
    """`1 group is`, `2 groups are`."""
    return f"{counted(count, what)} {'is' if count == 1 else 'are'}"


# -- the exceptions of the engine --------------------------------------------------------------------------------------


LONGEST_LAW = 4000
"""Maximum length of the law and of the fix in a `ConfigError`, in characters."""


class EngineError(Exception):
    """Base class of the engine's exceptions. `details` survives pickling."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.details)


def message_of(error: BaseException) -> str:
    """The message of an exception, even if it is of a user's class whose `__str__` raises."""
    try:
        return str(error)
    except BaseException:
        return "(its message cannot be shown)"


def type_and_message(error: BaseException) -> str:
    """`Type: message` of an exception, for texts that must not depend on line numbers."""
    return f"{type(error).__name__}: {message_of(error)}".removesuffix(": ")


def describe_error(error: BaseException) -> str:
    """`Type: message (my_rewards.py:3, in score)` of an exception: see `place_of`."""
    return type_and_message(error) + place_of(error)


_OTHERS = (
    __file__.removesuffix("errors/__init__.py"), traceback.__file__.removesuffix("traceback.py"), "<frozen", "<string>",
    "<eval_with_key",
)  # fmt: skip
"""Prefixes of the paths of the engine's files, of Python's own, and of generated code."""


def place_of(error: BaseException) -> str:
    """` (my_rewards.py:3, in score)`: the innermost line of the user's own code that an exception passed; empty if
    there is none."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        others = code.co_filename.startswith(_OTHERS) or "-packages/" in code.co_filename
        if not others and "/torchinductor_" not in code.co_filename:
            place = f" ({code.co_filename.rpartition('/')[2]}:{line}, in {code.co_name})"
    return place


def _rebuild(cls: type[EngineError], message: str, details: dict[str, Any]) -> EngineError:
    error = cls.__new__(cls)
    EngineError.__init__(error, message, **details)
    return error


class ConfigError(EngineError):
    """A configuration or argument that cannot be used. Names the field, its value, the law it breaks, and what to do.

    The value is shown without secrets and shortened. `law` is "must ...", a predicate of the value ("is not a file",
    "cannot be read: ..."), or a clause of its own. `fix` is an instruction ("use 4").
    """

    def __init__(self, field: str, value: Any, law: str, fix: str = "") -> None:
        field, shown = shortened(field), described(field, value)
        law, fix = shortened(law, LONGEST_LAW), shortened(fix, LONGEST_LAW)
        message = _sentence(field, None if value is None else shown, law) + (f"; {fix}" if fix else "")
        super().__init__(message, field=field, value=shown, law=law, fix=fix)


_PREDICATES = {"is", "are", "was", "has", "holds", "cannot", "does", "names", "already", "refuses"}
"""First words of a law whose subject is the value."""


def _sentence(field: str, shown: str | None, law: str) -> str:
    first = law.partition(" ")[0].rstrip(":,")
    if first == "must":
        return f"{field} is {'null' if shown is None else shown}, but {law}"
    if first in _PREDICATES and shown is not None:
        return f"{field} {shown} {law}"
    return f"{field} is {'not set' if shown is None else shown}: {law}"


ALIKE = 0.8
"""Least similarity at which a file name is suggested. It is high, because file names share a suffix."""


def nearest_divisor(number: int, near: int) -> int:
    """The divisor of `number` closest to `near`; if two are equally close, the smaller."""
    pairs = ((low, number // low) for low in range(1, int(number**0.5) + 1) if number % low == 0)
    return min((d for pair in pairs for d in pair), key=lambda d: (abs(d - near), d))


def suggestion(name: str, known: Iterable[str], otherwise: str = "", *, prefix: str = "", alike: float = 0.6) -> str:
    """The fix for an unknown name: "did you mean X?" with the nearest known name, else `otherwise`. `prefix`: text
    before the name, such as its section or directory. `alike`: the least similarity, up to 1."""
    near = get_close_matches(shortened(name), list(known), n=1, cutoff=alike)
    return f"did you mean {prefix}{near[0]}?" if near else otherwise


def choice(name: str, known: Sequence[str], listed: str = "", *, prefix: str = "") -> str:
    """The fix for an unknown name where few names are valid: all of them, because the nearest may not be the one that
    was meant, then the nearest. `listed`: the sentence that lists them, if it is not "use one of ..."."""
    nearest = suggestion(name, known, prefix=prefix)
    return "; ".join(filter(None, [listed or f"use one of {', '.join(known)}", nearest]))


class RunFinished(ConfigError):
    """The run has finished and cannot be resumed."""


class DataFailure(EngineError):
    """A prompt, its data or its reward failed. The group is retried within its `data` budget."""

    judged: object = None
    """The trajectory group whose reward failed, for samples. It is lost if the error is pickled."""


class RewardFailure(DataFailure):
    """A reward failed in a separate process. The message is a predicate: "raised KeyError: ..."."""


class RecordError(EngineError):
    """A schedule record cannot be read. Names the file, the byte offset and the reason."""

    def __init__(self, path: str, offset: int, reason: str) -> None:
        super().__init__(f"{path}: at byte {offset}: {reason}", path=path, offset=offset, reason=reason)


class RecordDamaged(RecordError):
    """Bytes of a record were lost or changed."""

    fix = (
        "restore this file from a copy of the run's directory; without a copy, docs/FAILURES.md, "
        '"What a resume refuses", says how to continue'
    )


class RecordHeld(RecordError):
    """Another process is writing this schedule record."""


class RunDamaged(RecordError):
    """A file that a run's record refers to is missing or damaged. Names its path, and says what to do."""

    def __init__(self, path: str, reason: str) -> None:
        EngineError.__init__(self, f"{path} {reason}", path=path, offset=0, reason=reason)


class RecordNotBegun(RecordError):
    """A schedule record without a header: the run ended before its first event."""


class TrainerSpoiled(EngineError):
    """Raised by a trainer whose weights are no longer the result of a whole train step. Its process is replaced: the
    next one loads the newest checkpoint and trains the steps since then again."""


class StorageFull(EngineError):
    """A disk, or the part of it that the run may use, is full. Names the directory, the bytes in it, and what to do."""

    def __init__(
        self, directory: str, bytes: int, reason: str, remedy: str = "free space, then resume the run"
    ) -> None:
        super().__init__(
            f"{directory}: {reason}; it holds {bytes} bytes; {remedy}",
            directory=directory, bytes=bytes, reason=reason, remedy=remedy,
        )  # fmt: skip


FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk or an exceeded quota."""


class IllegalTransition(EngineError):
    """A state machine refused a trigger in its present state. This is always a bug in the engine."""

    def __init__(self, machine: str, id: int, state: str, trigger: str) -> None:
        super().__init__(
            f"{machine} {id} cannot {trigger} in state {state}", machine=machine, id=id, state=state, trigger=trigger
        )


class InvariantViolated(EngineError):
    """An invariant of the scheduler does not hold: this is a bug in the engine. Names the law and the figures."""


class PolicyError(EngineError):
    """A policy raised, or returned an illegal decision. Names the policy, the decision and its view."""


class RunFailed(EngineError):
    """The run failed. Says why."""


class RayProcessEnded(RunFailed):
    """A Ray process on the launching node ended, so the run cannot continue. Says which process, and whether the run
    can be resumed."""
