"""Gloo groups of their own, beside torch's default group, which stays the user's.

Used by `rollout.torch.transfer` for a group of two, and by `rollout.vllm.gloo_transfer` for a sender and the workers of
an engine.
"""

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as distributed


def gloo_group(store: Any, rank: int, size: int, host: str, wait: timedelta) -> Any:
    """Over TCP, from the address by which the others are reached: no name of this machine is looked up. Blocks until
    all are there. Raises: `RuntimeError` after `wait`, also from the group's own calls."""
    options = distributed.ProcessGroupGloo._Options()
    options._timeout = wait
    options._threads = 1
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    return distributed.ProcessGroupGloo(store, rank, size, options)


def own_address(host: str, port: int) -> str:
    """This machine's address on the way to another. Nothing is sent to find it out."""
    with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
