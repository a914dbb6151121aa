"""Figures of the responses of a train step: how they end, whether they repeat, and how their rewards are spread.

Used by the trainer's worker, which has the texts, for any trainer. They become metrics of the step.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from engine.reward_histogram import REWARD, Bucket, histogram_of
from engine.trajectory import MAX_TURNS, Trajectory, TrajectoryGroup

CUT_OFF = ("length", "truncated", MAX_TURNS)
"""The finish reasons of responses that did not end by themselves."""


def response_figures(groups: Sequence[TrajectoryGroup], correct: Sequence[str] = ()) -> dict[str, float]:
    """Shares of all responses in a batch; nothing for an empty batch. With several reward functions, `reward_<name>` is
    the mean value of each function over the responses to which it applies.

    For rollouts of several turns: `agent_<name>`, the mean of each figure over the rollouts that have it, and
    `agent_max_turns_share`, the share of them that reached their limit of turns.

    `accuracy`: share of right responses (`Trajectory.is_right`). The other shares count responses that were cut off
    (`truncated_share`), that have no token or, if responses have texts, only white space (`empty_share`), that are
    identical to an earlier response of their group (`repeated_share`), and in which a reward function found no answer
    (`unparsable_share`).
    """
    by_group = [group.rollouts for group in groups]
    rollouts = [rollout for own in by_group for rollout in own]
    if not rollouts:
        return {}
    have_texts = any(trajectory.text for rollout in rollouts for trajectory in rollout)
    distinct = sum(len({*map(_identity, own)}) for own in by_group)
    return {
        "accuracy": fmean(rollout[-1].is_right(correct) for rollout in rollouts),
        "truncated_share": sum(is_cut_off(rollout) for rollout in rollouts) / len(rollouts),
        "empty_share": sum(_is_empty(rollout, have_texts) for rollout in rollouts) / len(rollouts),
        "unparsable_share": sum(rollout[-1].unparsable for rollout in rollouts) / len(rollouts),
        "repeated_share": 1.0 - distinct / len(rollouts),
        **_means("reward_", [rollout[0].reward_parts for rollout in rollouts]),
        **_agent_figures(rollouts),
    }


def reward_histograms(groups: Sequence[TrajectoryGroup]) -> dict[str, list[Bucket]]:
    """The histogram of the rewards of a batch, as `reward`, and those of its reward functions, as `reward_<name>`."""
    firsts = [rollout[0] for group in groups for rollout in group.rollouts]
    rewards = {REWARD: [float(one.reward) for one in firsts if one.reward is not None]}
    rewards |= _by_name("reward_", [one.reward_parts for one in firsts])
    return {name: histogram_of(values) for name, values in rewards.items() if values}


def source_figures(groups: Sequence[TrajectoryGroup]) -> dict[str, dict[str, float]]:
    """For each named data source in a batch: its `groups`, their `share` of the batch, `tokens_mean` over its
    responses, and `reward_mean` over those with a reward. Empty if no source has a name."""
    by_source: dict[str, list[TrajectoryGroup]] = {}
    for group in groups:
        if group.prompt.source:
            by_source.setdefault(group.prompt.source, []).append(group)
    return {name: _figures_of_source(by_source[name], len(groups)) for name in sorted(by_source)}


def _figures_of_source(own: Sequence[TrajectoryGroup], groups: int) -> dict[str, float]:
    rewards = [rollout[0].reward for group in own for rollout in group.rollouts]
    known = [float(reward) for reward in rewards if reward is not None]
    mean = {"reward_mean": fmean(known)} if known else {}
    tokens = sum(group.tokens for group in own) / max(1, len(rewards))
    return {"groups": len(own), "share": len(own) / groups, "tokens_mean": tokens, **mean}


def _means(prefix: str, figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: fmean(values) for name, values in _by_name(prefix, figures).items()}


def _by_name(prefix: str, figures: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for one in figures:
        for name, value in one.items():
            values.setdefault(f"{prefix}{name}", []).append(value)
    return dict(sorted(values.items()))


def _agent_figures(rollouts: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    agents = [rollout for rollout in rollouts if rollout[0].figures]
    if not agents:
        return {}
    cut = sum(rollout[-1].finish_reason == MAX_TURNS for rollout in agents)
    means = _means("agent_", [rollout[0].figures for rollout in agents])
    return {**means, "agent_max_turns_share": cut / len(agents)}


def is_cut_off(rollout: Sequence[Trajectory]) -> bool:
    return rollout[-1].finish_reason in CUT_OFF


def tokens_of(rollout: Sequence[Trajectory]) -> int:
    return sum(len(trajectory.token_ids) for trajectory in rollout)


def _is_empty(rollout: Sequence[Trajectory], have_texts: bool) -> bool:
    return not tokens_of(rollout) or (have_texts and not any(trajectory.text.strip() for trajectory in rollout))


def _identity(rollout: Sequence[Trajectory]) -> tuple[object, ...]:
    """A value that is equal for identical responses. Texts, if there are any, are much cheaper to compare than
    tokens."""
    return tuple(t.text or tuple(t.token_ids) for t in rollout)
