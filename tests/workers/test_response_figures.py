"""Figures of a batch's responses: what is cut off, empty or repeated, and how rewards are spread."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.reward_histogram import BOUNDS, edges_and_counts, histogram_of
from engine.trajectory import Prompt, Span, Trajectory, TrajectoryGroup
from engine.workers.response_figures import response_figures, reward_histograms, source_figures


def said(
    text: str = "", tokens: int = 2, reward: float | None = 0.0, end: str = "stop", continues: bool = False
) -> Trajectory:
    return Trajectory(
        token_ids=[7] * tokens, spans=[Span(0, tokens, 0)] if tokens else [], text=text, reward=reward,
        finish_reason=end, continues=continues,
    )  # fmt: skip


def group(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(group=0, prompt=Prompt(row=0, text="?"), trajectories=list(trajectories))


def test_shares_are_of_all_responses() -> None:
    figures = response_figures([
        group(said("a"), said("a", 3), said("b", end="length"), said("a", end="truncated")),
        group(said("a"), said(" \n"), said("", 1), said("", 0)),
    ])  # fmt: skip
    assert figures["truncated_share"] == 2 / 8
    assert figures["unparsable_share"] == 0
    assert figures["empty_share"] == 3 / 8
    assert figures["repeated_share"] == 2 / 8, "the second and the last of the first group"


def test_unparsable_and_right_responses_are_shares_of_the_rollouts() -> None:
    lost, right, half = said("a", reward=0.0), said("b", reward=0.5), said("c", reward=2.0)
    lost.unparsable, right.reward_parts, half.reward_parts = True, {"acc": 1.0, "fmt": 0.0}, {"acc": 0.5, "fmt": 3.0}
    groups = [group(lost, right, half, said("d", reward=1.0))]
    assert (response_figures(groups)["unparsable_share"], response_figures(groups)["accuracy"]) == (1 / 4, 2 / 4)
    assert response_figures(groups, ["acc"])["accuracy"] == 2 / 4, "of a response without parts the reward counts"
    assert response_figures(groups, ["acc", "fmt"])["accuracy"] == 1 / 4, "all that apply"
    assert response_figures(groups, ["other"])["accuracy"] == 1 / 4, "one must apply"


def test_figures_of_sources_are_of_the_groups_with_a_name() -> None:
    groups = [group(said(reward=1.0), said(reward=0.0)), group(said(reward=None)), group(said(reward=1.0))]
    assert source_figures(groups) == {}
    for one, name in zip(groups, ("math", "code", "math"), strict=True):
        one.prompt = Prompt(row=0, text="?", source=name)
    math = {"groups": 2, "share": 2 / 3, "tokens_mean": 2.0, "reward_mean": pytest.approx(2 / 3)}
    assert source_figures(groups) == {"code": {"groups": 1, "share": 1 / 3, "tokens_mean": 2.0}, "math": math}


def test_responses_without_texts_are_distinguished_by_their_tokens() -> None:
    figures = response_figures([group(said(), said(), said(tokens=3), said(tokens=0))])
    assert (figures["empty_share"], figures["repeated_share"]) == (1 / 4, 1 / 4)


def test_the_segments_of_a_rollout_are_one_response() -> None:
    whole = [said("a", end="length", reward=2.0), said("b", reward=2.0, continues=True)]
    figures = response_figures([group(*whole, *whole, said("a", reward=4.0))])
    assert (figures["truncated_share"], figures["repeated_share"]) == (0, pytest.approx(1 / 3))
    assert reward_histograms([group(*whole, *whole, said("a", reward=4.0))]) == {"reward": [(2, 2, 2), (3, 4, 1)]}


def test_figures_of_agents_are_means_over_the_rollouts_that_have_them() -> None:
    one, other, plain = said("a", end="max_turns"), said("b"), said("c")
    third = said("d")
    one.figures, other.figures, third.figures = {"turns": 3.0, "tool_errors": 1.0}, {"turns": 1.0}, {"turns": 2.0}
    figures = response_figures([group(one, other, third, plain)])
    found = {name: value for name, value in figures.items() if name.startswith("agent_")}
    assert found == {"agent_turns": 2.0, "agent_tool_errors": 1.0, "agent_max_turns_share": 1 / 3}
    assert figures["truncated_share"] == 1 / 4
    assert not any(name.startswith("agent_") for name in response_figures([group(plain)]))


@given(st.lists(st.floats(-1e9, 1e9), min_size=1))
def test_every_reward_is_in_one_bucket_and_the_ends_are_exact(rewards: list[float]) -> None:
    buckets = histogram_of(rewards)
    assert (buckets[0][0], buckets[-1][1]) == (min(rewards), max(rewards))
    for place, (low, high, count) in enumerate(buckets):
        inside = [reward for reward in rewards if low < reward <= high or (place == 0 and reward == low)]
        assert len(inside) == count > 0
        assert place in (0, len(buckets) - 1) or (low in BOUNDS and high in BOUNDS)
    edges, counts = edges_and_counts(buckets)
    assert len(edges) == len(counts) + 1 and edges == sorted(set(edges)), "bins adjoin, and each has a width"
    assert [count for count in counts if count] == [count for *_, count in buckets]


def test_each_reward_function_has_a_histogram_of_the_responses_to_which_it_applies() -> None:
    some = [said(reward=1.0), said(reward=0.0), said(reward=None)]
    some[0].reward_parts, some[1].reward_parts = {"right": 1.0, "brief": 0.5}, {"right": 0.0}
    assert reward_histograms([group(*some)]) == {
        "reward": [(0, 0, 1), (0.9, 1, 1)], "reward_brief": [(0.5, 0.5, 1)], "reward_right": [(0, 0, 1), (0.9, 1, 1)],
    }  # fmt: skip
    assert reward_histograms([]) == {}


def test_means_of_parts_are_over_the_responses_to_which_they_apply() -> None:
    some = [said() for _ in range(3)]
    some[0].reward_parts, some[1].reward_parts = {"correct": 1.0, "brief": 0.5}, {"correct": 0.0}
    figures = response_figures([group(*some)])
    assert (figures["reward_correct"], figures["reward_brief"]) == (0.5, 0.5)


def test_a_batch_without_responses_has_no_figures() -> None:
    assert response_figures([]) == {}
