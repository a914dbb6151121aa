"""Decisions that users can replace: their protocols, the registry and the built-in policies."""

from engine.policies import built_in
from engine.policies.registry import API_VERSION, DEFAULTS, PolicySet, names, register
from engine.policies.state_registry import add_state, added_states, state_names

__all__ = [
    "API_VERSION",
    "DEFAULTS",
    "PolicySet",
    "add_state",
    "added_states",
    "built_in",
    "names",
    "register",
    "state_names",
]
