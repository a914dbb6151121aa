"""Which configuration fields `engine set` can change while a run is running, and why not the others.

`scheduling/settings.py` checks the values.
"""

from engine.errors import ConfigError, suggestion
from engine.scheduling.settings import FIGURES, POLICIES, live_settings

LAWS = {
    "scheduler.train_batch_size": "earlier admissions and deadlines were computed with it",
    "scheduler.sync_every": "it determined which steps each weights version contains",
    "rollout.replicas": "use `engine scale`",
}
"""Fields that look like live settings, and why they are not."""


def require_live(path: str) -> str:
    """The same path. Raises: `ConfigError`, with the law, for a field that is not live."""
    live = live_settings()
    if path in live:
        return path
    settings = f"use one of {', '.join(FIGURES)}, {POLICIES}*"
    if path in LAWS:
        raise ConfigError("PATH", path, f"cannot be changed while the run is running: {LAWS[path]}", settings)
    raise ConfigError("PATH", path, "is not a setting of a running run", suggestion(path, live, settings))
