"""The time limits of orders, by kind: `Limits.timeouts`. Each is a number of seconds, `auto`, or None for no limit.

`RELATIONS` says which kind an order is of. `runtime/watchdog.py` measures how long orders have taken,
`scheduling/time_limits.py` acts on those that exceed their limit. Here are the settings and the rule for `auto`.
"""

from dataclasses import dataclass, fields
from math import isfinite
from typing import Annotated, Any, Literal

from engine.errors import ConfigError

KINDS = (
    "draw", "start", "group", "rows", "state", "sync", "resume", "score", "train", "publish", "checkpoint", "store",
)  # fmt: skip
"""Kinds of orders that have a limit of their own. `CUT` is that of orders that are executed at once: cutting
another one short, and probes. It has a limit if any order has one."""
CUT = "cut"
CUT_SHORT = ("group", "rows")
"""Kinds that are cut short when they exceed their limit. For the others, a process is stopped."""
SLOW = ("start", "publish", "checkpoint", "rows")
"""Kinds with the longer floor."""

AUTO: Literal["auto"] = "auto"
Limit = float | Literal["auto"] | None
DEFAULT: Limit = AUTO
"""The limit of every kind unless it is set."""

FLOOR_S, SLOW_FLOOR_S = 600.0, 3600.0
TIMES_LONGEST = 10
"""`auto` is so many times the longest answered order."""
TIMES_FLOOR = 6
"""And so many floors before the first answer."""
REPORTS_IN_LIMIT = 10
"""How many reports of progress fit into the shortest time limit of an order."""
MOST_S = 1_000_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Time limits in seconds. An order that exceeds its limit is cut short, or its process is stopped. A report of
    progress restarts the clock. The annotated fields are the section `timeouts` of a configuration, with their
    descriptions; those of kinds say what is limited."""

    draw_s: Annotated[Limit, "draw prompts from the data source"] = DEFAULT
    start_s: Annotated[Limit, "start or stop a process"] = DEFAULT
    group_s: Annotated[Limit, "generate a group and its rewards, restarted by each token, turn or reward"] = DEFAULT
    rows_s: Annotated[Limit, "measure validation rows in one slot"] = DEFAULT
    state_s: Annotated[Limit, "do the work of an added state on a group"] = DEFAULT
    sync_s: Annotated[Limit, "stage weights on a replica, pause it, or install them"] = DEFAULT
    resume_s: Annotated[Limit, "resume a paused replica"] = DEFAULT
    score_s: Annotated[Limit, "run a scoring task on a batch"] = DEFAULT
    train_s: Annotated[Limit, "train on a batch"] = DEFAULT
    publish_s: Annotated[Limit, "publish a weights version"] = DEFAULT
    checkpoint_s: Annotated[Limit, "write a checkpoint"] = DEFAULT
    store_s: Annotated[Limit, "discard trajectories, or retire a weights version"] = DEFAULT
    floor_s: Annotated[
        float, f"Smallest auto limit; for start, publish, checkpoint, rows {SLOW_FLOOR_S:g} unless lowered."
    ] = FLOOR_S
    cut_s: Annotated[float, "Maximum seconds to park a group, stop rows, or answer a probe."] = 60.0
    max_s: Annotated[float | None, "Maximum total seconds of any order; null: no limit."] = None
    process_limits: tuple[tuple[str, float], ...] = ()
    """Time limits that the processes apply themselves, by kind. The floor of the kind is at least twice as long."""

    def __post_init__(self) -> None:
        for kind in KINDS:
            self._check(f"{kind}_s", or_words=True)
        self._check("floor_s")
        self._check("cut_s")
        if self.max_s is not None:
            self._check("max_s")

    @classmethod
    def every(cls, limit: Limit, **others: Any) -> "Timeouts":
        """The same limit for every kind, but for those given in `others`."""
        return cls(**{**{f"{kind}_s": limit for kind in KINDS}, **others})

    def _check(self, name: str, *, or_words: bool = False) -> None:
        value: Any = getattr(self, name)
        if or_words and (value is None or value == AUTO):
            return
        if type(value) in (int, float) and isfinite(value) and 0 < value <= MOST_S:
            return
        law = f"must be a number of seconds above 0, {MOST_S:.0f} at most{', or auto, or off' if or_words else ''}"
        raise ConfigError(f"timeouts.{name}", value, law, "for example 600")

    def progress_every_s(self, kind: str) -> float:
        """Minimum seconds between two reports that an order of a kind progresses. The floor counts even for a longer
        limit, because the limit can be set to `auto` while the run is running."""
        given, floor = self.given(kind), self.floor(kind)
        return (floor if given is None or given == AUTO else min(floor, given)) / REPORTS_IN_LIMIT

    def given(self, kind: str) -> Limit:
        """The limit of a kind as it was set."""
        if kind == CUT:
            return None if self.max_s is None and all(self.given(other) is None for other in KINDS) else self.cut_s
        limit: Limit = getattr(self, f"{kind}_s")
        return limit

    def floor(self, kind: str) -> float:
        """The smallest `auto` limit of a kind."""
        floor = self.floor_s
        if kind in SLOW and floor >= FLOOR_S:
            floor = max(floor, SLOW_FLOOR_S)
        return max([floor, *(2 * limit_s for of, limit_s in self.process_limits if of == kind)])

    def limit(self, kind: str, longest: float | None) -> float | None:
        """The limit of one order in seconds; None: it has none. `longest`: the longest time to an answer or to progress
        of the kind; None: it is not known yet."""
        given = self.given(kind)
        if given != AUTO:
            return given
        floor = self.floor(kind)
        return TIMES_FLOOR * floor if longest is None else max(floor, TIMES_LONGEST * longest)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Timeouts":
        """From the header of a record; unknown fields are refused."""
        unknown = sorted(set(plain) - {f.name for f in fields(cls)})
        if unknown:
            raise ConfigError("limits.timeouts", unknown, "are not known to this version of the engine")
        process_limits = tuple((str(kind), float(limit_s)) for kind, limit_s in plain.get("process_limits", ()))
        return cls(**{**plain, "process_limits": process_limits})
