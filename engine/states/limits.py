"""The figures a run is bound by, and the laws they must keep among themselves (law 2, docs/ARCHITECTURE.md).

Built by the config layer or by a library user; recorded in the header of a schedule; never changed by the scheduler.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import floor, isfinite
from typing import Any, NamedTuple

from engine.errors import ConfigError
from engine.ids import ReplicaId
from engine.states.timeouts import Timeouts

# -- the smallest and largest value of each setting --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bound:
    """What one figure may be."""

    path: str
    """Its name in the configuration."""
    least: float
    most: float
    text: str = ""
    """Its description in the configuration."""
    above: bool = False
    """More than `least`; else `least` will do."""
    whole: bool = True
    optional: bool = False
    """It may be None."""
    live: bool = False
    """It can be changed in a running run."""

    def check(self, value: Any) -> None:
        """Raises: `ConfigError` for a value that is out of bounds, or no number."""
        if value is None and self.optional:
            return
        if type(value) is int or (type(value) is float and not self.whole):
            low = value > self.least if self.above else value >= self.least
            if low and value <= self.most:
                return
        kind = "a whole number" if self.whole else "a number"
        least, most = (str(int(end)) if end == int(end) else str(end) for end in (self.least, self.most))
        span = f"above {least}, {most} at most" if self.above else f"from {least} to {most}"
        law = f"must be {kind} {span}{', or null' if self.optional else ''}"
        raise ConfigError(self.path, value, law, f"use {'a value' if self.above else 'one'} {span}")


def _bounded(path: str, least: float, most: float, text: str = "", **other: bool) -> dict[str, Bound]:
    """The metadata of a field of `Limits` with this bound."""
    return {"bound": Bound(path, least, most, text, **other)}


# -- the limits of a run, and the laws between them --------------------------------------------------------------------


SYNC_MODES = ("keep", "abort", "wait")
CONFLICTS = ("hold", "cancel")
TRAINER_TASKS = ("old_logprobs", "ref_logprobs", "train")
TASKS = ("rollout", "reward", *TRAINER_TASKS, "validation")
REWARDING = "rewarding"
"""The built-in added state in which groups are rewarded, where `reward` has a pool of its own."""


HELD_OUT = "held_out"
"""Name of the validation set of a run that names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSet:
    """Validation prompts that are measured together, each by several responses."""

    name: str
    prompts: int
    samples: int = 1
    """Responses to each prompt: so many rows."""
    k: tuple[int, ...] = ()
    """Numbers of responses for which pass@k and maj@k are measured."""
    majority: bool = False
    """Whether responses have answers to vote on, for maj@k."""
    parts: tuple[str, ...] = ()
    """Names of the reward functions whose values are measured too, where the reward is the sum of several."""
    correct: tuple[str, ...] = ()
    """Those of them that say whether a response is right; empty: its reward does."""
    dropped: int = 0
    """Prompts that `data.overlong` left out, apart from `prompts`. Their responses count as wrong."""

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "ValidationSet":
        """From the header of a record, where tuples are lists."""
        given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()}
        return cls(**given)

    def __post_init__(self) -> None:
        for name in ("prompts", "samples"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ConfigError(f"validation.sets.{name}", getattr(self, name), "must be at least 1", "use 1")
        for k in self.k:
            if type(k) is not int or not 1 <= k <= self.samples:
                law = f"must be from 1 to {self.samples}, the responses to each prompt of the set {self.name}"
                raise ConfigError("validation.sets.k", k, law, f"use at most {self.samples}, or more responses")


class ValidationRow(NamedTuple):
    """What a validation row is: response number `sample` to prompt number `prompt` of a set."""

    set: ValidationSet
    prompt: int
    sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationLimits:
    """What validations measure, when, and on how many replicas."""

    rows: int
    """Rows of every validation, one for each response."""
    sets: tuple[ValidationSet, ...] = ()
    """The sets that the rows are divided into, in order; empty: one set with one response to each prompt."""
    rows_per_slot: int = 1
    """Rows measured at once in one slot: a slot holds as many trajectories as a group has samples."""
    at_start: bool = True
    """Measure version 0."""
    every: int = 0
    """Measure each version that is the first to contain another so many train steps; 0: none on the way."""
    at_end: bool = True
    """Measure the last version."""
    replicas: int = 1
    """Replicas a validation holds, at most; the last version, after which nothing is installed, may have them all."""
    own_from: ReplicaId | None = None
    """Replicas from this id on do nothing but validate, and no others do; None: those that generate are shared."""
    conflict: str = "hold"
    """Where a validation keeps every replica from a newer version: `hold` them until it ends, or `cancel` it."""

    @property
    def own(self) -> bool:
        return self.own_from is not None

    @property
    def dropped(self) -> int:
        """Responses to dropped prompts, apart from `rows`."""
        return sum(one.dropped * one.samples for one in self.sets)

    @property
    def measured_sets(self) -> tuple[ValidationSet, ...]:
        """The sets, also where none is named."""
        return self.sets or (ValidationSet(name=HELD_OUT, prompts=self.rows),)

    def place(self, row: int) -> ValidationRow:
        """The set, prompt and response of a row. Raises: `IndexError`."""
        first = 0
        for one in self.measured_sets:
            if row < first + one.prompts * one.samples:
                return ValidationRow(one, *divmod(row - first, one.samples))
            first += one.prompts * one.samples
        raise IndexError(f"row {row} does not exist: a validation has {self.rows} rows")

    def __post_init__(self) -> None:
        for name in ("rows", "rows_per_slot", "replicas"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ConfigError(f"validation.{name}", getattr(self, name), "must be at least 1", "use 1")
        names = [one.name for one in self.sets]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ConfigError("validation.sets", name, "two sets have this name", "use another name")
        if self.sets and sum(one.prompts * one.samples for one in self.sets) != self.rows:
            law = f"the sets have {sum(one.prompts * one.samples for one in self.sets)} rows"
            raise ConfigError("validation.rows", self.rows, law, "use their number")
        if type(self.every) is not int or self.every < 0:
            raise ConfigError("validation.every", self.every, "must not be negative", "use 0")
        if self.conflict not in CONFLICTS:
            fix = f"use one of {', '.join(CONFLICTS)}"
            raise ConfigError("validation.conflict", self.conflict, "is not allowed", fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Hardware that tasks share: they take turns on it (docs/HARDWARE.md)."""

    tasks: tuple[str, ...]
    """Of `TASKS`."""
    replicas: tuple[ReplicaId, ...] = ()
    """The rollout replicas that stand here; none without the task `rollout`."""

    @property
    def shared(self) -> bool:
        """Whether replicas and the trainer take turns here: then replicas sleep while it trains."""
        return "rollout" in self.tasks and any(task in self.tasks for task in TRAINER_TASKS)


QUEUED, GENERATED = "queued", "generated"
"""The places of added states of groups."""
SCORING, PUBLISHING = "scoring", "publishing"
"""The places of added states of train steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedState:
    """A state of the user's own (`policies.add_state`)."""

    name: str
    concurrency: int
    """Groups worked on at once in this state; the others wait in it, first come first served. Of a train step: 1."""
    place: str = GENERATED
    """The state after which it comes. Of groups: `queued`, before generation, or `generated`, after it. Of train steps:
    `scoring`, before the batch is trained, or `publishing`, before replicas get the weights."""

    def __post_init__(self) -> None:
        if type(self.concurrency) is not int or self.concurrency < 1:
            path = f"scheduler.states.{self.name}.concurrency"
            raise ConfigError(path, self.concurrency, "must be at least 1", "use 1")


ROUNDING = 1e-9
"""A share of a batch that is this little short of a whole group is one: 0.29 · 100 is no integer in floats."""
MOST_ATTEMPTS = 20
"""Attempts that a retry policy may give a group for each cause, where its budget is smaller."""
SUCCESSES_DUE = 8
"""See `Limits.are_hopeless`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds and budgets of one run; B, S, K and k of the laws are its first four fields. A field with a bound is also
    one of the configuration, with the same description (`engine.config.limit_fields`)."""

    train_batch_size: int = field(metadata=_bounded(
        "scheduler.train_batch_size", 1, 1_000_000, "B: prompt groups per train step.",
    ))  # fmt: skip
    max_staleness_steps: int = field(metadata=_bounded(
        "scheduler.max_staleness_steps", 0, 10_000,
        "S: maximum number of train steps that a group's oldest token may lag behind.", live=True,
    ))  # fmt: skip
    max_concurrent_groups: int = field(metadata=_bounded(
        "scheduler.max_concurrent_groups", 1, 1 << 40,
        "K: maximum groups running at once, from B to B·(1 + async_ratio + over_sample); 0: this maximum.",
        live=True,
    ))  # fmt: skip
    sync_every: int = field(default=1, metadata=_bounded(
        "scheduler.sync_every", 1, 10_000, "k: publish weights after every k-th train step; at most S+1.",
    ))  # fmt: skip
    max_steps: int | None = field(default=None, metadata=_bounded(
        "run.max_steps", 1, 1 << 40, "Number of train steps; null: until the data ends.", optional=True, live=True,
    ))  # fmt: skip
    sync_mode: str = "keep"
    """What happens to running groups when a replica takes new weights: `keep`, `abort` or `wait`."""
    scoring_tasks: tuple[str, ...] = ()
    """Scoring each batch needs before it is trained, in order."""
    deadline_timeout_s: float = field(default=60.0, metadata=_bounded(
        "scheduler.deadline_timeout_s", 0, 86_400,
        "Seconds that a step waits for groups before a deadline policy other than wait acts.", above=True,
        whole=False, live=True,
    ))  # fmt: skip
    max_drops: int = field(default=4, metadata=_bounded(
        "scheduler.max_drops", 0, 1_000_000, "How often a step may drop stragglers before it only waits.", live=True,
    ))  # fmt: skip
    infrastructure_attempts: int = field(default=5, metadata=_bounded(
        "scheduler.infrastructure_attempts", 1, 1000,
        "Maximum attempts of a group that end in infrastructure failures.", live=True,
    ))  # fmt: skip
    data_attempts: int = field(default=2, metadata=_bounded(
        "scheduler.data_attempts", 1, 1000,
        "Maximum attempts of a group that end in failures of its data or reward, or in repeated hangs.", live=True,
    ))  # fmt: skip
    checkpoint_every: int = field(default=0, metadata=_bounded(
        "trainer.checkpoint_every", 0, 1 << 40,
        "Train steps between checkpoints; the last step also makes one. 0: no checkpoints.",
    ))  # fmt: skip
    validation: ValidationLimits | None = None
    """What validations measure; None: there are none."""
    pools: tuple[Pool, ...] = ()
    """Which tasks share hardware; empty: the replicas have theirs, everything of the trainer shares one."""
    train_after_sync: bool = False
    """A step is trained only once every replica has the newest weights."""
    async_ratio: float | None = None
    """Groups that may be held beyond one batch, in batches: a fraction of S, or None for S itself."""
    over_sample: float = 0.0
    """Groups started beyond what the bound needs, in batches; those not wanted once a batch is full are dropped."""
    added_states: tuple[AddedState, ...] = ()
    """What groups and train steps pass through besides the states of their tables, in order."""
    keeps_batches: bool = False
    """Trajectories stay in their store until a checkpoint contains their step: it can be trained again from them."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """How long orders may take, by kind."""
    straggler_factor: float | None = field(default=None, metadata=_bounded(
        "rollout.straggler_factor", 1, 1_000_000,
        "A replica that is this many times slower per token gives groups to idle replicas; null: never.", above=True,
        whole=False, optional=True, live=True,
    ))  # fmt: skip
    give_up_s: float = field(default=0.0, metadata=_bounded(
        "rollout.give_up_s", 0, 1_000_000, "Seconds that a run without replicas waits for a new one before it ends.",
        whole=False, live=True,
    ))  # fmt: skip
    drain_s: float | None = field(default=None, metadata=_bounded(
        "durability.drain_s", 0, 86_400, "Maximum seconds of a drain; then the run stops. null: no limit.",
        above=True, whole=False, optional=True, live=True,
    ))  # fmt: skip
    replica_restarts: int = field(default=3, metadata=_bounded("limits.replica_restarts", 0, 1_000_000))
    """Lives of one replica that may end in a row without a train step in between and be followed by another."""
    trainer_restarts: int = field(default=3, metadata=_bounded("limits.trainer_restarts", 0, 1_000_000))
    """The same for the trainer."""
    worker_restarts: int = field(default=3, metadata=_bounded("limits.worker_restarts", 0, 1_000_000))
    """The same for each scorer and the process of the added states, without an answered order in between."""
    run_restarts: int = field(default=5, metadata=_bounded("limits.run_restarts", 0, 1_000_000))
    """Times in a row, without a train step in between, that the run is begun again from its record."""
    max_filtered_in_a_row: int = field(default=1000, metadata=_bounded(
        "scheduler.max_filtered_in_a_row", 1, 1_000_000_000,
        "Groups in a row that the filter may drop before the run fails; 4·K if that is more.", live=True,
    ))  # fmt: skip
    max_failure_share: float | None = field(default=None, metadata=_bounded(
        "reward.max_failure_share", 0, 1,
        "Maximum share of the latest attempts that may fail because of rewards or data; null: no limit.",
        whole=False, optional=True, live=True,
    ))  # fmt: skip
    keep_checkpoints: int = field(default=2, metadata=_bounded(
        "trainer.keep_checkpoints", 1, 1000, "Number of newest checkpoints to keep; others are deleted.", live=True,
    ))  # fmt: skip
    keep_checkpoints_every: int = field(default=0, metadata=_bounded(
        "trainer.keep_checkpoints_every", 0, 1_000_000,
        "Keep a checkpoint permanently after every so many train steps; 0: none.", live=True,
    ))  # fmt: skip
    keep_best: str = ""
    """The checkpoint with the best value of this figure of a validation is kept: `accuracy`, `reward_mean` or
    `SET/METRIC`; empty: none is."""
    keep_best_mode: str = "max"
    """Whether the largest value is best (`max`) or the smallest (`min`)."""

    @property
    def beside_trainer(self) -> tuple[ReplicaId, ...]:
        """The replicas that stand in the pool in which the trainer trains."""
        return next((pool.replicas for pool in self.pools if pool.shared and "train" in pool.tasks), ())

    @property
    def trains_in_turns(self) -> bool:
        """Whether replicas stand in the pool in which the trainer trains."""
        return bool(self.beside_trainer)

    @property
    def surplus(self) -> int:
        """X: groups that may be started beyond what the bound needs, floor(over_sample · B)."""
        return floor(self.over_sample * self.train_batch_size + ROUNDING)

    @property
    def ahead(self) -> int:
        """Groups that may be held on the version that the next step begins with, X aside: (S + 1) · B, or with an
        `async_ratio` a floor((1 + a) · B)."""
        if self.async_ratio is None:
            return (self.max_staleness_steps + 1) * self.train_batch_size
        return floor((1 + self.async_ratio) * self.train_batch_size + ROUNDING)

    def scorers(self) -> tuple[tuple[str, ...], ...]:
        """The scoring tasks of each pool without `train`: they have a scorer of their own. The others are the
        trainer's."""
        apart = [pool.tasks for pool in self.pools if "train" not in pool.tasks]
        return tuple(found for tasks in apart if (found := tuple(t for t in self.scoring_tasks if t in tasks)))

    @property
    def scored_apart(self) -> tuple[str, ...]:
        """The scoring tasks that are not the trainer's."""
        return tuple(task for tasks in self.scorers() for task in tasks)

    def validators(self) -> range:
        """Replicas that are there for validations alone."""
        validation = self.validation
        if validation is None or validation.own_from is None:
            return range(0)
        return range(validation.own_from, validation.own_from + validation.replicas)

    def validates_only(self, replica: ReplicaId) -> bool:
        """Whether a replica is there for validations alone."""
        own_from = self.validation.own_from if self.validation is not None else None
        return own_from is not None and replica >= own_from

    @property
    def failures_in_a_row(self) -> int:
        """Groups that may fail for good one after another, with none generated between them, before the run ends: four
        times what runs at once, and 64 at least. So many are no accident, and a source without end has ever more."""
        return max(64, 4 * self.max_concurrent_groups)

    def are_hopeless(self, judged: int) -> bool:
        """Whether no other attempt will succeed, if none of the first `judged` did: at the largest allowed share of
        failures, `SUCCESSES_DUE` would have succeeded. Then all fail with a chance below 1 in 2000."""
        return self.max_failure_share is not None and (1 - self.max_failure_share) * judged >= SUCCESSES_DUE

    @property
    def filtered_in_a_row(self) -> int:
        """Groups that the filter may drop with none kept between them before the run ends: `max_filtered_in_a_row`, or
        four times what runs at once where that is more, since the groups that end first are alike."""
        return max(self.max_filtered_in_a_row, 4 * self.max_concurrent_groups)

    def most_attempts(self, cause: str) -> int:
        """Attempts of one group that may fail for a cause (`data` or `infrastructure`), whatever the retry policy says:
        the budget of that cause, and `MOST_ATTEMPTS` where that is more."""
        return max(MOST_ATTEMPTS, self.data_attempts if cause == "data" else self.infrastructure_attempts)

    def __post_init__(self) -> None:
        b, s, k_max, k = self.train_batch_size, self.max_staleness_steps, self.max_concurrent_groups, self.sync_every
        for name, bound in BOUNDS.items():
            bound.check(getattr(self, name))
        self._check_types()
        if len(set(self.scoring_tasks)) < len(self.scoring_tasks):
            raise ConfigError("limits.scoring_tasks", self.scoring_tasks, "names a task twice", "name each once")
        if s < k - 1:
            raise ConfigError(
                "scheduler.max_staleness_steps",
                s,
                f"S >= sync_every - 1, else no version can come in time (sync_every = {k})",
                f"use {k - 1}",
            )
        self._check_ahead()
        most = self.ahead + self.surplus
        if not b <= k_max <= most:
            allowed = f"from {b} to {most}" if b < most else str(b)
            law = f"must be {allowed} (B <= K <= B * (S + 1) with B = {b}, S = {s})"
            if most != b * (s + 1):
                places = f"(1 + async_ratio) * B + over_sample * B = {self.ahead} + {self.surplus}"
                law = f"must be {allowed} (B <= K <= {places} with B = {b})"
            hint = f"use a value {allowed}" if b < most else f"use {b}"
            raise ConfigError("scheduler.max_concurrent_groups", k_max, law, hint)
        if self.sync_mode not in SYNC_MODES:
            raise ConfigError(
                "rollout.sync_mode", self.sync_mode, "is not a sync mode", f"use one of {', '.join(SYNC_MODES)}"
            )

        self._check_live()
        self._check_best()
        self._require_lawful_pools()

    def _check_types(self) -> None:
        """Of the fields that are no figures."""
        parts = {"validation": ValidationLimits, "timeouts": Timeouts, "keep_best": str}
        for name, kind in parts.items():
            value = getattr(self, name)
            if not isinstance(value, kind) and not (value is None and name == "validation"):
                raise ConfigError(f"limits.{name}", value, f"must be a {kind.__name__}")
        for name, kind in (("scoring_tasks", str), ("pools", Pool), ("added_states", AddedState)):
            value = getattr(self, name)
            if not isinstance(value, tuple | list) or not all(isinstance(entry, kind) for entry in value):
                raise ConfigError(f"limits.{name}", value, f"must be a tuple of {kind.__name__}")

    def require_replicas(self, replicas: int) -> None:
        """Raises: `ConfigError` unless a run can have this number of replicas that generate: those in pools with
        rollout are numbered from 0 on, and those that only validate come after them."""
        if replicas < 1:
            raise ConfigError("replicas", replicas, "must be at least 1", "use 1")
        own = self.validators()
        if own and own.start != replicas:
            law = f"must be {replicas}: the replicas that only validate come after the {replicas} that generate"
            raise ConfigError("limits.validation.own_from", own.start, law, f"use {replicas}")
        standing = [id for pool in self.pools if "rollout" in pool.tasks for id in pool.replicas]
        if standing and sorted(standing) != list(range(replicas)):
            law = f"the {replicas} replicas that generate are numbered from 0, and each stands in one pool"
            raise ConfigError("pools", standing, law, f"use {list(range(replicas))} in all")

    def _require_lawful_pools(self) -> None:
        for index, pool in enumerate(self.pools):
            unknown = [task for task in pool.tasks if task not in TASKS and task not in self.scoring_tasks]
            if unknown or not pool.tasks:
                law = "is not a task" if unknown else "a pool without a task"
                raise ConfigError(f"pools[{index}].tasks", unknown or [], law, f"of {', '.join(TASKS)}")
            if bool(pool.replicas) != bool({"rollout", "validation"} & set(pool.tasks)):
                law = "replicas stand where rollout or validation is done, and only there"
                raise ConfigError(f"pools[{index}].replicas", pool.replicas, law)
        for task in (*TASKS[1:], *self.scoring_tasks):
            where = [index for index, pool in enumerate(self.pools) if task in pool.tasks]
            if len(where) > 1:
                law = f"{task} is in pools.{where[0]} already; only rollout may be in several pools"
                raise ConfigError(f"pools.{where[1]}.tasks", task, law, f"keep {task} in one of them")
        replicas = [id for pool in self.pools for id in pool.replicas]
        if len(set(replicas)) < len(replicas):
            raise ConfigError("pools", replicas, "a replica stands in one pool", "name each once")
        training = next((pool for pool in self.pools if "train" in pool.tasks), None)
        if self.pools and training is None:
            named = [list(pool.tasks) for pool in self.pools]
            raise ConfigError("pools", named, "train is in no pool", "add a pool with the task train")
        if self.train_after_sync and training is not None and training.shared:
            law = "replicas of the trainer's pool sleep during training, so they cannot install weights before it ends"
            raise ConfigError("scheduler.train_after_sync", True, law, "use false, or give rollout a pool of its own")

    def _check_live(self) -> None:
        if self.keeps_batches and not self.checkpoint_every:
            law = "the kept batches need checkpoints"
            raise ConfigError("limits.keeps_batches", True, law, "use a checkpoint_every above 0")

    def _check_best(self) -> None:
        if self.keep_best and not self.checkpoint_every:
            law = "there is no checkpoint to keep"
            raise ConfigError("trainer.keep_best.metric", self.keep_best, law, "use a checkpoint_every above 0")
        if self.keep_best and self.validation is None:
            raise ConfigError("trainer.keep_best.metric", self.keep_best, "nothing is validated", "set validation")
        if self.keep_best_mode not in ("max", "min"):
            raise ConfigError("trainer.keep_best.mode", self.keep_best_mode, "must be max or min", "use max")

    def _check_ahead(self) -> None:
        """What may be held beyond one batch: as fractions of it, both finite."""
        s, k = self.max_staleness_steps, self.sync_every
        for name in ("async_ratio", "over_sample"):
            value = getattr(self, name)
            if (value is not None or name == "over_sample") and (
                type(value) not in (int, float) or not isfinite(value) or value < 0
            ):
                fix = f"use {s if name == 'async_ratio' else 0.0}"
                raise ConfigError(f"scheduler.{name}", value, "must be a number of batches, not negative", fix)
        ratio = self.async_ratio
        if ratio is not None and not k - 1 <= ratio <= s:
            law = (
                f"sync_every - 1 <= async_ratio <= S with sync_every = {k}, S = {s}: with less no version can come in "
                "time, and more would be staler than allowed"
            )
            fix = f"use a value from {k - 1} to {s}" if k - 1 < s else f"use {s}"
            raise ConfigError("scheduler.async_ratio", ratio, law, fix)
        names = [state.name for state in self.added_states]
        if len(set(names)) < len(names):
            raise ConfigError("scheduler.states", names, "names a state twice", "name each once")

    def states_at(self, place: str) -> tuple[str, ...]:
        """The names of the added states in a place, in their order."""
        return tuple(state.name for state in self.added_states if state.place == place)

    def to_plain(self) -> dict[str, Any]:
        """For the header of a record."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Limits":
        """From the header of a record; unknown fields are refused."""
        _require_known(cls, plain, "limits")
        validation = plain.get("validation")
        if validation is not None:
            _require_known(ValidationLimits, validation, "limits.validation")
            sets = tuple(ValidationSet.from_plain(one) for one in validation.get("sets", ()))
            validation = ValidationLimits(**{**validation, "sets": sets})
        pools = tuple(
            Pool(tasks=tuple(pool["tasks"]), replicas=tuple(pool["replicas"])) for pool in plain.get("pools", ())
        )
        added = tuple(AddedState(**state) for state in plain.get("added_states", ()))
        tasks = tuple(plain.get("scoring_tasks", ()))
        parts = {"scoring_tasks": tasks, "validation": validation, "pools": pools, "added_states": added}
        return cls(**{**plain, **parts, "timeouts": Timeouts.from_plain(plain.get("timeouts", {}))})


BOUNDS: dict[str, Bound] = {one.name: one.metadata["bound"] for one in fields(Limits) if one.metadata}
"""By the field of `Limits`."""


def _require_known(cls: type, plain: Mapping[str, Any], path: str) -> None:
    unknown = sorted(set(plain) - {f.name for f in fields(cls)})
    if unknown:
        raise ConfigError(path, unknown, "are not known to this version of the engine")
