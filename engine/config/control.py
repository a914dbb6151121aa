"""The configuration of the control endpoint: where a run that is going on takes orders. Part of `schema.Config`."""

from pydantic import Field

from engine.config.section import HostName, Section


class ControlSection(Section):
    """Where `engine scale`, `set`, `drain` and `stop` reach the run. Whoever has the token of `control.json` may."""

    enabled: bool = Field(True, description="Whether the run takes orders while it goes on.")
    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    hosts: list[HostName] = Field(
        default_factory=list, max_length=64, description="Further host names under which requests may reach it."
    )
    port: int = Field(0, ge=0, le=65_535, description="Port; 0 takes any free one.")
