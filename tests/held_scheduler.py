"""vLLM's own scheduler, except that it holds requests at a gate. Imported by vLLM only, as its `scheduler_cls`."""

from pathlib import Path
from typing import Any

from gate import OPEN, QUOTA, TURN, Gate
from vllm.v1.core.sched.scheduler import Scheduler

NEVER = 2**62


class HeldScheduler(Scheduler):
    """A held request keeps its place and its cache and is not scheduled, as vLLM does where a decode must wait for its
    turn; everything else (aborts, pauses, installs) goes its way."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate = Gate(Path(self.vllm_config.additional_config["gate"])).words
        self.turn = 0
        self.quota = OPEN
        self.before: dict[str, int] = {}

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.gate[TURN] != self.turn:
            self.turn, self.quota = self.gate[TURN], self.gate[QUOTA]
            self.before = {request.request_id: _tokens(request) for request in self.running}
        for request in self.running:
            held = _tokens(request) - self.before.get(request.request_id, 0) >= self.quota
            request.next_decode_eligible_step = NEVER if held else 0
        return super().schedule(*args, **kwargs)


def _tokens(request: Any) -> int:
    """Sampled or being sampled."""
    return int(request.num_output_tokens + request.num_output_placeholders)
