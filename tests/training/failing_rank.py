"""The process of a rank that fails where a test wants it: `python failing_rank.py FD PARENT`, as `rank_process`.

The test writes a number into a file `WHERE-RANK` of the folder FAULTS: so many calls from then on, that rank raises in
its optimizer's `step` (after it has changed weights and moments), in its `loss`, or in its `forward` pass.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.training import gradients, rank_process


def failing(where: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        if is_due(Path(os.environ["FAULTS"]) / f"{where}-{dist.get_rank()}"):
            raise RuntimeError("out of memory")
        return result

    return call


def is_due(file: Path) -> bool:
    if not file.exists():
        return False
    left = int(file.read_text()) - 1
    if left:
        file.write_text(str(left))
    else:
        file.unlink()
    return not left


if __name__ == "__main__":
    torch.optim.AdamW.step = failing("step", torch.optim.AdamW.step)  # type: ignore[method-assign]
    gradients.policy_loss = failing("loss", gradients.policy_loss)
    gradients.Policy._logprobs = failing("forward", gradients.Policy._logprobs)  # type: ignore[method-assign]
    rank_process.main()
