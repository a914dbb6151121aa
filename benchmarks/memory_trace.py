"""The memory of a rank in a train step, traced tensor by tensor, against the estimate of `engine check`.

    python benchmarks/memory_trace.py [--ranks 4] [--tokens 8192] [--small]

Builds a model in the shape of Qwen3-4B from fake tensors, which have shapes but no data, so no memory is needed. Shards
it as the first of `--ranks` ranks in a process group that sends nothing, and takes two optimizer steps of one pass over
a row of `--tokens` tokens, with and without activation checkpointing. The trace counts the bytes of all living
tensors after each operation. Kernels, CUDA contexts and the fragmentation of the allocator are not in it.
"""

import argparse
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen3Config

from engine.config.loading import parse_config
from engine.config.memory import GB, Model, shown, trainer_memory
from engine.training.batch import MicroBatch
from engine.training.gradients import Policy, checkpoint_layers
from engine.training.model_trainer import _adamw as make_optimizer
from engine.training.ranks import Sharded
from engine.training.trainer_settings import TrainerSettings

FOUR_B: dict[str, Any] = {
    "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
}  # fmt: skip
SMALL: dict[str, Any] = {**FOUR_B, "num_hidden_layers": 4, "vocab_size": 16_000}


class LivingTensors(TorchDispatchMode):
    """Counts the bytes of all storages that exist, after each operation."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0
        for tensor in known:
            self._note(tensor)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor):
                self._note(one)
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        total = 0
        for key, reference in list(self._storages.items()):
            storage = reference()
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total

    def _note(self, tensor: torch.Tensor) -> None:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        self._storages.setdefault(id(storage), weakref.ref(storage))


def trace(shape: dict[str, Any], ranks: int, tokens: int, *, checkpoint: bool) -> tuple[int, int]:
    """The peak of two optimizer steps in bytes, and the number of parameters."""
    settings = TrainerSettings(device="cpu", bf16="on", packing="off", ranks=ranks, micro_batch_tokens=tokens)
    group = Sharded(torch.device("cpu"), on_host=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**shape), dtype=torch.float32).eval()
        count = sum(one.numel() for one in model.parameters())
        if checkpoint:
            checkpoint_layers(model)
        policy = Policy(model, settings, torch.device("cpu"), True, group)
        policy._parts, policy._examined = (model.base_model, model.lm_head), True  # it compares results, which are fake
        optimizer = make_optimizer(policy.trained, settings)
        places = torch.zeros(tokens, dtype=torch.int64)
        none = torch.zeros(tokens)
        micro = MicroBatch(
            input_ids=places[None], trajectories=1, rows=places, columns=places, targets=places, behavior=none,
            proximal=None, reference=None, advantages=none, weights=none, staleness=places, causes=places,
        )  # fmt: skip
        living = LivingTensors([*policy.trained, *model.buffers()])
        with living:
            for _ in range(2):
                (-policy.logprobs(micro, entropy=False).chosen.sum()).backward()
                torch.nn.utils.clip_grad_norm_(policy.trained, 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    return living.peak, count


def estimated(shape: dict[str, Any], count: int, ranks: int, tokens: int, *, checkpoint: bool) -> dict[str, float]:
    section: dict[str, Any] = {
        "ranks": ranks, "bf16": "on", "device": "cpu", "micro_batch_tokens": tokens,
        "activation_checkpointing": checkpoint,
    }  # fmt: skip
    config = parse_config({"model": {"make": "arithmetic"}, "trainer": section})
    model = Model(
        parameters=count, layers=shape["num_hidden_layers"], hidden=shape["hidden_size"],
        intermediate=shape["intermediate_size"], heads_width=shape["num_attention_heads"] * shape["head_dim"],
        kv_width=shape["num_key_value_heads"] * shape["head_dim"], vocabulary=shape["vocab_size"], context=40_960,
        head=shape["head_dim"], largest=shape["vocab_size"] * shape["hidden_size"], bytes=2, head_norms=True,
    )  # fmt: skip
    return trainer_memory(model, config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--small", action="store_true", help="use four layers and a small vocabulary")
    given = parser.parse_args()
    shape = SMALL if given.small else FOUR_B
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=given.ranks)
    for checkpoint in (True, False):
        peak, count = trace(shape, given.ranks, given.tokens, checkpoint=checkpoint)
        parts = estimated(shape, count, given.ranks, given.tokens, checkpoint=checkpoint)
        how = "with" if checkpoint else "without"
        print(
            f"{count / 1e9:.2f} B parameters, {given.ranks} ranks, {how} checkpointing: trace {peak / GB:.1f} GB, "
            f"estimate {sum(parts.values()) / peak:.2f} x: {shown(parts)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
