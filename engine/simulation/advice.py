"""Advice on settings that would make a run faster. Each candidate changes one setting and is simulated with the run's
own durations.

Called by the command line for `engine explain`, `engine report`, `engine top` and the table at the end of a run. The
work is bounded by a number of simulated groups, not by a clock: a record gives the same advice on every machine.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from math import ceil
from typing import Any, NamedTuple

from engine.errors import ConfigError
from engine.inspect.counsel import Advice, Counsel, bound_of, limited_slots, percent, user_code
from engine.metrics.history import WAITS, History
from engine.metrics.idle import LEAST_WAIT
from engine.simulation.calibration import window_of
from engine.simulation.schedule import Schedule, recorded_schedule
from engine.simulation.what_if import TRIALS, calibrated, figures_of, forgotten_steps, predicted
from engine.states.limits import GENERATED, QUEUED, SYNC_MODES

MOST_GROUPS = 8_000
"""Maximum number of simulated groups in all simulated runs: 3 to 5 s."""
FEW_GROUPS = 2_500
"""The same where nobody asked for advice."""
MOST_STEPS, FEWEST_STEPS = 32, 4
"""Train steps of a simulated run."""
STEADY = 256
"""Trained groups from which on the speed of a simulated run hardly depends on its draws."""
MOST_LINES = 3
LEAST_GAIN = LEAST_WAIT
"""A smaller gain is not worth a change: it may be chance."""
ENOUGH = 0.75
"""Among values of a setting with this share of the largest gain, the most cautious is advised."""
FAR = 0.1
"""A larger error of the simulated seconds per step is named."""
STALENESS, WORKERS = "scheduler.max_staleness_steps", "scheduler.max_concurrent_groups"


def advise(history: History, *, gpus: bool = True, most_groups: int = MOST_GROUPS) -> Counsel:
    """What user code to make faster, or at most three changes of settings that make the simulated run faster, each on
    its own. `gpus`: whether there may be more GPUs for it. `most_groups`: that may be simulated."""
    if causes := user_code(history):
        return Counsel(causes=causes)
    try:
        run = _Run(history)
        changes = [change for candidates in _promising(run, gpus=gpus) for change in _allowed(candidates(run))]
        plan = _planned(run, len(changes), most_groups)
        simulation = _Simulation(run, plan)
    except ConfigError as error:
        return Counsel(notes=(f"no advice: {error}",))
    advice = simulation.best_of(changes[: plan.changes])
    notes = [] if advice else [bound_of(run.trainer, run.slots)]
    if untried := dict.fromkeys(advice.setting for advice, _ in changes[plan.changes :]):
        notes.append(f"not simulated, to save time: {', '.join(untried)}; use `engine tune RUN`")
    if run.limited >= LEAST_WAIT:
        notes.append(limited_slots(run.limited, run.schedule.policies["concurrency"]))
    return Counsel(advice=advice, notes=tuple(notes))


# -- the run as it was -------------------------------------------------------------------------------------------------


class _Run:
    """What the candidates are made of. Raises: `ConfigError` if the record says too little."""

    def __init__(self, history: History) -> None:
        self.history, self.window = history, window_of(history, MOST_STEPS)
        figures, schedule = figures_of(self.window), recorded_schedule(history)
        self.trainer, self.slots = figures.trainer, figures.slots
        self.limited = self.slots.get("concurrency", 0.0)
        """Share of slot time that the concurrency policy left idle. A simulated replica has no KV cache to be full."""
        self.schedule = replace(schedule, slots=max(1, round(schedule.slots * (1 - self.limited))))
        self.limits = schedule.limits

    @property
    def waited(self) -> float:
        """Share of the trainer's time."""
        return sum(self.trainer.get(name, 0.0) for name in WAITS)

    def slots_of(self, replicas: int) -> int:
        return replicas * self.schedule.slots

    @property
    def groups_of_step(self) -> int:
        """Those that are filtered or fail included."""
        ended = sum(row.ended_at >= self.window.start for row in self.history.groups)
        return max(self.limits.train_batch_size, ceil(ended / len(self.window.steps)))

    def change(self, **fields: Any) -> Schedule:
        return self.schedule.with_limits(**fields)


# -- what is simulated -------------------------------------------------------------------------------------------------


Candidate = tuple[Advice, Schedule]
"""A change whose gain is not known yet, and the schedule after it."""


class _Plan(NamedTuple):
    """How the simulated groups are used."""

    steps: int
    """Train steps of each simulated run."""
    trials: int
    """Simulations of the run as it was, beside the first."""
    changes: int
    """Changes that are simulated."""
    checks: int
    """Simulations with a second seed."""


def _planned(run: _Run, changes: int, most_groups: int) -> _Plan:
    """Raises: `ConfigError` if not even one change can be simulated."""
    size, earlier = run.groups_of_step, forgotten_steps(run.limits)
    wanted = most_groups // (size * (changes + 2 * MOST_LINES)) - earlier
    steps = min(max(FEWEST_STEPS, ceil(STEADY / size), wanted), MOST_STEPS, len(run.window.steps))
    runs = most_groups // (size * (steps + earlier))
    if runs < 2:
        law = f"has steps of {size} groups, which take too long to simulate here"
        raise ConfigError("RUN", run.history.run, law, "use `engine tune RUN`")
    checks = min(MOST_LINES + 1, runs // 3) if runs >= 6 else 0
    tried = min(changes, runs - 1 - checks)
    return _Plan(steps, min(TRIALS, runs - 1 - checks - tried), tried, checks)


class _Simulation:
    """The simulated run, and its candidates. Raises: `ConfigError` if the record says too little."""

    def __init__(self, run: _Run, plan: _Plan) -> None:
        self.run, self.checks = run, plan.checks
        calibration = calibrated(run.history, run.schedule, steps=plan.steps, trials=plan.trials)
        self.workload, self.steps = calibration.workload(), calibration.steps
        self.earlier = calibration.window.steps[0].step
        self.step_s = {0: calibration.simulated.step_s}
        """Of the run as it was, by seed."""
        self.error = calibration.simulated.step_s / calibration.recorded.step_s - 1
        self.least = max(1 + LEAST_GAIN, 1 + self.error, 1 / (1 + self.error))

    def faster(self, schedule: Schedule, seed: int) -> float:
        """How many times as fast the run is with a schedule; 0 if it does not end."""
        if seed not in self.step_s:
            self.step_s[seed] = self._seconds(self.run.schedule, seed)
        with suppress(ConfigError):
            return self.step_s[seed] / self._seconds(schedule, seed)
        return 0.0

    def _seconds(self, schedule: Schedule, seed: int) -> float:
        return predicted(schedule, self.workload, seed=seed, steps=self.steps, earlier=self.earlier).step_s

    def best_of(self, candidates: Sequence[Candidate]) -> tuple[Advice, ...]:
        """The changes that gain enough, also with another seed; those that need no GPUs first, and K before S."""
        found = [(replace(advice, faster=self.faster(to, 0), simulated=self._words), to) for advice, to in candidates]
        found = [one for one in found if one[0].faster >= self.least]
        gaining = [_cautious(list(changes)) for _, changes in groupby(found, lambda one: one[0].setting)]
        late = STALENESS if any(advice.setting == WORKERS for advice, _ in gaining) else ""
        gaining.sort(key=lambda one: (one[0].needs_gpus, one[0].setting == late, -one[0].faster))
        if self.checks:
            gaining = [one for one in gaining[: self.checks - 1] if self.faster(one[1], 1) >= self.least]
        return tuple(advice for advice, _ in gaining[:MOST_LINES])

    @property
    def _words(self) -> str:
        words = f"simulated over {self.steps} steps"
        if abs(self.error) > FAR:
            words += f" (without the change, {percent(abs(self.error))} too {'slow' if self.error > 0 else 'fast'})"
        return words


def _cautious(changes: Sequence[Candidate]) -> Candidate:
    """The first that gains about as much as the best."""
    most = max(advice.faster for advice, _ in changes)
    return next(one for one in changes if one[0].faster - 1 >= ENOUGH * (most - 1))


# -- the candidates, the most cautious value first ---------------------------------------------------------------------


def _staleness(run: _Run) -> Iterator[Candidate]:
    limits, before, late = run.limits, run.limits.max_staleness_steps, run.trainer.get("waiting_for_stragglers", 0.0)
    bound = run.slots.get("staleness_bound", 0.0)
    why = f"{percent(bound)} of slot time was idle because the bound was reached"
    if late > bound:
        why = f"the trainer waited {percent(late)} of the time for groups at their deadline"
    for value in (before + 1, before + 2) if limits.async_ratio is None else ():
        most = limits.train_batch_size * (value + 1)
        workers, also = _workers_for(run, most, run.schedule.replicas)
        schedule = run.change(max_staleness_steps=value, max_concurrent_groups=workers)
        yield Advice(STALENESS, before, value, why, cost="staleness increases", also=also), schedule


def _workers_for(run: _Run, most: int, replicas: int) -> tuple[int, str]:
    """K, which must follow S or the replicas, and the words for that: none if the engine chooses K."""
    before = run.limits.max_concurrent_groups
    workers = max(before, min(most, run.slots_of(replicas)))
    if workers == before or run.schedule.config.get("scheduler", {}).get("max_concurrent_groups") == 0:
        return workers, ""
    return workers, f" and {WORKERS} from {before} to {workers}"


def _workers(run: _Run) -> Iterator[Candidate]:
    before, slots = run.limits.max_concurrent_groups, run.slots_of(run.schedule.replicas)
    most = run.limits.ahead + run.limits.surplus
    why = f"{percent(run.slots.get('worker_bound', 0.0))} of slot time was idle because K groups were running"
    for value in sorted({min(most, slots), min(most, 2 * slots)}):
        if value > before:
            yield Advice(WORKERS, before, value, why), run.change(max_concurrent_groups=value)


def _sync_time(run: _Run) -> str:
    return f"weight syncs took {percent(run.slots.get('weight_sync', 0.0))} of slot time"


def _sync_mode(run: _Run) -> Iterator[Candidate]:
    costs = {"keep": "responses mix tokens of several versions", "abort": "interrupted groups are prefilled again"}
    before = run.limits.sync_mode
    for mode in SYNC_MODES:
        if mode in costs and mode != before:
            advice = Advice("rollout.sync_mode", before, mode, _sync_time(run), cost=costs[mode])
            yield advice, run.change(sync_mode=mode)


def _sync_order(run: _Run) -> Iterator[Candidate]:
    before = run.schedule.policies["sync"]
    other = {"together": "rolling", "rolling": "together"}
    if before in other:
        schedule = replace(run.schedule, policies={**run.schedule.policies, "sync": other[before]})
        yield Advice("rollout.sync_order", before, other[before], _sync_time(run)), schedule


def _sync_every(run: _Run) -> Iterator[Candidate]:
    before = run.limits.sync_every
    why = f"{_sync_time(run)}, and publications {percent(run.trainer.get('publishing', 0.0))} of the time"
    cost = "responses come from older weights"
    yield Advice("scheduler.sync_every", before, 2 * before, why, cost=cost), run.change(sync_every=2 * before)


def _validation(run: _Run) -> Iterator[Candidate]:
    limits = run.limits.validation
    if limits is None or not limits.every or limits.own:
        return
    measuring = sum(chunk.end - chunk.start for chunk in run.history.chunks)
    slot_s = run.history.busy_s + sum(run.history.idle_s.values())
    why = f"validation rows took {percent(measuring / slot_s)} of slot time, and delayed weight syncs"
    for value in (2 * limits.every, 4 * limits.every):
        schedule = run.change(validation=replace(limits, every=value))
        yield Advice("validation.every", limits.every, value, why, cost="fewer validations"), schedule


def _rewards(run: _Run) -> Iterator[Candidate]:
    why = f"{percent(run.slots.get('reward', 0.0))} of slot time was idle because groups waited for it"
    states, cost = run.limits.added_states, "its calls must not slow each other down"
    for state in states:
        for value in (2 * state.concurrency, 4 * state.concurrency) if state.place in (QUEUED, GENERATED) else ():
            changed = tuple(replace(one, concurrency=value) if one is state else one for one in states)
            advice = Advice(f"concurrency of state {state.name}", state.concurrency, value, why, cost=cost)
            yield advice, run.change(added_states=changed)
    before = run.schedule.config.get("reward", {}).get("concurrency")
    for value in (2 * before, 4 * before) if before and run.history.slowest("reward") else ():
        advice = Advice("reward.concurrency", before, value, why, cost=cost)
        yield advice, replace(run.schedule, rewards_at_once=value)


def _replicas(run: _Run) -> Iterator[Candidate]:
    limits, before = run.limits, run.schedule.replicas
    why = f"the trainer waited {percent(run.waited)} of the time for groups, and slots were busy "
    why += percent(run.slots.get("busy", 0.0))
    for value in (before + 1, 2 * before):
        workers, also = _workers_for(run, limits.ahead + limits.surplus, value)
        schedule = replace(run.change(max_concurrent_groups=workers), replicas=value)
        yield Advice("rollout.replicas", before, value, why, needs_gpus=True, also=also), schedule


def _ranks(run: _Run) -> Iterator[Candidate]:
    before = run.schedule.ranks
    trains = run.trainer.get("training", 0.0) + run.trainer.get("scoring", 0.0)
    why = f"the trainer was busy {percent(trains)} of the time"
    yield Advice("trainer.ranks", before, 2 * before, why, needs_gpus=True), replace(run.schedule, ranks=2 * before)


Candidates = Callable[[_Run], Iterator[Candidate]]
FREE: dict[Candidates, tuple[tuple[str, ...], tuple[str, ...]]] = {
    _workers: (("worker_bound",), ()),
    _sync_order: (("weight_sync",), ()),
    _sync_mode: (("weight_sync",), ()),
    _sync_every: (("weight_sync",), ("publishing",)),
    _validation: (("busy", "weight_sync"), ()),
    _rewards: (("reward",), ()),
    _staleness: (("staleness_bound",), ("waiting_for_stragglers",)),
}
"""The causes of idle slots and the times of the trainer that a setting can shorten."""
PAID: dict[Candidates, tuple[tuple[str, ...], tuple[str, ...]]] = {
    _replicas: ((), WAITS),
    _ranks: ((), ("training", "scoring")),
}


def _promising(run: _Run, *, gpus: bool) -> list[Candidates]:
    """The candidates that could gain enough, those that could gain most first. Slots that the trainer does not wait for
    gain nothing."""
    room = {}
    for candidates, (idle, tasks) in {**FREE, **(PAID if gpus else {})}.items():
        slots = sum(run.slots.get(cause, 0.0) for cause in idle)
        room[candidates] = min(run.waited, slots) + sum(run.trainer.get(task, 0.0) for task in tasks)
    return sorted((one for one in room if room[one] >= LEAST_GAIN), key=lambda one: -room[one])


def _allowed(changes: Iterator[Candidate]) -> Iterator[Candidate]:
    """The changes up to the first value that breaks a law."""
    with suppress(ConfigError):
        yield from changes
