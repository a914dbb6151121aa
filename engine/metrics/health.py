"""Common training failures, found in the rows of the newest train steps: one list of checks.

Called by `status`, for the live view and `engine top`, by `export`, for alerts, and by `engine show`. Pure. A check
needs some figures of the rows; where a trainer does not report them, it finds nothing. A sentence has no figure that
changes from step to step, so that a view prints it once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf, sqrt
from statistics import fmean
from typing import Any

from engine.reward_histogram import HISTOGRAMS, REWARD, value_range

Row = Mapping[str, Any]

STEPS = 5
"""Train steps in a row in which something must hold."""
WINDOW = 32
"""Number of the newest train steps that the checks read."""
SCALE_FACTOR = 10.0
"""Growth of the largest reward, in absolute value, that is reported."""
LENGTH_FACTOR = 3.0
"""Growth of the tokens of a group that is reported."""
TRUNCATED = 0.5
REPEATED = 0.95
"""Shares of responses that are reported."""
START, LONG = 8, 48
"""Rewards are compared with those of the first `START` train steps, once `LONG` steps are trained."""
SMALL = 0.5
"""If no response is right, a reward up to this counts as a part of the reward of a right answer."""
SOLVED = 0.8
"""Share of the way from the smallest to the largest reward. If the mean reward is there, little is left to learn."""
CLEAR, SLIGHT = 2.0, 1.0
"""Number of standard errors by which a reward must rise to rise clearly, or slightly."""
LEARN = (
    "let the model imitate right answers for longer (model.warm_start), or begin with easier prompts; "
    "see docs/BOTTLENECK.md#a-reward-that-does-not-rise"
)
GAP = 0.5
"""Mean gap between the log-probs of sampler and trainer that is reported, as by the alert `EngineLogprobGap`."""
GAP_FACTOR = 3.0
"""Growth of a mean gap that is reported, once the gap is at least `GAP_GROWN`."""
GAP_GROWN = 0.1
GAPS = "logprob_gap_mean_"
"""Prefix of the mean gaps by cause."""


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """A common training failure."""

    check: str
    text: str
    """A sentence that says what to do."""


def findings(rows: Sequence[Row], first: Sequence[Row] = ()) -> list[HealthFinding]:
    """What train steps show. `rows`: the newest, oldest first. `first`: the first rows of the run, if `rows` begins
    later."""
    newest = rows[-WINDOW:]
    if len(newest) < STEPS:
        return []
    found = {name: text for name, check in CHECKS.items() if (text := check(newest))}
    if text := _no_progress((first or rows)[:START], newest):
        found[NO_PROGRESS] = text
    hidden = {effect for cause in found for effect in EFFECTS.get(cause, ())}
    return [HealthFinding(name, text) for name, text in found.items() if name not in hidden]


def run_findings(
    rows: Sequence[Row], versions: Mapping[int, int], newest: int, staleness: int, first: Sequence[Row] = (),
    validations: Sequence[Row] = (),
) -> list[HealthFinding]:  # fmt: skip
    """What the newest rows of train steps and of validations in `metrics.jsonl`, the first rows of the run and the
    weights versions of the replicas that are up show. `staleness`: the bound S. After a resume, replicas may have
    version 0 until the trainer has trained stored steps again."""
    steps = [row for row in rows if "step" in row]
    late = replicas_behind(versions, newest, staleness + 1) if len(steps) >= STEPS else []
    return [*findings(steps, first), *late, *failed_responses(validations)]


def failed_responses(validations: Sequence[Row]) -> list[HealthFinding]:
    """Whether responses of the newest reported validation failed or were dropped. `validations`: rows, oldest first."""
    newest = next((row for row in reversed(validations) if row.get("outcome") == "reported"), {})
    if not newest.get("failed_share"):
        return []
    failed, rows = newest["rows"] - newest["measured"], newest["rows"]
    text = f"{failed} of {rows} validation responses ({newest['failed_share']:.0%}) failed and count as wrong"
    return [HealthFinding(FAILED_RESPONSES, f"{text}: {newest['reason']}")]


def replicas_behind(versions: Mapping[int, int], newest: int, most: int) -> list[HealthFinding]:
    """Replicas that are up with weights more than `most` versions old."""
    late = [id for id, version in versions.items() if newest - version > most]
    if not late:
        return []
    names = f"replica{'s' * (len(late) > 1)} {', '.join(map(str, late[:8]))}"
    text = f"{names} did not install the newest {most} weights versions: `engine waits` says what they wait for"
    return [HealthFinding(OLD_WEIGHTS, text)]


def _flat_reward(rows: Sequence[Row]) -> str:
    def is_flat(row: Row) -> bool:
        ends = value_range(row)
        same = ends is not None and ends[0] == ends[1]
        return same or bool(row.get("groups") and row.get("zero_advantage_groups") == row["groups"])

    if not all(map(is_flat, rows[-STEPS:])):
        return ""
    least, most = value_range(rows[-1]) or (0.0, 0.0)
    if 0 < least == most and all(value_range(row) == (least, most) for row in rows[-STEPS:]):
        return (
            f"in each of the last {STEPS} train steps, every response got the reward {most:g}, so the model learned "
            "nothing; it may already solve these prompts: use harder ones, or check the reward with `engine samples`"
        )
    return (
        f"in each of the last {STEPS} train steps, all responses to a prompt got the same reward, so the "
        "model learned nothing: check the reward with `engine samples`, or use easier or harder prompts"
    )


def _never_right(rows: Sequence[Row]) -> str:
    ranges = [value_range(row) for row in rows]
    if all(one == (0.0, 0.0) for one in ranges):
        return f"for at least {STEPS} train steps, every response got the reward 0: {LEARN}"
    small = all(one is not None and one[0] >= 0.0 and one[1] <= SMALL for one in ranges)
    rewards = [number for row in rows if (number := _number(row, "reward_mean")) is not None]
    if len(rows) < 2 * STEPS or len(rewards) < len(rows) or not small:
        return ""
    if any(_number(row, "accuracy") != 0.0 for row in rows) or _rise(rewards, rewards[:STEPS], STEPS) > CLEAR:
        return ""
    return f"for at least {2 * STEPS} train steps, no response was right and the reward did not rise: {LEARN}"


def _no_progress(first: Sequence[Row], rows: Sequence[Row]) -> str:
    """`first`: the first rows of the run."""
    begins = [row.get("step") for row in first] == [*range(START)]
    rewards = [number for row in (*first, *rows) if (number := _number(row, "reward_mean")) is not None]
    ranges = [one for row in rows if (one := value_range(row)) is not None]
    if not begins or rows[-1]["step"] + 1 < LONG or len(rewards) < START + WINDOW or len(ranges) < WINDOW:
        return ""
    low, high = min(one[0] for one in ranges), max(one[1] for one in ranges)
    newest = rewards[START:]
    solved = fmean(newest[-WINDOW // 2 :]) >= low + SOLVED * (high - low)
    if solved or _rise(newest, rewards[:START], WINDOW // 2) > SLIGHT:
        return ""
    return (
        f"the reward is not higher than in the first {START} train steps, although responses get different rewards: "
        f"raise trainer.learning_rate, or {LEARN}"
    )


def _rise(newest: Sequence[float], old: Sequence[float], count: int) -> float:
    """By how many standard errors the mean of the newest `count` values is above that of old ones. Differences of
    neighbors among the newest values give the noise, so a trend does not count as noise."""
    steps = [(after - before) ** 2 / 2 for before, after in pairwise(newest)]
    error = sqrt(fmean(steps) * (1 / count + 1 / len(old)))
    rise = fmean(newest[-count:]) - fmean(old)
    return rise / error if error else inf if rise > 0 else 0.0


def _reward_scale(rows: Sequence[Row]) -> str:
    def scale(row: Row) -> float | None:
        ends = value_range(row)
        return None if ends is None else max(map(abs, ends))

    if not _grown(rows, scale, SCALE_FACTOR):
        return ""
    return (
        f"the largest rewards have grown more than {SCALE_FACTOR:g} times within {WINDOW} train steps: bound the "
        "reward, or look for responses that exploit it with `engine samples --best 5`"
    )


def _one_part(rows: Sequence[Row]) -> str:
    names = [name for name in rows[-1].get(HISTOGRAMS) or () if name != REWARD]
    values = {name: {row.get(name) for row in rows[-2 * STEPS :]} for name in names}
    moving = [name for name in names if len(values[name]) > 1]
    if len(rows) < 2 * STEPS or len(names) < 2 or len(moving) != 1:
        return ""
    part = moving[0].removeprefix("reward_")
    return (
        f"only the reward `{part}` changed in the last {2 * STEPS} train steps; the "
        "other rewards are constant: check them with `engine samples`"
    )


def _lengths(rows: Sequence[Row]) -> str:
    def tokens(row: Row) -> float | None:
        return row["tokens"] / row["groups"] if row.get("tokens") and row.get("groups") else None

    if not _grown(rows, tokens, LENGTH_FACTOR):
        return ""
    return (
        f"responses have become more than {LENGTH_FACTOR:g} times as long within {WINDOW} train steps: look for loops "
        "with `engine samples`, lower rollout.max_tokens, or set a penalty for long responses"
    )


def _truncated(rows: Sequence[Row]) -> str:
    if not _each(rows, "truncated_share", TRUNCATED):
        return ""
    return (
        f"at least {TRUNCATED:.0%} of the responses of each of the last {STEPS} train steps were cut off: raise "
        "rollout.max_tokens"
    )


def _repeated(rows: Sequence[Row]) -> str:
    if not _each(rows, "repeated_share", REPEATED):
        return ""
    return (
        f"at least {REPEATED:.0%} of the responses of each of the last {STEPS} train steps repeat another response of "
        "their group: raise rollout.temperature or trainer.entropy_coef"
    )


def _logprob_gap(rows: Sequence[Row]) -> str:
    gaps = sorted(name for name in rows[-1] if name.startswith(GAPS))
    large = [name for name in gaps if _each(rows, name, GAP)]
    grown = [
        name for name in gaps if _each(rows, name, GAP_GROWN) and _grown(rows, partial(_number, name=name), GAP_FACTOR)
    ]
    causes = ", ".join(name.removeprefix(GAPS) for name in large or grown)
    if not causes:
        return ""
    how = f"differ by more than {GAP:g} on average"
    if not large:
        how = f"differ more than {GAP_FACTOR:g} times as much as at the start of the newest {WINDOW} train steps"
    return f"the log-probs of sampler and trainer {how} for {causes} tokens: docs/OBJECTIVES.md explains the gaps"


def _no_update(rows: Sequence[Row]) -> str:
    for name, fix in (("lr", "raise trainer.learning_rate or lr_total_steps"), ("grad_norm", "check the loss")):
        if all(_number(row, name) == 0.0 for row in rows[-STEPS:]):
            return f"the weights do not change: {name} was 0 in each of the last {STEPS} train steps: {fix}"
    return ""


def _unused_source(rows: Sequence[Row]) -> str:
    sources = rows[-1].get("sources") or {}
    unused = [name for name, figures in sources.items() if figures.get("drawn") == 0]
    if len(rows) < WINDOW or not unused:
        return ""
    names = ", ".join(f"`{name}`" for name in unused)
    return f"no prompt of data.sources {names} has been drawn: raise its weight, or look when its curriculum begins"


NO_PROGRESS = "no_progress"
CHECKS: dict[str, Callable[[Sequence[Row]], str]] = {
    "long_responses": _lengths,
    "truncated": _truncated,
    "never_right": _never_right,
    "flat_reward": _flat_reward,
    "reward_scale": _reward_scale,
    "one_reward": _one_part,
    "repeated": _repeated,
    "logprob_gap": _logprob_gap,
    "no_update": _no_update,
    "unused_source": _unused_source,
}
"""Each gets the newest rows, at least `STEPS` of them, and returns a sentence, or nothing. Causes come before their
effects: responses that are cut off get no reward."""
OLD_WEIGHTS, FAILED_RESPONSES = "old_weights", "failed_responses"
ALL_CHECKS = (*CHECKS, NO_PROGRESS, OLD_WEIGHTS, FAILED_RESPONSES)
"""Every value of `HealthFinding.check`."""
EFFECTS = {
    "never_right": ("flat_reward", "no_update", NO_PROGRESS),
    "flat_reward": ("no_update", NO_PROGRESS),
    "no_update": (NO_PROGRESS,),
}
"""Checks that also find something whenever the key does: `findings` leaves them out then."""


def _number(row: Row, name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def _each(rows: Sequence[Row], name: str, least: float) -> bool:
    """Whether a figure was at least this large in each of the newest steps."""
    return all((value := _number(row, name)) is not None and value >= least for row in rows[-STEPS:])


def _grown(rows: Sequence[Row], figure: Callable[[Row], float | None], factor: float) -> bool:
    """Whether the mean of a figure over the newest steps is more than `factor` times that over the oldest ones."""

    def known(some: Sequence[Row]) -> Iterator[float]:
        return (value for row in some if (value := figure(row)) is not None)

    old, new = [*known(rows[:STEPS])], [*known(rows[-STEPS:])]
    return len(rows) >= 2 * STEPS and len(old) == len(new) == STEPS and fmean(new) > factor * fmean(old) > 0
