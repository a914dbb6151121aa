"""`engine status RUN`: the state of a run in one line, and as an exit code for scripts.

Also called by the commands that cannot reach a run, to say why. Reads the run's directory and asks its metrics
endpoint. Must not write.
"""

import argparse
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from engine.cli.json_output import print_json
from engine.commands import FinishRun
from engine.errors import ConfigError, RecordError, RecordNotBegun, counted, visible
from engine.storage.run_directory import RunDirectory, open_run

FINISHED, FAILED, RUNNING, WAITING, ENDED, STARTING, NOT_STARTED = 0, 1, 3, 4, 5, 6, 7
"""Exit codes. 2 is bad input, such as a directory without a run."""
RESUMABLE = "; it can be resumed"


@dataclass(frozen=True, slots=True)
class RunState:
    """`text`: a predicate of the run, beginning with the name of its state."""

    code: int
    text: str

    @property
    def is_running(self) -> bool:
        return self.code in (RUNNING, WAITING)

    @property
    def word(self) -> str:
        """The name of the state, with which the text begins: `finished`, `not started`, ..."""
        return re.split(r"[:,]| after ", self.text, maxsplit=1)[0]

    @property
    def reason(self) -> str:
        """The text after its first colon; the whole text without one."""
        return self.text.partition(": ")[2] or self.text


def status(arguments: argparse.Namespace) -> int:
    """`engine status RUN`. Raises: `ConfigError` if there is no run, `RecordError` if its record is damaged."""
    directory = open_run(arguments.directory)
    state = state_of(directory)
    if arguments.json:
        print_json("status", directory.shown, {"state": state.word, "why": state.text, "code": state.code})
    else:
        print(f"{directory.shown}: {visible(state.text)}")
    return state.code


def state_of(directory: RunDirectory) -> RunState:
    """Raises: `RecordError` if the record is damaged."""
    try:
        return _live(directory) or _recorded(directory.schedule)
    except RecordNotBegun:
        return _without_event(directory)


def listed_state_of(directory: RunDirectory) -> RunState:
    """As `state_of`, without replaying the record: fast enough for a list of runs. Raises: `RecordError`."""
    try:
        return _live(directory) or _undecided(directory.schedule)
    except RecordNotBegun:
        return _without_event(directory)


def not_begun(directory: RunDirectory) -> ConfigError:
    """The error about a run without an event."""
    state = _without_event(directory)
    fix = "try again once it trains" if state.code == STARTING else ""
    return ConfigError("RUN", directory.shown, f"is {state.text}", fix)


def _without_event(directory: RunDirectory) -> RunState:
    prepared = directory.is_prepared
    if prepared is False:
        again = f"start it again with `{start_again(directory)}`"
        return RunState(NOT_STARTED, f"not started: its process ended before the first event; {again}")
    unknown = ", or its start was interrupted" if prepared is None else ""
    return RunState(STARTING, f"starting: it has no event yet{unknown}")


def start_again(directory: RunDirectory) -> str:
    """The command that starts a run that has no record."""
    return f"engine run {shlex.quote(directory.shown)}/{directory.config.name}"


def _live(directory: RunDirectory) -> RunState | None:
    """The state of a run that a process is running; None if no process does."""
    answer = _answer(directory)
    if answer is None and directory.is_running:
        why = "it is starting or ending, or runs on another machine; try again, or run this command on that machine"
        return RunState(RUNNING, f"running, but it does not answer: {why}")
    return answer


def is_starting(directory: RunDirectory, file: str) -> bool:
    """Whether a process prepares the run, which has neither an event nor the `file` with its address yet."""
    announced = (directory.path / file).exists()
    return not announced and bool(directory.is_prepared) and state_of(directory).code == STARTING


def require_address(directory: RunDirectory, file: str, off: str) -> None:
    """`file`: the file with the address of the run; `off`: why a running run may have none, for the message.

    Raises: `ConfigError` for a run without the file: it is starting or ending, has ended, or has no address.
    """
    if (directory.path / file).exists():
        return
    state, shown = state_of(directory), directory.shown
    if state.is_running:
        law = f"is still starting or ending, or {off}"
        raise ConfigError("RUN", shown, law, "try again once it trains or has ended")
    if state.code in (STARTING, NOT_STARTED):
        raise not_begun(directory)
    law = f"is not running: {state.text.removesuffix(RESUMABLE)}"
    resumable = state.text.endswith(RESUMABLE)
    fix = f"resume it with `engine resume {shown}`" if resumable else f"see its summary with `engine show {shown}`"
    raise ConfigError("RUN", shown, law, fix)


def _answer(directory: RunDirectory) -> RunState | None:
    """The state that a running run reports; None if no run answers."""
    from engine.cli.top import ask
    from engine.metrics.address_files import address_of

    try:
        now = ask(address_of(directory.path, directory.shown), directory.shown)
    except ConfigError:
        return None
    if now.outcome is not None:
        return None
    steps = f"{now.step} steps trained" if now.max_steps is None else f"{now.step} of {now.max_steps} steps trained"
    if now.silence:
        return RunState(WAITING, f"waiting, {steps}: {now.silence}")
    return RunState(RUNNING, f"{'draining' if now.draining else 'running'}, {steps}: {now.trainer_now}")


def _recorded(schedule: Path) -> RunState:
    """The state of a run that no process is running."""
    from engine.record import read, recover

    try:
        state = recover(read(schedule)).scheduler.state
    except RecordError as error:
        if isinstance(error.__cause__, ConfigError):  # it names a policy that is not registered in this process
            return _undecided(schedule)
        raise
    training = state.training
    unpublished = sum(step.id < training.steps_trained for step in training.formed_steps)
    finished = counted(training.steps_trained - unpublished, "train step")
    trained = f" after {finished}{' and one that was not published' if unpublished else ''}"
    return _state_at_end(state.ending.outcome, trained)


def _undecided(schedule: Path) -> RunState:
    from engine.record import read

    record = read(schedule)
    record.require_index()
    return _state_at_end(record.outcome())


def _state_at_end(end: FinishRun | None, trained: str = "") -> RunState:
    """`trained`: after how many train steps, if that is known."""
    if end is None:
        return RunState(ENDED, f"interrupted{trained}: its processes were killed{RESUMABLE}")
    if end.outcome == "finished":
        return RunState(FINISHED, f"finished: {end.reason}")
    return RunState(FAILED if end.outcome == "failed" else ENDED, f"{end.word}{trained}: {end.reason}{RESUMABLE}")
