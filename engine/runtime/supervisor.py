"""Starts, stops and watches the processes that the scheduler orders, and reports what happens to them.

Called by the executor and `run_parts.py`, on the driver's event loop. It takes over running processes after a failover.
Must never decide anything: the core decides whether and from where a lost process restarts (`scheduling/processes.py`).
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from engine.commands import StartProcess, StopProcess
from engine.errors import EngineError, RunFailed, clean, reason_of
from engine.events import CheckpointDamaged, Event, ProcessLost, ProcessUp, ProcessWaits
from engine.ids import NO_VERSION, LifeNumber, StepId
from engine.runtime.process_port import SERVICES, Found, Key, Life, ProcessEnd, Processes, Sign, source_of
from engine.states.process import ADDED_STATES, GATEWAY, REPLICA, SCORER, TRAINER, Process, name_of
from engine.states.state import State
from engine.states.timeouts import MOST_S
from engine.storage.checkpoints import checkpoint_path, damaged_of, is_sound, put_aside
from engine.workers.plan import Plan, Redo, Restore
from engine.workers.threads import on_a_thread

log = logging.getLogger(__name__)

LAUNCHED = (TRAINER, SCORER, ADDED_STATES, REPLICA)
"""The order in which a launch starts processes. In one process, they load in this order, one after another."""


class Supervisor:
    """The processes of one run, by kind and index."""

    def __init__(
        self,
        plan: Plan,
        processes: Processes,
        state: State,
        deliver: Callable[[Event], None],
        give_up: Callable[[str], None],
        found: Found | None = None,
    ) -> None:
        """`found`: processes of an earlier scheduler process, for `take_up`. `give_up(reason)` ends the run after a
        defect of this class."""
        self._plan = plan
        self._processes = processes
        self._state = state
        self._deliver = deliver
        self._give_up = give_up
        self.lives: dict[Key, Life] = {}
        """The current life of each process."""
        self._watched: set[Life] = set()
        """Lives that `start` or the watch handles already."""
        self._begun: dict[Key, LifeNumber] = {}
        """The newest life of each process that this supervisor has started or refused."""
        self._ending: dict[tuple[Key, LifeNumber], asyncio.Future[object]] = {}
        """The ends of lives that were killed but have not ended yet."""
        self._reporting: set[tuple[Key, LifeNumber]] = set()
        """Lives that have ended, and whose loss is reported once it is known what they left."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._found = found
        for kind, life in processes.services().items():
            life.number = self._newest((kind, 0)) + (found is None)
            self.lives[kind, 0] = life

    # the launch

    async def open(self, restore: Restore | None = None) -> None:
        """Start every process and wait until each is up, except replicas without room in the cluster. The trainer
        begins from `restore`. The time limit of a start begins anew with each process that comes up.

        Raises the first failure; it names the process, unless it is of a class that says more. Once enough replicas are
        up, `start` reports the failures of the others. This wait only shows a user a broken plan before the run begins;
        no decision of the run depends on it.
        """
        launch = asyncio.ensure_future(self._launch(restore))
        limit_s = self._limit_of_start(restore)
        try:
            while not launch.done():
                late = self._loading()
                await asyncio.wait([launch], timeout=limit_s)
                if not launch.done() and self._loading() == late and (late := await self._not_waiting_for_room(late)):
                    for life in late:
                        self._forget(life, hung=True)
                    first = min(late, key=lambda life: (LAUNCHED.index(life.kind), life.index))
                    limit = f"the time limit of {limit_s:g} s to start (timeouts.start_s)"
                    raise RunFailed(f"{name_of(*first.key)} exceeded {limit}, before the run has begun")
            await launch
        except Exception as error:
            failed = next((life for life in self.lives.values() if life.failure is error), None)
            if failed is None or (isinstance(error, EngineError) and type(error) not in (EngineError, RunFailed)):
                raise
            raise RunFailed(f"{name_of(*failed.key)} could not be started: {reason_of(error)}") from error
        finally:
            launch.cancel()

    def _limit_of_start(self, restore: Restore | None) -> float | None:
        """Seconds in which a process of the launch must come up; None: there is no limit."""
        timeouts = self._state.limits.timeouts
        limit_s = timeouts.limit("start", None)
        if limit_s is None or restore is None:
            return limit_s
        train_s = timeouts.limit("train", None)
        return limit_s + len(restore.redo) * (MOST_S if train_s is None else train_s)

    def _loading(self) -> list[Life]:
        return [life for life in self.lives.values() if not life.up and life.kind not in SERVICES]

    async def _not_waiting_for_room(self, lives: list[Life]) -> list[Life]:
        replicas = sum(life.kind == REPLICA for life in self.lives.values())
        lacks = {kind: await self._processes.lacking(kind, replicas) for kind in (REPLICA, TRAINER)}
        return [life for life in lives if not lacks.get(life.kind)]

    async def _launch(self, restore: Restore | None) -> None:
        replicas = [self._make((REPLICA, index)) for index in self._plan.lives()]
        workers = [self._make((SCORER, index)) for index in range(len(self._plan.limits.scorers()))]
        workers += [self._make((ADDED_STATES, 0))] if self._plan.limits.added_states else []
        others = [self._make((TRAINER, 0)).begin(restore), *(life.begin() for life in workers)]
        enough = max(1, min(await self._processes.room(), len(replicas)))
        if self._plan.shares_gpus:  # vLLM measures what is free on its GPU as it starts
            await asyncio.gather(*others)
        if 0 < self._plan.gpus.replica_gpus < 1:  # replicas may be on one GPU, so they start one after another
            for life in replicas[:enough]:
                life.opening = life.begin()
                await life.opening
        for life in replicas:
            life.opening = life.opening or life.begin()
        opening = [life.opening for life in replicas if life.opening is not None]
        await asyncio.gather(_first_up(enough, opening), *others)

    def begin(self) -> None:
        """Watch the processes of the launch, once the run has begun. The scheduler orders the start of replicas."""
        for life in list(self.lives.values()):
            if life not in self._watched and life.kind != REPLICA:
                self._watch(life)
        self._report_gateway()

    def _report_gateway(self) -> None:
        """Report the gateway as up, unless that is known. The core does not order its start."""
        life, known = self.lives.get((GATEWAY, 0)), self._state.find_process(GATEWAY, 0)
        if life is not None and (known is None or known.state != "up"):
            life.number = self._newest((GATEWAY, 0)) + 1
            self._deliver(ProcessUp(kind=GATEWAY, index=0, life=life.number))

    def _make(self, key: Key) -> Life:
        """Make the next life of a process."""
        return self._make_life(key, self._newest(key) + 1)

    def _newest(self, key: Key) -> LifeNumber:
        process = self._state.find_process(*key)
        return 0 if process is None else process.life

    def _make_life(self, key: Key, number: LifeNumber) -> Life:
        """Make a life of a process. Raises the reason if it cannot be made."""
        self._begun[key] = number
        life = self.lives[key] = self._processes.make(*key, number)
        return life

    # after the scheduler's process ended

    def take_up(self) -> None:
        """Take over the processes in the state that an earlier scheduler process started. Lives that the state
        does not list are killed."""
        assert self._found is not None
        listed: dict[tuple[str, LifeNumber], Key] = {}
        for process in self._known():
            if process.kind not in SERVICES and process.state != "gone":
                listed[source_of(process.kind, process.index), process.life] = (process.kind, process.index)
        kept = {source_of(kind, 0) for kind in SERVICES}
        for (source, number), running in self._found.processes.items():
            key = listed.get((source, number))
            if key is not None and source not in self._found.silent:
                self.lives[key] = running
            elif source not in kept:
                running.kill()

    def recover(self) -> None:
        """Watch the processes that `take_up` found, and report those that are gone. Call it after the open orders were
        reissued, because those restart processes that were starting."""
        assert self._found is not None
        for process in self._known():
            key = (process.kind, process.index)
            life = self.lives.get(key)
            if process.state == "up" and (life is None or life.number != process.life):
                why = self._found.silent.get(source_of(*key), "it ended while there was no scheduler")
                self.spawn(self._report(key, process.life, ProcessEnd(why)))
        for life in list(self.lives.values()):
            if life not in self._watched:
                self._watch(life)
        self._report_gateway()

    def _known(self) -> list[Any]:
        """Every process in the state."""
        replicas = [replica.process for replica in self._state.replicas.by_id.values()]
        return [*replicas, *self._state.processes.values()]

    # orders about processes

    def start(self, command: StartProcess) -> None:
        """Start a life, unless it exists; `ProcessUp` or `ProcessLost` reports the result. Never raises: a
        life that cannot be made is reported as lost, after this method returns."""
        key, number = (command.kind, command.index), command.life
        life = self.lives.get(key)
        if life is not None and life.number < number:
            self._forget(life)
            life = None
        if self._closed or (life is None and number <= self._begun.get(key, 0)):
            return  # it has ended already; its loss was or will be reported
        if command.steps and self._plan.restore_trainer is None:
            self._begun[key] = number
            reason = "its plan cannot restore a trainer: set Plan.restore_trainer"
            self.spawn(self._report(key, number, ProcessEnd(reason), final=True))
            return
        try:
            life = life or self._make_life(key, number)
        except Exception as error:
            self.spawn(self._report_unstarted(key, number, error))
            return
        if life.number == number and life not in self._watched:
            self._watched.add(life)
            self.spawn(self._bring_up(life, command))

    def stop(self, command: StopProcess) -> None:
        """End a life and report it, even if it has ended already."""
        key = (command.kind, command.index)
        if self._closed or (key, command.life) in self._ending or (key, command.life) in self._reporting:
            return
        life = self.lives.get(key)
        current = life is not None and life.number == command.life
        if life is not None and current and (command.hung or life.kind == TRAINER):
            self.spawn(self._end(life, command))
            return
        if life is not None and current:
            self._forget(life)
        if (key, command.life) in self._ending:
            self.spawn(self._report_gone(key, command))
        else:
            self._deliver(self._loss(key, command.life, command.reason))

    async def _report_gone(self, key: Key, command: StopProcess) -> None:
        await self._until_gone(key)
        if not self._closed:
            self._deliver(self._loss(key, command.life, command.reason))

    async def _end(self, life: Life, command: StopProcess) -> None:
        """End a life and report it, with the stacks of a hung process, and with what a trainer has published
        and saved."""
        stacks = await self._stacks(life) if command.hung else ""
        if self._is_current(life):
            await self._end_life(life, hung=command.hung)
            await self._report(life.key, life.number, ProcessEnd(f"{command.reason}{stacks}"))

    async def probe(self, process: Process) -> Sign | None:
        """Ask a process what it waits for. Never returns if it hangs; None if it has ended."""
        life = self.lives.get((process.kind, process.index))
        if life is None or life.number != process.life:
            return None
        return await life.probe()

    async def _bring_up(self, life: Life, command: StartProcess) -> None:
        try:
            if command.delay_s and not life.opening:
                await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=command.delay_s)
            await self._until_gone(life.key)
            if not self._is_current(life):
                return
            opening = life.opening or life.begin(self._restore(command) if life.kind == TRAINER else None)
            if life.kind in (REPLICA, TRAINER) and not opening.done():
                await self._report_wait(life, opening)
            await opening
        except Exception as error:
            if self._is_current(life):
                await self._end_life(life)
                await self._report_unstarted(life.key, life.number, error)
            return
        if not self._is_current(life):
            return
        if life.kind == REPLICA:
            life.join()
        else:
            self._deliver(ProcessUp(kind=life.kind, index=life.index, life=life.number))
        self._watch(life)

    def _is_current(self, life: Life) -> bool:
        """Whether this is the current life of its process, and its end is not reported yet."""
        return self.lives.get(life.key) is life and not self._closed

    def _restore(self, command: StartProcess) -> Restore | None:
        """Where a new trainer begins; None: from the initial weights."""
        if not command.steps and not command.redo:
            return None
        batches = {batch.step: batch for batch in self._state.checkpoints.batches(command.steps)}
        redo = tuple(Redo(step=s, groups=batches[s].groups, staleness=batches[s].staleness) for s in command.redo)
        path = None
        if command.steps and command.version == NO_VERSION and self._plan.run_dir is not None:
            path = str(checkpoint_path(self._plan.run_dir / "checkpoints", command.steps))
        if command.version != NO_VERSION:
            log.warning(
                "the next trainer has the weights of version %d; the optimizer's moments are lost", command.version
            )
        if redo:
            log.warning("the next trainer trains steps %d to %d again", redo[0].step, redo[-1].step)
        return Restore(
            steps=command.steps,
            optimizer_steps=command.updates,
            checkpoint=path,
            version=command.version,
            redo=redo,
            order=command.number,
        )

    async def _report_wait(self, life: Life, opening: "asyncio.Future[None]") -> None:
        """Report that a replica or the trainer waits for room. Ray starts it when the cluster has room, perhaps on a
        node that is added later. Ray learns late that a node is lost, so this asks again until the process is up."""
        said = ""
        while not opening.done():
            replicas = sum(key[0] == REPLICA for key in self.lives)
            lacking = await self._processes.lacking(life.kind, replicas)
            if lacking is None or opening.done() or not self._is_current(life):
                return
            if lacking != said:
                said = lacking
                log.warning("%s waits for room: %s", name_of(*life.key), lacking or "there is room now")
                self._deliver(ProcessWaits(kind=life.kind, index=life.index, life=life.number, reason=lacking))
            await asyncio.wait([opening], timeout=self._processes.look_again_s)

    # watching

    def _watch(self, life: Life) -> None:
        life.up = True
        self._watched.add(life)
        self.spawn(self._watch_until_lost(life))

    async def _watch_until_lost(self, life: Life) -> None:
        ended = await life.lost()
        if ended.silent and self._is_current(life):
            ended = ProcessEnd(f"{ended.reason}{await self._stacks(life)}")
        if self._is_current(life):
            await self._end_life(life)
            await self._report(life.key, life.number, ended)

    async def _stacks(self, life: Life) -> str:
        """Make a hung process write its stacks. Returns the end of a sentence that says where they are."""
        where = await life.stacks()
        return f"; {where}" if where else ""

    async def _report_unstarted(self, key: Key, number: LifeNumber, error: Exception) -> None:
        log.error("%s could not be started (life %d)", name_of(*key), number, exc_info=error)
        await self._report(key, number, ProcessEnd(f"it could not be started: {reason_of(error)}"))

    async def _report(self, key: Key, number: LifeNumber, ended: ProcessEnd, *, final: bool = False) -> None:
        """Report a lost life, after the events that the scheduler needs to start the next one."""
        self._reporting.add((key, number))
        log.warning("%s is lost (life %d): %s", name_of(*key), number, ended.reason)
        known: dict[str, Any] = {}
        if key[0] == TRAINER:
            known = {"published": await self._processes.published(), "saved": await self._saved()}
            await self._report_damage(number)
        # A store reports itself that its disk is full; a restart would not help.
        full = ended.self_reported and key[0] in SERVICES and key[0] != GATEWAY
        reason = f"it can no longer store data: {ended.reason}" if full else ended.reason
        self._reporting.discard((key, number))
        if not self._closed:
            self._deliver(self._loss(key, number, reason, final=final or full, **known))

    async def _saved(self) -> tuple[StepId, ...]:
        """Train steps of checkpoints that are complete, were ordered, and were not reported."""
        if self._plan.run_dir is None:
            return ()
        directory = self._plan.run_dir / "checkpoints"
        ordered: list[StepId] = list(self._state.orders.open["checkpoint"])
        sound = [await on_a_thread(is_sound, checkpoint_path(directory, steps)) for steps in ordered]
        return tuple(steps for steps, is_complete in zip(ordered, sound, strict=True) if is_complete)

    async def _report_damage(self, number: LifeNumber) -> None:
        """Report damaged checkpoints and set them aside. Otherwise a later checkpoint of the same step would count as
        written."""
        if self._plan.run_dir is None:
            return
        directory = self._plan.run_dir / "checkpoints"
        saved = self._state.checkpoints.steps[::-1]
        paths = {checkpoint_path(directory, steps): steps for steps in saved}
        damaged = await on_a_thread(damaged_of, list(paths))
        for path, reason in damaged.items():
            if self._closed or self._state.ending.outcome is not None or self._begun.get((TRAINER, 0), 0) > number:
                return  # a newer trainer may use it, or nothing receives the report
            log.warning("the checkpoint %s is damaged and will not be used: %s", path, reason)
            self._deliver(CheckpointDamaged(steps=paths[path], reason=clean(reason)))
            try:
                if path.exists():
                    put_aside(path)
            except OSError as error:
                log.warning("the damaged checkpoint %s cannot be set aside: %s", path, error)

    async def hand_over(self, steps: StepId) -> None:
        """Make the trainer hand over weights that it owes to scorers. Raises the reason if it cannot."""
        life = self.lives.get((TRAINER, 0))
        if life is None:
            raise EngineError("the weights cannot be handed over, because no trainer is running")
        await life.hand_over(steps)

    # the end

    def stop_watching(self) -> None:
        """Report no more lost processes: the run is shutting down."""
        self._closed = True

    async def close(self) -> None:
        """Give processes a limited time to close, then kill all except the stores and the gateway."""
        self.stop_watching()
        lives = [life for life in self.lives.values() if life.kind not in SERVICES]
        closing = [asyncio.ensure_future(life.close()) for life in lives if life.up]
        if closing:
            await asyncio.wait(closing, timeout=self._processes.goodbye_s)
        for end in closing:
            if not end.cancel() and not end.cancelled():
                end.exception()  # retrieved, otherwise asyncio warns
        gone = [*self._ending.values(), *(gone for life in lives if (gone := life.kill()) is not None)]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *gone, return_exceptions=True)

    async def _end_life(self, life: Life, *, hung: bool = False) -> None:
        """`_forget`, then wait until the next life may start. The caller reports the loss."""
        self._reporting.add((life.key, life.number))
        self._forget(life, hung=hung)
        await self._until_gone(life.key)

    def _forget(self, life: Life, *, hung: bool = False) -> None:
        """Kill a life and report nothing more about it."""
        key = life.key
        self.lives.pop(key, None)
        self._watched.discard(life)
        gone = life.kill(hung=hung) if life.kind not in SERVICES else None
        if gone is not None:
            ending = self._ending[key, life.number] = asyncio.ensure_future(gone)
            ending.add_done_callback(lambda end: self._ending.pop((key, life.number)))

    async def _until_gone(self, key: Key) -> None:
        """Wait until the lives of a process that were killed have ended."""
        if ending := [end for (process, _), end in self._ending.items() if process == key]:
            await asyncio.wait(ending)

    def _loss(self, key: Key, number: LifeNumber, reason: str, *, final: bool = False, **known: Any) -> ProcessLost:
        final = final or self._processes.last(*key)
        return ProcessLost(kind=key[0], index=key[1], life=number, reason=clean(reason), final=final, **known)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task that ends with the run. If it fails, the run ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._closed:
            log.error("a task of the supervisor failed", exc_info=error)
            self._give_up(f"a task of the supervisor failed: {reason_of(error)}")


async def _first_up(enough: int, opening: "list[asyncio.Future[None]]") -> None:
    """Return once this many replicas are up. Raises the first failure before that."""
    for count, opened in enumerate(asyncio.as_completed(opening), 1):
        await opened
        if count >= enough:
            return
