"""Finds the durations of a run in its history: a `config.workload.Workload` with which the run can be simulated.

Used by `what_if`. Speeds are fitted to the groups. One with a longest response of L tokens, generated among n running
responses while m groups start on its replica at c moments, takes

    overhead_s + c * prefill_s + m * prompt_s + L * (step_s + response_s * n)

seconds, longer while replicas and trainer use more hardware than they share. The same slowdown is fitted to the
trainer's steps. Must not read records.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, log
from statistics import fmean, median
from typing import Any

import numpy as np

from engine.config.workload import Workload, typical
from engine.errors import ConfigError
from engine.ids import ReplicaId
from engine.metrics.history import GenerationAttempt, History, StepRow
from engine.simulation.schedule import Schedule
from engine.simulation.workload_dice import spread_of
from engine.states.limits import GENERATED, PUBLISHING, QUEUED
from engine.trajectory import SOURCES

FEWEST_STEPS, FEWEST_GROUPS = 3, 8
"""A shorter record says too little."""
POINTS = (21, 51, 101)
"""Numbers in a list of a workload: the fewest whose mean is that of the cases, which a few long ones may decide."""
SAME = 0.01
"""Relative difference of such means."""
SHARES = [number / 10 for number in range(-4, 5)]
"""How far shares of hardware that are tried are from the assumed ones."""
SLOWER = [0.7, 1.0, 1.2, 1.4, 1.7, 2.0, 2.5]
"""Values of `trainer_slower` that are tried."""
FAR = 5.0
"""How much an error grows, as a share, for shares of hardware that are 1 from the assumed ones. Replicas are slow while
the trainer works, but the trainer also waits because replicas are slow: the record alone cannot tell them apart."""
READING, RUNNING = 0.5, 0.05
"""Shares of the error that must be saved by the time in which prompts are read, and by the number of running responses,
if they alone explained the time of a group. In a steady run, both are in proportion to its tokens."""
MANY_TURNS = 0.1
"""Share of the time in which responses wait for tools, from which on they have several turns. Each turn is a prompt, so
the time of a token follows the number of running responses."""
OTHER_THREADS = (0.2, 1.0)
"""Threads that a replica and the trainer keep busy beside those of their settings: messages, rewards, packing."""


@dataclass(frozen=True)
class Window:
    """The part of a history that is used: its newest train steps."""

    history: History
    steps: tuple[StepRow, ...]
    rows: Sequence[Mapping[str, Any]] = ()
    """The rows of `metrics.jsonl`, which tell the data sources."""

    @property
    def start(self) -> float:
        return min(phase.start for phase in self.steps[0].phases)

    @property
    def end(self) -> float:
        return self.steps[-1].finished_at

    def generated(self) -> list[GenerationAttempt]:
        """The last attempts of the groups that reached their whole length. Long ones began before the window, or were
        interrupted, more often than others."""
        return [
            one for one in self.history.attempts
            if one.outcome == "generated" and not one.reason and one.longest and self.start <= one.end <= self.end
        ]  # fmt: skip

    def attempts(self) -> list[GenerationAttempt]:
        """The groups that were generated in one piece."""
        return [one for one in self.generated() if not one.resumed and one.start >= self.start]


def window_of(history: History, most_steps: int, first: int = 0, rows: Sequence[Mapping[str, Any]] = ()) -> Window:
    """The newest train steps; those from `first` on, if it is not 0. Raises: `ConfigError` if there are too few."""
    steps = [step for step in history.trained if step.finished_at >= 0 and step.groups and step.step >= first]
    if len(steps) < FEWEST_STEPS:
        law = f"has {len(steps)} finished train steps from step {first} on; a simulation needs {FEWEST_STEPS}"
        raise ConfigError("RUN", history.run, law, "let it train longer")
    return Window(history, tuple(steps[:most_steps] if first else steps[-most_steps:]), rows)


def most_at_once(window: Window) -> int:
    """The largest number of groups that ran on a replica at the same time."""
    changes = [(moment, change, one.replica) for one in window.history.attempts
               for moment, change in ((one.start, 1), (one.end, -1))]  # fmt: skip
    running, most = Counter[ReplicaId](), 0
    for _, change, replica in sorted(changes):
        running[replica] += change
        most = max(most, running[replica])
    return most


def calibrate(window: Window, schedule: Schedule, seed: int | None = None) -> Workload:
    """The durations of a run. `seed`: fit the speeds to groups that are drawn from those of the run, with repetition,
    so that several seeds show how well it tells them. Raises: `ConfigError` if the record says too little."""
    history, samples = window.history, schedule.samples
    attempts = window.attempts()
    if len(attempts) < FEWEST_GROUPS:
        law = f"has {len(attempts)} groups that were generated without interruption; a simulation needs {FEWEST_GROUPS}"
        raise ConfigError("RUN", history.run, law, "let it train longer")
    generated = sorted(window.generated(), key=lambda one: one.group)
    means = [max(1e-9, one.tokens / samples) for one in generated]
    growth = _growth(means, schedule.limits.train_batch_size)
    steady = [mean / (1 + growth) ** (number / schedule.limits.train_batch_size) for number, mean in enumerate(means)]
    longest = [one.longest for one in generated]
    filtered = [row.state == "filtered" for row in history.groups if row.ended_at >= window.start]
    calls = _reward_calls(history, schedule)
    reward_s = calls["calls"] * calls["call_s"] / calls["at_once"] if calls else 0.0
    speeds = _Speeds(window, attempts, samples)
    shared, speed, others, train = speeds.fit(seed, _assumed_shares(schedule, history.cores))
    syncs: dict[str, list[float]] = defaultdict(list)
    for sync in history.syncs:
        if sync.outcome == "done" and sync.start >= window.start:
            syncs[sync.name].append(sync.end - sync.start)
    chunks = [chunk.end - chunk.start for chunk in history.chunks if chunk.outcome == "measured"]
    phases = [{phase.name: phase.end - phase.start for phase in step.phases} for step in window.steps]
    publishes = ("publishing", *schedule.limits.states_at(PUBLISHING))
    ended = [one for one in history.attempts if one.end >= window.start and one.outcome in ("generated", "failed")]
    return Workload.model_validate({
        "about": f"run {history.run}, train steps {window.steps[0].step} to {window.steps[-1].step}",
        "settings": _settings(schedule),
        "responses": {
            "tokens": _quantiles(steady), "growth": growth, "max_tokens": max(longest),
            "spread": spread_of(means, fmean(longest), samples, max(longest)),
            "filtered": min(0.99, fmean(filtered)) if filtered else 0.0,
        },
        "sources": _sources(window, _quantiles(steady)),
        "replica": speed | {
            "overhead_s": 0.0 if calls.pop("queued", 0) else _quantiles(_clipped(others, reward_s)),
            "row_s": _quantiles(chunks), "start_s": _start_s(history),
        },
        "rewards": calls,
        "states": {state.name: _quantiles(_work_in(history, state.name, state.concurrency, window.start))
                   for state in schedule.limits.added_states if state.place in (QUEUED, GENERATED)},
        "trainer": train | {
            "score_s": _quantiles(one["scoring"] for one in phases if "scoring" in one),
            "publish_s": _quantiles(sum(one.get(name, 0.0) for name in publishes)
                                    for one in phases if "publishing" in one),
            "ranks": schedule.ranks,
        },
        "weights": {
            "staging_s": _quantiles(syncs["staging"]), "installing_s": _quantiles(syncs["installing"]),
            "pausing_s": _pausing_s(window),
        },
        "shared": shared,
        "failures": {"group": fmean(one.outcome == "failed" for one in ended) if ended else 0.0},
    })  # fmt: skip


def _settings(schedule: Schedule) -> dict[str, Any]:
    """The sections of the configuration that decide about the schedule."""
    rollout = schedule.config.get("rollout", {})
    names = ("replicas", "slots", "sync_mode", "sync_order", "max_tokens")
    settings = {"scheduler": schedule.config.get("scheduler"), "rollout": {name: rollout.get(name) for name in names}}
    return settings if schedule.config else {}


# -- lengths and simple durations --------------------------------------------------------------------------------------


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _quantiles(values: Iterable[float]) -> float | list[float]:
    found = sorted(max(0.0, value) for value in values)
    if not found:
        return 0.0
    if found[-1] - found[0] < 1e-9:
        return _rounded(found[0])

    def spaced(points: int) -> list[float]:
        return [_rounded(float(value)) for value in np.quantile(found, np.linspace(0, 1, min(points, len(found))))]

    points = next((one for one in POINTS if abs(typical(spaced(one)) / fmean(found) - 1) < SAME), POINTS[-1])
    return spaced(points)


def _clipped(seconds: Sequence[float], less: float) -> list[float]:
    """The seconds less some, none below 0, with the same mean."""
    rest = [one - less for one in seconds]
    above = [max(0.0, one) for one in rest]
    scale = max(0.0, sum(rest)) / (sum(above) or 1.0)
    return [one * scale for one in above]


def _growth(means: Sequence[float], batch: int) -> float:
    """The change of the lengths of groups, in the order of their numbers, per train step; 0 if it may be chance."""
    if len(means) < 2 * FEWEST_GROUPS:
        return 0.0
    at, logs = np.arange(len(means)) / batch, np.log(means)
    slope = float(np.cov(at, logs)[0, 1] / at.var(ddof=1))
    error = float(np.std(logs - slope * at) / at.std() / len(at) ** 0.5)
    return _rounded(exp(slope) - 1) if abs(slope) > 3 * error else 0.0


def _sources(window: Window, tokens: float | list[float]) -> dict[str, Any]:
    """The data sources of the groups in the window, whose lengths differ in proportion."""
    steps = {step.step for step in window.steps}
    groups, lengths = Counter[str](), Counter[str]()
    for row in window.rows:
        for name, figures in row.get(SOURCES, {}).items() if row.get("step") in steps else ():
            groups[name] += figures["groups"]
            lengths[name] += figures["groups"] * figures.get("tokens_mean", 0.0)
    whole = sum(groups.values())
    found = {name: {"share": count / whole, "tokens": tokens} for name, count in groups.items() if count}
    mean = sum(lengths.values()) / max(1, whole)
    for name, source in found.items() if mean else ():
        factor = lengths[name] / groups[name] / mean
        source["tokens"] = [one * factor for one in tokens] if isinstance(tokens, list) else tokens * factor
    return found


def _reward_calls(history: History, schedule: Schedule) -> dict[str, Any]:
    """The calls of the slowest reward function in the replicas."""
    found = history.slowest("reward")
    if found is None or not found[1].calls or any(state.name == found[0] for state in schedule.limits.added_states):
        return {}
    generated = sum(one.outcome == "generated" for one in history.attempts)
    calls = found[1]
    count = calls.calls / max(1, generated)  # the newest calls are not reported yet
    count = schedule.samples if count > schedule.samples / 2 else max(1, round(count))
    call_s = _rounded(calls.seconds / calls.calls)
    return {"calls": count, "call_s": call_s, "at_once": max(1, calls.at_once), "queued": calls.queued}


def _pausing_s(window: Window) -> float:
    """Seconds of a pause after the last group that ended in it: in mode `wait`, it waits for the groups."""
    ends: dict[ReplicaId, list[float]] = defaultdict(list)
    for one in window.generated():
        ends[one.replica].append(one.end)
    pauses = [sync for sync in window.history.syncs if (sync.name, sync.outcome) == ("pausing", "done")]
    seconds = [
        sync.end - max((end for end in ends[sync.replica] if sync.start < end <= sync.end), default=sync.start)
        for sync in pauses if sync.start >= window.start
    ]  # fmt: skip
    return _rounded(median(seconds)) if seconds else 0.0


def _start_s(history: History) -> float:
    later = [life.up - life.start for life in history.lives if life.up is not None and life.number > 1]
    return _rounded(median(later)) if later else 10.0


def _work_in(history: History, state: str, concurrency: int, start: float) -> list[float]:
    """Seconds of work on groups in an added state, which works on them in the order in which they come."""
    ends: list[float] = []
    work: list[float] = []
    for wait in sorted((wait for wait in history.waits if wait.state == state), key=lambda wait: wait.start):
        free = sorted(ends)[-concurrency] if len(ends) >= concurrency else wait.start
        if wait.start >= start:
            work.append(wait.end - max(wait.start, free))
        ends = sorted([*ends, wait.end])[-concurrency:]
    return work


# -- speeds ------------------------------------------------------------------------------------------------------------


class _Speeds:
    """The time line of a window, cut wherever a group or the trainer starts or stops."""

    def __init__(self, window: Window, attempts: Sequence[GenerationAttempt], samples: int) -> None:
        history, start, end = window.history, window.start, window.end
        self.attempts = attempts
        self.steps = [
            (step, next(phase for phase in step.phases if phase.name == "training"))
            for step in window.steps if any(phase.name == "training" for phase in step.phases)
        ]  # fmt: skip
        running = [one for one in history.attempts if one.end > start and one.start < end]
        works = [phase for step in window.steps for phase in step.phases if phase.name != "collecting"]
        frozen = [sync for sync in history.syncs if sync.name == "installing" and sync.end > start and sync.start < end]
        points = {start, end}
        timed: list[Any] = [*running, *works, *frozen]
        for one in timed:
            points |= {min(max(one.start, start), end), min(max(one.end, start), end)}
        self.points = sorted(points)
        self.seconds = np.diff(self.points)
        replicas: list[ReplicaId] = sorted({one.replica for one in running})
        self.row = {replica: number for number, replica in enumerate(replicas)}
        self.groups = np.zeros((len(replicas), len(self.seconds)))
        for attempt in running:
            self.groups[self.row[attempt.replica], self._part(attempt)] += 1
        self.open = np.ones((len(replicas), len(self.seconds)))
        for sync in frozen:
            if sync.replica in self.row:
                self.open[self.row[sync.replica], self._part(sync)] = 0
        self.trains = np.zeros(len(self.seconds))
        for phase in works:
            self.trains[self._part(phase)] = 1
        self.active = ((self.groups > 0) * self.open).sum(axis=0)
        started = sorted((self.row[one.replica], one.start) for one in running)
        self.starts = self._starting(started)
        """Groups that started on the replica of each group while it was generated, itself included."""
        self.calls = self._starting(sorted(set(started)))
        """Moments at which they started: prompts that come together are read together."""
        self.longest = np.array([one.longest for one in attempts], dtype=float)
        share = fmean(min(1.0, one.tokens / (samples * one.longest)) for one in attempts)
        self.waits = _waiting_share(window)
        busy = self._over_attempts(self.open * self.seconds)
        held = self._over_attempts(self.open * self.seconds * self.groups)
        self.responses = samples * share * (1 - self.waits) * held / np.maximum(busy, 1e-12)
        """Running responses beside each group, on average."""
        self.overhead_s = max(
            0.0, float(self._over_attempts(self.open * self.seconds).mean()) - _slot_s(window) / share
        )
        """Seconds of a group in which it holds no slot, without those in which trajectories that ended wait for it."""
        self.tokens = np.array([step.tokens for step, _ in self.steps], dtype=float)

    def _part(self, one: Any) -> slice:
        return slice(bisect_left(self.points, one.start), bisect_left(self.points, min(one.end, self.points[-1])))

    def _starting(self, starts: Sequence[tuple[int, float]]) -> Any:
        """Number of `starts`, each with its replica, during each group."""
        spans = [((self.row[one.replica], one.start), (self.row[one.replica], one.end)) for one in self.attempts]
        return np.array([bisect_left(starts, end) - bisect_left(starts, start) for start, end in spans], dtype=float)

    def _over_attempts(self, values: np.ndarray) -> Any:
        """The sum of `values` [replicas, segments] over the time of each group."""
        sums = np.concatenate([np.zeros((len(values), 1)), values.cumsum(axis=1)], axis=1)
        parts = [(self.row[one.replica], self._part(one)) for one in self.attempts]
        return np.array([sums[row, part.stop] - sums[row, part.start] for row, part in parts])

    def fit(
        self, seed: int | None, prior: tuple[float, float]
    ) -> tuple[dict[str, float], dict[str, float], list[float], dict[str, Any]]:
        """(shares of hardware, speed of a replica, other seconds of each group, speed of the trainer). `prior`: the
        shares of a replica and of the trainer that are assumed unless the record speaks against them."""
        chosen: Any = slice(None)
        if seed is not None:
            chosen = np.random.default_rng(seed).integers(len(self.attempts), size=len(self.attempts))
        best = (float("inf"), 0.0, 0.0)
        for more, others in product(SHARES, SHARES):
            replica, trainer = round(max(0.0, prior[0] + more), 3), round(max(0.0, prior[1] + others), 3)
            _, error = self._replicas(self._used(replica, trainer), chosen)
            far = (replica - prior[0]) ** 2 + (trainer - prior[1]) ** 2
            best = min(best, (error * (1 + FAR * far), replica, trainer))
        _, replica, trainer = best
        used = self._used(replica, trainer)
        (call_s, prompt_s, step_s, response_s), _ = self._replicas(used, chosen)
        rest = self.overhead_s + self._sampling(used) - (
            self.calls * call_s + self.starts * prompt_s + self.longest * (step_s + response_s * self.responses)
        )  # fmt: skip
        errors = [(self._trainer(used * slower)[1] * (1 + FAR * log(slower) ** 2), slower) for slower in SLOWER]
        slower = min(errors)[1] if trainer else 1.0
        (_, token_s), _ = self._trainer(used * slower)
        seconds = self._training(used * slower) - token_s * self.tokens
        wait_s = self.waits * float((step_s + response_s * self.responses).mean())
        step_s = max(step_s - wait_s, 1e-9)
        speed = {
            "step_s": step_s,
            "wait_s": wait_s,
            "response_s": response_s,
            "prefill_s": call_s,
            "prompt_s": prompt_s,
        }
        speed = {name: _rounded(value) for name, value in speed.items()}
        shared = {"replica": replica, "trainer": trainer, "trainer_slower": slower}
        return shared, speed, rest.tolist(), {
            "step_s": _quantiles(_clipped(seconds.tolist(), 0.0)), "token_s": _rounded(token_s),
        }  # fmt: skip

    def _used(self, replica: float, trainer: float) -> Any:
        return replica * self.active + trainer * self.trains

    def _sampling(self, used: Any) -> Any:
        """Seconds for which each group is sampled, as if nothing else used the hardware."""
        took = self._over_attempts(self.open * self.seconds)
        alone = self._over_attempts(self.open * self.seconds / np.maximum(1.0, used))
        return (took - self.overhead_s) * alone / np.maximum(took, 1e-12)

    def _replicas(self, used: Any, chosen: Any) -> tuple[list[float], float]:
        took = self._sampling(used)[chosen]
        longest, responses = self.longest[chosen], self.responses[chosen]
        columns = [self.calls[chosen], self.starts[chosen], longest, longest * responses]
        running = 0.0 if self.waits > MANY_TURNS else RUNNING
        factors, error = _least_squares(columns, took, (READING, READING, 0.0, running))
        if not any(factors):  # waits for rewards hide what generation takes
            factors = [0.0, 0.0, max(0.0, float(took.mean() / longest.mean())), 0.0]
        return factors, error

    def _trainer(self, used: Any) -> tuple[list[float], float]:
        if not self.steps:
            return [0.0, 0.0], 0.0
        return _least_squares([np.ones_like(self.tokens), self.tokens], self._training(used), (0.0, 0.0))

    def _training(self, used: Any) -> Any:
        sums = np.concatenate([[0.0], (self.seconds / np.maximum(1.0, used)).cumsum()])
        parts = [self._part(phase) for _, phase in self.steps]
        return np.array([sums[part.stop] - sums[part.start] for part in parts])


def _assumed_shares(schedule: Schedule, cores: int) -> tuple[float, float]:
    """Shares of the cores that a replica and the trainer use if both compute on them: their threads."""
    sections = [schedule.config.get(name) or {} for name in ("rollout", "trainer")]
    if not cores or any(section.get("device") not in ("cpu", "auto") for section in sections):
        return 0.0, 0.0
    threads = [section.get("threads") or 1 for section in sections]
    return (threads[0] + OTHER_THREADS[0]) / cores, (threads[1] + OTHER_THREADS[1]) / cores


def _waiting_share(window: Window) -> float:
    """Share of the time of a response in which it waits for agents, tools or environments."""
    busy = waiting = 0.0
    for span in window.history.idle:
        if span.end > window.start and span.start < window.end:
            busy += span.busy_s
            waiting += dict(span.idle_s).get("agent", 0.0)
    return min(0.95, waiting / ((busy + waiting) or 1.0))


def _slot_s(window: Window) -> float:
    """Seconds for which a group holds a slot, on average."""
    history, held = window.history, 0.0
    for span in history.idle:
        inside = min(span.end, window.end) - max(span.start, window.start)
        if inside > 0:
            held += inside / (span.end - span.start) * (span.busy_s + dict(span.idle_s).get("agent", 0.0))
    chunks = [one for one in history.chunks if one.start < window.end and one.end > window.start]
    held -= sum(min(one.end, window.end) - max(one.start, window.start) for one in chunks)
    groups = sum(one.end > window.start and one.end <= window.end for one in history.attempts)
    return max(0.0, held) / max(1, groups)


def _least_squares(columns: Sequence[Any], values: Any, ridge: Sequence[float]) -> tuple[list[float], float]:
    """Factors of the columns, none below 0, with which their sum is nearest to the values as a share of that sum; and
    the mean square of what remains. The sum has the same mean as the values. `ridge`: how much of the error each column
    must save if it alone made the whole sum; columns that say the same would otherwise share it by chance."""
    matrix, weights, mean = np.stack(columns, axis=1), np.ones(len(values)), max(1e-9, values.mean())
    penalty = np.diag(np.sqrt(np.array(ridge) * len(values)) * matrix.mean(axis=0) / mean)
    factors = np.zeros(len(columns))
    for _ in range(3):
        factors = _not_negative(
            np.concatenate([matrix * weights[:, None], penalty]),
            np.concatenate([values * weights, np.zeros(len(ridge))]),
        )
        weights = 1 / np.maximum(matrix @ factors, 0.05 * mean)
    fitted = matrix @ factors
    factors = factors * mean / max(1e-12, fitted.mean())
    return factors.tolist(), float(((values - fitted) ** 2 * weights**2).mean())


def _not_negative(matrix: Any, values: Any) -> Any:
    """Least squares with factors of at least 0: of the few subsets of the columns, the best."""
    whole: Any = np.linalg.lstsq(matrix, values, rcond=None)[0]
    if (whole >= 0).all():
        return whole
    best, error = np.zeros(matrix.shape[1]), float((values**2).sum())
    for used in product((False, True), repeat=matrix.shape[1]):
        places = [place for place, one in enumerate(used) if one]
        found = np.linalg.lstsq(matrix[:, places], values, rcond=None)[0] if places else np.zeros(0)
        rest = float(((values - matrix[:, places] @ found) ** 2).sum())
        if (found >= 0).all() and rest < error * (1 - 1e-9):
            best, error = np.zeros(matrix.shape[1]), rest
            best[places] = found
    return best
