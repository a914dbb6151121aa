"""`engine --completion SHELL`: the script with which a shell completes commands, options, and names of runs.

Called by the CLI. The package shtab writes the script from the parser, so a Tab starts no Python.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

SHELLS = ("bash", "zsh", "fish")
NAMES_OF_RUNS = "ls runs 2>/dev/null"
RUNS = ("RUN", "RUN2", "MODEL|RUN", "CHECKPOINT")
FILES = ("CONFIG",)
DIRECTORIES = ("D", "DIR")


class PrintCompletion(argparse.Action):
    """Prints the script and ends the command."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        import shtab

        completes = {
            **dict.fromkeys(RUNS, shtab.cmd(NAMES_OF_RUNS)),
            **dict.fromkeys(FILES, shtab.FILE),
            **dict.fromkeys(DIRECTORIES, shtab.DIRECTORY),
        }
        for action in _actions(parser):
            if isinstance(action.metavar, str) and action.metavar in completes:
                action.complete = completes[action.metavar]  # type: ignore[attr-defined]
        print(shtab.complete(parser, str(values)))
        parser.exit()


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
