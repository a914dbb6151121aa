"""What `engine check` says about the layout of the trainer's rows.

Called by `inputs.check_inputs`. Of the model it reads `config.json` only.
"""

import json
from pathlib import Path

from engine.config.schema import Config
from engine.errors import ConfigError
from engine.training.packable import why_padded


def packing_line(config: Config, directory: Path) -> str:
    """Raises: ConfigError if the settings require packed rows, but the model cannot compute them."""
    t = config.trainer
    if t.packing == "off":
        return "ok: trajectories are padded to the longest of their pass (trainer.packing off)"
    try:
        reason = why_padded(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError, TypeError):
        reason = "has no config.json that can be read"
    if reason is None:
        shared = {"auto": "a prompt is computed once if that saves 15 % of the tokens", "off": "no prompt is shared"}
        return (
            "ok: trajectories are packed without padding, if a test of the loaded model gives the same as padded rows; "
            f"{shared.get(t.shared_prompts, 'each prompt is computed once')}"
        )
    for field in ("packing", "shared_prompts"):
        if getattr(t, field) == "on":
            raise ConfigError(f"trainer.{field}", "on", f"model.path {config.model.path} {reason}", "use auto")
    return f"note: trajectories are padded, not packed: model.path {config.model.path} {reason}"
