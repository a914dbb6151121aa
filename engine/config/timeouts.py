"""The section `timeouts` of a config: how long each kind of order may take.

Read by `schema.py`. `states/timeouts.py` says what `auto` is, and docs/ARCHITECTURE.md what follows when an order
exceeds its limit.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from engine.config.section import Section
from engine.states.timeouts import DEFAULT, FLOOR_S, KINDS, MOST_S, SLOW_FLOOR_S, Timeouts

Seconds = Annotated[float, Field(gt=0, le=MOST_S)]
LimitField = Seconds | Literal["auto"] | None


def _limit(description: str) -> Any:
    return Field(DEFAULT, description=f"{description}: seconds, auto or off.")


class TimeoutsSection(Section):
    """How long orders may take. What exceeds its limit is cut short, or its process is stopped."""

    draw_s: LimitField = _limit("Draw prompts from the data source")
    start_s: LimitField = _limit("Start or stop a process")
    group_s: LimitField = _limit("Generate a group, rewards included; each token, turn or reward restarts the clock")
    rows_s: LimitField = _limit("Measure validation rows in one slot")
    stage_s: LimitField = _limit("Do the work of an added state on a group")
    sync_s: LimitField = _limit("Stage weights on a replica, pause it, or install them")
    resume_s: LimitField = _limit("Resume a paused replica")
    score_s: LimitField = _limit("Run a scoring task on a batch")
    train_s: LimitField = _limit("Train on a batch")
    publish_s: LimitField = _limit("Publish a weights version")
    checkpoint_s: LimitField = _limit("Write a checkpoint")
    store_s: LimitField = _limit("Discard trajectories, or retire a weights version")
    floor_s: Seconds = Field(
        FLOOR_S,
        description=f"Smallest auto limit; {SLOW_FLOOR_S:g} for start, publish, checkpoint, rows unless it is lowered.",
    )
    cut_s: Seconds = Field(60.0, description="Maximum seconds to park a group, stop rows, or answer a probe.")
    max_s: Seconds | None = Field(None, description="Maximum total seconds of any order; null: no limit.")

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
        """The time limits of the scheduler. `process_limits`: the limits that processes apply themselves, by kind."""
        kinds: dict[str, Any] = {f"{kind}_s": getattr(self, f"{kind}_s") for kind in KINDS}
        return Timeouts(
            **kinds,
            floor_s=self.floor_s,
            cut_s=self.cut_s,
            max_s=self.max_s,
            process_limits=tuple(process_limits.items()),
        )
