"""The validation section of a configuration: what is measured on held-out prompts, when, and where."""

from typing import Literal

from pydantic import Field

from engine.config.rollout import RolloutSection
from engine.config.section import Section
from engine.errors import ConfigError
from engine.states.limits import ValidationLimits


class ValidationSection(Section):
    """How the model is measured on held-out prompts."""

    at_start: bool = Field(True, description="Validate the initial weights while training starts.")
    every: int = Field(0, ge=0, le=1_000_000, description="Train steps between validations; 0: none.")
    at_end: bool = Field(True, description="Validate the final weights before the run ends.")
    prompts: int = Field(128, ge=1, le=1_000_000, description="Maximum number of validation prompts.")
    placement: Literal["shared", "own"] = Field(
        "shared", description="On rollout replicas (shared), or on additional replicas (own)."
    )
    replicas: int = Field(1, ge=1, le=4096, description="Replicas of a validation; if shared, of rollout.replicas.")
    conflict: Literal["hold", "cancel"] = Field(
        "hold", description="If validation keeps all replicas from newer weights: hold the weights, or cancel it."
    )
    greedy: bool = Field(True, description="Take the likeliest token instead of sampling.")


def validation_limits(section: ValidationSection, samples: int, replicas: int) -> ValidationLimits | None:
    """What the scheduler is told, with as many rows as there may be; None where nothing is ever to be measured.

    `samples`: trajectories of a group, which is what a slot holds at once; `replicas`: those that generate.
    """
    if not (section.at_start or section.every or section.at_end):
        return None
    return ValidationLimits(
        rows=section.prompts,
        rows_per_slot=samples,
        at_start=section.at_start,
        every=section.every,
        at_end=section.at_end,
        replicas=section.replicas,
        own_from=replicas if section.placement == "own" else None,
        conflict=section.conflict,
    )


def refuse_validation(section: ValidationSection, held_out: bool, rollout: RolloutSection) -> None:
    """Raises: `ConfigError` for what cannot be measured."""
    if section.every and not held_out:
        law = "there are no validation prompts"
        raise ConfigError("validation.every", section.every, law, "set data.validation_path: <file>, or use 0")
    if section.placement == "own" and rollout.backend == "openai":
        law = "the openai backend cannot reserve replicas for validation"
        raise ConfigError("validation.placement", section.placement, law, "use shared")
    if section.placement == "shared" and section.replicas > rollout.replicas:
        law = f"must be at most rollout.replicas = {rollout.replicas}"
        raise ConfigError("validation.replicas", section.replicas, law, f"use {rollout.replicas}")
