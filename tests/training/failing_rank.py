"""Makes a rank fail where a test wants it.

The test writes a number into a file `WHERE-RANK` of the folder FAULTS: so many calls from then on, that rank raises in
its optimizer's `step` (after it has changed weights and moments), in its `loss`, in its `forward` pass, when it takes
its `snapshot`, or when it must `offload`. After the number may come where it raises next, at the first call.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.training import gradients, model_trainer


def failing(where: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        if is_due(Path(os.environ["FAULTS"]) / f"{where}-{dist.get_rank()}"):
            raise RuntimeError(f"out of memory in {where}")
        return result

    return call


def is_due(file: Path) -> bool:
    if not file.exists():
        return False
    number, _, following = file.read_text().partition(" ")
    if number != "1":
        file.write_text(f"{int(number) - 1} {following}".strip())
        return False
    file.unlink()
    if following:
        file.with_name(f"{following}-{dist.get_rank()}").write_text("1")
    return True


def fail_as_told() -> None:
    """In the process of a rank, before its model is made."""
    torch.optim.AdamW.step = failing("step", torch.optim.AdamW.step)  # type: ignore[method-assign]
    gradients.policy_loss = failing("loss", gradients.policy_loss)
    gradients.Policy._logprobs = failing("forward", gradients.Policy._logprobs)  # type: ignore[method-assign]
    model_trainer.ModelSnapshot = failing("snapshot", model_trainer.ModelSnapshot)  # type: ignore[assignment, misc]
    model_trainer.ModelTrainer.offload = failing("offload", model_trainer.ModelTrainer.offload)  # type: ignore[method-assign]
