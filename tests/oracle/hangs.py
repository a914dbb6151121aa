"""Scripted hangs: worlds with time limits in which a chosen order, or the process that gets it, falls silent.

Only what the limits do is compared: which orders are overdue, which processes are stopped and started, which attempts
are charged, and how the run ends. The scripts run again on the engine that is compared, so that it may measure time as
it likes. Nothing in these worlds is random, and no time may differ by more than the checks of limits were late when the
world was recorded.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from random import Random

from engine.commands import Command
from engine.errors import EngineError
from engine.events import SettingChanged
from engine.record.frames import Tick
from engine.simulation.world import Setting, World
from engine.states.limits import Limits, Pool, ValidationLimits
from engine.states.timeouts import Timeouts
from tests.core.added_states import CHECKING, GATING, PROVING
from tests.oracle.formats import Book, LimitWatch, Plain, Seen, addressee
from tests.oracle.recordings import Difference, Recording
from tests.steady_world import SteadyDice

FAMILY = "hang"
DIES, STAYS = "start replica", "stop replica"
"""Over these, a replica dies, or hangs and does not end."""
OVER = (
    "start group", "measure", "stage version", "pause replica", "install version", "let replica", "train step",
    "score step", "publish version", "save checkpoint", "delete checkpoint", "work of state", "inspect step",
    "draw", "discard group", "retire version", "resume group", DIES, STAYS,
)  # fmt: skip
"""How the sentences of the orders begin over which something hangs."""
TIMES = 8
"""Number of worlds for each of them."""
TIMEOUTS = (
    {"all": 100.0, "cut_s": 5.0}, {"all": 60.0, "group_s": 150.0, "cut_s": 20.0}, {"floor_s": 10.0, "cut_s": 5.0},
    {"all": 100.0, "cut_s": 5.0, "max_s": 200.0}, {"all": 80.0, "train_s": 35.0, "start_s": 30.0, "cut_s": 2.0},
)  # fmt: skip
"""By the fields of `Timeouts`; `all`: the limit of every kind, otherwise `auto`."""
SLACK_S = 0.01
"""Times are sums of floats."""
STUCK_TOKENS = 10_000


def worlds() -> list[str]:
    return [f"{FAMILY}-{number:03}" for number in range(TIMES * len(OVER))]


def script_of(name: str) -> Plain:
    """What happens in a world, as plain values."""
    number = int(name.partition("-")[2])
    random = Random(name)
    stuck = random.choice([False, False, True])
    return {
        "over": OVER[number % len(OVER)],
        "nth": 1 if OVER[number % len(OVER)] in (DIES, STAYS) else random.randint(1, 3),
        "order_only": number // len(OVER) % 3 == 2,
        "timeouts": random.choice(TIMEOUTS),
        "mode": random.choice(["keep", "abort", "wait"]),
        "keeps": random.choice([False, True]),
        "prefixes": 0 if stuck else random.choice([0, 10]),
        "train_s": random.choice([5.0, 20.0]),
        "reports": random.choice([0, 3]),
        "taken_over_after": random.choice([None, None, 15.0, 46.0]),
        "change_after": random.choice([None, None, None, 40.0]),
        "stuck_group": 5 if stuck else -1,
    }  # fmt: skip


class HungWorld(World):
    """A world that does what a script says."""

    def __init__(self, script: Plain) -> None:
        self.script, self.left, self.seen = script, script["nth"], list[Seen]()
        self.book = Book()
        given = dict(script["timeouts"])
        every = {"limit": given.pop("all")} if "all" in given else {"limit": "auto"}
        apart = (Pool(tasks=("rollout",), replicas=(0, 1, 2)), Pool(tasks=("train",)), Pool(tasks=("old_logprobs",)))
        limits = Limits(
            train_batch_size=3, max_staleness_steps=2, max_concurrent_groups=9, max_steps=10, sync_mode=script["mode"],
            infrastructure_attempts=3, timeouts=Timeouts.every(**every, **given), scoring_tasks=("old_logprobs",),
            checkpoint_every=2, keep_checkpoints=1, keeps_batches=script["keeps"], pools=apart,
            validation=ValidationLimits(rows=12, rows_per_slot=3, every=2), added_states=(CHECKING, GATING, PROVING),
        )  # fmt: skip
        setting = Setting(
            limits=limits, replicas=3, slots=3, prompts=200, max_tokens=60, prefix_every_tokens=script["prefixes"],
            train_s=script["train_s"], train_reports=script["reports"],
        )  # fmt: skip
        dice = SteadyDice(setting)
        lengths = dice.length
        stuck = script["stuck_group"]
        dice.length = lambda group: STUCK_TOKENS if group == stuck else lengths(group)  # type: ignore[method-assign]
        super().__init__(setting, dice=dice)
        self.watch = LimitWatch(self.scheduler)
        if script["over"] == DIES:
            self.after(30.0, lambda: self.process("replica", 0).die())
        elif script["over"] == STAYS:
            self.after(30.0, lambda: self.silence("replica", 0))

    def silence(self, kind: str, index: int) -> None:
        self.process(kind, index).hung = True

    def execute(self, commands: Sequence[Command]) -> None:
        left = list(commands)
        for command in commands:
            said = self.book.add([command])
            if not self.time or not said or not said[0].startswith(self.script["over"]):
                continue
            self.left -= 1
            if self.left == 0:
                self.hang(command, left)
        super().execute(left)

    def hang(self, command: Command, left: list[Command]) -> None:
        """An order is never answered."""
        process = addressee(command)
        lost = process is None or self.script["order_only"] or self.script["over"] == STAYS
        if lost:
            left.remove(command)
        else:
            assert process is not None
            self.after(0.0, lambda: self.silence(*process))
        if self.script["taken_over_after"] is not None:
            self.after(self.script["taken_over_after"], self.take_over)
        if self.script["change_after"] is not None:
            self.after(self.script["change_after"], self.change)

    def take_over(self) -> None:
        if self.driver.outcome is None:
            self.fail_over()

    def change(self) -> None:
        if self.driver.outcome is None:
            self.driver.deliver(SettingChanged(setting="timeouts.group_s", value="120"))

    def _observe(self, tick: Tick) -> None:
        self.seen += self.watch.observe(tick)
        super()._observe(tick)


def run(script: Plain) -> list[Seen]:
    """What the time limits did in a world."""
    world = HungWorld(script)
    try:
        world.run()
    except EngineError as error:
        world.seen.append(Seen(world.time, 0.0, f"raises {type(error).__name__}: {error}"))
    return world.seen


def record(name: str) -> Recording:
    script = script_of(name)
    lines = [{"at": one.at, "interval": one.interval, "said": one.said} for one in run(script)]
    return Recording({"world": name, "script": script}, lines)


def compare(recording: Recording) -> Iterator[list[Difference]]:
    """What the time limits of this engine do otherwise in a world."""
    before = [Seen(**line) for line in recording.ticks]
    yield [Difference(recording.name, place, said) for place, said in differing(before, run(recording.head["script"]))]


def differing(before: Sequence[Seen], now: Sequence[Seen]) -> Iterator[tuple[str, str]]:
    """The time of each difference, and what it is. Each check of the limits may have delayed all that follows it by its
    interval; the end of the run may be at any time."""
    times: dict[str, list[float]] = defaultdict(list)
    for one in now:
        times[one.said].append(one.at)
    intervals: dict[float, float] = {}
    for one in before:
        intervals[one.at] = max(one.interval, intervals.get(one.at, 0.0))
        allowed = sum(intervals.values()) + SLACK_S
        place = f"{one.at:g} s"
        if not times[one.said]:
            yield place, f"missing: {one.said}"
            continue
        at = times[one.said].pop(0)
        if abs(at - one.at) > allowed and not one.said.startswith("end the run"):
            yield place, f"at {at:g} s, where {allowed:g} s may differ: {one.said}"
    for said, left in times.items():
        yield from ((f"{at:g} s", f"unexpected: {said}") for at in left)
