"""`engine scale`, `set`, `drain`, `stop`, `status` and `waits`: control a running run, and ask what it waits for.

Called by the CLI. The commands read the token in the run's directory. They must not import Ray or torch.
"""

import argparse
from typing import TYPE_CHECKING, Any

from engine.cli.json_output import print_json, takes_json
from engine.cli.recorded_run import record_errors, takes_run
from engine.cli.run_state import require_address, status
from engine.errors import ConfigError, RecordError, choice

if TYPE_CHECKING:
    from engine.control.requests import Operation
    from engine.storage.run_directory import RunDirectory

SHOWN = 8
"""Maximum number of waits printed after a request."""


def add_commands(commands: Any) -> None:
    """Add the commands to the parsers of the command line."""
    scale = _command(commands, "scale", "change the number of replicas of a running run")
    scale.add_argument("--replicas", type=int, required=True, metavar="N", help="number of rollout replicas")
    scale.set_defaults(run=_scale)
    change = _command(commands, "set", "change settings of a running run; all take effect, or none")
    change.add_argument("settings", nargs="+", metavar="PATH=VALUE", help="for example scheduler.max_drops=2")
    change.set_defaults(run=_set)
    drain = _command(commands, "drain", "train the current batch, save a checkpoint and stop; or remove one replica")
    drain.add_argument("--replica", type=int, metavar="R", help="drain only this replica")
    drain.set_defaults(run=_drain)
    stop = _command(commands, "stop", "stop a run at once; it can be resumed")
    stop.set_defaults(run=_stop)
    state = _command(commands, "status", "print the state of a run in one line, and exit with its code")
    state.description = (
        "Exit codes: 0 finished, 1 failed, 2 no such run, 3 running, 4 waiting (nothing has changed for "
        "run.silence_s), 5 drained, stopped or interrupted: it can be resumed, 6 starting, 7 not started."
    )
    takes_json(state)
    state.set_defaults(run=status)
    waits = commands.add_parser("waits", help="list what a run waits for, from which process and since when")
    takes_run(waits)
    takes_json(waits)
    waits.set_defaults(run=_waits)


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text)
    parser.add_argument("directory", metavar="RUN", help="the directory of a run, or its name under runs/")
    return parser


def _scale(arguments: argparse.Namespace) -> int:
    from engine.control.requests import MOST_REPLICAS, Scale

    if not 1 <= arguments.replicas <= MOST_REPLICAS:
        raise ConfigError(
            "--replicas",
            arguments.replicas,
            f"must be from 1 to {MOST_REPLICAS}",
            "to stop the run, use `engine drain`",
        )
    return _tell(arguments, Scale(replicas=arguments.replicas))


def _set(arguments: argparse.Namespace) -> int:
    from engine.control.requests import Set, SettingRequest

    settings = []
    for text in arguments.settings:
        path, equals, value = text.partition("=")
        if not equals:
            raise ConfigError("PATH=VALUE", text, "must be path=value", "for example scheduler.max_drops=2")
        settings.append(SettingRequest(setting=require_live(path.strip()), value=value.strip()))
    return _tell(arguments, Set(settings=tuple(settings)))


def _drain(arguments: argparse.Namespace) -> int:
    from engine.control.requests import Drain

    if arguments.replica is not None and not 0 <= arguments.replica < 1 << 31:
        raise ConfigError("--replica", arguments.replica, "must be the number of a replica", "the first replica is 0")
    return _tell(arguments, Drain(reason="asked by engine drain", replica=arguments.replica))


def _stop(arguments: argparse.Namespace) -> int:
    from engine.control.requests import Stop

    return _tell(arguments, Stop(reason="asked by engine stop"))


def _waits(arguments: argparse.Namespace) -> int:
    from engine.control.requests import Look
    from engine.inspect import recorded_waits
    from engine.storage.run_directory import open_run

    directory = open_run(arguments.directory)
    if _only_recorded(directory):
        with record_errors(directory, extensions=arguments.extensions):
            found = recorded_waits(directory.path)
        if arguments.json:
            print_json("waits", directory.shown, {"running": False, **found.to_plain()})
        else:
            print(found)
        return 0
    if not arguments.json:
        return _tell(arguments, Look(), shown=1000)
    answer = _asked(directory, Look())
    fields = {"running": True, "outcome": answer.get("outcome"), "at": None, "waits": answer.get("waits", [])}
    print_json("waits", directory.shown, fields)
    return 0


def _only_recorded(directory: "RunDirectory") -> bool:
    """Whether only the record says what a run waits for: it has ended, or a user's own loop runs it."""
    from engine.cli.run_state import state_of
    from engine.control.address_file import FILE
    from engine.inspect import open_record

    try:
        configured = open_record(directory.path).header.config or (directory.path / FILE).exists()
        return not configured or not state_of(directory).is_running
    except RecordError:
        return False


def _tell(arguments: argparse.Namespace, asked: "Operation", shown: int = SHOWN) -> int:
    from engine.storage.run_directory import open_run

    answer = _asked(open_run(arguments.directory), asked)
    if answer.get("done"):
        print(answer["done"])
    waits = [str(wait) for wait in answer.get("waits", ())]
    if asked.operation in ("state", "drain"):
        for wait in waits[:shown]:
            print(f"  {wait}")
        if not waits:
            print("no order is open" if answer.get("outcome") is None else f"the run has {answer['outcome']}")
    return 0


def _asked(directory: "RunDirectory", asked: "Operation") -> dict[str, Any]:
    """The answer of a running run."""
    from engine.control.address_file import FILE
    from engine.control.client import tell

    require_address(directory, FILE, "runs with control.enabled: false")
    return tell(directory.path, directory.shown, asked)


LAWS = {
    "scheduler.train_batch_size": "earlier admissions and deadlines were computed with it",
    "scheduler.sync_every": "it determined which steps each weights version contains",
    "rollout.replicas": "use `engine scale`",
}
"""Fields that look like live settings, and why they are not."""


def require_live(path: str) -> str:
    """The same path. Raises: `ConfigError`, with the law, for a field that is not live."""
    from engine.config.loading import fields
    from engine.scheduling.settings import FIGURES, POLICIES, live_settings

    live = live_settings()
    if path in live:
        return path
    settings = f"use one of {', '.join(FIGURES)}, {POLICIES}*"
    if path in LAWS:
        raise ConfigError("PATH", path, f"cannot be changed while the run is running: {LAWS[path]}", settings)
    if path in dict(fields()):
        raise ConfigError("PATH", path, "cannot be changed while the run is running", "set it in a new run")
    raise ConfigError("PATH", path, "is not a setting of a running run", choice(path, live, settings))
