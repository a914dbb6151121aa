"""The device of a measurement, its models and batches, and its clock and memory meters. Used by every part.

Models have random weights in bfloat16 and are made at their first use. Late imports: some parts need only torch.
"""

import gc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

import torch

from engine.protocols import Batch

Figures: TypeAlias = Mapping[str, Any]
VOCABULARY = 64_000
"""Token ids of `make_batch` are below this."""
ENTROPY = 3.0
"""Of a next token, in nats, about: random weights of the usual size give nearly equal logits, which hide rounding."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen3 model, named as in its configuration."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    vocab_size: int = 151_936

    def flops(self, parameters: int, tokens: int, trained: int, attended: int) -> float:
        """Floating point operations of forward and backward passes, without those that are computed again. `parameters`
        includes one tied embedding; `trained` tokens have logits; `attended` is the number of pairs of tokens."""
        head = self.vocab_size * self.hidden_size
        attention = 2 * self.num_hidden_layers * self.num_attention_heads * self.head_dim * attended
        return 6.0 * ((parameters - head) * tokens + head * trained + attention)


SHAPES = {
    "0.15b": Shape(1024, 3072, 6, 16, 8, vocab_size=VOCABULARY),
    "0.5b": Shape(896, 4864, 24, 14, 2, head_dim=64),
    "0.6b": Shape(1024, 3072, 28, 16, 8),
    "4b": Shape(2560, 9728, 36, 32, 8),
}
"""The last three are those of Qwen2.5-0.5B, Qwen3-0.6B and Qwen3-4B."""
TINY = Shape(32, 64, 2, 4, 2, head_dim=32, vocab_size=VOCABULARY)
"""In place of all of them on a CPU. vLLM for CPUs has no smaller heads."""


class Bench:
    """What a part needs. `folder` holds the models of all parts."""

    def __init__(self, device: str, folder: Path, limit_s: float = inf) -> None:
        """`limit_s`: seconds until the part is killed."""
        self._ends = time.monotonic() + limit_s
        self.device = torch.device(device)
        self.gpu = self.device.type == "cuda"
        self.folder = folder
        if self.gpu and not torch.cuda.is_available():
            raise SystemExit("torch finds no GPU")
        if not self.gpu:
            torch.set_num_threads(1)  # tiny shapes gain nothing from more

    def left_s(self) -> float:
        """Seconds that the part has left."""
        return self._ends - time.monotonic()

    def shape(self, name: str) -> Shape:
        return SHAPES[name] if self.gpu else TINY

    def sized(self, full: int, tiny: int) -> int:
        """A number of tokens or repetitions: less on a CPU."""
        return full if self.gpu else tiny

    def batch(self, step: int, groups: int, samples: int, prompt: int, tokens: int) -> Batch:
        """Groups of responses of `tokens` / 2 to `tokens` tokens, with different rewards."""
        from trainer import make_batch

        small = () if self.gpu else (2, 2, 8, 16)
        return make_batch(step, *(small or (groups, samples, prompt, tokens)), equal=0)

    def model(self, name: str) -> str:
        """The directory of a model."""
        from transformers import AutoModelForCausalLM, Qwen3Config

        shape = self.shape(name)
        path = self.folder / (name if self.gpu else "tiny")
        if not path.is_dir():
            config = Qwen3Config(**asdict(shape), tie_word_embeddings=True, max_position_embeddings=40_960)
            torch.manual_seed(0)
            with torch.device(self.device):
                model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            spread = (2 * (torch.tensor(float(shape.vocab_size)).log().item() - ENTROPY)) ** 0.5
            with torch.no_grad():  # of logits: their standard deviation, for embeddings of that of `initializer_range`
                model.model.norm.weight.fill_(spread / (config.initializer_range * shape.hidden_size**0.5))
            unfinished = path.with_suffix(".unfinished")
            model.save_pretrained(unfinished)
            os.rename(unfinished, path)
            del model
            self.empty()
        return str(path)

    def empty(self) -> None:
        """Free the memory of objects that nothing refers to."""
        gc.collect()
        if self.gpu:
            torch.cuda.empty_cache()

    # -- meters

    def synchronize(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[..., Any], *arguments: Any) -> float:
        """Time until the device has done the work."""
        self.synchronize()
        began = time.perf_counter()
        work(*arguments)
        self.synchronize()
        return time.perf_counter() - began

    def allocated(self) -> int:
        """Bytes of tensors on the device."""
        self.synchronize()
        return torch.cuda.memory_allocated() if self.gpu else 0

    def forget_peak(self) -> None:
        self.empty()
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> dict[str, float]:
        """GB since `forget_peak`: of tensors, of torch's allocator, and now on the device, which has the CUDA context,
        too."""
        if not self.gpu:
            return {}
        free, total = torch.cuda.mem_get_info()
        return {
            "tensors_gb": torch.cuda.max_memory_allocated() / 1e9,
            "allocator_gb": torch.cuda.max_memory_reserved() / 1e9,
            "device_gb": (total - free) / 1e9,
        }
