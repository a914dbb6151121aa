"""The user's extensions: modules that register policies and add states when they are imported.

Installed packages offer extensions under the entry point group `step_engine.extensions`; a config names its own modules
in `run.extensions`. Called whenever a config is read, in every process that builds a scheduler. Each module is imported
once per process.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any

from engine.errors import ConfigError, EngineError, describe_error
from engine.policies import registry, state_registry

GROUP = "step_engine.extensions"
"""Entry points of this group name a module, or a function in a module that takes no arguments."""

_loaded: set[str] = set()


def load_extensions(modules: Iterable[str] = (), directory: str | None = None) -> None:
    """Import the extensions of packages and of the config. The config's modules are searched on the Python path and in
    `directory`.

    Raises: `ConfigError`, which names the package or module and says what is wrong with it.
    """
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        if point.value not in _loaded:
            _load_point(point)
            _loaded.add(point.value)
    for name in modules:
        if directory is not None:
            if directory not in sys.path:
                sys.path.append(directory)
            _refuse_another(name, directory)
        _import(name, directory)


def load_extensions_of(config: Mapping[str, Any]) -> None:
    """Load the extensions that a configuration names, given as plain data. Raises: `ConfigError`."""
    run = config.get("run")
    run = run if isinstance(run, Mapping) else {}
    names, directory = run.get("extensions") or (), run.get("code_dir")
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        load_extensions(names, directory if isinstance(directory, str) else None)


def _load_point(point: EntryPoint) -> None:
    package = point.dist.name if point.dist is not None else "a package"
    try:
        with _whole():
            loaded = point.load()
        with _whole():
            if callable(loaded):
                loaded()
    except Exception as error:
        reason = str(error) if isinstance(error, EngineError) else describe_error(error)
        law = f"the extension {point.name!r} of {package} cannot be loaded: {reason}"
        raise ConfigError("extensions", point.value, law, f"fix or uninstall {package}") from error


def _import(name: str, directory: str | None) -> None:
    try:
        with _whole():
            import_module(name)
    except EngineError as error:  # the module was found, and one of its registrations is refused
        raise ConfigError("run.extensions", name, str(error)) from error
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
        place = "" if directory is None else f" or in {directory} (run.code_dir)"
        fix = f"use a module on the Python path{place}" if missing else ""
        raise ConfigError("run.extensions", name, f"cannot be imported: {describe_error(error)}", fix) from error


@contextmanager
def _whole() -> Iterator[None]:
    """Undo the registrations of a block that fails, so that a second try fails with the same error. The registrations
    of modules that were imported completely in the block stay, because Python does not import these modules again."""
    modules = set(sys.modules)
    before = {*registry.registered(), *state_registry.registered()}
    try:
        yield
    except Exception:
        imported = set(sys.modules) - modules
        new = [cls for cls in (*registry.registered(), *state_registry.registered()) if cls not in before]
        halves = [cls for cls in new if cls.__module__ not in imported]
        registry.forget(halves)
        state_registry.forget(halves)
        raise


def _refuse_another(name: str, directory: str) -> None:
    """Raises: `ConfigError` if Python finds another module of this name, so that the one in `directory` would never be
    imported."""
    top = name.partition(".")[0]
    beside = PathFinder.find_spec(top, [directory])
    try:
        found = find_spec(top)
    except ValueError:  # a module that was made by hand has no spec
        found = None
    files = [spec.origin for spec in (found, beside) if spec is not None and spec.origin is not None]
    if len(files) == 2 and not os.path.samefile(*files):
        law = f"{files[0]} and {files[1]} are different modules of this name"
        raise ConfigError("run.extensions", name, law, "rename one of them")
