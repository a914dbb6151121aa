"""What if a run had other settings? Simulates a schedule with the durations of a workload, and compares figures.

    workload = calibrate(window, schedule)
    simulated = simulate(schedule, workload, seed=0, steps=64)
    figures_of(simulated.history, 64)

Called by `engine whatif`, `simulate`, `tune` and `explain`. The world is the only model of a schedule
(`simulation.world`): the production scheduler, executor and workers on a virtual clock.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from engine.config.workload import Workload, typical
from engine.errors import ConfigError, EngineError
from engine.ids import StepId
from engine.inspect.counsel import OUTSIDE
from engine.inspect.history_reader import made_history
from engine.metrics.collector import RunMetrics, TakesRows
from engine.metrics.history import GroupRow, History
from engine.metrics.history_builder import HistoryBuilder
from engine.metrics.journal import Journal
from engine.policies import PolicySet
from engine.record import Header, NullRecorder, Recorder
from engine.record.frames import Tick
from engine.record.recorder import RecordWriter
from engine.runtime.garbage_collection import rare_collection
from engine.simulation.calibration import Window, calibrate, most_at_once, window_of
from engine.simulation.run_settings import Faults, Setting
from engine.simulation.schedule import Schedule
from engine.simulation.workload_dice import WorkloadDice, prompts_of
from engine.simulation.world import World
from engine.states.limits import GENERATED, QUEUED, Limits
from engine.version import __version__

MOST_EVENTS = 100_000_000
"""A simulated run with more events counts as one that never ends."""


class WatchedWorld(World):
    """A world whose history is found while it runs."""

    def __init__(
        self,
        setting: Setting,
        policies: PolicySet,
        recorder: RecordWriter,
        dice: WorkloadDice,
        journal: TakesRows | None,
    ) -> None:
        super().__init__(setting, policies, recorder, dice=dice)
        self.metrics = RunMetrics(self.scheduler, journal)
        self.builder = HistoryBuilder(self.scheduler, self.metrics)

    def _observe(self, tick: Tick) -> None:
        super()._observe(tick)
        self.metrics.observe(tick)
        self.builder.take(tick)

    def _report(self, step: StepId, metrics: Mapping[str, Any]) -> None:
        self.metrics.report(step, metrics)


class Simulated(NamedTuple):
    """A simulated run, and what its groups would have been in any schedule."""

    history: History
    dice: WorkloadDice


def simulate(
    schedule: Schedule, workload: Workload, *, seed: int, steps: int, directory: Path | None = None
) -> Simulated:
    """A simulated run of so many train steps. The same arguments give the same run on any machine.
    `directory`: of a run, to which the record is written, with everything that the reading commands need.

    Raises: `ConfigError` if the schedule has no replica that generates, or if the run does not end.
    """
    limits = simulated_limits(schedule.limits, steps)
    if schedule.replicas < 1:
        raise ConfigError("rollout.replicas", schedule.replicas, "leaves no replica to generate", "use more")
    if schedule.rewards_at_once is not None:
        at_once = workload.rewards.model_copy(update={"at_once": schedule.rewards_at_once})
        workload = workload.model_copy(update={"rewards": at_once})
    for state in limits.added_states:
        if state.place in (QUEUED, GENERATED) and state.name not in workload.states:
            law = "has no such state, so its duration is not known"
            raise ConfigError("states", state.name, law, f"add states.{state.name} to the workload")
    failures, kept = workload.failures, (1 - workload.responses.filtered) * (1 - workload.failures.group)
    setting = Setting(
        limits=limits, replicas=schedule.replicas, slots=schedule.slots, samples=schedule.samples, seed=seed,
        prompts=ceil((steps + limits.max_staleness_steps + 2) * limits.train_batch_size * 2 / kept),
        latency_s=0.0,  # the durations of a record include it
        max_tokens=schedule.max_tokens, rows=prompts_of(workload, seed), start_s=workload.replica.start_s,
        spread=1.0 - workload.responses.filtered,
        faults=Faults(fail_group=failures.group, die=failures.replica),
    )  # fmt: skip
    header = Header(
        run=f"simulated-{seed}", limits=limits.to_plain(), policies=dict(schedule.policies),
        config=dict(schedule.config), code=__version__,
    )  # fmt: skip
    recorder: RecordWriter = NullRecorder()
    journal = None
    if directory is not None:
        recorder, journal = Recorder(directory / "schedule", header), Journal(directory / "metrics.jsonl")
    dice = WorkloadDice(setting, workload, ranks=schedule.ranks)
    world = WatchedWorld(setting, PolicySet.from_names(schedule.policies), recorder, dice, journal)
    try:
        with rare_collection():
            outcome = world.run(events=MOST_EVENTS)
    except EngineError as error:
        raise ConfigError("simulation", str(error), "the run does not end", "change the settings") from error
    finally:
        recorder.close()
        world.metrics.close()
    world.builder.end()
    if outcome.outcome != "finished":
        raise ConfigError(
            "simulation", outcome.word, f"ended before step {steps}: {outcome.reason}", "change the settings"
        )
    history = made_history(header, world.builder.ended, world.builder.open, outcome.word, outcome.reason)
    return Simulated(history, dice)


def simulated_limits(limits: Limits, steps: int) -> Limits:
    """The limits of a simulated run: it saves no checkpoints, and does not give up."""
    return replace(
        limits, max_steps=steps, checkpoint_every=0, keeps_batches=False, keep_best="",
        max_filtered_in_a_row=1_000_000_000, max_failure_share=1.0,
    )  # fmt: skip


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ScheduleFigures:
    """What can be compared between a recorded and a simulated run, over their last train steps."""

    step_s: float
    """Seconds per train step, without those that no setting changes (`OUTSIDE`)."""
    groups_per_s: float
    staleness: float
    """Mean over the trained groups, in train steps."""
    oldest: int
    """The largest staleness of a group."""
    trainer: Mapping[str, float]
    """Shares of the trainer's time by task or cause."""
    slots: Mapping[str, float]
    """Shares of slot time: `busy`, or idle by cause."""


def figures_of(window: Window) -> ScheduleFigures:
    """The figures of the train steps in a window, from the end of its first one to the end of its last."""
    history, steps = window.history, window.steps[1:]
    start, end = window.steps[0].finished_at, window.end
    trainer: dict[str, float] = defaultdict(float)
    slots: dict[str, float] = defaultdict(float)
    for span in history.idle:
        seconds = min(span.end, end) - max(span.start, start)
        if seconds <= 0:
            continue
        share = seconds / (span.end - span.start)
        trainer[span.trainer] += seconds
        slots["busy"] += span.busy_s * share
        for cause, idle_s in span.idle_s:
            slots[cause] += idle_s * share
    lost = sum(trainer.pop(cause, 0.0) for cause in OUTSIDE)
    for cause in OUTSIDE:
        slots.pop(cause, None)
    staleness = [lag for step in steps for lag in step.staleness]
    step_s = (end - start - lost) / len(steps)
    return ScheduleFigures(
        step_s=step_s, groups_per_s=fmean(len(step.groups) for step in steps) / step_s, staleness=fmean(staleness),
        oldest=max(staleness), trainer=_shares(trainer), slots=_shares(slots),
    )  # fmt: skip


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    whole = sum(seconds.values()) or 1.0
    return {name: value / whole for name, value in sorted(seconds.items(), key=lambda item: -item[1]) if value > 0}


def predicted(
    schedule: Schedule, workload: Workload, *, seed: int, steps: int, earlier: int | None = None
) -> ScheduleFigures:
    """The figures of so many train steps of a simulated run, after `earlier` others; None: as many as make it forget
    its start."""
    forgotten = forgotten_steps(schedule.limits)
    earlier = forgotten if earlier is None else min(earlier, forgotten)
    return figures_of(window_of(simulate(schedule, workload, seed=seed, steps=steps + earlier).history, steps))


def forgotten_steps(limits: Limits) -> int:
    """Train steps after which a simulated run has forgotten its start."""
    return limits.max_staleness_steps + limits.sync_every + 2


@dataclass(frozen=True)
class Interval:
    """A figure over several seeds: their median, and the smallest and largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        ordered = sorted(values)
        middle = len(ordered) // 2
        mean = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
        return cls(mean, ordered[0], ordered[-1])


# -- which groups a schedule loses -------------------------------------------------------------------------------------

FATES = ("trained", "late", "cut", "dropped", "filtered", "failed")


@dataclass(frozen=True, kw_only=True)
class Fate:
    """The groups that ended in the same way."""

    groups: int
    tokens: float
    """Mean length of their responses, as far as they would have gone."""
    longest: float
    """Mean length of the longest response of each."""
    sources: Mapping[str, int]
    """Number of groups by data source."""


def fates_of(simulated: Simulated) -> dict[str, Fate]:
    """The groups of a simulated run by their end: `late` ones were trained in the last step that the bound allowed,
    `cut` ones were truncated there."""
    history, dice = simulated
    truncated = {attempt.group for attempt in history.attempts if attempt.reason == "truncated"}
    bound = dice.setting.limits.max_staleness_steps
    found: dict[str, list[GroupRow]] = defaultdict(list)
    for row in history.groups:
        fate = row.state
        if fate == "consumed":
            late = bound > 0 and row.staleness >= bound
            fate = "cut" if row.group in truncated else "late" if late else "trained"
        found[fate].append(row)
    return {fate: _fate(found[fate], dice) for fate in FATES if found[fate]}


def _fate(rows: Sequence[GroupRow], dice: WorkloadDice) -> Fate:
    ends = [[end * dice.token_size for end in dice.ends(row.group)] for row in rows]
    sources = Counter(dice.setting.prompt(row.group).source for row in rows)
    return Fate(
        groups=len(rows), tokens=fmean(fmean(one) for one in ends), longest=fmean(max(one) for one in ends),
        sources={name: sources[name] for name in sorted(sources) if name},
    )  # fmt: skip


# -- calibration -------------------------------------------------------------------------------------------------------


CLOSE = 0.01
"""A relative error of the seconds per step that is not worth another simulation."""
TRIALS = 5
FITS = (-0.4, 1.4)
"""The range of `Calibration.fit` where processes share hardware, whose slowdown is only roughly known."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The durations of a run's newest steps, and how well the simulated steps match the recorded ones."""

    window: Window
    schedule: Schedule
    fit: float
    """What makes the simulated steps take as long as the recorded ones. From 0 to 1, the spread of the time of a group
    beside its tokens, as a share of the recorded one: groups that wait together, such as those on a stalled replica,
    cost a step less than groups that wait apart, and the record does not say which did. Where processes share hardware,
    it may also be below 0: replicas are faster by this share than what was fitted; or above 1: they are slower."""
    recorded: ScheduleFigures
    simulated: ScheduleFigures
    _workloads: dict[int, Workload] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return len(self.window.steps)

    @property
    def most_responses(self) -> int:
        """Responses that a replica of the run sampled at once, at most."""
        return self.schedule.samples * most_at_once(self.window)

    def workload(self, seed: int = 0) -> Workload:
        """The durations. Seed 0: the best estimate; others: estimates from groups that are drawn from those of the run,
        with repetition, so that several seeds show how well the run tells its speeds."""
        if seed not in self._workloads:
            self._workloads[seed] = _fitted(calibrate(self.window, self.schedule, seed or None), self.fit)
        return self._workloads[seed]

    def predict(self, schedule: Schedule, seed: int = 0, *, resumed: bool = False) -> ScheduleFigures:
        """The figures of the run's steps under another schedule. `resumed`: the run begins with the first of them, so
        that no group is under way. Raises: `ConfigError`."""
        earlier = 0 if resumed else self.window.steps[0].step
        return predicted(schedule, self.workload(seed), seed=seed, steps=self.steps, earlier=earlier)


def calibrated(
    history: History, schedule: Schedule, *, steps: int, first: int = 0, rows: Sequence[Mapping[str, Any]] = (),
    trials: int = TRIALS,
) -> Calibration:  # fmt: skip
    """Find the durations of a run's newest steps, from step `first` on, and simulate these steps. `rows`: those of its
    metrics, which tell the data sources. `trials`: further simulations that may make them as long as the recorded ones.

    Raises: `ConfigError` if the record says too little."""
    window = window_of(history, steps, first, rows)
    recorded, workload = figures_of(window), calibrate(window, schedule)

    def tried(fit: float) -> ScheduleFigures:
        changed, earlier = _fitted(workload, fit), window.steps[0].step
        return predicted(schedule, changed, seed=0, steps=len(window.steps), earlier=earlier)

    def error(fit: float) -> float:
        return found[fit].step_s / recorded.step_s - 1

    found = {1.0: tried(1.0)}
    low, high = FITS if workload.shared.replica else (0.0, 1.0)
    fit = 1.0
    for _ in range(trials):
        if abs(error(fit)) < CLOSE or (fit == high and error(fit) < 0) or (fit == low and error(fit) > 0):
            break
        low, high = (low, fit) if error(fit) > 0 else (fit, high)
        fit = 0.0 if fit == 1.0 and error(fit) > 0 else (low + high) / 2
        found[fit] = tried(fit)
    fit = min(found, key=lambda one: abs(error(one)))
    if not 0.0 <= fit <= 1.0 and abs(error(fit)) > abs(error(1.0)) / 2:  # their speed hardly matters
        fit = 1.0
    return Calibration(window=window, schedule=schedule, fit=fit, recorded=recorded, simulated=found[fit])


def _fitted(workload: Workload, fit: float) -> Workload:
    replica, apart = workload.replica, min(max(fit, 0.0), 1.0)
    factor = 1 + fit if fit < 0 else max(1.0, fit)
    changed: dict[str, Any] = {
        name: getattr(replica, name) * factor for name in ("step_s", "response_s", "prefill_s", "prompt_s")
    }
    if isinstance(replica.overhead_s, list):
        mean = typical(replica.overhead_s)
        changed["overhead_s"] = [mean + (one - mean) * apart for one in replica.overhead_s]
    return workload.model_copy(update={"replica": replica.model_copy(update=changed)})
