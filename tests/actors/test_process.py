"""What an actor's process does first."""

import gc
import logging
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.actors.detached_actors import prepare_process
from engine.runtime.garbage_collection import collect_rarely, freeze_objects, rare_collection


class Ring:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def looks() -> Iterator[list[int]]:
    """The generation of every look for garbage."""
    before, seen = gc.get_threshold(), list[int]()

    def note(phase: str, about: dict[str, Any]) -> None:
        if phase == "stop":
            seen.append(about["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)
    gc.set_threshold(*before)


def test_a_large_state_is_not_looked_through_while_it_grows_and_cycles_still_go(looks: list[int]) -> None:
    collect_rarely()
    freeze_objects()
    looks.clear()
    state = [[number] for number in range(600_000)]
    assert 0 < len(looks) <= 13 and 2 not in looks
    ring = Ring()
    dead = weakref.ref(ring)
    del ring
    state += [[number] for number in range(1_200_000)]
    assert dead() is None, "garbage in cycles is found all the same"


def test_a_loading_process_traverses_its_objects_rarely_and_afterwards_as_before(looks: list[int]) -> None:
    gc.set_threshold(700, 10, 10)
    with pytest.raises(OSError), rare_collection():
        looks.clear()
        loaded = [[number] for number in range(400_000)]
        assert 0 < len(looks) <= 9 and 2 not in looks
        raise OSError(f"only {len(loaded)} objects could be loaded")
    assert gc.get_threshold() == (700, 10, 10)


def test_a_log_line_with_a_models_text_cannot_control_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("engine")
    for name, value in (("handlers", []), ("level", logger.level), ("propagate", True)):
        monkeypatch.setattr(logger, name, value)
    prepare_process("rollout", tmp_path)
    logging.getLogger("engine.workers").warning("the answer was %s", "\x1b[2Jgone")
    text = (tmp_path / "logs" / "rollout.log").read_text()
    assert "\x1b" not in text and r"\x1b[2Jgone" in text


def test_a_log_whose_directory_was_deleted_is_written_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("engine")
    for name, value in (("handlers", []), ("level", logger.level), ("propagate", True)):
        monkeypatch.setattr(logger, name, value)
    prepare_process("scheduler", tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    logging.getLogger("engine.runtime.driver").warning("the run cannot continue")
    assert "the run cannot continue" in capsys.readouterr().err
