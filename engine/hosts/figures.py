"""Sanitizes the metrics of a user's trainer: names become text, values become plain numbers.

Called by `trainer.TrainerHost` for every metric of a user's trainer. It skips a metric that it cannot use and logs one
warning. A bad metric must never fail a train step that has finished.
"""

import logging
from collections.abc import Mapping
from math import isfinite
from numbers import Real
from typing import Any

from engine.errors import describe_error

log = logging.getLogger(__name__)

Figure = int | float
LONGEST_NAME = 200
"""Maximum length of a metric's name, in characters."""
TOLD = 100
"""Maximum number of metrics that get a warning."""


class Figures:
    """Reads the metrics of every step of one trainer."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def read(self, metrics: Mapping[Any, Any]) -> dict[str, Figure]:
        """The usable metrics, NaN and infinities included. Never raises. Call it on the trainer's thread, because
        reading a value may copy it from an accelerator."""
        try:
            items = list(metrics.items())
        except BaseException as error:  # a user's mapping: the step is trained, whatever this raises
            self._tell("metrics", f"metrics that cannot be read ({describe_error(error)})")
            return {}
        figures: dict[str, Figure] = {}
        for name, value in items:
            problem, figure = _name_problem(name), figure_of(value)
            if problem:
                self._tell(_shown(name), f"a metric named {_shown(name)}, {problem}")
            elif figure is None:
                law = "which is not a real number that fits a float"
                self._tell(name, f"the metric {name!r} as a {type(value).__name__}, {law}")
            else:
                figures[str(name)] = figure
        return figures

    def _tell(self, key: str, what: str) -> None:
        if key not in self._told and len(self._told) < TOLD:
            self._told.add(key)
            log.warning("train() returned %s. It is skipped. This warning is not repeated for later steps.", what)


def figure_of(value: Any) -> Figure | None:
    """A real number, or an array with one element, as a 64-bit int or a float; None for anything else."""
    try:
        real: Any = value if isinstance(value, Real) else value.item()
        figure = float(real) if isinstance(real, Real) else None
        return int(real) if type(real) in (int, bool) and abs(real) < 2**63 else figure
    except BaseException:  # whatever the value's own conversion raises
        return None


def count_in(figures: Mapping[str, Any], name: str) -> int:
    """The figure `name` as a count; 0 if it is missing or not a finite number."""
    count = figures.get(name)
    return int(count) if isinstance(count, int | float) and isfinite(count) else 0


def _name_problem(name: Any) -> str:
    if not isinstance(name, str):
        return f"a {type(name).__name__}; a name must be a str"
    if not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
        return f"which must have 1 to {LONGEST_NAME} printable characters"
    return ""


def _shown(name: Any) -> str:
    try:
        return f"{name!r:.80}"
    except BaseException:
        return f"an object of type {type(name).__name__}"
