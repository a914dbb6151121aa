"""Signs of life, without Ray: an actor that says that it cannot continue, one that dies, one that is silent."""

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from handles import without_place
from ray.exceptions import RayError
from ray_plans import plan

from engine.actors.detached_actors import calls_file
from engine.actors.failures import PATIENCE_S, ProcessEnd, Pulse, Sign
from engine.actors.placement import ActorPlacement
from engine.actors.ray_processes import RayProcess
from engine.protocols.user_code import RunningCalls, calls_in
from engine.states.process import REPLICA


class Patient:
    """An actor's handle: it answers so many beats with its process id, then it is silent, or its end is known."""

    def __init__(self, beats: int, end: str | Exception | None = None) -> None:
        self.beats = beats
        self.end = end
        self.over = asyncio.Event()
        self.alive = SimpleNamespace(remote=self._alive)
        self.beat = SimpleNamespace(remote=self._beat)

    async def _alive(self) -> Any:
        await self.over.wait()
        if isinstance(self.end, Exception):
            raise self.end
        return self.end

    async def _beat(self) -> Sign:
        self.beats -= 1
        if self.beats < 0:
            if self.end is None:
                await asyncio.Event().wait()
            self.over.set()
            if isinstance(self.end, Exception):
                raise RayError("it died")
        return Sign(4711)


@pytest.mark.parametrize(
    ("beats", "end", "ended"),
    [
        (3, None, ProcessEnd("no sign of life for 0.03 s", silent=True)),
        (0, None, ProcessEnd("no sign of life for 0.03 s", silent=True)),
        (3, "its engine died", ProcessEnd("its engine died", self_reported=True)),
        (3, RayError("gone"), ProcessEnd("RayError: gone")),
    ],
    ids=["silent", "silent from the first", "broken", "dead"],
)
def test_an_actor_is_lost_after_its_last_sign_of_life_with_the_reason(beats: int, end: Any, ended: ProcessEnd) -> None:
    async def story() -> tuple[ProcessEnd, int]:
        actor = Patient(beats, end)
        return await Pulse(every_s=0.01, missed=3 if ended.silent else 10**4).lost(actor), actor.beats

    found, beats = asyncio.run(story())
    assert replace(found, reason=without_place(found.reason)) == ended and beats == -1


def test_a_process_that_a_reward_ended_is_lost_with_the_name_of_the_reward(tmp_path: Path) -> None:
    script = (
        "import asyncio, os, sys; from pathlib import Path; from types import SimpleNamespace; "
        "from engine.rollout.scoring import Grader; "
        "from engine.trajectory import Prompt, Trajectory, TrajectoryGroup; "
        "from engine.protocols.user_code import CALLS; "
        "CALLS.write_to(Path(sys.argv[1])); score = lambda prompt, trajectory: os._exit(3); "
        "score.__module__, score.__qualname__ = 'my_rewards', 'score'; "
        "group = TrajectoryGroup(group=0, prompt=Prompt(row=0, text=''), trajectories=[Trajectory(text='x')]); "
        "texts = SimpleNamespace(decode=lambda ids, **options: ''); "
        "asyncio.run(Grader(texts, score).score(group))"
    )
    file = calls_file(tmp_path, "rollout-0")
    file.parent.mkdir()
    assert subprocess.run([sys.executable, "-c", script, str(file)], check=False).returncode == 3

    async def story() -> ProcessEnd:
        run = replace(plan(tmp_path), run_dir=tmp_path)
        actor = Patient(1, RayError("gone"))
        pulse = Pulse(every_s=0.01, missed=10**4)
        return await RayProcess((REPLICA, 0), 1, actor, pulse, run, 0, ActorPlacement({})).lost()

    reason = without_place(asyncio.run(story()).reason)
    assert reason.startswith("RayError: gone; it was calling reward my_rewards.score; ") and "processes: 1" in reason
    calls = RunningCalls()
    calls.write_to(file)
    with calls.of("a reward that returns"):
        assert calls_in(file) == "a reward that returns"
    assert without_place(asyncio.run(story()).reason) == "RayError: gone", "nothing was running"


def test_without_beats_none_is_asked_for() -> None:
    async def story() -> tuple[ProcessEnd, int]:
        actor = Patient(3, "its engine died")
        asyncio.get_running_loop().call_soon(actor.over.set)
        return await Pulse(every_s=0.0, missed=3).lost(actor), actor.beats

    assert asyncio.run(story()) == (ProcessEnd("its engine died", self_reported=True), 3)


def test_no_answer_is_waited_for_without_end() -> None:
    assert (Pulse(0.0, 3).patience_s, Pulse(2.0, 3).patience_s) == (PATIENCE_S, 6.0)
