"""What the tests of the record share: strategies for every event and command, a small recorded run, a scheduler's
double."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

from hypothesis import strategies as st

from engine.commands import COMMANDS, Command, DrawPrompts, StartGroup
from engine.events import EVENTS, Event, PromptsDrawn, RunStarted, stamp
from engine.policies import PolicySet
from engine.record import Header, MemoryRecorder, Recorder, read
from engine.record.recorder import RecordWriter
from engine.record.segment_log import FRAME_BYTES, PREAMBLE_BYTES
from engine.simulation.world import Faults, Setting, World
from engine.states.limits import Limits
from tests.killed_writers import leave_open

INT64 = st.integers(min_value=-(2**63), max_value=2**63 - 1)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: INT64,
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    str: st.text(max_size=40),
    tuple[int, ...]: st.lists(INT64, max_size=20).map(tuple),
    tuple[str, ...]: st.lists(st.text(max_size=40), max_size=5).map(tuple),
    tuple[float, ...]: st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20).map(tuple),
}
POSITIONS = st.integers(min_value=0, max_value=2**63 - 1)
OUTER = {"id": POSITIONS, "at": VALUES[float], "cause": POSITIONS}


def objects(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Objects of an event or command class, read off its annotations, so that a new class joins by itself."""
    hints = get_type_hints(cls)
    is_event = issubclass(cls, Event)
    stamps = {"id", "at"} if is_event else {"cause"}
    names = cls.__struct_fields__
    return st.builds(cls, **{name: OUTER[name] if name in stamps else VALUES[hints[name]] for name in names})


events: st.SearchStrategy[Event] = st.one_of([objects(cls) for cls in EVENTS])
commands: st.SearchStrategy[Command] = st.one_of([objects(cls) for cls in COMMANDS])


def header(**changes: Any) -> Header:
    return Header(**{"run": "test", "limits": {"train_batch_size": 4}, "policies": {"filter": "none"}, **changes})


def event(position: int, at: float | None = None) -> PromptsDrawn:
    """A stamped event for records that are only read, never replayed."""
    drawn = PromptsDrawn(first=position, count=3, exhausted=False)
    stamp(drawn, position, position / 10 if at is None else at)
    return drawn


def answer(position: int) -> tuple[Command, ...]:
    return tuple(
        StartGroup(group=position + place, attempt=1, replica=0, life=1, cause=position)
        for place in range(position % 3)
    )


def fill(recorder: RecordWriter, count: int) -> None:
    for position in range(count):
        recorder.write((event(position),), answer(position))
    recorder.flush()


def written(directory: Path, count: int, **options: Any) -> Path:
    """A record of `count` events whose writer was killed; the path of its first segment."""
    recorder = Recorder(directory, header(), **options)
    fill(recorder, count)
    recorder.close()
    leave_open(directory)
    return directory / "00000000.seg"


def frame_offsets(data: bytes) -> list[int]:
    """Where the frames of a segment begin."""
    offsets, at = [], PREAMBLE_BYTES
    while at < len(data):
        offsets.append(at)
        at += FRAME_BYTES + struct.unpack_from("<I", data, at)[0]
    assert at == len(data)
    return offsets


def positions(directory: Path) -> list[int]:
    return [event.id for event in read(directory).events()]


LIMITS = Limits(
    train_batch_size=4,
    max_staleness_steps=2,
    max_concurrent_groups=8,
    sync_mode="abort",
    max_steps=6,
    checkpoint_every=2,
)
FAULTS = Faults(die=0.02, fail_group=0.05, fail_data=0.03, fail_sync=0.05, fail_trainer=0.05, duplicate=0.05)


def record_run(
    directory: Path | None = None, seed: int = 3, limits: Limits = LIMITS, faults: Faults = FAULTS,
    snapshot_every: int = 0, steps: int | None = None, **options: Any,
) -> MemoryRecorder | Recorder:  # fmt: skip
    """A small simulated run, recorded in memory or into a directory; it breaks off after so many train steps. `options`
    are the recorder's."""
    policies = PolicySet.from_names({})
    head = Header(run=f"seed-{seed}", limits=limits.to_plain(), policies=dict(policies.names), code="test")
    recorder = MemoryRecorder(head) if directory is None else Recorder(directory, head, **options)
    setting = Setting(limits=limits, replicas=2, slots=4, prompts=60, seed=seed, faults=faults)
    world = World(setting, policies, recorder, snapshot_every=snapshot_every)
    if steps is None:
        world.run()
    else:
        assert world.run_until(lambda state: state.training.steps_trained == steps)
        world.close()
    recorder.close()
    return recorder


class Echo:
    """A scheduler's double: answers `RunStarted` with `DrawPrompts`, the rest with `answer`."""

    def __init__(self, wrong_at: int = -1, **wrong: Any) -> None:
        self.wrong_at = wrong_at
        self.wrong = wrong

    def tick(self, events: Sequence[Event]) -> tuple[Command, ...]:
        (event,) = events
        if event.id == self.wrong_at:
            if "raised" in self.wrong:
                raise self.wrong["raised"]
            return self.wrong.get("commands", answer(event.id))
        if isinstance(event, RunStarted):
            return (DrawPrompts(first=0, count=1, cause=event.id),)
        return answer(event.id)
