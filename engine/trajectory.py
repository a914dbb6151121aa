"""Prompts, trajectories and trajectory groups.

Generators make them, trajectory stores keep them and trainers consume them. The scheduler gets only their ids, lengths,
versions and rewards. They are plain Python data, so that a user's generator needs neither torch nor numpy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from engine.ids import GroupId, Version


class Span(NamedTuple):
    """Tokens [start, stop) of a response were sampled under one weights version."""

    start: int
    stop: int
    version: Version


SOURCES = "sources"
"""The key of a train step's figures by data source, among its metrics."""


class StepReward(NamedTuple):
    """A part of a response's reward that belongs to one of its tokens. It is earned with that token."""

    position: int
    """Index into the response's tokens."""
    reward: float


class NoAnswer(float):
    """The value of a reward function that found no answer in a response. It is a number; `NoAnswer()` is 0.0. The
    metric `unparsable_share` counts such responses."""


class Scored(float):
    """The value of a reward function that also says how it was found. Each of its figures becomes the metric
    `reward_NAME_FIGURE` of the function NAME: the mean over the responses that have it."""

    figures: Mapping[str, float]

    def __new__(cls, value: float, figures: Mapping[str, float]) -> "Scored":
        made = super().__new__(cls, value)
        made.figures = figures
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a data set: the text for the model and the fields that its reward needs."""

    row: int
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    """The name of its data source in the configuration; empty if there is only one, without a name."""

    def copy(self) -> "Prompt":
        """A copy with new fields. It shares their values, except dicts and lists."""
        fields = _copied(dict(self.fields), {}) if self.fields else {}
        return Prompt(row=self.row, text=self.text, fields=fields, source=self.source)


def _copied(value: Any, made: dict[int, Any]) -> Any:
    """`made`: the copy of each dict and list so far, by its id."""
    if type(value) not in (dict, list) or id(value) in made:
        return made.get(id(value), value)
    copy = made[id(value)] = value.copy()
    for key, inner in copy.items() if type(copy) is dict else enumerate(copy):
        copy[key] = _copied(inner, made)
    return copy


RIGHT = 1.0
"""A response is right if its reward, or each of the reward functions that say whether it is right, is at least this."""
MAX_TURNS = "max_turns"
"""The finish reason of an episode that reached its limit of turns."""


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """One sampled response, whole or partial.

    `token_ids`, `logprobs` and `loss_mask` have the same length, the number of response tokens. `logprobs` come from
    the distribution from which each token was drawn (after temperature and top-p): the behavior policy. `loss_mask` is
    1 for tokens that the policy sampled and 0 for tokens that a tool or an environment inserted. `spans` cover the
    response without gaps, and their versions never fall.
    """

    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    """`stop`, `length` (the token budget is used up), `max_turns`, `truncated` (cut by the deadline policy); empty
    while unfinished."""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    """The value of each of several reward functions by its name, without its weight, and the figures of `Scored`."""
    step_rewards: list[StepReward] = field(default_factory=list)
    """The parts of `reward` that belong to single tokens, in the order of their positions; the rest belongs to the
    outcome. Of several segments, only the last has any."""
    figures: dict[str, float] = field(default_factory=dict)
    """Figures of a multi-turn rollout by name, such as `turns` and `tool_errors`; the same in all its segments."""
    shown_prompt: str = ""
    """What samples show as the prompt; empty: the prompt of the group."""
    unparsable: bool = False
    """Whether a reward function found no answer in it (`NoAnswer`)."""
    continues: bool = False
    """Whether it continues the previous trajectory of its group as another segment of the same rollout. It has the same
    reward and does not count in the group's mean and spread."""
    routes: list[bytes] = field(default_factory=list)
    """With `trainer.router_replay`: the experts that computed each token of prompt and response but the last one; empty
    bytes where they are unknown. `training.expert_routes` has the form."""

    @property
    def finished(self) -> bool:
        return bool(self.finish_reason)

    def is_right(self, correct: Sequence[str] = ()) -> bool:
        """Whether the response is right: at least one of the reward functions `correct` applies to it, and all that do
        gave it at least 1. Without them, or if the rollout gave its own reward: whether its reward is at least 1."""
        values = [self.reward] if not correct or not self.reward_parts else map(self.reward_parts.get, correct)
        known = [value for value in values if value is not None]
        return bool(known) and min(known) >= RIGHT

    def copy(self) -> "Trajectory":
        """A copy with its own lists. Names every field, because `dataclasses.replace` takes four times as long."""
        return Trajectory(
            prompt_ids=list(self.prompt_ids),
            token_ids=list(self.token_ids),
            logprobs=list(self.logprobs),
            loss_mask=list(self.loss_mask),
            spans=list(self.spans),
            text=self.text,
            finish_reason=self.finish_reason,
            reward=self.reward,
            reward_parts=dict(self.reward_parts),
            step_rewards=list(self.step_rewards),
            figures=dict(self.figures),
            shown_prompt=self.shown_prompt,
            unparsable=self.unparsable,
            continues=self.continues,
            routes=list(self.routes),
        )

    def extend(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        spans: Sequence[Span],
        given_ids: Sequence[int] = (),
        routes: Sequence[bytes] = (),
    ) -> None:
        """Append `given_ids`, which an environment inserted, then the sampled tokens.

        `spans` count from the first sampled token; neighbors of one version are merged. Given tokens get the version of
        the sampled tokens after them, so `given_ids` requires sampled tokens. `routes` count from the first token of
        the prompt; those that are known stay.
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
        if routes:
            self.routes += routes[len(self.routes) : len(self.prompt_ids) + len(self.token_ids) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """The outcome of a multi-turn rollout, with more details than its reward."""

    reward: float | None = None
    """The whole reward, including `turn_rewards`; None if the rollout gives none."""
    turn_rewards: Sequence[float | None] = ()
    """The parts of `reward` that belong to the answers of the model, in their order; None: an answer has none."""
    finish_reason: str = ""
    """Empty: use that of the last answer."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Figures of the rollout by name: the metrics `agent_<name>`."""
    shown_prompt: str = ""
    """What samples show as the prompt; empty: the row's prompt."""


RolloutReturn: TypeAlias = RolloutResult | float | None
"""What a rollout or an agent may return: its result, its reward, or nothing."""


@dataclass(slots=True, kw_only=True)
class TrajectoryGroup:
    """All trajectories of one prompt: the unit of admission, staleness and consumption. A rollout is one trajectory, or
    several segments if its history was rewritten; each segment after the first has `continues`."""

    group: GroupId
    prompt: Prompt
    trajectories: list[Trajectory]

    @property
    def finished(self) -> bool:
        return all(t.finished for t in self.trajectories)

    @property
    def rollouts(self) -> list[list[Trajectory]]:
        """The segments of each rollout. If the first trajectory has `continues`, it still starts a rollout."""
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
        return sum([len(t.token_ids) for t in self.trajectories])

    def versions(self) -> tuple[Version, Version] | None:
        """Oldest and newest version among the tokens; None while there are none."""
        seen = [span.version for t in self.trajectories for span in t.spans]
        return (min(seen), max(seen)) if seen else None
