"""Which fields of a configuration may be set while a run goes on, and why the others may not.

Read by `engine set`, and where a run is resumed with other values. What a value may be is said by
`scheduling/settings.py`.
"""

import difflib

from engine.errors import ConfigError
from engine.scheduling.settings import FIGURES, POLICIES, live_settings

LAWS = {
    "scheduler.train_batch_size": "B is what every admission and deadline so far was counted by",
    "scheduler.sync_every": "k is what decides which steps the versions so far contain",
    "rollout.replicas": "replicas are counted by `engine scale`",
}
"""Why the fields that one may think of are not live."""


def require_live(path: str) -> str:
    """The same path. Raises: `ConfigError`, with the law, for a field that is not live."""
    live = live_settings()
    if path in live:
        return path
    near = difflib.get_close_matches(path, live, n=1, cutoff=0.75)
    fix = f"did you mean {near[0]}?" if near and path not in LAWS else f"live are {', '.join(FIGURES)}, {POLICIES}*"
    law = f"is not live: {LAWS[path]}" if path in LAWS else "is no setting of a running run"
    raise ConfigError("PATH", path, law, fix)
