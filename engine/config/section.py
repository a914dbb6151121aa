"""What every section of a configuration is: the base of the models in `schema.py` and its siblings."""

from pydantic import BaseModel, ConfigDict

DEVICE = r"^(auto|cpu|cuda(:\d+)?)$"


class Section(BaseModel):
    """Base of every block: no unknown keys, no silent conversions, no change after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
