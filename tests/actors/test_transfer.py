"""Transfers of tensors between real processes over gloo: exact, bounded in time, and gone when they are over."""

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from transfer_ends import HALVES, HOST, LARGE, differences, large_offer, receive_half, sample, send_half, take
from weight_holders import FORKS

from engine.errors import EngineError
from engine.rollout.sent_weights import Offer
from engine.rollout.torch import transfer

LONG_S = 60.0
SHORT_S = 1.0


@pytest.fixture(scope="module")
def others() -> Iterator[ProcessPoolExecutor]:
    """Two processes that receive."""
    with ProcessPoolExecutor(2, mp_context=FORKS) as pool:
        yield pool


@contextmanager
def other(run: Any, deadly: bool) -> Iterator[Connection]:
    """A process that `run` ends or stalls."""
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=run, args=(theirs, deadly), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        process.kill()
        process.join()
        for end in (ours, theirs):
            end.close()


def offered(weights: dict[str, torch.Tensor], bucket_bytes: int = 4096, timeout_s: float = LONG_S) -> Offer:
    return transfer.offer(weights, HOST, backend="gloo", bucket_bytes=bucket_bytes, timeout_s=timeout_s)


def sender_of(offer: Offer) -> threading.Thread | None:
    return next((thread for thread in threading.enumerate() if thread.name == f"weights-{offer.port}"), None)


def until_free(offer: Offer) -> None:
    """Wait for a sender's thread, which would wait `LONG_S` for a receiver that it knew nothing of."""
    thread = sender_of(offer)
    if thread is not None:
        thread.join(LONG_S / 2)
        assert not thread.is_alive()


def held() -> tuple[list[str], int]:
    """Senders' threads, and the number of files and sockets: every group and every store has some."""
    senders = [thread.name for thread in threading.enumerate() if thread.name.startswith("weights-")]
    return senders, len(os.listdir("/proc/self/fd"))


def held_after_a_transfer() -> tuple[list[str], int]:
    """The same when what torch keeps for good is there and nothing else is."""
    for sender in [thread for thread in threading.enumerate() if thread.name.startswith("weights-")]:
        sender.join(LONG_S / 2)
    offer = offered(sample())
    transfer.receive(offer)
    until_free(offer)
    return held()


@pytest.mark.parametrize("bucket_bytes", [7, 4096, 1 << 24], ids=["tiny", "cutting", "all in one"])
def test_every_kind_of_tensor_arrives_to_the_bit(others: ProcessPoolExecutor, bucket_bytes: int) -> None:
    weights = sample()
    if bucket_bytes == 7:  # not a multiple of any element's size
        weights = {name: weights[name] for name in weights if weights[name].numel() < 1000}
        whole = sample()
        got = transfer.receive(offered(weights, bucket_bytes))
        assert differences({name: got.get(name, whole[name]) for name in whole}) == []
    else:
        assert others.submit(take, offered(weights, bucket_bytes)).result(LONG_S) == []


def test_what_is_tied_is_sent_once() -> None:
    manifest, tensors = transfer.described(sample())
    sent = dict(manifest.names)
    assert sent["tied"] == sent["tied too"] != sent["not tied"]
    assert len(tensors) == len(sample()) - 1


def test_a_message_holds_a_bucket_at_most() -> None:
    tensors = [torch.arange(n, dtype=torch.int32) for n in (3, 0, 1000, 5)]
    sizes = [sum(piece.numel() for piece in pieces) for pieces in transfer.messages(tensors, 512)]
    assert sizes == [512] * 7 + [4 * 1008 - 7 * 512]


def test_several_receivers_are_served_at_once(others: ProcessPoolExecutor) -> None:
    weights = sample()
    taken = [others.submit(take, offered(weights)) for _ in range(2)]
    # Offered as the first of three, taken while both others are: nobody waits for anybody.
    assert transfer.receive(offered(weights)).keys() == weights.keys()
    assert [one.result(LONG_S) for one in taken] == [[], []]


@pytest.mark.parametrize("deadly", [True, False], ids=["dies", "stalls"])
def test_a_sender_lost_half_way_is_an_error_at_the_receiver(deadly: bool) -> None:
    with other(send_half, deadly) as sender:
        offer = sender.recv()
        before = held_after_a_transfer()
        # A dead one is noticed by its connection, long before the time is up.
        with pytest.raises(EngineError, match=f"no weights from {HOST}:{offer.port}"):
            transfer.receive(replace(offer, timeout_s=LONG_S if deadly else SHORT_S))
        assert held() == before


@pytest.mark.parametrize("deadly", [True, False], ids=["dies", "stalls"])
def test_a_receiver_lost_half_way_leaves_the_sender_free(deadly: bool) -> None:
    with other(receive_half, deadly) as receiver:
        assert receiver.recv() == "up"
        before = held_after_a_transfer()
        large = {"large": torch.zeros(LARGE, dtype=torch.uint8)}
        offer = offered(large, LARGE // HALVES, LONG_S if deadly else SHORT_S)
        receiver.send(offer)
        until_free(offer)
        assert held() == before
    assert transfer.receive(offered(large)).keys() == large.keys()


def test_an_offer_that_nobody_takes_is_withdrawn() -> None:
    before = held_after_a_transfer()
    offer = offered(sample(), timeout_s=SHORT_S)
    until_free(offer)
    assert held() == before
    with pytest.raises(EngineError, match="no weights from"):
        transfer.receive(offer)
    assert held() == before


def test_what_is_more_than_its_bytes_is_refused() -> None:
    with pytest.raises(EngineError, match="only dense tensors"):
        offered({"sparse": torch.eye(3).to_sparse()})


def test_a_receiver_waits_for_a_neighbor_that_makes_progress() -> None:
    listeners = [socket.create_server((HOST, 0)) for _ in range(2)]
    first, second = (
        replace(large_offer(listener.getsockname()[1], seconds), publication="common", bucket_bytes=LARGE // 4)
        for listener, seconds in zip(listeners, (LONG_S, 6.0), strict=True)
    )

    def send(channel: transfer.Channel, quarters: int) -> None:
        for _ in range(quarters):
            channel.send([torch.ones(LARGE // 4, dtype=torch.uint8)])

    with ThreadPoolExecutor(2) as threads:
        neighbor = threads.submit(transfer.receive, first)
        with transfer.joined(first, transfer.SENDER, listeners[0]) as sender:
            assert (sender.heard(), sender.heard()) == (transfer.WAITS, transfer.WANTED)
            send(sender, 1)
            receiver = threads.submit(transfer.receive, second)
            with transfer.joined(second, transfer.SENDER, listeners[1]) as other:
                assert other.heard() == transfer.WAITS
                send(sender, 1)
                assert other.heard() == transfer.WAITS, "half of its limit has passed, but the neighbor makes progress"
                send(sender, 2)
                assert sender.heard() == other.heard() == transfer.DONE, "it has the neighbor's copy"
            assert torch.equal(neighbor.result(LONG_S)["large"], receiver.result(LONG_S)["large"])
