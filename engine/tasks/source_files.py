"""The data sources of a configuration, and how they are loaded.

Used by `config`, and by the two processes that load the prompts of a run: the launching one and the scheduler's.
Imports neither numpy nor pyarrow before a file is read.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import TYPE_CHECKING, Any

from pydantic import Field

from engine.errors import ConfigError, suggestion
from engine.section import Section

if TYPE_CHECKING:
    from engine.tasks.dataset import Dataset


class PassRate(Section):
    """Selects the rows of a source by how often they are solved. With `column`, the rate was measured before the run,
    and rows outside the bounds are left out. Without it, the next passes skip rows outside."""

    min: float | None = Field(None, ge=-1e9, le=1e9, description="Minimum pass rate; null: none.")
    max: float | None = Field(None, ge=-1e9, le=1e9, description="Maximum pass rate; null: none.")
    column: str | None = Field(
        None,
        min_length=1,
        description="Column with a pass rate from before the run; rows outside the bounds are left out. null: use the "
        "mean reward of the row's newest group in this run.",
    )
    rest_passes: int | None = Field(
        1,
        ge=1,
        le=1_000_000,
        description="Without a column: number of passes over the source that skip a row outside the bounds; null: "
        "all later passes.",
    )

    def holds(self, rate: float) -> bool:
        return (self.min is None or rate >= self.min) and (self.max is None or rate <= self.max)

    def __str__(self) -> str:
        low = "" if self.min is None else f"{self.min:g} <= "
        high = "" if self.max is None else f" <= {self.max:g}"
        return f"{low}{self.column or 'reward'}{high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumStage:
    """One stage of a curriculum: a weight for each source."""

    weights: tuple[float, ...]
    until: float | None = None
    """By step: train steps after which the stage ends. By accuracy: mean reward at which it ends. None: last stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """Stages, one after another. By accuracy, a stage ends once the newest `window` groups that started in it have a
    mean reward of at least its `until`."""

    stages: tuple[CurriculumStage, ...]
    by_accuracy: bool = False
    window: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFiles:
    """The files of one source."""

    name: str
    """Empty: the only source, which needs no name."""
    field: str
    """The configuration field that a `ConfigError` names."""
    path: str | Sequence[str]
    prompt_field: str = "prompt"
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    weight: float | None = None
    pass_rate: PassRate | None = None
    rows: Sequence[int] | None = None
    """Rows that the run uses, among those that `pass_rate` leaves; None: all."""

    @property
    def rest(self) -> PassRate | None:
        """The bounds with which rows are compared during the run."""
        return None if self.pass_rate is None or self.pass_rate.column is not None else self.pass_rate

    def load(self) -> "LoadedSource":
        """Read the files. Raises: `ConfigError`."""
        from engine.tasks.dataset import Dataset

        data = Dataset.load(self.path, prompt_field=self.prompt_field, config_field=self.field, columns=self.columns)
        rows, wanted = len(data), self.pass_rate
        if wanted is not None and wanted.column is not None:
            data = self._filtered(data, wanted, wanted.column)
        data = data if self.rows is None else data.only(self.rows)
        return LoadedSource(replace(self, rows=None), data, rows - len(data))

    def _filtered(self, data: "Dataset", wanted: PassRate, column: str) -> "Dataset":
        rows = [
            row for row, prompt in enumerate(data.prompts()) if wanted.holds(self._rate(row, column, prompt.fields))
        ]
        if not rows:
            law = f"leaves no row of the {len(data)} of {data.path}"
            raise ConfigError(f"{self.field}.pass_rate", str(wanted), law, "widen the bounds")
        return data if len(rows) == len(data) else data.only(rows)

    def _rate(self, row: int, column: str, fields: Mapping[str, Any]) -> float:
        """Raises: `ConfigError` for a row without a number."""
        value = fields.get(column)
        try:
            rate = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else None
        except (ValueError, OverflowError):
            rate = None
        if rate is None or isnan(rate):
            shown = f"it is {value!r:.60}" if column in fields else "there is no such column"
            law = f"row {row} has no number under this name ({shown})"
            known = [name for name in fields if name != column]
            raise ConfigError(f"{self.field}.pass_rate.column", column, law, suggestion(column, known))
        return rate


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """A source whose files have been read."""

    files: SourceFiles
    data: "Dataset"
    dropped: int
    """Rows that were left out."""
