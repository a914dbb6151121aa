"""The samples section of a configuration: which responses a run keeps for people to read. Part of `schema`."""

import importlib.util
from collections.abc import Iterator

from pydantic import Field

from engine.config.section import Section


class SamplesSection(Section):
    """Responses that are kept in samples/ of the run's directory. `engine samples` shows them."""

    per_step: int = Field(
        8,
        ge=0,
        le=100_000,
        description="Maximum number of responses kept of each train step: worst, best, random, longest, truncated; "
        "and of those whose reward failed, in each replica and weights version; 0: none.",
    )
    validation: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="Maximum number of prompts of each validation set whose responses are kept, the same each time; 0: "
        "none; null: all.",
    )
    max_characters: int = Field(
        20_000,
        ge=100,
        le=100_000_000,
        description="Maximum length of a kept prompt or response; the middle of a longer one is left out.",
    )
    sink_every: int = Field(
        10,
        ge=0,
        le=1_000_000,
        description="Train steps from one whose samples go to metrics.sinks to the next; validations always do. 0: "
        "neither.",
    )


def missing_package(section: SamplesSection) -> Iterator[str]:
    """A note if samples are wanted but cannot be written here."""
    if (section.per_step or section.validation != 0) and importlib.util.find_spec("pyarrow") is None:
        yield (
            "the package pyarrow is not installed, so no samples are kept; run `pip install 'step-engine[train]'`, or "
            "set samples.per_step and samples.validation to 0"
        )
