"""The check that no section of a configuration contains a secret."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.errors import ConfigError
from engine.errors.redaction import HIDDEN, is_secret_name, secret_in_command, secret_in_text

COMMAND = "agent.command"


def refuse_secrets(tree: Mapping[str, Any]) -> None:
    """Raises: `ConfigError` for the first value that is or contains a secret. The error does not show the value."""
    for path, secret, value in _values(tree):
        if secret and value not in (None, "") and not isinstance(value, bool):
            raise _refusal(path, "a secret")
        if isinstance(value, str) and (what := secret_in_text(value, path)):
            raise _refusal(path, what)
    agent = tree.get("agent")
    command = agent.get("command") if isinstance(agent, Mapping) else None
    words = [command] if isinstance(command, str) else command
    if isinstance(words, list | tuple) and (what := secret_in_command(words)):
        raise _refusal(COMMAND, f"a secret ({what})")


def _refusal(path: str, what: str) -> ConfigError:
    law = f"is {what}, which would be stored in the run's directory and record"
    return ConfigError(path, HIDDEN, law, "pass it in an environment variable (docs/OPERATIONS.md, Secrets)")


def _values(tree: Any, path: str = "", secret: bool = False) -> Iterator[tuple[str, bool, Any]]:
    """(path, whether the name of a field around it says that it is secret, value) of every value in the tree."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _values(value, f"{path}.{key}" if path else str(key), secret or is_secret_name(str(key)))
    elif isinstance(tree, Sequence) and not isinstance(tree, str | bytes):
        for value in tree:
            yield from _values(value, path, secret)
    else:
        yield path, secret, tree
