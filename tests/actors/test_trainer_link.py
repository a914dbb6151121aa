"""`TrainerLink`: what a new trainer goes on from after the death of one, without Ray."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray_plans import Mortal, plan, restore_mortal

from engine.actors.lasting import Living
from engine.actors.plan import Redo, Restore
from engine.actors.trainer_link import TrainerLink
from engine.commands import SaveCheckpoint, TrainStep
from engine.events import CheckpointSaved, Event, StepFailed
from engine.hosts.checkpoints import checkpoint_path, save_checkpoint
from engine.states.orders import OrderBook

OLDER, NEWEST, TRAINED = 2, 4, 6


class Life:
    """The actor of the next life, as far as it is asked: what it is to go on from. Nothing ends it."""

    def __init__(self) -> None:
        self.restored: list[Restore] = []
        self.bring_up = SimpleNamespace(remote=self._bring_up)
        self.alive = SimpleNamespace(remote=asyncio.Event().wait)

    async def _bring_up(self, restore: Restore) -> None:
        self.restored.append(restore)


def after_a_death(run_dir: Path, held: int) -> tuple[list[Restore], list[Event]]:
    """What the next trainer is to go on from, and what an order to the dead one is answered; `held`: the first step
    whose batch is there yet."""
    given = replace(plan(run_dir), restore_trainer=restore_mortal, heartbeat_s=0.0)
    life, delivered = Life(), list[Event]()
    gone = Living(actors={}, first=1)

    async def story() -> None:
        tasks: list[asyncio.Task[None]] = []

        def spawn(work: Coroutine[Any, Any, None]) -> None:
            tasks.append(asyncio.get_running_loop().create_task(work))

        weights = SimpleNamespace(newest=SimpleNamespace(remote=lambda: asyncio.sleep(0, 0)))
        orders = OrderBook()
        link = TrainerLink(given, (None, None, None, weights), orders, delivered.append, spawn, gone)  # type: ignore[arg-type]
        link._start = lambda incarnation: life
        redo = tuple(Redo(step=step, groups=(step,), staleness=(0,)) for step in range(held, TRAINED))
        link.recover(Restore(steps=held, optimizer_steps=2 * held, redo=redo), dict.fromkeys(range(held, 6), 2), 0)
        order = TrainStep(step=TRAINED, attempt=1, groups=(9,), staleness=(0,), cause=0)
        orders.add(order, at=0.0)
        link.order(order)
        await tasks[0]
        await asyncio.sleep(0)
        for task in tasks[1:]:
            task.cancel()

    asyncio.run(story())
    return life.restored, delivered


def saved(run_dir: Path, damaged: int | None = None) -> None:
    for steps in (OLDER, NEWEST):
        trainer = Mortal(run_dir, ())
        trainer.steps = steps
        save_checkpoint(trainer, run_dir / "checkpoints", steps, keep=2)
    if damaged is not None:
        (checkpoint_path(run_dir / "checkpoints", damaged) / "steps").write_text("5")


def test_the_next_trainer_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path)
    (restore,), (failed,) = after_a_death(tmp_path, held=OLDER)
    assert (restore.steps, restore.reaches, restore.optimizer_steps) == (NEWEST, TRAINED, 2 * NEWEST)
    assert isinstance(failed, StepFailed)


def test_a_damaged_one_is_put_aside_where_the_batches_since_the_one_before_are_held(tmp_path: Path) -> None:
    saved(tmp_path, damaged=NEWEST)
    (restore,), _ = after_a_death(tmp_path, held=OLDER)
    assert (restore.steps, restore.reaches, restore.optimizer_steps) == (OLDER, TRAINED, 2 * OLDER)
    assert restore.checkpoint == str(checkpoint_path(tmp_path / "checkpoints", OLDER))
    assert not checkpoint_path(tmp_path / "checkpoints", NEWEST).exists(), "the next of that name is written anew"


def test_where_they_are_not_held_there_is_no_next_trainer_and_the_damaged_file_is_named(tmp_path: Path) -> None:
    saved(tmp_path, damaged=NEWEST)
    restored, (failed,) = after_a_death(tmp_path, held=NEWEST)
    assert restored == [] and isinstance(failed, StepFailed)
    file = checkpoint_path(tmp_path / "checkpoints", NEWEST) / "steps"
    assert f"{str(file)!r}: is not what was written" in failed.reason and "\n" not in failed.reason
    assert file.exists(), "it is the user's to see"


def test_what_the_book_does_not_have_any_more_as_a_trainer_is_lost_is_not_failed(tmp_path: Path) -> None:
    """Orders come and go while it is looked up what the next one can go on from."""
    given = replace(plan(tmp_path), heartbeat_s=0.0)
    orders, delivered = OrderBook(), list[Event]()
    saved, late = SaveCheckpoint(steps=4, cause=0), TrainStep(step=4, attempt=1, groups=(9,), staleness=(0,), cause=0)

    async def story() -> None:
        asked, found = asyncio.Event(), asyncio.Event()

        async def newest() -> int:
            asked.set()
            await found.wait()
            return 0

        weights = SimpleNamespace(newest=SimpleNamespace(remote=newest))
        gone = Living(actors={}, first=1)
        link = TrainerLink(given, (None, None, None, weights), orders, delivered.append, _close, gone)  # type: ignore[arg-type]
        link._start = lambda incarnation: None
        orders.add(saved, at=0.0)
        replaced = asyncio.create_task(link._replace("out of memory"))
        await asked.wait()
        assert orders.match(CheckpointSaved(steps=4))
        orders.add(late, at=1.0)
        found.set()
        await replaced

    asyncio.run(story())
    assert [type(event) for event in delivered] == [StepFailed]


def _close(work: Coroutine[Any, Any, None]) -> None:
    work.close()
