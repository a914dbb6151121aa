"""`engine run` and `engine resume`: start or resume a run, show it, and print a summary at the end.

Called by the CLI and by `engine.train`. Ray is imported late, so that errors in a configuration are reported at once.
"""

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from engine.cli.interrupts import INTERRUPTED, Interrupts, Output, complain
from engine.cli.run_state import start_again
from engine.errors import ConfigError, EngineError, RecordHeld, visible
from engine.extras import require_packages
from engine.record.files import RecordLock
from engine.storage.run_directory import leave_latest

if TYPE_CHECKING:
    from rich.console import Console

    from engine.actors.launch import RunHandle
    from engine.cli.run_view import RunView
    from engine.config import Config
    from engine.metrics.status import Status
    from engine.protocols.named_code import Local
    from engine.storage.run_directory import RunDirectory

DONE, FAILED = 0, 1
PACKAGES = ("ray", "torch", "transformers")
"""Optional packages that every run needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How a run is shown and resumed."""

    plain: bool
    resume: bool = False
    settings: Sequence[tuple[str, str]] = ()
    """New scheduler settings of a resumed run, as (path, value)."""
    force_from: str | None = None
    """The checkpoint from which to resume; None: the newest state."""
    accept_data_change: bool = False
    """Whether to resume with changed data."""
    local: "Local" = field(default_factory=dict)
    """Functions and classes that cannot be imported under their names in the configuration, by their fields."""


def run(arguments: argparse.Namespace) -> int:
    """`engine run CONFIG`."""
    from engine.config.inputs import check_inputs
    from engine.storage import run_directory

    output = cast(TextIO, Output(sys.stdout))
    with redirect_stdout(output), Interrupts() as interrupts:
        config, lines = read_config(arguments)
        for line in (*lines, *check_inputs(config)):
            if not line.startswith("ok:"):
                print(visible(line))
        name = _run_name(config, arguments.config)
        if arguments.resume is not None:
            before = _newest_unfinished(config, name, arguments.run_dir)
            if before is not None:
                print(f"resume: the newest unfinished run of this configuration is {before.shown}")
                return _resume(before, Path(arguments.config), arguments, interrupts)
            print("resume: no unfinished run of this configuration; starting a new one")
        check_start(config)
        join(config)
        directory = run_directory.create(config.run.dir, name, config_yaml=config.dump_yaml(), chosen=arguments.run_dir)
        return _train(config, directory, interrupts, Mode(plain=arguments.plain))


def check_start(config: "Config", local: "Local | None" = None) -> None:
    """Check all that a new run needs, before it has a directory. Raises: `ConfigError`, `ModuleNotFoundError`."""
    require_packages(*PACKAGES)
    from engine.plans.configured_plan import check_plan  # imports optional packages

    check_plan(config, local or {})


def resume(arguments: argparse.Namespace) -> int:
    """`engine resume RUN`."""
    from engine.storage import run_directory

    output = cast(TextIO, Output(sys.stdout))
    with redirect_stdout(output), Interrupts() as interrupts:
        directory = run_directory.open_run(arguments.directory)
        return _resume(directory, directory.config, arguments, interrupts)


def read_config(arguments: argparse.Namespace) -> tuple["Config", list[str]]:
    """The configuration, and the lines that `engine check` prints about it. Raises: `ConfigError`."""
    from engine.config import check_config, load_config
    from engine.metrics.sinks import check_sinks

    config = load_config(arguments.config, arguments.set)
    check_sinks(list(config.metrics.sinks.chosen()))
    return config, check_config(config)


def _resume(directory: "RunDirectory", path: Path, arguments: argparse.Namespace, interrupts: Interrupts) -> int:
    """Resume a run with the present configuration in `path`."""
    from engine.runtime.run_history import require_unfinished

    config, settings = resumption_of(directory, path, arguments.set, arguments.force_from)
    require_unfinished(directory.path, settings, missing_end=bool(arguments.force_from))
    join(config)
    mode = Mode(
        plain=arguments.plain, resume=True, settings=settings, force_from=arguments.force_from,
        accept_data_change=arguments.accept_data_change,
    )  # fmt: skip
    return _train(config, directory, interrupts, mode)


def resumption_of(
    directory: "RunDirectory", path: Path, overrides: Sequence[str], force_from: str | None = None
) -> tuple["Config", Sequence[tuple[str, str]]]:
    """The configuration with which a run resumes, and the new settings of its scheduler. `path`: the configuration.

    Raises: `ConfigError` for a change that a resume cannot make, for a run that is starting or running, and for a
    directory that cannot be written; `RecordError` for a record that cannot be read.
    """
    from engine.cli.run_state import not_begun
    from engine.config.resumption import resumed
    from engine.errors import RecordNotBegun
    from engine.record import read

    if directory.is_running:  # before Ray starts
        raise _running(directory)
    if not os.access(directory.path, os.W_OK):
        raise ConfigError("RUN", directory.shown, "cannot be written", "make its directory writable")
    try:
        header = read(directory.schedule, missing_end=bool(force_from)).header
    except RecordNotBegun:
        raise not_begun(directory) from None
    return resumed(path, header.config, overrides)


def _running(directory: "RunDirectory") -> ConfigError:
    """The error about a run that another process is running."""
    shown = directory.shown
    fix = f"watch it with `engine top {shown}`, or end it with `engine drain {shown}`"
    return ConfigError("RUN", shown, "is running: another process resumes it or writes its record", fix)


def join(config: "Config") -> None:
    """Check that the run's servers can listen, then join the cluster that the configuration or `RAY_ADDRESS` names, if
    any. Raises: `ConfigError`."""
    check_servers(config)
    if config.cluster.joined() is not None:
        from engine.actors.cluster import join_cluster

        join_cluster(config, partial(print, flush=True))


def check_servers(config: "Config") -> None:
    """Check that every server of a run can listen at its address. Raises: `ConfigError`."""
    from engine.control.listening_address import check_addresses

    servers = [("metrics", config.metrics.host, config.metrics.port)]
    if config.control.enabled:
        servers.append(("control", config.control.host, config.control.port))
    if config.agent.on_gateway:
        servers.append(("agent", config.agent.host, config.agent.port))
    check_addresses(servers)


def _newest_unfinished(config: "Config", name: str, chosen: str | None) -> "RunDirectory | None":
    """The newest run of this name that has begun and not finished; with `chosen`, the run in that directory. Raises:
    `RecordError` if a record cannot be read."""
    from engine.storage import run_directory

    if chosen is None:
        places = run_directory.runs_named(config.run.dir, name)
    else:
        places = [run_directory.RunDirectory(Path(chosen))] if (Path(chosen) / "schedule").is_dir() else []
    return next((place for place in places if _is_unfinished(place)), None)


def _is_unfinished(directory: "RunDirectory") -> bool:
    """Whether a run can be resumed. A run may have ended before its record began."""
    from engine.errors import RecordNotBegun
    from engine.record import read

    try:
        end = read(directory.schedule).outcome()
    except RecordNotBegun:
        return False
    return end is None or end.outcome != "finished"


def _run_name(config: "Config", path: str) -> str:
    """`run.name` if it is set, else the name of the configuration file."""
    if "name" in config.run.model_fields_set:
        return config.run.name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).stem).strip("-.") or config.run.name


def _train(config: "Config", directory: "RunDirectory", interrupts: Interrupts, mode: Mode) -> int:
    """Execute a run and show it, from the preparation of its model to the summary."""
    from rich.console import Console

    from engine.cli.advice_line import first_advice
    from engine.cli.run_view import DATA, summary

    console = Console(highlight=False)
    began = time.monotonic()
    where = directory.shown
    print(f"run: {where}", flush=True)
    status, asked = watch(config, directory, console, interrupts, mode)
    if status is not None:
        wall_s = time.monotonic() - began
        console.print(summary(status, where=where, wall_s=wall_s, advice=first_advice(directory.path)))
        misjudged = status.outcome == "failed" and DATA in status.failures
        for line in _follow_up_commands(directory, finished=status.outcome == "finished", misjudged=misjudged):
            print(line)
    if interrupts.count or interrupts.waiting:
        complain(f"interrupted; the run is in {where}")
        return INTERRUPTED
    if status is None or status.outcome != "finished":
        reason = (
            "ended without a status"
            if status is None
            else f"{status.ending or 'was interrupted'}: {status.reason.rstrip('.')}"
        )
        if asked:
            complain(f"the run ended on request ({reason}); its directory is {where}")
            return INTERRUPTED
        complain(f"the run {reason}; its directory is {where}")
        return FAILED
    return DONE


def watch(
    config: "Config", directory: "RunDirectory", console: "Console", interrupts: Interrupts, mode: Mode
) -> tuple["Status | None", bool]:
    """Launch a run and show it until it ends. Returns its last status, and whether a user asked it to end. An error
    says where the files of the run are. Holds the lock of the directory: it shows readers that the run is starting."""
    try:
        lock = RecordLock(directory.path)
    except RecordHeld:  # two resumes at once
        raise _running(directory) from None
    try:
        return _watch(config, directory, console, interrupts, mode)
    except BaseException as error:
        error.add_note(f"the files of the run are in {directory.shown}")
        with suppress(EngineError, OSError):  # a record or link that cannot be read must not hide the error
            if directory.has_record and isinstance(error, KeyboardInterrupt):
                error.add_note(f"resume it with `engine resume {directory.shown}`")
            elif not directory.has_record:
                error.add_note(f"it has not started: start it again with `{start_again(directory)}`")
                leave_latest(Path(config.run.dir), directory.path)
        raise
    finally:
        lock.release()


def _watch(
    config: "Config", directory: "RunDirectory", console: "Console", interrupts: Interrupts, mode: Mode
) -> tuple["Status | None", bool]:
    from engine.actors.launch import launch
    from engine.cli.run_view import PreparationView, view_for

    with PreparationView(console, plain=mode.plain) as preparing:
        handle = launch(
            config,
            directory.path,
            progress=preparing.show,
            resume=mode.resume,
            settings=mode.settings,
            force_from=mode.force_from,
            accept_data_change=mode.accept_data_change,
            local=mode.local,
        )
    try:
        with view_for(console, title=f"Step Engine  {directory.shown}", plain=mode.plain) as view:
            handle.note = view.note
            if handle.metrics_url is not None:
                view.note(f"metrics: {handle.metrics_url}")
            if mode.resume:
                view.note(handle.history())
            status = _follow(handle, view, interrupts)
    finally:
        interrupts.closing = True
        handle.close()
    return status, handle.end_requested


def _follow(handle: "RunHandle", view: "RunView", interrupts: Interrupts) -> "Status | None":
    """Show a run until it ends. The first interrupt drains it, the second stops it, the third ends this process."""
    status: Status | None = None
    draining = "draining: pending rewards are computed, the current batch is trained and a checkpoint is written"
    orders = [
        (handle.drain, f"{draining}; interrupt again to stop now"),
        (handle.stop, "stopping now; interrupt again to end this process at once"),
    ]
    order = None
    while True:
        try:
            if order is not None:
                (tell, said), order = order, None
                view.note(said)
                tell("interrupted by the user")
            for status in handle.updates():
                view.show(status)
            return status
        except KeyboardInterrupt:
            if not orders:
                raise
            order = orders.pop(0)
            interrupts.waiting = True  # last, because a further interrupt must be raised inside the `try` above


def _follow_up_commands(directory: "RunDirectory", *, finished: bool, misjudged: bool = False) -> Iterator[str]:
    """`misjudged`: the run failed, and attempts failed on their prompt, agent or reward."""
    from engine.record import read
    from engine.storage.samples import FAILED, TRAIN, SampleFiles

    place = shlex.quote(directory.shown)
    samples = SampleFiles(directory.samples)
    yield "next:"
    if misjudged and samples.has(FAILED):
        yield f"  engine samples {place} --failed"
    if not finished:
        yield f"  {'correct the cause, then ' if misjudged else ''}engine resume {place}"
    if samples.has(TRAIN):
        yield f"  engine samples {place}"
    record = read(directory.schedule)
    from engine.cli.recorded_run import names_extensions

    named = " --extensions" if names_extensions(directory.path) else ""
    yield f"  engine explain {place}{named}"
    yield f"  engine replay {place}{named}"
    first = list(islice(record.events(), 101))
    if any(getattr(event, "group", None) == 0 for event in first):
        yield f"  engine replay {place}{named} --at {first[-1].id} --group 0"
