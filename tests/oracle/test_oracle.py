"""The oracle finds no difference in an engine that decides as before, and names each decision that is another."""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine import policies
from engine.commands import COMMANDS, CancelTimer, DiscardGroups
from engine.events import EVENTS
from tests.oracle import hangs
from tests.oracle.decisions import ACCEPTED, differences, main, record
from tests.oracle.formats import SENTENCES, WORDS
from tests.oracle.recordings import SUFFIX, Recording, load, save

SAMPLE = (
    "preset-004", "rough-001", "rough-004", "asked-004", "asked-001", "taken-002", "taken-005", "fleet-004", "cut-003",
    "cut-005", "wild-002", "wild-004",
)  # fmt: skip
HANGS = ("hang-000", "hang-003")


def found(recording: Recording) -> list[str]:
    return [difference.said for difference in differences(recording, (), Counter())]


@cache
def recorded(name: str) -> Recording:
    """A world of today. Callers must not change it."""
    recording, problems = record(name)
    assert not problems
    return recording


@pytest.mark.parametrize("name", SAMPLE)
def test_a_world_is_decided_as_it_was_recorded(name: str) -> None:
    assert found(recorded(name)) == []


@pytest.mark.parametrize("name", HANGS)
def test_whoever_hangs_is_blamed_as_it_was_recorded(name: str) -> None:
    recording = hangs.record(name)
    assert [line for line in recording.ticks if line["said"].startswith("overdue")]
    assert found(recording) == []
    recording.head["script"]["timeouts"] |= {"group_s": 190.0, "sync_s": 190.0}
    assert found(recording), "with other limits other orders are overdue, or later"


def test_every_event_and_command_has_words() -> None:
    assert sorted(WORDS.values()) == sorted(event.__name__ for event in EVENTS)
    assert {*SENTENCES, DiscardGroups, CancelTimer} == {*COMMANDS}


# decisions that are others


@policies.register("dispatch", "oracle-last")
class Last:
    """The last replica that has room."""

    def choose(self, view: Any, oldest: int, group: int) -> int | None:
        return max(
            (one.id for one in view.replicas() if one.running < one.limit and one.version >= oldest), default=None
        )


@policies.register("retry", "oracle-never")
class Never:
    def retry(self, view: Any, group: Any, cause: str) -> bool:
        return False


def on_another_replica(recording: Recording) -> None:
    recording.head["policies"]["dispatch"] = "oracle-last"


def fewer_at_once(recording: Recording) -> None:
    recording.head["policies"]["admission"] = "oracle-halves"


def without_another_attempt(recording: Recording) -> None:
    recording.head["policies"]["retry"] = "oracle-never"


def with_a_charge(recording: Recording) -> None:
    """The engine charges an attempt that was not charged when the world was recorded."""
    tick = next(tick for tick in recording.ticks if any("attempts charged" in said for said in tick["out"]))
    tick["out"] = [said for said in tick["out"] if "attempts charged" not in said]


def in_another_batch(recording: Recording) -> None:
    (tick, step), *_ = [(tick, i) for tick in recording.ticks for i, said in enumerate(tick["out"]) if "train" in said]
    tick["out"][step] = tick["out"][step].replace("groups (", "groups (99, ")


@pytest.mark.parametrize(
    ("other", "world", "said"),
    [
        (on_another_replica, "preset-004", "missing: start group"),
        (fewer_at_once, "preset-004", ": start group"),
        (without_another_attempt, "rough-004", "was failed"),
        (with_a_charge, "rough-004", "unexpected: attempts charged"),
        (in_another_batch, "preset-004", "missing: train step"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_another_decision_is_named(other: Callable[[Recording], None], world: str, said: str) -> None:
    recording = deepcopy(recorded(world))
    other(recording)
    assert any(said in one for one in found(recording)), found(recording)


def test_differences_are_reported_unless_a_change_explains_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def replay() -> tuple[int, list[str]]:
        code = main(["replay", str(tmp_path), "--prefix", "calm-00"])
        return code, capsys.readouterr().out.splitlines()

    assert main(["write", str(tmp_path), "--prefix", "calm-003"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [f"calm-003{SUFFIX}"]
    assert replay() == (0, [])
    recording = load(tmp_path / f"calm-003{SUFFIX}")
    recording.ticks[5]["out"].append("start group 99 on replica 7 life 1, attempt 1, version 0 or newer")
    save(tmp_path, recording)
    code, lines = replay()
    assert code == 1 and lines[1:] == ["1 of 1 worlds differ"]
    assert lines[0].startswith("calm-003, tick 5 at ") and ": missing: start group 99 on replica 7" in lines[0], lines
    (tmp_path / ACCEPTED).write_text("# why\nrow 3 | calm-* | missing: start group 99 *\n")
    assert replay() == (0, ["accepted: 1 by row 3"])
    (tmp_path / ACCEPTED).write_text("calm-* | missing: start group 99 *\n")
    with pytest.raises(SystemExit, match=r"is not: change \| world \| difference"):
        replay()
