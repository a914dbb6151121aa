"""`engine scale`, `set`, `drain`, `stop` and `waits`: control a running run, and ask what it waits for.

Called by the CLI. The commands read the token in the run's directory. They must not import Ray or torch.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError, RecordError, RecordHeld, suggestion

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
    waits = _command(commands, "waits", "list what a run waits for, from which process and since when")
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
    from engine.control.requests import Set, Setting

    settings = []
    for text in arguments.settings:
        path, equals, value = text.partition("=")
        if not equals:
            raise ConfigError("PATH=VALUE", text, "must be path=value", "for example scheduler.max_drops=2")
        settings.append(Setting(setting=require_live(path.strip()), value=value.strip()))
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
    from engine.inspect import waits_text
    from engine.storage.run_directory import open_run

    directory = open_run(arguments.directory).path
    if _has_no_control(directory):
        print(waits_text(directory))
        return 0
    return _tell(arguments, Look(), shown=1000)


def _has_no_control(directory: Path) -> bool:
    """Whether a user's own loop wrote the record: it accepts no requests, but its record says what it waits for."""
    from engine.control.address_file import FILE
    from engine.inspect import open_record

    try:
        return not (directory / FILE).exists() and not open_record(directory).header.config
    except RecordError:
        return False


def _tell(arguments: argparse.Namespace, asked: "Operation", shown: int = SHOWN) -> int:
    from engine.control.client import tell
    from engine.storage.run_directory import open_run

    directory = open_run(arguments.directory)
    _require_address(directory)
    answer = tell(directory.path, directory.shown, asked)
    if answer.get("done"):
        print(answer["done"])
    waits = [str(wait) for wait in answer.get("waits", ())]
    if asked.operation in ("state", "drain"):
        for wait in waits[:shown]:
            print(f"  waits for {wait}" if not wait.startswith("and ") else f"  {wait}")
        if not waits:
            print("no order is open" if answer.get("outcome") is None else f"the run has {answer['outcome']}")
    return 0


def _require_address(directory: "RunDirectory") -> None:
    """Raises: `ConfigError` for a run without an address whose record is held by a process: advice to resume it would
    be wrong."""
    from engine.control.address_file import FILE
    from engine.record.files import RecordLock

    if (directory.path / FILE).exists():
        return
    try:
        RecordLock(directory.schedule).release()
    except RecordHeld:
        law = "is still starting or ending, or runs with control.enabled: false"
        raise ConfigError("RUN", directory.shown, law, "try again once it trains or has ended") from None


LAWS = {
    "scheduler.train_batch_size": "earlier admissions and deadlines were computed with it",
    "scheduler.sync_every": "it determined which steps each weights version contains",
    "rollout.replicas": "use `engine scale`",
}
"""Fields that look like live settings, and why they are not."""


def require_live(path: str) -> str:
    """The same path. Raises: `ConfigError`, with the law, for a field that is not live."""
    from engine.scheduling.settings import FIGURES, POLICIES, live_settings

    live = live_settings()
    if path in live:
        return path
    settings = f"use one of {', '.join(FIGURES)}, {POLICIES}*"
    if path in LAWS:
        raise ConfigError("PATH", path, f"cannot be changed while the run is running: {LAWS[path]}", settings)
    raise ConfigError("PATH", path, "is not a setting of a running run", suggestion(path, live, settings))
