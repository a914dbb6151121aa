"""`engine explain`: why a run took the time it took, and what would make it faster. Called by the command line.

Also gives the first line of advice to the table at the end of a run and to `engine top`.
"""

import argparse
import math
import threading
import time
from pathlib import Path
from typing import Any

from engine.cli.json_output import print_json, takes_json
from engine.cli.recorded_run import history_of, takes_run
from engine.errors import ConfigError, EngineError, visible

MOST_RECORD_BYTES = 1 << 20
"""Reading a larger record would delay the end of a run by more than a few seconds."""
ADVICE_EVERY_S = 30.0
ADVICE_SHARE = 0.01
"""Maximum share of a core that `engine top` uses to read the record."""


def add_command(commands: Any) -> None:
    """Add the command to the parsers of the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain",
        help="say why a run, a step or a group took its time, and what to change",
        description="Without an option: where the time of the run went, and advice. Also for a running run, up to now.",
    )
    takes_run(parser)
    question = parser.add_mutually_exclusive_group()
    question.add_argument("--step", type=int, metavar="T", help="what train step T waited for")
    question.add_argument("--group", type=int, metavar="G", help="the story of prompt group G")
    question.add_argument("--at", type=float, metavar="TIME", help="what happened this many seconds after the start")
    question.add_argument("--idle", action="store_true", help="every idle second and unused token, by cause")
    takes_json(parser)
    parser.set_defaults(run=explain)


def explain(arguments: argparse.Namespace) -> int:
    """`engine explain RUN`. Raises: `ConfigError` for a step, group or time that the record does not have."""
    from engine.inspect.explanation import explain_group, explain_idle, explain_moment, explain_run, explain_step

    if arguments.at is not None and not math.isfinite(arguments.at):
        raise ConfigError("--at", arguments.at, "must be a number of seconds", "use 0 or more")
    run, history = history_of(arguments)
    if arguments.step is not None:
        explanation = explain_step(history, arguments.step)
    elif arguments.group is not None:
        explanation = explain_group(history, arguments.group)
    elif arguments.at is not None:
        explanation = explain_moment(history, arguments.at)
    else:
        explanation = explain_idle(history) if arguments.idle else explain_run(history)
    if arguments.json:
        print_json("explain", run.shown, explanation.plain())
    else:
        print("\n".join(visible(line) for line in str(explanation).splitlines()))
    return 0


def first_advice(run_dir: Path) -> str:
    """The first line of advice about a run, or how to get it; empty if its record cannot be read here."""
    from engine.inspect.advice import advise
    from engine.inspect.history_reader import read_history

    try:
        if sum(path.stat().st_size for path in (run_dir / "schedule").iterdir()) > MOST_RECORD_BYTES:
            return "the record is long; `engine explain` reads it"
        return advise(read_history(run_dir)).lines[0]
    except (EngineError, OSError):
        return ""


class AdviceWatch:
    """The first line of advice about a running run, without figures. A thread reads its record again now and then."""

    def __init__(self, run_dir: Path) -> None:
        self.line = ""
        self._run_dir = run_dir
        self._never = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        pause_s = 0.0
        while not self._never.wait(pause_s):
            began = time.thread_time()
            self.line = first_advice(self._run_dir).partition(";")[0]
            pause_s = max(ADVICE_EVERY_S, (time.thread_time() - began) / ADVICE_SHARE)
