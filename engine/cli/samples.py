"""`engine samples`: shows what the model said, from the samples of a run.

Called by the CLI. It reads files of the run's directory, also while the run is running, and needs pyarrow. Must never
print a control character of a response: a terminal would obey it.
"""

import argparse
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.interrupts import page_console
from engine.cli.json_output import json_line
from engine.errors import ConfigError, choice, visible
from engine.metrics.journal import validation_rows

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from engine.storage.run_directory import RunDirectory
    from engine.storage.samples import SampleFiles

SHOWN = 20
"""Maximum number of samples, or of pairs, that are printed unless asked otherwise."""
RANGES = 12
"""Maximum number of ranges of steps that an error names."""
READS = 5
"""How often the files are read again because the run merged some of them meanwhile."""

WHOSE = {
    "train": "of train steps",
    "validation": "of validations",
    "failed": "whose reward failed",
    "filtered": "of filtered groups",
}
"""Samples of each kind, in words."""

Row = Mapping[str, Any]


def add_command(commands: Any) -> None:
    """Add the command to the parsers of the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "samples",
        help="show responses of the model",
        description="Show stored responses of a run: by default, those of its newest train step.",
    )
    parser.add_argument("directory", metavar="RUN", help="the directory of a run, or its name under runs/")
    parser.add_argument(
        "--step",
        type=_count(0),
        metavar="N",
        help="responses of train step N; with --validation: of the weights after N steps",
    )
    parser.add_argument("--worst", type=_count(1), metavar="N", help="only the N responses with the lowest rewards")
    parser.add_argument("--best", type=_count(1), metavar="N", help="only the N responses with the highest rewards")
    parser.add_argument("--group", type=_count(0), metavar="G", help="responses of this prompt group, in all steps")
    parser.add_argument(
        "--grep", metavar="TEXT", help="only with TEXT in prompt or response, in all steps; ignores case"
    )
    parser.add_argument("--compare", metavar="A,B", help="two steps side by side, by prompt if they share any")
    parser.add_argument("--validation", action="store_true", help="responses of validations instead of train steps")
    parser.add_argument("--failed", action="store_true", help="responses whose reward failed, with the error")
    parser.add_argument(
        "--filtered", action="store_true", help="responses of groups that the filter dropped, with what it saw"
    )
    parser.add_argument("--set", metavar="NAME", help="with --validation: only this validation set")
    parser.add_argument(
        "--limit", type=_count(1), default=SHOWN, metavar="N", help=f"show at most N (default: {SHOWN})"
    )
    parser.add_argument("--json", action="store_true", help="print each sample as a line of JSON")
    parser.set_defaults(run=show)


def _count(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, {least} or more")
        return int(text)

    return read


def show(arguments: argparse.Namespace) -> int:
    """`engine samples RUN`. Raises: `ConfigError` for a run, a step or a group that has no samples."""
    from engine.storage.run_directory import open_run

    run = open_run(arguments.directory)
    if arguments.set is not None and not arguments.validation:
        raise ConfigError("--set", arguments.set, "must be used together with --validation", "add --validation")
    for option in ("validation", "step", "compare", "worst", "best"):
        if arguments.failed and getattr(arguments, option) not in (None, False):
            law = "cannot be used together with --failed: these responses have neither a step nor a reward"
            raise ConfigError(f"--{option}", getattr(arguments, option), law, "leave one of them out")
    if arguments.filtered and (arguments.validation or arguments.failed):
        option = "validation" if arguments.validation else "failed"
        law = "cannot be used together with --filtered: the filter drops prompt groups whose rewards are known"
        raise ConfigError(f"--{option}", True, law, "leave one of them out")
    shelf = Shelf.of(run.path, _kind(arguments))
    if not shelf.numbers:
        law = f"has no samples {WHOSE[shelf.kind]}"
        raise ConfigError("RUN", arguments.directory, law, _why_none(arguments, run))
    console = page_console()
    if arguments.compare is not None:
        _compare(arguments, shelf, console)
    else:
        _list(arguments, shelf, console)
    return 0


def _kind(arguments: argparse.Namespace) -> str:
    return next((kind for kind in ("failed", "filtered", "validation") if getattr(arguments, kind)), "train")


def _why_none(arguments: argparse.Namespace, run: "RunDirectory") -> str:
    from engine.cli.run_state import NOT_STARTED, STARTING, state_of
    from engine.storage.samples import FAILED, SampleFiles

    if arguments.failed:
        return "no reward has failed, or samples.per_step is 0"
    if arguments.filtered:
        return "the filter has dropped no group, scheduler.policies.filter is none, or samples.per_step is 0"
    state = state_of(run)
    if state.code == NOT_STARTED:
        return f"it is {state.text}"
    if not state.is_running and state.code != STARTING:
        failed = SampleFiles(run.samples).has(FAILED)
        shown = f"; `engine samples {run.shown} --failed` shows those whose reward failed" if failed else ""
        return f"the run has ended{shown}"
    if arguments.validation:
        return "wait for the first validation, or set samples.validation and data.validation_path"
    return "wait for the first train step, or set samples.per_step; --validation shows those of validations"


# -- what there is -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shelf:
    """The samples of one kind in a run."""

    files: "SampleFiles"
    kind: str
    numbers: list[int]
    """Train steps, validations, or groups, with samples."""
    steps: dict[int, int]
    """Train steps in the weights of each validation that has ended."""

    @staticmethod
    def of(run_dir: Path, kind: str) -> "Shelf":
        from engine.storage.samples import FOLDER, VALIDATION, SampleFiles

        files = SampleFiles(run_dir / FOLDER)
        rows = validation_rows(run_dir / "metrics.jsonl") if kind == VALIDATION else ()
        steps = {row["validation"]: row["steps"] for row in rows if "steps" in row}
        return Shelf(files, kind, _read(lambda: files.numbers(kind)), steps)

    def step_of(self, number: int) -> int | None:
        """The step by which a user asks for it; None for a validation that has not ended."""
        return number if not self.validates else self.steps.get(number)

    @property
    def validates(self) -> bool:
        return self.kind == "validation"

    def numbers_of(self, field: str, step: int) -> list[int]:
        """Raises: `ConfigError` that names the steps with samples."""
        found = [number for number in self.numbers if self.step_of(number) == step]
        if not found:
            there = sorted({known for number in self.numbers if (known := self.step_of(number)) is not None})
            what = "validation samples" if self.validates else "samples"
            fix = f"use one of {ranges(there)}" if there else "wait until its first validation has ended"
            raise ConfigError(field, step, f"has no {what}", fix)
        return found

    def rows(self, numbers: Sequence[int] | None, keep: Callable[[Row], bool]) -> list[Row]:
        """Rows in order, with the steps of validations in `step`."""

        def read() -> list[Row]:
            wanted = None if numbers is None else frozenset(numbers)
            rows = self.files.rows(self.kind, wanted)
            if self.kind == "failed":
                return [row for row in rows if keep(row)]
            return [{**row, "step": self.step_of(_number(row))} for row in rows if keep(row)]

        return sorted(_read(read), key=_place)


def _place(row: Row) -> tuple[Any, ...]:
    """The order of rows: by step and group; in a validation, by set and prompt."""
    of_set = (row["validation_set"], row["prompt_row"]) if row["kind"] == "validation" else ("", row["group"] or 0)
    return _number(row), *of_set, row["attempt"] or 0, row["sample"]


def _number(row: Row) -> int:
    from engine.storage.samples import number_of

    return number_of(row)


def _read(read: Callable[[], Any]) -> Any:
    """Read again if the run has merged files between the listing and the reading."""
    for _ in range(READS):
        try:
            return read()
        except FileNotFoundError:
            continue
    return read()


def ranges(numbers: Sequence[int]) -> str:
    """`0 to 11, 20`: ascending numbers in words."""
    parts = []
    for _, run in groupby(enumerate(numbers), key=lambda each: each[1] - each[0]):
        members = [number for _, number in run]
        parts.append(f"{members[0]} to {members[-1]}" if len(members) > 1 else f"{members[0]}")
    return ", ".join(parts if len(parts) <= RANGES else [*parts[: RANGES - 1], f"… {parts[-1]}"])


# -- a list ------------------------------------------------------------------------------------------------------------


def _list(arguments: argparse.Namespace, shelf: Shelf, console: "Console") -> None:
    everywhere = arguments.group is not None or arguments.grep is not None or arguments.failed
    numbers: list[int] | None = None if everywhere else [shelf.numbers[-1]]
    if arguments.step is not None:
        numbers = shelf.numbers_of("--step", arguments.step)
    rows = shelf.rows(numbers, wanted(arguments))
    if not rows and arguments.group is not None and arguments.grep is None:
        groups = {row["group"] for row in shelf.rows(numbers, lambda row: row["group"] is not None)}
        fix = f"use one of {ranges(sorted(groups))}" if groups else "validation samples have no group"
        raise ConfigError("--group", arguments.group, "has no samples", fix)
    if not rows and arguments.set is not None and arguments.grep is None:
        _refuse_set(arguments.set, shelf.rows(numbers, lambda row: True))
    asked = (arguments.worst or 0) + (arguments.best or 0)
    chosen = extremes(rows, arguments.worst, arguments.best, of_step=not everywhere and shelf.kind == "train")
    shown = list(islice(chosen, arguments.limit))
    if arguments.json:
        for row in shown:
            print(json_line(row))
        return
    for row in shown:
        console.print(card(row))
    if not chosen:
        console.print("No sample matches.")
    if len(chosen) < asked:
        kept = f"{len(chosen)} of {asked} shown: the run did not store more of them"
        console.print(f"{kept}; samples.per_step sets how many responses of a step are stored")
    if len(shown) < len(chosen):
        console.print(f"{len(chosen) - len(shown)} more; show them with --limit {len(chosen)}")
    elif not everywhere and arguments.step is None:
        there = [step for number in shelf.numbers if (step := shelf.step_of(number)) is not None]
        console.print(f"Steps with samples: {ranges(sorted(set(there)))}")


def _refuse_set(name: str, rows: Sequence[Row]) -> None:
    """Raises: `ConfigError` that names the sets with samples."""
    names = sorted({row["validation_set"] for row in rows})
    raise ConfigError("--set", name, "has no samples", choice(name, names))


def wanted(arguments: argparse.Namespace) -> Callable[[Row], bool]:
    """Whether a row passes `--group`, `--set` and `--grep`."""
    group, name, text = arguments.group, arguments.set, None if arguments.grep is None else arguments.grep.casefold()

    def keep(row: Row) -> bool:
        if (group is not None and row["group"] != group) or (name is not None and row["validation_set"] != name):
            return False
        return text is None or text in row["prompt"].casefold() or text in row["response"].casefold()

    return keep


def extremes(rows: Sequence[Row], worst: int | None, best: int | None, *, of_step: bool = False) -> list[Row]:
    """All rows; or those with the lowest rewards, then those with the highest. Their `reasons` then begin with `worst`
    or `best`. Among equal rewards, samples that were stored for this reason come first.

    `of_step`: the rows are those stored of a train step. Then a row is left out if a response that was not stored may
    have a lower (or higher) reward: each of these has at least the reward of every row kept as one of the worst.
    """
    if worst is None and best is None:
        return list(rows)
    rewarded = [row for row in rows if row["reward"] is not None]
    kept = {reason: [row["reward"] for row in rewarded if reason in row["reasons"]] for reason in ("worst", "best")}
    of_step &= bool(kept["worst"] or kept["best"])  # otherwise all rewards of the step are equal
    low = max(kept["worst"], default=-math.inf) if of_step else math.inf
    high = min(kept["best"], default=math.inf) if of_step else -math.inf
    lowest = [row for row in rewarded if row["reward"] <= low]
    highest = [row for row in rewarded if row["reward"] >= high]
    found = {
        "worst": heapq.nsmallest(worst or 0, lowest, key=lambda row: (row["reward"], "worst" not in row["reasons"])),
        "best": heapq.nlargest(best or 0, highest, key=lambda row: (row["reward"], "best" in row["reasons"])),
    }
    return [
        {**row, "reasons": list(dict.fromkeys((reason, *row["reasons"])))} for reason in found for row in found[reason]
    ]


# -- a comparison ------------------------------------------------------------------------------------------------------


def _compare(arguments: argparse.Namespace, shelf: Shelf, console: "Console") -> None:
    steps = _two_steps(arguments.compare)
    for option in ("step", "worst", "best"):
        if getattr(arguments, option) is not None:
            law = "cannot be used together with --compare"
            raise ConfigError(f"--{option}", getattr(arguments, option), law, "leave one of them out")
    one, other = (shelf.rows(shelf.numbers_of("--compare", step), wanted(arguments)) for step in steps)
    same = list(pairs_by_prompt(one, other))
    pairs = same or list(pairs_by_reason(one, other))
    shown = pairs[: arguments.limit]
    if arguments.json:
        for pair in shown:
            print(json_line(pair))
        return
    if not same:
        hint = "" if shelf.validates else " Use --validation: validations have the same prompts each time."
        console.print(f"These samples have no prompt in common; the pairs were kept for the same reason.{hint}")
    for pair in shown:
        console.print(comparison(pair, same=bool(same)))
    if len(shown) < len(pairs):
        console.print(f"{len(pairs) - len(shown)} more; show them with --limit {len(pairs)}")


def _two_steps(text: str) -> tuple[int, int]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ConfigError("--compare", text, "must be two steps", "for example --compare 10,50")
    return int(parts[0]), int(parts[1])


def pairs_by_prompt(one: Iterable[Row], other: Iterable[Row]) -> Iterator[tuple[Row, Row]]:
    """Pairs of responses to the same prompt, the largest change of the reward first. In validations, the set and the
    number of the response are also the same."""

    def key(row: Row) -> tuple[Any, ...]:
        own = (row["validation_set"], row["sample"]) if row["kind"] == "validation" else ()
        return row["prompt_row"], row["prompt"], *own

    by_prompt: dict[tuple[Any, ...], Row] = {}
    for row in other:
        by_prompt.setdefault(key(row), row)
    pairs = []
    for row in one:
        partner = by_prompt.pop(key(row), None)
        if partner is not None:
            pairs.append((row, partner))
    yield from sorted(pairs, key=lambda pair: -abs((pair[1]["reward"] or 0.0) - (pair[0]["reward"] or 0.0)))


def pairs_by_reason(one: Sequence[Row], other: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """For each reason, the first response of each step that was kept for it."""
    for reason in dict.fromkeys(reason for row in one for reason in row["reasons"]):
        firsts = [next((row for row in rows if reason in row["reasons"]), None) for rows in (one, other)]
        if firsts[0] is not None and firsts[1] is not None:
            yield firsts[0], firsts[1]


# -- how a sample looks ------------------------------------------------------------------------------------------------


def card(row: Row) -> "RenderableType":
    """One sample in a frame: its figures, the prompt and the response."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    why = [part for name in ("error", "filter") if row[name] is not None for part in _labelled(name, row[name])]
    parts = [*_labelled("prompt", row["prompt"]), *_labelled("response", row["response"]), *why]
    body = Group(Text(figures(row), style="dim"), *parts)
    return Panel(body, title=Text(f"{place(row)}  {_whose(row)}"), title_align="left", border_style=_color(row))


def comparison(pair: tuple[Row, Row], *, same: bool) -> "RenderableType":
    """Two samples in a frame; the prompt once if it is the `same`."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    body: list[RenderableType] = [*_labelled("prompt", pair[0]["prompt"])] if same else []
    for row in pair:
        body.append(Text(f"{place(row)}  {figures(row)}", style="dim"))
        body += [] if same else _labelled("prompt", row["prompt"])
        body += _labelled("response", row["response"])
    change = f"reward {_figure(pair[0]['reward'], '.3f')} to {_figure(pair[1]['reward'], '.3f')}"
    title = f"prompt {pair[0]['prompt_row']}  {change}" if same else f"{', '.join(pair[0]['reasons'])}  {change}"
    return Panel(Group(*body), title=Text(title), title_align="left", border_style=_color(pair[1]))


def _labelled(label: str, text: str) -> "list[RenderableType]":
    from rich.padding import Padding
    from rich.text import Text

    style = "cyan" if label == "prompt" else ""
    return [
        Text(label, style="bold"),
        Padding(Text(visible(text) or "(empty)", style=style, overflow="fold"), (0, 0, 0, 2)),
    ]


def place(row: Row) -> str:
    """The step, validation or attempt of a sample, as text."""
    if row["kind"] == "failed":
        return f"attempt {row['attempt']}"
    if row["kind"] in ("train", "filtered"):
        return f"step {row['step']}"
    return f"validation {row['validation']}" + (f" after {row['step']} steps" if row["step"] is not None else "")


def _whose(row: Row) -> str:
    why = ", ".join(reason for reason in row["reasons"] if reason != "validation")
    if row["kind"] != "validation":
        return f"{_source(row)}group {row['group']}  sample {row['sample']}  ({why})"
    return f"set {row['validation_set']}  prompt {row['prompt_row']}  response {row['sample']}" + f"  ({why})" * bool(
        why
    )


def _source(row: Row) -> str:
    """The data source of the prompt, if the run has several."""
    return f"{row['source']}  " if row.get("source") else ""


def figures(row: Row) -> str:
    """The known figures of a sample, in one line."""
    oldest, newest = row["oldest_version"], row["newest_version"]
    weights = None if oldest is None else f"{oldest}" if oldest == newest else f"{oldest} to {newest}"
    known = {
        "reward": _figure(row["reward"], ".3f"),
        "parts": ", ".join(f"{name} {value:g}" for name, value in (row["reward_parts"] or {}).items()) or None,
        "answer": None if row["answer"] is None else visible(row["answer"]),
        "tokens": row["tokens"],
        "end": row["finish_reason"] or None,
        "weights": weights,
        "staleness": row["staleness"],
        "advantage": None if row["advantage"] is None else _figure(row["advantage"], "+.3f"),
        "log-prob gap": None if row["logprob_gap"] is None else _figure(row["logprob_gap"], ".3g"),
        "segments": row["segments"] if row["segments"] > 1 else None,
        **{name: f"{value:g}" for name, value in (row["figures"] or {}).items()},
    }
    return "  ".join(f"{name} {value}" for name, value in known.items() if value is not None)


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _color(row: Row) -> str:
    if row["reward"] is None:
        return "dim"
    if row["kind"] == "filtered":
        return "yellow"
    return "green" if row["reward"] > 0 else "red"
