"""The base of every block of settings, and the forms of names in them.

The sections of a configuration derive from it, and so do the settings that lower layers define themselves
(`training.trainer_settings`), so that a setting is declared once. Reads no file, and must not import another layer.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

DEVICE = r"^(auto|cpu|cuda(:\d+)?)$"
NAMED = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
GENERATOR = rf"^(torch|vllm|openai|sglang|{NAMED[1:-1]})$"
TRAINER = rf"^(torch|{NAMED[1:-1]})$"
FORMS = {
    DEVICE: "auto, cpu, cuda or cuda:N",
    NAMED: "module:name",
    GENERATOR: "torch, vllm, openai, sglang, or module:Class",
    TRAINER: "torch, or module:Class",
}
"""The forms of these patterns in words."""

HostName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:\[\]-]{1,253}$")]
"""A name or an address, without a port."""


class Section(BaseModel):
    """Base of every block: no unknown keys, no silent conversions, no change after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, given: Any) -> Any:
        """An empty section (`validation:` with nothing under it, or null) takes all its defaults."""
        if not isinstance(given, Mapping):
            return given
        kinds = {name: info.annotation for name, info in cls.model_fields.items()}
        sections = {name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)}
        return {name: {} if value is None and name in sections else value for name, value in given.items()}
