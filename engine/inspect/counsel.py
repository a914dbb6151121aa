"""What to change in a run: user code that the trainer waits for, and the words for advice on settings.

`simulation.advice` finds the settings. `engine explain`, the report, the table at the end of a run and `engine top`
show a `Counsel`. Must not read records.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.metrics.history import WAITS, History
from engine.metrics.idle import LEAST_WAIT

BLOCKED = 0.5
"""Share of the time in which a coroutine holds its thread, from which on it is named."""
OUTSIDE = ("starting", "restarting", "draining", "waiting_for_replicas", "no_prompts")
"""Times that no setting of the schedule changes."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of one setting."""

    setting: str
    before: Any
    value: Any
    why: str
    """The figure of the run that it follows from."""
    faster: float = 1.0
    """How many times as fast the simulated run is with it."""
    simulated: str = ""
    """Over how many steps, and how well the simulation matches the record."""
    needs_gpus: bool = False
    cost: str = ""
    """What it costs, beside GPUs."""
    also: str = ""
    """Another setting that must follow."""

    @property
    def text(self) -> str:
        raised = isinstance(self.value, int) and self.value > self.before
        verb = "with more GPUs, raise" if self.needs_gpus else "raise" if raised else "set"
        faster = f"about {self.faster:.{1 if self.faster >= 1.195 else 2}f} × faster, {self.simulated}"
        change = f"{verb} {self.setting} from {self.before} to {self.value}{self.also}"
        return f"{change}: {'; '.join(filter(None, (faster, self.why, self.cost)))}"

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
    notes: tuple[str, ...] = ()
    """Why there is no advice; what was not simulated; what no setting of the schedule changes."""

    @property
    def lines(self) -> tuple[str, ...]:
        return (*self.causes, *(one.text for one in self.advice), *self.notes)


# -- user code that the trainer waits for ------------------------------------------------------------------------------


USER_CODE = {
    "agent": "agents or environments", "reward": "rewards, the trajectory store or an added state",
    "waiting_for_prompts": "the data source", "inspecting": "the work of an added state on batches or weights",
}  # fmt: skip
"""Causes of waits in the user's code."""
OF_GROUPS = ("agent", "reward", "waiting_for_prompts", "weight_sync", "pool", "concurrency")
"""Causes of idle slots that make a group take longer. The others, such as the bounds, only follow from a wait."""
GENERATION = "generation"


def user_code(history: History) -> tuple[str, ...]:
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


# -- why no setting helps ----------------------------------------------------------------------------------------------


def bound_of(trainer: Mapping[str, float], slots: Mapping[str, float]) -> str:
    """What bounds a run that no setting makes faster. Both: shares of the time, by task or cause."""
    trains = trainer.get("training", 0.0) + trainer.get("scoring", 0.0)
    late, busy = trainer.get("waiting_for_stragglers", 0.0), slots.get("busy", 0.0)
    if late > max(trains, busy):
        fix = "make groups finish sooner (lower rollout.max_tokens, agent.timeout_s or environment.timeout_s), or "
        fix += "skip late groups (scheduler.policies.deadline)"
        return f"no advice: the trainer waited {percent(late)} of the time for groups at their deadline; {fix}"
    works = f"the trainer was busy {percent(trains)} of the time, and slots {percent(busy)}"
    return f"no setting would make the run much faster: {works}"


def limited_slots(share: float, policy: str) -> str:
    """How long the concurrency policy left slots idle, and what to change."""
    fix = f"policy {policy} allowed no more groups; let it allow more, or use the policy slots"
    if policy == "kv-cache":
        fix = "KV caches were full; give them more memory (rollout.engine_args), or lower rollout.max_tokens"
    return f"{percent(share)} of slot time was idle because of scheduler.policies.concurrency: {fix}"


def percent(share: float) -> str:
    """`38 %`; `< 1 %` for a share that rounds to 0 without being 0."""
    return "< 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"
