"""Records the scheduler's decisions. Run it before a change to the core, then compare with `compare.py` after it.

    python -m tests.oracle.export DIRECTORY    every event and command of a thousand worlds, one file each

A file is plain msgpack: the limits, the names of the policies, and the frames. A frame has its event and its commands,
by the names of classes and fields.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import msgpack

from engine.errors import EngineError
from tests.oracle import clock_removal, worlds
from tests.oracle.forms import plain

FAMILY = {**worlds.FAMILY, "cut": clock_removal.cut, "wild": clock_removal.wild}


def play(family: str, number: int) -> tuple[dict[str, Any], str]:
    """Run a world with this code. Returns its record, and the error that the judge found, if any: such a world is
    recorded too."""
    report, found = worlds.RunReport(), ""
    try:
        FAMILY[family](number, report)
    except EngineError as error:
        found = str(error)[:200]
    frames = [
        [event.id, event.at, *plain(event), [plain(command) for command in tick.commands]]
        for tick in report.ticks
        for (event,) in [tick.events]  # worlds of the oracle have ticks of one event
    ]
    name = f"{family}-{number:03}"
    return {"name": name, "limits": report.limits.to_plain(), "policies": report.policies, "frames": frames}, found


def chosen(prefix: str) -> Iterator[tuple[str, int]]:
    """The worlds whose names start with `prefix`."""
    return ((family, number) for family, number in worlds.corpus() if f"{family}-{number:03}".startswith(prefix))


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("directory", type=Path)
    asked.add_argument("--prefix", default="", help="worlds whose names begin so")
    said = asked.parse_args()
    said.directory.mkdir(parents=True, exist_ok=True)
    began, count, seen, slowest = perf_counter(), 0, Counter(), (0.0, "")
    for family, number in chosen(said.prefix):
        start = perf_counter()
        world, found = play(family, number)
        (said.directory / f"{world['name']}.msgpack").write_bytes(msgpack.packb(world))
        count += 1
        seen.update(frame[2] for frame in world["frames"])
        seen.update(name for frame in world["frames"] for name, _ in frame[4])
        if found:
            print(f"{world['name']}: {found}")
        slowest = max(slowest, (perf_counter() - start, world["name"]))
    for name, times in sorted(seen.items()):
        print(f"{times:8} {name}")
    print(f"{count} worlds in {perf_counter() - began:.0f} s, the slowest {slowest[1]} in {slowest[0]:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
