"""Everything a run over Ray is made of, as values and functions that travel to the actors.

Made from a configuration by `models.plan_of`, or by a user who brings their own generator and trainer; carried out by
`run.start`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.actors.transports import ObjectStoreTransport, Transport
from engine.hosts.prompts import Prompts
from engine.ids import ReplicaId
from engine.roles import Generator, Trainer
from engine.states.limits import Limits
from engine.trajectory import Prompt

if TYPE_CHECKING:
    from engine.actors.gateway import GatewayParts


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What a rollout actor hosts: a generator and, where held-out prompts are measured, one that takes the likeliest
    token."""

    generator: Generator
    evaluator: Generator | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """What a trainer that takes the place of a dead one goes on from: a checkpoint's directory, or published
    weights."""

    steps: int
    optimizer_steps: int = 0
    """Optimizer updates in those steps, by which learning rates are scheduled."""
    checkpoint: str | None = None
    weights: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run. The functions are called in the actors they are for, on a thread where blocking does no harm."""

    limits: Limits
    samples: int
    make_rollout: Callable[[ReplicaId], Rollout]
    make_trainer: Callable[[], Trainer]
    make_prompts: Callable[[], Prompts]
    replicas: int = 1
    slots: int = 8
    prefix_every_tokens: int = 1024
    """New tokens of a trajectory after which its group's prefixes go to the trajectory store; 0: only at an abort."""
    make_gateway: Callable[[], "GatewayParts"] | None = None
    """For generators whose groups are agents; None: there is no gateway."""
    restore_trainer: Callable[[Trainer, Restore], None] | None = None
    """Brings a new trainer to where the dead one was; None: it cannot be, once a step is trained."""
    transport: Transport = field(default_factory=ObjectStoreTransport)
    """How published weights reach the replicas."""
    resume: bool = False
    """Go on with the run that `run_dir` holds."""
    policies: Mapping[str, str] = field(default_factory=dict)
    run_dir: Path | None = None
    """Takes record, metrics, checkpoints and logs; None: nothing is kept."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The full configuration, for the record."""
    held_out: Sequence[Prompt] = ()
    measure_at_start: bool = False
    measure_at_end: bool = False
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    """None: no endpoint; 0: any free port."""
    keep_checkpoints: int = 2
    replica_restarts: int = 3
    """Times each replica may be started again."""
    trainer_restarts: int = 1
    rollout_threads: int = 1
    trainer_threads: int = 0
    """CPU threads; 0: as many as there are cores."""
    object_store_bytes: int | None = 256 << 20
    """Of Ray's object store, where the run starts a cluster of its own; None: as much as may be."""
    rollout_gpus: float = 0.0
    trainer_gpus: float = 0.0
