"""Which fields of a configuration are settings of a running scheduler, and under which name it knows them.

Read by `engine set`, and where a run is resumed with other values. What a value may be is the scheduler's to say.
"""

import difflib

from engine.config.scheduler import PoliciesSection
from engine.errors import ConfigError

FIGURES = {
    "scheduler.max_staleness_steps": "max_staleness_steps",
    "scheduler.max_concurrent_groups": "max_concurrent_groups",
    "scheduler.deadline_timeout_s": "deadline_timeout_s",
    "scheduler.max_drops": "max_drops",
    "rollout.group_timeout_s": "group_timeout_s",
}
POLICY = "scheduler.policies."
LIVE: dict[str, str] = {
    **FIGURES,
    **{f"{POLICY}{name}": f"policies.{name}" for name in PoliciesSection.model_fields if name != "on_error"},
}
"""Path in the configuration → setting."""

LAWS = {
    "scheduler.train_batch_size": "B is what every admission and deadline so far was counted by",
    "scheduler.sync_every": "k is what decides which steps the versions so far contain",
    "rollout.replicas": "replicas are counted by `engine scale`",
}
"""Why the fields that one may think of are not live."""


def live_setting(path: str) -> str:
    """The scheduler's name of a field. Raises: `ConfigError`, with the law, for one that is not live."""
    if path in LIVE:
        return LIVE[path]
    near = difflib.get_close_matches(path, LIVE, n=1, cutoff=0.75)
    fix = f"did you mean {near[0]}?" if near and path not in LAWS else f"live are {', '.join(FIGURES)}, {POLICY}*"
    law = LAWS.get(path, "is no setting of a running run")
    raise ConfigError("PATH", path, f"is not live: {law}" if path in LAWS else law, fix)
