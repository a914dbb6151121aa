"""Checks that this code makes the same decisions as the code that ran `export.py`.

    python -m tests.oracle.compare DIRECTORY     feed the recorded events to this scheduler; compare every command

The comparison matches classes and fields by name, and covers only fields that both sides have. The hooks below list the
intended differences. For each world it reports only the first difference, because the two runs diverge after it. It
counts equal differences together.

Intended, and not covered by a hook:

- The last checkpoint is tried again until its attempts are spent; one failure ended the run.
- A prompt that hangs again and again has fewer attempts, charged as failures of its data.
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import msgpack

from engine.commands import COMMANDS
from engine.events import EVENTS, Event, stamp
from engine.policies import PolicySet
from engine.scheduling.scheduler import Scheduler
from engine.states.limits import Limits
from tests.oracle import figures
from tests.oracle.forms import STAMP, Plain, plain

# -- intended differences ----------------------------------------------------------------------------------------------

IGNORED: set[str] = set()
"""Command classes to leave out of the comparison, old or new."""
IGNORED_FIELDS: set[tuple[str, str]] = {("SetTimer", "timer"), ("CancelTimer", "timer")}
"""(Class, field) of commands whose values may differ. The class `*` means all classes. Timers had numbers of their own
before they took those of their orders; `translate` gives the new number for an old one."""
RENAMED: dict[str, str] = {}
"""Old to new names of classes, and of fields as `Class.field`, for events and commands."""


def rebuild(limits: dict[str, Any], policies: dict[str, str]) -> Scheduler:
    """The scheduler of a recorded world. Importing `figures` has registered its custom policies and states."""
    assert figures.OWN
    return Scheduler(Limits.from_plain(limits), PolicySet.from_names(policies))


def translate(name: str, said: dict[str, Any], paired: "Paired") -> list[Plain]:
    """The new events that correspond to an old event: none, one or several, in order. The commands that they cause
    together are compared with those of the old event. If order numbers differ, `paired` gives the new number:

        order = paired.new_of("StartGroup", "ResumeGroup", group=said["group"], attempt=said["attempt"])
    """
    if name == "TimerFired":
        timer = paired.new_of("SetTimer", timer=said["timer"])
        return [(name, {"timer": -1 if timer is None else timer["timer"]})]
    return [(name, said)]


def normalize(name: str, said: dict[str, Any]) -> Plain | None:
    """A command, old or new, in the form to compare; None to leave it out."""
    if name in IGNORED:
        return None
    return name, {k: v for k, v in said.items() if not {(name, k), ("*", k)} & IGNORED_FIELDS}


# -- replaying ---------------------------------------------------------------------------------------------------------

KINDS: dict[str, type[Any]] = {cls.__name__: cls for cls in (*EVENTS.values(), *COMMANDS.values())}


class Paired:
    """The old commands of a world so far, each with its new counterpart."""

    def __init__(self) -> None:
        self._pairs: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = defaultdict(list)

    def add(self, old: list[Plain], new: list[Plain]) -> None:
        """Pair the commands of each class in order."""
        left: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for name, got in reversed(new):
            left[name].append(got)
        for name, was in old:
            if left[name]:
                self._pairs[name].append((was, left[name].pop()))

    def new_of(self, *names: str, **said: Any) -> dict[str, Any] | None:
        """The fields of the new counterpart of the last old command of these classes with these field values."""
        for was, got in (pair for name in names for pair in reversed(self._pairs[name])):
            if all(was.get(k) == v for k, v in said.items()):
                return got
        return None


def renamed(name: str, said: dict[str, Any]) -> Plain:
    return RENAMED.get(name, name), {RENAMED.get(f"{name}.{k}", k): v for k, v in said.items()}


def event_of(name: str, said: dict[str, Any], id: int, at: float) -> Event:
    """A new event, from the fields that it shares with the old one. Raises: `TypeError` if one is missing."""
    if name not in KINDS:
        raise TypeError(f"no event is called {name}: see translate() and RENAMED")
    known = {f.name: f for f in fields(KINDS[name])}
    missing = [
        k for k, f in known.items()
        if k not in said and f.default is MISSING and f.default_factory is MISSING and k not in STAMP
    ]  # fmt: skip
    if missing:
        raise TypeError(f"{name} has new fields {missing}: see translate()")
    event: Event = KINDS[name](**{k: tuple(v) if isinstance(v, list) else v for k, v in said.items() if k in known})
    stamp(event, id, at)
    return event


def differs(old: list[Plain], new: list[Plain]) -> str:
    """The difference between the commands of an event, in a few words; empty if there is none."""
    if [name for name, _ in old] != [name for name, _ in new]:
        missing = Counter(name for name, _ in old) - Counter(name for name, _ in new)
        more = Counter(name for name, _ in new) - Counter(name for name, _ in old)
        if not missing and not more:
            return "in another order"
        return f"missing {sorted(missing.elements())[:6]}, surplus {sorted(more.elements())[:6]}"
    wrong = {
        f"{name}.{k}" for (name, was), (_, got) in zip(old, new, strict=True) for k in was.keys() & got.keys()
        if was[k] != got[k]
    }  # fmt: skip
    if not wrong:
        return ""
    same = sorted(map(repr, old)) == sorted(map(repr, new))
    return "in another order" if same else f"other values of {sorted(wrong)}"


def kept(commands: list[Plain], only: set[str]) -> list[Plain]:
    normal = [found for name, said in commands if (found := normalize(name, said)) is not None]
    return [(name, said) for name, said in normal if not only or name in only]


def replay(world: dict[str, Any], only: set[str], any_order: bool) -> tuple[str, str]:
    """(kind of the first difference, details); both empty if there is none."""
    try:
        scheduler = rebuild(world["limits"], world["policies"])
    except Exception as error:
        return f"the scheduler cannot be built: {type(error).__name__}", str(error)
    paired = Paired()
    for index, (id, at, name, said, commands) in enumerate(world["frames"]):
        was = [renamed(*command) for command in commands]
        old = kept(was, only)
        place = f"{world['name']}, event {index}: {name} {said}"
        got: list[Plain] = []
        try:
            for kind, fact in translate(*renamed(name, said), paired):
                got += map(plain, scheduler.tick((event_of(kind, fact, id, at),)))
        except Exception as error:
            return f"{name}: {type(error).__name__}", f"{place}\n    raised   {error}\n    expected {old}"
        new = kept(got, only)
        what = differs(old, new)
        if what and not (any_order and what == "in another order"):
            return f"{name}: {what}", f"{place}\n    expected {old}\n    got      {new}"
        paired.add(was, got)
    return "", ""


def replay_all(directory: Path, prefix: str, only: set[str], any_order: bool) -> Iterator[tuple[str, str, str]]:
    """(world, kind of its first difference, details) of every recorded world."""
    for path in sorted(directory.glob(f"{prefix}*.msgpack")):
        yield (path.stem, *replay(msgpack.unpackb(path.read_bytes()), only, any_order))


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("directory", type=Path, help="what export.py wrote")
    asked.add_argument("--prefix", default="", help="worlds whose names begin so")
    asked.add_argument("--only", default="", metavar="CLASSES", help="compare these commands alone: TrainStep,...")
    asked.add_argument("--ignore", default="", metavar="FIELDS", help="fields of any command: reason,...")
    asked.add_argument("--any-order", action="store_true", help="an event's commands may come in another order")
    asked.add_argument("--stories", type=int, default=1, help="how many differences of a kind are shown")
    said = asked.parse_args()
    IGNORED_FIELDS.update(("*", field) for field in said.ignore.split(","))
    only = set(filter(None, said.only.split(",")))
    found = replay_all(said.directory, said.prefix, only, said.any_order)
    kinds: dict[str, list[tuple[str, str]]] = defaultdict(list)
    count = 0
    for name, kind, story in found:
        count += 1
        if kind:
            kinds[kind].append((name, story))
    for kind, stories in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(f"== {len(stories)} worlds: {kind}")
        for _, story in stories[: said.stories]:
            print(f"  {story}")
        print(f"  in {' '.join(name for name, _ in stories[:40])}")
    different = sum(map(len, kinds.values()))
    print(f"{count - different} of {count} worlds are identical")
    return 1 if different or not count else 0


if __name__ == "__main__":
    sys.exit(main())
