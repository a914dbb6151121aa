"""The engine's own policies, without those that tests register in the same process."""

from engine.policies.registry import DEFAULTS, is_built_in, names

SHIPPED = {decision: [name for name in names(decision) if is_built_in(decision, name)] for decision in DEFAULTS}
"""Names by decision."""
