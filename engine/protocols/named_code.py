"""The user's functions and classes that a configuration names, as "module:attribute".

Imported by whatever calls them: rewards, agents, environments, objectives. It must never call what it imports.
"""

import importlib
import os
import re
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, TypeAlias

from engine.errors import ConfigError, describe_error, suggestion

Local: TypeAlias = Mapping[str, Any]
"""Functions and classes of the program that other processes cannot import, by the field that names them. They travel
with the plan of the run, pickled by value."""
NO_LOCAL: Local = {}


def find(spec: str, directory: str | None, config_field: str, local: Local = NO_LOCAL) -> Any:
    """Import what `spec`, "module:attribute", names. `config_field`: the field with this name. Raises:
    `ConfigError`."""
    if config_field in local:
        return local[config_field]
    module_name, colon, attribute = spec.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(config_field, spec, "is not of the form module:function", "for example my_rewards:score")
    if module_name == "__main__" or {"locals", "lambda"} & {*attribute.split(".")}:
        law = "belongs to a script or a notebook, or is inside a function, and cannot be imported"
        section = config_field.partition(".")[0]
        arguments = {"environment": "environment=CLASS", "reward": "reward=FUNCTION"}
        argument = arguments.get(section, f"**{{'{config_field}': FUNCTION}}")
        fix = f"a run that began with it resumes in the script: engine.resume(RUN, {argument})"
        raise ConfigError(config_field, spec, law, f"{fix}; for a new run, put it in a module")
    module = _import(module_name, directory or os.getcwd(), spec, config_field)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in dir(found) if not name.startswith("_")]
            hint = suggestion(part, public, f"define it in {getattr(module, '__file__', module_name)}")
            raise ConfigError(config_field, spec, f"module {module_name!r} has no attribute {attribute!r}", hint)
        found = getattr(found, part)
    return found


def _import(name: str, directory: str, spec: str, config_field: str) -> ModuleType:
    if directory not in sys.path:
        sys.path.append(directory)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            law = f"no module named {error.name!r}"
            hint = f"install it, or put {error.name.replace('.', '/')}.py into {directory}"
        else:
            law = f"module {name!r} itself imports {error.name!r}, which is not installed"
            hint = f"install {error.name}"
        raise ConfigError(config_field, spec, law, hint) from error
    except (Exception, SystemExit) as error:
        law = f"importing module {name!r} failed: {describe_error(error)}"
        raise ConfigError(config_field, spec, law, f"make `import {name}` work") from error


def name_of(given: Any) -> tuple[str, bool]:
    """The name "module:attribute" of a function or a class, and whether it can be imported under this name. If it is
    defined in a script, in a notebook or inside a function, it cannot."""
    module = getattr(given, "__module__", None) or "__main__"
    path = getattr(given, "__qualname__", type(given).__qualname__)
    spec = f"{module}:{re.sub(r'[^A-Za-z0-9_.]', '', path)}"
    found: Any = sys.modules.get(module) if module != "__main__" else None
    for part in path.split("."):
        found = getattr(found, part, None)
    return spec, found is given
