"""`RankedTrainer`: a `Trainer` whose model is sharded over several processes, its ranks. With one rank, it is a
`ModelTrainer` in a child process.

Hosted by `workers.trainer`, as `ModelTrainer` is, in a Ray actor or in the user's process. It makes each call in every
rank (`rank_process.py`) and waits for all of them. An error of all ranks is raised and they continue, but a rank that
dies, fails where others do not, or raises `TrainerSpoiled` is a lost trainer: the ranks are killed, and the call raises
`TrainerSpoiled`. A rank that hangs is found by the time limit of the order; the ranks die with this process.

Ranks are child processes: on this node of this process, on each other node of a host actor (`actors.rank_hosts`), which
relays the messages. So a trainer also works without Ray, and ranks start and end in the same way everywhere.
"""

import logging
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler, send_handle
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from engine.errors import ConfigError, EngineError, TrainerSpoiled, reason_of
from engine.ids import StepId
from engine.protocols import Batch, RolloutFigures
from engine.training.child_ranks import ChildRanks
from engine.training.rank_process import PROGRESS, SHARED, family_of
from engine.training.shared_weights import SHARES, Manifest, PublishedTensors, copy_of, find
from engine.training.trainer_settings import TrainerSettings

if TYPE_CHECKING:
    from engine.training.batch import Answer  # it brings torch, which this process needs for weights only

SHARED_BYTES = 1 << 20
"""The ranks of a node read one copy of a packed call that has at least this size."""
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
    on_node: int
    """The number of ranks on each node. Ranks of a node have successive numbers."""
    in_turns: bool
    """Replicas may be on the rank's device until `onload`."""
    rendezvous: str | tuple[str, int]
    """Where the ranks find each other: a file. With several nodes, the address of the first rank, which gets the
    listening socket."""


class RankHost(Protocol):
    """The ranks of one node."""

    @property
    def links(self) -> Sequence[Connection]: ...

    def share(self, message: bytes) -> str:
        """Bring a message to the node. Returns a path where its ranks find it until the next message. Raises:
        `OSError` if this node has no room for it, `EngineError` if another node fails."""

    def end_of(self, place: int) -> str:
        """How a rank that no longer answers has ended."""

    def close(self) -> None:
        """Kill the ranks."""


class RemoteHost(RankHost, Protocol):
    def hold(self, weights: PublishedTensors, manifest: Manifest) -> None:
        """Bring weights into the memory of that node, where its ranks find them until `drop`."""

    def drop(self) -> None: ...


class Nodes(Protocol):
    """The nodes of a trainer's ranks. This process is on the first."""

    count: int
    address: str
    """The address of this node, for the others."""

    def start(self, ranks: int) -> Sequence[RemoteHost]:
        """Start `ranks` ranks on each of the other nodes. They may have to wait for the nodes."""


class RankedTrainer:
    """Trains the causal language model at `model_path` in `settings.ranks` processes.

    Raises: `ConfigError` for settings that this machine cannot serve, `TrainerSpoiled` if a rank is lost.
    """

    def __init__(
        self,
        model_path: str,
        settings: TrainerSettings,
        *,
        scored_apart: Sequence[str] = (),
        stacks: int | None = None,
        nodes: Nodes | None = None,
        in_turns: bool = False,
    ) -> None:
        """`stacks`: an open file to which each rank appends the stacks of its threads whenever it gets SIGUSR1.
        `nodes`: None if all ranks are on this machine. `in_turns`: models begin in host memory, until `onload`."""
        if not SHARES:
            raise ConfigError("trainer.ranks", settings.ranks, "several ranks need Linux", "use 1")
        self._lost = ""
        self._progressed: Callable[[], None] = lambda: None
        on_node = settings.ranks // (1 if nodes is None else nodes.count)
        threads = settings.threads or len(os.sched_getaffinity(0))
        job = Job(
            model_path=model_path, settings=settings.model_copy(update={"threads": max(1, threads // on_node)}),
            scored_apart=tuple(scored_apart), index=0, count=settings.ranks, on_node=on_node, in_turns=in_turns,
            rendezvous="",
        )  # fmt: skip
        self._own = ChildRanks(on_node, stacks)
        self._others: Sequence[RemoteHost] = ()
        try:
            self._others = () if nodes is None else nodes.start(on_node)
            self._hosts: Sequence[RankHost] = (self._own, *self._others)
            self._links = [link for host in self._hosts for link in host.links]
            self._manifest: Manifest = self._begin(job) if nodes is None else self._begin_apart(job, nodes.address)
        except BaseException:
            self.close()
            raise

    def _begin(self, job: Job) -> Manifest:
        """Ranks of one machine find each other through a file, so nobody else can join them."""
        with tempfile.TemporaryDirectory(prefix="engine-ranks-", ignore_cleanup_errors=True) as folder:
            return self._answer_to(self._jobs(replace(job, rendezvous=os.path.join(folder, "rendezvous"))))

    def _begin_apart(self, job: Job, address: str) -> Manifest:
        with socket.create_server((address, 0), family=family_of(address)) as listening:
            place = (address, listening.getsockname()[1])
            return self._answer_to(self._jobs(replace(job, rendezvous=place)), listening.fileno())

    def _jobs(self, job: Job) -> list[bytes]:
        return [_packed(replace(job, index=rank)) for rank in range(job.count)]

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
        if found is None and self._own.has_ended(0):
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
        """As `ModelTrainer.start_from`. The ranks of a node read one copy, in memory of the process that started
        them."""
        memory, manifest = copy_of(weights)
        try:
            held = memory.complete()
            for host in self._others:
                host.hold(held, manifest)
            self._call("start_from", manifest, held.publication, optimizer_steps)
        finally:
            memory.close()
            for host in self._others:
                host.drop()

    def offload(self) -> None:
        self._call("offload")

    def onload(self) -> None:
        self._call("onload")

    def close(self) -> None:
        """Kill the ranks. A call that waits for them raises."""
        self._lost = self._lost or "it is closed"
        hosts: Sequence[RankHost] = (*self._others, self._own)
        for host in hosts:
            host.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks on this machine, in order."""
        return self._own.pids

    # -- the ranks

    def _call(self, name: str, *arguments: Any) -> Any:
        """The first rank's result of a call in every rank. A large call, such as one with a batch, is packed once, and
        the ranks of a node read one copy."""
        message = _packed((name, arguments))
        if len(message) < SHARED_BYTES or self._lost:
            return self._answer_to([message] * len(self._links))
        places: list[bytes] = []
        for host in self._hosts:
            try:
                places += [_packed((SHARED, host.share(message)))] * len(host.links)
            except EngineError:
                self._lose(len(places))
        return self._answer_to(places)

    def _answer_to(self, messages: Sequence[bytes], handle: int | None = None) -> Any:
        """`messages`: packed. `handle`: an open file that the first rank gets with its message."""
        if self._lost:
            raise TrainerSpoiled(self._lost)
        for rank, (link, message) in enumerate(zip(self._links, messages, strict=True)):
            try:
                link.send_bytes(message)
                if handle is not None and rank == 0:
                    send_handle(link, handle, self.pids[0])
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
            answers = {rank: answer for rank, answer in received.items() if answer[0] is not None}
            for rank in received.keys() - answers.keys():
                self._note(received[rank])
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

    def _note(self, message: tuple[bool | None, Any]) -> None:
        """What the first rank has sent before its answer."""
        if message == PROGRESS:
            self._progressed()
        else:
            name, level, text = message[1]
            logging.getLogger(name).log(level, "%s", text)

    def _receive(self, rank: int) -> tuple[bool | None, Any]:
        """A rank's message, which is there. Raises: `TrainerSpoiled` if the rank has died: then the others may fail for
        that reason, so all that is there is received before any answer is judged."""
        try:
            answer: tuple[bool | None, Any] = self._links[rank].recv()
        except (EOFError, OSError):
            self._lose(rank)
        return answer

    def _lose(self, rank: int) -> NoReturn:
        """Raises: `TrainerSpoiled`."""
        on_node = len(self._own.links)
        how = self._hosts[rank // on_node].end_of(rank % on_node)
        self._spoil(f"rank {rank} of {len(self._links)} died ({how})")

    def _spoil(self, reason: str) -> NoReturn:
        """Raises: `TrainerSpoiled`."""
        self._lost = self._lost or reason
        self.close()
        raise TrainerSpoiled(self._lost)


def _packed(message: Any) -> bytes:
    return bytes(ForkingPickler.dumps(message))
