"""Weights that stay with who published them until an install: what an engine that is to receive them knows beforehand.

Handed to `RolloutBackend.stage` instead of tensors by transports that send within the install. Plain data, so that
who only passes it on needs no torch.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from engine.ids import Version

# -- weights to be sent ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is sent: each tensor once, in this order, and which of them every name means (tied names share one)."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """(type, shape)"""
    names: tuple[tuple[str, int], ...]
    """(name, index into `tensors`)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Form a group of the holder and all workers of one engine. Gives up the group that the engine had before."""

    group: str
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a version to the group, within an install."""

    group: str
    version: Version
    wanted: tuple[tuple[str, str], ...]
    """(name in the engine's model, name in the manifest)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The engine has carried out the last call, or `wrong` says why not."""

    group: str
    wrong: str


Turn = Join | Send | Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What the holder's side of the protocol asks of the engine: the name of a call, and its argument if it has one."""

    name: str
    argument: Any = None


@runtime_checkable
class SentWeights(Protocol):
    """A version at its holder."""

    @property
    def manifest(self) -> Manifest: ...

    async def exchange(self, turn: Turn) -> Call | None:
        """Begin something, or say how the last call went. Answered with the next call that it takes; with nothing once
        it is done. Raises: `EngineError` where it failed; then the group is given up."""


# -- what the receiver is told first -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The address at which a sender waits for one receiver, and the parameters of the transfer."""

    host: str
    port: int
    manifest: Manifest
    backend: str
    bucket_bytes: int
    timeout_s: float
