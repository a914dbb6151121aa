"""Which settings of the schedule train the most groups per second? Searches them with simulated runs.

    space = SearchSpace.of(config, staleness=4)
    tuned = tune(Simulator(config_tree, workloads), space, trials=100)

Called by `engine tune`. Many short simulated runs of one seed find candidates; longer ones of several seeds compare
them. The same arguments give the same result, whatever the number of processes. Must not start a real run.
"""

import json
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from math import ceil, floor
from multiprocessing import get_context
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

from engine.config import Config, parse_config
from engine.config.gpus import replica_gpus
from engine.config.loading import apply_overrides
from engine.config.workload import Workload
from engine.errors import ConfigError
from engine.simulation.schedule import configured_schedule
from engine.simulation.what_if import Interval, ScheduleFigures, predicted
from engine.states.limits import ROUNDING, SYNC_MODES

if TYPE_CHECKING:
    from optuna import Trial

S, K, SYNC_EVERY, OVER_SAMPLE = (
    f"scheduler.{name}" for name in ("max_staleness_steps", "max_concurrent_groups", "sync_every", "over_sample")
)
REPLICAS, SLOTS, SYNC_MODE, SYNC_ORDER = (
    f"rollout.{name}" for name in ("replicas", "slots", "sync_mode", "sync_order")
)
RANKS = "trainer.ranks"
USUAL_STALENESS = 4
"""The bound on S where none is given, and the run itself has a smaller one."""
MORE_SLOTS = 4
"""Slots that are tried at most, in those of the run. It says little about the speed with more."""
PARTS = (0.0, 0.25, 0.5, 1.0)
"""Of the largest `over_sample`, that are tried."""
MOST_SYNC_EVERY, MOST_OVER_SAMPLE = 4, 100
SYNC_ORDERS = ("together", "rolling")
TOGETHER = 8
"""Settings that are drawn before the first of them is known. A fixed number, so that the number of processes does not
matter."""
SEARCH_GROUPS, FINAL_GROUPS, TRIAL_GROUPS = 384, 1024, 1600
"""Groups of a simulated run of the search and of the comparison; B times the number of trials."""
SEEDS = 3
FINALISTS, FASTEST = 8, 3
"""Settings that are compared at last; the fastest ones among them."""
EQUAL = 0.01
"""Settings that are slower by at most this share count as equally fast."""
APART = 0.1
"""Smallest difference of mean staleness between two settings that are compared, in train steps."""

Point: TypeAlias = tuple[tuple[str, Any], ...]
"""(path, value) of the settings that differ from the run's, ordered by path."""


def with_settings(tree: Mapping[str, Any], settings: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The plain data of a configuration with other values."""
    changed = deepcopy(dict(tree))
    apply_overrides(changed, [f"{path}={json.dumps(value)}" for path, value in settings])
    return changed


# -- the settings that are tried ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What may be tried."""

    present: Mapping[str, Any]
    """The settings of the run, by path."""
    spans: Mapping[str, tuple[int, int]]
    """The smallest and largest value of a setting. That of K follows from the others."""
    choices: Mapping[str, Sequence[Any]]
    batch: int
    async_ratio: float | None
    gpus: int | None
    """Of all replicas and ranks together; None: no limit."""
    gpus_each: tuple[int, int]
    """Of a replica and of a rank."""

    @classmethod
    def of(
        cls, config: Config, *, staleness: int | None = None, replicas: int | None = None, gpus: int | None = None,
        over_sample: float | None = None,
    ) -> "SearchSpace":  # fmt: skip
        """The bounds are the largest allowed values. None: the default; replicas, ranks and over-sampling then stay as
        they are. Raises: `ConfigError` for bounds that nothing can meet."""
        s, r, ranks = config.scheduler, config.rollout, config.trainer.ranks
        least = ceil(s.async_ratio or 0)
        staleness = max(s.max_staleness_steps, USUAL_STALENESS) if staleness is None else staleness
        if staleness < least:
            law = f"is below scheduler.async_ratio = {s.async_ratio}, which no smaller S allows"
            raise ConfigError("--staleness", staleness, law, f"use {least}")
        each = (ceil(replica_gpus(r, False)) or 1, config.trainer.gpus_per_rank or 1)
        if gpus is not None and gpus < sum(each):
            law = f"is too few: a replica needs {each[0]} and a rank of the trainer {each[1]}"
            raise ConfigError("--gpus", gpus, law, f"use at least {sum(each)}")
        if over_sample is not None and not 0 <= over_sample <= MOST_OVER_SAMPLE:
            law = f"must be a number of batches from 0 to {MOST_OVER_SAMPLE}"
            raise ConfigError("--most-over-sample", over_sample, law, "use 0.5")
        present = {
            S: s.max_staleness_steps, K: s.max_concurrent_groups, SYNC_EVERY: s.sync_every, OVER_SAMPLE: s.over_sample,
            SLOTS: r.slots, SYNC_MODE: r.sync_mode, SYNC_ORDER: r.sync_order, REPLICAS: r.replicas, RANKS: ranks,
        }  # fmt: skip
        most = replicas if replicas is not None or gpus is None else (gpus - each[1]) // each[0]
        spans = {
            S: (least, staleness), SLOTS: (1, MORE_SLOTS * r.slots),
            SYNC_EVERY: (1, max(MOST_SYNC_EVERY, s.sync_every)),
            REPLICAS: (r.replicas, r.replicas) if most is None else (1, most),
            RANKS: (ranks, ranks) if gpus is None else (1, (gpus - each[0]) // each[1]),
        }  # fmt: skip
        choices: dict[str, Sequence[Any]] = {
            SYNC_MODE: SYNC_MODES,
            SYNC_ORDER: SYNC_ORDERS if s.policies.sync is None else (r.sync_order,),  # which a policy replaces
            OVER_SAMPLE: (s.over_sample,) if over_sample is None else [over_sample * part for part in PARTS],
        }
        return cls(
            present=present, spans=spans, choices=choices, batch=s.train_batch_size, async_ratio=s.async_ratio,
            gpus=gpus, gpus_each=each,
        )  # fmt: skip

    def first_draws(self) -> Iterator[dict[str, Any]]:
        """What is tried first: the largest K at small and large S, with the slots of the run and with more."""
        least, most = self.spans[S]
        for staleness in sorted({least, 1, 2, most} & set(range(least, most + 1)), reverse=True):
            for slots in (self.present[SLOTS], self.spans[SLOTS][1]):
                kept = {path: self.present[path] for path in (SYNC_MODE, SYNC_ORDER)}
                yield {S: staleness, SLOTS: slots, K: 1.0, SYNC_EVERY: 1, **kept}

    def drawn(self, trial: "Trial") -> Point:
        """Settings that keep the bounds."""
        found = {path: trial.suggest_categorical(path, choices) for path, choices in self.choices.items()}
        found |= {path: trial.suggest_int(path, *span, log=path == SLOTS) for path, span in self.spans.items()}
        ahead = found[S] if self.async_ratio is None else self.async_ratio
        most = sum(floor(share * self.batch + ROUNDING) for share in (1 + ahead, found[OVER_SAMPLE]))
        found[K] = self.batch + round(trial.suggest_float(K, 0, 1) * (most - self.batch))
        found[SYNC_EVERY] = min(found[SYNC_EVERY], floor(ahead) + 1)
        if self.gpus is not None:
            room = (self.gpus - found[RANKS] * self.gpus_each[1]) // self.gpus_each[0]
            found[REPLICAS] = min(found[REPLICAS], room)
        return tuple(sorted((path, value) for path, value in found.items() if value != self.present[path]))

    def admits(self, point: Point) -> bool:
        """Whether the settings keep the bounds; the run's own may break them."""
        found = {**self.present, **dict(point)}
        used = found[REPLICAS] * self.gpus_each[0] + found[RANKS] * self.gpus_each[1]
        inside = all(least <= found[path] <= most for path, (least, most) in self.spans.items())
        return inside and found[OVER_SAMPLE] <= max(self.choices[OVER_SAMPLE]) and used <= (self.gpus or used)


# -- simulated runs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Settings, and the figures of simulated runs with them, one for each seed."""

    settings: Point
    figures: tuple[ScheduleFigures, ...]

    @property
    def speed(self) -> Interval:
        """Trained groups per second."""
        return Interval.of([one.groups_per_s for one in self.figures])

    @property
    def staleness(self) -> float:
        return median(one.staleness for one in self.figures)

    @property
    def oldest(self) -> int:
        return max(one.oldest for one in self.figures)


@dataclass(frozen=True)
class Simulator:
    """Simulates the run with other settings. It is sent to other processes."""

    tree: Mapping[str, Any]
    """The configuration of the run."""
    workloads: Sequence[Workload]
    """One for each seed."""

    def figures(self, settings: Point, seeds: int, groups: int) -> Tried:
        """Raises: `ConfigError` for settings that break a law, or with which the run does not end."""
        schedule = configured_schedule(parse_config(with_settings(self.tree, settings)))
        steps = min(64, max(8, groups // schedule.limits.train_batch_size))
        return Tried(settings=settings, figures=tuple(
            predicted(schedule, workload, seed=seed, steps=steps)
            for seed, workload in enumerate(islice(self.workloads, seeds))
        ))  # fmt: skip

    def searched(self, settings: Point) -> "Tried | ConfigError":
        try:
            return self.figures(settings, 1, SEARCH_GROUPS)
        except ConfigError as error:
            return error

    def simplified(self, settings: Point) -> Point:
        """The settings without those that make the run neither faster nor less stale."""
        wanted = self.figures(settings, 1, FINAL_GROUPS)
        speed, staleness = wanted.speed.median, wanted.staleness
        for change in settings:
            fewer = tuple(one for one in settings if one != change)
            try:
                found = self.figures(fewer, 1, FINAL_GROUPS)
            except ConfigError:
                continue
            if found.speed.median >= (1 - EQUAL) * speed and found.staleness < staleness + APART:
                settings, speed = fewer, max(speed, found.speed.median)
        return settings

    def compared(self, settings: Point) -> Tried:
        return self.figures(settings, SEEDS, FINAL_GROUPS)


@contextmanager
def _processes(count: int) -> Iterator[Callable[[Callable[[Point], Any], Iterable[Point]], Iterator[Any]]]:
    """A `map` over so many processes, which leave Ctrl-C to this one."""
    if count == 1:
        yield map
        return
    ignore = (signal.SIGINT, signal.SIG_IGN)
    pool = ProcessPoolExecutor(count, get_context("spawn"), initializer=signal.signal, initargs=ignore)
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)


# -- the search --------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Search:
    """What has been tried."""

    base: Tried
    """The run as it is."""
    space: SearchSpace
    searched: dict[Point, Tried] = field(default_factory=dict)
    compared: dict[Point, Tried] = field(default_factory=dict)
    stopped: bool = False
    """Whether Ctrl-C ended it early."""
    refused: ConfigError | None = None
    """Why the last refused settings were refused."""

    def front(self) -> list[Tried]:
        """The settings to which no other ones are both faster and less stale, the fastest first."""
        known = {**self.compared, (): self.base} if self.compared else self.searched
        rest = sorted(known.values(), key=lambda one: (-one.speed.median, one.staleness))
        front: list[Tried] = []
        for one in filter(lambda one: self.space.admits(one.settings), rest):
            if not front or one.staleness <= front[-1].staleness - APART:
                front.append(one)
        return front

    def recommended(self) -> Tried:
        """The least stale settings of those that are as good as the fastest."""
        front = self.front()
        return [one for one in front if one.speed.median >= (1 - EQUAL) * front[0].speed.median][-1]

    def chosen(self) -> list[Point]:
        """The settings to compare: the fastest ones, and the fastest of several S."""
        known = [one for one in self.searched.values() if self.space.admits(one.settings)]
        fastest = sorted(known, key=lambda one: -one.speed.median)
        by_staleness = {dict(one.settings).get(S, self.space.present[S]): one for one in reversed(fastest)}
        spread = [by_staleness[s] for s in sorted(by_staleness)]
        chosen = [*fastest[:FASTEST], *spread[:: ceil(len(spread) / (FINALISTS - FASTEST))]]
        return list(dict.fromkeys(one.settings for one in chosen))


def usual_trials(batch: int) -> int:
    """So many that a search takes about a minute on two cores."""
    return min(160, max(24, TRIAL_GROUPS // batch))


def tune(
    simulator: Simulator, space: SearchSpace, *, trials: int, seed: int = 0, processes: int = 1,
    progress: Callable[[int], object] = int,
) -> Search:  # fmt: skip
    """Search settings; Ctrl-C ends it with what was found. `progress` is told how many more of `trials` + 2 ·
    `FINALISTS` simulations have ended.

    Raises: `ConfigError` if no settings can be simulated; `KeyboardInterrupt` before any were."""
    search = Search(base=simulator.figures((), SEEDS, FINAL_GROUPS), space=space)
    with _processes(processes) as over:
        try:
            for done in _searched(search, simulator, trials, seed, over):
                progress(done)
            if not search.front():
                law = "found no settings that keep the bounds"
                raise search.refused or ConfigError("--trials", trials, law, "use more")
            finalists, compared = dict[Point, None](), dict[Point, Tried]()
            for point in over(simulator.simplified, search.chosen()):
                finalists[point] = None
                progress(1)
            for one in over(simulator.compared, finalists):
                compared[one.settings] = one
                progress(1)
            search.compared = compared
        except KeyboardInterrupt:
            if not search.front():
                raise
            search.stopped = True
    return search


def _searched(search: Search, simulator: Simulator, trials: int, seed: int, over: Any) -> Iterator[int]:
    """Fill `searched`. Yields how many trials are done."""
    import optuna  # an optional package

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=trials // 4)
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
    for draw in search.space.first_draws():
        study.enqueue_trial(draw)
    failed = optuna.trial.TrialState.FAIL
    refused = set[Point]()
    while trials > 0:
        asked = [(trial, search.space.drawn(trial)) for trial in (study.ask() for _ in range(min(trials, TOGETHER)))]
        new = dict.fromkeys(point for _, point in asked if point not in search.searched and point not in refused)
        for point, one in zip(new, over(simulator.searched, new), strict=True):
            if isinstance(one, Tried):
                search.searched[point] = one
            else:
                search.refused = one
                refused.add(point)
            yield 1
        for trial, point in asked:
            if point in refused:
                study.tell(trial, state=failed)
            else:
                study.tell(trial, (search.searched[point].speed.median, search.searched[point].staleness))
        yield len(asked) - len(new)
        trials -= len(asked)
