"""The weights that a run begins with if `model.checkpoint_path` names those of another run.

Called by `configured_plan.plan_of`, in the launching process. The run gets links to the files, or copies, in its own
directory, so that it can be resumed after the other run has deleted them. It must never change the other run.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path

from engine.config import Config
from engine.config.inputs import check_checkpoint
from engine.storage.checkpoints import verify_checkpoint
from engine.training.trainer_settings import TrainerSettings

FOLDER = "start"
"""The folder in the run's directory."""


def start_of(config: Config, run_dir: Path, model: str) -> tuple[TrainerSettings, str]:
    """The trainer's settings, and the directory of the weights that the run begins with. The reference stays `model`.
    Raises: as `start_weights`."""
    settings, begin = config.trainer_settings(), start_weights(config, run_dir, model)
    if begin != model and settings.needs_reference and settings.reference_path is None:
        settings = replace(settings, reference_path=model)
    return settings, begin


def start_weights(config: Config, run_dir: Path, model: str) -> str:
    """The directory of the weights that the run begins with: `model`, or a copy of `model.checkpoint_path`.

    Raises: `ConfigError` if the checkpoint is missing or damaged, has an adapter, or is of another model than `model`.
    """
    if config.model.checkpoint_path is None:
        return model
    target = run_dir / FOLDER
    if target.is_dir():  # the run is resumed
        verify_checkpoint(target)
        return str(target.resolve())
    source = Path(config.model.checkpoint_path)
    check_checkpoint(source, Path(model))
    verify_checkpoint(source)
    unfinished = target.with_name(f".{FOLDER}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(source, unfinished, copy_function=_link_or_copy)
    os.rename(unfinished, target)
    return str(target.resolve())


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
