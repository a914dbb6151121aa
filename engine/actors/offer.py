"""The metadata that a sender of weights gives the receiver, in an actor's answer, before the transfer.

Made and read by `transfer.py`. Must never import torch, because other processes forward it.
"""

from dataclasses import dataclass

from engine.rollout.sent_weights import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The address at which a sender waits for one receiver, and the parameters of the transfer."""

    host: str
    port: int
    manifest: Manifest
    backend: str
    bucket_bytes: int
    timeout_s: float
