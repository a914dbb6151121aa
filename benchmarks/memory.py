"""Memory of a trainer and of replicas on one machine, with a model of 302 M parameters in bfloat16.

    python benchmarks/memory.py [--kinds float32 bfloat16 "2 ranks" "2 ranks bfloat16"] [--ranks 2] [--replicas 2]
                                [--small]

Each trainer takes two train steps of few tokens and publishes, in a separate process. Its peak is the largest resident
memory of its process (with ranks: of each process). Then replicas of the embedded sampler stage version 1 over
`transport: distributed`, install it, and stage version 2. Their memory is the growth of the sum of their PSS, which
counts a page that n processes share as 1/n in each, so the sum is the memory that the machine provides.

With `--ranks`, it also measures the sum of the PSS of a trainer's ranks while they start, save a checkpoint, and resume
from it.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil
import torch
from trainer import make_batch, make_model, peak_of

from engine.rollout.torch import transfer
from engine.rollout.torch.torch_backend import TorchBackend
from engine.training.model_trainer import ModelTrainer
from engine.training.ranked_trainer import RankedTrainer
from engine.training.trainer_settings import TrainerSettings

KINDS = ("float32", "bfloat16", "2 ranks", "2 ranks bfloat16")


def pss(pid: int | str = "self") -> int:
    """Bytes of a process, including its share of shared pages; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def measure_trainer(kind: str, path: str, tokens: int) -> None:
    torch.set_num_threads(os.cpu_count() or 1)
    ranks = int(kind.split()[0]) if "rank" in kind else 1
    settings = TrainerSettings(
        activation_checkpointing=True, device="cpu", learning_rate=1e-6, ranks=ranks, publish_dtype="bfloat16",
        bf16="on" if "bfloat16" in kind else "off",
    )  # fmt: skip
    trainer: Any = (RankedTrainer if ranks > 1 else ModelTrainer)(path, settings)
    for step in range(2):
        trainer.train(make_batch(step, 2, 2, 64, tokens, 0))
    trained = [peak_of(pid) for pid in (trainer.pids if ranks > 1 else [os.getpid()])]
    weights = trainer.weights()
    published = sum({value.data_ptr(): value.nbytes for value in weights.values()}.values())
    peaks = [peak_of(pid) for pid in (trainer.pids if ranks > 1 else [os.getpid()])]
    print(json.dumps({"trained": trained, "peaks": peaks, "published": published}))
    if ranks > 1:
        trainer.close()


class Peak(threading.Thread):
    """Context manager: measures the largest total memory of the processes that this one has started."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.05):
            self.bytes = max(self.bytes, sum(pss(child.pid) for child in psutil.Process().children()))

    def __enter__(self) -> "Peak":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()


def measure_ranks(path: str, ranks: int, count: int) -> None:
    """Print the memory of all ranks together, in bytes per parameter of the model. `count`: number of parameters. The
    files are bfloat16, and freed memory is returned to the system at once."""
    from transformers import AutoModelForCausalLM

    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    plain: dict[str, Any] = {"activation_checkpointing": True, "device": "cpu", "learning_rate": 1e-6, "ranks": ranks}
    peaks: dict[str, Peak] = {}
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(f"{folder}/model")
        with Peak() as peaks["start with a reference, bfloat16"]:
            RankedTrainer(f"{folder}/model", TrainerSettings(**plain, bf16="on", kl_loss_coef=0.1)).close()
        with Peak() as peaks["start"]:
            trainer = RankedTrainer(f"{folder}/model", TrainerSettings(**plain, bf16="off"))
        with Peak() as peaks["train step"]:
            trainer.train(make_batch(0, 2, 2, 64, 64, 0))
        with Peak() as peaks["checkpoint"]:
            trainer.save(f"{folder}/step-1", 1)
        with Peak() as peaks["resume"]:
            trainer.load(f"{folder}/step-1")
        trainer.close()
    for name, peak in peaks.items():
        print(f"{ranks} ranks, {name}: {peak.bytes / count:.1f} bytes per parameter", flush=True)


def replica(link: Any, path: str) -> None:
    asyncio.run(stage_two(link, path))


async def stage_two(link: Any, path: str) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    backend = TorchBackend(model, rows=1, context=64)
    link.send(pss())
    for version in (1, 2):
        await backend.stage(version, transfer.receive(link.recv()))
        link.send("staged")
        link.recv()  # all have
        link.send(pss())
        if version == 1:
            await backend.pause("keep")
            await backend.install(version)
            await backend.resume()
    link.recv()


def measure_replicas(path: str, count: int) -> None:
    spawn = multiprocessing.get_context("spawn")
    model = make_published(path)
    size = sum({value.data_ptr(): value.nbytes for value in model.values()}.values())
    links, started = [], []
    for _ in range(count):
        ours, theirs = spawn.Pipe()
        started.append(spawn.Process(target=replica, args=(theirs, path), daemon=True))
        started[-1].start()
        links.append(ours)
    begun = sum(link.recv() for link in links)
    for version in (1, 2):
        for link in links:
            link.send(transfer.offer(model, "127.0.0.1", backend="gloo", bucket_bytes=64 << 20, timeout_s=300.0))
        for link in links:
            link.recv()
        for link in links:
            link.send("all")
        grown = sum(link.recv() for link in links) - begun
        print(f"{count} replicas, version {version} staged: {grown / 1e9:+.2f} GB, {grown / size:+.2f} copies")
        model = pack({name: value.clone() for name, value in model.items()})
    for link, process in zip(links, started, strict=True):
        link.send("end")
        process.join()


def make_published(path: str) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    weights: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).state_dict()
    return pack(weights)


def pack(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights as a store on another machine publishes them."""
    from engine.actors.transports import DistributedTransport
    from engine.workers.plan import DistributedSettings

    settings = DistributedSettings(backend="gloo", bucket_bytes=1, timeout_s=1.0)
    packed: dict[str, torch.Tensor] = DistributedTransport(settings).pack(weights)
    return packed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=2, help="number of replicas; 0: none")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of the longest response")
    parser.add_argument("--small", action="store_true", help="use a model of 8 M parameters, for a quick test")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "MODEL"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        kind, path = given.one
        measure_trainer(kind, path, given.tokens)
        return
    with tempfile.TemporaryDirectory(prefix="memory-") as directory:
        count = make_model(Path(directory), given.small)
        print(f"{count / 1e6:.0f} M parameters")
        for kind in given.kinds:
            asked = [sys.executable, __file__, f"--tokens={given.tokens}", "--one", kind, directory]
            done = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            each = [" + ".join(f"{one / count:.1f}" for one in found[name]) for name in ("trained", "peaks")]
            print(
                f"{kind:<17} peak, bytes per parameter: {each[0]} after training, {each[1]} after publication; "
                f"published: {found['published'] / count:.1f}"
            )
        if given.ranks:
            measure_ranks(directory, given.ranks, count)
        if given.replicas:
            measure_replicas(directory, given.replicas)


if __name__ == "__main__":
    main()
