"""The user's classes that a configuration names as `rollout.backend` and `trainer.backend`: imports and checks them.

Called by `engine check`, by the launching process before any actor starts, and by the processes that make an object of
the class. Only reads the class; `plans.backend_rehearsal` makes an object and calls it.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from engine.config.schema import Config
from engine.errors import ConfigError, counted
from engine.protocols import Generator, GeneratorSetup, MeasuresCache, Restorable, Trainer, TrainerSetup
from engine.protocols.named_code import NO_LOCAL, Local, find

GENERATOR, TRAINER = "rollout.backend", "trainer.backend"


class Required(NamedTuple):
    """A method that a class must have, as its protocol declares it."""

    protocol: type
    name: str

    @property
    def coroutine(self) -> bool:
        return inspect.iscoroutinefunction(getattr(self.protocol, self.name))

    @property
    def shown(self) -> str:
        """The definition, without the modules of types."""
        signature = str(inspect.signature(getattr(self.protocol, self.name)))
        short = re.sub(r"(?:\w+\.)+(\w+)", r"\1", signature)
        return f"{'async ' if self.coroutine else ''}def {self.name}{short}"


OF_GENERATORS = tuple(
    Required(Generator, name)
    for name in ("generate", "abort", "truncate", "pause", "stage", "install", "resume", "close")
)
OF_TRAINERS = (Required(Trainer, "train"), Required(Trainer, "weights"))
FOR_CHECKPOINTS = (Required(Trainer, "save"), Required(Restorable, "load"))


def check_custom_classes(config: Config, local: Local = NO_LOCAL) -> None:
    """Raises: `ConfigError` for a class that cannot be imported, lacks a method, or does not take its arguments."""
    if config.rollout.custom:
        generator_class(config, local)
    if config.trainer.custom:
        trainer_class(config, local)


def custom_lines(config: Config) -> Iterator[str]:
    """What `engine check` says of the classes, which `check_custom_classes` has accepted."""
    if config.rollout.custom:
        yield f"{GENERATOR} {config.rollout.backend} has {_counted(_of_generator(config))} of a Generator"
    if config.trainer.custom:
        yield f"{TRAINER} {config.trainer.backend} has {_counted(_of_trainer(config))} of a Trainer"


def generator_class(config: Config, local: Local = NO_LOCAL) -> Any:
    """The class of `rollout.backend`. Raises: as `check_custom_classes`."""
    section = config.rollout
    found = find(section.backend, config.run.code_dir, GENERATOR, local)
    _check(found, section.backend, GENERATOR, section.arguments, _of_generator(config), GeneratorSetup)
    return found


def trainer_class(config: Config, local: Local = NO_LOCAL) -> Any:
    """The class of `trainer.backend`. Raises: as `check_custom_classes`."""
    section = config.trainer
    found = find(section.backend, config.run.code_dir, TRAINER, local)
    _check(found, section.backend, TRAINER, section.arguments, _of_trainer(config), TrainerSetup)
    return found


def _of_generator(config: Config) -> tuple[Required, ...]:
    adaptive = config.scheduler.policies.concurrency == "kv-cache"
    return (*OF_GENERATORS, Required(MeasuresCache, "cache_used")) if adaptive else OF_GENERATORS


def _of_trainer(config: Config) -> tuple[Required, ...]:
    return (*OF_TRAINERS, *FOR_CHECKPOINTS) if config.trainer.checkpoint_every else OF_TRAINERS


def _counted(required: tuple[Required, ...]) -> str:
    return f"the {counted(len(required), 'method')} {', '.join(method.name for method in required)}"


def _check(
    found: Any, spec: str, field: str, arguments: Mapping[str, Any], required: tuple[Required, ...], setup: type
) -> None:
    """Raises: `ConfigError` that names the first problem and the expected definition."""
    if not inspect.isclass(found):
        raise ConfigError(field, spec, f"is of type {type(found).__name__}, not a class", "name the class itself")
    lacking = [method for method in required if not callable(getattr(found, method.name, None))]
    if lacking:
        law = f"lacks the {'methods' if lacking[1:] else 'method'} {', '.join(method.name for method in lacking)}"
        raise ConfigError(field, spec, law, f"define {'; '.join(method.shown for method in lacking)}")
    for method in required:
        _check_method(found, spec, field, method)
    if inspect.isabstract(found):
        missing = sorted(getattr(found, "__abstractmethods__", ()))
        law = f"is abstract: it lacks the {'methods' if missing[1:] else 'method'} {', '.join(missing)}"
        raise ConfigError(field, spec, law, "define what its base class leaves open")
    try:
        signature = inspect.signature(found)
    except ValueError:
        return  # a class written in C
    made = f"def __init__({', '.join(['self', f'setup: {setup.__name__}', *arguments])})"
    try:
        signature.bind(None, **arguments)
    except TypeError as error:
        law = f"{found.__name__} cannot be called with a {setup.__name__} and these arguments: {error}"
        known = ", ".join(list(signature.parameters)[1:]) or "none"
        section = field.partition(".")[0]
        raise ConfigError(
            f"{section}.arguments", dict(arguments), law, f"define {made}; its arguments are now {known}"
        ) from error


def _check_method(found: Any, spec: str, field: str, required: Required) -> None:
    method = getattr(found, required.name)
    try:
        parameters = list(inspect.signature(getattr(required.protocol, required.name)).parameters)
        inspect.signature(method).bind(*parameters)
    except TypeError as error:
        law = f"its {required.name}() cannot be called in the way that the engine calls it: {error}"
        raise ConfigError(field, spec, law, f"define {required.shown}") from error
    except ValueError:
        return  # a method written in C
    coroutine = inspect.iscoroutinefunction(method)
    if required.coroutine and not coroutine:
        law = f"its {required.name}() is not a coroutine function"
        raise ConfigError(field, spec, law, f"define {required.shown}")
    if required.name in ("save", "load") and coroutine:
        law = f"its {required.name}() is a coroutine function, but it must block until it is done"
        raise ConfigError(field, spec, law, f"define {required.shown}")
