"""The fields of sections that are fields of `states.limits.Limits`: their bounds and descriptions are written there.

Used by the modules of the sections, and by `schema.Config`, which makes the limits of a run from them.
"""

from dataclasses import MISSING, fields
from operator import attrgetter
from typing import Any

from pydantic import Field

from engine.states.limits import BOUNDS, Limits

_DEFAULTS = {one.name: one.default for one in fields(Limits)}


def limit_field(name: str, default: Any = MISSING, *, least: float | None = None) -> Any:
    """The field with this name. `default`, `least`: where they differ from those of `Limits`."""
    bound = BOUNDS[name]
    ends = {"gt" if bound.above else "ge": bound.least if least is None else least, "le": bound.most}
    numbers: dict[str, Any] = {end: int(value) if bound.whole else value for end, value in ends.items()}
    return Field(_DEFAULTS[name] if default is MISSING else default, description=bound.text, **numbers)


def given_limits(config: Any) -> dict[str, Any]:
    """The values of all these fields, for `Limits`."""
    return {name: attrgetter(bound.path)(config) for name, bound in BOUNDS.items() if bound.text}
