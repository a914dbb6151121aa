"""What `--json` prints: a line with one object, which begins with the command and the run; the rest is its figures.

Called by every command that reads a run. Must never print a control character of a run's text: a terminal would obey
it.
"""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from engine.metrics.journal import plain


def takes_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json` to a command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def print_json(command: str, run: object, fields: Mapping[str, Any]) -> None:
    """`run`: the path of the run as messages show it; None for a command without a run."""
    print(json_line({"command": command, "run": None if run is None else str(run), **fields}), flush=True)


def json_line(value: object) -> str:
    """A value as a line of JSON, with control characters as escapes."""
    text = json.dumps(plain(value), ensure_ascii=False)
    return "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in text)
