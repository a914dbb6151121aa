"""Joins an existing Ray cluster: finds it, refuses nodes with other versions, and sends the user's code to its nodes.

The command line and `launch.launch` call it before they create anything for a run. It must never change a setting of
the cluster. `ray.shutdown()`, or the end of the process, disconnects and does not end the cluster.
"""

import contextlib
import json
import logging
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray._private.runtime_env import packaging
from ray.exceptions import GetTimeoutError, RayError, RuntimeEnvSetupError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from engine.actors.launcher_watch import reload_token
from engine.config import Config
from engine.config.cluster import AUTO
from engine.config.paths import paths_in
from engine.errors import ConfigError
from engine.version import __version__

log = logging.getLogger(__name__)

ANSWER_S = 10.0
"""Seconds within which a cluster must answer."""
NODE_S = 120.0
"""Seconds within which each node must run a first task. This includes setting up the runtime environment."""
PRINT_RETRIED_ERRORS = "RAY_enable_output_error_log_if_still_retry"
"""Ray's setting that controls whether retried calls are printed on the terminal of the launching process."""
EXCLUDES = [".git", ".venv", "__pycache__"]
PROBE = """
import os
import sys
from ray._private import services
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._raylet import GcsClient
if sys.argv[2] == "here":
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
address = services.canonicalize_bootstrap_address_or_die(sys.argv[1])
metadata = GcsClient(address=address).internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster").decode()
print(address, os.environ.get("RAY_AUTH_MODE"), metadata)
"""
"""Prints the address, the authentication mode and the versions of a cluster. `ray start --head` turns token
authentication on if this machine has a token, so a cluster `here` gets it. In a separate process, because Ray tries
for 40 s and cannot be interrupted."""


def join_cluster(config: Config, note: Callable[[str], None]) -> None:
    """Join the cluster that the configuration or `RAY_ADDRESS` names, if any and if Ray is not connected yet. `note`
    receives one line with its address.

    Raises: `ConfigError` if it does not answer, has other versions, or cannot use the runtime environment.
    """
    named = None if ray.is_initialized() else config.cluster.joined()
    if named is None:
        return
    field, given = named
    address, mode, versions = find_cluster(field, given)
    refuse_versions(field, given, {"the cluster": versions})
    note(f"Joining the Ray cluster at {address}")
    if mode == "token":
        os.environ["RAY_AUTH_MODE"] = "token"
    reload_token()
    sent = runtime_env(config)
    try:
        initialize_ray(address=given, runtime_env=sent)
    except RuntimeEnvSetupError as error:
        raise runtime_env_refusal(sent, error) from error
    except Exception as error:
        law = f"cannot be joined: {_reason(error)}"
        fix = "run the command on a node of the cluster"
        raise ConfigError(field, given, law, fix) from error
    try:
        refuse_versions(field, given, {f"node {name}": seen for name, seen in _on_every_node(_versions()).items()})
    except BaseException:
        ray.shutdown()
        raise


def find_cluster(field: str, given: str, answer_s: float = ANSWER_S) -> tuple[str, str, dict[str, str]]:
    """The address of a cluster as host:port, its authentication mode, and its versions. Raises: `ConfigError`."""
    place = "here"
    no_answer = f"does not answer within {answer_s:g} s"
    fix = "give the address of a running cluster, or start one with `ray start --head`; --address local needs none"
    if given != AUTO:
        host, _, port = given.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=answer_s) as link:
                place = "here" if link.getsockname()[0] == link.getpeername()[0] else "elsewhere"
        except TimeoutError:
            raise ConfigError(field, given, no_answer, fix) from None
        except OSError as error:
            raise ConfigError(field, given, f"cannot be reached: {error}", fix) from None
    asked = [sys.executable, "-c", PROBE, given, place]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=answer_s, check=True)
    except subprocess.TimeoutExpired as error:
        _refuse_token(field, given, (error.stderr or b"").decode(errors="replace"))
        raise ConfigError(field, given, no_answer, fix) from None
    except subprocess.CalledProcessError as error:
        _refuse_token(field, given, error.stderr)
        law = f"cannot be used: {error.stderr.strip().splitlines()[-1]}"
        raise ConfigError(field, given, law, fix) from None
    address, mode, found = done.stdout.strip().split(" ", 2)
    metadata = json.loads(found)
    return address, mode, {"Ray": metadata["ray_version"], "Python": metadata["python_version"]}


def _refuse_token(field: str, given: str, said: str) -> None:
    if "AuthToken" in said or "AuthenticationError" in said:
        fix = "set RAY_AUTH_MODE=token, and the token in RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"
        raise ConfigError(field, given, "refuses this process: its token is missing or wrong", fix)


def refuse_versions(field: str, given: str, seen: Mapping[str, Mapping[str, str]]) -> None:
    """Raises: `ConfigError` that names every place with another version of the engine, Ray or Python than here."""
    here = {"step-engine": __version__, "Ray": ray.__version__, "Python": platform.python_version()}
    other = [
        f"{place} has {name} {version} (here {here[name]})"
        for place, versions in seen.items()
        for name, version in versions.items()
        if version != here[name]
    ]
    if other:
        law = f"has nodes with other versions: {'; '.join(other)}"
        raise ConfigError(field, given, law, "install the same versions on every node")


def _versions() -> Callable[[], dict[str, str]]:
    def versions() -> dict[str, str]:  # a local function is sent by value, so it runs on a node without the engine
        import platform

        import ray

        try:
            from engine.version import __version__ as engine
        except ImportError:
            engine = "missing"
        return {"step-engine": engine, "Ray": ray.__version__, "Python": platform.python_version()}

    return versions


def require_shared_files(config: Config, run_dir: str) -> None:
    """Check that every node of the cluster sees the model under the same path. If a process on another node may write
    into the run's directory, check the same for a file that is written there. Raises: `ConfigError`."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    here = ray.get_runtime_context().get_node_id()
    gpus = {node["NodeID"] for node in nodes if node["Resources"].get("GPU")}
    paths = {} if config.model.path is None else {"model.path": config.model.path}
    wanted = {field: path for field, path in paths.items() if os.path.exists(path)}
    with contextlib.ExitStack() as stack:
        probes = dict(wanted)
        if config.model.make is not None or (gpus and here not in gpus) or config.trainer.nodes > 1:
            wanted["run.dir"] = run_dir
            probes["run.dir"] = stack.enter_context(tempfile.NamedTemporaryFile(prefix=".probe-", dir=run_dir)).name

        def missing() -> list[str]:
            import os

            return [field for field, path in probes.items() if not os.path.exists(path)]

        if len(nodes) > 1 and probes:
            refuse_missing(wanted, _on_every_node(missing))


def refuse_missing(paths: Mapping[str, str], missing: Mapping[str, Sequence[str]]) -> None:
    """Raises: `ConfigError` for the first of `paths`, by field, that a node does not see."""
    for node, fields in missing.items():
        for field in fields:
            fix = "put it on storage that every node has under the same path"
            law = "is not shared with" if field == "run.dir" else "does not exist on"
            raise ConfigError(field, paths[field], f"{law} node {node} of the cluster", fix)


def _on_every_node(function: Callable[[], Any]) -> dict[str, Any]:
    """What a function returns on each node, by address and id. Raises: `ConfigError`."""
    nodes = {f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})": node for node in ray.nodes() if node["Alive"]}
    calls = {}
    for name, node in nodes.items():
        place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=place)
        calls[name] = task.remote()
    results = {}
    for name, call in calls.items():
        try:
            results[name] = ray.get(call, timeout=NODE_S)
        except GetTimeoutError:
            law = f"has a node, {name}, that ran no task within {NODE_S:g} s"
            raise ConfigError("cluster.address", name, law, "check or remove the node") from None
        except RayError as error:
            law = f"cannot be set up on node {name}: {_reason(error)}"
            raise ConfigError("cluster.runtime_env", name, law, "check the node and cluster.runtime_env") from error
    return results


def _reason(error: Exception) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


def runtime_env(config: Config) -> dict[str, Any]:
    """Ray's runtime environment of the run: `cluster.runtime_env`, and the user's code without runs and inputs."""
    given, code_dir = config.cluster.runtime_env, config.run.code_dir
    default: dict[str, Any] = {}
    if "working_dir" not in given and code_dir is not None:
        absolute = filter(os.path.isabs, paths_in(config.model_dump(mode="json")))
        paths = [os.path.relpath(path, code_dir) for path in absolute]
        inputs = [f"/{path}" for path in paths if path != os.curdir and not path.startswith(os.pardir)]
        default = {"working_dir": code_dir, "excludes": [*EXCLUDES, *inputs]}
    return {name: value for name, value in {**default, **given}.items() if value is not None}


SHOWN_FILES = 5
"""Number of files that an error about the size of `working_dir` names."""


def runtime_env_refusal(sent: Mapping[str, Any], error: RuntimeEnvSetupError) -> ConfigError:
    """The error about a runtime environment that Ray could not set up. If `working_dir` is too large, names its largest
    files."""
    law, fix = f"cannot be set up: {_reason(error)}", "check cluster.runtime_env"
    if "Failed to upload working_dir" in str(error) and "exceeds the maximum size" in str(error):
        root, files = Path(sent["working_dir"]).absolute(), list[Path]()
        excludes = [packaging._get_excludes(root, list(sent.get("excludes", ())))]
        packaging._dir_travel(root, excludes, files.append, include_gitignore=True, logger=log)
        sizes = sorted(((file.stat().st_size, file) for file in files if file.is_file()), reverse=True)
        largest = ", ".join(f"{file.relative_to(root)} ({size / 1e6:.1f} MB)" for size, file in sizes[:SHOWN_FILES])
        law = (
            f"sends {root} to the nodes, which is larger than {packaging.GCS_STORAGE_MAX_SIZE / 1e6:.1f} MB when it is "
            f"compressed; the largest files: {largest}"
        )
        fix = "list what the nodes do not need in .rayignore there, or in excludes of cluster.runtime_env"
    return ConfigError("cluster.runtime_env", dict(sent), law, fix)


def initialize_ray(**options: Any) -> None:
    """`ray.init` for the launching process, with its own handler of SIGTERM and without Ray's messages."""
    os.environ.setdefault(PRINT_RETRIED_ERRORS, "0")
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except SystemExit:
        if callable(before):  # A request to end came while Ray's own handler was in place.
            before(signal.SIGTERM, None)
        raise
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
