"""Events and commands to bytes and back: what goes in comes out, and nothing else gets in."""

import tracemalloc
from enum import IntEnum
from inspect import Parameter, signature
from math import inf, nan
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace
from record_samples import commands, event, events

from engine.commands import COMMANDS, Command, StartGroup, TrainStep
from engine.errors import EngineError
from engine.events import EVENTS, Event, GroupGenerated, RowsMeasured, RunStarted, StopRequested, stamp
from engine.record import CodecError
from engine.record.codec import CHECKED_FROM_BYTES, event_of, pack, unpack_events
from engine.record.frames import Tick, decode_frame, decode_header, encode_rejected

GENERATED = GroupGenerated(
    group=7, attempt=1, replica=0, life=1, tokens=30, oldest_version=2, newest_version=3, trainable=4,
    reward_mean=0.5, reward_spread=1.0, id=9, at=1.25,
)  # fmt: skip
START = StartGroup(group=7, attempt=1, replica=0, life=1, cause=9)
TRAIN = TrainStep(step=0, attempt=1, groups=(1, 2), staleness=(0, 1), cause=9)


@pytest.mark.parametrize("cls", [*EVENTS, *COMMANDS], ids=lambda cls: cls.__name__)
def test_a_class_of_events_or_commands_is_frozen_and_takes_keywords_only(cls: type[Event] | type[Command]) -> None:
    """Options of a struct that a class does not inherit would change the order of its fields in the record."""
    assert cls.__struct_config__.frozen and not cls.__struct_config__.gc
    assert {one.kind for one in signature(cls).parameters.values()} == {Parameter.KEYWORD_ONLY}


def of_one_tick(events: list[Event], first: int, at: float) -> tuple[Event, ...]:
    for place, one in enumerate(events):
        stamp(one, first + place, at)
    return tuple(events)


TICKS = st.builds(
    of_one_tick, st.lists(events, min_size=1, max_size=4, unique_by=id), st.integers(0, 2**62),
    st.floats(allow_nan=False, allow_infinity=False),
)  # fmt: skip


@given(events=TICKS, answer=st.lists(st.tuples(commands, st.integers(0, 3)), max_size=5), number=st.integers(0, 2**62))
def test_ticks_come_back(events: tuple[Event, ...], answer: list[tuple[Command, int]], number: int) -> None:
    orders = tuple(replace(command, cause=events[place % len(events)].id) for command, place in answer)
    tick = decode_frame(pack(Tick(number, events, orders)))
    assert tick == Tick(number, events, orders)
    assert list(map(type, (*tick.events, *tick.commands))) == list(map(type, (*events, *orders)))


@given(events=TICKS, reason=st.text(max_size=60))
def test_rejections_come_back(events: tuple[Event, ...], reason: str) -> None:
    frame = decode_frame(encode_rejected(3, events, reason))
    assert (frame.number, frame.events, frame.reason) == (3, events, reason)


def test_no_tag_is_used_twice() -> None:
    for table in (EVENTS, COMMANDS):
        assert len({cls.__struct_config__.tag for cls in table}) == len(table)
    assert msgpack.unpackb(pack(GENERATED)) == [3, 9, 1.25, 7, 1, 0, 1, 30, 2, 3, 4, 0.5, 1.0, "", 0]


class Level(IntEnum):
    HIGH = 3


class Double(float):
    """As numpy's float64 is one."""


def test_ints_where_floats_belong_and_plain_subclasses_are_taken() -> None:
    loose = replace(GENERATED, reward_mean=1, reward_spread=Double(0.5), tokens=Level.HIGH)
    (after,) = unpack_events(pack([loose]))
    assert event_of(GroupGenerated, asdict(loose)) == after
    assert after.reward_mean == 1.0 and type(after.reward_mean) is float
    assert after.reward_spread == 0.5 and type(after.reward_spread) is float
    assert after.tokens == 3 and type(after.tokens) is int


MEASURED = RowsMeasured(
    **dict.fromkeys(("validation", "chunk", "attempt", "replica", "life", "version"), 0), measured=2, right=1,
    reward=1.0, rows=(0, 1), rewards=(0.0, 1.0), answers=(0, 0), right_rows=(0,), id=9, at=1.25,
)  # fmt: skip
UNRECORDABLE: list[tuple[Event, str]] = [
    (replace(GENERATED, group=True), "GroupGenerated.group cannot be recorded: Expected `int`, got `bool`"),
    (replace(GENERATED, group=1.0), "GroupGenerated.group .*got `float`"),
    (replace(GENERATED, group="7"), "GroupGenerated.group .*got `str`"),
    (replace(GENERATED, group=None), "GroupGenerated.group .*got `None`"),
    (replace(GENERATED, group=2**70), "GroupGenerated.group cannot be recorded: can't serialize ints"),
    (replace(GENERATED, reward_mean=nan), "GroupGenerated.reward_mean is nan, but must be finite"),
    (replace(GENERATED, reward_spread=inf), "GroupGenerated.reward_spread is inf"),
    (replace(GENERATED, reward_spread=True), "GroupGenerated.reward_spread .*got `bool`"),
    (replace(GENERATED, described=object()), "GroupGenerated.described cannot be recorded: .* is of type object"),
    (StopRequested(reason="\ud800"), "StopRequested.reason .*half of a surrogate pair"),
    (replace(MEASURED, rewards=(1.0, nan)), "RowsMeasured.rewards .* must be finite"),
]


@pytest.mark.parametrize(("item", "said"), UNRECORDABLE)
def test_values_that_no_record_holds_make_no_event(item: Event, said: str) -> None:
    with pytest.raises(CodecError, match=said):
        event_of(type(item), asdict(item))


def test_a_command_names_an_event_of_its_tick_as_cause() -> None:
    with pytest.raises(CodecError, match="StartGroup has cause 9, but must have an event of its tick as its cause"):
        decode_frame(pack(Tick(4, (event(4),), (START,))))
    with pytest.raises(CodecError, match="an id from 0"):
        decode_frame(pack(Tick(0, (RunStarted(),), ())))
    with pytest.raises(CodecError, match="one time and consecutive ids, but one has id 6"):
        decode_frame(pack(Tick(0, (event(4), event(6)), ())))


def packed(*plain: object) -> bytes:
    return msgpack.packb(list(plain))


@pytest.mark.parametrize(
    ("number", "id", "at"),
    [*((2, 7, at) for at in ("3", None, nan, inf)), *((2, id, 0.5) for id in (-1, True, 1.0)), (-1, 7, 0.5)],
)
def test_a_frame_with_a_wrong_position_or_time_is_refused(number: object, id: object, at: object) -> None:
    tick = decode_frame(packed(1, 2, [[1, 7, 0.5, 3]], [], 127))
    assert tick.events == (RunStarted(replicas=3, id=7, at=0.5),)
    with pytest.raises(CodecError):
        decode_frame(packed(1, number, [[1, id, at, 3]], [], 127))


UNREADABLE: dict[str, tuple[Any, str]] = {
    "not an array": (3, "Expected `array`"),
    "empty array": ([], "of at least length"),
    "a map": ({1: 2}, "Expected `array`"),
    "unknown tag": ([999, 0, 0.0], "Invalid value 999 .* use the engine version"),
    "tag 0": ([0, 0, 0.0], "Invalid value 0"),
    "bool for a tag": ([True, 0, 0.0], "Expected `int`"),
    "field missing": ([2, 0, 0.0, 0, 3], "of at least length"),
    "field too many": ([2, 0, 0.0, 0, 3, True, 1, "", 1], "of at most length"),
    "int for a bool": ([2, 0, 0.0, 0, 3, 1, 0, ""], "Expected `bool`, got `int`"),
    "bool for an int": ([2, 0, 0.0, 0, True, True, 0, ""], "Expected `int`, got `bool`"),
    "nan": ([57, 0, 0.0, "replica", 0, 1, nan], "CacheMeasured.used is nan"),
    "binary": ([20, 0, 0.0, b"now"], "Expected `str`"),
    "extension": ([20, 0, 0.0, msgpack.ExtType(4, b"x")], "Expected `str`"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_wrong_values_are_no_event(case: str) -> None:
    plain, said = UNREADABLE[case]
    with pytest.raises(CodecError, match=said):
        decode_frame(packed(1, 0, [plain], [], 127))


VALID = [pack(Tick(9, (GENERATED,), (START, TRAIN))), encode_rejected(9, (GENERATED,), "InvariantViolated: law 1")]


def survive(data: bytes) -> None:
    """Anything may come of bytes but a crash."""
    for decode in (decode_frame, unpack_events, decode_header):
        try:
            decode(data)
        except EngineError as error:
            assert type(error) is CodecError


@given(data=st.binary(max_size=200))
def test_random_bytes_never_crash(data: bytes) -> None:
    survive(data)


@given(base=st.sampled_from(VALID), data=st.data())
def test_mutated_bytes_never_crash(base: bytes, data: st.DataObject) -> None:
    mutated = bytearray(base)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutated)))
        match data.draw(st.sampled_from(["set", "cut", "insert"])):
            case "set" if at < len(mutated):
                mutated[at] = data.draw(st.integers(0, 255))
            case "cut":
                del mutated[at:]
            case _:
                mutated[at:at] = data.draw(st.binary(max_size=9))
    survive(bytes(mutated))


@pytest.mark.parametrize("base", VALID, ids=["tick", "rejected"])
def test_frames_that_are_cut_or_have_surplus_bytes_are_refused(base: bytes) -> None:
    assert decode_frame(base)
    for data in (*(base[:length] for length in range(len(base))), base + b"\x00", base[:-1] + b"\x00"):
        with pytest.raises(CodecError):
            decode_frame(data)


CLAIMS = {
    "array": b"\xdd\xff\xff\xff\xff",
    "map": b"\xdf\xff\xff\xff\xff",
    "text": b"\xdb\xff\xff\xff\xff",
    "binary": b"\xc6\xff\xff\xff\xff",
    "extension": b"\xc9\xff\xff\xff\xff\x01",
    "array just within": b"\xdd\x00\x3f\xff\xff",
    "array of the frame's size": b"\xdd\x00\x01\x00\x00",
}


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS.keys())
@pytest.mark.parametrize("size", [10, CHECKED_FROM_BYTES - 1, 100_000])
def test_claimed_lengths_allocate_nothing(claim: bytes, size: int) -> None:
    nested = (claim * (size // len(claim) + 1))[:size]
    padded = [(start + claim + bytes(size))[:size] for start in (b"\x95\x01", b"\x95\x03\x00\x00")]
    tracemalloc.start()
    try:
        for data in (nested, *padded):
            tracemalloc.reset_peak()
            survive(data)
            assert tracemalloc.get_traced_memory()[1] < 4_000_000 + 100 * size
    finally:
        tracemalloc.stop()
