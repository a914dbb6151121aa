"""Events and commands to bytes and back: what goes in comes out, and nothing else gets in."""

import tracemalloc
from enum import IntEnum
from inspect import Parameter, signature
from math import inf, nan

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from record_samples import (
    COMMAND_CLASSES,
    EVENT_CLASSES,
    commands,
    decode_command,
    decode_event,
    encode_command,
    encode_event,
    event,
    events,
    objects,
)

from engine.commands import COMMANDS, Command, SetTimer, StartGroup, TrainStep
from engine.errors import EngineError
from engine.events import EVENTS, Event, GroupGenerated, RowsMeasured, RunStarted, StopRequested, stamp
from engine.record import CodecError
from engine.record.codec import CHECKED_FROM_BYTES, MAX_TEXT_BYTES
from engine.record.frames import decode_frame, decode_header, encode_rejected, encode_tick

GENERATED = GroupGenerated(
    group=7, attempt=1, replica=0, incarnation=1, tokens=30, oldest_version=2, newest_version=3, trainable=4,
    reward_mean=0.5, reward_spread=1.0, id=9, at=1.25,
)  # fmt: skip
START = StartGroup(group=7, attempt=1, replica=0, incarnation=1, cause=9)
TRAIN = TrainStep(step=0, attempt=1, groups=(1, 2), staleness=(0, 1), cause=9)


@pytest.mark.parametrize("cls", [*EVENT_CLASSES, *COMMANDS.values()], ids=lambda cls: cls.__name__)
def test_a_class_of_events_or_commands_is_frozen_and_takes_keywords_only(cls: type[Event] | type[Command]) -> None:
    """Options of a struct that a class does not inherit would change the order of its fields in the record."""
    assert cls.__struct_config__.frozen and not cls.__struct_config__.gc
    assert {one.kind for one in signature(cls).parameters.values()} == {Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("cls", EVENT_CLASSES, ids=lambda cls: cls.__name__)
@settings(max_examples=15)
@given(data=st.data())
def test_every_event_comes_back(cls: type[Event], data: st.DataObject) -> None:
    before = data.draw(objects(cls))
    after = decode_event(encode_event(before), before.id, before.at)
    assert after == before and type(after) is cls


@pytest.mark.parametrize("cls", COMMAND_CLASSES, ids=lambda cls: cls.__name__)
@settings(max_examples=15)
@given(data=st.data())
def test_every_command_comes_back(cls: type[Command], data: st.DataObject) -> None:
    before = data.draw(objects(cls))
    after = decode_command(encode_command(before), before.cause)
    assert after == before and type(after) is cls


def of_one_tick(facts: list[Event], first: int, at: float) -> tuple[Event, ...]:
    for place, fact in enumerate(facts):
        stamp(fact, first + place, at)
    return tuple(facts)


TICKS = st.builds(
    of_one_tick, st.lists(events, min_size=1, max_size=4, unique_by=id), st.integers(0, 2**62),
    st.floats(allow_nan=False, allow_infinity=False),
)  # fmt: skip


@given(facts=TICKS, answer=st.lists(st.tuples(commands, st.integers(0, 3)), max_size=5), number=st.integers(0, 2**62))
def test_ticks_come_back(facts: tuple[Event, ...], answer: list[tuple[Command, int]], number: int) -> None:
    orders = tuple(replace(command, cause=facts[place % len(facts)].id) for command, place in answer)
    tick = decode_frame(encode_tick(number, facts, orders))
    assert (tick.number, tick.events, tick.commands) == (number, facts, orders)


@given(facts=TICKS, reason=st.text(max_size=60))
def test_rejections_come_back(facts: tuple[Event, ...], reason: str) -> None:
    frame = decode_frame(encode_rejected(3, facts, reason))
    assert (frame.number, frame.events, frame.reason) == (3, facts, reason)


def test_tags_are_the_tables_own() -> None:
    for table in (EVENTS, COMMANDS):
        assert all(cls.tag == tag for tag, cls in table.items())
        assert len(set(table.values())) == len(table)
    assert msgpack.unpackb(encode_event(GENERATED)) == [3, 7, 1, 0, 1, 30, 2, 3, 4, 0.5, 1.0, ""]
    assert encode_event(RunStarted()) == b"\x92\x01\x00"


class Level(IntEnum):
    HIGH = 3


class Double(float):
    """As numpy's float64 is one."""


def test_ints_where_floats_belong_and_plain_subclasses_are_taken() -> None:
    loose = replace(GENERATED, reward_mean=1, reward_spread=Double(0.5), tokens=Level.HIGH)
    after = decode_event(encode_event(loose))
    assert after.reward_mean == 1.0 and type(after.reward_mean) is float
    assert after.reward_spread == 0.5 and type(after.reward_spread) is float
    assert after.tokens == 3 and type(after.tokens) is int


def test_a_text_of_the_maximum_size_comes_back() -> None:
    assert decode_event(encode_event(StopRequested(reason="é" * (MAX_TEXT_BYTES // 2)))).reason


MEASURED = RowsMeasured(
    **dict.fromkeys(("validation", "chunk", "attempt", "replica", "incarnation", "version"), 0), measured=2, right=1,
    reward=1.0, rows=(0, 1), rewards=(0.0, 1.0), answers=(0, 0), right_rows=(0,),
)  # fmt: skip
UNWRITABLE: list[tuple[Event | Command, str]] = [
    (replace(GENERATED, group=True), "GroupGenerated.group is a bool, not a int"),
    (replace(GENERATED, group=1.0), "GroupGenerated.group is a float, not a int"),
    (replace(GENERATED, group="7"), "GroupGenerated.group is a str"),
    (replace(GENERATED, group=None), "GroupGenerated.group is a NoneType"),
    (replace(GENERATED, group=2**63), "GroupGenerated.group does not fit into a signed 64-bit integer"),
    (replace(GENERATED, group=2**70), "GroupGenerated.group does not fit into a signed 64-bit integer"),
    (replace(GENERATED, group=-(2**63) - 1), "does not fit into a signed 64-bit integer"),
    (replace(GENERATED, reward_mean=nan), "GroupGenerated.reward_mean is nan"),
    (replace(GENERATED, reward_spread=inf), "GroupGenerated.reward_spread is inf"),
    (replace(GENERATED, reward_spread=True), "GroupGenerated.reward_spread is a bool"),
    (replace(GENERATED, reward_mean=10**400), "too large for a float"),
    (StopRequested(reason="x" * (MAX_TEXT_BYTES + 1)), "StopRequested.reason is longer than 1048576 bytes"),
    (StopRequested(reason="é" * (MAX_TEXT_BYTES // 2 + 1)), "StopRequested.reason is longer than 1048576 bytes"),
    (StopRequested(reason="\ud800"), "cannot be recorded"),
    (replace(TRAIN, groups=(1, True)), "TrainStep.groups has entries that are not ints"),
    (replace(TRAIN, groups=(2**63,)), "TrainStep.groups .*64-bit"),
    (replace(TRAIN, groups=[1, 2]), "TrainStep.groups is a list"),
    (replace(MEASURED, rewards=(1.0, nan)), "not finite"),
    (replace(MEASURED, rewards=(inf, 1.0)), "not finite"),
    (replace(MEASURED, rewards=(1.0, 2)), "not floats"),
    (SetTimer(timer=1, name="drain", delay_s=inf, cause=0), "SetTimer.delay_s is inf"),
    (Event(), "Event is not in the record's table"),
]


@pytest.mark.parametrize(("item", "said"), UNWRITABLE)
def test_what_cannot_be_read_back_is_not_written(item: Event | Command, said: str) -> None:
    with pytest.raises(CodecError, match=said):
        encode_event(item) if isinstance(item, Event) else encode_command(item)


def test_a_command_names_an_event_of_its_tick_as_cause() -> None:
    with pytest.raises(CodecError, match="StartGroup has cause 9, but must have an event of its tick as its cause"):
        encode_tick(4, (event(4),), (START,))
    with pytest.raises(CodecError, match="number of a tick or event is -1"):
        encode_tick(0, (RunStarted(),), ())
    with pytest.raises(CodecError, match="one time and consecutive ids, but one has id 6"):
        encode_tick(0, (event(4), event(6)), ())


def packed(*plain: object) -> bytes:
    return msgpack.packb(list(plain))


@pytest.mark.parametrize(
    ("id", "at", "said"),
    [
        *((0, at, "the time of a tick is") for at in (3, "3", None, nan, inf, -inf)),
        *((id, 0.0, "the number of a tick or event is") for id in (-1, 2**63, True, 1.0, "1", None)),
    ],
)
def test_a_frame_with_a_wrong_position_or_time_is_refused(id: object, at: object, said: str) -> None:
    drawn = [2, 0, 3, True, 0, ""]
    assert decode_frame(packed(1, 2, 7, 0.5, [drawn], [], True)).events == (decode_event(packed(*drawn), 7, 0.5),)
    for place in ((id, 7), (2, id)):
        with pytest.raises(CodecError, match=said):
            decode_frame(packed(1, *place, at, [drawn], [], True))


UNREADABLE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "incomplete input"),
    "not an array": (msgpack.packb(3), "cannot decode the event"),
    "empty array": (packed(), "cannot decode the event"),
    "a map": (msgpack.packb({1: 2}), "cannot decode the frame"),
    "binary": (packed(20, b"now"), "max_bin_len"),
    "extension": (packed(20, msgpack.ExtType(4, b"x")), "max_ext_len"),
    "timestamp": (packed(20, msgpack.Timestamp(1)), "max_ext_len"),
    "unknown tag": (packed(999), "unknown event tag 999; use the engine version"),
    "tag 0": (packed(0), "unknown event tag 0"),
    "bool for a tag": (packed(True), "begins with a tag"),
    "text for a tag": (packed("RunStarted"), "begins with a tag"),
    "field missing": (packed(2, 0, 3), "PromptsDrawn must have 5 fields, not 2"),
    "field too many": (packed(2, 0, 3, True, 1, "", 1), "PromptsDrawn must have 5 fields, not 6"),
    "int for a bool": (packed(2, 0, 3, 1, 0, ""), "PromptsDrawn.exhausted is a int, not a bool"),
    "bool for an int": (packed(2, 0, True, True, 0, ""), "PromptsDrawn.count is a bool, not a int"),
    "float for an int": (packed(2, 0.0, 3, True, 0, ""), "PromptsDrawn.first is a float, not a int"),
    "int for a float": (packed(3, 7, 1, 0, 1, 30, 2, 3, 4, 1, 1.0, ""), "reward_mean is a int, not a float"),
    "nan": (packed(3, 7, 1, 0, 1, 30, 2, 3, 4, nan, 1.0, ""), "reward_mean is nan"),
    "too large": (packed(2, 2**63, 3, True, 0, ""), "PromptsDrawn.first does not fit into a signed 64-bit integer"),
    "none": (packed(2, None, 3, True, 0, ""), "PromptsDrawn.first is a NoneType"),
    "long text": (packed(20, "x" * (MAX_TEXT_BYTES + 1)), "max_str_len"),
    "not UTF-8": (packed(20, "xx")[:-2] + b"\xff\xfe", "invalid start byte"),
    "surplus bytes": (packed(1) + b"\x00", "extra data"),
    "cut": (packed(2, 0, 3, True)[:-1], "cannot decode the frame"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_wrong_bytes_are_no_event(case: str) -> None:
    data, said = UNREADABLE[case]
    with pytest.raises(CodecError, match=said):
        decode_event(data)


def test_wrong_bytes_are_no_command() -> None:
    with pytest.raises(CodecError, match="cannot decode the command"):
        decode_command(b"\xc0", 0)
    for groups in ([True], [1.0], [2**63], "12", {1: 2}):
        with pytest.raises(CodecError):
            decode_command(packed(6, groups), 0)


VALID = [
    encode_tick(7, (GENERATED,), (START, TRAIN)),
    encode_rejected(7, (GENERATED,), "InvariantViolated: law 1"),
    encode_event(GENERATED),
    encode_command(START),
]


def survive(data: bytes) -> None:
    """Anything may come of bytes but a crash."""
    for decode in (decode_frame, decode_event, decode_header, lambda bytes_: decode_command(bytes_, 0)):
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


@pytest.mark.parametrize("base", VALID, ids=["tick", "rejected", "event", "command"])
def test_every_truncation_is_refused(base: bytes) -> None:
    decode = {0: decode_frame, 1: decode_frame, 2: decode_event}.get(
        VALID.index(base), lambda data: decode_command(data, 9)
    )
    decode(base)
    for length in range(len(base)):
        with pytest.raises(CodecError):
            decode(base[:length])


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
    padded = (b"\x97\x01" + claim + bytes(size))[:size]
    tracemalloc.start()
    try:
        for data in (nested, padded):
            tracemalloc.reset_peak()
            survive(data)
            assert tracemalloc.get_traced_memory()[1] < 4_000_000 + 100 * size
    finally:
        tracemalloc.stop()
