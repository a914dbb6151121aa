"""The laws of a run, judged by its events and commands only: one method for each law.

`run_checks.Judge` passes every tick of every simulated world to the ledger. The ledger uses no code of the scheduler
(`run_books`), so a wrong function of the scheduler cannot confirm itself. The ledger must never read a state.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine import commands as c
from engine import events as e
from engine.ids import NO_VERSION, GroupId
from engine.simulation.world import Finding
from engine.states.limits import Limits, Pool
from tests.judge.run_books import SLACK_S, RunBooks

FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 60.0
"""Seconds that a start waits after a failed one; doubled each time."""
ROUNDING = 1e-9
HARMLESS_EVENTS = (e.GroupGenerated, e.GroupAborted, e.PrefixStored, e.OrderProgressed, e.PromptsDrawn)
"""Events that make nothing superfluous."""


def _turn(command: c.Command) -> int:
    """When a command of a tick is judged: groups cut short and stops make groups fail, discards free places, and
    weights that are inspected may not be used, before any other command of the tick."""
    if isinstance(command, c.StopProcess | c.InspectStep) or (isinstance(command, c.ParkGroup) and command.reason):
        return 0
    return 1 if isinstance(command, c.DiscardGroups) else 2


class RunLedger:
    """Checks each command against the laws, then looks for commands that a tick should have given."""

    def __init__(self, limits: Limits, policies: Mapping[str, str]) -> None:
        self.books = RunBooks(limits, policies)
        self.end: c.FinishRun | None = None
        """The end of the run, in the tick that ends it."""
        self.worst_staleness = -1

    def observe(self, events: Sequence[e.Event], commands: Sequence[c.Command]) -> None:
        """Check one tick: events, and the commands that followed. Raises: `Finding`."""
        self.books.begin_tick()
        self.end = next((command for command in commands if isinstance(command, c.FinishRun)), None)
        ids = {event.id for event in events if not isinstance(event, e.TimerFired)}  # timers act behind all events
        stops = [command for command in commands if isinstance(command, c.StopProcess) and command.cause in ids]
        for event in events:
            if isinstance(event, e.RunResumed) and not event.kept:
                self.repeats_what_is_lost(event)
            self.books.learn(event)
            for stop in stops:
                if stop.cause == event.id:
                    if isinstance(event, e.OrderOverdue):
                        self.stops_only_what_is_late(event)
                    self.books.enter(stop)
        for command in sorted((command for command in commands if command not in stops), key=_turn):
            for law in LAWS.get(type(command), ()):
                law(self, command)
            self.books.enter(command)
        if self.end is None:
            self.owes_the_end_of_what_is_refused()
            self.owes_the_discard_of_aborted_groups(commands)
            self.owes_a_version_and_a_checkpoint()
            if not all(isinstance(event, HARMLESS_EVENTS) for event in self.books.events):
                self.owes_room()

    def _expect(self, holds: bool, what: str, about: object = "") -> None:
        if not holds:
            raise Finding(f"correctness: {what}; {about or self.books.events}")

    # groups

    def starts_in_its_place(self, command: c.StartGroup | c.ResumeGroup) -> None:
        """A group starts on a ready replica with weights no older than its tokens, and at most K run. A new one starts
        only while the staleness bound leaves a place."""
        books = self.books
        replica, group = books.process("replica", command.replica), books.groups.get(command.group)
        able = replica.state == "up" and replica.life == command.life and not replica.pause
        self._expect(able and books.drain is None, "a group starts on a replica that cannot run it", command)
        ended = command.group in books.discarded or command.group in books.taken or (group is not None and group.ready)
        self._expect(not ended, "a group starts that has ended", command)
        running, most = books.open["generate"], books.limits.max_concurrent_groups
        self._expect((command.group,) not in running, "a group runs twice", command)
        self._expect(len(running) < most, f"more than {most} groups run", command)
        if group is not None:
            least = max(group.admitted, group.newest)
            self._expect(replica.version >= least, f"a group with tokens of version {least} needs it", command)
            return
        batch, ratio = books.limits.train_batch_size, books.limits.async_ratio
        ahead = 1 + (books.limits.max_staleness_steps if ratio is None else ratio)
        surplus = int(books.limits.over_sample * batch + ROUNDING)
        places = int(ahead * batch + ROUNDING) + surplus + batch * books.steps_in[replica.version]
        self._expect(books.held < places, f"{books.held} of {places} places are held, another group starts", command)

    def cuts_only_what_is_late(self, command: c.ParkGroup) -> None:
        """A running group is cut short only if it exceeded its time limit, or to move it to a faster replica, once."""
        group, now = self.books.groups[command.group], self.books.now
        if not command.reason:
            moves = self.books.limits.straggler_factor is not None and not group.moved
            self._expect(moves, "a group is moved again", command)
            return
        took_s = self.books.process("replica", command.replica).work_time(now) - group.mark
        late = self._is_late("group", took_s, now - group.admitted_at)
        self._expect(late, f"a group is cut short after {took_s:g} s", command)

    def _is_late(self, kind: str, took_s: float, in_all_s: float) -> bool:
        """Whether an order of a kind exceeded its time limit. `took_s`: seconds since it was given or last progressed;
        `in_all_s`: since it was given."""
        timeouts = self.books.limits.timeouts
        limit: Any = getattr(timeouts, f"{kind}_s")
        limit_s = timeouts.floor_s if limit == "auto" else limit
        late = limit_s is not None and took_s >= limit_s - SLACK_S
        return late or (timeouts.max_s is not None and in_all_s >= timeouts.max_s - SLACK_S)

    def pauses_as_configured(self, command: c.PauseReplica) -> None:
        """Groups are aborted only in that sync mode, for a drain, or for another task of the pool."""
        books = self.books
        modes = {books.limits.sync_mode}
        if books.process("replica", command.replica).leaves or books.drain is not None:
            modes.add("abort")
        if any(command.replica in pool.replicas and len(pool.tasks) > 1 for pool in books.limits.pools):
            modes.add("sleep")
        self._expect(command.mode in modes, "groups are cut short for no reason", command)

    def truncates_only_stragglers(self, command: c.TruncateGroup) -> None:
        self._expect(self._has_waited(command.group), "a group is truncated before its time", command)

    def _has_waited(self, id: GroupId) -> bool:
        """Whether the deadline policy may act on a group: a timer fired, and the group had its whole timeout."""
        books = self.books
        acts = books.policies.get("deadline", "wait") != "wait" and books.knows(e.TimerFired)
        waited_s = books.now - books.groups[id].admitted_at
        return acts and waited_s >= books.limits.deadline_timeout_s - SLACK_S

    def discards_what_is_over(self, command: c.DiscardGroups) -> None:
        """A group is discarded once: when it is trained, and a checkpoint contains it if one must, or for a reason."""
        books = self.books
        for id in command.groups:
            self._expect(id not in books.discarded, f"group {id} is discarded twice", command)
            step = books.taken.get(id)
            if step is not None:
                self._expect(step < books.trained, f"group {id} is discarded before its step", command)
                covered = not books.limits.keeps_batches or step < books.covered
                self._expect(covered, f"group {id} is discarded before a checkpoint contains it", command)
            elif id in books.groups and (self.end is None or self.end.outcome == "stopped"):
                self._expect(self._may_be_given_up(id), f"group {id} is given up for no reason", command)

    def _may_be_given_up(self, id: GroupId) -> bool:
        books, group = self.books, self.books.groups[id]
        filtered = group.ready and books.policies.get("filter", "none") != "none"
        empty = group.truncated and group.newest == NO_VERSION
        late = (id,) in books.open["state"] and books.knows(e.TimerFired)
        return group.failed or filtered or empty or late or books.limits.over_sample > 0 or self._has_waited(id)

    # train steps

    def trains_each_group_once(self, command: c.TrainStep | c.ScoreBatch | c.InspectStep) -> None:
        """A batch has finished groups that no other step has taken, and is the same in every attempt."""
        books, size = self.books, len(command.groups)
        known = books.batches.get(command.step, command.groups)
        self._expect(command.groups == known, f"step {command.step} had the batch {known}", command)
        fits = 0 < size <= books.limits.train_batch_size and len({*command.groups}) == size
        self._expect(fits, f"a step takes {size} groups", command)
        for id in command.groups:
            step = books.taken.get(id, command.step)
            self._expect(step == command.step, f"group {id} is trained by steps {step} and {command.step}", command)
            self._expect(id not in books.discarded, f"group {id} was discarded before its step", command)
            self._expect(books.groups[id].ready, f"group {id} is not finished", command)

    def trains_nothing_stale(self, command: c.TrainStep) -> None:
        """The oldest token of a group decides, and the S that it was admitted under."""
        for id, claimed in zip(command.groups, command.staleness, strict=True):
            group = self.books.groups[id]
            oldest = group.admitted if group.oldest == NO_VERSION else group.oldest
            staleness = command.step - self.books.steps_in[oldest]
            self._expect(staleness == claimed, f"group {id} is {staleness} stale, and {claimed} by the order", command)
            self._expect(staleness <= group.bound, f"group {id} is {staleness} stale, above {group.bound}", command)
            self.worst_staleness = max(self.worst_staleness, staleness)

    def trains_in_order(self, command: c.TrainStep | c.InspectStep) -> None:
        """A step is trained alone, after the step before it, and not while weights are published."""
        self._expect(command.step == self.books.trained, f"step {self.books.trained} is next", command)
        self._expect(not self.books.open["train"], "two steps are trained at once", command)
        stored = not self.books.open["publish"] and self.books.inspected is None
        self._expect(stored, "a step is trained while weights are published", command)

    def works_in_a_free_pool(self, command: Any) -> None:
        """At most one has a pool: a task, the trainer or a replica that starts there, or the replicas that sample."""
        books, own = self.books, (getattr(command, "step", None), getattr(command, "task", "train"))
        kind = command.kind if isinstance(command, c.StartProcess) else ""
        index = command.index if kind == "replica" else getattr(command, "replica", None)
        of_replica = (pool for pool in books.limits.pools if index in pool.replicas and "rollout" in pool.tasks)
        pool = self._pool_of(own[1]) if index is None else next(of_replica, None)
        if kind not in ("", "replica", "trainer") or (index is not None and pool is None):
            return
        ordered = [*books.open["score"], *((step, "train") for (step,) in books.open["train"])]
        there: list[Any] = [other for other in ordered if other != own and self._pool_of(other[1]) is pool]
        if index is None and pool is not None and "rollout" in pool.tasks:
            there += [("replica", index) for index in pool.replicas if not books.out_of_the_way(index)]
        elif index is not None and pool is self._pool_of("train") and books.process("trainer").state == "starting":
            there.append("trainer")
        self._expect(not there, f"two tasks have one pool: {there} work there", command)

    def _pool_of(self, task: str) -> Pool | None:
        """What no pool lists is done where training is."""
        pools = self.books.limits.pools
        return next((pool for name in (task, "train") for pool in pools if name in pool.tasks), None)

    def trains_what_passed(self, command: c.TrainStep) -> None:
        """No batch is trained while an added state inspects it, or after one has refused it."""
        inspected = (NO_VERSION, command.step) in self.books.open["inspect"]
        self._expect(not inspected, "a batch is trained that is inspected", command)

    def inspects_what_is_next(self, command: c.InspectStep) -> None:
        """A batch is inspected when it could be trained, a version when it is in the store and no replica has it."""
        if command.version == NO_VERSION:
            for law in (RunLedger.trains_each_group_once, RunLedger.trains_in_order, RunLedger.trains_after_sync):
                law(self, command)
            return
        newest = max(self.books.steps_in)
        self._expect(command.version == newest, f"version {newest} is the newest", command)
        self._expect(command.version in self.books.stored, "a version is inspected that is not in the store", command)
        self._expect(command.step == self.books.trained - 1, f"{self.books.trained} steps are trained", command)

    def trains_after_sync(self, command: c.TrainStep | c.InspectStep) -> None:
        """With `train_after_sync`, every replica has the newest weights, but for those that leave or that validations
        hold back, when a step is inspected or trained."""
        books, validation = self.books, self.books.limits.validation
        shared = validation is not None and validation.own_from is None
        if not books.limits.train_after_sync or shared or books.drain is not None:
            return
        for (kind, index), process in books.processes.items():
            validates = validation is not None and index >= (validation.own_from or 0)
            out = process.state != "up" or process.pause == "rest" or process.leaves
            if kind == "replica" and not out and not validates:
                current = process.version == books.newest
                self._expect(current, f"a step is trained before replica {index} has the newest weights", command)

    # versions

    def publishes_every_step(self, command: c.PublishWeights) -> None:
        """Versions follow one another and hold every step trained so far, of which one is new."""
        books = self.books
        self._expect(command.version == books.newest + 1, f"version {books.newest} is the newest", command)
        self._expect(command.steps == books.trained, f"{books.trained} steps are trained", command)
        new = books.resumed or command.steps > books.steps_in[books.newest]
        self._expect(new, "a version holds no new step", command)

    def stages_what_is_stored(self, command: c.StageWeights) -> None:
        older = self.books.process("replica", command.replica).version
        self._expect(command.version in self.books.stored, "a version is staged that is not in the store", command)
        self._expect(command.version != self.books.inspected, "a version is staged before it has passed", command)
        self._expect(command.version > older, f"the replica has version {older}", command)

    def retires_what_is_unused(self, command: c.RetireWeights) -> None:
        """A superseded version is retired once no process loads it."""
        self._expect(command.version in self.books.stored, "a version is retired that is not in the store", command)
        self._expect(command.version < self.books.newest, "the newest version is retired", command)
        self._expect(command.version not in self.books.loaded, "a version is retired that is staged", command)

    # processes and checkpoints

    def stops_only_what_is_late(self, event: e.OrderOverdue) -> None:
        """A process is stopped only if an order of the trainer or a scorer exceeded its time limit, as far as the books
        time it."""
        order = self.books.timed.get(event.order)
        if order is None:
            return
        took_s = event.at - order.mark
        late = self._is_late(order.kind, took_s, event.at - order.given_at)
        self._expect(late, f"an order counts as overdue after {took_s:g} s", event)

    def begins_where_no_step_is_lost(self, command: c.StartProcess) -> None:
        """A trainer begins at the newest checkpoint and repeats the later steps from batches that were kept, or with
        a published version that contains every step."""
        books = self.books
        if command.kind != "trainer":
            return
        if command.version == NO_VERSION:
            newest = max(books.saved, default=0)
            self._expect(command.steps == newest, f"the newest checkpoint is after {newest} steps", command)
        else:
            there = command.version in books.stored and books.steps_in[command.version] == command.steps
            self._expect(there, "a trainer begins with weights that do not exist", command)
        later = tuple(range(command.steps, books.trained))
        self._expect(command.redo == later, f"a trainer must repeat steps {later}", command)
        gone = [id for step in later for id in books.batches[step] if id in books.discarded]
        self._expect(not gone, f"a trainer repeats steps whose groups {gone} were discarded", command)
        updates = sum(books.updates[: command.steps])
        self._expect(command.updates == updates, f"its weights contain {updates} updates", command)

    def waits_after_a_failed_start(self, command: c.StartProcess) -> None:
        process = self.books.process(command.kind, command.index)
        named = (command.kind, command.index, command.life)
        up_now = any(  # brought up by a launch, and heard of in the tick that orders it
            isinstance(event, e.ProcessUp) and (event.kind, event.index, event.life) == named
            for event in self.books.events
        )
        self._expect(command.life > process.life or up_now, "a life starts twice", command)
        if process.stillborn and self.books.loses(command.kind, command.index):
            delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (process.stillborn - 1))
            self._expect(command.delay_s >= delay_s, f"starts failed, so the next one waits {delay_s:g} s", command)

    def deletes_what_is_not_kept(self, command: c.DeleteCheckpoint) -> None:
        self._expect(command.steps in self.books.surplus, "a checkpoint is deleted that must be kept", command)

    # the run

    def repeats_what_is_lost(self, event: e.RunResumed) -> None:
        """A run that returns to a checkpoint repeats what ended after it, and nothing else."""
        books = self.books
        consumed = {id for id, step in books.taken.items() if event.steps <= step < books.trained}
        self._expect({*event.consumed} == consumed, f"groups {sorted(consumed)} must be trained again", event)
        released = {id for id, at in books.discarded.items() if at >= event.steps and id not in books.taken}
        self._expect({*event.released} == released, f"groups {sorted(released)} must be generated again", event)

    def finishes_with_everything_done(self, command: c.FinishRun) -> None:
        """The last step is published and saved; no group and no older version is left."""
        books = self.books
        if command.outcome != "finished":
            return
        self._expect(books.steps_in[books.newest] == books.trained, "the last step was not published", books.steps_in)
        self._expect(self._is_saved(), f"no checkpoint contains step {books.trained}", command)
        left = {*range(books.drawn)} - books.discarded.keys()
        self._expect(not left, f"groups {sorted(left)} were not discarded", command)
        self._expect(not books.superseded, f"versions {books.superseded} were not retired", command)

    def drains_to_a_checkpoint(self, command: c.FinishRun) -> None:
        """A drain parks what runs, trains and publishes the formed batch, and ends with a checkpoint."""
        books = self.books
        if not command.drained:
            return
        self._expect(command.reason == books.drain, f"nobody asked for a drain because of {command.reason}", command)
        for work in ("generate", "score", "inspect", "train", "publish", "save"):
            self._expect(not books.open[work], f"a drain ends with open orders to {work}", command)
        self._expect(self._is_saved(), f"a drain ends without a checkpoint of step {books.trained}", command)

    def _is_saved(self) -> bool:
        return not self.books.limits.checkpoint_every or self.books.trained in {0, *self.books.saved}

    # commands that a tick must have given

    def owes_the_end_of_what_is_refused(self) -> None:
        """A run ends when a batch or weights are refused."""
        refused = [event for event in self.books.events if isinstance(event, e.StepInspected) and event.refused]
        self._expect(not refused, "the run continues with what was refused", refused)

    def owes_the_discard_of_aborted_groups(self, commands: Sequence[c.Command]) -> None:
        aborted = [x.group for x in commands if isinstance(x, c.AbortGroup) and x.group not in self.books.discarded]
        self._expect(not aborted, f"groups {aborted} are aborted, but not discarded")

    def owes_a_version_and_a_checkpoint(self) -> None:
        """Every k-th step is published, every n-th is saved."""
        books, every = self.books, self.books.limits.checkpoint_every
        if not books.knows(e.StepTrained):
            return
        if books.trained % books.limits.sync_every == 0:
            self._expect(bool(books.open["publish"]), f"step {books.trained} is not published")
        if every and books.trained % every == 0:
            self._expect((books.trained,) in books.open["save"], f"step {books.trained} is not saved")

    def owes_room(self) -> None:
        """Nothing leaks: batches, checkpoints and versions are deleted when they are not needed."""
        books, limits = self.books, self.books.limits
        leaked = {step for step in books.unread if not limits.keeps_batches or step < books.covered}
        self._expect(not leaked, f"the batches of steps {leaked} are never discarded")
        if not limits.keep_best:
            surplus = [steps for steps in books.surplus if (steps,) not in books.open["delete"]]
            self._expect(not surplus, f"checkpoints {surplus} are never deleted")
        if limits.validation is None and books.knows(e.WeightsPublished, e.ProcessLost):
            self._expect(not books.superseded, f"versions {books.superseded} are never retired")


Law = Callable[[RunLedger, Any], None]
LAWS: dict[type[c.Command], tuple[Law, ...]] = {
    c.StartGroup: (RunLedger.starts_in_its_place, RunLedger.works_in_a_free_pool),
    c.ResumeGroup: (RunLedger.starts_in_its_place, RunLedger.works_in_a_free_pool),
    c.MeasureRows: (RunLedger.works_in_a_free_pool,),
    c.InstallWeights: (RunLedger.works_in_a_free_pool,),
    c.ParkGroup: (RunLedger.cuts_only_what_is_late,),
    c.TruncateGroup: (RunLedger.truncates_only_stragglers,),
    c.DiscardGroups: (RunLedger.discards_what_is_over,),
    c.ScoreBatch: (RunLedger.trains_each_group_once, RunLedger.works_in_a_free_pool),
    c.TrainStep: (
        RunLedger.trains_each_group_once, RunLedger.trains_nothing_stale, RunLedger.trains_in_order,
        RunLedger.trains_after_sync, RunLedger.trains_what_passed, RunLedger.works_in_a_free_pool,
    ),
    c.InspectStep: (RunLedger.inspects_what_is_next,),
    c.PublishWeights: (RunLedger.publishes_every_step,),
    c.StageWeights: (RunLedger.stages_what_is_stored,),
    c.PauseReplica: (RunLedger.pauses_as_configured,),
    c.RetireWeights: (RunLedger.retires_what_is_unused,),
    c.DeleteCheckpoint: (RunLedger.deletes_what_is_not_kept,),
    c.StartProcess: (
        RunLedger.begins_where_no_step_is_lost, RunLedger.waits_after_a_failed_start, RunLedger.works_in_a_free_pool,
    ),
    c.FinishRun: (RunLedger.finishes_with_everything_done, RunLedger.drains_to_a_checkpoint),
}  # fmt: skip
"""The laws about each command, which are judged before it is entered."""
