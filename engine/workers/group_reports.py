"""Checks the groups that a user's generator returns, names the first problem, and builds the events about them.

Called by `replica.ReplicaWorker` for every group. A malformed group must never reach the scheduler, whose laws it would
break, or the trainer; its attempt fails with the reason. Events have lengths, versions and rewards, never tokens.
"""

import asyncio
import json
import operator
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from engine.errors import DataFailure, EngineError
from engine.events import GroupAborted, GroupGenerated, OrderDone, PrefixStored
from engine.ids import NO_VERSION, GroupId, Incarnation, ReplicaId, Version
from engine.protocols import Generated, GroupWork
from engine.trajectory import Prompt, Span, Trajectory, TrajectoryGroup

TYPES = {
    "prompt_ids": list, "token_ids": list, "logprobs": list, "loss_mask": list, "spans": list, "finish_reason": str,
    "continues": bool, "figures": dict, "shown_prompt": str, "routes": list,
}  # fmt: skip
"""Fields of a trajectory that its generator sets."""
JUDGED = {"text": str, "unparsable": bool, "reward_parts": dict, "step_rewards": list}
"""Fields, apart from the reward, that the work of an added state may change."""
LARGEST_ID = 2**31 - 1
LARGEST_SEEN = 1e300
"""Larger numbers, NaN and infinities are no JSON that every reader takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Which weights versions the tokens of a group may have."""

    admitted: Version
    """The oldest version that any token of the group may have, on any replica."""
    oldest: Version
    """The oldest version that a token of `GroupWork.partial` or of this attempt may have."""
    newest: Version
    """The replica's version."""


def check_generated(
    work: GroupWork, generated: Any, versions: Versions, *, rewarded: bool = True, known: Sequence[int] = ()
) -> None:
    """Raise unless `generated` answers `work` with tokens of `versions`. If not `rewarded`, rewards may be missing.
    `known`: for each trajectory, the number of its first tokens that were checked before.

    Raises: `DataFailure` for a reward that is missing or not finite and for rewards too large to add up, `EngineError`
    for any other fault.
    """
    if not isinstance(generated, Generated) or not isinstance(generated.group, TrajectoryGroup):
        what = type(generated.group).__name__ if isinstance(generated, Generated) else type(generated).__name__
        raise EngineError(f"generate() must return Generated(group=TrajectoryGroup(...)), not {what}")
    group = generated.group
    problem = _group_problem(work, generated, versions)
    if problem:
        raise EngineError(f"generate() returned {problem}", group=work.group)
    count = sum(not getattr(trajectory, "continues", False) for trajectory in group.trajectories)
    if count != work.samples and not (generated.aborted and count < work.samples):
        raise EngineError(f"generate() returned {count} trajectories, not the {work.samples} asked for")
    kept = generated.oldest_version
    oldest = versions.oldest if kept is None else min(versions.oldest, kept)
    for index, trajectory in enumerate(group.trajectories):
        checked = known[index] if known else 0
        problem = shape_problem(trajectory, oldest, versions.newest, finished=not generated.aborted, known=checked)
        problem = problem or segment_problem(group.trajectories, index)
        if problem:
            raise EngineError(
                f"trajectory {index} of group {work.group}: {problem}", group=work.group, trajectory=index
            )
    if not generated.aborted:
        for index, trajectory in enumerate(group.trajectories):
            left_out = trajectory.reward is None and not rewarded
            problem = "" if left_out else reward_problem(trajectory.reward) or steps_problem(trajectory)
            if problem:
                story = f"trajectory {index} of group {work.group} (prompt row {work.prompt.row}): {problem}"
                raise DataFailure(story, group=work.group, trajectory=index, row=work.prompt.row)
        problem = rewards_problem(group)
        if problem:
            story = f"group {work.group} (prompt row {work.prompt.row}): {problem}"
            raise DataFailure(story, group=work.group, row=work.prompt.row)


def checked_count(count: Any, group: GroupId, samples: int) -> int:
    """The argument of `GroupWork.finished`, as an int. Raises: `EngineError`."""
    try:
        number = -1 if isinstance(count, bool) else operator.index(count)
    except TypeError:
        number = -1
    if not 0 <= number <= samples:
        law = f"give a whole number from 0 to {samples}, how many of its trajectories have ended"
        raise EngineError(f"finished({count!r:.80}) of group {group}: {law}", group=group)
    return number


def _group_problem(work: GroupWork, generated: Any, versions: Versions) -> str:
    """The problem of a group apart from its trajectories, in words; empty if there is none."""
    group: Any = generated.group
    kept, aborted = generated.oldest_version, generated.aborted
    if group.group != work.group:
        return f"group {group.group!r:.80}, but was given group {work.group}"
    if not isinstance(group.prompt, Prompt) or group.prompt.row != work.prompt.row:
        return f"group {work.group} with another prompt than the given one, of row {work.prompt.row}"
    if not isinstance(group.trajectories, list):
        return f"trajectories as a {type(group.trajectories).__name__}, not as a list"
    if not isinstance(aborted, bool):
        return f"aborted={aborted!r:.80}, which must be True or False"
    if kept is not None and (type(kept) is not int or not versions.admitted <= kept <= versions.newest):
        law = f"must be None or an int from {versions.admitted} to {versions.newest}"
        return f"oldest_version={kept!r:.80}, which {law}, the versions that group {work.group} may have"
    return ""


def shape_problem(trajectory: Any, oldest: Version, newest: Version, *, finished: bool, known: int = 0) -> str:
    """The problem of a trajectory, in words; empty if there is none. `known`: see `check_generated`."""
    if not isinstance(trajectory, Trajectory):
        return f"it is a {type(trajectory).__name__}, not a Trajectory"
    problem = _types_problem(trajectory, TYPES) or _numbers_problem("figures", trajectory.figures)
    problem = problem or judged_problem(trajectory)
    problem = problem or ("" if known else _ids_problem("prompt_ids", trajectory.prompt_ids))
    problem = problem or _ids_problem("token_ids", trajectory.token_ids[known:])
    if problem:
        return problem
    tokens = len(trajectory.token_ids)
    if len(trajectory.logprobs) != tokens or len(trajectory.loss_mask) != tokens:
        return (
            f"{tokens} token_ids, {len(trajectory.logprobs)} logprobs and {len(trajectory.loss_mask)} loss_mask "
            "entries must have the same length"
        )
    if finished and not trajectory.finish_reason:
        return "it has no finish_reason, but the group is not reported as aborted"
    if tokens and not all_finite(trajectory.logprobs[known:]):
        return "a log-prob is not a finite number"
    mask = trajectory.loss_mask[known:]
    if mask.count(0) + mask.count(1) != len(mask):
        return "loss_mask must hold only 0 and 1"
    return _spans_problem(trajectory, tokens, oldest, newest)


def segment_problem(trajectories: list[Trajectory], index: int) -> str:
    """The problem of a trajectory that continues the one before it; empty if there is none."""
    if not trajectories[index].continues:
        return ""
    if index == 0:
        return "it has `continues`, but it is the first trajectory of its group"
    own, first = trajectories[index].reward, trajectories[index - 1].reward
    return (
        "" if own == first else f"its reward is {own}, but must be {first}, that of the previous segment of its rollout"
    )


def reward_problem(reward: Any) -> str:
    """The problem of the reward of a finished trajectory; empty if there is none."""
    if reward is None:
        return "it has no reward"
    try:
        return "" if isfinite(reward) else f"its reward is {reward}, not a finite number"
    except Exception:  # whatever the value's own conversion raises
        return f"its reward is a {type(reward).__name__}, not a number"


def steps_problem(trajectory: Trajectory) -> str:
    """The problem of the rewards of single tokens; empty if there is none."""
    before = -1
    for step in trajectory.step_rewards:
        try:
            position, reward = step
            lawful = type(position) is int and before < position < len(trajectory.token_ids) and isfinite(reward)
        except (TypeError, ValueError):
            lawful = False
        if not lawful:
            law = "must be (position of a token, finite number), in the order of positions"
            return f"its step_rewards have {step!r:.80}, which {law}"
        before = position
    return ""


def rewards_problem(group: TrajectoryGroup) -> str:
    """The problem of finite rewards taken together; empty if there is none."""
    rewards = [float(trajectory.reward or 0.0) for trajectory in group.trajectories]
    if isfinite(sum(map(abs, rewards))):  # no sum or difference of some of them is larger
        return ""
    return f"its rewards, from {min(rewards)} to {max(rewards)}, are too large to compute their mean and spread"


def judged_problem(trajectory: Trajectory) -> str:
    """The problem of the types of `JUDGED` fields and of the parts of a reward; empty if there is none."""
    return _types_problem(trajectory, JUDGED) or _numbers_problem("reward_parts", trajectory.reward_parts, finite=True)


def _types_problem(trajectory: Trajectory, types: Mapping[str, type]) -> str:
    for name, kind in types.items():
        value = getattr(trajectory, name)
        if not isinstance(value, kind):
            return f"{name} is a {type(value).__name__}, not a {kind.__name__}"
    return ""


def _numbers_problem(field: str, numbers: Mapping[Any, Any], *, finite: bool = False) -> str:
    for name, value in numbers.items():
        try:
            lawful = isinstance(name, str) and (isfinite(value) or not finite)
        except (TypeError, ValueError, OverflowError):
            lawful = False
        if not lawful:
            law = f"which must be a name and a {'finite ' if finite else ''}number"
            return f"{field} has {name!r:.80}: {value!r:.80}, {law}"
    return ""


def _ids_problem(name: str, ids: list[Any]) -> str:
    if not ids:
        return ""
    try:
        smallest = min(array("i", ids))
    except Exception:  # whatever the values' own conversion raises
        return f"{name} must hold only ints from 0 to {LARGEST_ID}"
    return "" if smallest >= 0 else f"{name} holds {smallest}; a token id is an int from 0 to {LARGEST_ID}"


def _spans_problem(trajectory: Trajectory, tokens: int, oldest: Version, newest: Version) -> str:
    covered, before = 0, oldest
    spans: list[Any] = trajectory.spans
    for span in spans:
        if not isinstance(span, Span):
            return f"span {span!r:.80} is a {type(span).__name__}, not a Span"
        start, stop, version = span
        if type(start) is not int or type(stop) is not int or type(version) is not int:
            return f"span ({start!r}, {stop!r}, {version!r}) does not hold three ints"
        if start != covered or stop <= start:
            return f"span [{start}, {stop}) must start at {covered}, where the previous span ends, and not be empty"
        if version < before or version > newest:
            return f"tokens [{start}, {stop}) have version {version}, but it must be {before} to {newest} there"
        covered, before = stop, version
    return "" if covered == tokens else f"spans cover {covered} of {tokens} tokens"


def all_finite(numbers: list[Any]) -> bool:
    try:
        return isfinite(sum(numbers)) or all(map(isfinite, numbers))
    except (TypeError, ValueError, OverflowError):
        return False


# -- acknowledgments ---------------------------------------------------------------------------------------------------


class DoneOrders:
    """Batches acknowledgments. `emit` receives the events."""

    def __init__(self, emit: Callable[[OrderDone], None]) -> None:
        self._emit = emit
        self._numbers: list[int] = []

    def add(self, *numbers: int) -> None:
        """Acknowledge executed orders."""
        if not self._numbers:
            asyncio.get_running_loop().call_soon(self._send)
        self._numbers += numbers

    async def add_after(self, work: Callable[[], Awaitable[object]], numbers: Sequence[int]) -> None:
        """Acknowledge orders once `work()` has returned. If it raises, this raises the same and they stay open."""
        await work()
        self.add(*numbers)

    def _send(self) -> None:
        numbers, self._numbers = self._numbers, []
        self._emit(OrderDone(orders=tuple(numbers)))


# -- events about groups -----------------------------------------------------------------------------------------------


def generated_event(
    group: TrajectoryGroup,
    attempt: int,
    replica: ReplicaId,
    incarnation: Incarnation,
    described: Sequence[str] | None = None,
) -> GroupGenerated:
    """The `GroupGenerated` event of a group. Its rewards come from `reward_figures`. `described`: the columns that
    policies see; None: they see only figures."""
    oldest, newest = group.versions() or (NO_VERSION, NO_VERSION)
    trainable, mean, spread = reward_figures(group)
    return GroupGenerated(
        group=group.group,
        attempt=attempt,
        replica=replica,
        incarnation=incarnation,
        tokens=group.tokens,
        oldest_version=oldest,
        newest_version=newest,
        trainable=trainable,
        reward_mean=mean,
        reward_spread=spread,
        described="" if described is None else describe(group, described),
    )


LONGEST_VALUE = 200
"""Maximum number of characters of a column's value that policies see; longer ones are left out."""


def describe(group: TrajectoryGroup, columns: Sequence[str]) -> str:
    """What policies see of a generated group, as JSON: source and columns of its prompt, lengths, rewards by name."""
    parts: dict[str, list[float]] = {}
    for rollout in group.rollouts:
        for name, value in rollout[-1].reward_parts.items():
            parts.setdefault(name, []).append(float(value))
    rewards = {name: sum(values) / len(values) for name, values in parts.items()}
    lengths = [sum(len(one.token_ids) for one in rollout) for rollout in group.rollouts]
    return json.dumps({**describe_prompt(group.prompt, columns), "lengths": lengths, "rewards": rewards})


def describe_prompt(prompt: Prompt, columns: Sequence[str]) -> dict[str, Any]:
    """The source of a prompt, and those of its columns that are texts, numbers or booleans."""
    found = {name: prompt.fields.get(name) for name in columns}
    return {"source": prompt.source, "fields": {name: value for name, value in found.items() if _is_seen(value)}}


def _is_seen(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= LONGEST_VALUE and value.isprintable()
    return isinstance(value, bool) or (isinstance(value, int | float) and abs(value) < LARGEST_SEEN)


def reward_figures(group: TrajectoryGroup) -> tuple[int, float, float]:
    """Number of rollouts with tokens to train on, and the mean and spread of their rewards; 0 if there are none."""
    rewards = [float(r[0].reward or 0.0) for r in group.rollouts if any(1 in t.loss_mask for t in r)]
    if not rewards:
        return 0, 0.0, 0.0
    return len(rewards), sum(rewards) / len(rewards), max(rewards) - min(rewards)


def aborted_event(group: TrajectoryGroup, attempt: int, replica: ReplicaId, incarnation: Incarnation) -> GroupAborted:
    return GroupAborted(attempt=attempt, replica=replica, incarnation=incarnation, **_figures(group))


def prefix_event(group: TrajectoryGroup, attempt: int, replica: ReplicaId, incarnation: Incarnation) -> PrefixStored:
    return PrefixStored(attempt=attempt, replica=replica, incarnation=incarnation, **_figures(group))


def _figures(group: TrajectoryGroup) -> dict[str, Any]:
    oldest, newest = group.versions() or (NO_VERSION, NO_VERSION)
    unfinished = sum(not rollout[-1].finished for rollout in group.rollouts)
    return {
        "group": group.group,
        "tokens": group.tokens,
        "oldest_version": oldest,
        "newest_version": newest,
        "unfinished": unfinished,
    }
