"""What the receiver of weights is told by their sender in an actor's answer, before any of their bytes pass.

Made and read by `transfer.py`. Plain data, so that who only passes it on needs no torch.
"""

from dataclasses import dataclass

from engine.rollout.sent_weights import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Where a sender waits for one receiver, and all that the receiver must know beforehand."""

    host: str
    port: int
    manifest: Manifest
    backend: str
    bucket_bytes: int
    timeout_s: float
