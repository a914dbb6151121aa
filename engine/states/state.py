"""Everything the scheduler knows, and the few operations that change it.

Written only by `scheduling/scheduler.py` and the modules of `scheduling/`; read by everyone else through
`states/view.py`. Each operation keeps the ledger and the deadlines in step with the records, so that no
caller can forget to.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any

from engine.commands import FinishRun, StageWeights
from engine.ids import NO_VERSION, GroupId, ReplicaId, StepId, Version
from engine.states.checkpoints import Checkpoints
from engine.states.group import Group, group_table
from engine.states.ledger import Deadlines, Ledger
from engine.states.limits import GENERATED, PUBLISHING, QUEUED, SCORING, Limits
from engine.states.machine import Phase, SharedMachine
from engine.states.orders import KINDS_OF_SUBJECTS, OrderBook, Owner, owner_of, stage_owner
from engine.states.paces import Paces
from engine.states.pool import POOL, PoolLease, Pools
from engine.states.process import ADDED_STATES, PROCESS, SCORER, Process, name_of
from engine.states.process import REPLICA as REPLICA_KIND
from engine.states.replica import REPLICA, FreeSlots, Replica
from engine.states.stage_queues import Stages
from engine.states.step import Step, step_table
from engine.states.timeouts import LimitCheck
from engine.states.validation import VALIDATION, Validations
from engine.states.version import VERSION, WeightsVersion

Observer = Callable[[str, Any, str, str], None]
"""Called as (machine, record, source state, trigger) after every change of state."""

Key = tuple[float, ...]
"""Numbers by which parked groups are ordered: the smallest resumes first."""


class State:
    """The whole state of one run."""

    groups: dict[GroupId, Group]
    """Live groups: those that no step has trained on and that were not released."""
    orders: OrderBook
    pools: Pools
    steps: dict[StepId, Step]
    """Those whose batch is formed and that are not finished, and the one that comes next."""
    replicas: dict[ReplicaId, Replica]
    """Every replica ever seen, lost ones included."""
    processes: dict[str, Process]
    """Every process that is no replica, by its name. A replica has its own: `Replica.process`."""
    checkpoints: Checkpoints
    versions: dict[Version, WeightsVersion]
    steps_in: dict[Version, StepId]
    """Train steps in each version that an open group, a replica or a validation may still refer to."""
    updates_in: dict[StepId, int]
    """Optimizer updates in the first so many train steps, for each beginning that a trainer may have: a trainer
    schedules by them."""
    latest_version: Version = 0
    ledger: Ledger
    validations: Validations
    limit_check: LimitCheck
    started: bool = False
    exhausted: bool = False
    """The source has no more prompts."""
    failed_draws: int = 0
    """Draws that failed since one succeeded."""
    steps_batched: StepId = 0
    steps_trained: StepId = 0
    publishing_attempt: int = 0
    publish_failures: int = 0
    checkpoint_ordered: StepId = 0
    """Train steps in the checkpoint that was ordered last."""
    checkpoint_failures: int = 0
    """How often that checkpoint failed."""
    next_turn: int = 0
    """How many times groups have become ready or entered an added state."""
    stale_echoes: int = 0
    generated_at: float = 0.0
    """When a group was last generated."""
    failed_in_a_row: int = 0
    """Groups that failed for good since one was generated."""
    filtered_in_a_row: int = 0
    """Groups that the filter dropped since it kept one."""
    judged: int = 0
    """Of the latest attempts, those that ended with rewards or failed for cause `data`; see `note_judged`."""
    misjudged: int = 0
    """Those of them that failed."""
    none_left: str = ""
    """Why the last replica is gone for good, which ends the run once it needs one."""
    last_failure: str = ""
    """Why the last group failed or replica was lost."""
    draining: str = ""
    """Why the run comes to rest; empty while it does not."""
    settings: dict[str, str]
    """What was set while the run continued, by name."""
    loosest: int = 0
    """The largest S that an open group may have been admitted under."""
    over: int = 0
    """Groups that run beyond K since it was lowered; they end, and no other starts meanwhile."""
    launched: int = 0
    launching: int = 0
    """So many replicas are wanted, and those before `launched` were started if they were gone."""
    outcome: FinishRun | None = None
    restarts: int = 0
    """Times that the run was begun again from its record since `restarted_at` train steps, or since a user resumed
    it."""
    restarted_at: StepId = 0
    now: float = 0.0
    step_reward: float | None = None
    """Mean reward of the groups of the last step trained."""
    policy_errors: int = 0
    """Decisions of built-in policies in place of one that raised or broke a law."""
    last_policy_error: str = ""
    policy_memory: dict[str, bytes]
    """What each policy that has a memory remembered after its last lawful answer, as msgpack, by decision."""

    def __init__(self, limits: Limits, observe: Observer | None = None) -> None:
        self.limits = limits
        self._ahead, self._timed = limits.ahead, limits.timed
        self.changed = False
        """Something other than a group has changed its state in this tick."""
        self._build_machines(observe, limits)
        self.groups, self.steps, self.processes, self.versions = {}, {}, {}, {}
        self.steps_in, self.updates_in, self.policy_memory = {}, {0: 0}, {}
        self.ledger = Ledger()
        self.orders = OrderBook(limits.scored_apart)
        self.pools = Pools(limits)
        self.stages = Stages(limits.added_states, self.orders)
        self._worker_of = {stage_owner(added.name): name_of(ADDED_STATES, 0) for added in limits.added_states}
        for index, tasks in enumerate(limits.scorers()):
            self._worker_of.update((self.orders.scorer(task), name_of(SCORER, index)) for task in tasks)
        """The process that executes the orders of an owner with another name."""
        self.settings, self.loosest = {}, limits.max_staleness_steps
        self.replicas = {}
        self.free = FreeSlots(self.replicas, self.orders)
        self.paces = Paces(self.replicas, limits.straggler_factor, self._mark_slow)
        self.checkpoints = Checkpoints(bool(limits.checkpoint_every), limits.keeps_batches)
        self.validations = Validations(self.replicas, self.free, self.orders, self._validation_machine)
        self._index_groups()
        self.limit_check = LimitCheck(limits.timeouts, KINDS_OF_SUBJECTS)
        self.next_step(0)
        self.publish(0)
        self.fire_version(self.versions[0], "live")

    # records

    def rebuild(self) -> None:
        """Make everything that follows from the declared fields, after these were filled."""
        self.orders.rebuild()
        self._index_groups()
        self.validations.rebuild(self.replicas)
        self.free.rebuild(self.replicas)
        self.paces.rebuild(self.replicas, self.limits.straggler_factor)
        self.limit_check.use(self.limits.timeouts)

    def _index_groups(self) -> None:
        """Make the lists of open groups, by what may happen to them next."""
        self.waiting: deque[GroupId] = deque()
        self.ready: dict[GroupId, None] = {}
        """In the order they became ready; a dict for its order and its O(1) removal."""
        self.parked: dict[Version, list[tuple[Key, GroupId]]] = {}
        """Heaps of (key, group) by the version they resume from, the key as the resume policy gave it; outdated entries
        are skipped."""
        self.unrewarded: dict[GroupId, None] = {}
        """Running groups whose trajectories have all ended: what they lack is their rewards. A dict for its order."""
        self.deadlines = Deadlines(self.limits.surplus)
        self.stages.clear()
        entered = []
        for group in self.groups.values():
            phase = self._phases[group.state]
            self.deadlines.move(group.id, group.deadline, Phase.WAITING, phase)
            if group.state == QUEUED:
                self.waiting.append(group.id)
            elif group.state == "aborted":
                self._park(group, group.resume_key or (group.deadline,))
            elif group.replica >= 0 and group.finished == self.replicas[group.replica].samples:
                self.unrewarded[group.id] = None
            elif phase in (Phase.WAITING, Phase.PARKED, Phase.READY):
                entered.append(group)
        for group in sorted(entered, key=attrgetter("turn")):
            if group.state == "generated":
                self.ready[group.id] = None
            elif self.orders.find("stage", group.id) is None:
                self.stages.enter(group.state, group.id)

    def _build_machines(self, observe: Observer | None, limits: Limits) -> None:
        table = group_table(limits.states_at(GENERATED), limits.states_at(QUEUED))
        self._phases: dict[str, Phase] = table.phases or {}
        self._leave = {Phase.PARKED: self._leave_parked, Phase.READY: self._leave_ready}
        self._enter = {
            Phase.PARKED: self._enter_parked, Phase.READY: self._enter_ready,
            Phase.CONSUMED: self._end, Phase.RELEASED: self._end,
        }  # fmt: skip
        """What a group leaves and enters with its phases."""
        if limits.states_at(QUEUED):
            self._leave[Phase.WAITING], self._enter[Phase.WAITING] = self._leave_waiting, self._enter_waiting
        self._group_machine = SharedMachine(table, observe)
        self._machines = [
            SharedMachine(table, self._noting(observe))
            for table in (
                step_table(limits.states_at(SCORING), limits.states_at(PUBLISHING)),
                REPLICA,
                VERSION,
                POOL,
                PROCESS,
                VALIDATION,
            )
        ]
        (
            self._step_machine, self._replica_machine, self._version_machine, self._pool_machine, self._process_machine,
            self._validation_machine,
        ) = self._machines  # fmt: skip

    def observe(self, observe: Observer | None) -> None:
        """Call `observe` after every change of state from now on."""
        self._group_machine.observe = observe
        for machine in self._machines:
            machine.observe = self._noting(observe)

    def _noting(self, observe: Observer | None) -> Observer:
        """An observer of all machines but that of groups. It sets `changed`."""

        def note(machine: str, record: Any, source: str, trigger: str) -> None:
            self.changed = True
            if observe is not None:
                observe(machine, record, source, trigger)

        return note

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
        self.ledger.move(source, target)
        self.deadlines.move(group.id, group.deadline, source, target)
        leave, enter = self._leave.get(source), self._enter.get(target)
        if leave is not None:
            leave(group, before)
        if enter is not None:
            enter(group, key)

    def phase_of(self, state: str) -> Phase:
        """The phase of a state of groups."""
        return self._phases[state]

    def _leave_waiting(self, group: Group, before: str) -> None:
        """`start_groups` removes the first group in `waiting` itself."""
        if before != QUEUED:
            self.stages.leave(before, group.id)
        elif self._phases[group.state] is Phase.WAITING:
            self.waiting.remove(group.id)

    def _enter_waiting(self, group: Group, key: Key) -> None:
        """In the order of the draws, whenever its work ended."""
        if group.state == QUEUED:
            insort(self.waiting, group.id)
        else:
            self.enter_stage(group)

    def _leave_parked(self, group: Group, before: str) -> None:
        group.resume_key = ()
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
        self._take_turn(group)

    def _end(self, group: Group, key: Key) -> None:
        """It was trained on, or released."""
        del self.groups[group.id]
        if self.checkpoints.tracks and self._phases[group.state] is Phase.RELEASED:
            self.checkpoints.release(group.id, self.steps_trained)

    def _park(self, group: Group, key: Key) -> None:
        group.resume_key = key if key != (group.deadline,) else ()
        heappush(self.parked.setdefault(group.resumes_from, []), (key, group.id))

    def begin_anew(self, group: Group, key: Key) -> None:
        """A group that was ready or parked, and has forgotten its tokens, waits in its place for an attempt from
        nothing."""
        if group.state == "aborted":
            self._park(group, key)  # the old entry is skipped
        else:
            self.fire_group(group, "lose", key)

    def enter_stage(self, group: Group) -> None:
        """A group waits for the work of the added state it is in, behind those that already wait."""
        self.stages.enter(group.state, group.id)
        self._take_turn(group)

    def _take_turn(self, group: Group) -> None:
        """Put it behind the groups that already wait in its state."""
        group.turn = self.next_turn
        self.next_turn += 1

    def surplus_checkpoints(self) -> list[StepId]:
        """The checkpoints to delete, oldest first."""
        return self.checkpoints.surplus(self.limits, [run.steps for run in self.validations.runs.values()])

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
        self._index_groups()
        self.ledger.branch(waiting=len(self.groups), consumed=len(consumed), released=len(released))
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

    def retire_all(self) -> None:
        """The weights of every version are gone."""
        for version in list(self.versions.values()):
            self.fire_version(version, "retire")

    def note_judged(self, *, failed: bool) -> None:
        """Count an attempt that ended with rewards, or failed for cause `data`. The counts are halved when they reach
        two windows, so that they are always those of the latest attempts."""
        self.judged += 1
        self.misjudged += failed
        if self.judged >= 2 * self.limits.failures_in_a_row:
            self.judged //= 2
            self.misjudged //= 2

    def begin_again(self) -> None:
        """New processes carry the run: nothing is running any more, and it is not over."""
        self.started = True
        self.outcome = None
        self.publish_failures = self.failed_in_a_row = self.filtered_in_a_row = self.failed_draws = 0
        self.judged = self.misjudged = self.checkpoint_failures = 0
        self.last_failure = self.none_left = ""
        self.draining = ""
        self.limit_check.interval = 0.0

    def seat(self, group: Group, replica: Replica) -> None:
        """Give a group a slot, after its trigger was fired."""
        group.attempt += 1
        group.replica = replica.id
        if self._timed:
            group.seated_at, group.seated_tokens = self.now, group.tokens
        replica.groups[group.id] = None
        self.free.update(replica)

    def unseat(self, group: Group) -> None:
        """Take the slot of a group back, before its trigger is fired."""
        replica = self.replicas[group.replica]
        del replica.groups[group.id]
        group.replica = -1
        if group.finished:
            replica.finished -= group.finished
            group.finished = 0
            self.unrewarded.pop(group.id, None)
        group.seated_at = 0.0
        self.free.update(replica)

    def free_trajectories(self, group: Group, finished: int) -> None:
        """`finished` trajectories of a running group have ended, at least as many as before. Its replica may generate
        others in their place."""
        replica = self.replicas[group.replica]
        replica.finished += finished - group.finished
        group.finished = finished
        if finished == replica.samples:
            self.unrewarded[group.id] = None
        self.free.update(replica)

    def next_parked(self, newest: Version) -> Group | None:
        """The parked group with the smallest key that may resume on a replica at version `newest`."""
        best: tuple[Key, GroupId] | None = None
        for version in sorted(self.parked):
            heap = self.parked[version]
            while heap and not self._is_parked(*heap[0], version):
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

    def _is_parked(self, key: Key, id: GroupId, version: Version) -> bool:
        """Whether an entry of a heap in `parked` is still true: its group may have begun anew since."""
        group = self.groups.get(id)
        if group is None or group.state != "aborted" or group.resumes_from != version:
            return False
        return key == (group.resume_key or (group.deadline,))

    # the other machines

    def next_step(self, id: StepId) -> None:
        """Add the step that comes next."""
        self.steps[id] = Step(id)

    def publish(self, version: Version) -> None:
        """A version holds the steps trained so far, and is the newest."""
        self.versions[version] = WeightsVersion(version)
        self.steps_in[version] = self.steps_trained
        self.latest_version = version

    def lease(self, pool: PoolLease, task: str, step: StepId = -1) -> None:
        """Let a task have a free pool."""
        self._pool_machine.fire(pool, "lease")
        pool.task, pool.step = task, step

    def give_back(self, pool: PoolLease) -> None:
        """The pool is free."""
        self._pool_machine.fire(pool, "give-back")
        pool.task, pool.step = "", -1

    def fire_step(self, step: Step, trigger: str) -> None:
        self._step_machine.fire(step, trigger)

    def fire_replica(self, replica: Replica, trigger: str) -> None:
        self._replica_machine.fire(replica, trigger)
        waits = replica.state == "pausing" and self.limits.sync_mode == "wait"
        replica.process.note_work(replica.state == "ready" or waits, self.limit_check.read(self.now))
        self.free.update(replica)

    def find_process(self, kind: str, index: int) -> Process | None:
        """A process; None for one that was never seen."""
        if kind == REPLICA_KIND:
            return self.replicas[index].process if index in self.replicas else None
        return self.processes.get(name_of(kind, index))

    def process(self, kind: str, index: int) -> Process:
        """A process. One that was never seen before is added, and is gone."""
        found = self.find_process(kind, index)
        if found is None and kind == REPLICA_KIND:
            replica = self.replicas[index] = Replica(index, self.limits.validates_only(index), Process(kind, index))
            found = replica.process
        elif found is None:
            found = self.processes[name_of(kind, index)] = Process(kind, index)
        return found

    def owners_of(self, process: Process) -> list[Owner]:
        """Under which names the work of a process is in the book of orders."""
        if process.kind == SCORER:
            return [self.orders.scorer(task) for task in self.limits.scorers()[process.index]]
        if process.kind == ADDED_STATES:
            return [stage_owner(added.name) for added in self.limits.added_states]
        return [owner_of(process.kind, process.index)]

    def process_of(self, owner: Owner) -> Process | None:
        """The process that executes the orders of an owner; None for the data source, which is no process."""
        if isinstance(owner, int):
            return self.replicas[owner].process
        return self.processes.get(self._worker_of.get(owner, owner))

    def fire_process(self, process: Process, trigger: str) -> None:
        self._process_machine.fire(process, trigger)
        if process.kind != REPLICA_KIND:
            process.note_work(process.state == "up", self.limit_check.read(self.now))
        if process.state == "up":
            process.answered, process.last_answer = 0, -1.0

    def target_of(self, replica: Replica) -> Version:
        """What a replica works towards: the newest version; where a validation holds it, that one's; a validator that
        none holds stays as it is."""
        run = self.validations.holding(replica)
        if run is not None:
            return run.version
        return replica.version if replica.validator else self.latest_version

    def fire_version(self, version: WeightsVersion, trigger: str) -> None:
        self._version_machine.fire(version, trigger)
        if version.state == "retired":
            del self.versions[version.id]

    @property
    def rollouts(self) -> list[Replica]:
        """Replicas that groups run on, lost ones included: all but those that only validate."""
        return [replica for replica in list(self.replicas.values()) if not replica.validator]

    @property
    def rollouts_left(self) -> int:
        """Number of replicas that generate and are up or on their way."""
        there = sum(replica.state != "down" or replica.coming for replica in self.rollouts)
        return there + self.limits.rollouts_among(self.launched, self.launching)

    def _mark_slow(self, replica: Replica, slow: bool) -> None:
        """A replica is slower than the others by more than may be, or is not any more."""
        if replica.slow != slow:
            replica.slow = slow
            self.free.update(replica)

    def forget_versions(self) -> None:
        """Drop the figures of versions that nothing refers to any more: all tokens of a group that no step has taken
        are of versions with at least `steps_batched` - S train steps."""
        least = self.steps_batched - self.loosest
        used = {*self.versions, *(run.version for run in self.validations.runs.values())}
        used.update(replica.version for replica in self.replicas.values())
        for version in list(self.steps_in):
            if self.steps_in[version] >= least or version >= self.latest_version - 1:
                return
            if version and version not in used:  # a fresh replica has version 0
                del self.steps_in[version]

    def forget_updates(self) -> None:
        """Drop the figures of steps at which no trainer can begin: those before the last checkpoint but one, unless a
        checkpoint has them; without checkpoints, all but the newest."""
        oldest = self.checkpoints.floor if self.limits.checkpoint_every else self.steps_trained
        kept = {0, *self.checkpoints.steps}
        for steps in [steps for steps in self.updates_in if steps < oldest and steps not in kept]:
            del self.updates_in[steps]

    def change(self, limits: Limits) -> None:
        """Other bounds from now on; groups keep the deadlines they have."""
        self.limits, self._ahead, self._timed = limits, limits.ahead, limits.timed
        self.limit_check.use(limits.timeouts)
        self.paces.use(limits.straggler_factor)
        self.loosest = max(self.loosest, limits.max_staleness_steps)
        self.over = max(0, self.ledger.running - limits.max_concurrent_groups)

    def is_staging(self, replica: Replica) -> bool:
        """Whether weights are being brought to its host memory."""
        order = self.orders.find("sync", replica.id)
        return order is not None and isinstance(order.command, StageWeights)

    def timer_is_set(self, name: str) -> bool:
        return self.orders.find("timer", name) is not None

    # what is in flight, as the order book says

    @property
    def asked(self) -> int:
        """Prompts ordered from the source and not yet drawn."""
        order: Any = self.orders.find("draw", None)
        return 0 if order is None else order.command.count

    @property
    def publishing(self) -> bool:
        """A version is on its way to the store, or is inspected there."""
        return bool(self.orders.open("publish")) or self.inspected_version is not None

    @property
    def inspected_version(self) -> Version | None:
        """The version in the store that an added state of train steps inspects; no replica may have it yet."""
        return next((version for version, _ in self.orders.open("inspect") if version != NO_VERSION), None)

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
            places = min(places, max(limits.max_steps, self.steps_batched) * limits.train_batch_size)
        if self.deadlines.surplus and steps + limits.max_staleness_steps >= self.steps_batched:
            places += self.surplus_left
        return places

    @property
    def all_batched(self) -> bool:
        """Whether the batches of all `max_steps` train steps are formed. Steps beyond a bound that was lowered since
        are trained, too."""
        most = self.limits.max_steps
        return most is not None and self.steps_batched >= most

    @property
    def surplus_left(self) -> int:
        """X while a step is to come, and 0 after the last."""
        return 0 if self.all_batched else self.deadlines.surplus

    def staleness(self, group: Group, step: StepId) -> int:
        """Train steps that the oldest token of a group lags behind `step`."""
        born = group.admitted_version if group.oldest_version == NO_VERSION else group.oldest_version
        return step - self.steps_in[born]

    @property
    def capacity(self) -> int:
        """Groups that K and the staleness bound let start now, at the newest version; slots not counted."""
        workers = self.limits.max_concurrent_groups - self.ledger.running
        return 0 if workers <= 0 else max(0, min(workers, self.places(self.latest_version) - self.held))

    @property
    def no_more_prompts(self) -> bool:
        """Nothing waits and nothing can be drawn."""
        return self.exhausted and not self.asked and not self.ledger.waiting

    @property
    def formed_steps(self) -> list[Step]:
        """Steps whose batch is formed and that are not finished, in their order: at most two."""
        return [step for step in self.steps.values() if step.id < self.steps_batched]

    @property
    def training_step(self) -> Step | None:
        """The first step whose batch is formed and that is not finished."""
        return next(iter(self.formed_steps), None)

    def settle(self) -> None:
        """At the end of a tick: groups beyond a K that was lowered only become fewer."""
        if self.over:
            self.over = min(self.over, max(0, self.ledger.running - self.limits.max_concurrent_groups))
