"""What every block of a configuration is: strict, closed and unchangeable."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of every block: no unknown keys, no silent conversions, no change after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
