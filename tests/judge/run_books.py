"""The books of a run, kept from its events and commands only. `run_ledger.RunLedger` judges the run by them.

They share no code with the scheduler and its state; of `Limits` they read only fields. They must never read a state,
and never judge. An event about an attempt or a life that has ended changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

from engine import commands as c
from engine import events as e
from engine.ids import NO_VERSION, GroupId, StepId, Version
from engine.scheduling.settings import FIGURES, POLICIES, changed_limits
from engine.states.limits import QUEUED, Limits

# -- which events answer which orders ----------------------------------------------------------------------------------

WORK: dict[type[c.Command], tuple[str, ...]] = {
    c.StartGroup: ("generate", "group"), c.ResumeGroup: ("generate", "group"), c.ParkGroup: ("park", "group"),
    c.StageWeights: ("sync", "replica"), c.PauseReplica: ("sync", "replica"), c.InstallWeights: ("sync", "replica"),
    c.EnterState: ("state", "group"), c.InspectStep: ("inspect", "version", "step"),
    c.ScoreBatch: ("score", "step", "task"), c.TrainStep: ("train", "step"),
    c.PublishWeights: ("publish", "version"), c.SaveCheckpoint: ("save", "steps"),
    c.DeleteCheckpoint: ("delete", "steps"),
}  # fmt: skip
"""The work that an order is for. A newer order for the same work replaces it."""
ENDS = (c.StartGroup, c.ResumeGroup, c.ParkGroup)
TIMED: dict[type[c.Command], str] = {
    c.ScoreBatch: "score", c.TrainStep: "train", c.PublishWeights: "publish", c.SaveCheckpoint: "checkpoint",
}  # fmt: skip
"""Orders of the trainer and scorers that report progress, with the kinds of their time limits."""
ANSWERS: dict[type[e.Event], tuple[type[c.Command], ...]] = {
    e.GroupGenerated: ENDS, e.GroupAborted: ENDS, e.GroupFailed: ENDS, e.PrefixStored: ENDS[:2],
    e.OrderProgressed: (*ENDS[:2], *TIMED),
    e.StateLeft: (c.EnterState,), e.StateFailed: (c.EnterState,), e.StepInspected: (c.InspectStep,),
    e.InspectionFailed: (c.InspectStep,),
    e.WeightsStaged: (c.StageWeights,), e.ReplicaPaused: (c.PauseReplica,), e.WeightsInstalled: (c.InstallWeights,),
    e.SyncFailed: (c.StageWeights, c.PauseReplica, c.InstallWeights), e.BatchScored: (c.ScoreBatch,),
    e.StepTrained: (c.TrainStep,), e.StepFailed: (c.TrainStep, c.ScoreBatch), e.WeightsPublished: (c.PublishWeights,),
    e.PublishFailed: (c.PublishWeights,), e.CheckpointSaved: (c.SaveCheckpoint,),
    e.CheckpointFailed: (c.SaveCheckpoint,),
}  # fmt: skip
SLACK_S = 0.002
"""Tolerance for sums of seconds."""
REPORTS = (e.PrefixStored, e.OrderProgressed)
"""Events that leave their order open."""
IDENTITY = ("step", "attempt", "replica", "life", "version", "state")
"""An event answers an order for the same work if they agree on these fields, where both have them."""


@lru_cache
def _works(event: type[e.Event]) -> list[tuple[str, tuple[str, ...], bool]]:
    """The work that an event may be about, the fields that name it, and whether the event has them all: a failed step
    answers the orders of all its tasks."""
    works = dict.fromkeys(WORK[kind] for kind in ANSWERS.get(event, ()))
    return [(work, tuple(names), all(hasattr(event, name) for name in names)) for work, *names in works]


@lru_cache
def _shared(event: type[e.Event], order: type[c.Command]) -> tuple[str, ...]:
    return tuple(name for name in IDENTITY if hasattr(event, name) and hasattr(order, name))


# -- the books ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class GroupBook:
    """A group that was started, and is neither trained nor discarded."""

    admitted: Version
    admitted_at: float
    bound: int
    """S at its admission."""
    oldest: Version = NO_VERSION
    newest: Version = NO_VERSION
    """Versions of its stored tokens."""
    ready: bool = False
    moved: bool = False
    truncated: bool = False
    failed: bool = False
    """An attempt failed, exceeded its limit or was lost with its process, or what was stored of it is lost."""
    mark: float = 0.0
    """Work time of its replica when its attempt began or reported progress last."""

    def forget_tokens(self) -> None:
        self.oldest = self.newest = NO_VERSION


@dataclass(slots=True)
class ProcessBook:
    """A process; of a replica, also its weights and its pauses."""

    life: int = 0
    state: str = "gone"
    """`gone`, `starting`, `up` or `stopping`."""
    wanted: bool = True
    excused: bool = False
    """A user asked it to leave."""
    stillborn: int = 0
    """Starts in a row that failed, with no train step between them."""
    trained: StepId = 0
    """Train steps when its last life ended."""
    loads: Version = NO_VERSION
    """Published version with which a trainer starts."""
    version: Version = 0
    staged: tuple[int, Version] | None = None
    """Attempt and version of the sync in progress."""
    pause: str = ""
    """The mode of a pause; `rest` if no new weights follow."""
    waits: bool = False
    """Its start waits for room."""
    still_since: float = -1.0
    still_s: float = 0.0
    """Total seconds of its earlier pauses."""

    @property
    def leaves(self) -> bool:
        return self.excused or not self.wanted

    def work_time(self, now: float) -> float:
        return (self.still_since if self.still_since >= 0 else now) - self.still_s


@dataclass(slots=True)
class TimedBook:
    """An order in `TIMED`."""

    kind: str
    given_at: float
    mark: float
    """When it was given or last reported progress."""


class RunBooks:
    """Everything that the laws need."""

    def __init__(self, limits: Limits, policies: Mapping[str, str]) -> None:
        self.limits = limits
        self.policies = dict(policies)
        self.now = 0.0
        self.over = False
        self.drain: str | None = None
        """The reason of the drain in progress."""
        self.open: dict[str, dict[Any, Any]] = {work: {} for work, *_ in WORK.values()}
        """Open orders, by the work that they are for."""
        self.timed: dict[int, TimedBook] = {}
        """By the number of the order."""
        self.processes: dict[tuple[str, int], ProcessBook] = {}
        self.drawn = 0
        self.groups: dict[GroupId, GroupBook] = {}
        self.discarded: dict[GroupId, StepId] = {}
        """Groups, and the train steps when they were discarded."""
        self.batches: dict[StepId, tuple[GroupId, ...]] = {}
        self.taken: dict[GroupId, StepId] = {}
        self.unread: set[StepId] = set()
        """Trained steps whose batch is not discarded."""
        self.updates: list[int] = []
        """Optimizer updates of each trained step."""
        self.steps_in: dict[Version, StepId] = {0: 0}
        self.stored: set[Version] = {0}
        """Versions in the weights store."""
        self.inspected: Version | None = None
        """The version in the store that may not be used yet: an added state has not let it pass."""
        self.resumed = False
        """The next version may hold no new step."""
        self.saved: set[StepId] = set()
        """Train steps in each checkpoint."""
        self.covered: StepId = 0
        """Train steps in the newest one so far."""
        self.begin_tick()

    def begin_tick(self) -> None:
        self.events: list[e.Event] = []

    def out_of_the_way(self, replica: int) -> bool:
        """Whether a replica takes up nothing of its pool: it sleeps, is gone, or waits for room to start."""
        process, sync = self.process("replica", replica), self.open["sync"].get((replica,))
        asleep = process.pause == "sleep" and not isinstance(sync, c.PauseReplica | c.InstallWeights)
        return process.state == "gone" or (process.state == "up" and asleep) or process.waits

    def knows(self, *kinds: type[e.Event]) -> bool:
        """Whether an event of this tick is of one of these kinds."""
        return any(isinstance(event, kinds) for event in self.events)

    def loses(self, kind: str, index: int) -> bool:
        """Whether a process was lost in this tick."""
        return any(isinstance(x, e.ProcessLost) and (x.kind, x.index) == (kind, index) for x in self.events)

    def process(self, kind: str, index: int = 0) -> ProcessBook:
        return self.processes.setdefault((kind, index), ProcessBook())

    @property
    def trained(self) -> StepId:
        return len(self.updates)

    @property
    def formed(self) -> StepId:
        """Number of steps whose batch is known: of those not trained, at most two."""
        return next(step for step in count(self.trained) if step not in self.batches)

    @property
    def held(self) -> int:
        """Places held: by started groups that no step has taken, and B by each step, a short one too."""
        taken = sum(len(self.batches[step]) for step in range(self.trained, self.formed))
        return len(self.groups) - taken + self.limits.train_batch_size * self.formed

    @property
    def newest(self) -> Version:
        return max(version for version in self.steps_in if version != self.inspected)

    @property
    def loaded(self) -> set[Version]:
        """Versions that a process loads, or has in its memory to install."""
        staged = {process.staged[1] for process in self.processes.values() if process.staged is not None}
        return staged | {process.loads for process in self.processes.values() if process.state == "starting"}

    @property
    def superseded(self) -> set[Version]:
        """Versions to be retired. A drain retires none: the resume begins with an empty store."""
        if self.drain is not None or self.newest not in self.stored:
            return set()
        return self.stored - self.loaded - {self.newest, self.inspected}

    @property
    def surplus(self) -> list[StepId]:
        """Checkpoints that the limits do not keep."""
        every = self.limits.keep_checkpoints_every
        return [s for s in sorted(self.saved)[: -self.limits.keep_checkpoints] if not every or s % every]

    # events

    def learn(self, event: Any) -> None:
        """Enter an event, unless it changes nothing."""
        if self.over and not isinstance(event, e.RunResumed):
            return
        self.now = event.at
        orders = self._answered(event)
        if orders or type(event) not in ANSWERS:
            self.events.append(event)
            self._learn(event, orders)

    def _answered(self, event: Any) -> list[Any]:
        """The orders that an event answers or reports on."""
        of: Any = type(event)
        if of is e.OrderProgressed:
            every = [order for orders in self.open.values() for order in orders.values()]
            return [order for order in every if type(order) in ANSWERS[of] and order.number == event.order]
        found = []
        for work, names, whole in _works(of):
            orders = self.open[work]
            for key in [tuple([getattr(event, name) for name in names])] if whole else list(orders):
                order = orders.get(key)
                kind: Any = type(order)
                if kind in ANSWERS[of] and all(
                    [getattr(event, name) == getattr(order, name) for name in _shared(of, kind)]
                ):
                    found.append(order)
                    if of not in REPORTS:
                        del orders[key]
        return found

    def _learn(self, event: Any, orders: Sequence[Any]) -> None:
        match event:
            case e.ProcessUp() | e.ProcessLost():
                self._learn_of_life(event)
            case e.GroupGenerated() | e.GroupAborted() | e.GroupFailed() | e.PrefixStored():
                self._learn_of_group(event, orders)
            case e.OrderProgressed():
                self._learn_of_progress(orders[0])
            case e.ProcessWaits():
                process = self.process(event.kind, event.index)
                process.waits = bool(event.reason) and process.state == "starting" and process.life == event.life
            case e.StateLeft() if event.state not in self.limits.states_at(QUEUED):
                self.groups[event.group].ready = True
            case e.StateFailed():
                self._fail(event.group)
            case e.StepInspected() if event.version != NO_VERSION:
                self.inspected = None
            case e.PromptsDrawn():
                self.drawn = max(self.drawn, event.first + event.count)
            case e.WeightsInstalled() | e.SyncFailed():
                replica = self.process("replica", event.replica)
                replica.staged = None
                replica.version = event.version if isinstance(event, e.WeightsInstalled) else replica.version
            case e.StepTrained():
                self.updates.append(event.updates)
                self.unread.add(event.step)
                for id in self.batches[event.step]:
                    self.groups.pop(id, None)
            case e.WeightsPublished():
                self._publish(event.version)
            case e.CheckpointSaved():
                self._save(event.steps)
            case e.CheckpointDamaged():
                self._lose_checkpoint(event.steps)
            case e.OrderDone():
                for order in [order for order in self.open["delete"].values() if order.number in event.orders]:
                    del self.open["delete"][order.steps,]
                    self.saved.discard(order.steps)
            case _:
                self._learn_of_run(event)

    def _learn_of_run(self, event: Any) -> None:
        """Enter an event that users or the launching process report."""
        match event:
            case e.RunStarted() if not self.processes:
                self._launch()
            case e.RunResumed():
                self._resume(event)
            case e.SettingChanged() if event.setting in FIGURES:
                self.limits = changed_limits(self.limits, event.setting, event.value)
            case e.SettingChanged():
                self.policies[event.setting.removeprefix(POLICIES)] = event.value
            case e.DrainRequested():
                self.drain = self.drain or event.reason
            case e.ReplicaLeaves():
                replica = self.process("replica", event.replica)
                replica.excused |= replica.life == event.life
            case e.ReplicasWanted():
                for (kind, index), process in self.processes.items():
                    process.wanted = kind != "replica" or index < event.replicas

    def _learn_of_group(self, event: Any, orders: Sequence[Any]) -> None:
        group, replica = self.groups[event.group], self.process("replica", event.replica)
        if not isinstance(event, e.GroupFailed) and event.tokens:
            group.oldest, group.newest = event.oldest_version, max(group.newest, event.newest_version)
        parks = [order for order in orders if isinstance(order, c.ParkGroup)]
        if isinstance(event, e.PrefixStored):
            group.mark = replica.work_time(self.now)
        elif isinstance(event, e.GroupGenerated):
            group.ready = True
        elif isinstance(event, e.GroupFailed):
            if event.cause == "data":
                group.forget_tokens()
            group.failed = True
        elif parks and not parks[0].reason:
            group.moved = True
        else:
            group.failed |= bool(parks) or not replica.pause  # overdue, or its replica aborted it unasked

    def _learn_of_progress(self, order: Any) -> None:
        if isinstance(order, c.StartGroup | c.ResumeGroup):
            self.groups[order.group].mark = self.process("replica", order.replica).work_time(self.now)
        else:
            self.timed[order.number].mark = self.now

    def _publish(self, version: Version) -> None:
        self.steps_in[version] = self.trained
        self.stored.add(version)
        self.resumed = False

    def _save(self, steps: StepId) -> None:
        self.saved.add(steps)
        self.covered = max(self.covered, steps)

    def _lose_checkpoint(self, steps: StepId) -> None:
        """It is damaged: older ones that it replaced are kept."""
        self.saved.discard(steps)
        for deleted in [deleted for (deleted,) in self.open["delete"] if deleted not in self.surplus]:
            del self.open["delete"][deleted,]

    def _fail(self, id: GroupId) -> None:
        """An attempt of a group failed, if it was started."""
        if id in self.groups:
            self.groups[id].failed = True

    # processes

    def _launch(self) -> None:
        """The launch brings up every process but the replicas."""
        for key in [("trainer", 0), ("added states", 0), *(("scorer", index) for index in range(len(self._scorers)))]:
            process = self.process(*key)
            process.life, process.state = process.life + 1, "up"

    @property
    def _scorers(self) -> list[list[str]]:
        """The scoring tasks of each pool in which nothing is trained."""
        apart = [pool.tasks for pool in self.limits.pools if "train" not in pool.tasks]
        return [found for tasks in apart if (found := [task for task in self.limits.scoring_tasks if task in tasks])]

    def _learn_of_life(self, event: Any) -> None:
        process, comes_up = self.process(event.kind, event.index), isinstance(event, e.ProcessUp)
        known = process.state == "gone" or (comes_up and process.state != "starting")
        if event.life < process.life or (event.life == process.life and known):
            self.events.pop()
            return
        if event.kind == "trainer" and not comes_up:
            self._learn_of_lost_reports(event)
        if process.state in ("up", "stopping") or not comes_up:
            self._lose_work(event.kind, event.index)
        failed = process.state == "starting" and not comes_up and not process.leaves
        again = process.stillborn if process.trained == self.trained else 0
        self.processes[event.kind, event.index] = ProcessBook(
            life=event.life,
            state="up" if comes_up else "gone",
            wanted=process.wanted,
            stillborn=again + 1 if failed else 0,
            trained=self.trained,
            version=event.version if comes_up else 0,
        )

    def _learn_of_lost_reports(self, event: e.ProcessLost) -> None:
        """A trainer may be lost after it published or saved and before it reported that."""
        for version in [version for (version,) in self.open["publish"] if version <= event.published]:
            self._publish(version)
            del self.open["publish"][version,]
        for steps in [steps for (steps,) in self.open["save"] if steps in event.saved]:
            self._save(steps)

    def _lose_work(self, kind: str, index: int) -> None:
        """The orders of a lost process end."""
        if kind == "replica":
            for order in [order for order in self.open["generate"].values() if order.replica == index]:
                self.open["park"].pop((order.group,), None)
                del self.open["generate"][order.group,]
                self._fail(order.group)
            self.open["sync"].pop((index,), None)
        elif kind == "added states":
            for (id,) in self.open["state"]:
                self._fail(id)
            self.open["state"].clear()
            self.open["inspect"].clear()
        elif kind in ("trainer", "scorer"):
            apart = [task for tasks in self._scorers for task in tasks]
            mine = self._scorers[index] if kind == "scorer" else {*self.limits.scoring_tasks} - {*apart}
            steps = {step for step, task in self.open["score"] if task in mine}
            if kind == "trainer":
                steps |= {step for (step,) in self.open["train"]}
                for work in ("train", "publish", "save", "delete"):
                    self.open[work].clear()
                for key in [key for key in self.open["inspect"] if key[0] == NO_VERSION]:
                    del self.open["inspect"][key]
            self.open["score"] = {key: order for key, order in self.open["score"].items() if key[0] not in steps}

    # a resume

    def _resume(self, event: e.RunResumed) -> None:
        """Enter a resume: nothing runs, and the store has no weights."""
        self.over, self.drain, self.resumed = False, None, True
        for orders in self.open.values():
            orders.clear()
        for (kind, index), process in self.processes.items():
            wanted = kind != "replica" or index < event.replicas
            self.processes[kind, index] = ProcessBook(life=process.life, wanted=wanted)
        self.stored.clear()
        if self.inspected is not None:
            del self.steps_in[self.inspected]
            self.inspected = None
        if not event.kept:
            self._branch(event.steps)
        elif event.checkpoint:
            self._save(event.checkpoint)
        for id in event.missing:
            if id in self.groups:
                self.groups[id].forget_tokens()
                self.groups[id].ready = False
                self.groups[id].failed = True
        self._launch()

    def _branch(self, steps: StepId) -> None:
        """The weights go back: every group that they do not contain is queued again."""
        self.groups.clear()
        self.unread.clear()
        self.taken = {id: step for id, step in self.taken.items() if step < steps}
        self.discarded = {id: at for id, at in self.discarded.items() if at < steps} | dict.fromkeys(self.taken, 0)
        self.batches = {step: groups for step, groups in self.batches.items() if step < steps}
        del self.updates[steps:]
        self.saved = {saved for saved in self.saved if saved <= steps} | ({steps} - {0})
        self.covered = steps
        self.steps_in = {version: min(held, steps) for version, held in self.steps_in.items()}

    # orders

    def enter(self, command: Any) -> None:
        """Enter a command."""
        if isinstance(command, c.EnterState) and (command.group,) in self.open["state"]:
            self._fail(command.group)  # its work exceeded its time limit
        if type(command) in WORK:
            work, *names = WORK[type(command)]
            self.open[work][tuple(getattr(command, name) for name in names)] = command
        if type(command) in TIMED:
            self.timed[command.number] = TimedBook(TIMED[type(command)], self.now, self.now)
        match command:
            case c.StartGroup() | c.ResumeGroup():
                replica = self.process("replica", command.replica)
                if command.group not in self.groups:
                    group = GroupBook(replica.version, self.now, self.limits.max_staleness_steps)
                    self.groups[command.group] = group
                self.groups[command.group].mark = replica.work_time(self.now)
            case c.AbortGroup():
                self.open["generate"].pop((command.group,), None)
                self.open["park"].pop((command.group,), None)
            case c.TruncateGroup():
                self.groups[command.group].truncated = True
            case c.DiscardGroups():
                for id in command.groups:
                    self.discarded[id] = self.trained
                    self.groups.pop(id, None)
                    self.open["state"].pop((id,), None)
                self.unread = {step for step in self.unread if not self.discarded.keys() >= {*self.batches[step]}}
            case c.ScoreBatch() | c.TrainStep():
                self.batches[command.step] = command.groups
                self.taken.update(dict.fromkeys(command.groups, command.step))
            case c.InspectStep() if command.version != NO_VERSION:
                self.inspected = command.version
            case c.RetireWeights():
                self.stored.discard(command.version)
            case c.StageWeights() | c.PauseReplica() | c.ResumeReplica():
                self._enter_sync(command, self.process("replica", command.replica))
            case c.StartProcess() | c.StopProcess():
                self._enter_life(command, self.process(command.kind, command.index))
            case c.FinishRun():
                self.over = True

    def _enter_sync(self, command: Any, replica: ProcessBook) -> None:
        if isinstance(command, c.StageWeights):
            replica.staged = command.attempt, command.version
        elif isinstance(command, c.PauseReplica):
            brings_weights = command.version > replica.version or command.mode == "sleep"
            replica.pause = command.mode if brings_weights else "rest"
            if replica.staged is not None and replica.staged[0] != command.attempt:
                replica.staged = None
            if command.mode != "wait":
                replica.still_since = self.now
        else:
            replica.still_s += self.now - replica.still_since if replica.still_since >= 0 else 0.0
            replica.pause, replica.still_since = "", -1.0

    def _enter_life(self, command: Any, process: ProcessBook) -> None:
        if isinstance(command, c.StartProcess):
            if command.life != process.life:  # otherwise this tick heard that the life is up
                process.life, process.state, process.loads = command.life, "starting", command.version
            process.excused = False
            if not self.loses(command.kind, command.index):
                process.stillborn = 0
            return
        process.excused |= process.leaves
        process.state = "stopping"
        if command.kind == "replica":
            self._lose_work("replica", command.index)
            process.staged, process.pause = None, ""
