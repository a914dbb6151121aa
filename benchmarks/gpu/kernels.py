"""Parts about the work below the trainer: attention kernels, and transfers between GPU and host memory."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from engine.training.layout import Layout, Prefix, buckets_of
from engine.training.packed_attention import packed_attention
from engine.training.shared_weights import Manifest, Memory, find
from gpu.bench import Bench, Figures

# -- attention ---------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, HEAD = 16, 8, 128
PIECES = ((8, 901), (7, 1033), (12, 640), (5, 1511), (16, 477), (3, 2222), (9, 850), (10, 777))
"""Number of pieces of a bucket, and tokens of the longest one."""


def attention(bench: Bench) -> Iterator[Figures]:
    """Forward and backward pass of packed attention at shapes that are new to the process, and again, in milliseconds.
    cuDNN makes a plan for each new shape."""
    torch.empty(4 << 30, dtype=torch.uint8, device=bench.device)  # memory that torch has from now on
    for prompt in (0, 500):
        for cudnn in (True, False):
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
            attend(bench, 4, 333, prompt)
            first, again = ([attend(bench, *shape, prompt) for shape in PIECES] for _ in range(2))
            times = [[seconds * 1e3 for seconds, _ in turn] for turn in (first, again)]
            kind = f"{'after a shared prompt' if prompt else 'causal'}, cuDNN {'on' if cudnn else 'off'}"
            yield {
                kind: {"first_ms": median(times[0]), "first_max_ms": max(times[0]), "again_ms": median(times[1]),
                       "kernels": sorted(set().union(*(kernels for _, kernels in first)))},
            }  # fmt: skip


def attend(bench: Bench, pieces: int, longest: int, prompt: int) -> tuple[float, set[str]]:
    """Seconds of a forward and backward pass, and the kinds of attention that were computed."""
    layout, (query, key, value) = packed(bench, pieces, longest, prompt)
    module: Any = nn.Module()
    module.num_key_value_groups = HEADS // KV_HEADS
    kernels: set[str] = set()

    def passes() -> None:
        attended, _ = packed_attention(module, query, key, value, None, scaling=HEAD**-0.5, layout=layout)
        kernels.update(kernels_of(attended))
        attended.backward(torch.ones_like(attended))

    return bench.seconds(passes), kernels


def packed(bench: Bench, pieces: int, longest: int, prompt: int) -> tuple[Layout, list[Tensor]]:
    """Pieces of 80 to 100 % of the longest, perhaps after a shared prompt, with queries, keys and values."""
    lengths = sorted((longest - longest * index // (5 * pieces) for index in range(pieces)), reverse=True)
    buckets = [*buckets_of([prompt], 0), *buckets_of(lengths, prompt, Prefix(0, prompt))] if prompt else [
        *buckets_of(lengths, 0)
    ]  # fmt: skip
    values = [
        torch.randn(
            1, heads, prompt + sum(lengths), HEAD, device=bench.device, dtype=torch.bfloat16, requires_grad=True
        )
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    return Layout(buckets=tuple(buckets)).to(bench.device), values


def kernels_of(attended: Tensor) -> Iterator[str]:
    """The kinds of attention in what a tensor is computed from."""
    waiting: list[Any] = [attended.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "Attention" in node.name():
            yield node.name().removeprefix("ScaledDotProduct").removesuffix("Backward0")
        waiting += [parent for parent, _ in node.next_functions]


# -- transfers ---------------------------------------------------------------------------------------------------------

BYTES = 1 << 30
MANIFEST = Manifest(tensors=(("uint8", (BYTES,)),), names=(("weights", 0),))
READ_ONLY = 8
"""cudaHostRegisterReadOnly"""


def transfers(bench: Bench) -> Iterator[Figures]:
    """GB/s between the GPU and host memory, of a first and two later copies; the memfd is that of publications."""
    device = torch.empty(BYTES, dtype=torch.uint8, device=bench.device).random_()
    memory = Memory(MANIFEST)
    [shared] = memory.tensors
    pageable = torch.empty(BYTES, dtype=torch.uint8)
    yield {"GPU to memfd": rates(bench, lambda: shared.copy_(device))}
    yield {"GPU to pageable": rates(bench, lambda: pageable.copy_(device))}
    made: list[Tensor] = []
    seconds = bench.seconds(lambda: made.append(torch.empty(BYTES, dtype=torch.uint8, pin_memory=True)))
    [pinned] = made
    yield {"pinned_buffer_s": seconds, "GPU to pinned": rates(bench, lambda: pinned.copy_(device))}
    yield {"pinned to memfd": rates(bench, lambda: shared.copy_(pinned))}
    yield {"pinned to GPU": rates(bench, lambda: device.copy_(pinned))}
    yield {"pageable to GPU": rates(bench, lambda: device.copy_(pageable))}
    yield {"memfd to GPU": rates(bench, lambda: device.copy_(shared))}
    code, seconds = register(bench, shared, 0)
    yield {"register": {"code": code, "seconds": seconds}}
    if code == 0:
        yield {"registered memfd to GPU": rates(bench, lambda: device.copy_(shared))}
        yield {"GPU to registered memfd": rates(bench, lambda: shared.copy_(device))}
        yield {"unregister_s": bench.seconds(lambda: torch.cuda.cudart().cudaHostUnregister(shared.data_ptr()))}
    publication = memory.complete()
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # a forked process cannot use CUDA
        yield {
            "other process": pool.apply(read_publication, (bench.device.type, bench.folder, publication.publication))
        }
    memory.close()


def read_publication(device_name: str, folder: Path, publication: str) -> Figures:
    """In another process: bring the memory to the GPU, which is mapped read-only, as replicas have it."""
    bench = Bench(device_name, folder)
    found = find(MANIFEST, publication)
    if found is None:
        return {"error": "the publication is not found"}
    shared, device = found["weights"], torch.empty(BYTES, dtype=torch.uint8, device=bench.device)
    figures: dict[str, Any] = {"memfd to GPU": rates(bench, lambda: device.copy_(shared))}
    for flags in (0, READ_ONLY):
        code, seconds = register(bench, shared, flags)
        figures[f"register with flags {flags}"] = {"code": code, "seconds": seconds}
        if code == 0:
            figures["registered memfd to GPU"] = rates(bench, lambda: device.copy_(shared))
            break
    return figures


def rates(bench: Bench, copy: Callable[[], Any]) -> Sequence[float]:
    return [BYTES / 1e9 / bench.seconds(copy) for _ in range(3)]


def register(bench: Bench, memory: Tensor, flags: int) -> tuple[int, float]:
    """Make CUDA pin memory. Returns its error, 0 for none, and the seconds."""
    codes: list[int] = []
    call = torch.cuda.cudart().cudaHostRegister
    seconds = bench.seconds(lambda: codes.append(int(call(memory.data_ptr(), memory.nbytes, flags))))
    with suppress(RuntimeError):  # the next CUDA call would raise the error
        torch.zeros(1, device=bench.device)
    return codes[0], seconds
