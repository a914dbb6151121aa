"""`Plan`: everything that defines a run, as values and functions that are sent to its processes.

`plans.configured_plan.plan_of` makes it from a configuration, `runtime.local.run` from its arguments. Users with a
custom generator and trainer make it themselves. `actors.launch.start` runs it.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.events import RunInterrupted
from engine.gpu_request import GpuRequest
from engine.ids import NO_VERSION, GroupId, ReplicaId, StepId, Version
from engine.protocols import Generator, Prompts, Scorer, Trainer
from engine.states.limits import REWARDING, Limits
from engine.storage.durable_trajectories import StorePolicy
from engine.storage.samples import SamplePolicy
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup

Answer = Callable[[Prompt, Trajectory], Any]
"""Extracts the answer of a response, for the majority vote; None: it has none. Two answers with the same text are one.
"""
Work = Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup]]
"""The work on a group in a state. It returns the group. After generation it may change rewards; before generation, the
group has no trajectories, and it may change the text and the fields of the prompt."""
Inspection = Callable[[Any], Awaitable[str | None]]
"""The work of a state of train steps, on a `Batch` or `PublishedWeights`: why it refuses them; None: they pass."""
OF_TRAINED_WEIGHTS = ("old_logprobs",)
"""Tasks that need the trained weights from before the step that they score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What a replica runs: a generator and, if validation prompts are measured, one that answers them."""

    generator: Generator
    evaluator: Generator | None = None
    """Samples as each validation set asks for it (`GroupWork.validation_set`)."""
    answers: Mapping[str, Answer] = field(default_factory=dict)
    """By the name of the validation set: extracts the answers that a majority vote counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Redo:
    """A train step to retrain from its batch in the trajectory store, in its original order."""

    step: StepId
    groups: tuple[GroupId, ...]
    staleness: tuple[int, ...]
    reports: bool = False
    """The trainer's metrics for the step were lost, so they are reported again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Where a new trainer begins: a checkpoint's directory, published weights, or with neither the initial weights."""

    steps: int
    """Train steps in the checkpoint or the weights."""
    optimizer_steps: int = 0
    """Optimizer updates in those steps, for learning rate schedules."""
    checkpoint: str | None = None
    version: Version = NO_VERSION
    """Published version to begin from; -1: the checkpoint, or the initial weights."""
    weights: Any = None
    """The weights of `version`, once they are loaded."""
    redo: tuple[Redo, ...] = ()
    """Later steps to retrain before the trainer takes orders."""
    order: int = -1
    """The number of the order that starts the trainer; -1: the launch starts it, without an order."""

    @property
    def reaches(self) -> int:
        """Train steps in the weights that the trainer has before it takes orders."""
        return self.steps + len(self.redo)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedSettings:
    """Weights are sent over `torch.distributed`."""

    backend: str
    bucket_bytes: int
    timeout_s: float
    """Seconds that either side waits for the other at any point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsWire(DistributedSettings):
    """The trainer's process sends weights to the workers of vLLM engines. `timeout_s` does not limit NCCL."""

    limit_s: float
    """Seconds that an engine may take for one call. Then the process group is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Where a server of the run listens."""

    port: int = 0
    """0: any free port."""
    host: str = "127.0.0.1"
    hosts: Sequence[str] = ()
    """Additional host names for requests to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """How a run is resumed."""

    settings: Sequence[tuple[str, str]] = ()
    """(path, value) of live settings to change. If `rollout.replicas` is among them, the run has `Plan.replicas`
    replicas; otherwise as many as were last wanted."""
    force_from: str | None = None
    """Name of the checkpoint to go back to, or `initial` for the initial weights; later data is set aside. None: the
    run resumes without loss, and a resume with missing data is refused."""
    again: bool = False
    """The launching process resumed the run by itself, not a user."""
    interrupted: RunInterrupted | None = None
    """With `again`: why the run could not continue, if its record does not say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """How the actors of a run on Ray notice that another one is gone."""

    scheduler_restarts: int = 20
    """How often Ray restarts the scheduler's process in one launch while the other processes continue; needs a
    `run_dir`. Only Ray can count this, because no scheduler runs then. After that, the run is relaunched from its
    record."""
    orphan_s: float = 30.0
    """Seconds after which actors end by themselves if the scheduler has ended and is not restarted."""
    heartbeat_s: float = 10.0
    """Seconds between heartbeats; an actor that misses `missed_beats` of them is lost. 0: no heartbeats."""
    missed_beats: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """CPU threads of each process of a kind; 0: one for each core."""

    replica: int = 1
    trainer: int = 0
    scorers: Sequence[int] = ()
    """In the order of `Limits.scorers`; the others have as many as the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run. Each `make_` function is called in the process that needs its result, on a thread, so it may block."""

    limits: Limits
    samples: int
    make_rollout: Callable[[ReplicaId], Rollout]
    make_sharing_rollout: Callable[..., Rollout] | None = None
    """In place of `make_rollout` if a replica has a part of a GPU: also gets that part, as `gpu_part`, so that it takes
    its part of the memory. None: `make_rollout`."""
    make_trainer: Callable[..., Trainer]
    """Without arguments, unless there are several `gpus.trainer_nodes`."""
    make_prompts: Callable[[], Prompts]
    replicas: int = 1
    slots: int = 8
    prefix_every_tokens: int = 1024
    """A replica stores a group's prefixes after this many new tokens of a trajectory; 0: only at an abort."""
    cache_every_s: float = 0.0
    """Seconds between two reports of a replica on its KV cache, while groups run; 0: none."""
    make_gateway: Callable[[], Any] | None = None
    """Makes the `gateway.agents.GatewayParts`, for generators that run agents; None: no gateway."""
    restore_trainer: Callable[[Trainer, Restore], None] | None = None
    """Restores a new trainer to the state of a lost one; None: a lost trainer cannot be replaced once a step is
    trained."""
    check_weights: Callable[[Any], None] | None = None
    """Raises the reason why no replica could install the weights that the trainer returned; None: they are not
    checked before they are published."""
    make_scorer: Callable[[tuple[str, ...]], Scorer] | None = None
    """Makes the scorer of these tasks in a separate pool (`Limits.scorers`); None: the trainer scores."""
    make_inspection: Callable[[str], Inspection] | None = None
    """Makes what a simulation does in place of the work of an added state of train steps: it has no tensors and no
    text. None: the work itself."""
    make_work: Callable[[str], Work | None] | None = None
    """Makes work for an added state, which replaces the `work` of its policy. If this is None or returns None, the
    policy's `work` is used; if the policy has none, groups pass unchanged."""
    described: tuple[str, ...] | None = None
    """Columns of a row that policies and added states see, with the lengths and the named rewards of its group; None:
    none asks, so events have only figures."""
    state_timeout_s: float | None = None
    """Seconds that the work on one group may take; in the state `rewarding`, each call of the reward."""
    reward_timeout_s: float = 0.0
    """Seconds that one call of the reward may take. `timeouts.group_s` cannot be set below it in a running run."""
    transport: DistributedSettings | None = None
    """How published weights reach the replicas of a run on Ray: with a `WeightsWire` from the trainer's process, else
    through the weights store. None: through shared memory and Ray's object store."""
    resume: bool = False
    """Resume the run in `run_dir`."""
    resumption: Resumption = field(default_factory=Resumption)
    """With `resume`: how."""
    policies: Mapping[str, str] = field(default_factory=dict)
    run_dir: Path | None = None
    """Directory for record, metrics, checkpoints and logs; None: nothing is stored."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The complete configuration, for the record."""
    held_out: Sequence[Prompt] = ()
    """The validation prompt of each row that `limits.validation` measures."""
    correct: tuple[str, ...] = ()
    """The reward functions that say whether a response is right; empty: its reward does."""
    metrics: ServerAddress | None = None
    """The metrics endpoint; None: no endpoint."""
    control: ServerAddress | None = None
    """The control endpoint; None: no control. Needs a `run_dir`, which holds the token."""
    most_replicas: int = 4096
    """Maximum number of replicas after `engine scale`."""
    silence_s: float = 300.0
    """Seconds without a change after which the run reports what it waits for."""
    endpoints: Path | None = None
    """Folder in which each running run announces its metrics endpoint; None: only in the run's directory."""
    sinks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Additional sinks for the lines of `metrics.jsonl`: options by name (`metrics.sinks.CLIENTS`)."""
    snapshot_every: int = 12_500
    """Number of events between two snapshots in the record; 0: none."""
    trajectories: str = "disk"
    """Where trajectories are stored: `memory`, or `disk`, in the run's directory if there is one."""
    store_policy: StorePolicy = field(default_factory=StorePolicy)
    """How the store uses its disk."""
    sample_policy: SamplePolicy = field(default_factory=SamplePolicy)
    """Which samples are kept in the run's directory, if there is one."""
    liveness: Liveness = field(default_factory=Liveness)
    threads: Threads = field(default_factory=Threads)
    gpus: GpuRequest = field(default_factory=GpuRequest)
    object_store_bytes: int | None = 256 << 20
    """Size of Ray's object store in a cluster that the run starts; None: as large as possible."""

    def __post_init__(self) -> None:
        self.limits.require_replicas(self.replicas)
        validation, given = self.limits.validation, len(self.held_out)
        if validation is not None and validation.rows != given:
            law = f"there are {given} validation prompts to measure"
            raise ConfigError("limits.validation.rows", validation.rows, law, f"use {given}" if given else "")

    @property
    def rollout_maker(self) -> Callable[[ReplicaId], Rollout]:
        """What makes a replica's generators, in its process."""
        if self.make_sharing_rollout is None or not self.shares_gpus:
            return self.make_rollout
        return partial(self.make_sharing_rollout, gpu_part=self.gpus.replica_gpus)

    def require_scorers(self) -> None:
        """Raises: `ConfigError` if scoring tasks have a separate pool but no scorer can be made."""
        tasks = [task for apart in self.limits.scorers() for task in apart]
        if tasks and self.make_scorer is None:
            law = f"{', '.join(tasks)} have a pool without train, so a scorer is needed"
            raise ConfigError("Plan.make_scorer", None, law, "set a function that makes an engine.protocols.Scorer")

    @property
    def hands_over(self) -> bool:
        """Whether a scorer needs the weights after every train step."""
        return any(task in OF_TRAINED_WEIGHTS for task in self.limits.scored_apart)

    @property
    def rewarded(self) -> bool:
        """Whether replicas compute rewards; otherwise an added state does."""
        return all(state.name != REWARDING for state in self.limits.added_states)

    @property
    def trajectories_dir(self) -> Path | None:
        """Directory of trajectories on disk; None: they are in memory."""
        return None if self.run_dir is None or self.trajectories != "disk" else self.run_dir / "trajectories"

    @property
    def guests(self) -> tuple[ReplicaId, ...]:
        """Replicas that share the GPUs of the trainer's ranks, with which they take turns."""
        shares = self.gpus.ranks > 1 and self.gpus.trainer_gpus > 0 and self.gpus.replica_gpus > 0
        return self.limits.beside_trainer if shares else ()

    @property
    def shares_gpus(self) -> bool:
        """Whether replicas may be on a GPU with other processes."""
        return 0 < self.gpus.replica_gpus < 1 or bool(self.guests)

    def lives(self) -> list[ReplicaId]:
        """Every replica to start: those that generate, then those that only validate."""
        return [*range(self.replicas), *self.limits.validators()]
