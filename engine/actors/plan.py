"""Everything a run over Ray is made of, as values and functions that travel to the actors.

Made from a configuration by `models.plan_of`, or by a user who brings their own generator and trainer; carried out by
`run.start`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.actors.transports import ObjectStoreTransport, Transport
from engine.errors import ConfigError
from engine.hosts.added import Work
from engine.hosts.durable import StorePolicy
from engine.hosts.prompts import Prompts
from engine.hosts.scorer import OF_TRAINED_WEIGHTS
from engine.ids import NO_VERSION, GroupId, ReplicaId, StepId, Version
from engine.roles import Generator, Scorer, Trainer
from engine.states.limits import REWARDING, Limits
from engine.trajectory import Prompt

if TYPE_CHECKING:
    from engine.gateway.parts import GatewayParts


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What a rollout actor hosts: a generator and, where held-out prompts are measured, one that takes the likeliest
    token."""

    generator: Generator
    evaluator: Generator | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Redo:
    """A train step that is trained again, from its batch in the trajectory store, as it was ordered."""

    step: StepId
    groups: tuple[GroupId, ...]
    staleness: tuple[int, ...]
    reports: bool = False
    """What the trainer said of it is not known any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """What a trainer that takes the place of a dead one goes on from: a checkpoint's directory, published weights, or
    neither, which are the initial weights."""

    steps: int
    """Train steps in the checkpoint or the weights."""
    optimizer_steps: int = 0
    """Optimizer updates in those steps, by which learning rates are scheduled."""
    checkpoint: str | None = None
    version: Version = NO_VERSION
    """Published weights to begin from; -1: the checkpoint, or the initial weights."""
    weights: Any = None
    """Those of `version`, once they are there."""
    redo: tuple[Redo, ...] = ()
    """The steps that follow, to be trained again before the trainer takes orders."""

    @property
    def reaches(self) -> int:
        """Train steps in what the trainer begins with."""
        return self.steps + len(self.redo)


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
    make_scorer: Callable[[tuple[str, ...]], Scorer] | None = None
    """Makes what scores these tasks on a pool of their own (`Limits.scorers`); None: the trainer scores."""
    make_work: Callable[[str], Work] | None = None
    """Makes what is done in an added state whose policy has no `work` of its own; None: groups only pass."""
    state_timeout_s: float | None = None
    """How long the work on one group may take; in the state `rewarding` it is each call of the reward that is timed."""
    reward_timeout_s: float = 0.0
    """How long one call of the reward may take: `timeouts.group_s` is not set to less while the run goes on."""
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
    """Measured as `limits.validation` says."""
    metrics_host: str = "127.0.0.1"
    metrics_hosts: tuple[str, ...] = ()
    """Further names under which requests may reach it."""
    metrics_port: int | None = None
    """None: no endpoint; 0: any free port."""
    control_host: str = "127.0.0.1"
    control_hosts: tuple[str, ...] = ()
    control_port: int | None = None
    """None: the run takes no orders; 0: any free port. Takes a `run_dir`, where the token is."""
    most_replicas: int = 4096
    """As many there may be when a run is told to have another number of them."""
    silence_s: float = 300.0
    """How long nothing may change before the run says what it waits for."""
    settings: Sequence[tuple[str, str]] = ()
    """(path, value) of the live settings that a resumed run is to have from now on; with `rollout.replicas` among them
    it has `replicas`, and not as many as were wanted last."""
    endpoints: Path | None = None
    """A folder in which every run that is going on says where its metrics are; None: only the run's own says it."""
    sinks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Where the lines of `metrics.jsonl` go besides: options by name (`metrics.sinks.CLIENTS`)."""
    snapshot_every: int = 50_000
    """Events after which the whole state goes into the record; 0: never."""
    trajectories: str = "disk"
    """Where trajectories are kept: `memory`, or `disk`, in the run's directory if it has one."""
    store_policy: StorePolicy = field(default_factory=StorePolicy)
    """How they are kept on disk."""
    force_from: str | None = None
    """With `resume`: the name of the checkpoint to go back to, or `initial` for the initial weights; what came after it
    is put aside. None: nothing is given up, and whatever is missing is refused by name."""
    again: bool = False
    """With `resume`: the launching process resumes the run by itself, not a user."""
    interrupted: str = ""
    """With `again`: why the run could not continue, if its record does not say it."""
    scheduler_restarts: int = 20
    """How often Ray restarts the scheduler's process in one launch while the others continue; needs a `run_dir`. Only
    Ray can count it, because no scheduler runs then. After that, the run begins again from its record."""
    orphan_s: float = 30.0
    """Actors end by themselves so long after the scheduler is gone for good."""
    heartbeat_s: float = 10.0
    """Actors are asked so often for a sign of life; one that misses `missed_beats` is taken for lost. 0: never."""
    missed_beats: int = 3
    rollout_threads: int = 1
    trainer_threads: int = 0
    """CPU threads; 0: as many as there are cores."""
    scorer_threads: Sequence[int] = ()
    """Of each scorer, in the order of `Limits.scorers`; those not named have as many as the trainer."""
    object_store_bytes: int | None = 256 << 20
    """Of Ray's object store, where the run starts a cluster of its own; None: as much as may be."""
    rollout_gpus: float = 0.0
    """Of each replica; above 1 a whole number, together on one node."""
    rollout_spread: bool = False
    """Several GPUs of a replica may be on several nodes: vLLM's Ray executor takes them one by one."""
    trainer_gpus: float = 0.0
    scorer_gpus: float = 0.0
    """Of each."""
    pool_shares: Sequence[float] = ()
    """Of the cluster's GPUs, for each of `limits.pools`; empty: every actor has as much as any other."""

    def __post_init__(self) -> None:
        self.limits.require_replicas(self.replicas)
        validation, given = self.limits.validation, len(self.held_out)
        if validation is not None and validation.rows != given:
            law = f"there are {given} held-out prompts to measure"
            raise ConfigError("limits.validation.rows", validation.rows, law, f"use {given}" if given else "")
        if validation is not None and validation.own_from not in (None, self.replicas):
            law = f"replicas of validation's own come behind the {self.replicas} that generate"
            raise ConfigError("limits.validation.own_from", validation.own_from, law, f"use {self.replicas}")

    def require_scorers(self) -> None:
        """Raises: `ConfigError` where scoring tasks stand apart from the trainer and nothing can score there."""
        tasks = [task for apart in self.limits.scorers() for task in apart]
        if tasks and self.make_scorer is None:
            law = f"{', '.join(tasks)} have a pool without train, and nothing there can score"
            raise ConfigError("Plan.make_scorer", None, law, "set a function that makes a roles.Scorer")

    @property
    def hands_over(self) -> bool:
        """Whether a scorer needs the weights after every train step."""
        return any(task in OF_TRAINED_WEIGHTS for task in self.limits.scored_apart)

    @property
    def rewarded(self) -> bool:
        """Whether replicas reward what they generate; else groups are rewarded in a state of its own."""
        return all(state.name != REWARDING for state in self.limits.added_states)

    @property
    def trajectories_dir(self) -> Path | None:
        """Where trajectories are kept on disk; None: they are in memory."""
        return None if self.run_dir is None or self.trajectories != "disk" else self.run_dir / "trajectories"

    def lives(self) -> list[ReplicaId]:
        """Every replica to be started: those that generate, then those that only validate."""
        return [*range(self.replicas), *self.limits.validators()]
