"""Everything the scheduler knows, and the few operations that change it.

Written only by `scheduler.py` and the modules of `scheduling/`; read by everyone else through `states/view.py`. Each
operation keeps the ledger, the deadlines and the state hash in step with the records, so that no caller can forget to.
"""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from engine.commands import FinishRun
from engine.ids import NO_VERSION, GroupId, StepId, TimerId, Version
from engine.states.census import Census
from engine.states.clocks import Clocks
from engine.states.ended import Ended
from engine.states.fleet import Fleet
from engine.states.group import Group, group_table
from engine.states.hashing import StateHash
from engine.states.kept import KeptBatches
from engine.states.ledger import Deadlines, Ledger
from engine.states.limits import Limits
from engine.states.live import Live
from engine.states.machine import Phase, SharedMachine
from engine.states.orders import OrderBook, Owner, owner_of
from engine.states.pool import POOL, PoolLease, Pools
from engine.states.process import ADDED_STATES, PROCESS, SCORER, Process, name_of
from engine.states.process import REPLICA as REPLICA_KIND
from engine.states.replica import REPLICA, Replica
from engine.states.retention import Checkpoints
from engine.states.stages import Stages
from engine.states.step import STEP, Step
from engine.states.validation import VALIDATION, Validations
from engine.states.version import VERSION, WeightsVersion

Observer = Callable[[str, Any, str, str], None]
"""Called as (machine, record, source state, trigger) after every change of state."""

Key = tuple[float, ...]
"""Numbers by which parked groups are ordered: the smallest resumes first."""


class State:
    """The whole state of one run."""

    def __init__(self, limits: Limits, observe: Observer | None = None) -> None:
        self.limits = limits
        self._ahead, self._timed = limits.ahead, limits.timed
        self.hashed = StateHash(self)
        self.groups: dict[GroupId, Group] = {}
        """Live groups: those that no step has trained on and that were not released."""
        self.waiting: deque[GroupId] = deque()
        self.ready: dict[GroupId, None] = {}
        """In the order they became ready; a dict for its order and its O(1) removal."""
        self.parked: dict[Version, list[tuple[Key, GroupId]]] = {}
        """Heaps of (key, group) by the version they resume from, the key as the resume policy gave it; entries of
        groups no longer parked are skipped."""
        self.orders = OrderBook(limits.scored_apart)
        self.pools = Pools(limits)
        self.steps: dict[StepId, Step] = {}
        """Those whose batch is formed and that are not finished, and the one that comes next."""
        self.next_step(0)
        self.stages = Stages(self.limits.added_states, self.orders)
        self.live = Live(limits)
        self.fleet = Fleet()
        self.processes: dict[str, Process] = {}
        """Every process that is no replica, by its name. A replica has its own: `Replica.process`."""
        self.kept, self.checkpoints = KeptBatches(), Checkpoints()
        self.versions: dict[Version, WeightsVersion] = {}
        self.latest_version: Version = 0
        self.ledger = Ledger()
        self.deadlines = Deadlines(limits.surplus)
        self.ended = Ended(bool(limits.checkpoint_every))
        self.started = False
        self.exhausted = False
        """The source has no more prompts."""
        self.failed_draws = 0
        """Draws that failed since one succeeded."""
        self.steps_batched = self.steps_trained = 0
        self.publishing_attempt = self.publish_failures = 0
        self.checkpoint_ordered = 0
        """Train steps in the checkpoint that was ordered last."""
        self.next_timer: TimerId = 0
        self.next_ready, self.next_entered = 0, 1
        """Groups that became ready so far, and entries into added states, counted from 1."""
        self.stale_echoes = 0
        self.failed_in_a_row = self.filtered_in_a_row = 0
        """Groups that failed for good since one was generated, and that the filter dropped since it kept one."""
        self.none_left = self.last_failure = ""
        """Why the last replica is gone for good, which ends the run once it needs one; and why the last group failed or
        replica was lost."""
        self.outcome: FinishRun | None = None
        self.restarts = 0
        """Times that the run was begun again from its record since `restarted_at` train steps, or since a user resumed
        it."""
        self.restarted_at: StepId = 0
        self.now = 0.0
        self.step_reward: float | None = None
        """Mean reward of the groups of the last step trained."""
        self.shows_reward = False
        """There are policies that may look at it, so that it is part of the hash."""
        self.policy_errors = 0
        """Decisions of built-in policies in place of one that raised or broke a law."""
        self.last_policy_error = ""
        self.policy_memory: dict[str, bytes] = {}
        """What each policy that has a memory remembered after its last lawful answer, as msgpack, by decision."""
        self.policy_books = 0
        """What policies remember adds to the state hash; 0 where none remembers anything."""
        self._build_machines(observe)
        self.disturbed = True
        """Something other than a group may have changed since the weights were last looked after."""
        self.validations = Validations(self.fleet, self.orders, SharedMachine(VALIDATION, observe), self.disturb)
        self.census = Census(self)
        self.clocks = Clocks(self)
        self._take_initial_weights()

    def _take_initial_weights(self) -> None:
        self.steps_in: dict[Version, int] = {}
        """Train steps in each version that a live group, a replica or a validation may still refer to."""
        self.updates_in: dict[StepId, int] = {0: 0}
        """Optimizer updates in the first so many train steps, for each beginning that a trainer may have: a trainer
        schedules by them."""
        self.versions[0] = WeightsVersion(0, 0)
        self.steps_in[0] = 0
        self.fire_version(self.versions[0], "live")

    def _build_machines(self, observe: Observer | None) -> None:
        table = group_table(tuple(self.stages.by_name))
        self._phases: dict[str, Phase] = table.phases or {}
        self._leave = {Phase.PARKED: self._leave_parked, Phase.READY: self._leave_ready}
        self._enter = {
            Phase.PARKED: self._enter_parked, Phase.READY: self._enter_ready,
            Phase.CONSUMED: self._end, Phase.RELEASED: self._end,
        }  # fmt: skip
        """What a group leaves and enters with its phases."""
        self._group_machine = SharedMachine(table, observe)
        self._step_machine = SharedMachine(STEP, observe)
        self._replica_machine = SharedMachine(REPLICA, observe)
        self._version_machine = SharedMachine(VERSION, observe)
        self._pool_machine = SharedMachine(POOL, observe)
        self._process_machine = SharedMachine(PROCESS, observe)

    # groups

    def draw(self, first: GroupId, count: int) -> None:
        for id in range(first, first + count):
            self.groups[id] = Group(id)
            self.waiting.append(id)
        self.ledger.draw(count)

    def fire_group(self, group: Group, trigger: str, key: Key = ()) -> None:
        """The only way a group changes state. What follows is the books of the phase it leaves and of the one it
        enters. `key` orders it among those parked, where it is."""
        before = group.state
        self._group_machine.fire(group, trigger)
        source, target = self._phases[before], self._phases[group.state]
        self.hashed.touch(group)
        self.ledger.move(source, target)
        self.deadlines.move(group.deadline, source, target)
        leave, enter = self._leave.get(source), self._enter.get(target)
        if leave is not None:
            leave(group, before)
        if enter is not None:
            enter(group, key)

    def _leave_parked(self, group: Group, before: str) -> None:
        group.resume_key, group.entered = (), 0
        if before == "aborted":
            self._forget_parked(group)
        else:
            self.stages.leave(before, group.id)

    def _leave_ready(self, group: Group, before: str) -> None:
        del self.ready[group.id]

    def _enter_parked(self, group: Group, key: Key) -> None:
        if group.state == "aborted":
            self._park(group, key)
        else:
            self.enter_stage(group)

    def _enter_ready(self, group: Group, key: Key) -> None:
        self.ready[group.id] = None
        group.ready_number = self.next_ready
        self.next_ready += 1

    def _end(self, group: Group, key: Key) -> None:
        """It was trained on, or released."""
        del self.groups[group.id]
        if self.clocks.doubled:
            self.clocks.forget_keys(("group", group.id), ("truncate", group.id), ("stage", group.id))
        if self.ended.tracks and self._phases[group.state] is Phase.RELEASED:
            self.ended.release(group.id, self.steps_trained)

    def _park(self, group: Group, key: Key) -> None:
        group.resume_key = key if key != (group.deadline,) else ()
        heappush(self.parked.setdefault(group.resumes_from, []), (key, group.id))

    def begin_anew(self, group: Group, key: Key) -> None:
        """A group that was ready or parked, and has forgotten its tokens, waits in its place for an attempt from
        nothing."""
        if group.state == "aborted":
            self._park(group, key)  # under the version it may resume from now; the old entry is skipped
            self.touch(group)
        else:
            self.fire_group(group, "lose", key)

    def enter_stage(self, group: Group) -> None:
        """A group waits for the work of the added state it is in, behind those that wait already."""
        self.stages.enter(group.state, group.id)
        group.entered = self.next_entered
        self.next_entered += 1

    def branch(self, steps: int, consumed: tuple[GroupId, ...], released: tuple[GroupId, ...]) -> None:
        """Go back to `steps` train steps. Every group that they do not hold is queued again, in the order of the draws;
        one that was live keeps what its budgets have left."""
        live = self.groups
        self.groups = {id: Group(id) for id in sorted((*live, *consumed, *released))}
        for id, before in live.items():
            group = self.groups[id]
            group.attempt = before.attempt
            group.infrastructure_failures = before.infrastructure_failures
            group.data_failures = before.data_failures
        self.waiting = deque(self.groups)
        self.ready = {}
        self.parked = {}
        self.stages.clear()
        self.kept.clear()
        self.deadlines = Deadlines(self.limits.surplus)
        self.ledger.branch(waiting=len(self.groups), consumed=len(consumed), released=len(released))
        self.ended.branch(steps)
        self.checkpoints.branch(steps)
        for pool in self.pools.leases:
            if pool.task:
                self.give_back(pool)
        self.steps = {}
        self.next_step(steps)
        self.steps_batched = self.steps_trained = steps
        self.steps_in = {version: min(held, steps) for version, held in self.steps_in.items()}
        self.updates_in = {after: updates for after, updates in self.updates_in.items() if after <= steps}
        self.retire_all()
        self.hashed.begin(group for group in self.groups.values() if group.attempt)

    def retire_all(self) -> None:
        """The weights of every version are gone."""
        for version in list(self.versions.values()):
            self.fire_version(version, "retire")

    def begin_again(self) -> None:
        """New processes carry the run: nothing is under way any more, and it is not over."""
        self.started = True
        self.outcome = None
        self.publish_failures = self.failed_in_a_row = self.filtered_in_a_row = self.failed_draws = 0
        self.last_failure = self.none_left = ""
        self.live.rest_is_over()
        self.clocks.begin_again()
        self.census.rebuild()

    def seat(self, group: Group, replica: Replica) -> None:
        """Give a group a slot, after its trigger was fired."""
        group.attempt += 1
        group.replica = replica.id
        if self._timed:
            group.seated_at, group.seated_tokens = self.now, group.tokens
        replica.groups[group.id] = None
        if replica.slow:
            self.fleet.seats_on_slow += 1
        self.fleet.changed(replica)

    def unseat(self, group: Group) -> None:
        """Take the slot of a group back, before its trigger is fired."""
        replica = self.fleet.replicas[group.replica]
        del replica.groups[group.id]
        group.replica = -1
        if replica.state == "pausing" and not replica.groups and self.clocks.on:
            self.clocks.emptied(replica)
        if group.moving:
            self.fleet.note_moving(replica, -1)
        group.seated_at, group.overdue_s, group.moving = 0.0, 0.0, False
        self.fleet.changed(replica)

    def next_parked(self, newest: Version) -> Group | None:
        """The parked group with the smallest key that may resume on a replica at version `newest`."""
        best: tuple[Key, GroupId] | None = None
        for version in sorted(self.parked):
            heap = self.parked[version]
            while heap and not self._is_parked(heap[0][1], version):
                heappop(heap)
            if not heap:
                del self.parked[version]
            elif version <= newest and (best is None or heap[0] < best):
                best = heap[0]
        return None if best is None else self.groups[best[1]]

    def _forget_parked(self, group: Group) -> None:
        """Drop the entry of a group that resumes, the first of its heap; others are skipped when they surface."""
        heap = self.parked.get(group.resumes_from)
        if heap and heap[0][1] == group.id:
            heappop(heap)

    def _is_parked(self, id: GroupId, version: Version) -> bool:
        group = self.groups.get(id)
        return group is not None and group.state == "aborted" and group.resumes_from == version

    # the other machines

    def next_step(self, id: StepId) -> None:
        """Add the step that comes next."""
        self.steps[id] = Step(id, pooled=self.pools.listed)

    def lease(self, pool: PoolLease, task: str, step: StepId = -1) -> None:
        """Let a task have a free pool."""
        self._pool_machine.fire(pool, "lease")
        pool.task, pool.step = task, step
        self.disturb()

    def give_back(self, pool: PoolLease) -> None:
        """The pool is free."""
        self._pool_machine.fire(pool, "give-back")
        pool.task, pool.step = "", -1
        self.disturb()

    def fire_step(self, step: Step, trigger: str) -> None:
        self._step_machine.fire(step, trigger)
        self.disturb()

    def fire_replica(self, replica: Replica, trigger: str) -> None:
        self._replica_machine.fire(replica, trigger)
        if replica.slow:
            self.fleet.seats_on_slow += 1
        self.disturb()
        self.fleet.changed(replica)
        if self.clocks.on:
            self.clocks.replica_changed(replica)

    def find_process(self, kind: str, index: int) -> Process | None:
        """A process; None for one that was never seen."""
        if kind == REPLICA_KIND:
            replica = self.fleet.replicas.get(index)
            return None if replica is None else replica.process
        return self.processes.get(name_of(kind, index))

    def process(self, kind: str, index: int) -> Process:
        """A process. One that was never seen before is added, and is gone."""
        found = self.find_process(kind, index)
        if found is None and kind == REPLICA_KIND:
            found = self.fleet.add(index, validator=self.limits.validates_only(index)).process
        elif found is None:
            found = self.processes[name_of(kind, index)] = Process(kind, index)
        return found

    def owners_of(self, process: Process) -> list[Owner]:
        """Under which names the work of a process is in the book of orders."""
        if process.kind == SCORER:
            return [self.orders.scorer(task) for task in self.limits.scorers()[process.index]]
        if process.kind == ADDED_STATES:
            return [stage.owner for stage in self.stages.by_name.values()]
        return [owner_of(process.kind, process.index)]

    def process_of(self, owner: Owner) -> Process | None:
        """The process that executes the orders of an owner; None for the data source, which is no process."""
        if isinstance(owner, int):
            return self.fleet.replicas[owner].process
        if owner in self.processes:
            return self.processes[owner]
        return next((one for one in self.processes.values() if owner in self.owners_of(one)), None)

    def fire_process(self, process: Process, trigger: str) -> None:
        self._process_machine.fire(process, trigger)
        self.disturb()
        if self.clocks.on:
            self.clocks.process_changed(process)

    def wait_for_room(self, process: Process, reason: str) -> None:
        """A process cannot start before it has room; with an empty reason, it has room now."""
        process.room = reason
        self.disturb()
        if self.clocks.on:
            self.clocks.room_changed(process)

    def target_of(self, replica: Replica) -> Version:
        """What a replica works towards: the newest version; where a validation holds it, that one's; a validator that
        none holds stays as it is."""
        run = self.validations.runs.get(replica.held)
        if run is not None:
            return run.version
        return replica.version if replica.validator else self.latest_version

    def fire_version(self, version: WeightsVersion, trigger: str) -> None:
        self._version_machine.fire(version, trigger)
        self.disturb()
        if version.state == "retired":
            del self.versions[version.id]

    def forget_versions(self) -> None:
        """Drop the figures of versions that nothing refers to any more: all tokens of a group that no step has taken
        are of versions with at least `steps_batched` - S train steps."""
        least = self.steps_batched - self.live.loosest
        used = {*self.versions, *(run.version for run in self.validations.runs.values())}
        for validators in (False, True):
            used.update(self.census.kind(validators=validators).seen.by)
        for version in list(self.steps_in):
            if self.steps_in[version] >= least or version >= self.latest_version - 1:
                return
            if version and version not in used:  # a fresh replica has version 0
                del self.steps_in[version]

    def forget_updates(self) -> None:
        """Drop the figures of train steps after which no trainer can begin: those before the newest checkpoint, but for
        checkpoints that are there; without checkpoints, all but the newest."""
        newest = self.ended.newest if self.limits.checkpoint_every else self.steps_trained
        kept = {0, *self.checkpoints.steps}
        for steps in [steps for steps in self.updates_in if steps < newest and steps not in kept]:
            del self.updates_in[steps]

    def change(self, limits: Limits) -> None:
        """Other bounds from now on; groups keep the deadlines they have."""
        other_timeouts = limits.timeouts != self.limits.timeouts
        self.limits, self._ahead, self._timed = limits, limits.ahead, limits.timed
        if other_timeouts:
            self.clocks.use()
        self.live.loosest = max(self.live.loosest, limits.max_staleness_steps)
        self.live.over = max(0, self.ledger.running - limits.max_concurrent_groups)
        self.disturb()

    def fewer_over(self) -> None:
        """Groups beyond a K that was lowered only become fewer."""
        over = max(0, self.ledger.running - self.limits.max_concurrent_groups)
        if over < self.live.over:
            self.live.over = over
            self.disturb()

    def new_timer(self) -> TimerId:
        timer = self.next_timer
        self.next_timer += 1
        self.disturb()
        return timer

    # what is in flight, as the order book says

    @property
    def asked(self) -> int:
        """Prompts ordered from the source and not yet drawn."""
        order: Any = self.orders.find("draw", None)
        return 0 if order is None else order.command.count

    @property
    def publishing(self) -> bool:
        """A version is on its way to the store."""
        return bool(self.orders.open("publish"))

    @property
    def checkpoint_pending(self) -> bool:
        """A checkpoint is being written."""
        return bool(self.orders.open("checkpoint"))

    @property
    def deletion_pending(self) -> bool:
        """A checkpoint is being deleted."""
        return bool(self.orders.open("delete"))

    def scoring(self, step: Step) -> list[str]:
        """The scoring tasks of a step that are ordered and not done."""
        return [task for of, task in self.orders.open("score") if of == step.id]

    # figures of the laws

    @property
    def held(self) -> int:
        """Places taken (law 3): a short step is charged in full."""
        return self.ledger.unconsumed + self.limits.train_batch_size * self.steps_batched

    def places(self, version: Version) -> int:
        """How many places there are for groups admitted on `version`; never more than the run needs."""
        limits, steps = self.limits, self.steps_in[version]
        places = self._ahead + steps * limits.train_batch_size
        if limits.max_steps is not None:
            places = min(places, limits.max_steps * limits.train_batch_size)
        if self.deadlines.surplus and steps + limits.max_staleness_steps >= self.steps_batched:
            places += self.surplus_left
        return places

    @property
    def surplus_left(self) -> int:
        """X while a step is to come, and 0 after the last."""
        return 0 if self.steps_batched == self.limits.max_steps else self.deadlines.surplus

    def staleness(self, group: Group, step: StepId) -> int:
        """Train steps that the oldest token of a group lags behind `step`."""
        born = group.admitted_version if group.oldest_version == NO_VERSION else group.oldest_version
        return step - self.steps_in[born]

    @property
    def capacity(self) -> int:
        """Groups that K and the staleness bound let start now, at the newest version; slots not counted."""
        workers = self.limits.max_concurrent_groups - self.ledger.running
        return max(0, min(workers, self.places(self.latest_version) - self.held))

    @property
    def no_more_prompts(self) -> bool:
        """Nothing waits and nothing can be drawn."""
        return self.exhausted and not self.asked and not self.waiting

    @property
    def formed_steps(self) -> list[Step]:
        """Steps whose batch is formed and that are not finished, in their order: at most two."""
        return [step for step in self.steps.values() if step.id < self.steps_batched]

    @property
    def training_step(self) -> Step | None:
        """The first step whose batch is formed and that is not finished."""
        return next(iter(self.formed_steps), None)

    def disturb(self) -> None:
        """A step, replica, version or validation may have changed."""
        self.disturbed = True
        self.hashed.disturb()

    def touch(self, group: Group) -> None:
        """A field of a group changed without a trigger."""
        self.hashed.touch(group)

    # the state hash

    def settle(self) -> None:
        """Bring the hash up to date with the groups touched by this event."""
        self.hashed.settle()

    @property
    def hash(self) -> int:
        """64 bits of the whole state."""
        return self.hashed.value()
