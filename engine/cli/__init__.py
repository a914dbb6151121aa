"""`engine`: the command line. Parses the arguments, runs the command and prints its result.

Exit codes: 0 success; 1 the run failed or the replay differs; 2 bad input, with the field or file, its value and what
to do; 130 interrupted. Ray and torch are imported only inside the commands that need them, so that the others
start fast.
"""

import argparse
import asyncio
import json
import logging
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from engine.cli import (
    evaluate,
    explain,
    project,
    report_command,
    run_page,
    samples,
    shipped_files,
    timeline_command,
    tune,
    what_if,
)
from engine.cli import run as running
from engine.cli.bug import add_bug
from engine.cli.completion import SHELLS, PrintCompletion
from engine.cli.control_commands import add_commands
from engine.cli.interrupts import (
    INTERRUPTED,
    VisibleFormatter,
    complain,
    discard_output,
    notes_of,
    page_console,
    use_plain_letters,
)
from engine.cli.json_output import print_json, takes_json
from engine.cli.recorded_run import RUN_OR_FILE, record_errors, run_or_bug_file, takes_run
from engine.cli.run_state import is_starting, require_address
from engine.control.proxies import exempt_own_servers
from engine.errors import ConfigError, EngineError, RecordDamaged, RecordError, visible
from engine.extras import EXTRAS, FOR_RUNS, missing_package, require_versions
from engine.runtime.garbage_collection import rare_collection
from engine.runtime.temporary_paths import shorten_temporary_paths
from engine.version import __version__

if TYPE_CHECKING:
    from engine.config import Config
    from engine.trajectory import Prompt

DONE, FAILED, BAD_INPUT = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Never raises. A traceback is never the only message."""
    try:
        arguments = _parser().parse_args(argv)
    except ModuleNotFoundError as error:
        return _explain(error)
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    use_plain_letters(sys.stdout)
    exempt_own_servers()
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(VisibleFormatter())
    try:
        with rare_collection():
            code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError as error:
        if arguments.run in (running.run, running.resume):
            return _explain(error)
        # The reader closed the pipe. Discard the buffered output, because Python reports an error for it at exit.
        discard_output(sys.stdout)
        return DONE
    except KeyboardInterrupt as error:
        complain("; ".join(["interrupted", *notes_of(error)]))
        return INTERRUPTED
    except Exception as error:
        return _explain(error)


def _explain(error: Exception) -> int:
    """Print an error. Returns the exit code, which tells bad input from a failure."""
    own = _own_error(error)
    if own is not None:
        bad_input = isinstance(own, ConfigError | RecordError)
        complain(str(own) if bad_input or type(own) is EngineError else f"{type(own).__name__}: {own}")
        for note in [*notes_of(error), *([own.fix] if isinstance(own, RecordDamaged) else [])]:
            complain(note)
        return BAD_INPUT if bad_input else FAILED
    missing = extra_for(error)
    if missing is not None:
        complain(missing)
        return BAD_INPUT
    complain(f"unexpected {type(error).__name__}: {error}")
    with suppress(OSError):
        traceback.print_exception(error, file=sys.stderr)
    return FAILED


def extra_for(error: BaseException | None) -> str | None:
    """A line that says what to install if a package of an extra is missing; None for any other error."""
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__
    package = "" if error is None or error.name is None else error.name.partition(".")[0]
    if package not in EXTRAS:
        return None
    return missing_package(package, FOR_RUNS if sys.argv[1:2] in (["init"], ["run"], ["resume"]) else ())


def _own_error(error: BaseException | None) -> EngineError | None:
    """The engine's error in a chain of causes; None if there is none. Ray wraps errors in its own."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, EngineError):
            return error
        seen.append(error)
        cause = getattr(error, "cause", None)
        error = cause if isinstance(cause, BaseException) else error.__cause__
    return None


# -- arguments ---------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="engine", description="Asynchronous RL post-training of language models as explicit, recorded steps."
    )
    parser.add_argument("--version", action="version", version=f"step-engine {__version__}")
    parser.add_argument(
        "--completion", action=PrintCompletion, choices=SHELLS, help="print the completion script for a shell"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    project.add_command(commands)

    run = commands.add_parser("run", help="train a model")
    _takes_config(run)
    run.add_argument(
        "--run-dir", metavar="D", help="directory of the new run; must be new or empty (default: runs/<id>)"
    )
    run.add_argument(
        "--resume",
        choices=("auto",),
        help="continue the newest unfinished run of this configuration, or start one",
    )
    _takes_checkpoint(run)
    _takes_address(run)
    _takes_plain(run)
    run.set_defaults(run=running.run, force_from=None, accept_data_change=False)

    _add_resume(commands)
    _add_export(commands)
    evaluate.add_command(commands)

    _add_replay(commands)
    _add_debug(commands)

    top = commands.add_parser("top", help="watch a running run from another terminal; q leaves")
    top.add_argument("directory", metavar="RUN", help="the directory of a run, or its name under runs/")
    takes_json(top)
    top.set_defaults(run=_top)

    run_page.add_commands(commands)
    samples.add_command(commands)
    explain.add_command(commands)
    add_bug(commands)
    what_if.add_commands(commands)
    timeline_command.add_command(commands)
    report_command.add_command(commands)
    tune.add_command(commands)
    shipped_files.add_command(commands)
    add_commands(commands)

    check = commands.add_parser("check", help="check whether a configuration can run")
    _takes_config(check)
    check.set_defaults(run=_check)

    states = commands.add_parser("states", help="print the state machines")
    states.add_argument("config", nargs="?", metavar="CONFIG", help="include the added states of this configuration")
    states.add_argument("--format", choices=("mermaid", "table", "both"), default="both", help="default: both")
    takes_json(states)
    states.set_defaults(run=_states)
    return parser


def _add_resume(commands: Any) -> None:
    resume = commands.add_parser("resume", help="continue an unfinished run, or extend a finished one")
    resume.add_argument("directory", metavar="RUN", help="the directory of a run, or its name under runs/")
    resume.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="change a field; may be repeated"
    )
    _takes_address(resume)
    resume.add_argument(
        "--force-from",
        metavar="CHECKPOINT",
        help="continue from this checkpoint (step-000020) or from the `initial` weights; later data is set aside",
    )
    resume.add_argument(
        "--accept-data-change",
        action="store_true",
        help="continue with changed data, by the content of its rows, where their numbers have changed",
    )
    _takes_plain(resume)
    resume.set_defaults(run=running.resume)


def _add_export(commands: Any) -> None:
    export = commands.add_parser("export", help="write the model of a checkpoint for transformers")
    export.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="RUN (its newest), RUN@step-20, or RUN@best (by trainer.keep_best)",
    )
    export.add_argument("--to", required=True, metavar="D", help="directory of the model; must be new or empty")
    export.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="default: float32, as trained"
    )
    export.add_argument(
        "--adapter", action="store_true", help="with trainer.lora: write only the adapter (default: merge it)"
    )
    export.set_defaults(run=_export)


def _add_replay(commands: Any) -> None:
    replay = commands.add_parser("replay", help="replay a recorded schedule, or show its state at an event")
    takes_run(replay, RUN_OR_FILE)
    replay.add_argument("--at", type=_number, metavar="N", help="show event N, its commands and the state after it")
    replay.add_argument("--group", type=int, metavar="G", help="with --at: show the history of a prompt group")
    takes_json(replay)
    replay.set_defaults(run=_replay)


def _add_debug(commands: Any) -> None:
    debug = commands.add_parser("debug", help="step forward and backward through the record of a run in the terminal")
    takes_run(debug, RUN_OR_FILE)
    debug.add_argument("--at", metavar="PLACE", help="begin at tick=12, event=40, step=3 or time=12.5")
    debug.add_argument(
        "--break",
        dest="breakpoint",
        metavar="NAME=VALUE",
        help="go to the first match of a breakpoint, such as group=17",
    )
    debug.set_defaults(run=_debug)


def _takes_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="override a field; may be repeated"
    )


def _takes_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        dest="set",
        action="append",
        type=lambda address: f"cluster.address={json.dumps(address)}",
        metavar="ADDRESS",
        help="Ray cluster to join: auto or host:port; local: start a private one (default: RAY_ADDRESS, else local)",
    )


def _takes_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        dest="set",
        action="append",
        type=_from_checkpoint,
        metavar="CHECKPOINT",
        help="begin with the weights of another run's checkpoint: RUN (its newest), RUN@step-20, or RUN@best",
    )
    parser.add_argument(
        "--from-optimizer",
        dest="set",
        action="append_const",
        const="model.checkpoint_optimizer=true",
        help="with --from: also begin with its optimizer state",
    )


def _from_checkpoint(name: str) -> str:
    from engine.cli.checkpoint_names import find_checkpoint

    try:
        return f"model.checkpoint_path={json.dumps(str(find_checkpoint(name, '--from').path))}"
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _takes_plain(parser: argparse.ArgumentParser) -> None:
    text = "print a line for each train step instead of the live view"
    parser.add_argument("--plain", action="store_true", help=text)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 0 or more")
    return int(text)


# -- engine check ------------------------------------------------------------------------------------------------------


def _check(arguments: argparse.Namespace) -> int:
    from engine.config.inputs import check_inputs
    from engine.storage.checkpoints import check_first_checkpoint
    from engine.workers.threads import OneThread

    require_versions()
    config, lines = running.read_config(arguments)
    running.check_servers(config)
    shorten_temporary_paths()
    for line in lines:
        print(visible(line))
    inputs = check_inputs(config, rehearse=True, rehearse_agent=_rehearse_agent, rehearse_backends=_rehearse_backends)
    thread, found = OneThread("check"), chain(_proof(config), inputs)  # no run calls user code on the main thread
    while (line := asyncio.run(thread.call(next, found, None))) is not None:
        print(visible(line), flush=True)
    thread.abandon()
    if config.model.checkpoint_path is not None:
        check_first_checkpoint(Path(config.model.checkpoint_path))
    return DONE


def _rehearse_agent(config: "Config", prompt: "Prompt") -> Iterator[str]:
    from engine.plans.agent_rehearsal import rehearse_agent  # imports optional packages

    return rehearse_agent(config, prompt)


def _rehearse_backends(config: "Config") -> Iterator[str]:
    from engine.plans.backend_rehearsal import rehearse_backends  # imports optional packages

    return rehearse_backends(config)


def _proof(config: "Config") -> Iterator[str]:
    """Simulate runs with the user's policies and states. Yields the lines to print. Raises: `ConfigError` if a law is
    broken."""
    from hypothesis.configuration import set_hypothesis_home_dir

    from engine.config.inputs import first_prompts
    from engine.simulation.order_answers import GivenPrompts
    from engine.simulation.proof import prove

    policies = config.policies()
    custom = [*policies.custom, *(f"state {name}" for name in config.scheduler.states)]
    if not custom:
        return
    source = GivenPrompts(described=config.described, rows=first_prompts(config), rewards=tuple(config.reward.names))
    with TemporaryDirectory() as home:
        set_hypothesis_home_dir(home)  # not the user's directory
        count = prove(config.limits, policies.names, source=source, config=config.model_dump(mode="json"))
    yield f"ok: {count} simulated runs keep every law under {', '.join(custom)}"


# -- engine export -----------------------------------------------------------------------------------------------------


def _export(arguments: argparse.Namespace) -> int:
    from engine.cli.checkpoint_names import find_checkpoint
    from engine.training.model_checkpoint import export_model

    found = find_checkpoint(arguments.checkpoint)
    export_model(found.path, Path(arguments.to), arguments.dtype, adapter=arguments.adapter)
    what = "adapter" if arguments.adapter else "model"
    print(f"the {what} after {found.steps} train steps is in {arguments.to} ({arguments.dtype})")
    return DONE


# -- engine replay -----------------------------------------------------------------------------------------------------


def _replay(arguments: argparse.Namespace) -> int:
    from engine.inspect import open_record, replayed, state_at

    if arguments.group is not None and arguments.at is None:
        raise ConfigError(
            "--group", arguments.group, "must be used together with --at", "add --at N, the event to stop at"
        )
    run = run_or_bug_file(arguments.directory)
    with record_errors(run, extensions=arguments.extensions):
        if arguments.at is not None:
            moment = state_at(open_record(run.path), arguments.at, arguments.group)
            _print_found(arguments, run.shown, moment, moment.to_plain())
            return DONE
        report = replayed(run.path)
    _print_found(arguments, run.shown, report, report.to_plain())
    return DONE if report.identical else FAILED


def _print_found(arguments: argparse.Namespace, run: str, text: object, fields: dict[str, Any]) -> None:
    if arguments.json:
        print_json("replay", run, fields)
    else:
        print(text)


# -- engine debug ------------------------------------------------------------------------------------------------------


def _debug(arguments: argparse.Namespace) -> int:
    from engine.cli.debugger import debug
    from engine.inspect import open_record

    run = run_or_bug_file(arguments.directory)
    with record_errors(run, extensions=arguments.extensions):
        return debug(run.shown, lambda: open_record(run.path), arguments.at, arguments.breakpoint)


# -- engine states -----------------------------------------------------------------------------------------------------


def _states(arguments: argparse.Namespace) -> int:
    from engine.inspect import machines_plain, machines_text

    limits = None
    if arguments.config is not None:
        from engine.config import load_config

        limits = load_config(arguments.config).limits
    if arguments.json:
        print_json("states", None, {"machines": machines_plain(limits)})
    else:
        print(machines_text(arguments.format, limits))
    return DONE


# -- engine top --------------------------------------------------------------------------------------------------------


def _top(arguments: argparse.Namespace) -> int:
    from engine.cli.top import ask, has_started, watch
    from engine.metrics.address_files import FILE, address_of
    from engine.storage.run_directory import open_run

    run = open_run(arguments.directory)
    console = page_console()
    if (
        console.is_terminal
        and not arguments.json
        and not has_started(run.shown, lambda: is_starting(run, FILE), console)
    ):
        print(f"{run.shown} is still starting")
        return DONE
    require_address(run, FILE, "was started without metrics")
    if arguments.json:
        print_json("top", run.shown, asdict(ask(address_of(run.path, run.shown), run.shown)))
        return DONE
    print(watch(arguments.directory, console))
    return DONE
