"""vLLM's own weight transfer into a running engine, over gloo: its calls, its trainer's side, groups between processes.

NCCL differs in the group and the bytes alone; what it would be given is built from vLLM's own classes at the end.
`make torture` repeats all with a model that has experts, and whose embeddings are not tied.
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import vllm_engines
from backends import WIDE, build, go_on, hold, run, until_sampled
from test_vllm_weights import LONG, assert_samples, greedy
from vllm_arguments import require_vllm

from engine.actors.store_actors import RemoteWeights
from engine.actors.transports import HeldTensors, ObjectStoreTransport, Senders
from engine.errors import EngineError
from engine.rollout.sent_weights import Check, Join, Send, Turn, WeightsAnswer, WeightsCall
from engine.rollout.vllm import weight_checks, weight_receiver
from engine.training.shared_weights import Manifest
from engine.trajectory import Span
from engine.workers.plan import WeightsWire

require_vllm()
WIRE = WeightsWire(backend="gloo", bucket_bytes=50_000, timeout_s=20.0, limit_s=60.0)
READER = 0


@dataclass
class Holder:
    """The trainer and the weights store as a replica sees them, in this process. The trainer may fail at a turn of its
    own choice."""

    senders: Senders
    manifest: Manifest
    store: dict[str, Any] | None = None
    """The store's copy; None: it fails, too."""
    calls: list[str] = field(default_factory=list)
    names: Sequence[str] = ()
    """The tensors of the last update."""
    fails_after: str = ""
    """The call whose answer it does not take any more."""
    spoils: str = ""
    """The call whose argument it changes, so that the engine refuses it."""

    newer_before_check: dict[str, Any] | None = None
    """Weights that the trainer publishes just before it is asked for a check."""

    async def exchange(self, turn: Turn) -> WeightsCall | None:
        if isinstance(turn, Check) and self.newer_before_check is not None:
            self.senders.hold(turn.version + 1, self.newer_before_check)
        if isinstance(turn, WeightsAnswer) and self.calls[-1] == self.fails_after:
            raise EngineError("the trainer is gone")
        call = await self.senders.turn(READER, turn)
        if call is None:
            return None
        self.calls.append(call.name)
        if call.name == "update_weights":
            self.names = call.argument["names"]
        return replace(call, argument=dict.fromkeys(call.argument, 3)) if call.name == self.spoils else call

    async def stored(self) -> dict[str, Any]:
        if self.store is None:
            raise EngineError("the store is gone")
        return self.store


def holder(version: int, model: Any, senders: Senders, *, stores: bool = True, **options: Any) -> Holder:
    """`stores`: whether the store has a copy."""
    weights = model.state_dict()
    senders.hold(version, weights)
    return Holder(senders, senders.manifest(version), weights if stores else None, **options)


@pytest.fixture(scope="module", params=["qwen2", pytest.param("qwen3-moe", marks=pytest.mark.long)])
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    backend = vllm_engines.start(
        build(request.param, **WIDE), kv="recompute", weight_transfer="gloo", check_weights="never"
    )
    backend.family = request.param
    backend.senders = Senders(replace(WIRE, timeout_s=6.0))  # tests wait for it
    yield backend
    run(backend.close())


def model_of(engine: Any, version: int) -> Any:
    return build(engine.family, 10 + version if version else 0, **WIDE)


UPDATE = ["start_weight_update", "update_weights", "finish_weight_update"]


async def install(engine: Any, version: int, mode: str = "abort", tokens: int = 0, **options: Any) -> Holder:
    """`tokens`: where each request stops after the installation; 0: nowhere."""
    held = holder(version, model_of(engine, version), engine.senders, **options)
    await engine.stage(version, held)
    await engine.pause(mode)
    go_on(engine)
    try:
        await engine.install(version)
    finally:
        if tokens:
            hold(engine, tokens)
        await engine.resume()
    return held


@pytest.mark.parametrize("engine", ["qwen2"], indirect=True)
def test_an_engine_that_cannot_join_a_group_samples_on(engine: Any) -> None:
    """The first of all tests: no group is formed yet."""
    old, new = engine.version, engine.version + 1

    async def scenario() -> None:
        kept = asyncio.create_task(engine.sample(greedy("kept")))
        await until_sampled(engine, engine.tokens_sampled() + 5)
        with pytest.raises(EngineError, match="the store is gone"):
            await install(engine, new, fails_after="init_weight_transfer_engine", stores=False)
        go_on(engine)
        assert_samples(model_of(engine, old), await kept)

    run(scenario())


@pytest.mark.parametrize("engine", ["qwen2"], indirect=True)
@pytest.mark.parametrize("fails", ["at the holder", "in the engine", "too late"])
def test_an_install_that_fails_on_its_way_leaves_the_old_weights(engine: Any, fails: str) -> None:
    """In the first case, the old weights are those that the engine was started with, which only its files have. In the
    others, they come from the store, because the trainer has a newer version."""
    old, new = engine.version, engine.version + 1
    options = {"stores": False} | {
        "at the holder": {"fails_after": "update_weights"},
        "in the engine": {"spoils": "update_weights"},
        "too late": {},
    }[fails]

    async def scenario() -> None:
        assert_samples(model_of(engine, old), await engine.sample(greedy("before")))
        kept = asyncio.create_task(engine.sample(greedy("kept")))
        await until_sampled(engine, engine.tokens_sampled() + 5)
        engine.install_timeout_s = 1e-9 if fails == "too late" else 60.0
        with pytest.raises(EngineError, match=f"version {new} could not be installed"):
            await install(engine, new, "keep", **options)
        engine.install_timeout_s = 60.0
        for result in (await kept, await engine.sample(greedy("after"))):
            assert result.spans == [Span(0, 40, old)]
            assert_samples(model_of(engine, old), result)
        held = await install(engine, new)  # a second try is a try like the first, in a group of its own
        assert held.calls[-3:] == UPDATE
        assert_samples(model_of(engine, new), await engine.sample(greedy("again")))

    run(scenario())


@pytest.mark.parametrize("engine", ["qwen2"], indirect=True)
@pytest.mark.parametrize("fails", ["to join", "at the holder", "in the engine", "has a newer version"])
def test_a_version_that_the_trainer_cannot_send_comes_from_the_store(engine: Any, fails: str) -> None:
    new = engine.version + 1
    options = {
        "to join": {"fails_after": "init_weight_transfer_engine"},
        "at the holder": {"fails_after": "update_weights"},
        "in the engine": {"spoils": "update_weights"},
        "has a newer version": {},
    }[fails]

    async def scenario() -> None:
        if fails == "to join":
            engine._incoming._group = None
        held = holder(new, model_of(engine, new), engine.senders, **options)
        await engine.stage(new, held)
        if fails == "has a newer version":
            engine.senders.hold(new + 1, model_of(engine, new + 1).state_dict())
        await engine.pause("abort")
        await engine.install(new)
        await engine.resume()
        assert_samples(model_of(engine, new), await engine.sample(greedy("from the store")))
        held = await install(engine, new + 1)
        assert held.calls[-3:] == UPDATE, "the next one is sent again"
        assert fails != "has a newer version" or held.calls == UPDATE, "to the same group"
        assert_samples(model_of(engine, new + 1), await engine.sample(greedy("sent")))

    run(scenario())


def test_three_updates_each_serve_the_new_weights_while_a_request_is_kept(engine: Any) -> None:
    first = engine.version

    async def scenario() -> None:
        await install(engine, first + 1)
        kept = asyncio.create_task(engine.sample(greedy("kept", LONG)))
        await hold(engine, 10)
        for version in range(first + 2, first + 5):
            held = await install(engine, version, "keep", 50)  # the kept one stops there, in time for the next
            assert held.calls == UPDATE, "the group is formed once"
            assert len(held.names) == len([*model_of(engine, version).parameters()]), "tied tensors are sent once"
            result = await engine.sample(greedy(f"{version}"))
            assert result.spans == [Span(0, 40, version)]
            assert_samples(model_of(engine, version), result)
        go_on(engine)
        result = await kept
        assert [span.version for span in result.spans] == [*range(first + 1, first + 5)]

    run(scenario())


def test_a_checked_install_compares_what_was_sent_with_what_the_holder_has(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = engine.version, engine.version + 1

    async def scenario() -> None:
        monkeypatch.setattr(engine._incoming, "checks", "first")
        with pytest.raises(
            EngineError, match=r"could not be installed: RuntimeError: .*other values than the published"
        ):
            await install(engine, new, spoils="compare_with")
        assert_samples(model_of(engine, old), await engine.sample(greedy("before")))
        held = await install(engine, new)
        assert held.calls[-7:] == [*UPDATE, *UPDATE, "compare_with"]
        assert_samples(model_of(engine, new), await engine.sample(greedy("after")))
        held = await install(engine, new + 1)
        assert held.calls == UPDATE, "only the first install that succeeds is checked"

    run(scenario())


@pytest.mark.parametrize("engine", ["qwen2"], indirect=True)
def test_a_check_that_meets_a_newer_version_is_made_at_the_next_install(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = engine.version + 1

    async def scenario() -> None:
        monkeypatch.setattr(engine._incoming, "checks", "first")
        monkeypatch.setattr(engine._incoming, "_was_checked", False)
        held = await install(engine, new, newer_before_check=model_of(engine, new + 1).state_dict())
        assert held.calls[-7:] == [*UPDATE, *UPDATE, "outdated"]
        held = await install(engine, new + 1)
        assert held.calls == [*UPDATE, *UPDATE, "compare_with"]
        assert_samples(model_of(engine, new + 1), await engine.sample(greedy("after")))

    run(scenario())


def test_a_checked_install_fails_if_a_parameter_is_never_sent(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = engine.version, engine.version + 1
    norm = "model.norm.weight"

    wanted_names = weight_receiver.wanted_names

    def without_norm(*given: Any) -> Any:
        return tuple(pair for pair in wanted_names(*given) if pair[0] != norm)

    async def scenario() -> None:
        monkeypatch.setattr(engine._incoming, "checks", "always")
        with monkeypatch.context() as patch:
            patch.setattr(weight_receiver, "wanted_names", without_norm)
            with pytest.raises(EngineError, match=f"could not be installed: .*1 parameter got no new weights: {norm}"):
                await install(engine, new)
        assert_samples(model_of(engine, old), await engine.sample(greedy("before")))

    run(scenario())


def test_weights_of_another_model_are_refused_before_the_pause(engine: Any) -> None:
    other = build(engine.family, **WIDE | {"num_hidden_layers": 7})
    wide = build(engine.family, **WIDE | {"vocab_size": 64})
    both = {name: tensor.clone() for name, tensor in model_of(engine, 0).state_dict().items()}

    async def scenario() -> None:
        senders = engine.senders
        new = engine.version + 1
        with pytest.raises(EngineError, match=r"unknown \['model.layers.6"):
            await engine.stage(new, holder(new, other, senders))
        with pytest.raises(EngineError, match="has shape"):
            await engine.stage(new, holder(new, wide, senders))
        if engine.family == "qwen2":
            senders.hold(new, both)
            with pytest.raises(EngineError, match="are one tensor in this model"):
                await engine.stage(new, Holder(senders, senders.manifest(new)))

    run(scenario())


def test_waiting_calls_fail_if_the_process_of_the_engine_is_killed(engine: Any) -> None:
    """The last test of each engine."""

    async def scenario() -> None:
        running = asyncio.create_task(engine.sample(greedy("running", LONG)))
        failed = asyncio.create_task(engine.failed())
        await hold(engine, 5)
        assert not failed.done() and not running.done()
        os.kill(engine.process, signal.SIGKILL)
        assert "vLLM's engine" in await failed
        for call in (running, engine.sample(greedy("later")), engine.pause("keep"), engine.resume()):
            with pytest.raises(EngineError, match="vLLM's engine"):
                await call
        await engine.close()
        assert not engine.staging.exists()

    run(scenario())


def test_the_trainer_hashes_a_version_once_for_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Any] = []
    monkeypatch.setattr(weight_checks, "checksum", lambda tensor: hashed.append(tensor) or f"{tensor}")
    manifest = Manifest(tensors=(), names=(("a", 0), ("b", 1), ("tied", 0)))
    senders = Senders(WIRE)
    senders._newest = 1, HeldTensors(manifest=manifest, tensors=("x", "y"))

    async def ask(reader: int) -> Any:
        return await senders.turn(reader, Check(version=1, wanted=(("a", "a"), ("of the model", "tied"))))

    async def scenario() -> None:
        call = WeightsCall(name="compare_with", argument={"a": "x", "of the model": "x"})
        assert await asyncio.gather(ask(0), ask(1)) == [call, call]

    run(scenario())
    assert sorted(hashed) == ["x", "y"]


@pytest.mark.parametrize("ends", [True, False])
def test_an_engine_that_dies_or_hangs_in_a_transfer_delays_no_other(ends: bool) -> None:
    """It does not delay the trainer, either, which gives up in time."""
    from engine.rollout.vllm.gloo_transfer import GlooGroup

    weights = {"weight": torch.arange(100_000, dtype=torch.float32)}
    wanted = (("weight", "weight"),)

    async def begin(senders: Senders, reader: int) -> GlooGroup:
        """Up to the moment in which the engine is to receive."""
        group = f"of {reader}"
        join = await senders.turn(reader, Join(group=group, workers=1))
        assert join is not None
        where = join.argument["master_address"], join.argument["master_port"]
        own = await asyncio.to_thread(GlooGroup, *where, 1, join.argument["world_size"], WIRE.timeout_s)
        assert await senders.turn(reader, WeightsAnswer(group=group, wrong="")) is None
        start = await senders.turn(reader, Send(group=group, version=1, wanted=wanted))
        update = await senders.turn(reader, WeightsAnswer(group=group, wrong=""))
        assert [start and start.name, update and update.name] == UPDATE[:2]
        return own

    async def scenario() -> None:
        senders = Senders(replace(WIRE, bucket_bytes=1 << 20, timeout_s=4.0))
        senders.hold(1, weights)
        lost, well = await begin(senders, 0), await begin(senders, 1)
        if ends:
            lost.destroy()
        received = torch.empty(400_000, dtype=torch.uint8)
        await asyncio.to_thread(well.broadcast, received)
        assert torch.equal(received.view(torch.float32), weights["weight"])
        finish = await senders.turn(1, WeightsAnswer(group="of 1", wrong=""))
        assert finish is not None and finish.name == UPDATE[2]
        assert await senders.turn(1, WeightsAnswer(group="of 1", wrong="")) is None
        with pytest.raises(EngineError, match="could not be sent"):
            await senders.turn(0, WeightsAnswer(group="of 0", wrong="lost"))

    began = time.monotonic()
    run(scenario())
    assert time.monotonic() - began < WIRE.timeout_s


def incoming_to(area: Any, sent: Any) -> weight_receiver.Incoming:
    """An `Incoming` whose engine does everything at once, with version 1 to install."""

    async def answer(asked: Any, limit_s: float) -> list[list[str]]:
        return [[""]]

    parallel = SimpleNamespace(world_size=1, data_parallel_size=1)
    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(parallel_config=parallel),
        engine_core=SimpleNamespace(call_utility_all_async=lambda *given: None),
    )
    incoming = weight_receiver.Incoming(area, engine, answer, 1.0, "never")
    incoming._sent[1] = sent, ()
    return incoming


@pytest.mark.parametrize(("store_hangs", "why"), [(False, "the store is gone"), (True, "no answer in time")])
def test_an_install_does_not_wait_longer_than_its_limit_for_a_trainer_that_hangs(store_hangs: bool, why: str) -> None:
    """With weights whose group was left, as after a failed install."""

    class Hung:
        async def exchange(self, turn: Turn) -> WeightsCall | None:
            await asyncio.Event().wait()
            return None

        async def stored(self) -> Any:
            if store_hangs:
                await asyncio.Event().wait()
            raise EngineError("the store is gone")

    wrong = asyncio.run(asyncio.wait_for(incoming_to(None, Hung()).swap(1, 0.2), 20.0))
    not_sent, not_stored = "the weights did not arrive within 0.1 s", "the copy in the weights store could not be used"
    assert wrong == f"{not_sent}; {not_stored}: {why}"


def test_an_install_does_not_end_before_the_copy_of_the_store_is_staged() -> None:
    """Otherwise a later install of the version could lose its files to the thread that stages it."""
    begun, ends = threading.Event(), threading.Event()

    class Sent:
        async def exchange(self, turn: Turn) -> WeightsCall | None:
            raise EngineError("the trainer is gone")

        async def stored(self) -> Any:
            return {}

    def write(version: int, weights: Any) -> None:
        begun.set()
        assert ends.wait(20.0)

    area = SimpleNamespace(write=write, directory=lambda version: "files", tensors=SimpleNamespace(aliases={}))
    incoming = incoming_to(area, Sent())

    async def scenario() -> None:
        swap = asyncio.create_task(incoming.swap(1, 0.0))
        await asyncio.to_thread(begun.wait, 20.0)
        assert not swap.done()
        ends.set()
        assert await swap == ""

    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def test_a_worker_that_gives_up_goes_on_when_its_group_is_closed() -> None:
    """NCCL ends the wait before the group is closed, and two threads must not close it."""
    from engine.rollout.vllm.worker_extension import WeightsExtension

    class Waiting(WeightsExtension):
        def __init__(self) -> None:
            self.ended = threading.Event()
            self.weight_transfer_engine = self
            model = SimpleNamespace(load_weights=lambda weights: None)
            self.model_runner = SimpleNamespace(get_model=lambda: model)
            self.model_update_group: object = "open"

        def shutdown(self) -> None:
            self.ended.set()
            limit = cast(threading.Timer, threading.current_thread())
            assert limit.finished.wait(20.0), "the worker has gone on"
            self.model_update_group = None

        def update_weights(self, update_info: dict[str, Any]) -> None:
            assert self.ended.wait(20.0)

    with pytest.raises(TimeoutError, match="did not arrive within"):
        Waiting().update_in_time({}, {}, 0.01)


def test_the_group_of_a_replica_whose_process_has_ended_is_closed() -> None:
    from engine.rollout.vllm.gloo_transfer import GlooGroup

    async def scenario() -> None:
        died, weights = asyncio.Event(), RemoteWeights(None, ObjectStoreTransport(), wire=WIRE)
        replica = SimpleNamespace(alive=SimpleNamespace(remote=died.wait))
        await weights.turn(READER, Join(group="of its last life", workers=1), replica)
        watch = weights._watches[READER]
        join = await weights.turn(READER, Join(group="one", workers=1), replica)
        assert join is not None
        where = join.argument["master_address"], join.argument["master_port"]
        engine = await asyncio.to_thread(GlooGroup, *where, 1, join.argument["world_size"], WIRE.timeout_s)
        assert await weights.turn(READER, WeightsAnswer(group="one", wrong=""), replica) is None
        assert watch.cancelled(), "the end of the replica's previous process closes no group of the new one"
        died.set()
        with pytest.raises(RuntimeError, match="by peer"):
            await asyncio.to_thread(engine.broadcast, torch.empty(1))

    run(scenario())


def test_an_engine_that_has_left_its_group_is_refused() -> None:
    async def scenario() -> None:
        with pytest.raises(EngineError, match="is no longer in the process group"):
            await Senders(WIRE).turn(READER, Send(group="gone", version=1, wanted=()))

    run(scenario())


def test_a_group_that_does_not_come_about_is_given_up_in_time() -> None:
    """The engine answers that it cannot join, and nobody comes."""

    async def scenario() -> None:
        senders = Senders(replace(WIRE, timeout_s=1.0))
        call = await senders.turn(READER, Join(group="one", workers=1))
        assert call is not None and call.name == "init_weight_transfer_engine"
        with pytest.raises(EngineError, match="could not be sent"):
            await senders.turn(READER, WeightsAnswer(group="one", wrong="no"))

    run(scenario())


def test_a_group_that_is_formed_too_late_is_closed_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over NCCL, whose rendezvous has no limit."""
    from engine.rollout.vllm import weight_sender

    begun, ends, closed = threading.Event(), threading.Event(), threading.Event()

    class Stuck:
        def __init__(self, ask: Any, info: Any) -> None:
            begun.set()
            assert ends.wait(20.0)

        def close(self) -> None:
            closed.set()

    async def scenario() -> None:
        senders = Senders(replace(WIRE, timeout_s=1.0, limit_s=1.0))
        monkeypatch.setattr(weight_sender, "Sender", Stuck)
        late = asyncio.create_task(senders.turn(READER, Join(group="late", workers=1)))
        await asyncio.to_thread(begun.wait, 20.0)
        monkeypatch.undo()
        call = await senders.turn(READER, Join(group="next", workers=1))
        assert call is not None and call.name == "init_weight_transfer_engine"
        ends.set()
        assert await late is None
        assert await asyncio.to_thread(closed.wait, 20.0)
        assert senders._conversations[READER].group == "next"
        senders._conversations[READER].close()

    run(scenario())


def test_a_late_answer_is_refused_with_the_reason_why_the_work_failed() -> None:
    async def scenario() -> None:
        senders = Senders(replace(WIRE, timeout_s=0.2, limit_s=0.2))
        await senders.turn(READER, Join(group="one", workers=1))
        work = senders._conversations[READER]._work
        assert work is not None
        await asyncio.wait([work])
        with pytest.raises(EngineError, match="could not be sent"):
            await senders.turn(READER, WeightsAnswer(group="one", wrong=""))

    run(scenario())


def test_what_nccl_is_given_is_what_vllm_takes() -> None:
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer import VLLMWeightSyncClient, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerInitInfo,
        NCCLTrainerWeightTransferEngine,
        NCCLWeightTransferUpdateInfo,
    )

    from engine.rollout.vllm.engine_args import all_engine_args
    from engine.rollout.vllm.weight_sender import EngineCalls, HeldVersion, trainer_info

    arguments = AsyncEngineArgs(**all_engine_args("model", 8, 0, {"tensor_parallel_size": 2}, "nccl"))
    assert arguments.weight_transfer_config == WeightTransferConfig(backend="nccl")
    info = trainer_info("nccl", "127.0.0.1", 2, bucket_bytes=1 << 20, timeout_s=1.0)
    assert isinstance(info, NCCLTrainerInitInfo)
    assert (info.is_sender, info.world_size, info.packed, info.packed_buffer_size_bytes) == (True, 3, True, 1 << 20)
    calls = EngineCalls(lambda call: None)
    assert isinstance(calls, VLLMWeightSyncClient)
    assert WeightTransferTrainerFactory._registry[info.backend]() is NCCLTrainerWeightTransferEngine
    narrow, wide = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, 2)
    source = HeldVersion({"narrow": narrow, "wide": wide}, "cpu")
    sender = NCCLTrainerWeightTransferEngine(client=calls, source=source)
    assert sender.source is source
    assert [name for name, _ in sender._checked_iter(source, source.metadata())] == ["wide", "narrow"]
    meta = source.metadata()
    NCCLWeightTransferUpdateInfo(
        names=[one.name for one in meta],
        dtype_names=[str(one.dtype).removeprefix("torch.") for one in meta],
        shapes=[list(one.shape) for one in meta],
    )


def test_a_sender_whose_process_ends_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    senders = Senders(replace(WIRE, timeout_s=1.0, limit_s=1.0))

    call = asyncio.run(senders.turn(READER, Join(group="left", workers=1)))
    assert call is not None and call.name == "init_weight_transfer_engine"
    for thread in threading.enumerate():
        if thread.name == "send-left":
            thread.join()  # nobody answers the call
    assert not errors
