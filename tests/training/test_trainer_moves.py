"""A trainer moves to other memory and back between steps, and takes the same steps.

On a CPU, `torch.clone` is a move to other memory: whatever still reads the old memory, trains stale weights.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy

from engine.plans.trainers import make_trainer
from engine.protocols import Batch
from engine.training.model_trainer import ModelTrainer
from engine.training.ranks import ALONE, ON_HOST, Ranks, Sharded
from engine.training.trainer_settings import TrainerSettings

MakeBatch = Callable[..., Batch]
SETTINGS: dict[str, Any] = {"learning_rate": 1e-2, "policy_mini_batch_size": 2, "kl_loss_coef": 0.1, "device": "cpu"}


@pytest.fixture
def sharded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sharded]:
    """The only rank of a real process group: its model is sharded as that of several."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Sharded(torch.device("cpu"))
    dist.destroy_process_group()


def train_and_move(batch: MakeBatch, **options: Any) -> None:
    """Three steps; the reference model moves as well."""
    moving, staying = (ModelTrainer(**options) for _ in range(2))
    for step in range(3):
        metrics, expected = moving.train(batch(step)), staying.train(batch(step))
        assert {name for name in expected if metrics[name] != expected[name] and "seconds" not in name} == set(), step
        moving.offload()
        moving.move(torch.clone)
        moving.onload()
    assert all(torch.equal(moving.weights()[name], value) for name, value in staying.weights().items())


@pytest.mark.parametrize("bf16", ["off", "on"])
def test_a_trainer_that_was_moved_takes_the_same_steps(model_path: str, batch: MakeBatch, bf16: str) -> None:
    train_and_move(batch, model_path=model_path, settings=TrainerSettings(**SETTINGS, bf16=bf16))


@pytest.mark.parametrize("bf16", ["off", "on"])
def test_step_counts_move_with_a_trainer_that_loaded_its_checkpoint_on_the_host(
    model_path: str, batch: MakeBatch, tmp_path: Path, bf16: str
) -> None:
    """A fused optimizer refuses a step count that is on another device than the moments."""
    settings = TrainerSettings(**SETTINGS, bf16=bf16)
    first, resumed = ModelTrainer(model_path, settings), ModelTrainer(model_path, settings)
    first.train(batch(0))
    first.save(str(tmp_path / "step-1"), 1)
    resumed.load(str(tmp_path / "step-1"))
    there: list[torch.Tensor] = []
    resumed.move(lambda tensor: there.append(tensor.clone()) or there[-1])  # type: ignore[func-returns-value]
    read = {id(value) for values in resumed.optimizer.state.values() for value in values.values()}
    assert read and read <= {id(tensor) for tensor in there}


def test_a_rank_that_was_moved_takes_the_same_steps(model_path: str, batch: MakeBatch, sharded: Ranks) -> None:
    """Embeddings, final norm and head are in no layer, and belong to FSDP's root."""
    train_and_move(batch, model_path=model_path, settings=TrainerSettings(**SETTINGS), ranks=sharded)


@pytest.mark.parametrize("ranks", [ALONE, ON_HOST])
def test_a_trainer_that_takes_turns_releases_what_it_gathers_to_publish_and_to_save(
    model_path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: Ranks
) -> None:
    released: list[None] = []
    trainer = ModelTrainer(model_path, TrainerSettings(**SETTINGS), ranks=ranks)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append(None))
    trainer.weights()
    assert len(released) == ranks.on_host
    trainer.save(str(tmp_path / "checkpoint"), 0)
    assert len(released) == 2 * ranks.on_host


def test_offloaded_shards_and_moments_stay_where_their_gradients_arrive(
    model_path: str, batch: MakeBatch, sharded: Sharded
) -> None:
    """The device of the shards is a CPU here: an offloaded trainer must ask for no move at all."""
    sharded._offload = CPUOffloadPolicy(pin_memory=False)
    settings = TrainerSettings(**SETTINGS, cpu_offload=True)
    trainer = ModelTrainer(model_path, settings, ranks=sharded)
    trainer.train(batch(0))
    moved: list[torch.Tensor] = []
    trainer.move(lambda tensor: moved.append(tensor) or tensor)  # type: ignore[func-returns-value]
    assert moved == []
    assert trainer.train(batch(1))["optimizer_steps"] == 2


@pytest.mark.parametrize("bf16", ["off", "on"])
def test_models_masters_and_moments_leave_the_device(model_path: str, batch: MakeBatch, bf16: str) -> None:
    trainer = ModelTrainer(model_path, TrainerSettings(**SETTINGS, bf16=bf16))
    trainer.train(batch(0))
    left: list[int] = []
    trainer.move(lambda tensor: left.append(tensor.data_ptr()) or tensor)  # type: ignore[func-returns-value]
    assert trainer.reference is not None
    moments = [value for state in trainer.optimizer.state.values() for value in state.values() if value.dim()]
    held = [*trainer.model.parameters(), *trainer.reference.model.parameters(), *trainer.policy.trained, *moments]
    assert {tensor.data_ptr() for tensor in held} <= set(left) and moments


@pytest.mark.parametrize(
    ("in_turns", "bf16", "home"), [(True, "on", "cpu"), (True, "off", "cpu"), (False, "off", "meta")]
)
def test_a_trainer_that_takes_turns_is_made_in_host_memory(
    model_path: str, in_turns: bool, bf16: str, home: str
) -> None:
    """Torch's meta device stands for a GPU, which vLLM may be using while the trainer is made."""
    settings = TrainerSettings(**SETTINGS | {"device": "meta"}, bf16=bf16)
    trainer = make_trainer(model_path, settings, in_turns=in_turns)
    held = [*trainer.model.parameters(), *trainer.reference.model.parameters(), *trainer.policy.trained]
    assert {tensor.device.type for tensor in held if tensor.device.type != home} == set()
    assert trainer.policy.device.type == "meta", "it comes there with `onload`"
