"""Does this code decide as the code did that `export.py` was run with?

    python -m tests.oracle.compare DIRECTORY     feed the recorded events to this scheduler; compare every command
    python -m tests.oracle.compare --anew        run every world anew; compare the summaries with those kept here

Classes and fields are matched by name, and only fields that both sides have are compared. What is meant to differ is
said in the hooks below. Of each world the first difference is told; behind it the two runs are no longer the same.
Equal differences are counted together.
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
from engine.scheduler import Scheduler
from engine.states.limits import Limits
from tests.oracle import figures
from tests.oracle.forms import STAMP, Plain, plain

# -- what is meant to differ -------------------------------------------------------------------------------------------

IGNORED: set[str] = set()
"""Classes of commands that are compared with nothing, old or new."""
IGNORED_FIELDS: set[tuple[str, str]] = set()
"""(Class, field) of commands whose values may differ; the class `*` is every one."""
RENAMED: dict[str, str] = {}
"""Old names of classes, and of fields as `Class.field`, to new ones; of events and commands alike."""


def rebuild(limits: dict[str, Any], policies: dict[str, str]) -> Scheduler:
    """The scheduler of a recorded world, whose policies and states of its own `figures` has brought."""
    assert figures.OWN
    return Scheduler(Limits.from_plain(limits), PolicySet.from_names(policies))


def translate(name: str, said: dict[str, Any], paired: "Paired") -> list[Plain]:
    """An old event as the new ones that say the same: one, none or several, in order. What they lead to together is
    compared with the old event's commands. Where orders are numbered otherwise, `paired` knows the new number:

        order = paired.new_of("StartGroup", "ResumeGroup", group=said["group"], attempt=said["attempt"])
    """
    if name == "PromptsDrawn":  # the order's number came later: an old echo is told by what was drawn before it
        order = paired.open_draw(said["first"], said["count"])
        return [(name, {**said, "number": -1 if order is None else order})]
    return [(name, said)]


def normalize(name: str, said: dict[str, Any]) -> Plain | None:
    """A command, old or new, as it is compared; None: not at all."""
    if name in IGNORED:
        return None
    return name, {k: v for k, v in said.items() if not {(name, k), ("*", k)} & IGNORED_FIELDS}


# -- replaying ---------------------------------------------------------------------------------------------------------

KINDS: dict[str, type[Any]] = {cls.__name__: cls for cls in (*EVENTS.values(), *COMMANDS.values())}


class Paired:
    """The old commands of a world so far, each with the new one that stands in its place."""

    def __init__(self) -> None:
        self._pairs: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = defaultdict(list)
        self._drawn = 0
        """Prompts drawn so far."""

    def add(self, old: list[Plain], new: list[Plain]) -> None:
        """The first of a class goes with the first of that class, and so on."""
        left: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for name, got in reversed(new):
            left[name].append(got)
        for name, was in old:
            if left[name]:
                self._pairs[name].append((was, left[name].pop()))

    def open_draw(self, first: int, count: int) -> int | None:
        """The number of the newest order for prompts, if these are the prompts that it asked for."""
        if not self._pairs["DrawPrompts"] or first != self._drawn:
            return None
        self._drawn += count
        number: int = self._pairs["DrawPrompts"][-1][1]["number"]
        return number

    def new_of(self, *names: str, **said: Any) -> dict[str, Any] | None:
        """The fields of the new command of the last old one of these classes that said this."""
        for was, got in (pair for name in names for pair in reversed(self._pairs[name])):
            if all(was.get(k) == v for k, v in said.items()):
                return got
        return None


def renamed(name: str, said: dict[str, Any]) -> Plain:
    return RENAMED.get(name, name), {RENAMED.get(f"{name}.{k}", k): v for k, v in said.items()}


def event_of(name: str, said: dict[str, Any], id: int, at: float) -> Event:
    """A new event of the fields that it has in common with the old. Raises: `TypeError` where one is missing."""
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
    """What is different about an event's commands, in a few words; empty where nothing is."""
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
    """(The kind of the first difference, its story); both empty where there is none."""
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
            for event in (event_of(*item, id, at) for item in translate(*renamed(name, said), paired)):
                got += [plain(command) for command in scheduler.handle(event)]
        except Exception as error:
            return f"{name}: {type(error).__name__}", f"{place}\n    raised   {error}\n    expected {old}"
        new = kept(got, only)
        what = differs(old, new)
        if what and not (any_order and what == "in another order"):
            return f"{name}: {what}", f"{place}\n    expected {old}\n    got      {new}"
        paired.add(was, got)
    return "", ""


def replay_all(directory: Path, prefix: str, only: set[str], any_order: bool) -> Iterator[tuple[str, str, str]]:
    """(World, kind of its first difference, story) of every recorded world."""
    for path in sorted(directory.glob(f"{prefix}*.msgpack")):
        yield (path.stem, *replay(msgpack.unpackb(path.read_bytes()), only, any_order))


# -- running anew ------------------------------------------------------------------------------------------------------

SEMANTIC = ("steps", "versions", "prompts", "outcome")
"""What must be the same of a world that is run anew. Where an order more or less moves the chances of all that follows
(all families but `calm`), see the totals beside them."""


def anew_all(prefix: str) -> Iterator[tuple[str, str, str]]:
    """As `replay_all`, and the totals of each family at the end, on standard error."""
    from tests.oracle.export import chosen, play, read_corpus  # replaying needs no simulation

    was_all, totals = read_corpus(), defaultdict(lambda: (Counter(), Counter()))
    for family, number in chosen(prefix):
        name = f"{family}-{number:03}"
        try:
            _, now = play(family, number)
        except Exception as error:
            yield name, f"{family}: {type(error).__name__}", f"{name} raised {error}"
            continue
        was = was_all[name]
        for total, line in zip(totals[family], (was, now), strict=True):
            total.update(worlds=1, steps=len(line["steps"]), versions=len(line["versions"]), found=bool(line["found"]))
            total.update({line["outcome"]: 1, "trained": line["prompts"]["trained"]})
            total.update(groups=sum(len(s[1]) for s in line["steps"]), staleness=sum(sum(s[2]) for s in line["steps"]))
        wrong = [k for k in SEMANTIC if _listed(was[k]) != _listed(now[k])]
        if was["found"] != now["found"]:
            wrong.append("found")
        story = "".join(f"\n    {k}: was {was[k]}\n    {k}: now {now[k]}" for k in wrong)
        yield name, f"{family}: {', '.join(wrong)}" if wrong else "", name + story
    for family, (was, now) in totals.items():
        print(f"totals of {family}: {dict(was)}", "the same" if was == now else f"now {dict(now)}", file=sys.stderr)


def _listed(value: Any) -> Any:
    """As JSON gives it back."""
    return [_listed(v) for v in value] if isinstance(value, list | tuple) else value


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("directory", type=Path, nargs="?", help="what export.py wrote")
    asked.add_argument("--anew", action="store_true", help="run the worlds anew, and compare summaries")
    asked.add_argument("--prefix", default="", help="worlds whose names begin so")
    asked.add_argument("--only", default="", metavar="CLASSES", help="compare these commands alone: TrainStep,...")
    asked.add_argument("--ignore", default="", metavar="FIELDS", help="fields of any command: reason,...")
    asked.add_argument("--any-order", action="store_true", help="an event's commands may come in another order")
    asked.add_argument("--stories", type=int, default=1, help="how many differences of a kind are told")
    said = asked.parse_args()
    if said.anew == bool(said.directory):
        asked.error("give either the DIRECTORY that export.py wrote, or --anew")
    IGNORED_FIELDS.update(("*", field) for field in said.ignore.split(","))
    only = set(filter(None, said.only.split(",")))
    found = anew_all(said.prefix) if said.anew else replay_all(said.directory, said.prefix, only, said.any_order)
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
