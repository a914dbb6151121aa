"""`engine explain`: where the time of a run went, and what would make it faster. Called by the command line."""

import argparse
import math
from typing import Any

from engine.cli.advice_line import may_have_gpus
from engine.cli.json_output import print_json, takes_json
from engine.cli.recorded_run import history_of, takes_run
from engine.errors import ConfigError, visible


def add_command(commands: Any) -> None:
    """Add the command to the parsers of the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain",
        help="explain where the time of a run, a step or a group went, and what to change",
        description="Explain where the time of a run went, and give advice. A running run is explained up to now.",
    )
    takes_run(parser)
    question = parser.add_mutually_exclusive_group()
    question.add_argument("--step", type=int, metavar="T", help="what train step T waited for")
    question.add_argument("--group", type=int, metavar="G", help="the history of prompt group G")
    question.add_argument("--at", type=float, metavar="TIME", help="what happened this many seconds after the start")
    question.add_argument("--idle", action="store_true", help="every idle second and unused token, by cause")
    takes_json(parser)
    parser.set_defaults(run=explain)


def explain(arguments: argparse.Namespace) -> int:
    """`engine explain RUN`. Raises: `ConfigError` for a step, group or time that the record does not have."""
    from engine.inspect.explanation import explain_group, explain_idle, explain_moment, explain_run, explain_step
    from engine.metrics.health import failed_responses, findings
    from engine.metrics.journal import step_rows

    if arguments.at is not None and not math.isfinite(arguments.at):
        raise ConfigError("--at", arguments.at, "must be a number of seconds", "use 0 or more")
    run, history = history_of(arguments)
    if arguments.step is not None:
        explanation = explain_step(history, arguments.step)
    elif arguments.group is not None:
        explanation = explain_group(history, arguments.group)
    elif arguments.at is not None:
        explanation = explain_moment(history, arguments.at)
    elif arguments.idle:
        explanation = explain_idle(history)
    else:
        from engine.simulation.advice import advise

        health = [*findings(step_rows(run.metrics)), *failed_responses(history.validations)]
        explanation = explain_run(history, health, advise(history, gpus=may_have_gpus(history.config)))
    if arguments.json:
        print_json("explain", run.shown, explanation.plain())
    else:
        print("\n".join(visible(line) for line in str(explanation).splitlines()))
    return 0
