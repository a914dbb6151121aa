"""Counts the files of `engine/` through which one group's event passes, until the generator gets its next order.

    python benchmarks/event_path.py [--list] [--draw]

The run is in one process, with its record, stores and metrics. It has one replica with one slot, so nothing else
happens meanwhile. `sys.setprofile` sees every call in the run's thread from when `sample` returns a group until
`sample` gets the next one. The program prints the median over several groups in the middle of a step. `--list` prints
the files in the order of their first calls. `--draw` draws them into docs/img/event_path.svg; a test fails if that
picture is out of date.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from types import FrameType
from typing import Any

import engine.runtime.local
from engine.protocols import Batch, GroupWork
from engine.runtime.local import SimpleGenerator, SimpleTrainer, response
from engine.states.limits import Limits
from engine.trajectory import Trajectory

ENGINE = str(Path(engine.__file__).parent)
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "img" / "event_path.svg"
BATCH, STEPS = 16, 3

# -- the run -----------------------------------------------------------------------------------------------------------


class Watched(SimpleGenerator):
    """Notes the engine's calls between two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.paths: list[list[str]] = []
        """For each group: the file of each call, in order."""

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ENGINE):
            self.calls.append(file[len(ENGINE) + 1 :])

    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        sys.setprofile(None)
        self.paths.append(self.calls)
        await asyncio.sleep(0.02)  # whatever follows the answer has ended
        self.calls = []
        made = [response([1, 2], reward=float(i), version=version) for i in range(work.samples)]
        sys.setprofile(self.note)
        return made


class Idle(SimpleTrainer):
    def train(self, batch: Batch) -> dict[str, float]:
        return {}

    def weights(self) -> Any:
        return None


def paths() -> list[list[str]]:
    """The file of each call, in order, for each group in the middle of a step."""
    watched = Watched()
    limits = Limits(train_batch_size=BATCH, max_staleness_steps=2, max_concurrent_groups=BATCH)
    with tempfile.TemporaryDirectory() as directory:
        engine.runtime.local.run(
            generators=lambda replica: watched, trainer=Idle(), prompts=["question"] * (BATCH * STEPS), limits=limits,
            samples=2, slots=1, run_dir=directory, metrics_port=0,
        )  # fmt: skip
    sys.setprofile(None)
    return [calls for number, calls in enumerate(watched.paths) if number % BATCH in range(4, BATCH - 4)]


def median_path(of: Sequence[list[str]]) -> list[str]:
    """The path of a group with the median number of files; of these, one with the median number of calls."""
    files = int(statistics.median(len(set(calls)) for calls in of))
    alike = sorted((calls for calls in of if len(set(calls)) == files), key=len)
    return alike[len(alike) // 2]


# -- the picture -------------------------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT, BAR, LINE = 860, 100, 12, 12, 12
GRAY, GRID, TEXT, PATH = "#6b7280", "#e3e6ea", "#22262b", "#b9bfc8"
HALO = 'stroke="#fff" stroke-width="3" paint-order="stroke"'
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")


def folder(file: str) -> str:
    """The layer of a file: its first folder, or `engine` for a file beside them."""
    return file.partition("/")[0] if "/" in file else "engine"


def names_by_folder(path: Sequence[str]) -> dict[str, list[str]]:
    """The files of each folder, without their endings, both in the order of their first calls."""
    names: dict[str, list[str]] = {}
    for file in dict.fromkeys(path):
        names.setdefault(folder(file), []).append(file.rpartition("/")[2].removesuffix(".py"))
    return names


def words(x: float, y: float, text: str, color: str = TEXT, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{color}" {more}>{escape(text)}</text>'


def drawing(path: Sequence[str]) -> str:
    """The way of one group's event as SVG: a row for each folder, and in it a bar for each visit."""
    rows: dict[str, float] = {}
    parts: list[str] = []
    title = f"One group's event, from its answer to the next order: {len(set(path))} files, {len(path)} calls"
    y = 44.0
    for name, files in names_by_folder(path).items():
        rows[name] = y
        calls = sum(folder(file) == name for file in path)
        parts.append(words(LEFT - 10, y + BAR - 2, name, more='text-anchor="end" font-weight="600"'))
        parts.append(words(LEFT - 10, y + BAR + LINE, f"{calls} calls", GRAY, 'text-anchor="end"'))
        lines = wrap(" · ".join(files), 140)
        parts += [words(LEFT, y + BAR + LINE * (number + 1), line, GRAY, HALO) for number, line in enumerate(lines)]
        y += BAR + LINE * len(lines) + 12
    wide = (WIDTH - LEFT - RIGHT) / len(path)
    grid: list[str] = []
    for call in range(0, len(path), 100):
        x = LEFT + call * wide
        grid.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="38" y2="{y - 8:.0f}" stroke="{GRID}"/>')
        grid.append(words(x, 34, f"call {call}" if call else "answer", GRAY))
    corners: list[str] = []
    first = 0
    for name, visit in groupby(path, key=folder):
        length = len(list(visit))
        x, top = LEFT + first * wide, rows[name]
        corners += [f"{x:.1f},{top + BAR / 2:.1f}", f"{x + length * wide:.1f},{top + BAR / 2:.1f}"]
        color = COLORS[list(rows).index(name) % len(COLORS)]
        box = f'x="{x:.1f}" y="{top:.1f}" width="{length * wide:.1f}" height="{BAR}"'
        parts.append(f'<rect {box} fill="{color}"><title>{name}: {length} calls</title></rect>')
        first += length
    way = f'<polyline points="{" ".join(corners)}" fill="none" stroke="{PATH}"/>'
    font = 'font-family="system-ui, -apple-system, Segoe UI, sans-serif" font-size="10"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" width="{WIDTH}" {font} role="img">'
    back = f'<rect width="{WIDTH}" height="{y:.0f}" fill="#fff"/>'
    whole = [head, back, words(LEFT, 16, title, more='font-size="12" font-weight="600"'), *grid, way, *parts, "</svg>"]
    return "\n".join(whole) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Files of engine/ that one group's event passes.")
    parser.add_argument("--list", action="store_true", help="print the files in the order of their first calls")
    parser.add_argument("--draw", action="store_true", help="draw them into docs/img/event_path.svg")
    chosen = parser.parse_args()
    inner = paths()
    path = median_path(inner)
    print(f"{len(set(path))} files, {int(statistics.median(map(len, inner)))} calls")
    if chosen.list:
        print("\n".join(dict.fromkeys(path)))
    if chosen.draw:
        PICTURE.write_text(drawing(path), encoding="utf-8")


if __name__ == "__main__":
    main()
