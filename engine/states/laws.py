"""The laws of docs/ARCHITECTURE.md, each its own check. A broken one is a defect and raises `InvariantViolated`.

`check_tick` is O(1) (but for loops over deadlines) and runs after every tick of every run. `check_all` recounts
everything from the records; it runs in tests and simulation, and when a run is restored or resumed. Checks of a
decision stand where the decision is applied, in `scheduling/`, and call the functions here.
"""

from collections import Counter
from typing import Any

from engine.commands import InstallWeights, PauseReplica, StageWeights
from engine.errors import InvariantViolated
from engine.ids import NO_VERSION, GroupId, ReplicaId
from engine.states.group import Group
from engine.states.ledger import STARTED
from engine.states.limits import PUBLISHING, SCORING
from engine.states.machine import Phase
from engine.states.orders import state_owner
from engine.states.pool import ROLLOUT
from engine.states.process import POOL_TAKEN
from engine.states.state import State


def require(holds: bool, law: str, **figures: Any) -> None:
    """Raise unless a law holds; survives `python -O`."""
    if not holds:
        shown = ", ".join(f"{name}={value}" for name, value in figures.items())
        raise InvariantViolated(f"{law} ({shown})", law=law, **{k: repr(v) for k, v in figures.items()})


def implies(premise: bool, conclusion: bool) -> bool:
    """Whether the conclusion holds if the premise does."""
    return conclusion or not premise


def check_tick(state: State) -> None:
    """Laws 1 and 2, as far as the books show them."""
    ledger = state.groups.ledger
    count = ledger.count
    if ledger.drawn != sum(count) or min(count) < 0:
        require(False, "law 1: a group was lost or counted twice", drawn=ledger.drawn, by_phase=count)
    if ledger.running > state.limits.max_concurrent_groups + state.groups.facts.over:
        require(
            False, "law 2: more groups run than allowed", running=ledger.running, k=state.limits.max_concurrent_groups
        )


def check_room(state: State) -> None:
    """The invariant that makes the staleness bound hard: U(d) ≤ (d − t + 1)·B + X for every deadline d ≥ t, and none
    below t."""
    step, batch, surplus = state.training.steps_batched, state.limits.train_batch_size, state.groups.deadlines.surplus
    for deadline, started, _ready in state.groups.deadlines.cumulative():
        require(deadline >= step, "law 4: a group is left behind its deadline", deadline=deadline, step=step)
        require(
            started <= (deadline - step + 1) * batch + surplus,
            "law 4: more groups are due by a step than the steps until then can take",
            deadline=deadline, step=step, started=started, batch=batch, surplus=surplus,
        )  # fmt: skip


def check_batch(state: State, step: int, staleness: tuple[int, ...], groups: tuple[int, ...]) -> None:
    """Law 4 for a batch about to be formed, and that each group is in it once (law 5)."""
    require(len(set(groups)) == len(groups), "law 5: a group is in a batch twice", step=step)
    worst = max(staleness)
    if worst > state.groups.facts.loosest or min(staleness) < 0:
        require(False, "law 4: a group is staler than allowed", step=step, staleness=worst)
    if state.groups.facts.loosest > state.limits.max_staleness_steps:
        late = [id for id in groups if state.groups.live[id].deadline < step]
        require(not late, "law 4: a group is staler than it was admitted for", step=step, groups=late)


def check_all(state: State) -> None:
    """Every law that can be seen in a state, recounted from the records."""
    groups = state.groups
    check_tick(state)
    check_room(state)
    over = state.ending.outcome is not None  # the book is empty then
    seats = {} if over else _check_seats(state)
    count = [0] * len(Phase)
    due: dict[int, tuple[int, int]] = {}
    for group in groups.live.values():
        phase = groups.phase_of(group.state)
        count[phase] += 1
        seated = group.id in seats
        if not over and seated != (phase is Phase.RUNNING):
            require(False, "law 1: a running group has no seat, or another has one", group=group.id)
        if seated and state.replicas.by_id[seats[group.id]].version < group.resumes_from:
            require(False, "law 3: a group runs on a replica older than its tokens", group=group.id)
        if STARTED[phase]:
            _check_deadline(state, group)
            started, ready = due.get(group.deadline, (0, 0))
            due[group.deadline] = (started + 1, ready + (phase is Phase.READY))
    live = (Phase.WAITING, Phase.RUNNING, Phase.PARKED, Phase.READY, Phase.BATCHED)
    require(all(count[p] == groups.ledger.count[p] for p in live), "law 1: books and records differ", records=count,
            books=groups.ledger.count)  # fmt: skip
    require(due == groups.deadlines.by_deadline(), "law 4: deadline books and records differ", records=due)
    queued = [group.id for group in groups.live.values() if group.state == "queued"]
    require(queued == list(groups.waiting), "law 1: the waiting list and the records differ")
    aborted = {group.id for group in groups.live.values() if group.state == "aborted"}
    require({*groups.parked} == aborted, "law 7: the list of parked groups and the records differ")
    finishing = {group.id: group.finished for group in groups.live.values() if group.finished}
    require(groups.finishing.keys() == finishing.keys(), "law 2: the list of groups that finish and the records differ")
    ended = Counter[ReplicaId]()
    for id, replica in groups.finishing.items():
        ended[replica.id] += finishing[id]
    unrewarded = sum(finishing[id] == replica.samples for id, replica in groups.finishing.items())
    require(ended == groups.ended and unrewarded == groups.unrewarded,
            "law 2: counts of ended trajectories and the records differ")  # fmt: skip
    require(set(groups.ready) == {g.id for g in groups.live.values() if groups.phase_of(g.state) is Phase.READY},
            "law 1: the ready list and the records differ")  # fmt: skip
    check_orders(state)
    check_validations(state)
    if state.ending.outcome is None:
        check_processes(state)
        check_added_states(state)
        check_pools(state)


def _check_deadline(state: State, group: Group) -> None:
    """The deadline of a started group is that of its admission. After a change of S it may be an earlier or later S."""
    admitted, bound = state.training.steps_in[group.admitted_version], state.limits.max_staleness_steps
    if group.deadline != admitted + bound:
        changed = bool(state.facts.settings) and group.deadline <= admitted + state.groups.facts.loosest
        require(changed, "law 4: a deadline was moved", group=group.id, deadline=group.deadline, due=admitted + bound)


def _check_seats(state: State) -> dict[GroupId, ReplicaId]:
    """Law 2, replica by replica. Returns where each running group runs, as the order book says."""
    replicas, groups = state.replicas, state.groups
    seats: dict[GroupId, ReplicaId] = {}
    for replica in replicas.by_id.values():
        running = replicas.running(replica)
        seats.update(dict.fromkeys(running, replica.id))
        require(replicas.for_chunks(replica) >= 0, "law 2: a replica runs more than it has slots",
                replica=replica.id, running=len(running), chunks=replicas.measuring(replica),
                slots=replica.slots)  # fmt: skip
        require(replica.state == "down" or replica.validator or 1 <= replica.limit <= replica.slots,
                "law 2: a replica has no valid limit", replica=replica.id, limit=replica.limit,
                slots=replica.slots)  # fmt: skip
        require(not (replica.validator and running), "law 2: groups run on a validator", replica=replica.id)
        require(
            replica.version <= state.training.latest_version,
            "law 6: a replica is ahead of the trainer",
            replica=replica.id,
        )
        for id, order in running.items():
            attempt, group = getattr(order.command, "attempt", None), groups.live.get(id)
            known = group is not None and group.attempt == attempt
            require(known, "law 10: an attempt runs that its group does not know", group=id, attempt=attempt)
            require(group is None or 0 <= group.finished <= replica.samples,
                    "law 2: more trajectories ended than were running", group=id, most=replica.samples)  # fmt: skip
    return seats


IN_SYNC = {
    "pausing": (PauseReplica,), "yielding": (PauseReplica,), "draining": (PauseReplica,),
    "installing": (InstallWeights,),
}  # fmt: skip
"""The sync order that a replica must have, by state. In any other state it may have one to stage weights."""


def check_orders(state: State) -> None:
    """Law 10: what the records say is in flight is in the order book, and nothing else is."""
    if state.ending.outcome is not None:
        require(not len(state.orders), "law 10: the run is over and orders are open", open=len(state.orders))
        return
    _check_orders_of_groups(state)
    _check_orders_of_steps(state)
    _check_inspections(state)
    _check_orders_of_validations(state)
    _check_owners(state)
    _check_syncs(state)


def _check_orders_of_groups(state: State) -> None:
    """Only a group that runs is cut short, and no group that runs is aborted."""
    orders = state.orders
    running = orders.open["group"].keys()
    for cut in ("truncate", "park"):
        require(orders.open[cut].keys() <= running, "law 10: a group that does not run is to be cut short", cut=cut)
    require(not orders.open["abort"].keys() & running, "law 10: a group is aborted that runs")


def _check_orders_of_steps(state: State) -> None:
    """The steps, versions and checkpoints that are worked on exist, and nothing is done twice."""
    orders, training = state.orders, state.training
    trained = [step.id for step in training.formed_steps if step.state == "training"]
    require(list(orders.open["train"]) == trained, "law 10: a step is trained unordered, or is not", steps=trained)
    scored = all(step in training.steps for step, _ in orders.open["score"])
    require(scored, "law 10: a step that is over is scored")
    published = all(version > training.latest_version for version in orders.open["publish"])
    require(published, "law 10: a version is published twice")
    retired = orders.open["retire"].keys()
    require(not retired & training.versions.keys(), "law 10: a version is dropped that is live")
    gone = orders.open["delete"].keys() - {*state.checkpoints.steps}
    require(not gone, "law 10: a checkpoint is deleted that is not there", steps=sorted(gone))


def _check_orders_of_validations(state: State) -> None:
    """A validation measures rows only on the replicas that it holds."""
    held = {
        (validation.id, replica) for validation in state.validations.live.values() for replica in validation.replicas
    }
    busy = {(validation, order.owner) for (validation, _), order in state.orders.open["rows"].items()}
    require(busy <= held, "law 10: rows are measured on a replica that is not held", replicas=busy - held)


def _check_owners(state: State) -> None:
    """A command has the number of its order, and a replica the orders of its present life."""
    for order in state.orders.all():
        command: Any = order.command
        number = getattr(command, "number", order.number)
        require(number == order.number, "law 10: a command has another number than its order", order=order.number)
        if isinstance(order.owner, int) and order.subject not in ("start", "stop"):
            replica = state.replicas.by_id[order.owner]
            lost = replica.state == "down" or replica.life != command.life
            require(not lost, "law 10: a replica that is lost has an order", order=order.number, replica=order.owner)


def _check_syncs(state: State) -> None:
    """A replica has the sync order of its state."""
    for replica in state.replicas.by_id.values():
        sync = state.orders.find("sync", replica.id)
        ordered = None if sync is None else type(sync.command)
        fits = ordered in IN_SYNC.get(replica.state, (None, StageWeights))
        require(fits, "law 10: a replica and its order disagree", replica=replica.id, state=replica.state)


def _check_inspections(state: State) -> None:
    """A step in an added state is inspected, or has passed and waits for room; no replica may have a version that is
    inspected."""
    training = state.training
    inspections = [*state.orders.open["inspect"]]
    gates, checks = state.limits.states_at(SCORING), state.limits.states_at(PUBLISHING)
    batches = [(NO_VERSION, step.id) for step in training.formed_steps if step.state in gates]
    versions = [key for key in inspections if key[0] != NO_VERSION]
    found = [key for key in inspections if key not in versions]
    may_wait = state.limits.train_after_sync or bool(state.pools.shared)
    lawful = {*found} <= {*batches} if may_wait else found == batches
    require(lawful, "law 10: a batch is inspected unordered, or is not", steps=batches)
    hidden = all(version > training.latest_version for version, _ in versions)
    require(hidden and len(versions) <= 1, "law 10: a version is inspected that replicas may have", versions=versions)
    checked = any(step.state in checks for step in training.formed_steps)
    require(implies(checked, bool(versions)), "law 10: weights are to be inspected, and were not ordered to be")


def check_processes(state: State) -> None:
    """Law 10: a process that starts or stops was ordered to, or waits; a replica works only while its process is up."""
    processes = [*state.processes.values(), *(replica.process for replica in state.replicas.by_id.values())]
    for subject, there in (("start", "starting"), ("stop", "stopping")):
        ordered = {(p.kind, p.index) for p in processes if p.state == there and p.no_room != POOL_TAKEN}
        require(state.orders.open[subject].keys() == ordered, "law 10: a process and its order disagree", state=there)
    for replica in state.replicas.by_id.values():
        process = replica.process
        require(
            implies(replica.state != "down", process.state == "up"), "a replica works and its process is not up",
            replica=replica.id, state=replica.state, process=process.state,
        )  # fmt: skip


def check_added_states(state: State) -> None:
    """Every group in an added state waits there or is worked on, once, and no more are worked on than may be."""
    queues = state.groups.state_queues
    for name, queue in queues.by_name.items():
        there = {group.id for group in state.groups.live.values() if group.state == name}
        ordered = state.orders.of(state_owner(name), "state").keys()
        require(not queue.waiting.keys() & ordered, "law 1: a group is in a state twice", state=name)
        require(there == {*queue.waiting, *ordered}, "law 1: a group is lost in an added state", state=name)
        require(queue.working <= queue.concurrency, "law 2: a state works on more than it may", state=name)


def check_pools(state: State) -> None:
    """Tasks of one pool exclude one another, and a replica sleeps only while its pool is another's."""
    pools, replicas = state.pools, state.replicas.by_id
    formed = state.training.formed_steps
    require(len(formed) <= 2, "more than one batch is formed ahead", steps=[step.id for step in formed])
    tasks = [task for _, task in state.orders.open["score"]] + ["train"] * len(state.orders.open["train"])
    busy_pools = [pools.of(task).id for task in tasks]
    require(len(busy_pools) == len({*busy_pools}), "a pool has several tasks at once", pools=busy_pools, tasks=tasks)
    for lease in pools.leases:
        require(
            (lease.state == "leased") == bool(lease.task), "the state of a lease and its task differ", pool=lease.id
        )
        if not lease.task:
            continue
        if lease.task == ROLLOUT:
            require(lease in pools.shared, "replicas are leased a pool where they do not stand", pool=lease.id)
            continue
        step = state.training.steps.get(lease.step)
        require(step is not None, "a pool is leased to a step that is over", pool=lease.id, step=lease.step)
        assert step is not None
        busy = lease.task in state.scoring(step) if step.state == "scoring" else lease.task == "train"
        busy |= state.ending.outcome is not None  # nothing that was ordered is wanted any more
        require(busy, "a pool is leased to a task that is not in progress", pool=lease.id, task=lease.task)
        for id in pools.sleepers(lease):
            replica = replicas.get(id)
            idle = replica is None or not (state.replicas.running(replica) or state.replicas.measuring(replica))
            require(idle, "tasks of one pool run at once", pool=lease.id, task=lease.task, replica=id)
    for replica in replicas.values():
        if replica.state in ("yielding", "asleep"):
            require(pools.of_replica(replica.id) is not None, "a replica sleeps, but is in no pool", replica=replica.id)
        idle = not state.replicas.running(replica)
        require(implies(replica.state == "asleep", idle), "groups run on a sleeper", replica=replica.id)


def check_validations(state: State) -> None:
    """A version is kept while a validation waits for it, each row counts once, and no other replica is delayed."""
    training = state.training
    books, replicas = state.validations, state.replicas.by_id
    for validation in books.live.values():
        require(
            validation.version in training.versions,
            "a version is retired while a validation of it waits",
            version=validation.version,
        )
        require(
            validation is books.served or not validation.replicas,
            "a validation holds replicas before its turn",
            validation=validation.id,
        )
        done = sum(chunk.count for chunk in validation.chunks if chunk.done)
        require(
            0 <= validation.right <= validation.measured <= done,
            "more rows are counted than were measured",
            validation=validation.id,
        )
        waits = set(state.validations.waiting[validation.id].indexes)
        measuring = [order for (of, _), order in state.orders.open["rows"].items() if of == validation.id]
        measured = {order.id[1]: replicas[int(order.owner)] for order in measuring}
        for chunk in validation.chunks:
            places = chunk.done + (chunk.index in measured) + (chunk.index in waits)
            require(places == 1, "a chunk of a validation is lost or in two places", chunk=chunk.index)
        for index, replica in measured.items():
            require(replica.version == validation.version, "rows are measured under another version", chunk=index)
        require(
            validation.left == sum(not c.done for c in validation.chunks),
            "a validation's books differ",
            validation=validation.id,
        )
        for id in validation.replicas:
            require(replicas[id].state != "down", "a validation holds a replica that is down", replica=id)
            require(replicas[id].heading <= validation.version, "a held replica leaves its version", replica=id)
    for replica in replicas.values():
        installs = replica.state == "ready" and not replica.validator and state.ending.outcome is None
        if installs and books.holding(replica) is None:
            on_its_way = replica.next_version == training.latest_version or state.is_staging(replica)
            newest = replica.version == training.latest_version or training.latest_version not in training.versions
            require(newest or on_its_way, "an install is delayed without a validation", replica=replica.id)
