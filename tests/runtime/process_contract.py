"""What the supervisor relies on in every implementation of the process port: cases for a real supervisor over one.

`test_process_contract` plays them in this process and on a virtual clock, `actors/test_ray_contract` over Ray. The
class attributes of `Scene` say in what an implementation lawfully differs.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from engine import commands
from engine.events import Event, GroupGenerated, ProcessLost, ProcessUp
from engine.protocols import GroupWork
from engine.runtime.executor import RunExecutor
from engine.runtime.local import SimpleGenerator, SimpleTrainer, response
from engine.runtime.process_port import Processes, SentOrder
from engine.runtime.prompt_sources import CountedPrompts
from engine.runtime.supervisor import Supervisor
from engine.scheduling.scheduler import Scheduler
from engine.states.limits import Limits, Pool
from engine.states.process import REPLICA, SCORER, TRAINER, Process
from engine.trajectory import Prompt, Trajectory
from engine.workers.plan import Liveness, Plan, Rollout

SLOTS = 3
ENDLESS = 100
"""A group that is never finished."""

# -- the user's code: a directory says what happens in it, because it may run in any process ---------------------------


def begin(directory: Path, kind: str) -> None:
    """What each factory does first."""
    if (directory / "fails").exists():
        (directory / "fails").unlink()
        raise RuntimeError("no memory")
    note(directory, "begin", kind)
    wait_at_gate(directory)


def note(directory: Path, what: str, kind: str) -> None:
    with (directory / kind).open("a") as log:
        log.write(f"{what} {os.getpid()}\n")


def wait_at_gate(directory: Path) -> None:
    if (directory / "gate").exists():
        (directory / "gate").read_text()  # a named pipe


class Sampler(SimpleGenerator):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        begin(directory, REPLICA)
        self._directory = directory

    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        if work.group == ENDLESS:
            await asyncio.Event().wait()
        return [response([1, 2], reward=0.0, version=version)]

    async def close(self) -> None:
        for _ in range(1000):  # of the event loop: the next life would begin meanwhile
            await asyncio.sleep(0)
        note(self._directory, "end", REPLICA)


class Learner(SimpleTrainer):
    def __init__(self, directory: Path) -> None:
        begin(directory, TRAINER)
        self._directory = directory

    def weights(self) -> None:
        wait_at_gate(self._directory)

    def close(self) -> None:
        note(self._directory, "end", TRAINER)


def prompts() -> CountedPrompts:
    return CountedPrompts(None, lambda group: Prompt(row=group, text="?"))


def contract_plan(directory: Path) -> Plan:
    pools = (Pool(tasks=("rollout",), replicas=(0,)), Pool(tasks=("train",)), Pool(tasks=("old_logprobs",)))
    limits = Limits(
        train_batch_size=1, max_staleness_steps=1, max_concurrent_groups=2, scoring_tasks=("old_logprobs",), pools=pools
    )
    return Plan(
        limits=limits, samples=1, replicas=1, slots=SLOTS, run_dir=directory, trajectories="memory",
        liveness=Liveness(heartbeat_s=0.0),
        make_rollout=lambda replica: Rollout(generator=Sampler(directory)), make_trainer=partial(Learner, directory),
        make_scorer=lambda tasks: begin(directory, SCORER), make_prompts=prompts,
    )  # fmt: skip


# -- a supervisor over an implementation -------------------------------------------------------------------------------


STORES: Any = None
"""The executor has no order for a store."""


class Scene:
    """A supervisor, and the reports about processes and groups that it and the processes have made."""

    stop_waits_for_load = False
    """A process that is loading is stopped only once the user's code returns: a thread cannot be killed."""
    may_die = True
    """A process may end without its own report."""
    may_be_silent = True
    """A process may stop answering probes while the supervisor works."""
    stacks = ""
    """How the reason of a hung process names its stacks."""
    death = "fault"
    """Part of the reason of a process that has died."""

    def __init__(self, plan: Plan, processes: Processes) -> None:
        assert plan.run_dir is not None
        self.directory = plan.run_dir
        self.processes: Any = processes
        self.reports: list[Event] = []
        self._heard = asyncio.Event()
        self._numbers = count()
        self.supervisor = Supervisor(plan, processes, Scheduler(plan.limits).state, self.deliver, pytest.fail)
        self.executor = RunExecutor(
            plan, supervisor=self.supervisor, prompts=prompts(), stores=STORES, post=pytest.fail, finish=pytest.fail
        )

    def deliver(self, event: Event) -> None:
        if isinstance(event, ProcessUp | ProcessLost | GroupGenerated):
            self.reports.append(event)
            self._heard.set()

    async def hears(self, kind: type[Event], /, **fields: Any) -> Any:
        """Wait for a report with these fields."""
        while True:
            for event in self.reports:
                if isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items()):
                    return event
            self._heard.clear()
            await self._heard.wait()

    @property
    def lives(self) -> list[tuple[type[Event], int]]:
        """What was reported about lives, with their numbers."""
        return [(type(one), one.life) for one in self.reports if isinstance(one, ProcessUp | ProcessLost)]

    def start(self, kind: str, number: int) -> None:
        self.supervisor.start(commands.StartProcess(kind=kind, index=0, life=number, cause=0))

    async def up(self, kind: str, number: int) -> None:
        self.start(kind, number)
        await self.hears(ProcessUp, kind=kind, life=number)

    def stop(self, kind: str, number: int, *, hung: bool = False) -> None:
        life = {"kind": kind, "index": 0, "life": number}
        self.supervisor.stop(commands.StopProcess(**life, reason="enough", hung=hung, cause=0))

    def order(self, kind: str, command: Any) -> None:
        """Send an order to the current life."""
        self.supervisor.lives[kind, 0].send([SentOrder(command)])

    def generate(self, group: int, number: int) -> int:
        """Execute an order to start a group. Returns the number of messages."""
        life, before = {"replica": 0, "life": number}, self.executor.calls
        start = commands.StartGroup(group=group, attempt=1, number=next(self._numbers), **life, cause=0)
        self.executor.execute([start])
        return self.executor.calls - before

    async def waits_for(self, kind: str, number: int) -> str | None:
        """Ask a process whom it waits for. None: it has ended."""
        sign = await self.supervisor.probe(Process(kind, life=number))
        return None if sign is None else sign.waits_for

    # what happens in a process

    def noted(self, kind: str) -> tuple[list[str], list[int]]:
        """What the user's code of a kind has noted, and in which processes."""
        lines = [line.split() for line in (self.directory / kind).read_text().splitlines()]
        return [what for what, _ in lines], [int(pid) for _, pid in lines]

    async def hold(self, act: Callable[[], object]) -> Callable[[], None]:
        """Do what makes a process wait at the gate, and return once it does. Returns what opens the gate."""
        gate = self.directory / "gate"
        os.mkfifo(gate)
        act()
        pipe = await asyncio.to_thread(gate.open, "w")
        gate.unlink()
        return pipe.close

    async def hang(self) -> Callable[[], None]:
        """Make the trainer hang. Returns what ends that."""
        publish = commands.PublishWeights(version=1, attempt=1, steps=0, number=next(self._numbers), cause=0)
        return await self.hold(lambda: self.order(TRAINER, publish))

    def silence(self, kind: str) -> None:
        """Make a process answer nothing, if it `may_be_silent`."""

    def kill(self, kind: str) -> None:
        """End a process from outside, if it `may_die`."""

    async def has_ended(self, kind: str, *, but: int = 0) -> bool:
        """Whether all lives of a kind but the newest so many have ended, each before the next began. Over Ray, the
        resources of processes keep them apart, so only whether they end."""
        noted = self.noted(kind)[0]
        return noted == [*["begin", "end"] * (noted.count("begin") - but), *["begin"] * but]


# -- the cases ---------------------------------------------------------------------------------------------------------

Case = Callable[[Scene], Awaitable[None]]
CASES: dict[str, Case] = {}


def case(play: Case) -> Case:
    CASES[play.__name__] = play
    return play


async def play_case(scene: Scene, name: str) -> None:
    try:
        await asyncio.wait_for(CASES[name](scene), 60.0)
    finally:
        await scene.supervisor.close()


@case
async def a_started_process_reports_once_that_it_is_up_with_its_slots(scene: Scene) -> None:
    scene.start(REPLICA, 5)
    scene.start(TRAINER, 2)
    await asyncio.gather(scene.up(REPLICA, 5), scene.up(TRAINER, 2))
    await asyncio.gather(scene.waits_for(REPLICA, 5), scene.waits_for(TRAINER, 2))
    ups = sorted((one for one in scene.reports if isinstance(one, ProcessUp)), key=lambda up: up.life)
    trainer = ProcessUp(kind=TRAINER, index=0, life=2)
    assert ups == [trainer, ProcessUp(kind=REPLICA, index=0, life=5, slots=SLOTS)]
    assert scene.noted(REPLICA)[0] == ["begin"]


@case
async def a_start_that_fails_is_lost_once_with_the_users_error_and_the_next_works(scene: Scene) -> None:
    (scene.directory / "fails").touch()
    scene.start(REPLICA, 1)
    lost = await scene.hears(ProcessLost, life=1)
    assert lost.reason.startswith("it could not be started: RuntimeError: no memory")
    scene.start(REPLICA, 1)  # it is over
    await scene.up(TRAINER, 3)
    scene.stop(REPLICA, 1)  # is answered all the same
    await scene.up(REPLICA, 2)
    assert scene.lives == [(ProcessLost, 1), (ProcessUp, 3), (ProcessLost, 1), (ProcessUp, 2)]
    assert scene.noted(REPLICA)[0] == ["begin"]


@case
async def a_stopped_process_is_lost_once_and_the_next_begins_after_its_end(scene: Scene) -> None:
    await scene.up(REPLICA, 1)
    scene.generate(ENDLESS, 1)
    scene.stop(REPLICA, 1)
    assert (await scene.hears(ProcessLost, life=1)).reason == "enough"
    await scene.up(REPLICA, 2)
    assert scene.lives == [(ProcessUp, 1), (ProcessLost, 1), (ProcessUp, 2)]
    assert await scene.has_ended(REPLICA, but=1)


@case
async def a_process_stopped_while_it_starts_is_lost_and_never_up(scene: Scene) -> None:
    open_gate = await scene.hold(lambda: scene.start(REPLICA, 1))
    scene.stop(REPLICA, 1)
    if scene.stop_waits_for_load:
        await asyncio.sleep(0)
        assert scene.reports == []
        open_gate()
    await scene.hears(ProcessLost, life=1)
    await scene.up(REPLICA, 2)
    open_gate()
    assert scene.lives == [(ProcessLost, 1), (ProcessUp, 2)]


@case
async def a_newer_life_ends_the_older_one_and_does_not_overlap_it(scene: Scene) -> None:
    await scene.up(REPLICA, 1)
    await scene.up(REPLICA, 2)
    assert scene.lives == [(ProcessUp, 1), (ProcessUp, 2)], "who ordered it knows that the older one is over"
    assert await scene.has_ended(REPLICA, but=1)


@case
async def a_lost_process_is_reported_once_with_the_reason(scene: Scene) -> None:
    await scene.up(TRAINER, 1)
    scene.order(TRAINER, commands.StageWeights(version=1, attempt=1, replica=0, life=1, cause=0))
    assert "its worker cannot start StageWeights" in (await scene.hears(ProcessLost, life=1)).reason
    await scene.up(TRAINER, 2)
    lives = [(ProcessUp, 1), (ProcessLost, 1), (ProcessUp, 2)]
    if scene.may_die:
        scene.kill(TRAINER)
        assert scene.death in (await scene.hears(ProcessLost, life=2)).reason
        await scene.up(TRAINER, 3)
        lives += [(ProcessLost, 2), (ProcessUp, 3)]
    assert scene.lives == lives


@case
async def what_is_ordered_of_an_earlier_life_does_not_reach_the_next(scene: Scene) -> None:
    await scene.up(REPLICA, 2)
    assert await scene.waits_for(REPLICA, 1) is None
    assert (scene.generate(1, 1), scene.generate(2, 2)) == (0, 1)
    scene.stop(REPLICA, 1)
    assert (await scene.hears(GroupGenerated, life=2)).group == 2
    assert await scene.waits_for(REPLICA, 2) == ""
    assert scene.lives == [(ProcessUp, 2), (ProcessLost, 1)]
    assert sum(isinstance(report, GroupGenerated) for report in scene.reports) == 1


@case
async def a_probed_process_names_whom_it_waits_for_and_a_silent_one_says_nothing(scene: Scene) -> None:
    await asyncio.gather(scene.up(SCORER, 1), scene.up(REPLICA, 1))
    open_gate = await scene.hold(lambda: scene.start(TRAINER, 1))
    scene.order(SCORER, commands.ScoreBatch(step=1, attempt=1, task="old_logprobs", groups=(), number=0, cause=0))
    while await scene.waits_for(SCORER, 1) != TRAINER:
        await asyncio.sleep(0)  # the question is on its way, or waits for the weights store
    assert await scene.waits_for(REPLICA, 1) == ""
    open_gate()
    await scene.up(TRAINER, 1)
    if scene.may_be_silent:
        scene.silence(SCORER)
        asked = asyncio.ensure_future(scene.waits_for(SCORER, 1))
        await scene.waits_for(REPLICA, 1)
        assert not asked.done()
        asked.cancel()


@case
async def a_hung_process_is_lost_with_its_stacks_and_the_next_does_not_wait_for_it(scene: Scene) -> None:
    await scene.up(TRAINER, 1)
    if scene.stacks:
        await scene.waits_for(TRAINER, 1)  # tells which process it is
    let_go = await scene.hang()
    for _ in range(2):  # a restarted scheduler repeats it
        scene.stop(TRAINER, 1, hung=True)
    file = scene.directory / "logs" / "trainer.stacks"
    assert (await scene.hears(ProcessLost, life=1)).reason == "enough" + scene.stacks.format(file=file)
    assert not scene.stacks or "in wait_at_gate" in file.read_text()
    await scene.up(TRAINER, 2)
    let_go()
    assert scene.lives == [(ProcessUp, 1), (ProcessLost, 1), (ProcessUp, 2)]


@case
async def after_the_close_every_process_has_ended_and_nothing_is_reported(scene: Scene) -> None:
    await asyncio.gather(scene.up(TRAINER, 1), scene.up(REPLICA, 1), scene.up(SCORER, 1))
    scene.generate(ENDLESS, 1)
    before = [*scene.reports]
    await scene.supervisor.close()
    scene.start(REPLICA, 2)
    scene.stop(TRAINER, 1)
    assert await scene.has_ended(REPLICA) and await scene.has_ended(TRAINER)
    assert scene.reports == before


@case
async def the_close_waits_for_a_process_that_is_being_stopped(scene: Scene) -> None:
    await scene.up(REPLICA, 1)
    scene.stop(REPLICA, 1)
    await scene.supervisor.close()
    assert await scene.has_ended(REPLICA)
