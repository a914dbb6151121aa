"""`Workload`: how long the work of a run takes, as a file that a person can read and edit.

`engine whatif RUN --save FILE` writes one from a record; others are written by hand. `simulation.workload_dice` draws
from it. A figure may be one number, or several: the smallest, ..., the largest, at equal shares of the cases (the
quantiles). Reads only the file that it is given.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import AfterValidator, Field, ValidationError, model_validator

from engine.config.loading import parse_config, read_yaml
from engine.config.schema import Config
from engine.errors import ConfigError
from engine.section import Section


def _ascending(value: "float | list[float]") -> "float | list[float]":
    given = value if isinstance(value, list) else [value]
    if any(one < 0 for one in given) or any(one > other for one, other in pairwise(given)):
        raise ValueError("must be at least 0, and a list must not fall: smallest, ..., largest")
    return value


Figure = Annotated[float | Annotated[list[float], Field(min_length=2, max_length=101)], AfterValidator(_ascending)]
"""A number, or numbers at equal shares of the cases, from the smallest to the largest."""


def quantile(figure: float | Sequence[float], share: float) -> float:
    """The value below which this share of the cases is."""
    if not isinstance(figure, Sequence):
        return figure
    place = share * (len(figure) - 1)
    below = min(int(place), len(figure) - 2)
    return figure[below] + (place - below) * (figure[below + 1] - figure[below])


def typical(figure: float | Sequence[float]) -> float:
    """The mean."""
    if not isinstance(figure, Sequence):
        return figure
    return sum((one + other) / 2 for one, other in pairwise(figure)) / (len(figure) - 1)


class ResponsesSection(Section):
    """The lengths of responses."""

    tokens: Figure = Field(description="Mean response length of a group, in tokens.")
    spread: float = Field(
        0.5, ge=0, le=4, description="Spread of response lengths within a group: deviation of the logarithm."
    )
    growth: float = Field(0.0, gt=-1, le=1, description="Growth of response lengths per train step, as a share.")
    max_tokens: int | None = Field(None, ge=1, description="Longest response; null: no limit but rollout.max_tokens.")
    filtered: float = Field(0.0, ge=0, lt=1, description="Share of groups whose responses all have the same reward.")


class ResponseSource(Section):
    """A data source whose responses have other lengths."""

    share: float = Field(gt=0, le=1, description="Share of the groups.")
    tokens: Figure = Field(description="Mean response length of a group of this source, in tokens.")


class ReplicaSection(Section):
    """The speed of one replica."""

    step_s: float = Field(gt=0, description="Seconds for a token of every running response: the constant part.")
    response_s: float = Field(0.0, ge=0, description="Seconds that each running response adds to this.")
    wait_s: float = Field(0.0, ge=0, description="Seconds per token in which a response waits for tools.")
    most_responses: int = Field(0, ge=0, description="Responses that it samples at once; 0: any number.")
    prefill_s: float = Field(0.0, ge=0, description="Seconds in which groups that start together stop the others.")
    prompt_s: float = Field(0.0, ge=0, description="Seconds that each of these groups adds to this.")
    overhead_s: Figure = Field(0.0, description="Seconds from a group's last token to its end, without rewards.")
    row_s: Figure = Field(0.0, description="Seconds to measure a validation row.")
    start_s: float = Field(10.0, ge=0, description="Seconds of its start, after a failure.")


class RewardCallsSection(Section):
    """Calls of the reward functions, after the last token of a group."""

    calls: int = Field(0, ge=0, le=4096, description="Calls of a group.")
    call_s: Figure = Field(0.0, description="Seconds of a call.")
    at_once: int = Field(4, ge=1, description="Calls of a replica that run at once.")


class TrainerWorkSection(Section):
    """The speed of the trainer."""

    step_s: Figure = Field(0.0, description="Seconds of a train step: the constant part.")
    token_s: float = Field(0.0, ge=0, description="Seconds that each response token of the batch adds to this.")
    score_s: Figure = Field(0.0, description="Seconds of a scoring task.")
    publish_s: Figure = Field(0.0, description="Seconds to publish weights.")
    ranks: int = Field(1, ge=1, description="Ranks for which these figures hold.")
    rank_speedup: float = Field(
        0.8, ge=0, le=1, description="What each further rank adds to the speed, as a share of the first one's."
    )


class WeightsSection(Section):
    """How long a replica needs to take over new weights."""

    staging_s: Figure = Field(0.0, description="Seconds to stage them, while it samples.")
    pausing_s: Figure = Field(0.0, description="Seconds to pause.")
    installing_s: Figure = Field(0.0, description="Seconds to install them, while it is paused.")


class SharedSection(Section):
    """Cores or GPUs that processes use together: once all use more than there is, each slows down in proportion."""

    replica: float = Field(0.0, ge=0, le=64, description="Share of them that a sampling replica uses; 0: none.")
    trainer: float = Field(0.0, ge=0, le=64, description="Share of them that the working trainer uses.")
    trainer_slower: float = Field(
        1.0, ge=0.1, le=10, description="How many times as much as a replica the trainer slows down."
    )


class FailuresSection(Section):
    """How often something fails."""

    group: float = Field(0.0, ge=0, lt=1, description="Share of attempts to generate a group.")
    replica: float = Field(0.0, ge=0, lt=1, description="Share of started groups whose replica dies.")


PLACEHOLDER = {"model": {"make": "arithmetic"}}
"""A model that nothing loads, for settings that name none."""


class Workload(Section):
    """What the work of a run takes."""

    about: str = Field("", max_length=4000, description="Where the figures come from.")
    settings: dict[str, Any] = Field(
        default_factory=dict, description="The configuration that `engine simulate` uses; other fields have defaults."
    )
    responses: ResponsesSection
    sources: dict[str, ResponseSource] = Field(
        default_factory=dict, description="Data sources, instead of `responses.tokens`; the shares sum up to 1."
    )
    replica: ReplicaSection
    rewards: RewardCallsSection = RewardCallsSection()
    states: dict[str, Figure] = Field(
        default_factory=dict, description="Seconds of work of each added state on a group."
    )
    trainer: TrainerWorkSection = TrainerWorkSection()
    weights: WeightsSection = WeightsSection()
    shared: SharedSection = SharedSection()
    failures: FailuresSection = FailuresSection()

    @model_validator(mode="after")
    def _takes_time(self) -> Self:
        if typical(self.responses.tokens) <= 0:
            raise ValueError("responses.tokens must be above 0")
        if self.sources and abs(sum(source.share for source in self.sources.values()) - 1) > 1e-3:
            raise ValueError("the shares of sources must sum up to 1")
        return self

    def config(self) -> Config:
        """The configuration of `settings`. Raises: `ConfigError`."""
        return parse_config({**PLACEHOLDER, **self.settings})

    def dump_yaml(self) -> str:
        given = self.model_dump(mode="json", exclude_defaults=True)
        return str(yaml.safe_dump(given, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None))


def check_lengths(workload: Workload) -> None:
    """Raises: `ConfigError` for responses that are longer than a response may be."""
    max_tokens = workload.config().rollout.max_tokens
    for name, tokens in (
        ("responses.tokens", workload.responses.tokens),
        *((f"sources.{source}.tokens", one.tokens) for source, one in workload.sources.items()),
    ):
        if quantile(tokens, 1.0) > max_tokens:
            law = f"must be at most rollout.max_tokens ({max_tokens})"
            raise ConfigError(name, tokens, law, "raise rollout.max_tokens in settings, or lower the lengths")


def load_workload(path: Path) -> Workload:
    """Raises: `ConfigError` that names the field."""
    return workload_of(read_yaml(path, "workload"), str(path))


def workload_of(tree: Any, name: str) -> Workload:
    """`name`: the file, for errors. Raises: `ConfigError`."""
    if not isinstance(tree, dict):
        raise ConfigError("workload", name, "has no sections", f"begin with {', '.join(Workload.model_fields)}")
    try:
        return Workload.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier())
        raise ConfigError(f"{name}: {field}", first["input"], first["msg"].removeprefix("Value error, ")) from None
