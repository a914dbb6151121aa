"""Gloo process groups that are separate from torch's default group, which belongs to the user.

`rollout.torch.transfer` uses them for a group of two, `rollout.vllm.gloo_transfer` for a sender and the workers of an
engine.
"""

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as distributed


def gloo_group(store: Any, rank: int, size: int, host: str, wait: timedelta) -> Any:
    """Join a group over TCP as `rank` of `size`. Binds to the address `host`, so that no host name is looked up. Blocks
    until all ranks have joined. Raises: `RuntimeError` after `wait`; the group's own calls do the same."""
    options = distributed.ProcessGroupGloo._Options()
    options._timeout = wait
    options._threads = 1
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    return distributed.ProcessGroupGloo(store, rank, size, options)


def own_address(host: str, port: int) -> str:
    """The address that this machine uses to reach `host`. Sends no packet."""
    with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def family_of(host: str) -> socket.AddressFamily:
    """The address family of an IPv4 or IPv6 address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
