"""`GpuRequest`: the GPUs that the processes of a run ask for. Plain values, without an import of the engine.

`config.gpus` makes it from a configuration and divides the GPUs of a cluster by it; a `Plan` carries it to
`actors.placement`.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequest:
    """GPUs of each process of a kind; 0: a computed part."""

    replica_gpus: float = 0.0
    """Above 1 it is a whole number, all on one node."""
    spread: bool = False
    """The GPUs of a replica may be on several nodes, because vLLM's Ray executor reserves them one by one."""
    sleeps: bool = True
    """Whether a sleeping replica gives the memory of its GPU back."""
    samples_on_gpus: bool = True
    """Whether replicas use GPUs, if there are any."""
    trainer_gpus: float = 0.0
    """Of all ranks together."""
    ranks: int = 1
    """Processes of the trainer. Each needs a GPU if the cluster has GPUs."""
    trainer_nodes: int = 1
    """Nodes over which the trainer's processes are divided evenly. With more than one, `Plan.make_trainer` gets a
    `training.ranked_trainer.Nodes` as `nodes`."""
    trains_on_gpus: bool = True
    """Whether the trainer and the scorers use GPUs, if there are any."""
    scorer_gpus: float = 0.0
    shares: Sequence[float] = ()
    """Share of the GPUs for each of `limits.pools`; empty: all processes get equal parts."""
