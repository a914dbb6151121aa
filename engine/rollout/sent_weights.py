"""Weights that are sent during an install: the description and the protocol that an engine gets when it stages them.

Transports that send during the install pass `SentWeights` to `RolloutBackend.stage` instead of tensors. The messages
are plain data, so that code that only forwards them does not need torch.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from engine.ids import Version
from engine.training.shared_weights import Manifest

# -- weights to be sent ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Form a group of the holder and all workers of one engine. Closes the engine's earlier group."""

    group: str
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a version to the group during an install."""

    group: str
    version: Version
    wanted: tuple[tuple[str, str], ...]
    """(name in the engine's model, name in the manifest)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """After a send: have the engine compare what it got with the holder's checksums. Needs no group, and its call no
    answer."""

    version: Version
    wanted: tuple[tuple[str, str], ...]
    """As in `Send`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsAnswer:
    """The engine has carried out the last call; if it failed, `wrong` is the reason, else it is empty."""

    group: str
    wrong: str


Turn = Join | Send | Check | WeightsAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsCall:
    """A call that the holder asks the engine to make: its name and its argument, if it has one."""

    name: str
    argument: Any = None


OUTDATED = WeightsCall(name="outdated")
"""Not a call, but the answer to a send or a check of a version that the holder no longer has. The group stays."""


@runtime_checkable
class SentWeights(Protocol):
    """A version of the weights, which its holder will send."""

    @property
    def manifest(self) -> Manifest: ...

    async def exchange(self, turn: Turn) -> WeightsCall | None:
        """Start a join or a send, ask for a check, or report the result of the last call. Returns the next call for the
        engine, None when the operation is complete, or `OUTDATED`. Raises: `EngineError` if it failed; the group is
        then closed."""

    async def stored(self) -> Any:
        """The same weights from the weights store, if the holder cannot send them. Raises: `EngineError`."""


# -- the offer to a receiver -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The address at which a sender waits for one receiver, and the parameters of the transfer."""

    host: str
    port: int
    manifest: Manifest
    publication: str
    """Unique to these tensors, so that what another process of the receiver's machine has need not be sent."""
    backend: str
    bucket_bytes: int
    timeout_s: float
