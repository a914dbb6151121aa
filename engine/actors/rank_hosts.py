"""The ranks on the other nodes of a trainer. On each of these nodes, a host actor starts ranks as child processes and
relays the messages between them and `training.ranked_trainer`.

`worker_actor.TrainerActor` runs in the first bundle of the trainer's placement group and creates `RankNodes` there. The
host actors are children of the trainer's actor, so Ray ends them with it, and their ranks end with them.
"""

import os
import threading
import weakref
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.actors.detached_actors import PackedPlan, hide_gpus, let_blocks_grow, prepare_process
from engine.actors.failures import failure_reason, named, never_ran, raised
from engine.errors import EngineError
from engine.runtime.stacks import dump_stacks, stacks_descriptor, stacks_file
from engine.training.child_ranks import ChildRanks
from engine.training.shared_weights import Manifest, Memory, PublishedTensors, view_bytes

if TYPE_CHECKING:
    import numpy


class RankNodes:
    """The nodes of this process's placement group, as `ranked_trainer.Nodes`. This process is on the first."""

    def __init__(self, packed: PackedPlan, count: int, gpus: float) -> None:
        """`gpus`: number of GPUs that Ray gives to the ranks of each node."""
        self.count = count
        self.address: str = ray.util.get_node_ip_address()
        self._packed = packed
        self._gpus = gpus
        self._started: weakref.WeakSet[RemoteRanks] = weakref.WeakSet()

    def start(self, ranks: int) -> "list[RemoteRanks]":
        """Start the ranks of the other nodes. Blocks until the nodes are there."""
        group = ray.util.get_current_placement_group()
        begun = {bundle: self._make(group, bundle, ranks) for bundle in range(1, self.count)}
        made = [RemoteRanks(self._running(group, bundle, ranks, actor), ranks) for bundle, actor in begun.items()]
        self._started.update(made)
        return made

    def dump_stacks(self) -> list[Any]:
        """Make the host actors and their ranks write their stacks. Returns a reference for each, which resolves
        once they are written."""
        return [one.dump_stacks() for one in self._started]

    def _running(self, group: Any, bundle: int, ranks: int, actor: Any) -> Any:
        """The host actor of a node, once it runs. Ray notices a dead node late. If it has placed the actor there,
        create another one, on the node that Ray moves the bundle to."""
        while True:
            try:
                ray.get(actor.__ray_ready__.remote())
                return actor
            except RayError as error:
                if not never_ran(error):
                    raise raised(error) from None
            actor = self._make(group, bundle, ranks)

    def _make(self, group: Any, bundle: int, ranks: int) -> Any:
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": self._gpus, "max_concurrency": ranks + 2}
        made = ray.remote(RankHostActor).options(**options, enable_task_events=False, scheduling_strategy=place)
        return made.remote(self._packed, f"trainer-node-{bundle}", ranks)


class RemoteRanks:
    """The ranks of a host actor, each with a link to this process. Once nothing refers to it or to its links, its
    threads and the actor end."""

    def __init__(self, actor: Any, ranks: int) -> None:
        self._actor = actor
        self._ends: dict[int, str] = {}
        self.links: Sequence[Connection] = [self._linked(place) for place in range(ranks)]

    def share(self, message: bytes) -> str:
        """See `ranked_trainer.RankHost`. Raises: `EngineError`."""
        with named():
            path: str = ray.get(self._actor.share.remote(message))
        return path

    def dump_stacks(self) -> Any:
        return self._actor.dump_stacks.remote()

    def hold(self, weights: PublishedTensors, manifest: Manifest) -> None:
        """See `ranked_trainer.RemoteHost`. Raises: `EngineError`."""
        import torch

        by_place = {place: weights[name] for name, place in manifest.names}
        arrays = [by_place[place].reshape(-1).view(torch.uint8).numpy() for place in range(len(by_place))]
        with named():
            ray.get(self._actor.hold.remote(manifest, weights.publication, arrays))

    def drop(self) -> None:
        self._actor.drop.remote()

    def end_of(self, place: int) -> str:
        return self._ends.get(place, "its node does not answer")

    def close(self) -> None:
        ray.kill(self._actor)

    def _linked(self, place: int) -> Connection:
        ours, theirs = Pipe()
        arguments = (self._actor, place, theirs, self._ends)
        threading.Thread(target=_relay, args=arguments, name=f"rank-{place}", daemon=True).start()
        return ours


def _relay(actor: Any, place: int, link: Connection, ends: dict[int, str]) -> None:
    """Relay messages until the rank has ended, as noted in `ends`, or nothing refers to the other end of the link."""
    with link:
        try:
            while True:
                link.send_bytes(ray.get(actor.call.remote(place, link.recv_bytes())))
        except RayError as error:
            ends[place] = failure_reason(error)
        except (EOFError, OSError):
            return


class RankHostActor:
    """Starts the ranks of its node and passes messages to them."""

    def __init__(self, packed: PackedPlan, name: str, ranks: int) -> None:
        let_blocks_grow()
        if not packed.trainer_shares:
            hide_gpus()
        packed.enter()
        prepare_process(name, packed.run_dir)
        self._stacks = None if packed.run_dir is None else stacks_file(packed.run_dir, name)
        self._ranks = ChildRanks(ranks, stacks_descriptor())
        self._held: object = None

    def call(self, place: int, message: bytes) -> bytes:
        """The answer of a rank. Raises: `EngineError` that says how the rank ended."""
        link = self._ranks.links[place]
        try:
            link.send_bytes(message)
            answer = link.recv_bytes()
        except (EOFError, OSError):
            raise EngineError(self._ranks.end_of(place)) from None
        return answer

    def share(self, message: bytes) -> str:
        return self._ranks.share(message)

    def dump_stacks(self) -> None:
        """Write the stacks of this process and its ranks into a file of this node, beside the trainer's."""
        if self._stacks is not None:
            dump_stacks(os.getpid(), self._stacks)

    def hold(self, manifest: Manifest, publication: str, arrays: "Sequence[numpy.ndarray[Any, Any]]") -> None:
        """See `ranked_trainer.RemoteHost`."""
        import torch

        memory = Memory(manifest, publication)
        for target, array in zip(memory.tensors, arrays, strict=True):
            target.view(-1).view(torch.uint8).copy_(view_bytes(array))
        self._held = memory.complete()

    def drop(self) -> None:
        self._held = None
