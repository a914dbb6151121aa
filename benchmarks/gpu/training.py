"""Parts about the built-in trainer: its gradients, speed and memory, its moves to the host, its repeatability."""

import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.config.loading import parse_config
from engine.config.memory import GB, Model, trainer_memory
from engine.config.model_description import number_bytes, tensor_shapes
from engine.protocols import Batch
from engine.training.batch import Sample, samples_of
from engine.training.model_checkpoint import ModelSnapshot
from engine.training.model_trainer import ModelTrainer
from engine.training.ranks import Sharded, own_part
from engine.training.shared_weights import ReusedMemory
from engine.training.trainer_settings import TrainerSettings
from gpu.bench import Bench, Figures

PEAK_FLOPS = {"H100 80GB HBM3": 989e12, "H100 PCIe": 756e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16 of a GPU, by a part of its name, as its data sheet says."""

# -- trainers and batches ----------------------------------------------------------------------------------------------


def samples_in(batch: Batch) -> list[Sample]:
    return [sample for group in batch.groups for sample in samples_of(group)]


def score(trainer: ModelTrainer, batch: Batch) -> None:
    """Give the batch the log-probs of the trainer's present weights, as if these had sampled it."""
    scored = trainer.policy.score(samples_in(batch))
    for trajectory, logprobs in zip((one for group in batch.groups for one in group.trajectories), scored, strict=True):
        trajectory.logprobs[:] = logprobs.tolist()


def state_of(trainer: ModelTrainer) -> dict[str, Tensor]:
    """Copies in host memory of the weights of the passes, their masters, and the moments."""
    state = {f"weights {name}": value for name, value in trainer.model.named_parameters()}
    state |= {f"masters {index}": value for index, value in enumerate(trainer.policy.trained)}
    for index, master in enumerate(trainer.policy.trained):
        state |= {f"{kind} {index}": value for kind, value in trainer.optimizer.state.get(master, {}).items()}
    return {name: own_part(value).to("cpu", copy=True) for name, value in state.items()}


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- gradients ---------------------------------------------------------------------------------------------------------


def gradients(bench: Bench) -> Iterator[Figures]:
    """The gradient of a train step against that of float32 on the CPU. An error is a norm relative to that of the exact
    gradient: of all parameters, and of the worst one."""
    path, batch = bench.model("0.15b"), bench.batch(0, 2, 4, 32, 64)
    first = ModelTrainer(path, TrainerSettings(device="cpu", bf16="off", max_grad_norm=0.0))
    score(first, batch)
    exact, seconds = gradient_of(first, batch)
    yield {"cpu float32": {"seconds": seconds}}
    here = bench.device.type
    kinds: dict[str, dict[str, Any]] = {
        **({f"{here} float32": {"bf16": "off"}} if bench.gpu else {}),
        f"{here} float32, padded": {"bf16": "off", "packing": "off"},
        f"{here} bfloat16": {"bf16": "on"},
        f"{here} bfloat16, padded": {"bf16": "on", "packing": "off"},
        f"{here} bfloat16, checkpointed": {"bf16": "on", "activation_checkpointing": True},
        "cpu bfloat16": {"bf16": "on", "device": "cpu"},  # slow on some CPUs
    }
    for kind, options in kinds.items():
        trainer = ModelTrainer(path, TrainerSettings(**{"device": here, "max_grad_norm": 0.0, **options}))
        found, seconds = gradient_of(trainer, batch)
        parts = {name: float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact}
        worst = max(parts, key=lambda name: parts[name])
        yield {
            kind: {"error": error_of(found, exact), "worst": [worst, parts[worst]], "seconds": seconds,
                   "packed": trainer.policy.packing.packed},
        }  # fmt: skip


def gradient_of(trainer: ModelTrainer, batch: Batch, device: str = "cpu") -> tuple[dict[str, Tensor], float]:
    """The gradient of a train step, as the optimizer gets it: by parameter, in float64 on `device`. And its seconds."""
    found: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        for name, parameter in trainer.model.named_parameters():
            gradient = trainer.policy.masters.of(parameter).grad
            assert gradient is not None
            found[name] = gradient.detach().to(device, torch.float64)

    hook = trainer.optimizer.register_step_pre_hook(keep)
    seconds = trainer.train(batch)["seconds_train"]
    hook.remove()
    return found, seconds


def error_of(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Error of a whole gradient, relative to its norm."""
    difference = sum(float((value - exact[name].to(value.device)).square().sum()) for name, value in found.items())
    return float((difference / sum(float(value.square().sum()) for value in exact.values())) ** 0.5)


# -- speed and memory --------------------------------------------------------------------------------------------------


def speed_of_the_small_model(bench: Bench) -> Iterator[Figures]:
    yield from speed(bench, "0.6b", 8, activation_checkpointing=False, micro_batch_tokens=16_384)


def speed_of_the_large_model(bench: Bench) -> Iterator[Figures]:
    yield from speed(bench, "4b", 4, activation_checkpointing=True, micro_batch_tokens=8_192)


KERNELS: dict[str, dict[str, Any]] = {
    "sdpa": {"attention": "sdpa"},
    "varlen": {"attention": "varlen"},
    "varlen, compiled": {"attention": "varlen", "compile": True},
}


def attention_kernels(bench: Bench) -> Iterator[Figures]:
    """The small model with each kernel for packed rows, and with compiled layers: the error of its gradient against
    float32, speed, and memory."""
    from torch._dynamo.utils import counters

    small = bench.batch(7, 2, 4, 200, 300)
    exact_trainer = ModelTrainer(bench.model("0.6b"), TrainerSettings(device=bench.device.type, bf16="off"))
    score(exact_trainer, small)
    exact, _ = gradient_of(exact_trainer, small)
    del exact_trainer
    bench.empty()
    options = {"activation_checkpointing": False, "micro_batch_tokens": 16_384}
    kinds = KERNELS if bench.gpu else {"sdpa": KERNELS["sdpa"]}
    for kind, own in kinds.items():
        trainer, _ = loaded(bench, "0.6b", {**options, **own})
        found, seconds = gradient_of(trainer, small, bench.device.type)
        figures: dict[str, Any] = {"gradient_error": error_of(found, exact), "small_step_s": seconds}
        del found
        batches = [bench.batch(step, 4, 8, 256 - 16 * step, 1024 - 24 * step) for step in range(3)]
        for name, batch in {"first": batches[0], "same shapes": batches[0], "new shapes": batches[1]}.items():
            score(trainer, batch)
            bench.forget_peak()
            step = measured_step(bench, "0.6b", trainer, batch)
            figures[name] = {figure: step.get(figure) for figure in ("seconds", "tokens_per_s", "mfu", "tensors_gb")}
        scoring = bench.seconds(score, trainer, batches[2])
        figures["scoring_tokens_per_s"] = work_of(trainer, batches[2])["tokens"] / scoring
        yield {kind: figures | {"graphs": counters["stats"]["unique_graphs"]}}
        del trainer
        bench.empty()


def host_optimizer(bench: Bench) -> Iterator[Figures]:
    """The large model with masters, gradients and moments in host memory."""
    options = {"activation_checkpointing": True, "micro_batch_tokens": 8_192, "cpu_offload": True}
    yield from speed(bench, "4b", 2, steps=("first", "same shapes"), **options)


def speed(
    bench: Bench, name: str, groups: int, *, steps: tuple[str, ...] = ("first", "same shapes", "new shapes"),
    **options: Any,
) -> Iterator[Figures]:  # fmt: skip
    """Train steps on groups of 8 responses of 512 to 1024 tokens, after prompts of 256, which are shared."""
    trainer, figures = loaded(bench, name, options)
    yield figures
    batches = {"first": bench.batch(0, groups, 8, 256, 1024), "new shapes": bench.batch(1, groups, 8, 240, 1000)}
    batches["same shapes"] = batches["first"]
    bench.forget_peak()
    scoring = min(bench.seconds(score, trainer, batches["first"]) for _ in range(2))
    work = work_of(trainer, batches["first"])
    yield {"scoring": {"seconds": scoring, "tokens_per_s": work["tokens"] / scoring, **bench.peak()}}
    bench.forget_peak()
    for step in steps:
        yield {f"step, {step}": measured_step(bench, name, trainer, batches[step])}
    yield from publications(bench, trainer)


def publication(bench: Bench) -> Iterator[Figures]:
    """Publications, beside a copy of as many bytes from the device into pinned memory."""
    trainer, figures = loaded(bench, "0.6b", {})
    yield figures
    size = 0
    for more in publications(bench, trainer):
        yield more
        size = more["publish"]["bytes"]
    source = torch.ones(size, dtype=torch.uint8, device=bench.device)
    copy = torch.ones(size, dtype=torch.uint8, pin_memory=bench.gpu)
    seconds = [bench.seconds(copy.copy_, source) for _ in range(3)]
    yield {"bare copy": {"seconds": seconds, "gb_per_s": [size / GB / one for one in seconds]}}


def publications(bench: Bench, trainer: ModelTrainer) -> Iterator[Figures]:
    """Four publications as the engine makes them: replicas hold each until the next one is there, so that the first two
    get new memory and the others that of the one before the last."""
    seconds: list[float] = []
    held: Mapping[str, Tensor] = {}
    for _ in range(4):
        made: list[Mapping[str, Tensor]] = []
        seconds.append(bench.seconds(lambda made=made: made.append(trainer.weights())))
        [held] = made
    size = sum({value.data_ptr(): value.nbytes for value in held.values()}.values())
    own = trainer.model.state_dict()
    yield {
        "publish": {
            "bytes": size, "seconds": seconds, "gb_per_s": [size / GB / one for one in seconds],
            "pinned": bench.gpu and all(value.is_pinned() for value in held.values()),
            "equal": all(torch.equal(value, own[name].cpu().to(value.dtype)) for name, value in held.items()),
        },
    }  # fmt: skip


def long_row(bench: Bench) -> Iterator[Figures]:
    """Rows of 24 and 32 thousand tokens, each in a pass of its own."""
    options = {"activation_checkpointing": True, "micro_batch_tokens": 32_768}
    trainer, figures = loaded(bench, "0.6b", options)
    yield figures
    batch = bench.batch(0, 1, 2, 64, 32_768 - 64)
    bench.forget_peak()
    for step in ("first", "again"):
        yield {f"step, {step}": measured_step(bench, "0.6b", trainer, batch)}


def loaded(bench: Bench, name: str, options: dict[str, Any]) -> tuple[ModelTrainer, Figures]:
    """A trainer in bfloat16, and what is known before its first step."""
    path, device, made = bench.model(name), bench.device.type, list[ModelTrainer]()
    settings = TrainerSettings(device=device, bf16="on", **options)
    seconds = bench.seconds(lambda: made.append(ModelTrainer(path, settings)))
    figures = {
        "settings": options, "load_s": seconds, "packed": made[0].policy.packing.packed,
        "estimate_gb": estimate(path, device, options),
    }  # fmt: skip
    return made[0], figures


def measured_step(bench: Bench, name: str, trainer: ModelTrainer, batch: Batch) -> Figures:
    work, metrics = work_of(trainer, batch), dict[str, float]()
    seconds = bench.seconds(lambda: metrics.update(trainer.train(batch)))
    parameters = sum(one.numel() for one in trainer.model.parameters())
    flops = bench.shape(name).flops(parameters, **work) / seconds
    return {
        "seconds": seconds, "tokens_per_s": work["tokens"] / seconds, "tflops": flops / 1e12, "mfu": mfu(bench, flops),
        "passes_s": metrics["seconds_forward_backward"], **work, **bench.peak(),
    }  # fmt: skip


def work_of(trainer: ModelTrainer, batch: Batch) -> dict[str, int]:
    """How many tokens are computed, shared prompts once, how many are trained, and how many pairs attention has."""
    work = {"tokens": 0, "trained": 0, "attended": 0}
    for micro, _ in trainer.policy.passes(samples_in(batch)):
        work["tokens"] += micro.input_ids.numel()
        work["trained"] += len(micro.targets)
        rows, width = micro.input_ids.shape
        work["attended"] += (
            rows * width * (width + 1) // 2 if micro.position_ids is None else int((micro.position_ids + 1).sum())
        )
    return work


def mfu(bench: Bench, flops: float) -> float | None:
    """Share of what the GPU's data sheet promises; None if it is not known here."""
    name = torch.cuda.get_device_name() if bench.gpu else ""
    peak = next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
    return None if peak is None else flops / peak


def estimate(path: str, device: str, options: dict[str, Any]) -> dict[str, float]:
    """What `engine check` expects the trainer to need on its device, in GB."""
    section = {"device": device, "bf16": "on", **options}
    config = parse_config({"model": {"make": "arithmetic"}, "trainer": section})
    model = Model.of(Path(path), tensor_shapes(Path(path)), number=number_bytes(Path(path)))
    assert model is not None
    parts = trainer_memory(model, config)
    return {"sum": sum(parts.values()) / GB, **{name: size / GB for name, size in parts.items()}}


# -- moves to the host -------------------------------------------------------------------------------------------------


def offload(bench: Bench) -> Iterator[Figures]:
    """A trainer leaves the device and returns, as in a shared pool: first with cold host memory, then again."""
    trainer = ModelTrainer(bench.model("0.6b"), TrainerSettings(device=bench.device.type, bf16="on"))
    trainer.train(bench.batch(0, 2, 4, 64, 256))
    before = state_of(trainer)
    for turn in ("first", "again"):
        held = bench.allocated()
        leaving = bench.seconds(trainer.offload)
        left = bench.allocated()
        gone = bench.peak().get("device_gb")
        returning = bench.seconds(trainer.onload)
        size = (held - left) / 1e9
        yield {
            turn: {
                "gb": size, "left_gb": left / 1e9, "device_gb_while_away": gone, "offload_s": leaving,
                "offload_gb_per_s": size / leaving, "onload_s": returning, "onload_gb_per_s": size / returning,
                "equal": equal(before, state_of(trainer)),
            },
        }  # fmt: skip
    metrics = trainer.train(bench.batch(1, 2, 4, 64, 256))
    yield {"trains_afterwards": metrics["optimizer_steps"] == 1}


def fsdp(bench: Bench) -> Iterator[Figures]:
    """A rank of a sharded trainer over NCCL, which is alone: its steps against those of an unsharded trainer, and its
    moves."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device, path = bench.device.type, bench.model("0.15b")
    store = dist.FileStore(str(bench.folder / "rendezvous"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if bench.gpu else "gloo", store=store, rank=0, world_size=1)
    one = torch.ones(1, device=bench.device)
    yield {"backend": dist.get_backend(), "first_all_reduce_s": bench.seconds(lambda: dist.all_reduce(one))}
    batches = [bench.batch(step, 2, 4, 32, 64) for step in range(2)]
    kinds: dict[str, dict[str, Any]] = {
        "float32": {"bf16": "off"}, "bfloat16": {"bf16": "on"},
        "bfloat16, in host memory": {"bf16": "on", "cpu_offload": True},
    }  # fmt: skip
    for kind, options in kinds.items():
        shared: dict[str, Any] = {"device": device, "publish_dtype": "float32", "learning_rate": 1e-4}
        alone = ModelTrainer(path, TrainerSettings(bf16=options["bf16"], **shared))
        ranks = Sharded(bench.device, cpu_offload=options.get("cpu_offload", False))
        ranks.count = 2  # a rank that is alone would load and round its weights as an unsharded trainer
        trainer = ModelTrainer(path, TrainerSettings(**options, **shared), ranks=ranks)
        ranks.count = 1
        for batch in batches:
            score(alone, batch)
        expected, found = ([one.train(batch)["grad_norm"] for batch in batches] for one in (alone, trainer))
        whole, sharded = alone.weights(), trainer.weights()
        farthest = max(float((sharded[name].float() - whole[name].float()).abs().max()) for name in whole)
        held, before = bench.allocated(), state_of(trainer)
        leaving = bench.seconds(trainer.offload)
        left = bench.allocated()
        returning = bench.seconds(trainer.onload)
        same = equal(before, state_of(trainer))
        score(trainer, batches[0])
        yield {
            kind: {
                "gradient_norms": found, "of_one_rank": expected, "largest_difference_of_weights": farthest,
                "offload_s": leaving, "onload_s": returning, "left_the_device_gb": (held - left) / 1e9,
                "equal": same, "trains_afterwards": trainer.train(batches[0])["grad_norm"],
            },
        }  # fmt: skip
        del alone, trainer, ranks
        bench.empty()
    dist.destroy_process_group()


# -- repeatability -----------------------------------------------------------------------------------------------------


def repeat(bench: Bench) -> Iterator[Figures]:
    """The same train step twice from the same state: as it is, and with torch's deterministic algorithms."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the deterministic algorithms need it
    trainer = ModelTrainer(bench.model("0.6b"), TrainerSettings(device=bench.device.type, bf16="on"))
    batches = [bench.batch(step, 2, 4, 64, 256) for step in range(2)]
    trainer.train(batches[0])
    score(trainer, batches[1])
    memory = ReusedMemory(pins=bench.device.type == "cuda")
    snapshot = ModelSnapshot(trainer.model, trainer.optimizer, trainer.policy.masters, memory)
    before = [value.detach().to("cpu", copy=True) for value in trainer.policy.trained]

    def trained() -> tuple[list[Tensor], float]:
        metrics = trainer.train(batches[1])
        weights = [value.detach().to("cpu", copy=True) for value in trainer.policy.trained]
        snapshot.restore()
        return weights, metrics["grad_norm"]

    for kind in ("as it is", "deterministic"):
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            torch.use_deterministic_algorithms(kind == "deterministic", warn_only=True)
            (one, norm), (other, norm_again) = trained(), trained()
        pairs = list(zip(one, other, before, strict=True))
        yield {
            kind: {
                "equal": all(torch.equal(first, second) for first, second, _ in pairs),
                "gradient_norms": [norm, norm_again],
                "largest_difference": max(float((first - second).abs().max()) for first, second, _ in pairs),
                "largest_update": max(float((first - old).abs().max()) for first, _, old in pairs),
                "warnings": sorted({str(one.message)[:150] for one in raised}),
            },
        }  # fmt: skip
