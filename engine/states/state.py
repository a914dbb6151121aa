"""The state of one run: one record for each subject, and the few operations and figures that span several of them.

`RunFacts` is what the run keeps, and `State` has it together with the indexes and machines that are made from it.

Changed only by `scheduling/scheduler.py` and the modules of `scheduling/`; everyone else reads it through
`states/view.py`. Each subject keeps its indexes in step with its facts, so that no caller can forget to.
"""

from typing import Any

from msgspec import field

from engine.commands import FinishRun, StageWeights
from engine.ids import NO_VERSION, GroupId, ReplicaId, StepId, Version
from engine.states.checkpoints import Checkpoints
from engine.states.ending import Ending
from engine.states.facts import Facts
from engine.states.group import Group
from engine.states.groups import Groups, GroupsFacts
from engine.states.limits import PUBLISHING, SCORING, Limits
from engine.states.machine import Moves, Observer, SharedMachine, entered
from engine.states.orders import OrderBook, OrdersFacts, Owner, owner_of, state_owner
from engine.states.pool import POOL, PoolLease, Pools
from engine.states.process import ADDED_STATES, PROCESS, SCORER, Process, name_of
from engine.states.process import REPLICA as REPLICA_KIND
from engine.states.replica import REPLICA, Replica
from engine.states.replicas import Replicas
from engine.states.step import Step, step_table
from engine.states.training import Training
from engine.states.validation import VALIDATION, Validations, ValidationsFacts
from engine.states.version import VERSION, WeightsVersion

RECOVERY_KINDS = ("resumed", "branched", "scheduler")
"""The keys of `State.recoveries`."""


class PolicyNotes(Facts):
    """What the policies of a run remember."""

    memory: dict[str, bytes] = {}
    """What each policy that has a memory remembered after its last lawful answer, as msgpack, by decision."""


class RunFacts(Facts):
    """What one run keeps."""

    started: bool = False
    now: float = 0.0
    """Time of the newest event, seconds since the run began."""
    settings: dict[str, str] = {}
    """Settings that were changed during the run, by name."""
    moves: Moves = {}
    """Changes of state since the run began. A resume that goes back to a checkpoint undoes none."""
    recoveries: dict[str, int] = {}
    """How often new processes continued the run and lost no train step (`resumed`) or repeated some (`branched`), and
    how often a new scheduler took it over (`scheduler`)."""
    groups: GroupsFacts = field(default_factory=GroupsFacts)
    orders: OrdersFacts = field(default_factory=OrdersFacts)
    replicas: dict[ReplicaId, Replica] = {}
    processes: dict[str, Process] = {}
    """Every process that is not a replica, by its name. A replica has its own: `Replica.process`."""
    training: Training = field(default_factory=Training)
    pools: dict[int, PoolLease] = {}
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    validations: ValidationsFacts = field(default_factory=ValidationsFacts)
    policies: PolicyNotes = field(default_factory=PolicyNotes)
    ending: Ending = field(default_factory=Ending)

    @staticmethod
    def of_new_run(limits: Limits) -> "RunFacts":
        facts = RunFacts(recoveries=dict.fromkeys(RECOVERY_KINDS, 0))
        facts.groups.loosest = limits.max_staleness_steps
        facts.checkpoints.tracks, facts.checkpoints.keeps = bool(limits.checkpoint_every), limits.keeps_batches
        facts.training.begin()
        return facts


class State:
    """The whole state of one run."""

    def __init__(self, limits: Limits, observe: Observer | None = None, facts: RunFacts | None = None) -> None:
        """`facts`: of a run that has begun; None: a new run begins."""
        self.limits = limits
        self.facts = RunFacts.of_new_run(limits) if facts is None else facts
        self.changed = False
        """Something other than a group has changed its state in this tick."""
        self.completed: dict[GroupId, float] = {}
        """Mean reward of each group that was completed in this tick, added states included."""
        self.filtered: list[GroupId] = []
        """Those of them that the filter dropped."""
        kept = self.facts
        self.moves, self.recoveries, self.processes = kept.moves, kept.recoveries, kept.processes
        self.training, self.checkpoints = kept.training, kept.checkpoints
        self.policies, self.ending = kept.policies, kept.ending
        self._build_machines(limits)
        self._observe = observe
        self.orders = OrderBook(kept.orders, limits.scored_apart)
        self._worker_of = {state_owner(added.name): name_of(ADDED_STATES, 0) for added in limits.added_states}
        for index, tasks in enumerate(limits.scorers()):
            self._worker_of.update((self.orders.scorer(task), name_of(SCORER, index)) for task in tasks)
        """The process that executes the orders of an owner with another name."""
        self.pools = Pools(kept.pools, limits)
        self.groups = Groups(
            kept.groups, limits, self.orders, self.training, self.checkpoints, kept.replicas, self.moves, observe
        )  # fmt: skip
        self.replicas = Replicas(kept.replicas, self.orders, self.groups)
        self.validations = Validations(kept.validations, self.replicas, self.orders, self._validation_machine)
        if facts is None:
            self.fire_version(self.training.versions[0], "live")

    # the state as a whole

    def change(self, limits: Limits) -> None:
        """Use other bounds from now on."""
        self.limits = limits
        self.groups.use(limits)

    def branch(self, steps: int, consumed: tuple[GroupId, ...], released: tuple[GroupId, ...]) -> None:
        """Go back to `steps` train steps. Every group that they do not hold is queued again."""
        self.groups.branch(consumed, released)
        self.checkpoints.branch(steps)
        self.training.branch(steps, self.facts.now)
        self.training.setbacks = self.count_setbacks()
        for pool in self.pools.leases:
            if pool.task:
                self.give_back(pool)
        self.retire_all()

    def retire_all(self) -> None:
        """Note that the weights of every version are gone."""
        for version in list(self.training.versions.values()):
            self.fire_version(version, "retire")

    def begin_again(self) -> None:
        """Note that new processes carry the run: nothing runs any more, the run is not over, and only the restarts that
        it has used count towards its end."""
        self.facts.started = True
        self.ending.begin_again()
        self.training.publish_failures = self.checkpoints.failures = 0

    def end_run(self, outcome: str, reason: str, *, again: bool = False, drained: bool = False) -> None:
        """End the run as `finished`, `stopped` or `failed`. The first call determines the outcome. `again`: the run
        begins again from its record if its budget allows."""
        ending = self.ending
        if ending.outcome is not None:
            return
        again = again and not ending.draining
        if again and not self._charge_restart():
            again, outcome = False, "failed"
            spent = f"; the run restarted {ending.restarts} times without a train step (run_restarts)"
            reason += spent if ending.restarts else ""
        cause = self.orders.event.id
        ending.outcome = FinishRun(outcome=outcome, reason=reason, again=again, drained=drained, cause=cause)

    def _charge_restart(self) -> bool:
        """Whether the run may begin again from its record. A new train step resets the budget."""
        ending = self.ending
        if self.training.steps_trained > ending.restarted_at:
            ending.restarts, ending.restarted_at = 0, self.training.steps_trained
        if ending.restarts >= self.limits.run_restarts:
            return False
        ending.restarts += 1
        return True

    @property
    def takes_work(self) -> bool:
        """The run has begun, is not over and does not drain."""
        return self.facts.started and self.ending.outcome is None and not self.ending.draining

    def count_setbacks(self) -> dict[str, int]:
        """How often groups were aborted, resumed, filtered and failed since the run began."""
        return {state: entered(self.moves, "group", state) for state in ("aborted", "resumed", "filtered", "failed")}

    # machines

    def _build_machines(self, limits: Limits) -> None:
        steps = step_table(limits.states_at(SCORING), limits.states_at(PUBLISHING))
        (
            self._step_machine, self._replica_machine, self._version_machine, self._pool_machine, self._process_machine,
            self._validation_machine,
        ) = (
            SharedMachine(table, self.moves, self._note)
            for table in (steps, REPLICA, VERSION, POOL, PROCESS, VALIDATION)
        )  # fmt: skip

    def observe(self, observe: Observer | None, *, groups: bool = True) -> None:
        """Call `observe` after every change of state from now on. Without `groups`, the observer of the groups stays:
        nearly all changes are theirs."""
        self._observe = observe
        if groups:
            self.groups.machine.observe = observe

    def _note(self, machine: str, record: Any, source: str, trigger: str) -> None:
        """Observe all machines but that of groups."""
        self.changed = True
        if self._observe is not None:
            self._observe(machine, record, source, trigger)

    def fire_step(self, step: Step, trigger: str) -> None:
        step.leave(self.facts.now)
        self._step_machine.fire(step, trigger)

    def fire_version(self, version: WeightsVersion, trigger: str) -> None:
        self._version_machine.fire(version, trigger)
        if version.state == "retired":
            del self.training.versions[version.id]

    def lease(self, pool: PoolLease, task: str, step: StepId = -1) -> None:
        """Let a task have a free pool."""
        self._pool_machine.fire(pool, "lease")
        pool.task, pool.step = task, step

    def give_back(self, pool: PoolLease) -> None:
        """The pool is free."""
        self._pool_machine.fire(pool, "give-back")
        pool.task, pool.step = "", -1

    def fire_replica(self, replica: Replica, trigger: str) -> None:
        self._replica_machine.fire(replica, trigger)

    def fire_process(self, process: Process, trigger: str) -> None:
        self._process_machine.fire(process, trigger)
        if process.state == "up":
            process.answered_at = -1.0

    # processes

    def find_process(self, kind: str, index: int) -> Process | None:
        """A process; None for one that was never seen."""
        if kind == REPLICA_KIND:
            replica = self.replicas.by_id.get(index)
            return None if replica is None else replica.process
        return self.processes.get(name_of(kind, index))

    def process(self, kind: str, index: int) -> Process:
        """A process. One that was never seen before is added, and is gone."""
        found = self.find_process(kind, index)
        if found is None:
            found = Process(kind, index)
            if kind == REPLICA_KIND:
                self.replicas.by_id[index] = Replica(index, self.limits.validates_only(index), found)
            else:
                self.processes[name_of(kind, index)] = found
        return found

    def owners_of(self, process: Process) -> list[Owner]:
        """Under which names the work of a process is in the book of orders."""
        if process.kind == SCORER:
            return [self.orders.scorer(task) for task in self.limits.scorers()[process.index]]
        if process.kind == ADDED_STATES:
            return [state_owner(added.name) for added in self.limits.added_states]
        return [owner_of(process.kind, process.index)]

    def process_of(self, owner: Owner) -> Process | None:
        """The process that executes the orders of an owner; None for the data source, which is no process."""
        if isinstance(owner, int):
            return self.replicas.by_id[owner].process
        return self.processes.get(self._worker_of.get(owner, owner))

    @property
    def rollouts_left(self) -> int:
        """Number of replicas that generate and are up or on their way."""
        return sum(replica.state != "down" or replica.coming for replica in self.replicas.rollouts)

    def target_of(self, replica: Replica) -> Version:
        """What a replica works towards: the newest version; where a validation holds it, that one's; a validator that
        none holds stays as it is."""
        validation = self.validations.holding(replica)
        if validation is not None:
            return validation.version
        return replica.version if replica.validator else self.training.latest_version

    # what nothing refers to any more

    def forget_versions(self) -> None:
        """Drop the figures of versions that nothing refers to any more: all tokens of a group that no step has taken
        are of versions with at least `steps_batched` - S train steps."""
        training = self.training
        used = {*training.versions, *(validation.version for validation in self.validations.live.values())}
        used.update(replica.version for replica in self.replicas.by_id.values())
        training.forget_versions(training.steps_batched - self.groups.facts.loosest, used)

    def forget_updates(self) -> None:
        """Drop the figures of steps at which no trainer can begin: those before the last checkpoint but one, unless a
        checkpoint has them; without checkpoints, all but the newest."""
        oldest = self.checkpoints.floor if self.limits.checkpoint_every else self.training.steps_trained
        self.training.forget_updates(oldest, self.checkpoints.steps)

    def surplus_checkpoints(self) -> list[StepId]:
        """The checkpoints to delete, oldest first."""
        return self.checkpoints.surplus(
            self.limits, [validation.steps for validation in self.validations.live.values()]
        )

    # what is in flight, as the order book says

    def is_staging(self, replica: Replica) -> bool:
        """Whether weights are being brought to its host memory."""
        order = self.orders.find("sync", replica.id)
        return order is not None and isinstance(order.command, StageWeights)

    def timer_is_set(self, name: str) -> bool:
        return self.orders.find("timer", name) is not None

    @property
    def asked(self) -> int:
        """Prompts ordered from the source and not yet drawn."""
        order: Any = self.orders.find("draw", None)
        return 0 if order is None else order.command.count

    @property
    def publishing(self) -> bool:
        """A version is on its way to the store, or is inspected there."""
        orders = self.orders.open
        return bool(orders["publish"]) or (bool(orders["inspect"]) and self.inspected_version is not None)

    @property
    def inspected_version(self) -> Version | None:
        """The version in the store that an added state of train steps inspects; no replica may have it yet."""
        return next((version for version, _ in self.orders.open["inspect"] if version != NO_VERSION), None)

    @property
    def checkpoint_pending(self) -> bool:
        """A checkpoint is being written."""
        return bool(self.orders.open["checkpoint"])

    @property
    def deletion_pending(self) -> bool:
        """A checkpoint is being deleted."""
        return bool(self.orders.open["delete"])

    def scoring(self, step: Step) -> list[str]:
        """The scoring tasks of a step that are ordered and not done."""
        return [task for of, task in self.orders.open["score"] if of == step.id]

    # figures of the laws

    @property
    def held(self) -> int:
        """Places taken (law 3): a short step is charged in full."""
        return self.groups.ledger.unconsumed + self.limits.train_batch_size * self.training.steps_batched

    def places(self, version: Version) -> int:
        """How many places there are for groups admitted on `version`; never more than the run needs."""
        limits, batched, steps = self.limits, self.training.steps_batched, self.training.steps_in[version]
        places = limits.ahead + steps * limits.train_batch_size
        if limits.max_steps is not None:
            places = min(places, max(limits.max_steps, batched) * limits.train_batch_size)
        if self.groups.deadlines.surplus and steps + limits.max_staleness_steps >= batched:
            places += self.surplus_left
        return places

    @property
    def all_batched(self) -> bool:
        """Whether the batches of all `max_steps` train steps are formed. Steps beyond a bound that was lowered since
        are trained, too."""
        most = self.limits.max_steps
        return most is not None and self.training.steps_batched >= most

    @property
    def surplus_left(self) -> int:
        """X while a step is to come, and 0 after the last."""
        return 0 if self.all_batched else self.groups.deadlines.surplus

    def staleness(self, group: Group, step: StepId) -> int:
        """Train steps that the oldest token of a group lags behind `step`."""
        oldest = group.oldest_version
        born = group.admitted_version if oldest == NO_VERSION else oldest
        return step - self.training.steps_in[born]

    @property
    def capacity(self) -> int:
        """Groups that K and the staleness bound let start now, at the newest version; slots not counted."""
        workers = self.limits.max_concurrent_groups - self.groups.ledger.running
        return 0 if workers <= 0 else max(0, min(workers, self.places(self.training.latest_version) - self.held))

    @property
    def no_more_prompts(self) -> bool:
        """Nothing waits and nothing can be drawn."""
        return self.groups.facts.exhausted and not self.asked and not self.groups.ledger.waiting
