"""The user's functions of an objective: `module:function` in place of a built-in name.

`TrainerSettings` has one `CustomFunction` for each. It is imported where it is first called: in the trainer, in a
scorer and by `engine check`. Must not import torch; `objective_check.py` tries the functions on tensors.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from engine.errors import ConfigError, EngineError, choice, describe_error
from engine.protocols.named_code import find
from engine.protocols.objectives import Needs, needs_of

SIGNATURES = {
    "loss": "(terms: LossTerms) -> Tensor of shape [tokens], or (Tensor, {name: Tensor})",
    "advantage": "(terms: AdvantageTerms) -> Tensor of shape [rollouts], or (Tensor, {name: Tensor})",
    "correction": "(terms: ImportanceTerms) -> Tensor of shape [tokens]",
    "measure": "(terms: ImportanceTerms) -> Tensor of shape [tokens]",
}
"""By the last part of the field."""


def is_custom(name: str) -> bool:
    """Whether a name is `module:function`, not a built-in one."""
    return ":" in name


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomFunction:
    """A function of the user, with its arguments."""

    field: str
    """The configuration field that names it, such as `trainer.loss`."""
    spec: str
    directory: str | None = None
    """Where modules are found that are not on the Python path; None: the working directory."""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    function: Callable[..., Any] | None = None
    """The function, if it cannot be imported."""

    @property
    def name(self) -> str:
        """The function's own name, as a part of the names of metrics."""
        return re.sub(r"\W", "_", self.spec.rpartition(":")[2])

    @property
    def needs(self) -> Needs:
        return needs_of(self.load())

    @property
    def items(self) -> str:
        """What it returns a value for."""
        return "rollouts" if self.field == "trainer.advantage" else "tokens"

    @property
    def signature(self) -> str:
        """How it should be defined."""
        return f"def {self.name}{SIGNATURES[self.field.rpartition('.')[2]]}"

    def load(self) -> Callable[..., Any]:
        """Import it. Raises: `ConfigError` if it cannot be imported or called."""
        return self.function or _found(self.spec, self.directory, self.field)

    def __call__(self, terms: Any) -> Any:
        return self.load()(terms, **self.arguments)

    def result(self, terms: Any) -> Any:
        """What it returns in a train step. Raises: `EngineError` with the field, the function and the line that
        raised."""
        try:
            return self(terms)
        except EngineError:
            raise
        except Exception as error:
            story = f"{self.field} {self.spec} raised {describe_error(error)}"
            raise EngineError(story) from error

    def refuse(self, law: str) -> ConfigError:
        """The error that names the function, what is wrong with it, and how it should be defined."""
        return ConfigError(self.field, self.spec, law, f"define it as {self.signature}")

    def check_signature(self) -> None:
        """Raises: `ConfigError` if it cannot be called with its terms and its arguments."""
        found = self.load()
        if not callable(found):
            raise self.refuse(f"is of type {type(found).__name__}, which cannot be called")
        if inspect.isclass(found) or inspect.iscoroutinefunction(found):
            raise self.refuse(f"is a {'class' if inspect.isclass(found) else 'coroutine function'}, not a function")
        try:
            inspect.signature(found).bind(None)
        except TypeError as error:
            if not self.arguments:
                raise self.refuse(f"cannot be called with its terms alone: {error}") from error
        except ValueError:
            return  # a builtin without a signature: the call on synthetic tensors shows whether it fits
        try:
            inspect.signature(found).bind(None, **self.arguments)
        except TypeError as error:
            known = list(inspect.signature(found).parameters)[1:]
            unknown = next((name for name in self.arguments if name not in known), "")
            fix = choice(unknown, known, f"{self.spec} takes {', '.join(known) or 'no arguments'}")
            section, _, last = self.field.rpartition(".")
            named = f"{section}.{'arguments' if last == 'measure' else f'{last}_arguments'}"
            law = f"cannot be passed to {self.spec}: {error}"
            raise ConfigError(named, dict(self.arguments), law, fix) from error


@lru_cache
def _found(spec: str, directory: str | None, config_field: str) -> Callable[..., Any]:
    function: Callable[..., Any] = find(spec, directory, config_field)
    return function
