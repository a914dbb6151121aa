"""`RankedTrainer`: a `Trainer` whose model is sharded over several processes of this machine, its ranks. With one rank,
it is a `ModelTrainer` in a child process.

Hosted by `workers.trainer`, as `ModelTrainer` is, in a Ray actor or in the user's process. It makes each call in every
rank (`rank_process.py`) and waits for all of them. An error of all ranks is raised and they continue, but a rank that
dies, fails where others do not, or raises `TrainerSpoiled` is a lost trainer: the ranks are killed, and the call raises
`TrainerSpoiled`. A rank that hangs is found by the time limit of the order; the ranks die with this process.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from typing import TYPE_CHECKING, Any, NoReturn

from engine.errors import ConfigError, EngineError, TrainerSpoiled, reason_of
from engine.ids import StepId
from engine.protocols import Batch, RolloutFigures
from engine.training.rank_process import PROGRESS
from engine.training.shared_weights import SHARES, Manifest, PublishedTensors, copy_of, find
from engine.training.trainer_settings import TrainerSettings

if TYPE_CHECKING:
    from engine.training.batch import Answer  # it brings torch, which this process needs for weights only

SETTLE_S = 10.0
"""Seconds that ranks may differ in noticing the same error, before it counts as the error of some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a rank is, sent to it first."""

    model_path: str
    settings: TrainerSettings
    """Its `threads` are those of this rank."""
    scored_apart: tuple[str, ...]
    index: int
    count: int
    rendezvous: str
    """A file in which the ranks find each other."""


class RankedTrainer:
    """Trains the causal language model at `model_path` in `settings.ranks` processes.

    Raises: `ConfigError` for settings that this machine cannot serve, `TrainerSpoiled` if a rank is lost.
    """

    def __init__(
        self, model_path: str, settings: TrainerSettings, *, scored_apart: Sequence[str] = (), stacks: int | None = None
    ) -> None:
        """`stacks`: an open file to which each rank appends the stacks of its threads whenever it gets SIGUSR1."""
        if not SHARES:
            raise ConfigError("trainer.ranks", settings.ranks, "several ranks need Linux", "use 1")
        self._folder = tempfile.TemporaryDirectory(prefix="engine-ranks-", ignore_cleanup_errors=True)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[Connection] = []
        self._lost = ""
        self._progressed: Callable[[], None] = lambda: None
        self._stacks = () if stacks is None else (stacks,)
        self._closed = threading.Event()
        self._start(settings.ranks)
        threads = settings.threads or len(os.sched_getaffinity(0))
        job = Job(
            model_path=model_path, settings=settings.model_copy(update={"threads": max(1, threads // settings.ranks)}),
            scored_apart=tuple(scored_apart), index=0, count=settings.ranks,
            rendezvous=os.path.join(self._folder.name, "rendezvous"),
        )  # fmt: skip
        try:
            self._manifest: Manifest = self._answer_to([replace(job, index=rank) for rank in range(job.count)])
        except BaseException:
            self.close()
            raise

    # -- the calls of a trainer

    def watch_progress(self, progressed: Callable[[], None]) -> None:
        """See `protocols.ReportsProgress`: when the first rank progresses."""
        self._progressed = progressed

    def imitate(self, answers: "Sequence[Answer]", learning_rate: float) -> float:
        loss: float = self._call("imitate", [*answers], learning_rate)
        return loss

    def score(self, batch: Batch, task: str) -> None:
        self._call("score", batch, task)

    def train(self, batch: Batch) -> dict[str, float]:
        metrics: dict[str, float] = self._call("train", batch)
        return metrics

    def rollout_figures(self) -> list[list[RolloutFigures]]:
        figures: list[list[RolloutFigures]] = self._call("rollout_figures")
        return figures

    def weights(self) -> PublishedTensors:
        """As `ModelTrainer.weights`. The first rank gathers parameter by parameter and writes into its memory, where
        this process finds the publication, so that one whole copy exists on this machine."""
        found = find(self._manifest, self._call("weights"), self.pids[0])
        if found is None and self._processes[0].poll() is not None:
            self._lose(0)
        if found is None:
            raise EngineError(f"this process may not read the memory of the first rank under /proc/{self.pids[0]}/fd")
        return found

    def save(self, directory: str, step: StepId) -> None:
        self._call("save", directory, step)

    def load(self, directory: str) -> StepId:
        step: StepId = self._call("load", directory)
        return step

    def start_from(self, weights: Mapping[str, Any], optimizer_steps: int) -> None:
        """As `ModelTrainer.start_from`. The ranks read one copy, in memory that this process shares with them."""
        memory, manifest = copy_of(weights)
        try:
            self._call("start_from", manifest, optimizer_steps, memory=memory.handle)
        finally:
            memory.close()

    def offload(self) -> None:
        self._call("offload")

    def onload(self) -> None:
        self._call("onload")

    def close(self) -> None:
        """Kill the ranks. A call that waits for them raises."""
        self._lost = self._lost or "it is closed"
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._closed.set()
        self._folder.cleanup()

    @property
    def pids(self) -> list[int]:
        """Of the ranks, in order."""
        return [process.pid for process in self._processes]

    # -- the ranks

    def _start(self, count: int) -> None:
        """From a thread that lasts as long as they do: Linux kills them when the thread that started them ends."""
        started = threading.Event()
        failures: list[Exception] = []

        def work() -> None:
            try:
                for _ in range(count):
                    self._links.append(self._start_one())
            except Exception as error:
                failures.append(error)
            started.set()
            self._closed.wait()

        threading.Thread(target=work, name="ranks", daemon=True).start()
        started.wait()
        if failures:
            self.close()
            raise failures[0]

    def _start_one(self) -> Connection:
        ours, theirs = Pipe()
        with theirs:
            files = [theirs.fileno(), *self._stacks]
            environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ}
            numbers = [theirs.fileno(), os.getpid(), *self._stacks]
            command = [sys.executable, "-m", "engine.training.rank_process", *map(str, numbers)]
            process = subprocess.Popen(
                command, env=environment, pass_fds=files, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._processes.append(process)
        return ours

    def _call(self, name: str, *arguments: Any, memory: int | None = None) -> Any:
        """The first rank's result of a call in every rank. `memory`: a file that the ranks get."""
        return self._answer_to([(name, arguments)] * len(self._links), memory)

    def _answer_to(self, messages: Sequence[Any], memory: int | None = None) -> Any:
        if self._lost:
            raise TrainerSpoiled(self._lost)
        for rank, (link, message) in enumerate(zip(self._links, messages, strict=True)):
            try:
                link.send(message)
                if memory is not None:
                    send_handle(link, memory, self._processes[rank].pid)
            except OSError:
                self._lose(rank)
        errors: dict[int, Exception] = {}
        result: Any = None
        waiting = {link: rank for rank, link in enumerate(self._links)}
        while waiting:
            ready = wait(list(waiting), timeout=SETTLE_S if errors else None)
            if not ready:
                break
            received = {rank: self._receive(rank) for link, rank in waiting.items() if link in ready}
            answers = {rank: answer for rank, answer in received.items() if answer != PROGRESS}
            if len(answers) < len(received):
                self._progressed()
            waiting = {link: rank for link, rank in waiting.items() if rank not in answers}
            for rank, (well, value) in answers.items():
                if not well:
                    errors[rank] = value
                elif rank == 0:
                    result = value
        for error in errors.values():
            if isinstance(error, TrainerSpoiled):  # no rank has died: `_receive` would have said so
                self._spoil(reason_of(error))
        if errors and len(errors) < len(self._links):
            rank, error = next(iter(errors.items()))
            self._spoil(f"rank {rank} of {len(self._links)} failed alone: {reason_of(error)}")
        if errors:
            raise errors[min(errors)]
        return result

    def _receive(self, rank: int) -> tuple[bool, Any]:
        """A rank's answer, which is there. Raises: `TrainerSpoiled` if the rank has died: then the others may fail for
        that reason, so all that is there is received before any answer is judged."""
        try:
            answer: tuple[bool, Any] = self._links[rank].recv()
        except (EOFError, OSError):
            self._lose(rank)
        return answer

    def _lose(self, rank: int) -> NoReturn:
        """Raises: `TrainerSpoiled`."""
        self._processes[rank].kill()
        status = self._processes[rank].wait()
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        self._spoil(f"rank {rank} of {len(self._links)} died ({how})")

    def _spoil(self, reason: str) -> NoReturn:
        """Raises: `TrainerSpoiled`."""
        self._lost = self._lost or reason
        self.close()
        raise TrainerSpoiled(self._lost)
