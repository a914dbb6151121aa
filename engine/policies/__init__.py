"""Decisions that users can replace: their protocols, the registry and the built-in policies, one file per decision."""

from engine.policies import admission, batching, deadline, dispatch, filter, resume, retry, sync, validation
from engine.policies.custom_states import add_state, added_states, state_names
from engine.policies.registry import API_VERSION, DEFAULTS, ON_ERROR, PolicySet, names, register

__all__ = [
    "API_VERSION",
    "DEFAULTS",
    "ON_ERROR",
    "PolicySet",
    "add_state",
    "added_states",
    "admission",
    "batching",
    "deadline",
    "dispatch",
    "filter",
    "names",
    "register",
    "resume",
    "retry",
    "state_names",
    "sync",
    "validation",
]
