"""The configuration of the control endpoint: where a run that is running takes orders. Part of `schema.Config`."""

from pydantic import Field

from engine.config.section import HostName, Section


class ControlSection(Section):
    """Where `engine scale`, `set`, `drain` and `stop` reach the run. Whoever has the token of `control.json` may."""

    enabled: bool = Field(True, description="Whether the running run accepts requests.")
    host: str = Field("127.0.0.1", min_length=1, description="Listen address.")
    hosts: list[HostName] = Field(
        default_factory=list, max_length=64, description="More accepted host names of requests."
    )
    port: int = Field(0, ge=0, le=65_535, description="Port; 0: any free one.")
