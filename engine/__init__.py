"""Step Engine: asynchronous RL post-training of language models as explicit, recorded steps.

The public names are imported at their first use, so that `import engine` needs no optional package and stays fast.
docs/API.md lists every stable name: those of `engine`, `engine.protocols`, `engine.policies` and `engine.testing`. All
other modules are private.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.version import __version__

if TYPE_CHECKING:
    from engine.api import TrainedRun, resume, train
    from engine.environments import Environment
    from engine.errors import ConfigError, RunFailed
    from engine.runtime.local import IllegalEvent, Session
    from engine.states.limits import Limits
    from engine.states.timeouts import Timeouts
    from engine.trajectory import NoAnswer, Prompt, Scored, Trajectory

__all__ = [
    "ConfigError",
    "Environment",
    "IllegalEvent",
    "Limits",
    "NoAnswer",
    "Prompt",
    "RunFailed",
    "Scored",
    "Session",
    "Timeouts",
    "TrainedRun",
    "Trajectory",
    "__version__",
    "resume",
    "train",
]

_MODULES = {
    "ConfigError": "engine.errors",
    "Environment": "engine.environments",
    "IllegalEvent": "engine.runtime.local",
    "Limits": "engine.states.limits",
    "NoAnswer": "engine.trajectory",
    "Prompt": "engine.trajectory",
    "RunFailed": "engine.errors",
    "Scored": "engine.trajectory",
    "Session": "engine.runtime.local",
    "Timeouts": "engine.states.timeouts",
    "TrainedRun": "engine.api",
    "Trajectory": "engine.trajectory",
    "resume": "engine.api",
    "train": "engine.api",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
