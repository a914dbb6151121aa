"""Recorded worlds: inputs, and what a scheduler made of them, as lines of JSON in one compressed file for each world.

The first line has the world's name, settings and policies; each other line is a tick: when it was, what the scheduler
was told (`in`), which inputs were no stale echoes (`heard`), and what it ordered and what changed (`out`). Knows no
format of the engine: `formats.py` does.
"""

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from engine.errors import EngineError
from tests.oracle.formats import Answer, Core, NeverOrdered, Plain

SUFFIX = ".jsonl.gz"
Lines = list[Plain]


@dataclass
class Recording:
    """One world. `head` has what was fixed before its first tick."""

    head: Plain
    ticks: Lines = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.head["world"])

    def core(self) -> Core:
        """A core that was told nothing yet."""
        return Core(self.head["settings"], self.head["policies"], self.head["snapshot_every"])


def save(directory: Path, recording: Recording) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    lines = msgspec.json.Encoder().encode_lines([recording.head, *recording.ticks])
    (directory / f"{recording.name}{SUFFIX}").write_bytes(gzip.compress(lines, 5, mtime=0))


def load(path: Path) -> Recording:
    head, *ticks = msgspec.json.Decoder().decode_lines(gzip.decompress(path.read_bytes()))
    return Recording(head, ticks)


class Difference(NamedTuple):
    """One thing that this code does otherwise, in a world."""

    world: str
    place: str
    """The tick and its time."""
    said: str
    """`missing: …`, `unexpected: …` or what else is the matter."""
    told: str = ""
    """The inputs of the tick."""

    def __str__(self) -> str:
        return f"{self.world}, {self.place}: {self.said}" + f"  [told: {self.told}]" * bool(self.told)


def differing(missing: Sequence[str], present: Sequence[str]) -> Iterator[str]:
    """What is in only one of two lists."""
    left = list(present)
    for one in missing:
        if one in left:
            left.remove(one)
        else:
            yield f"missing: {one}"
    yield from (f"unexpected: {one}" for one in left)


def play(recording: Recording) -> Iterator[list[Difference]]:
    """Tell this engine's core the inputs of a world, tick by tick. Gives what differs in each tick. An input that
    answers an order that was not given is left out, if the caller goes on."""
    core = recording.core()
    for number, tick in enumerate(recording.ticks):
        found: list[str] = []
        inputs, heard = list(tick["in"]), list(tick["heard"])
        answer = None
        while answer is None and inputs:
            try:
                answer = core.tick(tick["at"], inputs)
            except NeverOrdered as error:
                found.append(f"never ordered: {error}")
                stay = [not _is_about(one, str(error)) for one in inputs]
                inputs, heard = ([v for v, s in zip(values, stay, strict=True) if s] for values in (inputs, heard))
            except EngineError as error:
                found.append(f"raises {type(error).__name__}: {error}")
                break
        if answer is not None:
            found += _compare(tick, inputs, heard, answer)
        place = f"tick {number} at {tick['at']:g} s"
        told = "; ".join(map(_shown, tick["in"]))
        yield [Difference(recording.name, place, said, told) for said in found]
        if answer is None and inputs:
            return


def _compare(tick: Plain, inputs: Lines, heard: list[bool], answer: Answer) -> Iterator[str]:
    yield from differing(tick["out"], answer.said)
    for one, before, now in zip(inputs, heard, answer.heard, strict=True):
        if before != now:
            yield f"{'not heard' if before else 'heard, but was an echo'}: {_shown(one)}"


def _is_about(said: Plain, sentence: str) -> bool:
    of = said.get("of", ())
    return sentence in of if isinstance(of, list) else sentence == of


def _shown(said: Plain) -> str:
    """An input in one line."""
    of: Any = said.get("of", "")
    if of:
        return f"{', '.join(of) if isinstance(of, list) else of} → {said['is']}"
    process = f" {said['kind']} {said['index']} life {said.get('incarnation', '')}" if "kind" in said else ""
    return f"{said['is']}{process}"
