"""The configuration of the Ray cluster that a run joins. Part of `schema.Config`.

Never imports Ray: `actors/cluster.py` joins the cluster.
"""

import os
import re
from typing import Any, Self

from pydantic import Field, model_validator

from engine.errors import ConfigError
from engine.section import Section

RAY_ADDRESS = "RAY_ADDRESS"
"""Ray's environment variable with the address of a cluster."""
LOCAL, AUTO = "local", "auto"
_HOST_AND_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_LAST_PORT = 65_535


def check_address(field: str, address: str) -> None:
    """Raises: `ConfigError` if a run cannot join the cluster at `address`."""
    if address.startswith("ray://"):
        law = "is an address for Ray Client: the launching process must run on a node of the cluster"
        raise ConfigError(field, address, law, "run the command on a node, for example the head, with --address auto")
    if address in (LOCAL, AUTO):
        return
    parts = _HOST_AND_PORT.fullmatch(address)
    if parts is None:
        raise ConfigError(field, address, "must be local, auto or host:port", "for example 10.0.0.1:6379")
    if not 0 < int(parts[1]) <= _LAST_PORT:
        raise ConfigError(field, address, f"has a port outside 1 to {_LAST_PORT}", "for example 10.0.0.1:6379")


class ClusterSection(Section):
    """The Ray cluster of the run (docs/OPERATIONS.md, Run on a Ray cluster)."""

    address: str | None = Field(
        None,
        min_length=1,
        description="Cluster to join: auto or host:port; local: start a private one; null: RAY_ADDRESS, else local.",
    )
    runtime_env: dict[str, Any] = Field(
        default_factory=dict,
        description="Ray's runtime_env in a joined cluster; its working_dir defaults to run.code_dir; null: none.",
    )

    @model_validator(mode="after")
    def _laws(self) -> Self:
        if self.address is not None:
            check_address("cluster.address", self.address)
        return self

    def joined(self) -> tuple[str, str] | None:
        """(field or variable, address) of the cluster to join; None: the run starts a private one.

        Raises: `ConfigError` for an address in `RAY_ADDRESS` that cannot be joined.
        """
        field, address = "cluster.address", self.address
        if address in (None, AUTO) and os.environ.get(RAY_ADDRESS):
            field, address = RAY_ADDRESS, os.environ[RAY_ADDRESS]
            check_address(field, address)
        return None if address in (None, LOCAL) else (field, address)
