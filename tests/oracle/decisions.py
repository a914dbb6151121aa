"""Compares the decisions of two versions of the core on a thousand worlds.

    python -m tests.oracle.decisions write DIRECTORY      before a change: record every world
    python -m tests.oracle.decisions replay DIRECTORY     after it: name the first difference of each world

`--prefix calm-00` chooses the worlds whose names begin so.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from engine.errors import EngineError
from engine.record import Header, Recorder, read, replay
from tests.oracle import clock_removal, worlds
from tests.oracle.worlds import RunReport

FAMILY: dict[str, Callable[[int, RunReport], None]] = {
    **worlds.FAMILY, "cut": clock_removal.cut, "wild": clock_removal.wild,
}  # fmt: skip


def write(directory: Path, prefix: str) -> Iterator[str]:
    """Record every chosen world. Gives what the judge found in one: such a world is recorded too."""
    for family, number in worlds.corpus():
        name = f"{family}-{number:03}"
        if not name.startswith(prefix):
            continue
        report = RunReport()
        try:
            FAMILY[family](number, report)
        except EngineError as error:
            yield f"{name}: {error}"
        header = Header(run=name, limits=report.limits.to_plain(), policies=report.policies)
        recorder = Recorder(directory / name, header)
        for tick in report.ticks:
            recorder.write(tick.events, tick.commands)
        recorder.close()


def differences(directory: Path, prefix: str) -> Iterator[str]:
    """The first difference of each recorded world in which this code decides otherwise."""
    found = sorted(directory.glob(f"{prefix}*"))
    if not found:
        yield f"{directory} has no record of a world"
    for path in found:
        report = replay(read(path))
        if not report.identical:
            yield f"{path.name}: {report.divergence}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["write", "replay"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--prefix", default="", help="worlds whose names begin so")
    asked = parser.parse_args(arguments)
    act = write if asked.action == "write" else differences
    lines = list(act(asked.directory, asked.prefix))
    print("\n".join(lines), end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
