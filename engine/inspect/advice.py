"""Advice on settings that would make a run faster, from the figures of its record.

Called by `engine explain`, for the table at the end of a run, and by `engine top`. Each candidate is a change of one
setting. `estimate` gives the time of the run's own work under it; the advice is what gains most. Must not read records.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from engine.errors import ConfigError
from engine.inspect.estimate import Durations, ScheduleSettings, estimate, finish_times, measure
from engine.metrics.history import WAITS, History
from engine.metrics.idle import LEAST_WAIT
from engine.policies.registry import DEFAULTS
from engine.scheduling.settings import FIGURES, POLICIES, changed_limits
from engine.states.limits import SYNC_MODES, Limits
from engine.states.process import REPLICA

MOST_LINES = 3
LEAST_GAIN = LEAST_WAIT
"""A smaller gain is not worth a change: it may be chance."""
BLOCKED = 0.5
"""Share of the time in which a coroutine holds its thread, from which on it is named."""
ENOUGH = 0.75
"""Among values of a setting with this share of the largest gain, the most cautious is advised."""
FEWEST_STEPS = 3
STALENESS, WORKERS = "scheduler.max_staleness_steps", "scheduler.max_concurrent_groups"
RANK_SPEEDUP = 0.8
"""What a further rank adds to the speed of the trainer, as a share of the first."""
OUTSIDE = ("starting", "restarting", "draining", "waiting_for_replicas", "no_prompts")
"""Times of the trainer that no setting of the schedule changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change of one setting."""

    setting: str
    before: Any
    value: Any
    faster: float
    """How many times as fast the run would have been, by the estimate."""
    needs_gpus: bool
    why: str
    """The figure of the run that it follows from."""
    cost: str = ""
    """What it costs, beside GPUs."""
    also: str = ""
    """Another setting that must follow."""

    @property
    def text(self) -> str:
        raised = isinstance(self.value, int) and self.value > self.before
        verb = "with more GPUs, raise" if self.needs_gpus else "raise" if raised else "set"
        details = [f"about {self.faster:.{1 if self.faster >= 1.195 else 2}f} × faster", self.why, self.cost]
        change = f"{verb} {self.setting} from {self.before} to {self.value}{self.also}"
        return f"{change}: {'; '.join(filter(None, details))}"

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "setting": self.setting, "before": self.before, "value": self.value, "faster": round(self.faster, 3),
            "needs_gpus": self.needs_gpus, "text": self.text,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Counsel:
    """All advice about a run, the best first, or why there is none."""

    causes: tuple[str, ...] = ()
    """The user's code for which the trainer waited longer than for anything else, and how to make it faster. No setting
    of the schedule helps then, so there is no other advice."""
    advice: tuple[Advice, ...] = ()
    none: str = ""
    limited: str = ""
    """How long the concurrency policy left slots idle, and what to change. No estimate covers it."""

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(filter(None, (*self.causes, *(one.text for one in self.advice), self.none, self.limited)))


def advise(history: History, *, gpus: bool = True) -> Counsel:
    """What user code to make faster, or at most three changes of settings that would have made the run faster, each on
    its own. `gpus`: whether there may be more GPUs for it."""
    limits = present_limits(history)
    if causes := _user_code(history):
        return Counsel(causes=causes)
    durations = measure(history, limits)
    slots = _slots(history, limits)
    if durations is None or len(durations.train) < FEWEST_STEPS or not slots:
        return Counsel(none=f"no advice yet: it needs {FEWEST_STEPS} finished train steps")
    if limits.trains_in_turns:
        return Counsel(none="no advice: the estimate does not cover a trainer and replicas that take turns on a pool")
    policies = {**DEFAULTS, **history.policies, **_changed_policies(history)}
    rolling = policies["sync"] == "rolling"
    case = _Case(history, durations, ScheduleSettings(limits=limits, slots=slots, rolling=rolling))
    free: list[Advice] = []
    paid: list[Advice] = []
    for candidates in (*FREE, *(PAID if gpus else ())):
        best = _best_of(case, candidates)
        if best is not None:
            (paid if best.needs_gpus else free).append(best)
    free = _by_gain(free)
    if any(one.setting == WORKERS for one in free):  # the bound has room for more: K comes first
        free.sort(key=lambda one: one.setting == STALENESS)
    chosen = tuple([*free, *_by_gain(paid)][:MOST_LINES])
    return Counsel(advice=chosen, none="" if chosen else case.bound(), limited=_limited(case, policies["concurrency"]))


def _by_gain(found: list[Advice]) -> list[Advice]:
    return sorted(found, key=lambda one: -one.faster)


def _limited(case: "_Case", policy: str) -> str:
    share = case.idle.get("concurrency", 0.0)
    if share < LEAST_WAIT:
        return ""
    fix = f"policy {policy} allowed no more groups; let it allow more, or use the policy slots"
    if policy == "kv-cache":
        fix = "KV caches were full; give them more memory (rollout.engine_args), or lower rollout.max_tokens"
    return f"{percent(share)} of slot time was idle because of scheduler.policies.concurrency: {fix}"


def present_limits(history: History) -> Limits:
    """The limits at the end of the record, with all live changes."""
    limits = Limits.from_plain(dict(history.limits))
    for _, setting, value in history.settings:
        if setting in FIGURES:
            limits = changed_limits(limits, setting, value)
    return limits


def _changed_policies(history: History) -> dict[str, str]:
    changed = [(setting, value) for _, setting, value in history.settings if setting.startswith(POLICIES)]
    return {setting.removeprefix(POLICIES): value for setting, value in changed}


def _slots(history: History, limits: Limits) -> tuple[int, ...]:
    """Slots of the replicas that generate and were not lost for good, without the share that the concurrency policy
    left idle."""
    slot_s = history.busy_s + sum(history.idle_s.values())
    allowed = 1 - history.idle_s.get("concurrency", 0.0) / (slot_s or 1.0)
    newest = {life.index: life.outcome for life in history.lives if life.kind == REPLICA}
    found = [
        max(1, round(slots * allowed))
        for replica, slots in sorted(history.slots.items())
        if newest.get(replica) != "lost" and not limits.validates_only(replica)
    ]
    return tuple(found)


# -- user code that the trainer waits for ------------------------------------------------------------------------------


USER_CODE = {
    "agent": "agents or environments", "reward": "rewards, the trajectory store or an added state",
    "waiting_for_prompts": "the data source", "inspecting": "the work of an added state on batches or weights",
}  # fmt: skip
"""Causes of waits in the user's code."""
OF_GROUPS = ("agent", "reward", "waiting_for_prompts", "weight_sync", "pool", "concurrency")
"""Causes of idle slots that make a group take longer. The others, such as the bounds, only follow from a wait."""
GENERATION = "generation"


def _user_code(history: History) -> tuple[str, ...]:
    """The user's code for which the trainer waited, if it did so for longer than it did anything else."""
    sums: dict[str, float] = defaultdict(float)
    for span in history.idle:
        parts = {GENERATION: span.busy_s} | {cause: s for cause, s in span.idle_s if cause in OF_GROUPS}
        if span.trainer not in WAITS or not sum(parts.values()):
            parts = {} if span.trainer in OUTSIDE else {span.trainer: 1.0}
        for cause, amount in parts.items():
            sums[cause] += (span.end - span.start) * amount / sum(parts.values())
    if _blocked(history):  # whatever samples on its thread waits for it, too
        sums["agent"] += sums.pop(GENERATION, 0.0)
    most = max(sums, key=lambda cause: sums[cause], default="")
    if most not in USER_CODE or not history.trained:
        return ()
    shares = {cause: sums[cause] / sum(sums.values()) for cause in sorted(USER_CODE, key=lambda cause: -sums[cause])}
    return tuple(_said(history, cause, share) for cause, share in shares.items() if share >= LEAST_WAIT)


def _blocked(history: History) -> float:
    """The share of the time in which the coroutine of agents held its thread; 0 below `BLOCKED`."""
    _, calls = history.slowest("agent") or ("", None)
    share = calls.held_s / calls.watched_s if calls and calls.at_once > 1 and calls.watched_s else 0.0
    return min(1.0, share) if share >= BLOCKED else 0.0


def _said(history: History, cause: str, share: float) -> str:
    """`the trainer waited 71 % of the time for reward slow: raise reward.concurrency; 2 s a call, 4 at once`."""
    name, calls = history.slowest(cause) or (USER_CODE[cause], None)
    fix = "make it faster"
    if cause == "agent":
        fix = "let no call block the thread of the agents, and use one client for all rollouts"
        if held := _blocked(history):
            fix = f"its coroutine blocks its thread {percent(held)} of the time: use asyncio.to_thread for slow calls"
    elif cause == "reward" and calls is None:
        fix = "raise reward.concurrency, or the concurrency of the state"
    elif calls is not None and calls.queued and calls.setting:
        fix = f"raise {calls.setting}"
    figures = f"; {calls.seconds / max(1, calls.calls):.2g} s a call, {calls.at_once} at once" if calls else ""
    return f"the trainer waited {percent(share)} of the time for {name}: {fix}{figures}"


# -- what a run is compared with ---------------------------------------------------------------------------------------


class _Case:
    """A run, as the candidates see it."""

    def __init__(self, history: History, durations: Durations, settings: ScheduleSettings) -> None:
        self.history, self.durations, self.settings = history, durations, settings
        self.limits = settings.limits
        finished = finish_times(durations, settings)
        self.seconds = finished[-1]
        self.otherwise = durations.reversed()
        self.otherwise_s = estimate(self.otherwise, settings)
        times = {task: s for task, s in history.trainer_s.items() if task not in OUTSIDE}
        whole = sum(times.values()) or 1.0
        self.trainer = {task: s / whole for task, s in times.items()}
        slot_s = history.busy_s + sum(s for cause, s in history.idle_s.items() if cause not in OUTSIDE)
        self.busy = history.busy_s / (slot_s or 1.0)
        self.idle = {cause: s / (slot_s or 1.0) for cause, s in history.idle_s.items() if cause not in OUTSIDE}
        self.least_gain = max(LEAST_GAIN, self._error(finished))

    def faster(self, settings: ScheduleSettings) -> float:
        return self.seconds / estimate(self.durations, settings)

    def is_chance(self, settings: ScheduleSettings) -> bool:
        """Whether a gain needs the order in which groups came: there is none if they come in reverse."""
        return self.otherwise_s / estimate(self.otherwise, settings) < 1 + self.least_gain

    def _error(self, finished: list[float]) -> float:
        """How far the estimated times of the steps are from the record. A gain below that may be an error."""
        steps = [step for step in self.history.trained if step.finished_at >= 0 and step.groups]
        steps = steps[-len(self.durations.train) :]
        first, last = steps[0].finished_at, steps[-1].finished_at
        lost = sum(
            min(span.end, last) - max(span.start, first)
            for span in self.history.idle
            if span.trainer in OUTSIDE and span.end > first and span.start < last
        )
        recorded = last - first - lost
        return abs((finished[-1] - finished[0]) / recorded - 1) if recorded > 0 else 0.0

    def share(self, task: str) -> str:
        return percent(self.trainer.get(task, 0.0))

    def bound(self) -> str:
        """Why no setting is advised: what bounds the run as it is."""
        trains = self.trainer.get("training", 0.0) + self.trainer.get("scoring", 0.0)
        late = self.trainer.get("waiting_for_stragglers", 0.0)
        if late > max(trains, self.busy):
            fix = "make groups finish sooner (lower rollout.max_tokens, agent.timeout_s or environment.timeout_s), or "
            fix += "skip late groups (scheduler.policies.deadline)"
            return f"no advice: the trainer waited {percent(late)} of the time for groups at their deadline; {fix}"
        busy = f"the trainer was busy {percent(trains)} of the time, and slots {percent(self.busy)}"
        return f"no setting would make the run much faster: {busy}"

    def with_limits(self, **fields: Any) -> ScheduleSettings:
        return replace(self.settings, limits=replace(self.limits, **fields))


def percent(share: float) -> str:
    """`38 %`; `< 1 %` for a share that rounds to 0 without being 0."""
    return "< 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


Candidate = tuple[Advice, ScheduleSettings]
"""A change whose gain is not known yet, and the settings after it."""


def _best_of(case: _Case, candidates: Callable[[_Case], Iterator[Candidate]]) -> Advice | None:
    """The most cautious of the values of a setting that gain about as much as the best; None if none gains enough."""
    found: list[Candidate] = []
    with suppress(ConfigError):  # the laws allow no further value
        for advice, settings in candidates(case):
            found.append((replace(advice, faster=case.faster(settings)), settings))
    most = max((advice.faster for advice, _ in found), default=0.0)
    if most < 1 + case.least_gain:
        return None
    enough = [one for one in found if one[0].faster - 1 >= ENOUGH * (most - 1)]
    return next((advice for advice, settings in enough if not case.is_chance(settings)), None)


def _change(setting: str, before: Any, value: Any, why: str, *, needs_gpus: bool = False, **more: str) -> Advice:
    return Advice(setting=setting, before=before, value=value, faster=1.0, needs_gpus=needs_gpus, why=why, **more)


# -- the candidates, the most cautious value first ---------------------------------------------------------------------


def _staleness(case: _Case) -> Iterator[Candidate]:
    limits, before = case.limits, case.limits.max_staleness_steps
    waited = case.trainer.get("waiting_for_stragglers", 0.0)
    why = f"{percent(case.idle.get('staleness_bound', 0.0))} of slot time was idle because the bound was reached"
    if waited > case.idle.get("staleness_bound", 0.0):
        why = f"the trainer waited {percent(waited)} of the time for groups at their deadline"
    for value in (before + 1, before + 2):
        most = limits.train_batch_size * (value + 1)
        workers = max(limits.max_concurrent_groups, min(most, sum(case.settings.slots)))
        also = "" if workers == limits.max_concurrent_groups else _also_workers(case, workers)
        settings = case.with_limits(max_staleness_steps=value, max_concurrent_groups=workers)
        if limits.async_ratio is None:
            cost = "staleness increases"
            yield _change(STALENESS, before, value, why, cost=cost, also=also), settings


def _also_workers(case: _Case, workers: int) -> str:
    """K must follow S or the replicas, unless the configuration leaves it to the engine."""
    if case.history.config.get("scheduler", {}).get("max_concurrent_groups") == 0:
        return ""
    return f" and {WORKERS} from {case.limits.max_concurrent_groups} to {workers}"


def _workers(case: _Case) -> Iterator[Candidate]:
    limits, before, slots = case.limits, case.limits.max_concurrent_groups, sum(case.settings.slots)
    most = limits.ahead + limits.surplus
    why = f"{percent(case.idle.get('worker_bound', 0.0))} of slot time was idle because K groups were running"
    for value in sorted({min(most, slots), min(most, ceil(slots / case.durations.slot_share))}):
        if value > before:
            settings = case.with_limits(max_concurrent_groups=value)
            yield _change(WORKERS, before, value, why, cost="groups on a replica may slow each other down"), settings


def _sync_time(case: _Case) -> str:
    return f"weight syncs took {percent(case.idle.get('weight_sync', 0.0))} of slot time"


def _sync_mode(case: _Case) -> Iterator[Candidate]:
    costs = {"keep": "responses mix tokens of several versions", "abort": "interrupted groups are prefilled again"}
    for mode in SYNC_MODES:
        if mode in costs and mode != case.limits.sync_mode:
            settings = case.with_limits(sync_mode=mode)
            before = case.limits.sync_mode
            yield _change("rollout.sync_mode", before, mode, _sync_time(case), cost=costs[mode]), settings


def _sync_order(case: _Case) -> Iterator[Candidate]:
    orders = ("together", "rolling")
    before, value = orders[case.settings.rolling], orders[not case.settings.rolling]
    settings = replace(case.settings, rolling=not case.settings.rolling)
    yield _change("rollout.sync_order", before, value, _sync_time(case)), settings


def _sync_every(case: _Case) -> Iterator[Candidate]:
    before = case.limits.sync_every
    why = f"{_sync_time(case)}, and publications {case.share('publishing')} of the time"
    settings = case.with_limits(sync_every=2 * before)
    yield _change("scheduler.sync_every", before, 2 * before, why, cost="responses come from older weights"), settings


def _validation(case: _Case) -> Iterator[Candidate]:
    limits = case.limits.validation
    if limits is None or not limits.every or limits.own:
        return
    measuring = sum(chunk.end - chunk.start for chunk in case.history.chunks)
    slot_s = case.history.busy_s + sum(case.history.idle_s.values())
    why = f"validation rows took {percent(measuring / slot_s)} of slot time, and delayed weight syncs"
    for value in (2 * limits.every, 4 * limits.every):
        settings = case.with_limits(validation=replace(limits, every=value))
        yield _change("validation.every", limits.every, value, why, cost="fewer validations"), settings


def _replicas(case: _Case) -> Iterator[Candidate]:
    limits, before = case.limits, len(case.settings.slots)
    waited = case.trainer.get("waiting_for_groups", 0.0) + case.trainer.get("waiting_for_stragglers", 0.0)
    why = f"the trainer waited {percent(waited)} of the time for groups, and slots were busy {percent(case.busy)}"
    for value in (before + 1, 2 * before):
        slots = (*case.settings.slots, *[max(case.settings.slots)] * (value - before))
        workers = max(limits.max_concurrent_groups, min(limits.ahead + limits.surplus, sum(slots)))
        also = "" if workers == limits.max_concurrent_groups else _also_workers(case, workers)
        settings = replace(case.with_limits(max_concurrent_groups=workers), slots=slots)
        yield _change("rollout.replicas", before, value, why, needs_gpus=True, also=also), settings


def _ranks(case: _Case) -> Iterator[Candidate]:
    before = int(case.history.config.get("trainer", {}).get("ranks", 1))
    trains = case.trainer.get("training", 0.0) + case.trainer.get("scoring", 0.0)
    speed = (1 + RANK_SPEEDUP * (2 * before - 1)) / (1 + RANK_SPEEDUP * (before - 1))
    why = f"the trainer was busy {percent(trains)} of the time"
    settings = replace(case.settings, train_speed=speed)
    yield _change("trainer.ranks", before, 2 * before, why, needs_gpus=True), settings


FREE: tuple[Callable[[_Case], Iterator[Candidate]], ...] = (
    _workers, _sync_order, _sync_mode, _validation, _sync_every, _staleness,
)  # fmt: skip
PAID: tuple[Callable[[_Case], Iterator[Candidate]], ...] = (_replicas, _ranks)
