"""Kill runs at every kind of moment, resume them, and look whether anything was lost: `make torture`.

    python -m tests.torture.torture --trees 200 --actors 50 --table docs/torture.csv --page docs/FAILURES.md
    python -m tests.torture.torture --mode tree --seed 17          # one again

Each point is a real run over Ray (`chain.py`), a process tree of its own. After its last life: the record replays to
the bit with every law after every event, each prompt drawn has ended exactly once in the surviving line of weights, no
group was trained on twice in it, at S = 0 the weights are those of a run that nobody touched, every checkpoint is what
was written, and no process is left. A failure prints its seed, its class and the one command that does it again.
"""

import argparse
import csv
import datetime
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from engine.commands import TrainStep
from engine.errors import RecordError, RecordNotBegun
from engine.events import RunResumed, StepTrained
from engine.record import read
from engine.record.replayer import build_scheduler, replay
from engine.states.laws import check_all
from engine.storage.checkpoints import list_checkpoints, verify_checkpoint
from tests.torture.chain import ACTORS, FIRST, INSPECTING, MARK, ROOT, TREE, Point, kill_others, last_weights, marked

LIVES = 8
LIFE_S = 240.0
"""After which a life that has not ended is taken for one that never will: the class `liveness`."""
GONE_S = 150.0
"""Ray's own agent of a node that ended while it started looks for its control store for a minute."""


class Failure(Exception):
    """`kind` is crash, liveness or correctness."""

    def __init__(self, kind: str, story: str) -> None:
        super().__init__(f"{kind}: {story}")
        self.kind = kind


class Stopped(Exception):
    """Somebody ended the torture before this point had ended."""


STOP = threading.Event()


@dataclass(frozen=True)
class Result:
    """A row of the table."""

    point: Point
    mode: str
    lives: int
    killed_at: tuple[int, ...]
    """Events in the record at the end of each life but the last."""
    redone: int
    """Steps that were trained again in the record, because no weights held them."""
    seconds: float


def torture(seed: int, mode: str, directory: Path) -> Result:
    """Raises: `Failure`, `Stopped`."""
    point, began = Point.of(seed, mode), time.monotonic()
    run_dir, mark = directory / "run", _mark(seed, mode)
    killed_at: list[int] = []
    try:
        for life in range(LIVES):
            if STOP.is_set():
                raise Stopped
            said = _live(run_dir, point, mode, life, mark)
            if said == "finished":
                return _checked(run_dir, point, mode, life + 1, tuple(killed_at), time.monotonic() - began, mark)
            killed_at.append(_events(run_dir))
        raise Failure("liveness", f"not finished in {LIVES} lives; the last ended {said}")
    finally:
        kill_others(mark)


def _mark(seed: int, mode: str) -> str:
    return f"{mode}-{seed}-{os.getpid()}"


def _live(run_dir: Path, point: Point, mode: str, life: int, mark: str) -> str:
    """One life of the run: `finished`, or how it ended before that."""
    command = [sys.executable, "-m", "tests.torture.chain", str(run_dir)]
    environment = {**os.environ, MARK: mark, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, str(point.seed), mode, str(life)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            said = process.communicate(timeout=LIFE_S)[0]
        except subprocess.TimeoutExpired:
            raise Failure("liveness", f"life {life} continues for more than {LIFE_S:.0f} s") from None
        finally:
            if process.poll() is None:
                process.kill()
        errors.seek(0)
        complaint = errors.read()[-3000:]
    _require_gone(mark)
    lines = [line for line in said.splitlines() if line.startswith("{")]
    if process.returncode == 0 and lines:
        outcome: str = json.loads(lines[-1])["outcome"]
        return outcome
    if life < len(point.kills):
        return "killed"
    raise Failure("crash", f"life {life}, which nobody killed, ended with {process.returncode}: {complaint}")


def _require_gone(mark: str) -> None:
    """Wait for the end of every process of a life. Raises: `Failure` where one stays."""
    for pid, said in list(marked(mark)):
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            gone = select.select([handle], [], [], GONE_S)[0]
        finally:
            os.close(handle)
        if not gone:
            raise Failure("liveness", f"process {pid} is left behind: {said}")


def _events(run_dir: Path) -> int:
    """Of its record; where it died before that began there is nothing to continue with, and another run begins."""
    try:
        return sum(1 for _ in read(run_dir / "schedule").events())
    except RecordError as error:
        begun = (run_dir / "schedule" / "00000000.seg").exists()
        if begun and not isinstance(error, RecordNotBegun):
            raise
        shutil.rmtree(run_dir)
        return 0


def _checked(
    run_dir: Path, point: Point, mode: str, lives: int, killed_at: tuple[int, ...], seconds: float, mark: str
) -> Result:
    record = read(run_dir / "schedule")
    scheduler = build_scheduler(record.header)
    report = replay(record, build=lambda _: scheduler, watch=lambda _: check_all(scheduler.state))
    _expect(report.identical and report.torn is None, f"it does not replay: {report}")
    _expect(not report.rejected, f"an event was rejected: {report}")
    line, redone = _line(run_dir)
    state = scheduler.state
    _expect([step for step, _ in line] == list(range(point.steps)), f"steps trained: {[step for step, _ in line]}")
    groups = [group for _, batch in line for group in batch]
    _expect(len(set(groups)) == len(groups), "a group was trained on twice")
    _expect(
        not state.groups.live and len(groups) == state.groups.ledger.consumed, "a prompt has not ended, or not once"
    )
    _expect(
        state.groups.ledger.consumed + state.groups.ledger.released == state.groups.ledger.drawn,
        "a prompt drawn was lost",
    )
    saved = list_checkpoints(run_dir / "checkpoints")
    _expect(bool(saved) and saved[-1][0] == point.steps, "the last checkpoint is not there")
    for _, path in saved:
        verify_checkpoint(path)
    if point.staleness == 0:
        chain = json.loads((saved[-1][1] / "chain.json").read_text())["chain"]
        _expect(chain == last_weights(point) != FIRST, "the weights are not those of a run that nobody touched")
    return Result(point, mode, lives, killed_at, redone, seconds)


def _line(run_dir: Path) -> tuple[list[tuple[int, tuple[int, ...]]], int]:
    """(step, groups) of the line of weights that survives, and how many steps did not."""
    line: list[tuple[int, tuple[int, ...]]] = []
    batches: dict[int, tuple[int, ...]] = {}
    lost = 0
    for tick in read(run_dir / "schedule").ticks():
        for event in tick.events:
            if isinstance(event, RunResumed):
                lost += sum(step >= event.steps for step, _ in line)
                line = [entry for entry in line if entry[0] < event.steps]
            if isinstance(event, StepTrained) and len(line) == event.step:
                line.append((event.step, batches[event.step]))
        batches.update({c.step: c.groups for c in tick.commands if isinstance(c, TrainStep)})
    return line, lost


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise Failure("correctness", what)


Row = dict[str, str]
"""A point that passed, as a row of `docs/torture.csv`."""


def row_of(result: Result, date: str, commit: str) -> Row:
    point = result.point
    cells = {
        "mode": result.mode,
        "seed": point.seed,
        "what_died": point.victim,
        "state": point.state,
        "max_staleness_steps": point.staleness,
        "steps": point.steps,
        "checkpoint_every": point.checkpoint_every,
        "launches": result.lives,
        "events_at_each_death": " ".join(map(str, result.killed_at)),
        "steps_done_again": result.redone,
        "seconds": f"{result.seconds:.0f}",
        "date": date,
        "commit": commit,
    }
    return {name: str(cell) for name, cell in cells.items()}


def read_rows(table: Path) -> list[Row]:
    with table.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_rows(table: Path, rows: Sequence[Row]) -> None:
    with (new := table.with_suffix(".new")).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    new.replace(table)


def replace_rows(old: Sequence[Row], tried: Collection[tuple[int, str]], new: Sequence[Row]) -> list[Row]:
    """The new rows instead of the old ones of every point that was tried, so that a point that failed has none."""
    return [row for row in old if (int(row["seed"]), row["mode"]) not in tried] + list(new)


def summary(rows: Sequence[Row]) -> str:
    """The points by what died, as Markdown."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        place = f", in state `{row['state']}`" if row["state"] else ""
        kinds.setdefault(f"{row['what_died']}{place}", []).append(row)
    lines = [_summary_line(kind, kinds[kind]) for kind in sorted(kinds)]
    head = "| what died | points that passed | launches | steps done again | longest run, s | date | commit |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *lines, _summary_line("all", rows)])


def _summary_line(kind: str, rows: Sequence[Row]) -> str:
    launches, again = (sum(int(row[name]) for row in rows) for name in ("launches", "steps_done_again"))
    longest = max((int(row["seconds"]) for row in rows), default=0)
    dates, commits = (", ".join(sorted({row[name] for row in rows})) for name in ("date", "commit"))
    return f"| {kind} | {len(rows)} | {launches} | {again} | {longest} | {dates} | {commits} |"


def write_summary(page: Path, rows: Sequence[Row]) -> None:
    begun = page.read_text(encoding="utf-8").split(BEGIN)[0]
    page.write_text(f"{begun}{BEGIN}\n\n{summary(rows)}\n", encoding="utf-8")


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def one(seed: int, mode: str) -> Result | None:
    """A line that says how the point ended, and its result; none where it failed."""
    with tempfile.TemporaryDirectory(prefix="torture-") as directory:
        try:
            result = torture(seed, mode, Path(directory))
        except Exception as error:
            if STOP.is_set():
                raise Stopped from error
            kind = error if isinstance(error, Failure) else f"crash: {type(error).__name__}: {error}"
            again = f"python -m tests.torture.torture --mode {mode} --seed {seed}"
            print(f"{mode} {seed}: {kind}\n  again: {again}", flush=True)
            return None
    died = f"{result.point.victim} {result.point.state}, {result.lives} lives, {result.redone} steps again"
    print(f"{mode} {seed}: {died}, {result.seconds:.0f} s", flush=True)
    return result


def held(points: list[tuple[int, str]], jobs: int) -> Iterator[tuple[tuple[int, str], Result | None]]:
    """Each (seed, mode) with its result, in order. If the program is interrupted, only those that have ended."""
    with ThreadPoolExecutor(jobs) as pool:
        begun = [pool.submit(one, *point) for point in points]
        try:
            for point, future in zip(points, begun, strict=True):
                yield point, future.result()
        except (KeyboardInterrupt, SystemExit, GeneratorExit):  # the last: the caller was interrupted
            pool.shutdown(wait=False, cancel_futures=True)
            STOP.set()
            while wait(begun, timeout=1.0).not_done:  # a point may just have begun its next life
                for seed, mode in points:
                    kill_others(_mark(seed, mode))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trees", type=int, default=200, help="points at which the whole tree is killed")
    parser.add_argument("--actors", type=int, default=50, help=f"points at which one actor is: {', '.join(ACTORS)}")
    parser.add_argument("--inspecting", type=int, default=20, help="points at which death comes in an added state")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--mode", choices=(TREE, "actor", INSPECTING))
    parser.add_argument("--seed", type=int)
    parser.add_argument("--jobs", type=int, default=1, help="points at a time, each a Ray of its own")
    parser.add_argument("--table", type=Path, help="replace the rows of these points in this CSV file")
    parser.add_argument("--page", type=Path, help="write the summary of the table into this page")
    chosen = parser.parse_args()
    points = [(seed, TREE) for seed in range(chosen.first, chosen.first + chosen.trees)]
    points += [(seed, "actor") for seed in range(chosen.first, chosen.first + chosen.actors)]
    points += [(seed, INSPECTING) for seed in range(chosen.first, chosen.first + chosen.inspecting)]
    count = {TREE: chosen.trees, "actor": chosen.actors, INSPECTING: chosen.inspecting}
    points.sort(key=lambda point: (point[0] - chosen.first) / count[point[1]])
    if chosen.seed is not None:
        points = [(chosen.seed, chosen.mode or TREE)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that whatever runs is ended with this
    date, commit = datetime.date.today().isoformat(), _commit()
    tried = passed = 0
    for point, result in held(points, chosen.jobs):
        tried += 1
        passed += result is not None
        if chosen.table is not None:
            old = read_rows(chosen.table) if chosen.table.exists() else []
            rows = replace_rows(old, {point}, [] if result is None else [row_of(result, date, commit)])
            write_rows(chosen.table, rows)
            if chosen.page is not None:
                write_summary(chosen.page, rows)
    print(f"{passed} of {tried} points held, of {len(points)} chosen")
    return int(passed < len(points))


BEGIN = "<!-- written by make torture -->"

if __name__ == "__main__":
    sys.exit(main())
