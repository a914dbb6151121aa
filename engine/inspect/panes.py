"""The panes of `engine debug` as lines of text: machines, replicas as slots, the order book, and the tick.

Called by `cli.debugger`. Pure: it reads a cursor.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from engine.errors import counted
from engine.inspect.cursor import Cursor
from engine.inspect.story import few, order_behind, worded
from engine.states.orders import Order, owner_text
from engine.states.state import State

FREE = "·"


def headline(cursor: Cursor) -> str:
    """Where the cursor is: tick, events, time, train step and version."""
    tick, state = cursor.tick, cursor.state
    events = f"event {tick.first}" if tick.first == tick.last else f"events {tick.first} to {tick.last}"
    end = "" if state.ending.outcome is None else f"  {state.ending.outcome.outcome}"
    return (
        f"tick {tick.number} of {len(cursor) - 1}  {events}  {tick.at:.3f} s  "
        f"{counted(state.training.steps_trained, 'step')} trained  version {state.training.latest_version}{end}"
    )


def machine_lines(state: State) -> list[str]:
    """How many records of each machine are in each state."""
    training = state.training
    groups = state.groups
    ledger = groups.ledger
    machines: dict[str, Iterable[str]] = {
        "groups": (group.state for group in groups.live.values()),
        "steps": (f"{step.id}: {step.state}" for step in training.steps.values()),
        "replicas": (replica.condition for replica in state.replicas.by_id.values()),
        "processes": (process.state for process in state.processes.values()),
        "versions": (version.state for version in training.versions.values()),
        "validations": (f"{validation.id}: {validation.state}" for validation in state.validations.live.values()),
        "pools": (lease.task or "free" for lease in (state.pools.leases if state.limits.pools else ())),
    }
    lines = []
    for name, states in machines.items():
        counts = Counter(states)
        if counts:
            numbered = name in ("steps", "validations")
            said = [one if numbered else f"{count} {one}" for one, count in sorted(counts.items())]
            lines.append(f"{name:<12}{few(said)}")
    ended = ledger.drawn - len(groups.live)
    lines.append(f"{'ended':<12}{ended} of {ledger.drawn} groups drawn")
    lines.append(f"{'places':<12}{state.held} of {state.places(training.latest_version)} held")
    lines.append(f"{'running':<12}{ledger.running} of K = {state.limits.max_concurrent_groups}")
    for deadline, started, ready in groups.deadlines.cumulative():
        lines.append(f"{'deadline':<12}step {deadline}: {started} started, {ready} ready")
    return lines


def replica_lines(state: State, width: int) -> list[str]:
    """A line for each replica: its state, its version, and the group in each slot."""
    lines = []
    for replica in state.replicas.by_id.values():
        head = f"{replica.id:>2} {replica.condition:<8} v{replica.version:<3}"
        cells = [str(group) for group in state.replicas.running(replica)]
        cells += ["rows"] * state.replicas.measuring(replica)
        occupied = state.replicas.occupied(replica)
        cells += [FREE] * max(0, replica.slots - occupied)
        shown, used = [], len(head) + 8
        for cell in cells:
            used += len(cell) + 1
            if used > width:
                shown.append("…")
                break
            shown.append(cell)
        lines.append(f"{head} {' '.join(shown)}  {occupied}/{replica.slots}")
    return lines or ["no replica has joined"]


def order_lines(state: State, now: float) -> list[str]:
    """A line for each kind of open order and its owner, oldest first."""
    together: dict[tuple[str, str], list[Order]] = {}
    for order in state.orders.all():
        together.setdefault((order.subject, owner_text(order.owner).removeprefix("the ")), []).append(order)
    lines = [f"{len(state.orders)} open, {state.orders.facts.stale_echoes} stale echoes so far"]
    wide = max([11, *(len(owner) for _, owner in together)])
    for (subject, owner), orders in together.items():
        age = max(now - order.at for order in orders)
        ids = few(_id_text(order) for order in orders)
        lines.append(f"{subject:<9} {owner:<{wide}} {len(orders):>3} {age:>6.1f} s  {ids}")
    return lines


def _id_text(order: Order) -> str:
    return " ".join(map(str, order.id)) if isinstance(order.id, tuple) else "" if order.id is None else str(order.id)


def tick_lines(cursor: Cursor) -> Iterator[tuple[str, str]]:
    """(kind, text) of each line: the events, each with the order that it answers and the commands that it caused, and
    the state changes."""
    tick, state = cursor.tick, cursor.state
    for event in tick.events:
        yield "event", f"#{event.id} {worded(event)}{order_behind(event, state)}"
        for command in tick.commands:
            if command.cause == event.id:
                yield "command", f"  -> {worded(command)}"
    for change in cursor.tick_changes:
        yield "change", str(change)
    rejected = cursor.index.rejected.get(tick.number + 1)
    if rejected is not None:
        yield "rejected", f"the next tick was rejected: {worded(rejected.events[-1])}: {rejected.reason}"
