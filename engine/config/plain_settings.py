"""The settings of a configuration that are no texts of the user: numbers, switches and named choices.

Called by `engine bug`, with the plain data of a record's header. The schema decides: a text is left in only if the
field's type lists it. Whatever the schema does not know, lists and mappings of the user included, is left out.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from engine.config.schema import Config


def plain_settings(given: Mapping[str, Any], model: type[BaseModel] = Config) -> dict[str, Any]:
    """These settings, in their sections."""
    found: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        value, section = given.get(name), _section_in(info.annotation)
        if isinstance(value, Mapping) and section is not None:
            found[name] = plain_settings(value, section)
        elif isinstance(value, bool | int | float) or value in _choices(info.annotation):
            found[name] = value
    return found


def _section_in(kind: Any) -> type[BaseModel] | None:
    """The model that a field holds itself, not in a list."""
    of = [kind] if isinstance(kind, type) else get_args(kind)
    return next((one for one in of if isinstance(one, type) and issubclass(one, BaseModel)), None)


def _choices(kind: Any) -> list[Any]:
    """The texts that a type lists."""
    if get_origin(kind) is Literal:
        return [*get_args(kind)]
    return [choice for inner in get_args(kind) for choice in _choices(inner)]
