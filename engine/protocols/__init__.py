"""Protocols that a user implements to schedule their own generator and trainer: `Generator` and `Trainer`; and what
the functions of a user's own objective get (`objectives.py`).

The workers call them, in Ray actors or in one process: one `Generator` per replica and one `Trainer`. The built-in
ones are `rollout.generator.ModelGenerator` and `training.model_trainer.ModelTrainer`. Implementations never see
the scheduler: they do one piece of work at a time and return or raise. Classes that a configuration names
(`rollout.backend`, `trainer.backend`) are made with a `GeneratorSetup` or a `TrainerSetup`, and their `arguments`.

Errors: raise `DataFailure` when the prompt or its reward is at fault (budget 2 by default), and any other exception for
other failures (budget `infrastructure`, 5 by default). Each uses one attempt of the group; neither ends the run.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from engine.errors import DataFailure, TrainerSpoiled
from engine.ids import GroupId, ReplicaId, StepId, Version
from engine.protocols.objectives import AdvantageTerms, Grouping, ImportanceTerms, LossTerms, needs
from engine.trajectory import Prompt, RolloutResult, Span, StepReward, Trajectory, TrajectoryGroup

__all__ = [
    "SLOTS",
    "SamplingSettings",
    "AdvantageTerms",
    "Batch",
    "CallFigures",
    "Closable",
    "DataFailure",
    "Explainable",
    "Fallible",
    "Generated",
    "Generator",
    "GeneratorSetup",
    "GroupWork",
    "Grouping",
    "ImportanceTerms",
    "LossTerms",
    "MeasuresCache",
    "MeasuresCalls",
    "Offloadable",
    "Prompt",
    "Prompts",
    "PublishedWeights",
    "ReportsProgress",
    "Restorable",
    "RolloutFigures",
    "RolloutResult",
    "Scorer",
    "Scores",
    "Sleeper",
    "Span",
    "StartsFromWeights",
    "StepReward",
    "Trainer",
    "TrainerSetup",
    "TrainerSpoiled",
    "Trajectory",
    "TrajectoryGroup",
    "needs",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWork:
    """One prompt group to generate on one replica. Its functions may be called on any thread."""

    group: GroupId
    attempt: int
    """Number of this attempt, counted from 1. Every start, resume and retry has a new number."""
    prompt: Prompt
    samples: int
    """Number of trajectories to generate."""
    partial: TrajectoryGroup | None = None
    """Trajectories of an earlier attempt. Keep the finished ones and continue the others from their prefixes."""
    truncate: bool = False
    """Generate nothing more: finish with the prefixes of `partial` as they are."""
    save_every_tokens: int = 0
    save: Callable[[TrajectoryGroup], None] | None = None
    """Call it with a copy of the group, prefixes included, each time its trajectories have grown by about
    `save_every_tokens` each (optional). If the replica is lost, the group resumes from the last saved prefix."""
    progress: Callable[[], None] = lambda: None
    """Call it on progress, as often as you like (optional): more tokens, an agent's turn, a reward. It restarts the
    group's time limit, as a saved prefix does."""
    finished: Callable[[int], None] = lambda count: None
    """Call it when trajectories have ended, with the number of the group's trajectories that have ended so far
    (optional). The replica then gets the next group before the last trajectory of this one ends."""
    held_out: bool = False
    """A validation prompt: one response, measured by its reward and never trained on. Its group is below 0."""
    validation_set: str = ""
    """The name of its validation set; empty: it is trained on."""


@dataclass(slots=True, kw_only=True)
class Generated:
    """What `Generator.generate` returns: a finished group, or the partial one that an abort left."""

    group: TrajectoryGroup
    oldest_version: Version | None = None
    """Oldest version among tokens that were kept from an earlier attempt outside `GroupWork.partial`; None without such
    tokens."""
    aborted: bool = False
    """True when `pause("abort")`, `abort` or a cancel cut it short; then unfinished trajectories hold their
    prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How to sample. `temperature` 0 is greedy. `top_p` 1 keeps every token. `max_tokens` bounds the whole response,
    including a prefix."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    """Token ids that end a response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSetup:
    """What the engine tells a generator of `rollout.backend` when it makes it: `MyGenerator(setup, **arguments)`."""

    model: str
    """Directory or hub name of the initial weights, which are version 0, and of the tokenizer."""
    replica: ReplicaId
    slots: int
    """Groups that run at once."""
    samples: int
    """Trajectories of a group, except of validation rows, which have one."""
    seed: int
    device: str
    """`rollout.device`: auto, cpu, cuda or cuda:N."""
    sampling: Mapping[str, SamplingSettings]
    """How to sample, by the name of the validation set (`GroupWork.validation_set`); empty: for training."""
    prompt_ids: Callable[[Prompt], list[int]]
    """The token ids of a prompt, as the built-in generator reads it: with the chat template and system prompt."""


class Generator(Protocol):
    """One rollout replica. `generate` runs concurrently for up to `slots` groups on one event loop; it must not block
    it. With `GroupWork.finished`, more groups run, but their unfinished trajectories are at most `slots * samples`."""

    async def generate(self, work: GroupWork) -> Generated:
        """Sample `work.samples` trajectories with behavior log-probs, versions and rewards."""

    async def abort(self, groups: Sequence[GroupId]) -> None:
        """Make `generate` of these groups return at once with `aborted=True` and their prefixes. Unknown ids are
        ignored."""

    async def truncate(self, groups: Sequence[GroupId]) -> None:
        """Make `generate` of these groups return at once as finished, with unfinished trajectories marked
        `truncated`."""

    async def pause(self, mode: str) -> None:
        """Return once no token will be sampled until `resume`.

        `keep` freezes requests where they are; `abort` first makes every running `generate` return its partial result;
        `wait` first lets them run to their end.
        """

    async def stage(self, version: Version, weights: Any) -> None:
        """Bring the weights of a version into this replica's memory while it generates."""

    async def install(self, version: Version) -> None:
        """Swap the staged weights in. Called only between `pause` and `resume`; on error the old weights stay."""

    async def resume(self) -> None:
        """Sample again."""

    async def close(self) -> None:
        """Release all resources."""


@runtime_checkable
class Fallible(Protocol):
    """A generator, or the work of an added state, that can report that it cannot continue. The engine notices others
    only by their failures."""

    async def failed(self) -> str:
        """Return the reason once it cannot continue; the engine then replaces its process. Must not return before."""


SLOTS = "rollout.slots"
"""The setting of calls that a group makes while it has a slot, such as those of an agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFigures:
    """Calls of one of the user's functions, such as a reward or an agent, in one process."""

    function: str
    """Its name in messages, such as `reward slow`."""
    at_once: int
    """Maximum number of calls at once; with the setting `SLOTS`, for the groups that run now."""
    setting: str
    """The setting that limits them; empty: none does."""
    groups: int
    """Groups and validation rows that wait for calls now."""
    queued: int
    """Calls that wait until another one ends."""
    calls: int
    """Calls that have ended so far."""
    seconds: float
    """Sum of their durations."""
    running_s: float
    """Seconds since the start of the oldest running call; 0 if none runs."""
    held_s: float = 0.0
    """Part of `seconds`: of calls that awaited nothing, and so held the thread that they share with other calls."""


@runtime_checkable
class MeasuresCalls(Protocol):
    """A generator, or the work of an added state, that measures its calls of the user's functions. The engine then says
    which function groups wait for."""

    def call_figures(self) -> Sequence[CallFigures]:
        """The present figures, one entry for each function."""

    def watch_calls(self, changed: Callable[[], None]) -> None:
        """Call `changed` on the event loop whenever a group begins to wait, or a call ends."""


@runtime_checkable
class MeasuresCache(Protocol):
    """A generator that knows how full its KV cache is. A concurrency policy may limit its groups accordingly."""

    def cache_used(self) -> float:
        """Share of the KV cache in use, from 0 to 1. Called on the event loop."""


@runtime_checkable
class Sleeper(Protocol):
    """A generator (or a backend) that can free its memory while others use its hardware. The engine
    only pauses a generator without these methods."""

    async def sleep(self) -> None:
        """Free the memory that generating needs. Called only when paused with nothing running; staging continues. After
        an error it must be awake, as before."""

    async def wake(self) -> None:
        """Allocate the memory again, with the same weights; stay paused. After an error it must still sleep, and `wake`
        may be called again."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """The groups of one train step, in the order the scheduler chose, with each group's staleness in train steps."""

    step: StepId
    groups: list[TrajectoryGroup]
    staleness: list[int]
    scores: Mapping[str, "Scores"] = field(default_factory=dict)
    """For `train`: the scores of each task that a separate scorer does. The trainer does the other tasks itself."""


Scores = Sequence[Sequence[Sequence[float]]]
"""For each group and each of its trajectories: the log-prob of every token whose `loss_mask` is 1, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """A version in the weights store, which an added state inspects before any replica gets it."""

    version: Version
    steps: int
    """Train steps in it."""
    weights: Any
    """What the trainer's `weights` returned; of the built-in trainer, the tensors by name. Read-only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSetup:
    """What the engine tells a trainer of `trainer.backend` when it makes it: `MyTrainer(setup, **arguments)`."""

    model: str
    """Directory or hub name of the initial weights."""
    device: str
    """`trainer.device`: auto, cpu, cuda or cuda:N."""
    seed: int
    temperature: float
    """At which responses are sampled: behavior log-probs are after it."""
    policy_mini_batch_size: int
    """Groups of an optimizer step; 0: all of the batch."""
    max_steps: int | None
    """Train steps of the run; None: until the data ends."""


class Trainer(Protocol):
    """The training side. Methods are called one at a time: blocking methods on a thread, coroutine functions on the
    event loop, which they must not block."""

    def score(self, batch: Batch, task: str) -> Awaitable[None] | None:
        """Score the batch before the update; keep the result for `train`. `old_logprobs`: under the current weights."""

    def train(self, batch: Batch) -> Awaitable[dict[str, float]] | dict[str, float]:
        """One outer step over the batch (its minibatches included). Returns metrics; names become `metrics.jsonl`
        keys. Names that are not strings and values that are not real numbers are skipped, with a warning in the log.
        None: no metrics. Any other result counts as `errors.TrainerSpoiled`: the weights may contain the step.

        A step that raises is ordered again, so it must leave the weights as they were. If it cannot, raise
        `errors.TrainerSpoiled`: this process is replaced, and the next one continues from the newest checkpoint."""

    def weights(self) -> Any:
        """The current weights in a form that `Generator.stage` accepts, or a coroutine that returns them. Must be a
        copy: training continues meanwhile."""

    def save(self, directory: str, step: StepId) -> None:
        """Write a checkpoint of everything after `step` train steps into an empty directory. Always blocking."""


@runtime_checkable
class Offloadable(Protocol):
    """A trainer with blocking methods that can free its accelerator for the replicas of its pool. `weights` and `save`
    are also called while it is offloaded. A trainer without these methods keeps its memory."""

    def offload(self) -> None:
        """Move the data to other memory and free the accelerator's. An error must leave everything unchanged."""

    def onload(self) -> None:
        """Move the data back. An error must leave everything unchanged; `onload` may be called again."""


@runtime_checkable
class Restorable(Protocol):
    """A trainer that can load a checkpoint that an earlier process saved."""

    def load(self, directory: str) -> None:
        """Restore the state that `save` wrote into this directory. Called before any other method."""


@runtime_checkable
class StartsFromWeights(Protocol):
    """A trainer that can continue from published weights if a run without a checkpoint loses it."""

    def start_from(self, weights: Any, optimizer_steps: int) -> None:
        """Take over what `weights` returned earlier, after this number of optimizer updates; other state begins anew.
        Called before any other method."""


@runtime_checkable
class ReportsProgress(Protocol):
    """A trainer or a scorer that reports progress within a call. Each report restarts the time limit of the order, so a
    long call does not count as hung."""

    def watch_progress(self, progressed: Callable[[], None]) -> None:
        """Call `progressed` from now on whenever a call has progressed, on any thread and as often as you like: after
        a micro-batch, a tensor, a file. Called once, before `load` and every other method."""


class RolloutFigures(NamedTuple):
    """Figures of one rollout in the batch that was trained last; None: unknown."""

    advantage: float | None = None
    logprob_gap: float | None = None
    """Largest |log-prob under the trainer's weights - behavior log-prob| of a trained token."""


@runtime_checkable
class Explainable(Protocol):
    """A trainer that knows figures of single rollouts, which are kept with the samples of a run."""

    def rollout_figures(self) -> Awaitable[Sequence[Sequence[RolloutFigures]]] | Sequence[Sequence[RolloutFigures]]:
        """For each group of the batch trained last, the figures of each of its rollouts (`TrajectoryGroup.rollouts`).
        Called after `train`."""


@runtime_checkable
class Closable(Protocol):
    """A trainer, or the work of an added state, that holds resources other than memory, such as processes."""

    def close(self) -> None:
        """Release the resources. Called once, from any thread, when its process ends or is replaced; a call that is
        still running may raise."""


class Scorer(Protocol):
    """Scores batches on separate hardware while the trainer trains. Methods are called as those of a `Trainer`."""

    def score(self, batch: Batch, task: str) -> Awaitable[Scores] | Scores:
        """Compute log-probs. `old_logprobs`: under the weights loaded last, or those that the run began with;
        `ref_logprobs`: under the reference model."""

    def load(self, weights: Any) -> Awaitable[None] | None:
        """Load what `Trainer.weights` returned. Called before `score` whenever the weights have changed."""


# -- prompts -----------------------------------------------------------------------------------------------------------


class Prompts(Protocol):
    """A source of prompts. Group i is the i-th prompt drawn; the same i must always give the same prompt."""

    def draw(self, first: GroupId, count: int) -> tuple[int, bool]:
        """Draw the prompts `first`, `first + 1`, …: how many there are, at most `count`, and whether the source is now
        exhausted.

        It may return fewer than `count`; the rest is ordered again. An attempt fails if it raises, or returns more
        than `count`, or 0 without being exhausted; `scheduler.infrastructure_attempts` failures in a row end the run.
        It runs on a separate thread, so it may block. Meanwhile `prompt` may be called for earlier prompts.
        """

    def prompt(self, group: GroupId) -> Prompt:
        """The prompt of a drawn group. Raises: `DataFailure` if it cannot be read. The run waits for it, and stops if
        it exceeds `timeouts.draw_s`."""
