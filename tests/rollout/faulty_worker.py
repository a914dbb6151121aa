"""The engine's worker extension, except that installs go wrong in the second worker. Imported by vLLM only."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.rollout.vllm.worker_extension import WeightsExtension


class FaultyExtension(WeightsExtension):
    """Each line of the file `fault` in the model's directory says what goes wrong in one of the next installs."""

    rank: int

    def _reload(self, weights: Iterable[tuple[str, Any]]) -> None:
        fault, _, name = self._fault().partition(" ")
        if fault == "fail":
            raise RuntimeError("the device is gone")
        if fault == "skip":
            weights = ((one, tensor) for one, tensor in weights if one != name)
        if fault == "alter":
            weights = ((one, tensor + 1 if one == name else tensor) for one, tensor in weights)
        super()._reload(weights)
        if fault == "change":
            self.model_runner.get_model().get_parameter(name).data.add_(1)

    def _fault(self) -> str:
        place = Path(self.vllm_config.model_config.model) / "fault"
        second = self.parallel_config.data_parallel_index * self.parallel_config.world_size + self.rank == 1
        if not second or not place.exists():
            return ""
        fault, *later = place.read_text().splitlines()
        if later:
            place.write_text("\n".join(later))
        else:
            place.unlink()
        return fault
