"""The HTTP backend against vLLM in processes of its own, also in whole runs, and against a server that misbehaves."""

import asyncio
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from backends import CONTEXT, Kind, go_on, hold, run, run_over, until_sampled
from gate import Counted
from http_servers import KEY, NAME, STEPS, Hiding, SmallServer, VllmServer, model, run_config, vllm_servers
from test_backend_scenarios import (  # noqa: F401  (collected here, over this file's `make_backend` and `kind`)
    LONG,
    test_aborted_request_resumes_with_exactly_the_tokens_it_would_have_had,
    test_aborting_some_leaves_the_others_as_they_were,
    test_budgets_include_the_prefix_and_what_does_not_fit_is_a_data_failure,
    test_cancelled_caller_frees_its_place,
    test_failed_install_leaves_the_old_weights,
    test_frozen_request_can_be_aborted,
    test_keep_freezes_and_goes_on,
    test_two_replicas_of_two_slots_end_six_requests_with_exactly_their_tokens,
    test_wait_lets_running_requests_end_and_holds_later_ones,
    test_weights_are_copied_when_staged,
    test_zero_token_abort_is_a_no_op,
)
from transformers import AutoTokenizer
from vllm_arguments import require_vllm

import engine.rollout.openai.openai_backend
from engine.config.loading import parse_config
from engine.errors import ConfigError, DataFailure, EngineError
from engine.events import GroupGenerated, WeightsInstalled
from engine.plans.configured_plan import plan_of
from engine.plans.rollouts import openai_backend
from engine.plans.run_inputs import Inputs
from engine.rollout.backend import RolloutBackend, SampleRequest, SampleResult, SamplingParams
from engine.rollout.openai.openai_backend import RETRIES, OpenAIBackend
from engine.rollout.torch.torch_backend import TorchBackend
from engine.runtime.local import run_plan
from engine.trajectory import Span
from engine.workers.plan import Plan, Rollout

sys.path.append(str(Path(__file__).resolve().parent.parent / "actors"))
from ray_plans import check_record, events_of

require_vllm()
pytestmark = pytest.mark.xdist_group("engines")
MOST = 250
KEY_NAME = "OPENAI_BACKEND_TEST_KEY"
PAUSING = ("/pause", "/resume", "/is_paused", "/abort_requests", "/inference/v1/generate")


class CountedBackend(Counted, OpenAIBackend):
    pass


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[VllmServer], Path]]:
    """Two servers that the tests here share, and where their model is."""
    directory = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch, vllm_servers(directory, count=2) as started:
        patch.setenv(KEY_NAME, KEY)
        yield started, directory


@pytest.fixture
def served(servers: tuple[list[VllmServer], Path]) -> tuple[VllmServer, Path]:
    """One of them."""
    return servers[0][0], servers[1]


@pytest.fixture
def connect(served: tuple[VllmServer, Path], tmp_path: Path) -> Iterator[Callable[..., OpenAIBackend]]:
    server, directory = served

    def connected(**changes: Any) -> OpenAIBackend:
        options: dict[str, Any] = dict(model=str(directory), key=KEY, vocabulary=32, timeout_s=30.0)
        url = changes.pop("url", server.url)
        options |= dict(weights_dir=str(tmp_path / "weights"), initial=model().state_dict())
        backend = CountedBackend(url, **(options | changes))
        backend.gate = server.gate
        return backend

    yield connected
    server.gate.open()


@pytest.fixture
def make_backend(connect: Callable[..., OpenAIBackend]) -> Callable[..., RolloutBackend]:
    """With `rows`, which a server has of its own, there are two replicas to a server: neither may pause it for the
    other, nor give it weights."""

    def make(family: str, **options: Any) -> RolloutBackend:
        if not options:
            return connect()
        backend = connect(weights_dir=None)
        object.__setattr__(backend.abilities, "pauses", False)
        return backend

    return make


@pytest.fixture
def kind(make_backend: Callable[..., RolloutBackend]) -> Kind:
    return Kind(make_backend, lambda family, seed=0: model(seed), exact=False)


def request(name: str = "r", *, max_tokens: int = LONG, seed: int = 1, **changes: Any) -> SampleRequest:
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": changes.pop("temperature", 1.0)})
    return SampleRequest(id=name, prompt_ids=[5, 6, 7], seed=seed, params=params, **changes)


# -- weights and versions, at a real server ----------------------------------------------------------------------------


def test_three_installs_serve_the_new_weights_and_mark_the_spans(connect: Callable[..., OpenAIBackend]) -> None:
    weights = {version: model(seed=version).state_dict() for version in (1, 2, 3)}

    async def scenario(backend: RolloutBackend) -> SampleResult:
        task = asyncio.create_task(backend.sample(request("across", max_tokens=MOST)))
        seams: list[int] = []
        reached = hold(backend, 20)
        for version in (1, 2, 3):
            await reached
            await backend.stage(version, weights[version])
            await backend.pause("keep")
            seams.append(backend.tokens_sampled())
            await backend.install(version)
            reached = hold(backend, 20)
            await backend.resume()
        go_on(backend)
        across = zip([0, *seams], [*seams, MOST], strict=True)
        assert (await task).spans == [Span(start, stop, version) for version, (start, stop) in enumerate(across)]
        return await backend.sample(request("new", max_tokens=40, temperature=0.0))

    fresh = run_over(connect(), scenario)
    expected = run_over(
        TorchBackend(model(seed=3)), lambda backend: backend.sample(request(max_tokens=40, temperature=0.0))
    )
    assert fresh.token_ids == expected.token_ids and fresh.spans == [Span(0, 40, 3)]


def test_the_plain_route_samples_the_same(connect: Callable[..., OpenAIBackend]) -> None:
    """What any server offers, `/v1/completions`, gives what vLLM's own route gives; the stop id is part of it."""
    from engine.rollout.openai.completions import Completions

    async def scenario(backend: OpenAIBackend) -> tuple[SampleResult, SampleResult, SampleResult, SampleResult]:
        own = await backend.sample(request(max_tokens=60, temperature=0.7))
        stop = own.token_ids[11]
        stopping = SamplingParams(max_tokens=60, temperature=0.7, stop_ids=(stop,))
        ends = [await backend.sample(SampleRequest(id="s", prompt_ids=[5, 6, 7], seed=1, params=stopping))]
        object.__setattr__(backend.abilities, "wire", Completions())
        plain = await backend.sample(request(max_tokens=60, temperature=0.7))
        ends.append(await backend.sample(SampleRequest(id="s", prompt_ids=[5, 6, 7], seed=1, params=stopping)))
        return own, plain, ends[0], ends[1]

    own, plain, own_end, plain_end = run_over(connect(), scenario)
    assert plain.token_ids == own.token_ids and plain.logprobs == pytest.approx(own.logprobs, abs=1e-5)
    first = own.token_ids.index(own_end.token_ids[-1])
    for end in (own_end, plain_end):
        assert end.token_ids == own.token_ids[: first + 1] and end.finish_reason == "stop"


def test_a_pause_left_behind_is_over_with_the_next_backend(connect: Callable[..., OpenAIBackend]) -> None:
    left = connect()
    run(left.pause("keep"))  # and its process is killed
    assert len(run_over(connect(), lambda backend: backend.sample(request(max_tokens=4))).token_ids) == 4


# -- refused at start --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"key": "wrong"}, "rollout.api_key_env", "refuses the request without a valid key"),
        ({"served_model_name": "other"}, "rollout.served_model_name", NAME),
        ({"encode": lambda text: [3, 2, 1]}, "rollout.urls", "another tokenizer"),
        ({"weights_dir": "/proc/none"}, "rollout.weights_dir", "cannot be written"),
    ],
)
def test_refused_by_vllm(connect: Callable[..., OpenAIBackend], changes: Any, field: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        connect(**changes)
    assert caught.value.details["field"] == field


def test_the_right_tokenizer_is_let_by(connect: Callable[..., OpenAIBackend], served: tuple[VllmServer, Path]) -> None:
    backend = connect(weights_dir=None, encode=AutoTokenizer.from_pretrained(served[1]).encode, served_model_name=NAME)
    assert backend.abilities.context == CONTEXT
    run(backend.close())


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ({"token_ids": True}, "no token ids"),
        ({"logprobs": True}, "log-probs"),
        ({"processed": True}, "processed_logprobs"),
        ({"tokens": True}, "another tokenizer"),
        ({"installs": True}, "cannot load new weights"),
        ({}, "use abort or wait"),
    ],
)
def test_a_server_that_lacks_something_is_refused(lacks: dict[str, bool], says: str, tmp_path: Path) -> None:
    with SmallServer(**lacks) as server, pytest.raises(ConfigError, match=says):
        OpenAIBackend(
            server.url,
            model="-",
            weights_dir=str(tmp_path),
            sync_mode="keep",
            encode=lambda text: [4, 5],
            timeout_s=60.0,
        )


def test_nobody_there(tmp_path: Path) -> None:
    with SmallServer() as server:
        pass
    with pytest.raises(ConfigError, match=r"does not answer.*start the server first"):
        OpenAIBackend(server.url, model="-", wait_s=0.0)


@pytest.mark.parametrize(("key", "says"), [("", "is not set in the environment"), ("key\n", "control character")])
def test_a_variable_without_a_usable_key(key: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_NAME, key)
    served = {"backend": "openai", "urls": ["http://127.0.0.1:1"], "weights_dir": "/tmp", "api_key_env": KEY_NAME}
    config = parse_config({"model": {"make": "arithmetic"}, "rollout": served})
    with pytest.raises(ConfigError, match=rf"rollout.api_key_env.*{says}"):
        openai_backend(config, Inputs("model", "data", None, None, "prompt"), 0)


def test_somebody_there_who_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ConfigError, match="does not answer"):
        OpenAIBackend(f"http://127.0.0.1:{silent.getsockname()[1]}", model="-", wait_s=0.0, timeout_s=0.5)


@pytest.mark.parametrize(
    ("silent", "says"), [(True, "does not describe its routes"), (False, "cannot load new weights")]
)
def test_routes_that_a_server_does_not_tell_are_absent_only_if_it_answers(
    silent: bool, says: str, tmp_path: Path
) -> None:
    with SmallServer(silent=silent, broken=not silent) as server, pytest.raises(ConfigError, match=says):
        OpenAIBackend(server.url, model="-", weights_dir=str(tmp_path), wait_s=0.0, timeout_s=0.5)


# -- a server that misbehaves on the way -------------------------------------------------------------------------------


def over_small(scenario: Callable[[OpenAIBackend, SmallServer], Any], *faults: Any) -> Any:
    with SmallServer() as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.rollout.openai.openai_backend, "BACKOFF_S", 0.001)
        timeout_s = 5.0 if "silent" in faults else 60.0
        backend = OpenAIBackend(server.url, model="-", timeout_s=timeout_s)
        server.bodies.clear()
        server.asked.clear()
        server.faults = list(faults)
        return run_over(backend, lambda backend: scenario(backend, server))


@pytest.mark.parametrize(
    ("faults", "lengths"),
    [
        ((500, 503), [3, 3, 3]),
        (("drop", 502, "drop"), [3, 6, 6, 9]),
        (("abort",), [3, 6]),
        (("silent", "garbage"), [3, 6, 9]),
    ],
)
def test_what_came_is_kept_and_the_rest_asked_for_again(faults: Any, lengths: list[int]) -> None:
    async def scenario(backend: OpenAIBackend, server: SmallServer) -> None:
        result = await backend.sample(request(max_tokens=12))
        assert result.token_ids == list(range(3, 15)) and result.logprobs == [-0.5] * 12
        assert result.spans == [Span(0, 12, 0)] and result.finish_reason == "length"
        assert [len(body["prompt"]) for body in server.bodies] == lengths
        assert [body["max_tokens"] for body in server.bodies] == [15 - length for length in lengths]
        assert backend.tokens_sampled() == 12
        assert len({body["seed"] for body in server.bodies}) == len(set(lengths))

    over_small(scenario, *faults)


def test_a_request_that_always_fails_is_given_up_but_not_its_server() -> None:
    async def scenario(backend: OpenAIBackend, server: SmallServer) -> None:
        with pytest.raises(EngineError, match=r"failed after 5 retries.*500"):
            await backend.sample(request(max_tokens=4))
        assert len(server.bodies) == RETRIES + 1
        assert len((await backend.sample(request(max_tokens=4))).token_ids) == 4

    over_small(scenario, *[500] * (RETRIES + 1))


@pytest.mark.parametrize("lacks", ["token_ids", "logprobs"])
def test_a_server_that_keeps_something_back_later_fails_that_request_alone(lacks: str) -> None:
    async def scenario(backend: OpenAIBackend, server: SmallServer) -> None:
        server.lacks[lacks] = True
        with pytest.raises(EngineError, match="no token ids" if lacks == "token_ids" else "0 log-probs for 1 tokens"):
            await backend.sample(request(max_tokens=4))
        assert len(server.bodies) == 1, "asking again would not help"
        server.lacks.clear()
        assert len((await backend.sample(request(max_tokens=4))).token_ids) == 4

    over_small(scenario)


def test_context_overflow_that_only_the_server_knows_is_the_datas_fault() -> None:
    async def scenario(backend: OpenAIBackend, server: SmallServer) -> None:
        with pytest.raises(DataFailure, match=r"prompt of 3.*context"):
            await backend.sample(request(max_tokens=4))

    over_small(scenario, 400)


def test_a_dead_server_is_reported() -> None:
    async def scenario(backend: OpenAIBackend, server: SmallServer) -> None:
        failed = asyncio.ensure_future(backend.failed())
        server.stops_at = 0
        running = asyncio.create_task(backend.sample(request(max_tokens=4)))
        await asyncio.to_thread(server.asked.wait)
        await asyncio.to_thread(server.stop)
        with pytest.raises(EngineError, match="lost"):
            await running
        assert "lost" in await failed
        with pytest.raises(EngineError, match="lost"):
            await backend.sample(request())

    over_small(scenario)


def test_close_fails_what_is_running_and_everything_later() -> None:
    async def scenario(backend: OpenAIBackend, server: SmallServer) -> None:
        server.stops_at = 0
        running = asyncio.create_task(backend.sample(request("running")))
        await asyncio.to_thread(server.asked.wait)
        await backend.close()
        for late in (running, backend.sample(request("later")), backend.pause("keep")):
            with pytest.raises(EngineError, match="closed"):
                await late

    over_small(scenario)


def small_with_weights(server: SmallServer, tmp_path: Path, mode: str) -> CountedBackend:
    model().save_pretrained(tmp_path / "model")
    return CountedBackend(
        server.url, model=str(tmp_path / "model"), weights_dir=str(tmp_path / "weights"), sync_mode=mode,
        timeout_s=60.0, initial=model().state_dict(),
    )  # fmt: skip


def test_without_routes_for_it_abort_disconnects_and_keeps_what_came(tmp_path: Path) -> None:
    async def scenario(backend: CountedBackend, server: SmallServer) -> None:
        server.stops_at = 20
        task = asyncio.create_task(backend.sample(request("cut")))
        await backend.reaching(20)
        await backend.stage(1, model(seed=1).state_dict())
        await backend.pause("abort")
        cut = await task
        assert cut.finish_reason == "abort" and cut.spans == [Span(0, len(cut.token_ids), 0)]
        assert len(cut.token_ids) == len(cut.logprobs) == backend.tokens_sampled() == 20
        await backend.install(1)
        await backend.resume()
        assert (await backend.sample(request(max_tokens=5))).spans == [Span(0, 5, 1)]
        salts = [body["cache_salt"] for body in server.bodies]
        assert salts[-1] != salts[-2], "a new request may meet the keys and values of older weights"

    with SmallServer() as server:
        run_over(small_with_weights(server, tmp_path, "abort"), lambda backend: scenario(backend, server))


def test_a_failed_install_goes_back_and_one_that_cannot_loses_the_replica(tmp_path: Path) -> None:
    async def scenario(backend: OpenAIBackend, server: SmallServer) -> None:
        first = server.calls[-1]["args"][0]
        await backend.stage(1, model(seed=1).state_dict())
        await backend.pause("abort")
        server.refuses_installs = 1
        with pytest.raises(EngineError, match="version 1 could not be installed: broken"):
            await backend.install(1)
        assert server.calls[-1]["args"][0] == first
        await backend.resume()
        assert (await backend.sample(request(max_tokens=5))).spans == [Span(0, 5, 0)]
        await backend.pause("abort")
        server.refuses_installs = 2
        with pytest.raises(EngineError, match="could not be installed"):
            await backend.install(1)
        assert "could not be restored" in await backend.failed()

    with SmallServer() as server:
        run_over(small_with_weights(server, tmp_path, "abort"), lambda backend: scenario(backend, server))


# -- a server that somebody else meddles with -------------------------------------------------------------------------


@pytest.mark.parametrize("breaks", [False, True])
def test_weights_of_somebody_else_are_noticed(connect: Callable[..., Any], served: Any, breaks: bool) -> None:
    """By the label of the tokens where the stream ends, by asking where it broke off."""

    async def scenario(backend: Any) -> None:
        running = asyncio.create_task(backend.sample(request()))
        await hold(backend, 10)
        await backend.pause("keep")
        await backend._http.call("POST", "/update_weight_version", {"new_version": "somebody-elses:7"})
        await backend.resume()
        if breaks:
            between.break_off()
            assert "was given other weights" in await backend.failed()
        else:
            go_on(backend)
        with pytest.raises(EngineError, match="other weights" if breaks else "another run: 'somebody-elses:7'"):
            await running

    with Hiding(served[0].url) as between:
        run_over(connect(url=between.url), scenario)


# -- whole runs --------------------------------------------------------------------------------------------------------


def when_both_have_installed(plan: Plan, act: Callable[[], None]) -> Plan:
    """The plan of a run that does this once both replicas have new weights."""
    installed: set[int] = set()

    def made(replica: int) -> Rollout:
        rollout: Any = plan.make_rollout(replica)
        install = rollout.generator.install

        async def noting(version: int) -> None:
            await install(version)
            installed.add(replica)
            if len(installed) == 2:
                act()

        rollout.generator.install = noting
        return rollout

    return replace(plan, make_rollout=made)


def test_a_run_over_two_servers_updates_both_under_running_groups(
    tmp_path: Path, servers: tuple[list[VllmServer], Path]
) -> None:
    (free, held), model_dir = servers
    for server in (free, held):
        server.gate.hold(5)
    before = held.tokens_sampled()
    config = run_config(tmp_path, model_dir, [free.url, held.url], sync_mode="keep", api_key_env=KEY_NAME)
    plan = when_both_have_installed(plan_of(parse_config(config), tmp_path), held.gate.open)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run_plan, plan)
        while held.tokens_sampled() < before + 10:
            assert held.process.is_alive() and not running.done()
        free.gate.open()
        result = running.result()
    assert (result.outcome, result.steps, result.version) == ("finished", STEPS, STEPS)
    generated = events_of(tmp_path, GroupGenerated)
    assert {event.replica for event in generated} == {0, 1}
    assert any(event.replica == 1 and event.oldest_version == 0 < event.newest_version for event in generated)
    assert {event.replica for event in events_of(tmp_path, WeightsInstalled)} == {0, 1}
    check_record(tmp_path)


def test_a_server_that_cannot_pause_is_updated_all_the_same(
    tmp_path: Path, servers: tuple[list[VllmServer], Path]
) -> None:
    (server, _), model_dir = servers
    with Hiding(server.url, *PAUSING) as plainer:
        config = run_config(tmp_path, model_dir, [plainer.url], sync_mode="abort", slots=4, api_key_env=KEY_NAME)
        config["scheduler"]["max_concurrent_groups"] = 4
        result = run_plan(plan_of(parse_config(config), tmp_path))
    assert (result.outcome, result.steps, result.version) == ("finished", STEPS, STEPS)
    assert not set(plainer.asked) & set(PAUSING) and "/collective_rpc" in plainer.asked
    assert events_of(tmp_path, WeightsInstalled)
    assert any(event.newest_version > 0 for event in events_of(tmp_path, GroupGenerated))
    check_record(tmp_path)


# -- last, since it ends the server ------------------------------------------------------------------------------------


def test_killed_mid_generation_the_server_is_lost_with_its_requests(
    connect: Callable[..., OpenAIBackend], served: tuple[VllmServer, Path]
) -> None:
    async def scenario(backend: OpenAIBackend) -> None:
        running = asyncio.create_task(backend.sample(request()))
        await until_sampled(backend, 10)
        assert not running.done()
        served[0].kill()
        assert "lost" in await backend.failed()
        with pytest.raises(EngineError, match="lost"):
            await running

    run_over(connect(), scenario)
