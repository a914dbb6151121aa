"""How long `engine debug` takes to move in a long record.

    python benchmarks/debugger.py [EVENTS]

Records a simulated run of so many events (default 990 000, about four minutes on a free core; at most a million), then
measures the CPU seconds of opening the record, of moves before and after the background has replayed it once, and of
searches.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from engine.inspect import open_record
from engine.inspect.breakpoints import parse_breakpoint
from engine.inspect.cursor import Cursor
from engine.policies import PolicySet
from engine.record import Header, Recorder
from engine.runtime.local.session import SNAPSHOT_EVERY
from engine.simulation.world import Setting, World
from engine.states.limits import Limits

LIMITS = Limits(train_batch_size=256, max_staleness_steps=2, max_concurrent_groups=768, sync_mode="abort")
SETTING = Setting(limits=LIMITS, replicas=16, slots=64, prompts=10**9, prefix_every_tokens=4, seed=1)


def record_run(directory: Path, events: int) -> None:
    policies = PolicySet.from_names({})
    header = Header(run="benchmark", limits=LIMITS.to_plain(), policies=dict(policies.names))
    recorder = Recorder(directory / "schedule", header)
    world = World(SETTING, policies, recorder, snapshot_every=SNAPSHOT_EVERY)
    world.run_until(lambda state: world.driver.events_handled >= events)
    world.close()
    recorder.close()


def seconds(move: Callable[[], object], times: int = 1) -> str:
    found = []
    for _ in range(times):
        began = time.process_time()
        move()
        found.append(time.process_time() - began)
    found.sort()
    return f"{found[len(found) // 2]:.3f} s" + (f", longest of {times}: {found[-1]:.3f} s" if times > 1 else "")


def main(directory: Path, events: int) -> None:
    record_run(directory, events)
    began = time.process_time()
    cursor, dice = Cursor(lambda: open_record(directory)), random.Random(1)
    ticks, last = len(cursor), cursor.block_of(len(cursor) - 1)
    print(f"open: {time.process_time() - began:.2f} s; {ticks} ticks")
    print("any tick, before it is indexed:", seconds(lambda: cursor.seek(dice.randrange(ticks)), 12))
    twin = cursor.twin()
    unknown = [block for block in range(last) if block not in cursor.blocks.contents]
    print("the background, once:", seconds(lambda: [twin.scan(block) for block in unknown]))
    sizes = [len(data) for data in cursor.blocks.snapshots.values()]
    print(f"snapshots in memory: {len(sizes)} of {sum(sizes) / 1e6:.0f} MB")
    print("any tick, indexed:", seconds(lambda: cursor.seek(dice.randrange(ticks)), 40))
    cursor.seek(ticks // 2)
    print("one tick back:", seconds(lambda: cursor.seek(cursor.tick.number - 1), 60))
    print("one tick on:", seconds(lambda: cursor.seek(cursor.tick.number + 1), 60))
    group = parse_breakpoint(f"group={cursor.state.groups.ledger.drawn}")
    print("the next tick of a group, half the record away:", seconds(lambda: twin.find(group, 1)))
    trained = parse_breakpoint("event=StepTrained")
    print("the last trained step, from the end:", seconds(lambda: twin.find(trained, ticks - 2, forward=False)))
    print("changes from the first tick to the last:", seconds(lambda: cursor.changes(0, ticks - 1)))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(Path(place), int(sys.argv[1]) if len(sys.argv) > 1 else 990_000)
