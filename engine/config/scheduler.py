"""The sections `scheduler` and `timeouts`: batch sizes, concurrency, staleness, policies, and time limits of orders.

Read by `schema.py`. The laws between these figures are those of `states.limits.Limits`.
"""

from collections.abc import Iterator
from dataclasses import fields
from math import floor
from typing import Annotated, Any, Literal, Self, get_type_hints

from pydantic import Field, ValidationInfo, create_model, field_validator, model_validator

from engine.config.limit_fields import limit_field
from engine.errors import ConfigError, nearest_divisor
from engine.policies import DEFAULTS
from engine.section import Section
from engine.states.limits import ROUNDING
from engine.states.timeouts import KINDS, MOST_S, Timeouts

Seconds = Annotated[float, Field(gt=0, le=MOST_S)]
LIMIT = "Time limit to {}: seconds, auto or off."


def _settings() -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The fields of `Timeouts` that have a description, with their bounds."""
    hints = get_type_hints(Timeouts, include_extras=True)
    for name, default in ((field.name, field.default) for field in fields(Timeouts)):
        if text := next(iter(getattr(hints[name], "__metadata__", ())), ""):
            of_kind = name.removesuffix("_s") in KINDS
            kind = Seconds | Literal["auto"] | None if of_kind else Seconds if default else Seconds | None
            yield name, (kind, Field(default, description=LIMIT.format(text) if of_kind else text))


_OfTimeouts: Any = create_model("_OfTimeouts", __base__=Section, **dict[str, Any](_settings()))


class TimeoutsSection(_OfTimeouts):
    """How long orders may take. An order that exceeds its limit is cut short, or its process is stopped."""

    @field_validator("*", mode="before")
    @classmethod
    def _checked(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads `off` as false. Raises: `ConfigError` for a value that `Timeouts` refuses."""
        name = str(info.field_name)
        limit = None if name.removesuffix("_s") in KINDS and (value is False or value == "off") else value
        checked: dict[str, Any] = {name: limit}
        Timeouts(**checked)
        return limit

    def limits(self, **process_limits: float) -> Timeouts:
        """The time limits for the scheduler. `process_limits`: the limits that processes apply themselves, by kind."""
        given: dict[str, Any] = dict(self)
        return Timeouts(**given, process_limits=tuple(process_limits.items()))


REGISTERED = r"^[a-z][a-z0-9_-]*$"
"""Names that policies and backends are registered under."""


class PoliciesSection(Section):
    """Each decision's policy, by the name it is registered under."""

    admission: str = Field(DEFAULTS["admission"], pattern=REGISTERED, description="How many groups may start.")
    dispatch: str = Field(DEFAULTS["dispatch"], pattern=REGISTERED, description="Which replica a group starts on.")
    concurrency: str = Field(
        DEFAULTS["concurrency"],
        pattern=REGISTERED,
        description="How many groups may run on a replica: slots, or as many as fit into its KV cache (kv-cache).",
    )
    batching: str = Field(DEFAULTS["batching"], pattern=REGISTERED, description="Which ready groups a step takes.")
    deadline: str = Field(
        DEFAULTS["deadline"], pattern=REGISTERED, description="What to do with groups that delay a step."
    )
    sync: str | None = Field(
        None, pattern=REGISTERED, description="When each replica installs new weights; null: rollout.sync_order."
    )
    filter: str = Field(DEFAULTS["filter"], pattern=REGISTERED, description="Which groups are dropped before training.")
    retry: str = Field(DEFAULTS["retry"], pattern=REGISTERED, description="Whether a failed attempt is retried.")
    resume: str = Field(DEFAULTS["resume"], pattern=REGISTERED, description="Which interrupted group resumes first.")
    validation: str = Field(DEFAULTS["validation"], pattern=REGISTERED, description="Which versions are measured.")


class SchedulerSection(Section):
    """Batch sizes, concurrency and staleness: B, S, K and k of the laws."""

    train_batch_size: int = limit_field("train_batch_size", 8)
    policy_mini_batch_size: int = Field(
        0, ge=0, le=1_000_000, description="Prompt groups per optimizer update; must divide B; 0: B."
    )
    samples_per_prompt: int = Field(8, ge=1, le=65_536, description="Trajectories of one prompt group.")
    max_staleness_steps: int = limit_field("max_staleness_steps", 1)
    max_concurrent_groups: int = limit_field("max_concurrent_groups", 0, least=0)
    async_ratio: float | None = Field(
        None, ge=0, le=10_000, description="Groups held in addition to one batch, in batches, from k-1 to S; null: S."
    )
    over_sample: float = Field(
        0.0, ge=0, le=100, description="Extra groups to start, in batches; when a batch is full, the rest are dropped."
    )
    sync_every: int = limit_field("sync_every")
    train_after_sync: bool = Field(
        False, description="Start a train step only when every replica has the newest weights, as in one-step-off."
    )
    deadline_timeout_s: float = limit_field("deadline_timeout_s")
    max_drops: int = limit_field("max_drops")
    max_filtered_in_a_row: int = limit_field("max_filtered_in_a_row")
    infrastructure_attempts: int = limit_field("infrastructure_attempts")
    data_attempts: int = limit_field("data_attempts")
    states: tuple[str, ...] = Field(
        (),
        strict=False,
        max_length=100,
        description="Added states that groups pass before or after generation, and train steps before training or "
        "before replicas get their weights; those of a place in this order.",
    )
    policy_fields: tuple[str, ...] = Field(
        (),
        strict=False,
        max_length=16,
        description="Columns of the data that your filter policy and added states see; each a text, a number or a "
        "boolean.",
    )
    state_timeout_s: float = Field(
        600.0, gt=0, le=86_400, description="Seconds that an added state may work on one group, batch or version."
    )
    policies: PoliciesSection = Field(default_factory=PoliciesSection, description="The policies.")

    @model_validator(mode="after")
    def _laws(self) -> Self:
        batch = self.train_batch_size
        # The object is still being made. A 0 stands for a figure that follows from others, and that figure is stored.
        object.__setattr__(self, "policy_mini_batch_size", self.policy_mini_batch_size or batch)
        object.__setattr__(self, "max_concurrent_groups", self.max_concurrent_groups or self.most_groups())
        if batch % self.policy_mini_batch_size:
            mini, law = self.policy_mini_batch_size, f"must divide scheduler.train_batch_size = {batch}"
            raise ConfigError("scheduler.policy_mini_batch_size", mini, law, f"use {nearest_divisor(batch, mini)}")
        return self

    def most_groups(self) -> int:
        """The largest valid K."""
        ahead = self.max_staleness_steps if self.async_ratio is None else self.async_ratio
        return sum(floor(share * self.train_batch_size + ROUNDING) for share in (1 + ahead, self.over_sample))
