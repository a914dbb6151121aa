"""vLLM's worker for CPUs, with the sleep that it has on GPUs. Imported by vLLM only."""

from pathlib import Path

import torch
from vllm.v1.worker.cpu_worker import CPUWorker


class SleepingWorker(CPUWorker):
    def sleep(self, level: int = 1) -> None:
        """On a GPU, level 2 keeps nothing but buffers: whatever is in the memory later is no weight. The file `levels`
        in the model's directory lists the levels."""
        with (Path(self.model_config.model) / "levels").open("a") as levels:
            levels.write(f"{level}")
        if level == 2:
            for parameter in self.model_runner.get_model().parameters():
                parameter.data.fill_(torch.nan)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Nothing to allocate."""
