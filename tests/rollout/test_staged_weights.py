"""A version is staged whole or not at all, and as one copy for all backends of a machine, in memory or in files."""

import asyncio
import gc
import json
import os
import re
import shutil
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM
from vllm_arguments import require_vllm
from weight_holders import digest, own_memory, process, vllm_worker, worker

from engine.actors.transports import pack_tensors, unpack_tensors
from engine.errors import EngineError
from engine.rollout.vllm import weight_receiver
from engine.rollout.vllm.mapped_weights import PLACES, MappedTensors, OpenMemory
from engine.rollout.vllm.staged_weights import PREFIX, StagingArea
from engine.rollout.vllm.weight_receiver import Incoming
from engine.training.shared_weights import NAME, Memory, PublishedTensors, ReusedMemory, copy_of, publication_of


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


def area_in(directory: Path, bucket_mb: float = 1.0, *, maps: bool = False) -> StagingArea:
    """A staging area of the model in a directory."""
    place = directory / "place"
    place.mkdir(exist_ok=True)
    return StagingArea(str(directory / "model"), bucket_mb, place, maps=maps)


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
    areas = [area_in(tmp_path, 0.001, maps=True) for _ in range(2)]
    gc.collect()
    others = handles_of_memory()  # of tests before this one
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
    assert handles_of_memory() == others + (handles - others) // 2 + 1
    areas[1].close()
    assert handles_of_memory() == others


class Workers:
    """An engine with one worker, in a process of its own."""

    def __init__(self, link: Connection) -> None:
        self.engine_core = self
        self.keeps = False
        self.loaded: dict[str, float] = {}
        self._link = link

    async def call_utility_all_async(
        self, utility: str, method: str, timeout: None, args: tuple[Any, ...], kwargs: None
    ) -> list[list[str]]:
        assert utility == "collective_rpc"
        self._link.send((self.keeps, method, args))
        wrong, self.loaded = await asyncio.to_thread(self._link.recv)
        return [[wrong]]


@pytest.mark.xdist_group("engines")  # where processes are forked from one that has imported vLLM
def test_a_backend_whose_worker_cannot_use_the_memory_uses_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    require_vllm()
    weights = model_in(tmp_path / "model", 16).state_dict()
    versions = [{name: value + version for name, value in weights.items()} for version in range(4)]

    async def control(call: Coroutine[Any, Any, Any], limit_s: float) -> Any:
        return await call

    async def scenario(link: Connection, refuses: bool) -> list[str]:
        area = area_in(tmp_path, maps=True)
        handles, engine = handles_of_memory(), Workers(link)
        incoming = Incoming(area, engine, control, 60.0, "never")
        for version in (0, 1):
            await incoming.stage(version, taken(versions[version], "memory"))
        assert await incoming.swap(0, 60.0) == "" and handles_of_memory() > handles
        engine.keeps = not refuses
        for version in (1, 0, 2, 3):  # the second as after a failed install
            if version > 1:
                await incoming.stage(version, taken(versions[version], "memory"))
            places = area.directory(version) / PLACES  # type: ignore[operator]
            if refuses and places.exists():
                places.write_text(places.read_text().replace("/fd/", "/fd/9"))
            assert await incoming.swap(version, 60.0) == ""
            assert engine.loaded == {name: digest(value) for name, value in versions[version].items()}
        await asyncio.get_running_loop().shutdown_default_executor()  # its threads drop what they were given
        assert len(list(area.root.glob("*/*.safetensors"))) == 4 and handles_of_memory() == handles
        area.close()
        said = [record.getMessage() for record in caplog.records if record.name == weight_receiver.__name__]
        caplog.clear()
        return said

    with process(vllm_worker) as (_, link):
        assert link.recv() == "ready"
        for refuses, reason in ((True, "No such file"), (False, "keeps a loaded tensor")):
            (said,) = asyncio.run(scenario(link, refuses))
            assert said.startswith("version 1 and all later ones are staged as files") and reason in said


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
    one, other = (area_in(tmp_path, 0.001) for _ in range(2))

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


def test_only_this_machines_directories_of_dead_owners_are_removed(tmp_path: Path) -> None:
    model_in(tmp_path / "model", 16)
    one, place = area_in(tmp_path), tmp_path / "place"
    left = shutil.copytree(one.root, place / f"{one.root.name}x")  # its lock is free
    elsewhere = shutil.copytree(one.root, place / f"{PREFIX}0123456789ab-x")  # its lock is free here
    area_in(tmp_path).close()
    assert one.root.exists() and elsewhere.exists() and not left.exists()
    one.close()


FAILURES = {
    "described": "the disk is full",
    "closed": "was closed",
    "closed meanwhile": "was closed",
    "closed at the end": "was closed",
}


@pytest.mark.parametrize("other", ["file", "machine", "version", "next version"])
def test_memory_that_is_not_the_staged_one_is_not_read(tmp_path: Path, other: str) -> None:
    tensors, reused = model_in(tmp_path / "model", 16).state_dict(), ReusedMemory(pins=False)
    _, manifest = copy_of(tensors)
    memory = reused.take(manifest)
    weights = memory.complete()
    area = area_in(tmp_path, maps=True)
    area.write(1, weights)
    directory = area.directory(1)
    assert directory is not None
    staged = MappedTensors.of(directory)
    assert staged is not None
    read = dict(staged)
    assert read.keys() == area.tensors.shapes.keys()
    opened: set[int] = set()
    (number,) = {int(place[1].rpartition("/")[2]) for place in json.loads((directory / PLACES).read_text())}
    if other != "machine":
        assert not memory.reclaim(), "it is staged"
        area.keep_only()
        del weights
        assert not memory.reclaim(), "a worker reads it"
        read.clear()
        if other == "file":
            memory = Memory(manifest)
        else:
            assert reused.take(manifest) is memory
        opened = {os.dup2(memory.handle, number)} - {memory.handle}  # the number is given out again
        if other != "next version":
            memory.complete()
    else:
        (boot,) = set(re.findall(r"\w{8}(?:-\w{4}){3}-\w{12}", (directory / PLACES).read_text()))
        (directory / PLACES).write_text((directory / PLACES).read_text().replace(boot, boot[::-1]))
        staged = MappedTensors.of(directory)
        assert staged is not None
    with pytest.raises(OSError, match="is not the memory that was staged"):
        iter(staged)
    for handle in opened:
        os.close(handle)
    area.close()


@pytest.mark.parametrize("how", FAILURES)
def test_a_version_that_cannot_be_staged_holds_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    weights = taken(model_in(tmp_path / "model", 16).state_dict(), "memory")
    area = area_in(tmp_path, maps=True)
    area.write(1, weights)
    handles, describe = handles_of_memory(), OpenMemory.describe

    def fail(memory: OpenMemory, directory: Path) -> None:
        if how == "described":
            raise OSError("the disk is full")
        if how == "closed meanwhile":
            area.close()
        describe(memory, directory)
        if how == "closed at the end":
            area.close()

    monkeypatch.setattr(OpenMemory, "describe", fail)
    if how == "closed":
        area.close()
    for version in (1, 2, 2):
        with pytest.raises(EngineError, match=rf"version {version} .*{FAILURES[how]}"):
            area.write(version, weights)
    if how == "described":
        assert handles_of_memory() == handles and area.directory(1) is not None and area.directory(2) is None
        assert len(list(area.root.iterdir())) == 2, "the version staged before, and the lock"
    area.close()
    assert handles_of_memory() == handles - 1 and not list((tmp_path / "place").iterdir())


def test_a_staged_version_whose_directory_is_absent_can_be_dropped(tmp_path: Path) -> None:
    weights = taken(model_in(tmp_path / "model", 16).state_dict(), "memory")
    area = area_in(tmp_path, maps=True)
    area.write(1, weights)
    handles, directory = handles_of_memory(), area.directory(1)
    assert directory is not None
    directory.rename(tmp_path / "aside")
    area.keep_only(2)
    assert handles_of_memory() == handles - 1
    area.close()


def test_files_that_cannot_be_written_are_reported(tmp_path: Path) -> None:
    weights = model_in(tmp_path / "model", 16).state_dict()
    area = area_in(tmp_path)
    area.root.rename(tmp_path / "aside")
    with pytest.raises(EngineError, match=r"version 1 cannot be staged in .*No such file"):
        area.write(1, weights)
    area.close()
