"""Compares the decisions of two versions of the engine on a thousand worlds.

    python -m tests.oracle.decisions write DIRECTORY      before a change: record every world
    python -m tests.oracle.decisions replay DIRECTORY     after it: name what this code does otherwise

`--prefix calm-00` chooses the worlds whose names begin so. Differences that are meant are listed in `accepted.txt`
in the directory, or in the file of `--accepted`, one a line, with the change that explains them; `*` stands for
anything:

    change | world | difference
    row 3  | fleet-* | *: start group * on replica *
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from engine.errors import EngineError
from tests.oracle import hangs
from tests.oracle.formats import Book, plain_settings
from tests.oracle.recordings import SUFFIX, Difference, Recording, differing, load, play, save
from tests.oracle.worlds import FAMILIES, RunReport

ACCEPTED = "accepted.txt"


class Accepted(NamedTuple):
    """Differences that a change explains."""

    change: str
    world: str
    said: str

    def explains(self, difference: Difference) -> bool:
        return fnmatchcase(difference.world, self.world) and fnmatchcase(difference.said, self.said)


def read_accepted(path: Path) -> list[Accepted]:
    """Raises: `SystemExit` for a line that does not name a change, its worlds and its differences."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line.strip() and not line.startswith("#"):
            parts = [part.strip() for part in line.split("|")]
            if len(parts) != 3 or not all(parts):
                raise SystemExit(f"{path}: {line!r} is not: change | world | difference")
            found.append(Accepted(*parts))
    return found


# writing


def record(name: str) -> tuple[Recording, list[str]]:
    """Make a world, and tell its inputs to a core. Also returns what is the matter with it, such as an order that the
    core did not repeat."""
    family, _, number = name.partition("-")
    report, problems = RunReport(), []
    try:
        FAMILIES[family][0](int(number), report)
    except EngineError as error:
        problems.append(f"{name}: {error}")
    recording = Recording(
        {
            "world": name, "settings": plain_settings(report.limits), "policies": report.policies,
            "snapshot_every": (0, 20, 100)[int(number) % 3],
        }
    )  # fmt: skip
    book, core = Book(), recording.core()
    for tick in report.ticks:
        inputs = [book.plain(event) for event in tick.events]
        ordered = book.add(tick.commands)
        answer = core.tick(tick.at, inputs)
        recording.ticks.append({"at": tick.at, "in": inputs, "heard": answer.heard, "out": answer.said})
        if ordered != answer.ordered:
            problems.append(f"{name}, {tick.at:g} s: told again, {next(differing(ordered, answer.ordered))}")
            break
    return recording, problems


def worlds() -> Iterator[str]:
    for family, (_, count) in FAMILIES.items():
        yield from (f"{family}-{number:03}" for number in range(count))


def write(directory: Path, prefix: str) -> Iterator[str]:
    """Record every chosen world. Gives what is the matter with one."""
    for name in worlds():
        if name.startswith(prefix):
            recording, problems = record(name)
            save(directory, recording)
            yield from problems
    for name in hangs.worlds():
        if name.startswith(prefix):
            save(directory, hangs.record(name))


# replaying


def differences(recording: Recording, accepted: Sequence[Accepted], used: Counter[str]) -> list[Difference]:
    """What is not accepted in the first tick with such a difference. Counts those that are accepted, by change."""
    ticks = hangs.compare(recording) if recording.name.startswith(hangs.FAMILY) else play(recording)
    for found in ticks:
        left = []
        for difference in found:
            change = next((one.change for one in accepted if one.explains(difference)), None)
            if change is None:
                left.append(difference)
            else:
                used[change] += 1
        if left:
            return left
    return []


def replay(directory: Path, prefix: str, accepted: Sequence[Accepted]) -> Iterator[str]:
    """The first differences of each chosen world, then their number."""
    paths = sorted(directory.glob(f"{prefix}*{SUFFIX}"))
    if not paths:
        yield f"{directory} has no record of a world"
    used, differing_worlds = Counter[str](), 0
    for path in paths:
        found = differences(load(path), accepted, used)
        differing_worlds += bool(found)
        yield from map(str, found)
    if differing_worlds:
        yield f"{differing_worlds} of {len(paths)} worlds differ"
    if used:
        print("accepted:", ", ".join(f"{count} by {change}" for change, count in used.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["write", "replay"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--prefix", default="", help="worlds whose names begin so")
    parser.add_argument("--accepted", type=Path, help=f"file of accepted differences; default: DIRECTORY/{ACCEPTED}")
    asked = parser.parse_args(arguments)
    failed = False
    if asked.action == "write":
        lines = write(asked.directory, asked.prefix)
    else:
        accepted = read_accepted(asked.accepted or asked.directory / ACCEPTED)
        lines = replay(asked.directory, asked.prefix, accepted)
    for line in lines:
        failed = True
        print(line)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
