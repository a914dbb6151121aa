"""The base of every section of a configuration, and the check that no section contains a secret."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.errors import ConfigError
from engine.errors.redaction import HIDDEN, is_secret_name, secret_in_command, secret_in_text

DEVICE = r"^(auto|cpu|cuda(:\d+)?)$"
NAMED = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
GENERATOR = rf"^(torch|vllm|openai|{NAMED[1:-1]})$"
TRAINER = rf"^(torch|{NAMED[1:-1]})$"
FORMS = {
    DEVICE: "auto, cpu, cuda or cuda:N",
    NAMED: "module:name",
    GENERATOR: "torch, vllm, openai, or module:Class",
    TRAINER: "torch, or module:Class",
}
"""The forms of these patterns in words."""

HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:\[\]-]{1,253}$")]
"""A name or an address, without a port."""


class Section(BaseModel):
    """Base of every block: no unknown keys, no silent conversions, no change after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, given: Any) -> Any:
        """An empty section (`validation:` with nothing under it, or null) takes all its defaults."""
        if not isinstance(given, Mapping):
            return given
        kinds = {name: info.annotation for name, info in cls.model_fields.items()}
        sections = {name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)}
        return {name: {} if value is None and name in sections else value for name, value in given.items()}


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
