"""Processes of one machine share one copy of a publication, and nobody sees a copy that is not complete."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM
from weight_holders import WIDE, digest, hold, inodes, manifest, own_memory, replica, worker

from engine.actors.transports import DistributedTransport, pack_tensors, unpack_tensors
from engine.rollout.torch import transfer
from engine.rollout.vllm.staged_weights import StagingArea
from engine.runtime.plan import DistributedSettings
from engine.shared_weights import NAME, Memory, PublishedTensors, copy_of, find, publication_of, turn

SPAWN = multiprocessing.get_context("spawn")


def published(publication: str = "") -> PublishedTensors:
    memory = Memory(manifest(), publication)
    try:
        memory.tensors[0].copy_(torch.arange(WIDE, dtype=torch.float32))
        memory.tensors[1].copy_(torch.randn(3, 5, generator=torch.Generator().manual_seed(1)))
        return memory.complete()
    finally:
        memory.close()


@contextmanager
def process(run: Any, *given: Any) -> Iterator[tuple[Any, Connection]]:
    ours, theirs = SPAWN.Pipe()
    started = SPAWN.Process(target=run, args=(theirs, *given), daemon=True)
    started.start()
    try:
        yield started, ours
    finally:
        started.kill()
        started.join()


def test_replicas_of_one_machine_hold_one_copy_of_each_version() -> None:
    transport = DistributedTransport(DistributedSettings(backend="gloo", bucket_bytes=1 << 20, timeout_s=60.0))
    with process(replica) as (_, first), process(replica) as (_, second):
        alone = {name: value.clone() for name, value in published().items()}  # as the store of another machine has it
        alone["odd too"] = alone["odd"]
        memory = []
        for _ in range(3):
            kept = transport.pack(alone)
            for link in (first, second):
                link.send(transfer.offer(kept, "127.0.0.1", backend="gloo", bucket_bytes=1 << 20, timeout_s=60.0))
            answers = [link.recv() for link in (first, second)]
            expected = (alone["wide"].sum(dtype=torch.float64).item(), alone["odd"].float().sum().item(), True)
            assert [digest for digest, _, _ in answers] == [expected] * 2
            one, other = (held for _, _, held in answers)
            assert len(one) == 1 and one == other, "one memory, held by both, and none of the version before"
            memory.append([own for _, own, _ in answers])
        for first_version, last_version in zip(memory[0], memory[-1], strict=True):
            assert last_version - first_version < WIDE * 4 / 2, "a version is in a process's own memory"


def test_what_the_trainer_wrote_is_not_sent_on_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = published()
    monkeypatch.setattr(transfer, "_received", lambda *given: pytest.fail("it was sent"))
    offered = transfer.offer(weights, "127.0.0.1", backend="gloo", bucket_bytes=1 << 20, timeout_s=60.0)
    taken = transfer.receive(offered)
    assert taken.publication == weights.publication and inodes(os.getpid(), weights.publication)
    publication = weights.publication
    del weights
    for sender in [one for one in threading.enumerate() if one.name == f"weights-{offered.port}"]:
        sender.join()
    assert torch.equal(taken["wide"], torch.arange(WIDE, dtype=torch.float32)) and taken["odd"] is taken["odd too"]
    del taken
    assert not inodes(os.getpid(), publication) and find(manifest(), publication) is None


@pytest.mark.parametrize("complete", [False, True])
def test_a_process_that_is_killed_leaves_nothing_and_gives_up_its_turn(complete: bool) -> None:
    publication = publication_of(None)
    with process(hold, publication, complete) as (holder, link):
        assert link.recv() == "made"
        found = find(manifest(), publication)
        assert (found is not None) is complete, "a copy in the making is not shown"
        os.kill(holder.pid, signal.SIGKILL)
        with turn(publication):
            holder.join()
            assert found is None or found["wide"][-1] == 7.0, "who has it keeps it"
            del found
            assert find(manifest(), publication) is None


def test_a_turn_is_not_waited_for_beyond_its_limit() -> None:
    publication = publication_of(None)
    with process(hold, publication, False) as (_, link):
        assert link.recv() == "made"
        with turn(publication, 0.01):
            assert find(manifest(), publication) is None
        link.send("on")
        with turn(publication):  # the one given up leaves no lock behind
            pass


def model_in(directory: Path, vocabulary: int) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(directory)
    return model


def taken(weights: Any, source: str) -> Any:
    """Weights as a replica gets them: in memory of another process of its machine, or in Ray's object store."""
    if source == "object store":
        import ray

        return unpack_tensors(ray.get(ray.put(pack_tensors(weights))))
    memory, _ = copy_of(weights)
    try:
        return memory.complete()
    finally:
        memory.close()


def handles_of_memory() -> int:
    """How many this process has of publications and of Ray's object store."""
    links = [f"/proc/self/fd/{handle}" for handle in os.listdir("/proc/self/fd")]
    names = [os.readlink(link) for link in links if os.path.islink(link)]
    return sum(f"/memfd:{NAME}" in name or "/plasma" in name for name in names)


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("source", ["memory", "object store"])
def test_the_workers_of_vllm_read_the_copy_that_their_machine_has(tmp_path: Path, source: str) -> None:
    size = 64 << 20
    weights = model_in(tmp_path / "model", size // 2 // 8 // 4).state_dict()
    digests = {name: digest(value) for name, value in weights.items()}
    (tmp_path / "place").mkdir()
    areas = [StagingArea(str(tmp_path / "model"), 0.001, tmp_path / "place", maps=True) for _ in range(2)]
    versions = [taken({name: value + version for name, value in weights.items()}, source) for version in range(2)]
    before, handles = own_memory(os.getpid()), handles_of_memory()
    for version in range(2):
        for area in areas:
            area.write(version, versions[version])
            area.write(version, versions[version])  # a repeated order
    assert own_memory(os.getpid()) - before < size / 2
    assert not list((tmp_path / "place").glob("*/*/*.safetensors"))
    assert handles_of_memory() == handles + 4, "the installed version and the next, of each"
    versions.clear()
    areas[0].close()
    areas[1].keep_only(0)
    directory = areas[1].directory(0)
    assert directory is not None
    with process(worker, str(directory)) as (_, link):
        assert link.recv() == digests
        after_reading, after_keeping, own = link.recv()
        assert (after_reading, after_keeping) == (False, True) and own < size / 2
    assert handles_of_memory() == handles // 2 + 1
    areas[1].close()
    assert handles_of_memory() == 0


def test_weights_in_no_shared_memory_are_staged_as_files(tmp_path: Path) -> None:
    weights = model_in(tmp_path / "model", 16).state_dict()
    area = StagingArea(str(tmp_path / "model"), 1.0, maps=True)
    shared = taken(weights, "memory")
    half = PublishedTensors({**shared, "lm_head.weight": weights["lm_head.weight"]}, "half")
    for version, given in enumerate([PublishedTensors(weights, "none"), half, dict(shared)]):
        area.write(version, given)
        directory = area.directory(version)
        assert directory is not None and [path.name for path in directory.iterdir()] == ["000000.safetensors"]
    area.close()


def test_backends_of_one_machine_stage_the_same_files(tmp_path: Path) -> None:
    model = model_in(tmp_path / "model", 16)
    versions = [PublishedTensors(model.state_dict(), publication_of(None)) for _ in range(3)]
    (tmp_path / "place").mkdir()
    one, other = (StagingArea(str(tmp_path / "model"), 0.001, tmp_path / "place") for _ in range(2))

    def copies() -> tuple[int, int]:
        """Files of all staged versions, and how many names they have."""
        found = [path.stat().st_ino for path in (tmp_path / "place").glob("*/*-*/*.safetensors")]
        return len(set(found)), len(found)

    for area in (one, other):
        area.write(1, versions[1])
    files, names = copies()
    assert files > 2 and names == 2 * files
    for area in (one, other):
        area.write(2, versions[2])
        area.write(2, versions[2])  # a repeated order
    assert copies() == (2 * files, 4 * files), "the installed version and the next, once each"
    for area in (one, other):
        area.keep_only(2)
    one.close()
    assert copies() == (files, files)
    directory = other.directory(2)
    assert directory is not None
    kept: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        kept |= load_file(path)
    assert kept.keys() == other.tensors.shapes.keys()
    assert all(torch.equal(value, versions[2][name]) for name, value in kept.items())
    other.close()
