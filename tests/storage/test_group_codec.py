"""Trajectory groups as bytes: what goes in comes out, and what is no group is refused."""

import dataclasses
import datetime
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import DataFailure
from engine.storage.group_codec import FIELD_DEPTH, pack_group, pack_growth, plain_prompt, unpack_group
from engine.storage.prefixes import growth_of
from engine.trajectory import Prompt, Span, StepReward, Trajectory, TrajectoryGroup

texts = st.text(st.characters(), max_size=8)
integers = st.integers() | st.integers(63, 5000).flatmap(lambda bits: st.integers(-(2**bits), 2**bits))
plain = st.recursive(
    st.none() | st.booleans() | integers | st.floats(allow_nan=False) | texts | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


steps = st.tuples(st.integers(0, 2**31 - 1), st.floats(allow_nan=False))


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    ids = draw(st.lists(st.integers(0, 2**31 - 1), max_size=6))
    prompt = draw(st.lists(st.integers(0, 2**31 - 1), max_size=4))
    return Trajectory(
        prompt_ids=prompt,
        token_ids=ids,
        logprobs=draw(st.lists(st.floats(allow_nan=False), min_size=len(ids), max_size=len(ids))),
        loss_mask=draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids))),
        spans=[Span(0, len(ids), draw(st.integers(0, 2**40)))],
        text=draw(st.text(st.characters(), max_size=9)),
        finish_reason=draw(st.sampled_from(["", "stop", "length"])),
        reward=draw(st.none() | st.floats(allow_nan=False)),
        continues=draw(st.booleans()),
        unparsable=draw(st.booleans()),
        reward_parts=draw(st.dictionaries(texts, st.floats(allow_nan=False), max_size=2)),
        step_rewards=[StepReward(*one) for one in draw(st.lists(steps, max_size=2))],
        figures=draw(st.dictionaries(texts, st.floats(allow_nan=False), max_size=2)),
        shown_prompt=draw(st.text(st.characters(), max_size=3)),
        routes=draw(st.sampled_from([[], [b"\1\2"] * max(0, len(prompt) + len(ids) - 1)])),
    )


@settings(max_examples=60, deadline=None)
@given(
    group=st.integers(-(2**40), 2**40),
    fields=st.dictionaries(texts, plain, max_size=3),
    source=st.sampled_from(["", "math"]),
    made=st.lists(trajectories(), max_size=3),
)
def test_a_group_comes_back_as_it_was(
    group: int, fields: dict[str, object], source: str, made: list[Trajectory]
) -> None:
    prompt = Prompt(row=7, text="?", fields=fields, source=source)
    whole = TrajectoryGroup(group=group, prompt=prompt, trajectories=made)
    assert unpack_group(pack_group(whole)) == whole


@settings(max_examples=60, deadline=None)
@given(made=st.lists(trajectories(), max_size=3), later=st.lists(trajectories(), max_size=3), data=st.data())
def test_a_stored_group_followed_by_what_it_gained_is_the_whole_group(
    made: list[Trajectory], later: list[Trajectory], data: st.DataObject
) -> None:
    prompt = Prompt(row=7, text="?")
    stored = TrajectoryGroup(group=3, prompt=prompt, trajectories=made)
    packed = pack_group(stored)
    for _ in range(2):
        group = TrajectoryGroup(group=3, prompt=prompt, trajectories=[one.copy() for one in stored.trajectories])
        for place, other in enumerate(later):
            change = data.draw(st.sampled_from(["grows", "stays", "is another"]))
            if place == len(group.trajectories) or change == "is another":
                group.trajectories[place : place + 1] = [other.copy()]
            elif change == "grows":
                routes = data.draw(st.sampled_from([[], [b"", b"\3"] * 16]))
                group.trajectories[place].extend(other.token_ids, other.logprobs, other.spans, routes=routes)
                group.trajectories[place].text += other.text
        growth = growth_of(stored, group)
        assert growth is not None and growth.group is group
        packed, stored = packed + pack_growth(growth), group
    assert unpack_group(packed) == stored


@pytest.mark.parametrize(
    "change",
    [
        lambda group: group.trajectories.pop(),
        lambda group: setattr(group, "prompt", Prompt(row=7, text="another")),
        lambda group: setattr(group.trajectories[0], "token_ids", STORED.trajectories[0].token_ids),
    ],
    ids=["a trajectory less", "another prompt", "shared lists"],
)
def test_a_group_that_lacks_what_is_stored_is_stored_whole(change: Callable[[TrajectoryGroup], object]) -> None:
    group = TrajectoryGroup(group=3, prompt=STORED.prompt, trajectories=[one.copy() for one in STORED.trajectories])
    change(group)
    assert growth_of(STORED, group) is None


STORED = TrajectoryGroup(
    group=3,
    prompt=Prompt(row=7, text="?"),
    trajectories=[Trajectory(token_ids=[1, 2], logprobs=[-1.0, -2.0], loss_mask=[1, 1], spans=[Span(0, 2, 1)])],
)


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (datetime.date(2026, 1, 1), "is a date"),
        ([1, {"at": object()}], "is a object"),
        ({"a": {3: "x"}}, "has the key 3, a int"),
        (nested(FIELD_DEPTH + 1), "nested more than"),
    ],
)
def test_a_prompt_that_is_not_plain_data_is_refused_by_its_row(value: object, problem: str) -> None:
    with pytest.raises(DataFailure, match=f"row 12: its field 'when' .*{problem}"):
        plain_prompt(Prompt(row=12, text="?", fields={"answer": 4, "when": value}))


def test_a_copy_has_every_field_of_a_trajectory_and_lists_of_its_own() -> None:
    whole = Trajectory(
        prompt_ids=[1], token_ids=[2, 3], logprobs=[-1.0, -2.0], loss_mask=[1, 0], spans=[Span(0, 2, 4)], text="five",
        finish_reason="stop", reward=1.0, reward_parts={"exact": 1.0}, step_rewards=[StepReward(1, 0.5)],
        figures={"turns": 2.0}, unparsable=True, continues=True, shown_prompt="2 + 3", routes=[b"\1"],
    )  # fmt: skip
    blank, copy = Trajectory(), whole.copy()
    assert copy == whole
    for one in dataclasses.fields(Trajectory):
        value = getattr(whole, one.name)
        assert value != getattr(blank, one.name), f"the test leaves {one.name} out"
        assert not isinstance(value, list | dict) or getattr(copy, one.name) is not value
