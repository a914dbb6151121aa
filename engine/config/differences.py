"""Which fields of a configuration differ from their defaults, or from those of another configuration.

Called by `engine show` and `engine compare`, with the plain data of a run's `config.yaml`. It must accept the
configuration of any engine version, so it checks nothing.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from engine.config.loading import fields

NO_DEFAULT = "required"
"""Shown as the default of a field that must be set."""
PLACES = ("run.dir", "run.code_dir")
"""Fields whose defaults depend on the working directory."""


def changed_fields(tree: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """(value, default) of each field with a value that is not its default, by its path."""
    known = _defaults()
    values = ((path, value, known.get(path)) for path, value in _values(tree) if path not in PLACES)
    return {path: (value, default) for path, value, default in values if value != default}


def differing_fields(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The two values of each field in which two configurations differ, by its path. A field that one of them does not
    have has its default there."""
    known, mine, theirs = _defaults(), dict(_values(one)), dict(_values(other))
    paths = (path for path in {**mine, **theirs} if path not in PLACES)
    pairs = {path: (mine.get(path, known.get(path)), theirs.get(path, known.get(path))) for path in paths}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}


def _values(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every field. An optional section counts as one field: it is off by default."""
    for name, value in tree.items():
        path = f"{above}{name}"
        if isinstance(value, Mapping) and _defaults().get(path, {}) == {}:
            yield from _values(value, f"{path}.")
        else:
            yield path, value


@cache
def _defaults() -> dict[str, Any]:
    """The default of each field as plain data; of a section that is always there, an empty mapping."""
    found: dict[str, Any] = {}
    for path, info in fields():
        default = info.get_default(call_default_factory=True)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            found[path] = {}
        elif default is PydanticUndefined:
            found[path] = NO_DEFAULT
        else:
            found[path] = _plain(default)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value
