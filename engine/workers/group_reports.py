"""Checks the groups that a user's generator returns, names the first problem, and builds the events about them.

Called by `replica.ReplicaWorker` for every group. A malformed group must never reach the scheduler, whose laws it would
break, or the trainer; its attempt fails with the reason. Events have lengths, versions and rewards, never tokens.
"""

import json
import operator
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from engine.errors import DataFailure, EngineError
from engine.events import GroupAborted, GroupGenerated, PrefixStored
from engine.ids import NO_VERSION, GroupId, LifeNumber, ReplicaId, Version
from engine.protocols import Generated, GroupWork
from engine.protocols.user_values import LARGEST, MOST_OF_ALL, figures_in, number_in
from engine.trajectory import Prompt, Span, StepReward, Trajectory, TrajectoryGroup

TYPES = {
    "prompt_ids": list, "token_ids": list, "logprobs": list, "loss_mask": list, "spans": list, "finish_reason": str,
    "continues": bool, "shown_prompt": str, "routes": list, "text": str, "unparsable": bool,
}  # fmt: skip
"""Fields of a trajectory that its generator sets."""
JUDGED = {"text": str, "unparsable": bool}
"""Those, apart from numbers, that the work of an added state may change."""
LARGEST_ID = 2**31 - 1


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

    Raises: `DataFailure` for a missing reward and for rewards and figures that are no finite numbers, `EngineError` for
    any other fault.
    """
    if not isinstance(generated, Generated) or not isinstance(generated.group, TrajectoryGroup):
        what = type(generated.group).__name__ if isinstance(generated, Generated) else type(generated).__name__
        raise EngineError(f"generate() must return Generated(group=TrajectoryGroup(...)), not {what}")
    group = generated.group
    problem = _group_problem(work, generated, versions)
    if problem:
        raise EngineError(f"generate() returned {problem}", group=work.group)
    group.group = work.group  # an equal number of another class, such as numpy's, is none that the record has
    count = sum([not getattr(trajectory, "continues", False) for trajectory in group.trajectories])
    if count != work.samples and not (generated.aborted and count < work.samples):
        raise EngineError(f"generate() returned {count} trajectories, not the {work.samples} asked for")
    kept = generated.oldest_version
    oldest = versions.oldest if kept is None else min(versions.oldest, kept)
    for index, trajectory in enumerate(group.trajectories):
        checked = known[index] if known else 0
        problem = shape_problem(trajectory, oldest, versions.newest, finished=not generated.aborted, known=checked)
        if problem:
            raise _fault(EngineError, work, index, problem)
    for index, trajectory in enumerate(group.trajectories):
        problem = _numbers_problem(trajectory, rewarded=rewarded and not generated.aborted)
        if problem:
            raise _fault(DataFailure, work, index, problem)
    for index, trajectory in enumerate(group.trajectories):
        problem = segment_problem(group.trajectories, index) if trajectory.continues else ""
        if problem:
            raise _fault(EngineError, work, index, problem)


def _fault(kind: type[EngineError], work: GroupWork, index: int, problem: str) -> EngineError:
    story = f"trajectory {index} of group {work.group} (prompt row {work.prompt.row}): {problem}"
    return kind(story, group=work.group, trajectory=index, row=work.prompt.row)


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
    problem = _types_problem(trajectory, TYPES) or ("" if known else _ids_problem("prompt_ids", trajectory.prompt_ids))
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


def judged_problem(trajectory: Trajectory) -> str:
    """The problem of a finished trajectory as its judge left it; empty if there is none. Its numbers become plain."""
    return _types_problem(trajectory, JUDGED) or _numbers_problem(trajectory, rewarded=True)


def _numbers_problem(trajectory: Trajectory, *, rewarded: bool) -> str:
    """If not `rewarded`, the reward may be missing."""
    problem = ""
    for name in ("figures", "reward_parts"):
        found = figures_in(getattr(trajectory, name), MOST_OF_ALL)
        if isinstance(found, str):
            problem = problem or f"its {name} have {found.replace(' WHERE', '')}"
        else:
            setattr(trajectory, name, found)
    reward = None if trajectory.reward is None else number_in(trajectory.reward)
    if isinstance(reward, str):
        problem = problem or f"its reward is {reward}, not a finite number"
    elif reward is None:
        problem = problem or ("it has no reward" if rewarded else "")
    else:
        trajectory.reward = reward
    return problem or _steps_problem(trajectory)


def _steps_problem(trajectory: Trajectory) -> str:
    steps: list[StepReward] = []
    given: Any = trajectory.step_rewards
    for step in given if isinstance(given, list) else [given]:
        try:
            position, value = step
            reward = number_in(value)
            before = steps[-1].position if steps else -1
            lawful = type(position) is int and before < position < len(trajectory.token_ids)
        except (TypeError, ValueError):
            lawful, reward = False, ""
        if not lawful or isinstance(reward, str):
            law = "must be (position of a token, finite number), in the order of positions"
            return f"its step_rewards have {step!r:.80}, which {law}"
        steps.append(StepReward(position, reward))
    trajectory.step_rewards = steps
    return ""


def _types_problem(trajectory: Trajectory, types: Mapping[str, type]) -> str:
    for name, kind in types.items():
        value = getattr(trajectory, name)
        if not isinstance(value, kind):
            return f"{name} is a {type(value).__name__}, not a {kind.__name__}"
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


# -- events about groups -----------------------------------------------------------------------------------------------


def generated_event(
    group: TrajectoryGroup,
    attempt: int,
    replica: ReplicaId,
    life: LifeNumber,
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
        life=life,
        tokens=group.tokens,
        oldest_version=oldest,
        newest_version=newest,
        trainable=trainable,
        reward_mean=mean,
        reward_spread=spread,
        described="" if described is None else describe(group, described),
        longest=max(map(_tokens_of, group.rollouts), default=0),
    )


def _tokens_of(rollout: list[Trajectory]) -> int:
    return sum(len(one.token_ids) for one in rollout)


LONGEST_VALUE = 200
"""Maximum number of characters of a column's value that policies see; longer ones are left out."""


def describe(group: TrajectoryGroup, columns: Sequence[str]) -> str:
    """What policies see of a generated group, as JSON: source and columns of its prompt, lengths, rewards by name."""
    parts: dict[str, list[float]] = {}
    for rollout in group.rollouts:
        for name, value in rollout[-1].reward_parts.items():
            parts.setdefault(name, []).append(value)
    rewards = {name: sum(values) / len(values) for name, values in parts.items()}
    lengths = [_tokens_of(rollout) for rollout in group.rollouts]
    return json.dumps({**describe_prompt(group.prompt, columns), "lengths": lengths, "rewards": rewards})


def describe_prompt(prompt: Prompt, columns: Sequence[str]) -> dict[str, Any]:
    """The source of a prompt, and those of its columns that are texts, numbers or booleans."""
    found = {name: prompt.fields.get(name) for name in columns}
    return {"source": prompt.source, "fields": {name: value for name, value in found.items() if _is_seen(value)}}


def _is_seen(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= LONGEST_VALUE and value.isprintable()
    return isinstance(value, bool) or (isinstance(value, int | float) and abs(value) < LARGEST)


def reward_figures(group: TrajectoryGroup) -> tuple[int, float, float]:
    """Number of rollouts with tokens to train on, and the mean and spread of their rewards; 0 if there are none."""
    rewards = [float(r[0].reward or 0.0) for r in group.rollouts if any([1 in t.loss_mask for t in r])]
    if not rewards:
        return 0, 0.0, 0.0
    return len(rewards), sum(rewards) / len(rewards), max(rewards) - min(rewards)


def aborted_event(group: TrajectoryGroup, attempt: int, replica: ReplicaId, life: LifeNumber) -> GroupAborted:
    return GroupAborted(attempt=attempt, replica=replica, life=life, **_figures(group))


def prefix_event(group: TrajectoryGroup, attempt: int, replica: ReplicaId, life: LifeNumber) -> PrefixStored:
    return PrefixStored(attempt=attempt, replica=replica, life=life, **_figures(group))


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
