"""The validation section of a configuration: what is measured on validation prompts, when, and where."""

from typing import Literal, NamedTuple

from pydantic import Field

from engine.config.data import Paths
from engine.config.reward import RewardSection
from engine.config.rollout import RolloutSection
from engine.errors import ConfigError, suggestion
from engine.section import NAMED as FUNCTION
from engine.section import Section
from engine.states.limits import HELD_OUT, ValidationLimits, ValidationSet
from engine.tasks.answers import NAMED as ANSWER
from engine.tasks.answers import NONE

RESERVED = (
    "accuracy", "reward_mean", "rows", "measured", "failed_share", "version", "steps", "seconds", "elapsed_s", "outcome"
)  # fmt: skip
"""Names that a set cannot have: its metrics are `validation/NAME/...`, and `validation/accuracy` and so on are metrics
of all sets."""


class ValidationSetSection(Section):
    """One of several validation sets. Two sets may have the same prompts and sample them differently."""

    name: str = Field(
        pattern=r"^[a-z][a-z0-9_]*$", max_length=40, description="Name of the set in metrics, samples and tables."
    )
    path: Paths | None = Field(None, description="Files of prompts, as in data.path; null: data.validation_path.")
    prompt_field: str | None = Field(None, min_length=1, description="Column with the prompt; null: data.prompt_field.")
    prompts: int | None = Field(
        None, ge=1, le=1_000_000, description="Maximum number of prompts; null: validation.prompts."
    )
    samples_per_prompt: int = Field(1, ge=1, le=1024, description="Number of responses to each prompt.")
    k: list[int] | None = Field(
        None,
        max_length=16,
        description="Numbers of responses for pass@k and maj@k; null: samples_per_prompt, if it is above 1.",
    )
    temperature: float | None = Field(
        None,
        ge=0,
        le=100,
        description="Sampling temperature; 0: greedy; null: rollout.temperature, but greedy if validation.greedy is "
        "set and each prompt gets one response.",
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="Probability mass of nucleus sampling; null: rollout.top_p."
    )
    max_tokens: int | None = Field(
        None, ge=1, le=10_000_000, description="Maximum tokens of a response; null: rollout.max_tokens."
    )
    reward: str | None = Field(
        None,
        pattern=rf"{FUNCTION}|^[a-z][a-z0-9_]*$",
        description="Reward function, as module:function, or the name of one of reward.functions; null: the reward of "
        "the run.",
    )
    answer: str = Field(
        "auto",
        pattern=ANSWER,
        description="Answer that maj@k votes on: number, boxed, choice, text, boxed_or_number, module:function, none; "
        "auto: the one that the reward compares.",
    )


class ValidationSection(Section):
    """How the model is measured on validation prompts."""

    at_start: bool = Field(True, description="Validate the initial weights while training starts.")
    every: int = Field(
        0, ge=0, le=1_000_000, description="Train steps between validations; 0: none between start and end."
    )
    at_end: bool = Field(True, description="Validate the final weights before the run ends.")
    prompts: int = Field(128, ge=1, le=1_000_000, description="Maximum number of prompts of a validation set.")
    sets: list[ValidationSetSection] = Field(
        [],
        max_length=32,
        description="Several sets; empty: data.validation_path, with one response to each prompt.",
    )
    placement: Literal["shared", "own"] = Field(
        "shared", description="Validate on rollout replicas (shared), or on additional replicas (own)."
    )
    replicas: int = Field(
        1, ge=1, le=4096, description="Number of replicas that validate; if shared, out of rollout.replicas."
    )
    conflict: Literal["hold", "cancel"] = Field(
        "hold",
        description="If validation keeps newer weights from all replicas: hold the weights, or cancel the validation.",
    )
    greedy: bool = Field(True, description="Always take the likeliest token if a prompt gets one response.")


class SetSettings(NamedTuple):
    """A validation set with the defaults of its sections filled in."""

    field: str
    """Path of its section, for errors; empty for the default set."""
    name: str
    path: str | list[str] | None
    """None: the validation prompts of the run."""
    prompt_field: str | None
    prompts: int
    samples: int
    k: tuple[int, ...]
    temperature: float
    top_p: float
    max_tokens: int
    reward: str | None
    """None: the reward of the run."""
    answer: str
    parts: tuple[str, ...]
    """Names of the functions whose weighted sum is its reward; empty for another reward."""
    correct: tuple[str, ...]

    def limited(self, prompts: int, dropped: int = 0) -> ValidationSet:
        """The part that the scheduler needs, with these numbers of prompts."""
        majority = bool(self.k) and self.answer != NONE
        return ValidationSet(
            name=self.name, prompts=prompts, samples=self.samples, k=self.k, majority=majority, parts=self.parts,
            correct=self.correct, dropped=dropped,
        )  # fmt: skip

    @property
    def way(self) -> tuple[float, float, int, str | None]:
        """How it is sampled and judged. Sets that are sampled and judged in the same way share a generator."""
        return self.temperature, self.top_p, self.max_tokens, self.reward


def validation_sets(section: ValidationSection, rollout: RolloutSection, reward: RewardSection) -> list[SetSettings]:
    """The sets, in order; if no set is named, the default one."""
    given = section.sets or [ValidationSetSection(name=HELD_OUT)]
    return [_settings(one, index, section, rollout, reward) for index, one in enumerate(given)]


def _settings(
    one: ValidationSetSection, index: int, section: ValidationSection, r: RolloutSection, reward: RewardSection
) -> SetSettings:
    samples = one.samples_per_prompt
    greedy = section.greedy and samples == 1
    temperature = one.temperature if one.temperature is not None else 0.0 if greedy else r.temperature
    k = one.k if one.k is not None else [samples] if samples > 1 else []
    return SetSettings(
        field=f"validation.sets.{index}" if section.sets else "",
        name=one.name,
        path=one.path,
        prompt_field=one.prompt_field,
        prompts=one.prompts or section.prompts,
        samples=samples,
        k=tuple(k),
        temperature=temperature,
        top_p=1.0 if temperature == 0.0 else r.top_p if one.top_p is None else one.top_p,
        max_tokens=one.max_tokens or r.max_tokens,
        reward=one.reward,
        answer=one.answer,
        parts=reward.names if one.reward is None else (),
        correct=reward.correct_names if one.reward is None else (),
    )


def validation_limits(
    section: ValidationSection, rollout: RolloutSection, reward: RewardSection, samples: int
) -> ValidationLimits | None:
    """The limits for the scheduler, with the maximum number of rows; None if nothing is ever measured.

    `samples`: trajectories of a group, which a slot holds at once.
    Raises: `ConfigError` for sets that cannot be measured.
    """
    refuse_sets(section, rollout, reward)
    if not (section.at_start or section.every or section.at_end):
        return None
    sets = [one.limited(one.prompts) for one in validation_sets(section, rollout, reward)]
    return ValidationLimits(
        rows=sum(one.prompts * one.samples for one in sets),
        sets=tuple(sets),
        rows_per_slot=samples,
        at_start=section.at_start,
        every=section.every,
        at_end=section.at_end,
        replicas=section.replicas,
        own_from=rollout.replicas if section.placement == "own" else None,
        conflict=section.conflict,
    )


def refuse_sets(section: ValidationSection, rollout: RolloutSection, reward: RewardSection) -> None:
    """Raises: `ConfigError` for a repeated name, a k above the number of responses, or impossible sampling."""
    names: list[str] = []
    for given, one in zip(section.sets, validation_sets(section, rollout, reward), strict=False):
        if one.name in names:
            law = "must be unique: an earlier set has this name"
            raise ConfigError(f"{one.field}.name", one.name, law, "use another name")
        if one.name in RESERVED:
            law = f"must not be one of {', '.join(RESERVED)}: these are figures of all sets together"
            raise ConfigError(f"{one.field}.name", one.name, law, "use another name")
        names.append(one.name)
        if one.reward is not None and ":" not in one.reward and one.reward not in reward.names:
            law = "is neither module:function nor the name of one of reward.functions"
            fix = suggestion(one.reward, reward.names, "name a function")
            raise ConfigError(f"{one.field}.reward", one.reward, law, fix)
        for k in one.k:
            if not 1 <= k <= one.samples:
                law = f"must be from 1 to samples_per_prompt = {one.samples}"
                raise ConfigError(f"{one.field}.k", list(one.k), law, f"use at most {one.samples}, or more responses")
        if len(set(one.k)) < len(one.k):
            raise ConfigError(f"{one.field}.k", list(one.k), "names a number twice", "name each once")
        if one.temperature == 0.0 and one.samples > 1:
            law = f"must be above 0: greedy responses are equal, and samples_per_prompt is {one.samples}"
            raise ConfigError(f"{one.field}.temperature", given.temperature, law, "use 1.0, or samples_per_prompt: 1")
        if rollout.context is not None and one.max_tokens >= rollout.context:
            law = f"must be below rollout.context = {rollout.context}, which holds the prompt too"
            raise ConfigError(f"{one.field}.max_tokens", one.max_tokens, law, f"use at most {rollout.context - 1}")
