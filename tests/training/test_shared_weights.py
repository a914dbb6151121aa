"""Processes of one machine share one copy of a publication, and nobody sees a copy that is not complete."""

import os
import signal
import threading

import pytest
import torch
from weight_holders import WIDE, hold, inodes, manifest, process, replica

from engine.actors.transports import DistributedTransport
from engine.rollout.torch import transfer
from engine.runtime.plan import DistributedSettings
from engine.training.shared_weights import Memory, PublishedTensors, find, publication_of, turn


def published(publication: str = "") -> PublishedTensors:
    memory = Memory(manifest(), publication)
    try:
        memory.tensors[0].copy_(torch.arange(WIDE, dtype=torch.float32))
        memory.tensors[1].copy_(torch.randn(3, 5, generator=torch.Generator().manual_seed(1)))
        return memory.complete()
    finally:
        memory.close()


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
