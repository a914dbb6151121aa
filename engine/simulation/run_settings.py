"""The settings of a simulated run: sizes, durations and probabilities of faults.

Used by `world.World` and by its callers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.ids import GroupId
from engine.runtime.driver import MOST_EVENTS
from engine.states.limits import Limits
from engine.trajectory import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probability of each fault, for each occasion. By default there are none."""

    lose: float = 0.0
    """A message is lost and resent after ten times its latency. Later messages wait for it."""
    duplicate: float = 0.0
    """A message arrives twice."""
    die: float = 0.0
    """A replica dies when it receives a group or validation rows. Its earlier messages may arrive after it was declared
    lost."""
    stay_dead: float = 0.0
    """A replica that died cannot be started again."""
    die_trainer: float = 0.0
    """The trainer or a scorer dies when it carries out an order."""
    fail_start: float = 0.0
    """A process ends before its start is complete."""
    fail_group: float = 0.0
    fail_data: float = 0.0
    fail_sync: float = 0.0
    fail_trainer: float = 0.0
    fail_state: float = 0.0
    """The work of an added state fails."""
    hang: float = 0.0
    """The process that receives an order hangs: it does nothing until it is replaced."""
    stick: float = 0.0
    """A started group gets no token and never ends, unless it is aborted or truncated."""
    fail_rows: float = 0.0
    """An attempt to measure validation rows fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings of one world. Durations are virtual seconds."""

    limits: Limits
    replicas: int = 2
    slots: int = 4
    samples: int = 2
    """Trajectories of a group."""
    prompts: int = 64
    """Number of prompts in the data source."""
    seed: int = 0
    latency_s: float = 0.1
    train_s: float = 20.0
    train_reports: int = 0
    """Number of progress reports in a train step, at equal intervals."""
    sync_s: float = 2.0
    state_s: float = 5.0
    """Duration of the work of an added state on one group."""
    measure_s: float = 5.0
    """Duration of measuring a chunk of validation rows."""
    start_s: float = 10.0
    """Duration of the start of a process, except at the launch."""
    token_s: float = 1.0
    """Duration of a token."""
    mean_tokens: float = 20.0
    """Response lengths are Pareto distributed: most are short, a few are very long."""
    max_tokens: int | None = None
    """Maximum response length; None: a few are longer than all others together."""
    cache_tokens: int = 0
    """Tokens of running trajectories for which a replica's KV cache has room; 0: replicas report no cache. A cache that
    is full has no effect on sampling."""
    prefix_every_tokens: int = 0
    """Prefixes of a group are stored after this many new tokens; 0: only when it is aborted."""
    described: tuple[str, ...] | None = None
    """Columns that policies see; None: they see only figures."""
    rows: Sequence[Prompt] = ()
    """Rows that the prompts have in turn; empty: rows without columns."""
    rewards: tuple[str, ...] = ()
    """Names of the rewards of a group."""
    spread: float = 1.0
    """Share of groups with different rewards. A zero-variance filter drops the others."""
    tick_size: int = MOST_EVENTS
    """Maximum number of events in a tick, as in a real run by default; 0: a random number for each tick."""
    faults: Faults = Faults()

    def prompt(self, group: GroupId) -> Prompt:
        return replace(self.rows[group % len(self.rows)], row=group) if self.rows else Prompt(row=group, text="")
