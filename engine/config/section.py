"""What every section of a configuration is: the base of the models in `schema.py` and its siblings."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

DEVICE = r"^(auto|cpu|cuda(:\d+)?)$"

HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:\[\]-]{1,253}$")]
"""A name or an address, without a port."""


class Section(BaseModel):
    """Base of every block: no unknown keys, no silent conversions, no change after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True)
