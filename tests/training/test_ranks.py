"""A trainer of several ranks: its steps are those of one, it resumes on any number, and a lost rank is a lost trainer.

Ranks are real processes over gloo. Most are forked: see `forked_ranks`.
"""

import logging
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from forked_ranks import SETTINGS, ForkServer, LocalNodes, LocalRanks, OfRanks, starts_of
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from weight_holders import inodes

from engine.errors import ConfigError, EngineError, TrainerSpoiled
from engine.protocols import Batch
from engine.runtime.stacks import can_answer, dump_stacks, register_stacks, stacks_descriptor, stacks_file
from engine.training import ranked_trainer
from engine.training.child_ranks import ChildRanks
from engine.training.custom_functions import CustomFunction
from engine.training.model_checkpoint import optimizer_tensors
from engine.training.ranked_trainer import RankedTrainer
from engine.training.trainer_settings import TrainerSettings

MakeBatch = Callable[..., Batch]


def close_to(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.allclose(one[name], other[name], atol=1e-5, rtol=1e-5) for name in one)


def test_three_steps_equal_those_of_one_rank_and_resume_on_any_number(
    of_ranks: OfRanks, batch: MakeBatch, tmp_path: Path
) -> None:
    with of_ranks(1) as alone:
        expected, figures = [], []
        for step in range(3):
            expected.append(alone.train(batch(step)))
            figures.append(alone.rollout_figures())
        weights = alone.weights()
    for count, begins in ((2, 0), (1, 1), (3, 2)):  # each continues from the checkpoint of the one before
        with of_ranks(count) as trainer:
            if begins:
                assert trainer.load(str(tmp_path / f"step-{begins}")) == begins
            trainer.score(batch(begins), "old_logprobs")
            metrics = trainer.train(batch(begins))
            for name, value in expected[begins].items():
                if not name.startswith("seconds_"):
                    assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
            gathered = [rollout for own in trainer.rollout_figures() for rollout in own]
            for mine, rollout in zip(gathered, chain.from_iterable(figures[begins]), strict=True):
                assert mine == pytest.approx(rollout, rel=1e-3, abs=1e-5), "every rank's share is known"
            trainer.save(str(tmp_path / f"step-{begins + 1}"), begins + 1)
            final = {name: value.clone() for name, value in trainer.weights().items()}
    assert close_to(final, weights)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "step-3", dtype=torch.float32)
    assert close_to(loaded.state_dict(), weights)


def test_ranks_that_share_a_model_in_each_node_take_the_steps_of_one(
    of_ranks: OfRanks, batch: MakeBatch, tmp_path: Path
) -> None:
    with of_ranks(1) as alone:
        expected = alone.train(batch(0, 2))
        moments = {name: value.clone() for name, value in optimizer_tensors(alone.model, alone.optimizer).items()}
        weights = alone.weights()
    with of_ranks(4, nodes=2, hybrid_sharding=True) as trainer:
        before = {name: value.clone() for name, value in trainer.weights().items()}
        metrics = trainer.train(batch(0, 2))
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        assert close_to(trainer.weights(), weights)
        trainer.save(str(tmp_path / "saved"), 1)
        trainer.start_from(before, 0)
        assert all(torch.equal(before[name], value) for name, value in trainer.weights().items())
        wrong = {name: value[:1] for name, value in before.items()}
        with pytest.raises(ConfigError, match="is of another model"):
            trainer.start_from(wrong, 0)
    with of_ranks(1) as other:
        assert other.load(str(tmp_path / "saved")) == 1
        assert close_to(other.weights(), weights)
        assert close_to(optimizer_tensors(other.model, other.optimizer), moments), "0.1 of the gradients"


def test_the_ranks_of_a_node_read_one_copy_of_a_large_batch(
    of_ranks: OfRanks, batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that cannot get it is lost."""

    def gone(self: LocalRanks, message: bytes) -> str:
        raise EngineError("its actor has died")

    with of_ranks(2) as trainer:
        expected, weights = trainer.train(batch(0)), dict(trainer.weights())
    monkeypatch.setattr(ranked_trainer, "SHARED_BYTES", 2_000)
    with of_ranks(2, nodes=2) as trainer:
        metrics = trainer.train(batch(0))
        sizes = [os.fstat(host._shared.fileno()).st_size for host in trainer._hosts]
        assert sizes[0] == sizes[1] > 2_000
        assert {n: v for n, v in metrics.items() if "seconds" not in n} == {
            n: v for n, v in expected.items() if "seconds" not in n
        }
        assert all(torch.equal(value, weights[name]) for name, value in trainer.weights().items())
        assert [os.fstat(host._shared.fileno()).st_size for host in trainer._hosts] == sizes, "a small call is sent"
        monkeypatch.setattr(LocalRanks, "share", gone)
        with pytest.raises(TrainerSpoiled, match="rank 1 of 2 died"):
            trainer.train(batch(1))


def test_a_loss_of_the_user_trains_the_same_on_two_ranks(of_ranks: OfRanks, batch: MakeBatch) -> None:
    examples = Path(__file__).resolve().parents[2] / "examples"
    loss = CustomFunction(field="trainer.loss", spec="custom_objectives:sapo", directory=str(examples))
    found = []
    for count in (1, 2):
        with of_ranks(count, loss=loss.spec, custom=(loss,)) as trainer:
            figures = trainer.train(batch(0))
            found.append((dict(trainer.weights()), figures["loss_gate"], figures["loss"]))
    (one, *figures), (two, *others) = found
    assert figures == pytest.approx(others, rel=1e-3) and figures[0] > 0
    assert close_to(one, two)


def test_a_rank_with_fewer_passes_or_none_joins_the_others(
    of_ranks: OfRanks, group: Callable[..., Any], as_batch: Callable[..., Batch]
) -> None:
    """One long trajectory among short ones, then a step in which one trajectory teaches anything."""
    responses = [[5] * 60, [6] * 3, [7] * 4, [8] * 5, [9] * 3, [4] * 4]
    uneven = as_batch(0, [group(0, [1.0, 0.0, 0.5, 0.0, 1.0, 0.2], responses=responses)])
    lonely = as_batch(1, [group(1, [1.0, 1.0, 1.0]), group(2, [0.5])])
    lonely.groups[0].trajectories[0].reward = 0.0
    lonely.groups[0].trajectories[1:] = []
    settings = {"micro_batch_tokens": 12, "kl_loss_coef": 0.0, "old_policy": "behavior", "advantage": "reinforce_pp"}
    with of_ranks(1, **settings) as alone, of_ranks(2, **settings) as trainer:
        for taught in (uneven, lonely):
            assert trainer.train(taught)["grad_norm"] == pytest.approx(alone.train(taught)["grad_norm"], rel=1e-3)
        assert close_to(trainer.weights(), alone.weights())


def test_ranks_leave_out_a_trajectory_that_one_of_them_cannot_compute(
    of_ranks: OfRanks, flawed_path: str, flawed_batch: MakeBatch
) -> None:
    settings = {"policy_mini_batch_size": 0, "micro_batch_tokens": 12, "kl_loss_coef": 0.0}
    with of_ranks(1, flawed_path, **settings) as alone, of_ranks(2, flawed_path, **settings) as trainer:
        for step in range(2):
            expected, metrics = alone.train(flawed_batch(step)), trainer.train(flawed_batch(step))
            assert metrics["nonfinite_trajectories"] == expected["nonfinite_trajectories"] == 1
            assert metrics["optimizer_steps"] == 1
            assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        found, weights = ({name: value.nan_to_num() for name, value in of.weights().items()} for of in (trainer, alone))
        assert close_to(found, weights)


def other_model(folder: Path) -> str:
    config = LlamaConfig(
        vocab_size=12, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder / "other")
    return str(folder / "other")


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_an_error_of_all_ranks_is_raised_and_a_killed_rank_ends_the_whole_trainer(
    of_ranks: OfRanks, batch: MakeBatch, tmp_path: Path
) -> None:
    with of_ranks(2) as trainer:
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "file").write_text("")
        with pytest.raises(ConfigError, match="is not empty"):
            trainer.save(str(tmp_path / "full"), 1)
        assert trainer.train(batch(0))["optimizer_steps"] == 2, "an error of all ranks costs the call alone"

        pids = trainer.pids
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(TrainerSpoiled, match=r"rank 1 of 2 died \(SIGKILL\)"):
            trainer.rollout_figures()  # in which no rank waits for another, and reports its end instead
        assert alive(pids) == []
        with pytest.raises(TrainerSpoiled, match="rank 1 of 2 died"):
            trainer.weights()


def test_with_a_stopped_rank_every_rank_writes_its_stacks(tmp_path: Path) -> None:
    file = stacks_file(tmp_path, "trainer")
    register_stacks(file)
    with closing(ChildRanks(2, stacks_descriptor())) as ranks:
        while not all(map(can_answer, ranks.pids)):  # they have just been started
            os.sched_yield()
        os.kill(ranks.pids[1], signal.SIGSTOP)
        os.waitid(os.P_PID, ranks.pids[1], os.WSTOPPED | os.WNOWAIT)
        assert dump_stacks(os.getpid(), file) == f"its stacks are in {file}"
        own, first, second = re.split(f", started by process {os.getpid()},", file.read_text())
        assert "in test_with_a_stopped_rank" in own and f"process {ranks.pids[0]}" in own
        assert "engine/training/rank_process.py" in first and f"process {ranks.pids[1]}" in first
        assert "T (stopped)" in second


def test_a_call_that_a_stopped_rank_holds_up_ends_when_its_trainer_is_closed(
    of_ranks: OfRanks, batch: MakeBatch
) -> None:
    """As the worker does when the order exceeds its time limit."""
    with of_ranks(2) as trainer, ThreadPoolExecutor(1) as thread:
        os.kill(trainer.pids[1], signal.SIGSTOP)
        training = thread.submit(trainer.train, batch(0))
        trainer.close()
        assert isinstance(training.exception(60), TrainerSpoiled) and alive(trainer.pids) == []


def test_what_the_first_rank_logs_is_in_the_log_of_its_trainer(
    of_ranks: OfRanks, model_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = LlamaConfig.from_pretrained(model_path)
    config.alibi = True
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING), of_ranks(2, str(tmp_path), kl_loss_coef=0.0):
        assert caplog.text.count("rows are padded, not packed: LlamaForCausalLM biases attention by distance") == 1


def test_a_killed_rank_of_another_node_ends_the_whole_trainer(server: ForkServer, model_path: str) -> None:
    nodes = LocalNodes(2)
    with starts_of(server):
        trainer = RankedTrainer(model_path, TrainerSettings(**SETTINGS, ranks=2), nodes=nodes)
    (other,) = nodes.started[0].pids
    os.kill(other, signal.SIGKILL)
    with pytest.raises(TrainerSpoiled, match=r"rank 1 of 2 died \(SIGKILL\)"):
        trainer.rollout_figures()
    assert alive([*trainer.pids, other]) == []


def test_a_checkpoint_on_storage_that_a_node_does_not_share_is_refused(
    server: ForkServer, model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/proc/self/cwd` is another directory for a process that works in another one."""
    settings = TrainerSettings(**SETTINGS, ranks=2)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("DIRECTORY", str(tmp_path / "first"))
    with starts_of(server):
        trainer = RankedTrainer(model_path, settings, nodes=LocalNodes(2, directory=tmp_path / "second"))
    with closing(trainer):
        with pytest.raises(EngineError, match="is not shared: this node does not see what the first rank writes"):
            trainer.save("/proc/self/cwd/saved", 1)
        trainer.save(str(tmp_path / "saved"), 1)


PARENT = """
import os
import sys
from engine.training.child_ranks import ChildRanks


class Up:
    def __reduce__(self):
        return os.write, (1, b"up\\n")


ranks = ChildRanks(2)
for link in ranks.links:
    link.send(Up())
print(*ranks.pids, flush=True)
sys.stdin.read()
"""
"""Its ranks say that they are up when they unpack their first message."""


def test_ranks_die_with_their_parent() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        lines = [parent.stdout.readline().split() for _ in range(3)]
        ranks = [psutil.Process(int(pid)) for line in lines for pid in line if pid != "up"]
        assert len(ranks) == 2
        ranks[0].suspend()
        parent.kill()
    assert psutil.wait_procs(ranks, timeout=30)[1] == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_progresses_with_each_pass_tensor_and_file(
    of_ranks: OfRanks, batch: MakeBatch, tmp_path: Path, ranks: int
) -> None:
    with of_ranks(ranks) as trainer:
        progressed: list[str] = []
        trainer.watch_progress(lambda: progressed.append(call))
        call = "score"
        trainer.score(batch(0), "ref_logprobs")
        call = "train"
        trainer.train(batch(0))
        call = "weights"
        tensors = {id(tensor) for tensor in trainer.weights().values()}
        call = "save"
        trainer.save(str(tmp_path / "saved"), 1)
        seen = {name: progressed.count(name) for name in ("score", "train", "weights", "save")}
        assert seen["train"] > seen["score"] >= 1, "a pass of each minibatch, and those that score old log-probs"
        assert seen["weights"] == len(tensors)
        assert seen["save"] == 3, "the file of the weights, all weights, the moments"


def test_what_a_rank_refuses_is_raised_as_it_is(of_ranks: OfRanks, tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match="has 12 tokens, but the trained model has 16")
    with refused, of_ranks(2, reference_path=other_model(tmp_path)):
        pass


def test_a_checkpoint_that_one_rank_cannot_write_is_no_lost_trainer(
    of_ranks: OfRanks, batch: MakeBatch, tmp_path: Path
) -> None:
    """The first rank writes the weights, each its moments."""
    with of_ranks(2) as trainer:
        trainer.train(batch(0))
        for pid in trainer.pids:
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (512, hard))  # bytes, as if the disk were full
            with pytest.raises(Exception, match="File too large") as raised:
                trainer.save(str(tmp_path / "step-1"), 1)
            assert not isinstance(raised.value, TrainerSpoiled)
            assert not (tmp_path / "step-1").exists()
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
        trainer.train(batch(1))
        trainer.save(str(tmp_path / "step-2"), 2)
        assert trainer.load(str(tmp_path / "step-2")) == 2


def test_gathered_weights_may_be_bfloat16(of_ranks: OfRanks, batch: MakeBatch) -> None:
    """Shards stay float32: an update of 1e-6 is not lost."""
    options = {"bf16": "on", "fp32_head": True, "activation_checkpointing": True, "learning_rate": 1e-6}
    with of_ranks(1, **options) as alone, of_ranks(2, **options) as trainer:
        before = {name: value.clone() for name, value in trainer.weights().items()}
        memory = inodes(trainer.pids[0])
        expected, metrics = alone.train(batch(0)), trainer.train(batch(0))
        held = [trainer.weights() for _ in range(2)]
        after = held.pop()
        assert memory < inodes(trainer.pids[0])
        assert len(inodes(trainer.pids[0])) == 3, "two publications are in use, and the copy that undoes a step is kept"
        assert len(inodes(trainer.pids[1])) == 1, "the copy of its own shards"
    assert all(torch.equal(value, held[0][name]) for name, value in after.items()), "the ranks have died"
    assert metrics["reference_kl_k3"] == pytest.approx(expected["reference_kl_k3"], abs=1e-2)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)
    moved = [(after[name] - before[name]).abs().max() for name in before]
    assert all(0 < change < 1e-5 for change in moved)


def test_a_step_failing_in_one_rank_is_undone_in_all_unless_a_pass_is_left_half_way(
    of_ranks: OfRanks, batch: MakeBatch, group: Callable[..., Any], as_batch: Callable[..., Batch], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with of_ranks(2, faults=tmp_path) as trainer, of_ranks(2, faults=tmp_path) as spared:
        spared.train(batch(0))
        spared.train(batch(1))
        for step in range(2):  # the first time, there are no moments yet
            before = {name: value.clone() for name, value in trainer.weights().items()}
            for fault, call in (("step-0", "2"), ("step-1", "2"), ("loss-1", "2"), ("snapshot-1", "1")):
                (tmp_path / fault).write_text(call)
                with pytest.raises(Exception, match="out of memory") as raised:
                    trainer.train(batch(step))
                assert not isinstance(raised.value, TrainerSpoiled), fault
                assert all(torch.equal(before[name], value) for name, value in trainer.weights().items()), fault
            trainer.train(batch(step))
        expected = spared.weights()
        assert all(torch.equal(expected[name], value) for name, value in trainer.weights().items())

        (tmp_path / "loss-0").write_text("1")
        with pytest.raises(Exception, match="out of memory") as raised:
            spared.train(batch(2, 2))
        assert not isinstance(raised.value, TrainerSpoiled), "before its only optimizer step, nothing is to be undone"
        (tmp_path / "step-1").write_text("1")
        with pytest.raises(TrainerSpoiled, match="out of memory"):
            spared.train(batch(2, 2))
        monkeypatch.setattr(ranked_trainer, "SETTLE_S", 0.5)
        (tmp_path / "loss-1").write_text("1 forward")
        long = group(2, [1.0, 0.0, 0.5, 0.0], responses=[[token] * 60 for token in range(5, 9)])  # a pass for each
        both = r"rank 1 of 2 failed: RuntimeError: out of memory in loss .*; then RuntimeError: .* in forward"
        with pytest.raises(TrainerSpoiled, match=both):
            trainer.train(as_batch(2, [long]))
        assert alive([*trainer.pids, *spared.pids]) == []


def test_a_rank_that_leaves_the_others_in_a_warm_up_step_spoils_the_trainer(
    of_ranks: OfRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranked_trainer, "SETTLE_S", 0.5)
    with of_ranks(2, faults=tmp_path) as trainer:
        (tmp_path / "forward-1").write_text("1")
        with pytest.raises(TrainerSpoiled, match="rank 1 of 2 failed: RuntimeError: out of memory in forward"):
            trainer.imitate([([2, 3], [4, 5]), ([3, 4], [5, 6, 7])], 1e-3)
        assert alive(trainer.pids) == []


def test_a_rank_that_fails_where_the_other_does_not_spoils_the_trainer(of_ranks: OfRanks, tmp_path: Path) -> None:
    with of_ranks(2, faults=tmp_path) as trainer:
        (tmp_path / "offload-1").write_text("1")
        with pytest.raises(TrainerSpoiled, match="rank 1 of 2 failed alone: RuntimeError: out of memory in offload"):
            trainer.offload()
        assert alive(trainer.pids) == []


def test_ranks_that_take_turns_compute_nothing_before_they_are_on_their_device(
    of_ranks: OfRanks, batch: MakeBatch, tmp_path: Path
) -> None:
    """Also if they begin with a checkpoint, as those of a restarted trainer do."""
    with of_ranks(2) as expected, of_ranks(2, in_turns=True) as trainer:
        for one in (expected, trainer):
            one.offload()
            one.onload()
            one.train(batch(0))
        assert figures(trainer.train(batch(1))) == figures(expected.train(batch(1)))
        trainer.save(str(tmp_path), 2)
        later = figures(expected.train(batch(2)))
    with of_ranks(2, in_turns=True) as resumed:
        resumed.load(str(tmp_path))
        resumed.onload()
        assert figures(resumed.train(batch(2))) == later


def figures(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if "seconds" not in name}


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"cpu_offload": True}, {"bf16": "on"}])
def test_two_gpus_take_the_steps_of_one(of_ranks: OfRanks, batch: MakeBatch, options: dict[str, Any]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with of_ranks(1, device="cuda") as alone:
        expected = alone.train(batch(0))
        weights = alone.weights()
    with of_ranks(2, device="cuda", **options) as trainer:
        metrics = trainer.train(batch(0))
        found = trainer.weights()
    loose = 0.1 if options.get("bf16") else 1e-3
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=loose)
    assert options.get("bf16") or close_to(found, weights)
