"""An exception as one line that fits an event: what went wrong, for the record and for the user."""

from engine.errors import EngineError, describe_error, message_of

LONGEST = 1000
"""Characters; the full story goes to the log."""


def reason_of(error: BaseException) -> str:
    """`Type: message` of an exception; the message alone for the engine's own, which name themselves."""
    return clean(message_of(error) if isinstance(error, EngineError) else describe_error(error))


def clean(text: str) -> str:
    """Text of bounded length that every codec can hold."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
