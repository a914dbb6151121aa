"""What a run waits for: every order under way, by whom it is carried out, since when, and which fact would end it.

Asked when a run has been silent for long, by the control endpoint, and where nothing can come any more. Reads the state
and changes nothing; a look costs as much as there is under way.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from engine.ids import GroupId
from engine.states.replica import Replica
from engine.states.state import State
from engine.states.step import Step

Since = Mapping[tuple[str, int], float]
"""When the present state of a record was entered, by (machine, id), where that is known: seconds since the run
began."""
GROUPS_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One thing that is waited for. `since`: seconds since the run began; None where it is not known."""

    what: str
    by: str
    """Who is to do it."""
    since: float | None
    ends: str
    """The facts that end it."""

    def sentence(self, now: float) -> str:
        """`now`: seconds since the run began."""
        age = "" if self.since is None else f" for {max(0.0, now - self.since):.0f} s"
        return f"{self.by}: {self.what}{age} (until {self.ends})"


def waits(state: State, since: Since | None = None) -> list[Wait]:
    """Everything under way, what keeps the next train step first. Empty once the run is over."""
    if state.outcome is not None:
        return []
    known = since or {}
    found = [*_of_the_trainer(state, known), *_of_replicas(state, known), *_of_groups(state), *_of_stages(state)]
    found += [*_of_validations(state, known), *_of_the_rest(state, known)]
    return found


def held_up(state: State) -> str:
    """Who waits for what where nothing is under way that could end it: the story of a run that is stuck."""
    step, size, ledger = state.steps_batched, state.limits.train_batch_size, state.ledger
    there = f"{ledger.ready} of {size} {_are(ledger.ready)} ready"
    told = [f"step {step} waits for {_groups(max(0, size - ledger.ready))}, {there}"]
    if ledger.ready >= size:
        there = f"{_groups(ledger.ready)} that {_are(ledger.ready)} ready"
        told = [f"step {step} waits for the batching policy to take {size} of {there}"]
    if step in state.steps and (needs := state.deadlines.needs(step, size)):
        due = sum(count for _, count in needs)
        told[0] += f", and {due} that {_are(due)} due by step {needs[-1][0]} {_are(due)} not"
    free = sum(replica.free_slots for replica in state.fleet.open())
    if state.waiting:
        room = f"{state.capacity} may be and {are(free, 'slot')} free"
        told.append(f"{_groups(len(state.waiting))} {_wait(len(state.waiting))} to be started, where {room}")
    if parked := [group for group in state.groups.values() if group.state == "aborted"]:
        oldest = min(group.resumes_from for group in parked)
        newest = max((replica.version for replica in state.fleet.open()), default=None)
        there = "none has a free slot" if newest is None else f"the newest with a free slot has {newest}"
        who = f"{_groups(len(parked))} {_wait(len(parked))}"
        told.append(f"{who} for a replica with version {oldest} or newer, {there}")
    if not state.waiting and not parked:
        told.append("no group waits to be started" + (", the prompts are used up" if state.exhausted else ""))
    return "; ".join(told)


def _of_the_trainer(state: State, since: Since) -> Iterator[Wait]:
    for step in state.formed_steps:
        yield from _of_step(state, step, since.get(("step", step.id)))
    if state.publishing and all(step.state != "publishing" for step in state.formed_steps):
        yield _publication(state, None)


def _of_step(state: State, step: Step, since: float | None) -> Iterator[Wait]:
    trainer, batch = "the trainer", f"step {step.id} on {_groups(len(step.groups))}"
    again = f", attempt {step.attempt}" if step.attempt > 1 else ""
    if step.state == "training":
        yield Wait(what=f"trains {batch}{again}", by=trainer, since=since, ends="StepTrained or StepFailed")
    elif step.state == "publishing":
        yield _publication(state, since)
    elif step.state == "scoring":
        tasks = [state.limits.scoring_tasks[place] for place in step.under_way]
        apart = state.limits.scored_apart
        for task in tasks:
            by = f"the scorer of {task}" if task in apart else trainer
            yield Wait(what=f"does {task} of {batch}{again}", by=by, since=since, ends="BatchScored or StepFailed")
        if not tasks:
            what = f"{batch} waits for its pool, or for replicas to take the newest weights"
            yield Wait(
                what=what, by="the scheduler", since=since, ends="ReplicaPaused, WeightsInstalled or BatchScored"
            )


def _publication(state: State, since: float | None) -> Wait:
    what = f"publishes version {state.latest_version + 1}"
    return Wait(what=what, by="the trainer", since=since, ends="WeightsPublished or PublishFailed")


REPLICA_WAITS = {
    "joining": ("comes up", "ReplicaJoined or ReplicaLost"),
    "pausing": ("stops sampling, to take new weights", "ReplicaPaused, SyncFailed or ReplicaLost"),
    "paused": ("is paused for new weights", "WeightsStaged, SyncFailed or ReplicaLost"),
    "installing": ("takes new weights", "WeightsInstalled, SyncFailed or ReplicaLost"),
    "yielding": ("goes to sleep, so that the trainer has its pool", "ReplicaPaused, SyncFailed or ReplicaLost"),
    "draining": ("parks what it has, to leave", "ReplicaPaused, GroupAborted or ReplicaLost"),
}
"""What a replica in a state is waited for, and what ends that."""


def _of_replicas(state: State, since: Since) -> Iterator[Wait]:
    for replica in state.fleet.replicas.values():
        by, entered = f"replica {replica.id}", since.get(("replica", replica.id))
        if replica.state == "lost" and replica.returns:
            yield Wait(what="is started again", by=by, since=entered, ends="ReplicaJoined or ReplicaLost")
        elif replica.state in REPLICA_WAITS:
            what, ends = REPLICA_WAITS[replica.state]
            yield Wait(what=what + _weights(replica), by=by, since=entered, ends=ends)
        elif replica.staging is not None:
            what = f"fetches version {replica.staging} while it generates"
            yield Wait(what=what, by=by, since=None, ends="WeightsStaged, SyncFailed or ReplicaLost")


def _weights(replica: Replica) -> str:
    coming = replica.staged if replica.staged is not None else replica.staging
    return "" if coming is None else f" (version {coming})"


def _of_groups(state: State) -> Iterator[Wait]:
    """One for each replica that generates; the one with the oldest group first."""
    found = []
    for replica in state.fleet.replicas.values():
        running = [state.groups[id] for id in replica.groups if id in state.groups]
        if running:
            running.sort(key=lambda group: (group.seated_at or group.started_at, group.id))
            named = _named([group.id for group in running])
            found.append(
                Wait(
                    what=f"generates {named}" + (", the oldest" if len(running) > 1 else ""),
                    by=f"replica {replica.id}",
                    since=running[0].seated_at or running[0].started_at,
                    ends="GroupGenerated, GroupAborted, GroupFailed or ReplicaLost",
                )
            )
    yield from sorted(found, key=lambda wait: wait.since or 0.0)


def _of_stages(state: State) -> Iterator[Wait]:
    for stage in state.stages.by_name.values():
        if stage.working:
            what = f"works on {_named(list(stage.working))}"
            yield Wait(what=what, by=f"the state {stage.name}", since=None, ends="StateLeft or StateFailed")


def _of_validations(state: State, since: Since) -> Iterator[Wait]:
    run = state.validations.served
    if run is None:
        return
    entered = since.get(("validation", run.id), run.started_at if run.started_at >= 0 else run.queued_at)
    left = sum(chunk.count for chunk in run.chunks if not chunk.done)
    holders = ", ".join(str(id) for id in run.replicas)
    if run.out:
        what = f"measure {counted(left, 'held-out row')} under version {run.version}"
        by = f"replica{'s' * (len(run.replicas) > 1)} {holders}"
        yield Wait(what=what, by=by, since=entered, ends="RowsMeasured, RowsFailed or ReplicaLost")
    else:
        what = f"{counted(left, 'held-out row')} {_wait(left)} for a replica with version {run.version}"
        yield Wait(
            what=what, by="the validation", since=entered, ends="WeightsInstalled, GroupGenerated or ReplicaJoined"
        )


def _of_the_rest(state: State, since: Since) -> Iterator[Wait]:
    if state.checkpoint_pending:
        what = f"writes the checkpoint after {counted(state.checkpoint_ordered, 'train step')}"
        entered = since.get(("checkpoint", state.checkpoint_ordered))
        yield Wait(what=what, by="the trainer", since=entered, ends="CheckpointSaved or CheckpointFailed")
    if state.asked:
        yield Wait(
            what=f"draws {counted(state.asked, 'prompt')}", by="the data source", since=None, ends="PromptsDrawn"
        )
    step = state.steps.get(state.steps_batched)
    if step is not None and step.timer is not None:
        what = f"step {step.id} waits for stragglers, then the deadline policy acts"
        yield Wait(what=what, by=f"timer {step.timer}", since=since.get(("step", step.id)), ends="TimerFired")
    if state.live.group_timer is not None:
        limit = state.limits.group_timeout_s
        what = f"the longest attempt is parked once it has taken {limit:g} s" if limit else "it fires as an echo"
        yield Wait(what=what, by=f"timer {state.live.group_timer}", since=None, ends="TimerFired")
    if state.live.fill_timer is not None:
        what = "more groups are started than one event may start"
        yield Wait(what=what, by=f"timer {state.live.fill_timer}", since=None, ends="TimerFired")
    if state.live.give_up_timer is not None:
        what = f"no replica is left, the run ends after {state.limits.give_up_s:g} s without one"
        yield Wait(what=what, by=f"timer {state.live.give_up_timer}", since=None, ends="ReplicaJoined or TimerFired")


def _named(groups: list[GroupId]) -> str:
    named = ", ".join(str(id) for id in groups[:GROUPS_NAMED])
    more = len(groups) - GROUPS_NAMED
    return f"group{'s' * (len(groups) > 1)} {named}" + (f" and {more} more" if more > 0 else "")


def counted(count: int, what: str) -> str:
    """`1 group`, `2 groups`."""
    return f"{count} {what}{'s' * (count != 1)}"


def are(count: int, what: str) -> str:
    """`1 group is`, `2 groups are`."""
    return f"{counted(count, what)} {_are(count)}"


def _groups(count: int) -> str:
    return counted(count, "group")


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _wait(count: int) -> str:
    return "waits" if count == 1 else "wait"
