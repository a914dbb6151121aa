"""The names that other systems give to settings, and the fields that replace them here.

`migration_tables.md` has a table for each system, and a row for one flag, or for several with the same prefix
(`rollout.val_kwargs.*`). It must never guess: the row of a flag without a counterpart says why. `loading` asks this
module when a configuration has an unknown key; docs/reference/MIGRATION.md is made from the same tables.
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

TABLES = Path(__file__).with_name("migration_tables.md")


class Flag(NamedTuple):
    """One flag of another system."""

    theirs: str
    here: tuple[str, ...]
    """The fields or commands that replace it; empty: none."""
    note: str


@cache
def tables() -> dict[str, str]:
    """The text of each system's table, as the page shows it."""
    sections = TABLES.read_text(encoding="utf-8").split("\n## ")[1:]
    return {name: text.strip() for name, _, text in (section.partition("\n") for section in sections)}


@cache
def flags() -> dict[str, tuple[Flag, ...]]:
    """The rows of each system's table."""
    return {system: tuple(map(_flag, table.splitlines()[2:])) for system, table in tables().items()}


def _flag(row: str) -> Flag:
    theirs, here, note = (cell.strip() for cell in row.strip("|").split("|"))
    return Flag(theirs.strip("`"), tuple(re.findall("`([^`]+)`", here)), note)


def exact_hint(path: str) -> str:
    """The fix for a key whose path is a name of another system, or the end of one: `rollout.n` is
    `actor_rollout_ref.rollout.n`; or the last word of one that a field of the same section replaces: `trainer.lr` is
    `trainer.optim.lr`. Empty if none has it."""
    section, _, last = path.rpartition(".")
    return (
        _hint(lambda flag: flag.theirs == path)
        or _hint(lambda flag: "." in path and flag.theirs.endswith(f".{path}"))
        or _hint(lambda flag: _last(flag) == last and any(name.startswith(f"{section}.") for name in flag.here))
    )


def loose_hint(path: str) -> str:
    """The fix for a key of a group of settings of another system, or for one of its names in another section, such as
    `scheduler.num_generations`. Empty if there is none."""
    last = path.rpartition(".")[2]
    return _hint(lambda flag: flag.theirs.endswith(".*") and path.startswith(flag.theirs.removesuffix("*"))) or _hint(
        lambda flag: "_" in last and _last(flag) == last
    )


def _last(flag: Flag) -> str:
    return flag.theirs.rpartition(".")[2]


def _hint(matches: Callable[[Flag], bool]) -> str:
    system, flag = next(((system, row) for system, rows in flags().items() for row in rows if matches(row)), ("", None))
    if flag is None:
        return ""
    note = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", flag.note).replace("`", "")
    if not flag.here:
        return f"{flag.theirs} of {system} has no counterpart: {note}"
    meaning = f"; {note}" if note else ""
    return f"did you mean {' or '.join(flag.here)}? ({flag.theirs} of {system}{meaning})"
