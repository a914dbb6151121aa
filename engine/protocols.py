"""The two protocols a user implements to have their own generator and trainer scheduled: `Generator` and `Trainer`.

Called by `workers/`, in Ray actors or in one process, which run one `Generator` per replica
and one `Trainer`. The built-in ones are `rollout.generator.ModelGenerator` and `training.model_trainer.ModelTrainer`.
Implementations never see the scheduler: they do one piece of work at a time and return or raise.

Errors: raise `DataFailure` when the prompt or its reward is at fault (budget 2 by default) and anything else for the
rest (budget `infrastructure`, 5 by default). Either costs the group one attempt and never ends the run.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from engine.ids import GroupId, StepId, Version
from engine.trajectory import Prompt, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWork:
    """One prompt group to generate on one replica."""

    group: GroupId
    attempt: int
    """Which order this is for the group, counted from 1; every start, resume and retry has its own."""
    prompt: Prompt
    samples: int
    """Trajectories wanted."""
    partial: TrajectoryGroup | None = None
    """What an earlier attempt left behind: finished siblings are kept, the others continue from their prefixes."""
    truncate: bool = False
    """Generate nothing more: finish with the prefixes of `partial` as they are."""
    save_every_tokens: int = 0
    save: Callable[[TrajectoryGroup], None] | None = None
    """May be called with a copy of the group as it is, prefixes and all, each time its trajectories have grown by about
    `save_every_tokens` each. If the replica is lost, the group resumes from the last saved prefix."""
    progress: Callable[[], None] = lambda: None
    """May be called as often as you like, when the group has come further: it has sampled more, an agent took a turn,
    or a reward is in. Restarts the clock of the group's time limit, as a saved prefix does."""
    held_out: bool = False
    """A validation prompt: one response, measured by its reward and never trained on. Its group is below 0."""


@dataclass(slots=True, kw_only=True)
class Generated:
    """What `Generator.generate` returns: a finished group, or the partial one that an abort left."""

    group: TrajectoryGroup
    oldest_version: Version | None = None
    """Where its tokens outlived the attempt that sampled them elsewhere than in `GroupWork.partial`: the oldest
    version among them."""
    aborted: bool = False
    """True when `pause("abort")`, `abort` or a cancel cut it short; then unfinished trajectories hold their
    prefixes."""


class Generator(Protocol):
    """One rollout replica. `generate` runs concurrently for up to `slots` groups on one event loop; it must not block
    it."""

    async def generate(self, work: GroupWork) -> Generated:
        """Sample `work.samples` trajectories with behavior log-probs, versions and rewards."""

    async def abort(self, groups: Sequence[GroupId]) -> None:
        """Make `generate` of these groups return at once with `aborted=True` and their prefixes. Unknown ids are
        ignored."""

    async def truncate(self, groups: Sequence[GroupId]) -> None:
        """Make `generate` of these groups return at once as finished, unfinished trajectories marked `truncated`."""

    async def pause(self, mode: str) -> None:
        """Return once no token will be sampled until `resume`.

        `keep` freezes requests where they are; `abort` makes every running `generate` return its partial first;
        `wait` lets them run to their end first.
        """

    async def stage(self, version: Version, weights: Any) -> None:
        """Bring the weights of a version into this replica's memory while it generates."""

    async def install(self, version: Version) -> None:
        """Swap the staged weights in. Called only between `pause` and `resume`; on error the old weights stay."""

    async def resume(self) -> None:
        """Sample again."""

    async def close(self) -> None:
        """Give back what it holds."""


@runtime_checkable
class Fallible(Protocol):
    """A generator, or work of an added state, that notices by itself that it cannot continue; one that does not is
    found out by its failures."""

    async def failed(self) -> str:
        """Return once it cannot continue, with the reason: its process is then replaced. Never while all is well."""


@runtime_checkable
class Sleeper(Protocol):
    """A generator (or a backend) that can give its memory back while others use its hardware. One that cannot is
    paused all the same."""

    async def sleep(self) -> None:
        """Give back what generating needs. Called only when paused with nothing running; staging continues. On error it
        is as awake as before."""

    async def wake(self) -> None:
        """Take it again, with the weights it had; still paused. On error it sleeps on, and may be woken again."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """The groups of one train step, in the order the scheduler chose, with each group's staleness in train steps."""

    step: StepId
    groups: list[TrajectoryGroup]
    staleness: list[int]
    scores: Mapping[str, "Scores"] = field(default_factory=dict)
    """By scoring task, for `train`: those that a scorer of its own has made. The others are the trainer's to make."""


Scores = Sequence[Sequence[Sequence[float]]]
"""For each group and each of its trajectories: the log-prob of every token whose `loss_mask` is 1, in order."""


class Trainer(Protocol):
    """The training side. Calls happen one at a time: those of blocking methods on a thread, those of coroutine
    functions on the event loop, which they must not block."""

    def score(self, batch: Batch, task: str) -> Awaitable[None] | None:
        """Scoring before the update, e.g. `old_logprobs`: log-probs under the current weights; kept for `train`."""

    def train(self, batch: Batch) -> Awaitable[dict[str, float]] | dict[str, float]:
        """One outer step over the batch (its minibatches included). Returns metrics; names become `metrics.jsonl`
        keys. A name that is no text and a value that is no real number are left out, with a warning in the log.

        A step that raises is ordered again, so it must leave the weights as they were. If it cannot, raise
        `errors.TrainerSpoiled`: this process is replaced, and the next one continues from the newest checkpoint."""

    def weights(self) -> Any:
        """The current weights in a form `Generator.stage` takes, or a coroutine that returns them. Must be a copy:
        training continues meanwhile."""

    def save(self, directory: str, step: StepId) -> None:
        """Write a checkpoint of everything after `step` train steps into an empty directory. Always blocking."""


@runtime_checkable
class Offloadable(Protocol):
    """A trainer with blocking methods that can leave its accelerator to the replicas of its pool and come back.
    `weights` and `save` are called in between as well; one that cannot leave keeps its memory."""

    def offload(self) -> None:
        """Give the accelerator's memory back, and keep what was there elsewhere. On error nothing has changed."""

    def onload(self) -> None:
        """Take it again. On error nothing has changed, and it may be called again."""


@runtime_checkable
class Restorable(Protocol):
    """A trainer that can take up what an earlier process saved."""

    def load(self, directory: str) -> None:
        """Become the trainer that `save` wrote into this directory. Called before anything else."""


@runtime_checkable
class Closable(Protocol):
    """A trainer that holds more than memory, such as processes of its own."""

    def close(self) -> None:
        """Give it back. Called once, from any thread, when the trainer's process ends or is replaced; a call that is
        still running may raise."""


class Scorer(Protocol):
    """Scores batches on hardware of its own, while the trainer trains. Calls happen as those of a `Trainer`."""

    def score(self, batch: Batch, task: str) -> Awaitable[Scores] | Scores:
        """`old_logprobs`: under the weights loaded last, or those the run began with; `ref_logprobs`: under the
        reference model."""

    def load(self, weights: Any) -> Awaitable[None] | None:
        """Take what `Trainer.weights` gave. Called before a score under other weights than the last."""
