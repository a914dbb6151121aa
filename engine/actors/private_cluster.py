"""Starts Ray for one run, on this machine alone: it listens on the loopback, and takes only callers with its token.

`launch.start` calls `connect` if no cluster is joined, as do tests and benchmarks. The token is in the environment of
Ray's processes, and in no file: another user of the machine who knew it could execute code as this one.
"""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from ray._common.utils import get_default_ray_temp_dir
from ray._private import ray_constants

from engine.actors.cluster import initialize_ray
from engine.actors.launcher_watch import reload_token, separate_sessions
from engine.config.inputs import LEAST_STORE_BYTES
from engine.control.proxies import exempt_own_servers
from engine.errors import ConfigError
from engine.hardware import object_store_limit
from engine.runtime.temporary_paths import VARIABLES, shorten_temporary_paths

NICENESS = "RAY_worker_niceness"
"""A setting of Ray, 15 by default. With other programs on the machine, actors would hardly run and miss heartbeats."""
OBJECT_STORE_BYTES = 256 << 20
"""Object store of a private cluster that `connect` starts without a given size."""


def connect(object_store_bytes: int | None = OBJECT_STORE_BYTES) -> None:
    """Start a private cluster for this process. Actors request no CPU, so that any plan fits; Ray starts one process
    per core at a time. The object store gets the given size or, with None or too large a size, the largest one allowed.

    Raises: `ConfigError` if Ray cannot write its files.
    """
    limit = max(LEAST_STORE_BYTES, object_store_limit())
    os.environ.setdefault(NICENESS, "0")
    exempt_own_servers()
    shorten_temporary_paths()
    _require_ray_directory()
    with separate_sessions(), _on_loopback(), _own_token():
        initialize_ray(
            address="local",
            num_cpus=os.cpu_count(),
            include_dashboard=False,
            object_store_memory=limit if object_store_bytes is None else min(limit, object_store_bytes),
        )


def _require_ray_directory() -> None:
    """Raises: `ConfigError` if Ray's directory for its logs and sockets cannot be written."""
    directory = get_default_ray_temp_dir()
    variable = next((name for name in VARIABLES if name in os.environ), VARIABLES[0])
    try:
        os.makedirs(os.path.realpath(directory), exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        law = f"Ray cannot write its files in {directory}: {error.strerror}"
        fix = "set RAY_TMPDIR to a directory that you can write"
        raise ConfigError(variable, os.environ.get(variable), law, fix) from None


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Start Ray as on a laptop, where its servers have the loopback's address. On Linux, `ray.init` replaces this
    address by another one of the machine."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _own_token() -> Iterator[None]:
    """Give the Ray processes that start a token of their own. Afterwards this process knows it without its variable,
    so that what it starts next can join another cluster."""
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    reload_token()
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)
