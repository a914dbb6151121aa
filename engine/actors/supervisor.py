"""Starts, stops and watches the processes that the scheduler asks for, and reports what happens to them. It decides
nothing.

Part of the scheduler actor, on its event loop. It sends orders to the actors, and finds them again after a failover.
The core decides whether a lost process restarts and where it begins (`scheduling/processes.py`).
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import ray
from ray.exceptions import RayError

from engine.actors.births import KEPT, Births, Given, source_of
from engine.actors.failures import failure_reason, raised
from engine.actors.heartbeat import Ended, Pulse, sign_of
from engine.actors.lasting import Living
from engine.actors.placement import Place, found_place, room_now, shortfall
from engine.actors.plan import Plan, Redo, Restore
from engine.actors.stacks import dump_stacks, stacks_file, writes_to
from engine.actors.wire import Order, pack_orders
from engine.commands import ProbeProcess, StartProcess, StopProcess
from engine.errors import EngineError
from engine.events import CheckpointDamaged, Event, ProcessLost, ProcessProbed, ProcessUp, ProcessWaits
from engine.hosts.checkpoints import checkpoint_path, damaged_of, is_sound, put_aside
from engine.hosts.reasons import clean
from engine.ids import NO_VERSION, Incarnation, StepId
from engine.states.process import ADDED_STATES, GATEWAY, REPLICA, SCORER, TRAINER, name_of
from engine.states.state import State

log = logging.getLogger(__name__)

STORE_PATIENCE = 4
"""Factor on the heartbeat limit of the stores. The weights store copies whole models on the event loop that answers
heartbeats."""
GOODBYE_S = 5.0
"""Seconds that a generator gets to close."""
Key = tuple[str, int]


class Life:
    """One life of a process: its actor, and the orders that wait for the end of the drain."""

    __slots__ = (
        "_place", "actor", "incarnation", "index", "kind", "opening", "orders", "pid", "sequence", "up", "watched",
    )  # fmt: skip

    def __init__(self, key: Key, incarnation: Incarnation, actor: Any, place: Place | None = None) -> None:
        self.kind, self.index = key
        self.incarnation = incarnation
        self.actor = actor
        self._place = place or Place({})
        self.orders: list[Order] = []
        self.sequence = 0
        self.opening: asyncio.Future[None] | None = None
        """The result of `bring_up`, if it was called."""
        self.pid = 0
        """Its process id; 0 until its first sign of life."""
        self.up = False
        self.watched = False
        """It is being brought up or watched."""

    def bring_up(self, *given: Any) -> "asyncio.Future[None]":
        """Ask the actor to load what it hosts; `up` when it has."""
        opening: asyncio.Future[None] = asyncio.ensure_future(self.actor.bring_up.remote(*given))
        opening.add_done_callback(self._opened)
        return opening

    def _opened(self, opening: "asyncio.Future[None]") -> None:
        """Read the failure, too: otherwise asyncio warns that nobody did."""
        self.up = not opening.cancelled() and opening.exception() is None

    def send(self, epoch: int) -> None:
        self.sequence += 1
        self.actor.carry_out.remote(epoch, self.sequence, pack_orders(self.orders))
        self.orders = []

    def end(self) -> None:
        """Kill the actor and free its placement group."""
        if self.actor is not None:
            ray.kill(self.actor)
        self._place.free()


class Supervisor:
    """The processes of one run, by kind and index."""

    def __init__(
        self,
        plan: Plan,
        given: Given,
        state: State,
        deliver: Callable[[Event], None],
        give_up: Callable[[str], None],
        gateway: Any = None,
        living: Living | None = None,
        epoch: int = 0,
    ) -> None:
        """`living`: actors of an earlier scheduler process, for `take_up`. `epoch`: of this process; actors refuse
        orders of lower ones. `give_up(reason)` ends the run after a defect of this class."""
        self._plan = plan
        self._given = given
        self._state = state
        self._deliver = deliver
        self._give_up = give_up
        self._births = Births(plan, given, gateway)
        self._pulse = Pulse.of(plan)
        self._patient = Pulse(plan.heartbeat_s, plan.missed_beats * STORE_PATIENCE)
        self._lives: dict[Key, Life] = {}
        self._ordered: dict[Key, Life] = {}
        self._begun: dict[Key, Incarnation] = {}
        """The newest life of each process that was started here, or will be."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._living = living
        self._epoch = epoch
        for kind, actor in zip(KEPT, (*given[2:], gateway), strict=True):
            if actor is not None:
                key = (kind, 0)
                self._lives[key] = Life(key, self._newest(key) + (living is None), actor)

    # the launch

    async def open(self, restore: Restore | None = None) -> None:
        """Start the first life of every process and wait until each is up, except replicas without room in the cluster.
        The trainer begins where `restore` says.

        Raises the first failure. Once enough replicas are up, failures of replicas are left to `start`, which reports
        them. This wait only shows a user a broken plan before the run begins; no decision of the run depends on it.
        """
        replicas = [self._make((REPLICA, index)) for index in self._plan.lives()]
        workers = [self._make((SCORER, index)) for index in range(len(self._plan.limits.scorers()))]
        workers += [self._make((ADDED_STATES, 0))] if self._plan.limits.added_states else []
        trainer = self._make((TRAINER, 0))
        for life in replicas:
            life.opening = life.bring_up()
        opening = [life.opening for life in replicas if life.opening is not None]
        room = await asyncio.to_thread(room_now, self._plan)
        enough = max(1, min(room, len(opening)))
        others = [trainer.bring_up(restore), *(life.bring_up() for life in workers)]
        try:
            await asyncio.gather(_first_up(enough, opening), *others)
        except RayError as error:
            raise raised(error) from None

    def begin(self) -> None:
        """Watch the processes of the launch, once the run has begun. The scheduler orders the start of replicas."""
        for life in list(self._lives.values()):
            if not life.watched and life.kind != REPLICA:
                self._watch(life)
        self._report_gateway()

    def _report_gateway(self) -> None:
        """Report the gateway as up, unless that is known. The core does not order its start."""
        life, known = self._lives.get((GATEWAY, 0)), self._state.find_process(GATEWAY, 0)
        if life is not None and (known is None or known.state != "up"):
            life.incarnation = self._newest((GATEWAY, 0)) + 1
            self._deliver(ProcessUp(kind=GATEWAY, index=0, incarnation=life.incarnation))

    def _make(self, key: Key) -> Life:
        """Make the next life of a process."""
        return self._bear(key, self._newest(key) + 1)

    def _newest(self, key: Key) -> Incarnation:
        process = self._state.find_process(*key)
        return 0 if process is None else process.incarnation

    def _bear(self, key: Key, incarnation: Incarnation) -> Life:
        """Make an actor. Raises Ray's exception for invalid options."""
        self._begun[key] = incarnation
        actor, placed = self._births.make(*key, incarnation)
        life = self._lives[key] = Life(key, incarnation, actor, placed)
        return life

    # after the scheduler's process ended

    def take_up(self) -> None:
        """Take over the processes in the state that an earlier scheduler process started. Lives that the state does not
        list are ended."""
        assert self._living is not None
        listed: dict[tuple[str, Incarnation], Key] = {}
        for process in self._processes():
            if process.kind not in KEPT and process.state != "gone":
                listed[source_of(process.kind, process.index), process.incarnation] = (process.kind, process.index)
        kept = {source_of(kind, 0) for kind in KEPT}
        for (source, incarnation), actor in self._living.actors.items():
            key = listed.get((source, incarnation))
            if key is not None and source not in self._living.silent:
                self._lives[key] = self._found(key, incarnation, actor)
            elif source not in kept:
                ray.kill(actor)
                self._found_place(source, incarnation).free()

    def _found(self, key: Key, incarnation: Incarnation, actor: Any) -> Life:
        return Life(key, incarnation, actor, self._found_place(source_of(*key), incarnation))

    def _found_place(self, source: str, incarnation: Incarnation) -> Place:
        """The placement group of a life that an earlier scheduler process made; None for any process but a replica."""
        several = self._plan.rollout_gpus > 1
        return found_place(self._births.name(source, incarnation)) if several else Place({})

    def recover(self) -> None:
        """Watch the processes that `take_up` found, and report those that are gone. Call it after the open orders were
        reissued, which start what was starting."""
        assert self._living is not None
        for process in self._processes():
            key = (process.kind, process.index)
            life = self._lives.get(key)
            if process.state == "up" and (life is None or life.incarnation != process.incarnation):
                why = self._living.silent.get(source_of(*key), "it ended while there was no scheduler")
                self._spawn(self._report(key, process.incarnation, Ended(why)))
        for life in list(self._lives.values()):
            if not life.watched:
                self._watch(life)
        self._report_gateway()

    def _processes(self) -> list[Any]:
        """Every process in the state."""
        replicas = [replica.process for replica in self._state.fleet.replicas.values()]
        return [*replicas, *self._state.processes.values()]

    # orders about processes

    def start(self, command: StartProcess) -> None:
        """Start a life, unless it exists; `ProcessUp` or `ProcessLost` reports the result. Never raises: a life that
        cannot be made is reported as lost, after the caller returns."""
        key, incarnation = (command.kind, command.index), command.incarnation
        life = self._lives.get(key)
        if life is not None and life.incarnation < incarnation:
            self._forget(life)
            life = None
        if self._closed or (life is None and incarnation <= self._begun.get(key, 0)):
            return  # it has ended already, as was or will be told
        if command.steps and self._plan.restore_trainer is None:
            self._begun[key] = incarnation
            reason = "its plan cannot bring another trainer to where this one was"
            self._spawn(self._report(key, incarnation, Ended(reason), final=True))
            return
        try:
            life = life or self._bear(key, incarnation)
        except Exception as error:
            self._spawn(self._report_unstarted(key, incarnation, error))
            return
        if life.incarnation == incarnation and not life.watched:
            life.watched = True
            self._spawn(self._bring_up(life, command))

    def stop(self, command: StopProcess) -> None:
        """End a life and report it, even if it has ended already."""
        if self._closed:
            return
        key = (command.kind, command.index)
        life = self._lives.get(key)
        there = life is not None and life.incarnation == command.incarnation
        if life is not None and there and (command.hung or life.kind == TRAINER):
            self._spawn(self._end(life, command))
            return
        if life is not None and there:
            self._forget(life)
        self._deliver(_lost(key, command.incarnation, command.reason))

    async def _end(self, life: Life, command: StopProcess) -> None:
        """End a life after collecting more about it: the stacks of a hung process, what a trainer has published and
        saved."""
        stacks = await self._stacks(life) if command.hung else ""
        if self._is_there(life):
            self._forget(life)
            await self._report((life.kind, life.index), life.incarnation, Ended(f"{command.reason}{stacks}"))

    def probe(self, command: ProbeProcess) -> None:
        """Report what a life waits for. Reports nothing if the process does not answer."""
        life = self._lives.get((command.kind, command.index))
        if life is not None and life.incarnation == command.incarnation:
            self._spawn(self._probe(life, command.order))

    async def _probe(self, life: Life, order: int) -> None:
        sign = await sign_of(life.actor)
        if sign is not None and self._is_there(life):
            life.pid = sign.pid
            self._deliver(
                ProcessProbed(kind=life.kind, index=life.index, incarnation=life.incarnation, order=order,
                              waits_for=sign.waits_for)
            )  # fmt: skip

    async def _bring_up(self, life: Life, command: StartProcess) -> None:
        key = (life.kind, life.index)
        try:
            if command.delay_s and not life.opening:
                await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=command.delay_s)
                if not self._is_there(life):
                    return
            given = (self._restore(command),) if life.kind == TRAINER else ()
            opening = life.opening or life.bring_up(*given)
            if life.kind == REPLICA and not opening.done():
                await self._say_if_it_waits(life, opening)
            await opening
        except Exception as error:
            if self._is_there(life):
                self._forget(life)
                await self._report_unstarted(key, life.incarnation, error)
            return
        if not self._is_there(life):
            return
        if life.kind == REPLICA:
            life.actor.join.remote()  # it reports that it is up by itself, before anything else that it reports
        else:
            self._deliver(ProcessUp(kind=life.kind, index=life.index, incarnation=life.incarnation))
        self._watch(life)

    def _is_there(self, life: Life) -> bool:
        """Whether it is the present life of its process, and its end is not reported yet."""
        return self._lives.get((life.kind, life.index)) is life and not self._closed

    def _restore(self, command: StartProcess) -> Restore | None:
        """What a trainer begins from."""
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
        )

    async def _say_if_it_waits(self, life: Life, opening: "asyncio.Future[None]") -> None:
        """Report that a replica waits for room. Ray starts it when the cluster has room, perhaps on a node that is
        added later. Ray learns late that a node is lost, so this asks again until the replica is up."""
        said = ""
        while self._plan.rollout_gpus and not opening.done():
            replicas = sum(key[0] == REPLICA for key in self._lives)
            lacking = clean(await asyncio.to_thread(shortfall, self._plan, replicas))
            if opening.done() or not self._is_there(life):
                return
            if lacking != said:
                said = lacking
                log.warning("replica %d waits for room: %s", life.index, lacking or "there is room now")
                self._deliver(
                    ProcessWaits(kind=REPLICA, index=life.index, incarnation=life.incarnation, reason=lacking)
                )
            await asyncio.wait([opening], timeout=self._pulse.every_s or None)

    # watching

    def _watch(self, life: Life) -> None:
        life.watched = life.up = True
        self._spawn(self._watch_until_lost(life))
        self._spawn(self._learn_pid(life))

    async def _learn_pid(self, life: Life) -> None:
        sign = await sign_of(life.actor)
        life.pid = 0 if sign is None else sign.pid

    async def _watch_until_lost(self, life: Life) -> None:
        key = (life.kind, life.index)
        ended = await (self._patient if life.kind in KEPT else self._pulse).lost(life.actor)
        if ended.silent and self._is_there(life):
            ended = Ended(f"{ended.reason}{await self._stacks(life)}")
        if self._is_there(life):
            self._forget(life)
            await self._report(key, life.incarnation, ended)

    async def _stacks(self, life: Life) -> str:
        """Where a hung process has written its stacks, if it is on this node."""
        run_dir, pid = self._plan.run_dir, life.pid
        if run_dir is None or not pid:
            return ""
        file = stacks_file(run_dir, source_of(life.kind, life.index))
        if not await asyncio.to_thread(writes_to, pid, file):
            return ""
        return f"; {await asyncio.to_thread(dump_stacks, pid, file)}"

    async def _report_unstarted(self, key: Key, incarnation: Incarnation, error: Exception) -> None:
        log.error("%s could not be started (life %d)", name_of(*key), incarnation, exc_info=error)
        await self._report(key, incarnation, Ended(f"it could not be started: {failure_reason(error)}"))

    async def _report(self, key: Key, incarnation: Incarnation, ended: Ended, *, final: bool = False) -> None:
        """Report a lost life, after the events that the scheduler needs to start the next one."""
        log.warning("%s is lost (life %d): %s", name_of(*key), incarnation, ended.reason)
        known: dict[str, Any] = {}
        if key[0] == TRAINER:
            known = {"published": await self._published(), "saved": await self._saved()}
            await self._report_damage(incarnation)
        # A store reports by itself that its disk is full: beginning again would not help.
        full = ended.told and key[0] in KEPT and key[0] != GATEWAY
        reason = f"it cannot store anything more: {ended.reason}" if full else ended.reason
        if not self._closed:
            self._deliver(_lost(key, incarnation, reason, final=final or full, **known))

    async def _published(self) -> int:
        """The newest version in the weights store; -1 if the store does not answer."""
        try:
            newest: int = await asyncio.wait_for(self._given[3].newest.remote(), self._pulse.patience_s)
            return newest
        except (RayError, TimeoutError):
            return NO_VERSION

    async def _saved(self) -> tuple[StepId, ...]:
        """Train steps of checkpoints that are complete, were ordered, and were not reported."""
        if self._plan.run_dir is None:
            return ()
        directory = self._plan.run_dir / "checkpoints"
        ordered: list[StepId] = list(self._state.orders.open("checkpoint"))
        sound = [await asyncio.to_thread(is_sound, checkpoint_path(directory, steps)) for steps in ordered]
        return tuple(steps for steps, there in zip(ordered, sound, strict=True) if there)

    async def _report_damage(self, incarnation: Incarnation) -> None:
        """Report damaged checkpoints and set them aside. Otherwise a later checkpoint of the same steps would be taken
        for written."""
        if self._plan.run_dir is None:
            return
        directory = self._plan.run_dir / "checkpoints"
        saved = self._state.checkpoints.steps[::-1]
        paths = {checkpoint_path(directory, steps): steps for steps in saved}
        damaged = await asyncio.to_thread(damaged_of, list(paths))
        for path, reason in damaged.items():
            if self._closed or self._state.outcome is not None or self._begun.get((TRAINER, 0), 0) > incarnation:
                return  # nobody would hear of it, and what is in use stays where it is
            log.warning("the checkpoint %s is damaged and is not used: %s", path, reason)
            self._deliver(CheckpointDamaged(steps=paths[path], reason=clean(reason)))
            try:
                if path.exists():
                    put_aside(path)
            except OSError as error:
                log.warning("the damaged checkpoint %s cannot be put aside: %s", path, error)

    # orders to processes

    def order(self, kind: str, index: int, order: Order, incarnation: Incarnation | None = None) -> None:
        """Queue an order until the end of the drain. An order for a life that has ended is dropped: its loss is
        reported."""
        life = self._lives.get((kind, index))
        if life is not None and incarnation in (None, life.incarnation):
            life.orders.append(order)
            self._ordered[kind, index] = life

    def flush(self) -> int:
        """Send the queued orders, one call for each actor. Returns the number of calls."""
        calls = len(self._ordered)
        for life in self._ordered.values():
            life.send(self._epoch)
        self._ordered.clear()
        return calls

    async def hand_over(self, steps: StepId) -> None:
        """Make the trainer hand weights over that it owes to scorers. Raises the reason why it cannot."""
        life = self._lives.get((TRAINER, 0))
        if life is None:
            raise EngineError("there is no trainer")
        await life.actor.hand_over.remote(steps)

    # the end

    def stop_watching(self) -> None:
        """Report no further ends: the run is shutting down."""
        self._closed = True

    async def close(self) -> None:
        """Give generators a limited time to close, then kill every actor except the stores and the gateway."""
        self.stop_watching()
        lives = [life for life in self._lives.values() if life.kind not in KEPT]
        closing = [
            asyncio.ensure_future(life.actor.close.remote()) for life in lives if life.kind == REPLICA and life.up
        ]
        if closing:
            await asyncio.wait(closing, timeout=GOODBYE_S)
        for end in closing:
            if not end.cancel() and not end.cancelled():
                end.exception()  # looked at, else asyncio says that nobody did
        for life in lives:
            life.end()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _forget(self, life: Life) -> None:
        """End a life and report nothing more about it."""
        self._lives.pop((life.kind, life.index), None)
        self._ordered.pop((life.kind, life.index), None)
        if life.kind not in KEPT:
            life.end()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._closed:
            log.error("a task of the supervisor failed", exc_info=error)
            self._give_up(f"a task that looks after the actors failed: {failure_reason(error)}")


def _lost(key: Key, incarnation: Incarnation, reason: str, **known: Any) -> ProcessLost:
    return ProcessLost(kind=key[0], index=key[1], incarnation=incarnation, reason=clean(reason), **known)


async def _first_up(enough: int, opening: "list[asyncio.Future[None]]") -> None:
    """Returns when this many replicas are up. Raises the first failure before that."""
    for count, opened in enumerate(asyncio.as_completed(opening), 1):
        await opened
        if count >= enough:
            return
