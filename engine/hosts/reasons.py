"""Formats exceptions as bounded text for an event's `reason`, which the record and the user see."""

from engine.errors import EngineError, describe_error, message_of

LONGEST = 1000
"""Characters; the full story goes to the log."""


def reason_of(error: BaseException) -> str:
    """`Type: message` of an exception; only the message for the engine's own exceptions."""
    return clean(message_of(error) if isinstance(error, EngineError) else describe_error(error))


def clean(text: str) -> str:
    """Valid UTF-8 text of bounded length."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
