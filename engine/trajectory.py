"""What a rollout makes and a train step eats: prompts, trajectories and the groups that hold them.

Made by generators, kept by trajectory stores, consumed by trainers. The scheduler never sees one: it gets ids,
lengths, versions and rewards. Plain Python data, so that a user's own generator needs neither torch nor numpy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from engine.ids import GroupId, Version


class Span(NamedTuple):
    """Tokens [start, stop) of a response were sampled under one weights version."""

    start: int
    stop: int
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a data set: the text given to the model and whatever its reward needs."""

    row: int
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """One sampled response, whole or partial.

    `token_ids`, `logprobs` and `loss_mask` have the same length, the number of response tokens. `logprobs` are those of
    the distribution each token was drawn from (after temperature and top-p): the behavior policy. `loss_mask` is 1 for
    tokens the policy sampled and 0 for those put there by a tool or an environment. `spans` cover the response
    without gaps and their versions never fall.
    """

    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    """`stop`, `length` (token budget spent), `truncated` (cut by the deadline policy) or empty while unfinished."""
    reward: float | None = None
    continues: bool = False
    """A further segment of the rollout before it in its group: the same reward, and no vote in the group's mean and
    spread."""

    @property
    def finished(self) -> bool:
        return bool(self.finish_reason)

    def copy(self) -> "Trajectory":
        """One whose lists are its own."""
        return replace(
            self,
            prompt_ids=list(self.prompt_ids),
            token_ids=list(self.token_ids),
            logprobs=list(self.logprobs),
            loss_mask=list(self.loss_mask),
            spans=list(self.spans),
        )

    def extend(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        spans: Sequence[Span],
        given_ids: Sequence[int] = (),
    ) -> None:
        """Append sampled tokens, after those of `given_ids`, which an environment put there.

        `spans` count from the first sampled token; equal neighbors are joined. Given tokens are of the version that
        sampled what follows them, so with `given_ids` there must be sampled tokens.
        """
        given = len(given_ids)
        self.token_ids.extend(given_ids)
        self.logprobs.extend([0.0] * given)
        self.loss_mask.extend([0] * given)
        if given:
            (_, stop, version), *later = [span for span in spans if span.start < span.stop]
            spans = [Span(-given, stop, version), *later]
        offset = len(self.token_ids)
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.loss_mask.extend([1] * len(token_ids))
        for start, stop, version in spans:
            if start == stop:
                continue
            if self.spans and self.spans[-1].version == version:
                self.spans[-1] = Span(self.spans[-1].start, offset + stop, version)
            else:
                self.spans.append(Span(offset + start, offset + stop, version))


@dataclass(slots=True, kw_only=True)
class TrajectoryGroup:
    """Every trajectory of one prompt: the unit of admission, staleness and consumption. A rollout has one trajectory,
    or several segments where its history was rewritten on the way; those after the first have `continues`."""

    group: GroupId
    prompt: Prompt
    trajectories: list[Trajectory]

    @property
    def finished(self) -> bool:
        return all(t.finished for t in self.trajectories)

    @property
    def rollouts(self) -> list[list[Trajectory]]:
        """The trajectories by rollout: each with the segments that continue it. A segment without one before it is
        a rollout of its own."""
        rollouts: list[list[Trajectory]] = []
        for trajectory in self.trajectories:
            if trajectory.continues and rollouts:
                rollouts[-1].append(trajectory)
            else:
                rollouts.append([trajectory])
        return rollouts

    @property
    def tokens(self) -> int:
        """Response tokens over all trajectories."""
        return sum(len(t.token_ids) for t in self.trajectories)

    def versions(self) -> tuple[Version, Version] | None:
        """Oldest and newest version among the tokens; None while there are none."""
        seen = [span.version for t in self.trajectories for span in t.spans]
        return (min(seen), max(seen)) if seen else None
