"""Processes of one machine share one copy of a publication, and nobody sees a copy that is not complete."""

import os
import signal
import threading

import pytest
import torch
from weight_holders import WIDE, fill, fill_again, hold, inodes, manifest, process, reader, replica, values

from engine.actors.transports import DistributedTransport
from engine.rollout.torch import transfer
from engine.training.shared_weights import (
    LINK,
    Manifest,
    Memory,
    PublishedTensors,
    ReusedMemory,
    find,
    find_links,
    open_publication,
    publication_in,
    publication_of,
    turn,
)
from engine.workers.plan import DistributedSettings

pytestmark = pytest.mark.xdist_group("ranks")  # one process from which the holders are forked


def published(publication: str = "") -> PublishedTensors:
    memory = Memory(manifest(), publication)
    try:
        memory.tensors[0].copy_(torch.arange(WIDE, dtype=torch.float32))
        memory.tensors[1].copy_(torch.randn(3, 5, generator=torch.Generator().manual_seed(1)))
        return memory.complete()
    finally:
        memory.close()


def test_a_failed_search_for_a_publication_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = published()

    def fail(*_: int) -> bytes:
        raise OSError("cannot be read")

    monkeypatch.setattr(os, "pread", fail)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="cannot be read"):
        open_publication(weights.publication, os.getpid())
    assert len(os.listdir("/proc/self/fd")) == len(before)


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


def test_a_version_nobody_holds_any_more_gives_its_memory_to_the_next_one() -> None:
    reused = ReusedMemory(pins=False)
    before = inodes(os.getpid())
    first = fill(reused, 1.0)
    (memory,) = inodes(os.getpid()) - before
    arrays = [first["wide"][5:9].numpy()]
    del first
    fill(reused, 2.0)
    assert inodes(os.getpid()) > before | {memory} and set(arrays[0].tolist()) == {1.0}, "an array is a holder"
    arrays.clear()
    third = fill(reused, 3.0)
    assert len(inodes(os.getpid()) - before) == 1, "one version in use: memory that is not needed is freed"
    (memory,) = inodes(os.getpid(), third.publication)
    del third
    fourth = fill(reused, 4.0)
    assert inodes(os.getpid(), fourth.publication) == inodes(os.getpid()) - before == {memory}
    assert values(fourth) == values(find(manifest(), fourth.publication)) == {4.0}


def test_a_version_that_a_forked_child_may_hold_is_not_overwritten() -> None:
    """A child shares the open file of its parent, so no lock shows what it holds."""
    reused = ReusedMemory(pins=False)
    before = inodes(os.getpid())
    first = fill(reused, 1.0)
    mine = inodes(os.getpid()) - before
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writes)
        os.read(reads, 1)  # ends when the parent has published again
        os._exit(int(values(first) != {1.0}))
    os.close(reads)
    del first
    fill(reused, 2.0)
    fill(reused, 3.0)
    assert mine and not mine & inodes(os.getpid()), "the parent has freed it"
    os.close(writes)
    assert os.waitpid(child, 0)[1] == 0


def test_the_name_of_a_publication_must_fit_its_memory() -> None:
    with pytest.raises(ValueError, match="at most 64 bytes, but has 65"):
        PublishedTensors({}, "x" * 65)


@pytest.mark.parametrize("ends", ["killed", "released"])
def test_a_version_that_another_process_holds_does_not_change(ends: str) -> None:
    reused = ReusedMemory(pins=False)
    first = fill(reused, 1.0)
    memory = inodes(os.getpid(), first.publication)
    with process(reader) as (holder, link):
        link.send(first.publication)
        assert link.recv() == {1.0}
        del first
        for value in (2.0, 3.0):
            version = fill(reused, value)
            assert not inodes(os.getpid(), version.publication) & memory
            publication = version.publication
            del version
            link.send("")
            assert link.recv() == {1.0}
        if ends == "killed":
            holder.kill()
            holder.join()
        else:
            link.send(publication)
            assert link.recv() == {3.0}
        last = fill(reused, 4.0)
        kept = inodes(os.getpid(), last.publication)
        assert values(last) == {4.0} and (ends == "killed" or kept == memory)
        if ends == "released":
            link.send("")
            assert link.recv() == {3.0}


def test_memory_of_another_size_is_freed() -> None:
    reused = ReusedMemory(pins=False)
    before = inodes(os.getpid())
    large = fill(reused, 1.0)
    small = Manifest(tensors=(("float32", (8,)),), names=(("small", 0),))
    for value in (2.0, 3.0):
        memory = reused.take(small)
        memory.tensors[0].fill_(value)
        assert values(memory.complete()) == {value} and values(large) == {1.0}
    assert len(inodes(os.getpid()) - before) == 2
    del large
    reused.take(small)
    assert len(inodes(os.getpid()) - before) == 1
    del reused, memory
    assert inodes(os.getpid()) == before, "nothing outlives its trainer"


def test_a_trainer_killed_while_it_fills_memory_again_leaves_no_version() -> None:
    with process(fill_again) as (trainer, link):
        publication = link.recv()
        (opened, *_) = [os.open(path, os.O_RDONLY) for path in find_links(LINK) if f"/{trainer.pid}/" in path]
        assert publication_in(opened) == publication, "opened, but not held"
        link.send("on")
        assert link.recv() == "half" and find(manifest(), publication) is None
        trainer.kill()
        trainer.join()
    assert os.pread(opened, 4, 64) != bytes(4), "the memory is still there"
    assert publication_in(opened) == "" and find(manifest(), publication) is None
    os.close(opened)
