"""What may vary in a run: protocols, the registry and the built-in policies, one file per decision."""

from engine.policies import admission, batching, deadline, dispatch, filter, retry, sync
from engine.policies.registry import DEFAULTS, PolicySet, names, register

__all__ = [
    "DEFAULTS",
    "PolicySet",
    "admission",
    "batching",
    "deadline",
    "dispatch",
    "filter",
    "names",
    "register",
    "retry",
    "sync",
]
