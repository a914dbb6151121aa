"""Draws the pictures in docs/img, modes.svg to report.png, from records of simulated runs.

Run from the root: python docs/pictures.py [NAME ...]. The runs are deterministic, so a test notices a picture that is
not drawn again. report.png needs the program chromium.
"""

import argparse
import asyncio
import hashlib
import shutil
import struct
import tempfile
import zlib
from collections.abc import Sequence
from html import escape
from io import StringIO
from pathlib import Path

from rich.console import Console

from engine.cli.top import screen
from engine.config import load_config
from engine.inspect.cursor import Cursor
from engine.inspect.history_reader import read_history
from engine.inspect.report import PAGE, report_html
from engine.inspect.timeline import Slice, Timeline, timeline_of
from engine.metrics.collector import RunMetrics
from engine.metrics.history import GenerationAttempt, History
from engine.metrics.status import read_status
from engine.policies import PolicySet
from engine.record import Header, read
from engine.record.recorder import MemoryRecorder
from engine.scheduling.scheduler import Scheduler
from engine.simulation.world import Faults, Setting, World
from engine.states.limits import Limits

DOCS = Path(__file__).resolve().parent
CONFIGS = DOCS.parent / "configs"
BATCH, STEPS, REPLICAS, SLOTS = 8, 6, 2, 4
WIDTH, LEFT, RIGHT, ROW = 860, 92, 14, 13
STEP_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
STALENESS_COLORS = ("#009e73", "#56b4e9", "#e69f00", "#d55e00")
GRAY, LINE, TEXT, RED = "#8b93a0", "#e3e6ea", "#22262b", "#c0392b"
MODES = {
    "sync": "synchronous: replicas sleep while the trainer works",
    "one_step_off": "one step off: the next batch is generated while this one is trained",
    "fully_async": "fully asynchronous: slots never wait for a batch to end",
}


def simulated(
    preset: str, steps: int = STEPS, seed: int = 7, faults: Faults | None = None, prefixes: int = 0
) -> MemoryRecorder:
    """The record of a small simulated run of a preset: lengths from 5 to 60 s, 20 s for a train step."""
    small = [
        f"run.max_steps={steps}", f"scheduler.train_batch_size={BATCH}", "scheduler.samples_per_prompt=2",
        f"rollout.slots={SLOTS}", f"rollout.replicas={REPLICAS}", "trainer.checkpoint_every=0", "run.dir=nowhere",
        "validation.every=0", "validation.at_start=false", "validation.at_end=false",
    ]  # fmt: skip
    if preset != "sync":
        small.append(f"scheduler.max_concurrent_groups={BATCH}")
    config = load_config(CONFIGS / f"{preset}.yaml", small)
    policies = config.policies()
    header = Header(run=preset, limits=config.limits.to_plain(), policies=dict(policies.names))
    recorder = MemoryRecorder(header)
    setting = Setting(
        limits=config.limits, replicas=REPLICAS, slots=SLOTS, prompts=BATCH * (steps + 4), seed=seed, train_s=20.0,
        sync_s=1.5, mean_tokens=16.0, max_tokens=60, faults=faults or Faults(), prefix_every_tokens=prefixes,
    )  # fmt: skip
    World(setting, PolicySet.from_names(policies.names), recorder).run()
    recorder.close()
    return recorder


def history_of(recorder: MemoryRecorder) -> History:
    return read_history(read(recorder))


# -- shapes ------------------------------------------------------------------------------------------------------------


class Scale:
    """Maps seconds to places between the left and the right margin."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def x(self, time: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * time / self.seconds

    def box(self, start: float, end: float, y: float, color: str, title: str, more: str = "") -> str:
        left, width = self.x(start), max(0.8, self.x(end) - self.x(start) - 0.6)
        place = f'x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{ROW - 2}"'
        return f'<rect {place} fill="{color}" {more}><title>{escape(title)}</title></rect>'

    def axis(self, top: float, bottom: float) -> list[str]:
        every = next(size for size in (10, 20, 50, 100, 200, 500) if self.seconds / size <= 9)
        parts = []
        for time in range(0, int(self.seconds) + 1, every):
            x = f"{self.x(time):.1f}"
            parts.append(f'<line x1="{x}" x2="{x}" y1="{top}" y2="{bottom}" stroke="{LINE}"/>')
            parts.append(words(self.x(time), bottom + 14, f"{time} s", color=GRAY, anchor="middle"))
        return parts


def words(x: float, y: float, text: str, *, color: str = TEXT, anchor: str = "start", weight: str = "400") -> str:
    style = f'fill="{color}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def legend(y: float, entries: Sequence[tuple[str, str]]) -> list[str]:
    parts, x = [], float(LEFT)
    for color, text in entries:
        parts.append(f'<rect x="{x:.1f}" y="{y - 9}" width="10" height="10" fill="{color}"/>')
        parts.append(words(x + 14, y, text))
        x += 30 + 6.1 * len(text)
    return parts


def picture(height: float, title: str, parts: Sequence[str]) -> str:
    font = 'font-family="system-ui, -apple-system, Segoe UI, sans-serif" font-size="11"'
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img" aria-label="{escape(title)}">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height:.0f}" fill="#fff"/>', *parts, "</svg>"]) + "\n"


def rows_of(timeline: Timeline, top: float) -> tuple[dict[int, float], list[str], float]:
    """(top of each track that is shown, labels, bottom): the trainer, and the slots of each replica."""
    places: dict[int, float] = {}
    labels: list[str] = []
    y, process = top, ""
    for number, track in enumerate(timeline.tracks):
        if not (track.name.startswith("slot ") or (track.process, track.name) == ("trainer", "training")):
            continue
        if track.process != process:
            y += 5 if process else 0
            process = track.process
            labels.append(words(LEFT - 8, y + ROW - 3, process, anchor="end"))
        places[number] = y
        y += ROW
    return places, labels, y


# -- the pictures ------------------------------------------------------------------------------------------------------


def modes() -> str:
    """Three modes on one scale. A group has the color of the step that trains on it."""
    runs = {preset: timeline_of(history_of(simulated(preset))) for preset in MODES}
    scale = Scale(max(timeline.history.end for timeline in runs.values()))
    parts: list[str] = []
    top = 22.0
    for preset, timeline in runs.items():
        idle = 100 * sum(timeline.history.idle_s.values()) / (REPLICAS * SLOTS * timeline.history.end)
        took = f"{STEPS} steps in {timeline.history.end:.0f} s, slots idle {idle:.0f} % of it"
        places, labels, bottom = rows_of(timeline, top + 8)
        parts += [words(LEFT, top, MODES[preset], weight="600"), words(WIDTH - RIGHT, top, took, anchor="end")]
        parts += [*scale.axis(top + 6, bottom), *labels]
        parts += [_colored(scale, timeline, slice, places) for slice in timeline.slices if slice.track in places]
        top = bottom + 46
    parts += legend(top - 14, [(STEP_COLORS[step], f"step {step}") for step in range(STEPS)])
    return picture(top, "Timelines of three modes", parts)


def _colored(scale: Scale, timeline: Timeline, slice: Slice, places: dict[int, float]) -> str:
    value = slice.value
    step = timeline.history.groups[value.group].step if isinstance(value, GenerationAttempt) else value.step
    color = STEP_COLORS[step % STEPS] if step >= 0 and slice.kind != "publishing" else GRAY
    return scale.box(slice.start, slice.end, places[slice.track], color, timeline.title(slice))


def staleness() -> str:
    """A bar for each group, from its start to its training, in the color of its staleness."""
    history = history_of(simulated("fully_async", steps=7))
    scale = Scale(history.end)
    groups = sorted((group for group in history.groups if group.state == "consumed"), key=lambda one: one.started_at)
    trains = {step.step: next(p for p in step.phases if p.name == "training") for step in history.trained}
    top, height = 44.0, 5.0
    bottom = top + height * len(groups)
    parts = [words(LEFT, 18, "every group from its start to the step that trains on it", weight="600")]
    parts += scale.axis(top - 6, bottom)
    for phase in trains.values():
        left, right = scale.x(phase.start), scale.x(phase.end)
        place = f'x="{left:.1f}" y="{top - 6}" width="{right - left:.1f}" height="{bottom - top + 6:.1f}"'
        parts += [f'<rect {place} fill="#eef1f5"/>', words(left + 2, top - 10, f"step {phase.step}", color=GRAY)]
    last = {attempt.group: attempt for attempt in history.attempts if attempt.outcome == "generated"}
    for number, group in enumerate(groups):
        y, ends = top + height * number, (last[group.group].end, trains[group.step].start)
        color = STALENESS_COLORS[group.staleness]
        title = f"group {group.group}: staleness {group.staleness} at step {group.step}"
        for start, end, opacity in ((group.started_at, ends[0], 1.0), (ends[0], ends[1], 0.45)):
            place = f'x="{scale.x(start):.1f}" y="{y:.1f}" width="{max(0.5, scale.x(end) - scale.x(start)):.1f}"'
            more = f'height="{height - 1}" fill="{color}" opacity="{opacity}"'
            parts.append(f"<rect {place} {more}><title>{escape(title)}</title></rect>")
    bound = history.limits["max_staleness_steps"]
    names = [(STALENESS_COLORS[value], f"staleness {value}") for value in range(bound + 1)]
    parts += legend(bottom + 36, [*names, ("#b9d9f0", "pale: generated, waits for its batch"), ("#eef1f5", "training")])
    return picture(bottom + 50, f"Staleness of each group; the bound is {bound}", parts)


def recovery() -> str:
    """A replica dies: its groups go on elsewhere, from their stored prefixes."""
    history = history_of(simulated("fully_async", steps=4, seed=CRASH_SEED, faults=Faults(die=0.02), prefixes=4))
    timeline = timeline_of(history)
    scale = Scale(history.end)
    places, labels, bottom = rows_of(timeline, 32)
    parts = [words(LEFT, 18, "a replica dies, and other slots continue its groups from their prefixes", weight="600")]
    parts += [*scale.axis(28, bottom), *labels]
    for life in history.lives:
        if life.kind == "replica" and life.outcome == "lost":
            tracks = [place for place in places if timeline.tracks[place].process == f"replica {life.index}"]
            x, ends = f"{scale.x(life.end):.1f}", (min(places[t] for t in tracks), max(places[t] for t in tracks) + ROW)
            parts.append(f'<line x1="{x}" x2="{x}" y1="{ends[0]}" y2="{ends[1]}" stroke="{RED}" stroke-width="2"/>')
    ends_at: dict[int, tuple[float, float]] = {}
    arrows: list[str] = []
    for slice in timeline.slices:
        if slice.track not in places:
            continue
        y, value = places[slice.track], slice.value
        if isinstance(value, GenerationAttempt):
            if value.resumed and value.group in ends_at:
                arrows.append(_arrow(ends_at[value.group], (scale.x(slice.start), y + ROW / 2)))
            if value.outcome == "lost":
                ends_at[value.group] = (scale.x(slice.end), y + ROW / 2)
            color = RED if value.outcome == "lost" else STEP_COLORS[4] if value.resumed else STEP_COLORS[2]
        else:
            color = STEP_COLORS[0] if slice.kind == "training" else GRAY
        parts.append(scale.box(slice.start, slice.end, y, color, timeline.title(slice)))
    entries = [(STEP_COLORS[2], "generated"), (RED, "lost with its replica"), (STEP_COLORS[4], "resumed")]
    parts += [*arrows, *legend(bottom + 34, [*entries, (STEP_COLORS[0], "training"), (GRAY, "publishing")])]
    return picture(bottom + 46, "A replica dies and its groups resume", parts)


CRASH_SEED = 42
"""A run in which one replica dies while it generates."""


def _arrow(source: tuple[float, float], target: tuple[float, float]) -> str:
    (x0, y0), (x1, y1) = source, target
    line = f"M{x0:.1f} {y0:.1f} C{x0 + 14:.1f} {y0:.1f} {x1 - 14:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
    head = f"M{x1:.1f} {y1:.1f} l-5 -3 v6 z"
    return f'<path d="{line}" fill="none" stroke="{TEXT}" stroke-width="0.9"/><path d="{head}" fill="{TEXT}"/>'


def debug() -> str:
    """`engine debug --at event=74` in a terminal of 120 columns. It needs the extra `inspect`."""
    from engine.cli.debugger import Debugger  # late: the other pictures need no textual

    recorder = simulated("fully_async")
    cursor = Cursor(lambda: read(recorder))
    cursor.seek_event(DEBUGGED_EVENT)

    async def screenshot() -> str:
        app = Debugger(cursor, "runs/latest")
        async with app.run_test(size=DEBUGGER_SIZE) as pilot:
            await pilot.pause()  # until the workers have begun
            await app.workers.wait_for_complete()
            await pilot.pause()
            return app.export_screenshot(title="engine debug")

    return asyncio.run(screenshot())


DEBUGGED_EVENT = 74
"""A version is published: the next step is trained and the replicas get orders."""
DEBUGGER_SIZE = (120, 28)
"""Columns and rows of the terminal."""


def top() -> str:
    """`engine top`, in the middle of a run, in a terminal of 100 columns."""
    record = read(simulated("fully_async", steps=20))
    limits, policies = Limits.from_plain(record.header.limits), PolicySet.from_names(record.header.policies)
    scheduler = Scheduler(limits, policies)
    metrics = RunMetrics(scheduler)
    for tick in record.ticks():
        scheduler.tick(tick.events)
        metrics.observe(tick)
        if scheduler.state.training.steps_trained == 12:
            break
    console = Console(record=True, width=100, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(screen(read_status(metrics), "runs/latest"))
    return console.export_svg(title="engine top latest")


def report() -> bytes:
    """`engine report`, with a followed group, in headless Chromium."""
    from playwright.sync_api import sync_playwright  # late: the other pictures need no browser

    timeline = timeline_of(history_of(simulated(REPORTED)))
    late = [group for group in timeline.history.groups if group.staleness > 0]
    followed = late[len(late) // 2]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "report.html"
        page_file.write_text(report_html(timeline), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=REPORT_SIZE, color_scheme="light")
        page.goto(page_file.as_uri())
        page.wait_for_selector("html[data-ready=yes]")
        page.fill("#group", str(followed.group))
        page.press("#group", "Enter")
        png = page.screenshot()
        browser.close()
    source = b"tEXt" + b"source\0" + source_of_report().encode()
    chunk = struct.pack(">I", len(source) - 4) + source + struct.pack(">I", zlib.crc32(source))
    return bytes(png[:-12] + chunk + png[-12:])  # before the last chunk


def source_of_report() -> str:
    """What the picture was drawn from, as a digest. It is in the file, because browsers draw texts differently."""
    parts = [(PAGE / name).read_bytes() for name in ("page.html", "page.css", "page.js")]
    return hashlib.sha256(b"".join([*parts, simulated(REPORTED).to_bytes()])).hexdigest()


REPORTED = "fully_async"
REPORT_SIZE = {"width": 1180, "height": 1010}

PICTURES = {
    "modes.svg": modes, "staleness.svg": staleness, "recovery.svg": recovery, "debug.svg": debug, "top.svg": top,
    "report.png": report,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="NAME", nargs="*", choices=[*PICTURES, []], help="default: all")
    for name in parser.parse_args().names or PICTURES:
        drawn = PICTURES[name]()
        (DOCS / "img" / name).write_bytes(drawn if isinstance(drawn, bytes) else drawn.encode())
        print(f"docs/img/{name}")


if __name__ == "__main__":
    main()
