"""The HTTP backend against a stand-in for SGLang: the scenarios of every backend, whole runs, and what is refused."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from backends import CONTEXT, Kind, go_on, hold, run_over
from gate import Counted
from http_servers import STEPS, model, run_config
from sglang_stand_in import VOCABULARY, SglangStandIn, token_of
from test_backend_scenarios import (  # noqa: F401  (collected here, over this file's `make_backend` and `kind`)
    LONG,
    request,
    test_aborted_request_resumes_with_exactly_the_tokens_it_would_have_had,
    test_aborting_some_leaves_the_others_as_they_were,
    test_budgets_include_the_prefix_and_what_does_not_fit_is_a_data_failure,
    test_cancelled_caller_frees_its_place,
    test_failed_install_leaves_the_old_weights,
    test_frozen_request_can_be_aborted,
    test_keep_freezes_and_goes_on,
    test_two_replicas_of_two_slots_end_six_requests_with_exactly_their_tokens,
    test_wait_lets_running_requests_end_and_holds_later_ones,
    test_zero_token_abort_is_a_no_op,
)

from engine.config.loading import parse_config
from engine.errors import ConfigError, EngineError
from engine.events import GroupGenerated, WeightsInstalled
from engine.plans.configured_plan import plan_of
from engine.rollout.backend import SampleRequest, SamplingParams
from engine.rollout.openai.openai_backend import OpenAIBackend
from engine.runtime.local import run_plan
from engine.tasks.arithmetic import ALPHABET
from engine.tasks.tokenizer import save_character_tokenizer
from engine.trajectory import Span

sys.path.append(str(Path(__file__).resolve().parent.parent / "actors"))
from ray_plans import check_record, events_of


class CountedBackend(Counted, OpenAIBackend):
    pass


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    model().save_pretrained(directory)
    save_character_tokenizer(directory, ALPHABET)
    return directory


@pytest.fixture
def connect(model_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A backend with a server of its own, `backend.gate`, which has these attributes."""

    def connected(api: str = "sglang", **attributes: Any) -> CountedBackend:
        server = servers.enter_context(SglangStandIn(CONTEXT))
        vars(server).update(attributes)
        backend = CountedBackend(
            server.url, model=str(model_dir), weights_dir=str(tmp_path / "weights"), initial=model().state_dict(),
            api=api, vocabulary=VOCABULARY, timeout_s=30.0,
        )  # fmt: skip
        backend.gate = server  # type: ignore[assignment]
        return backend

    with ExitStack() as servers:
        yield connected


@pytest.fixture
def make_backend(connect: Callable[..., Any]) -> Callable[..., Any]:
    return lambda family, **options: connect()


@pytest.fixture
def kind(make_backend: Callable[..., Any]) -> Kind:
    return Kind(make_backend, lambda family, seed=0: model(seed), exact=False)


@pytest.mark.parametrize("incremental", [False, True], ids=["cumulative", "incremental"])
def test_each_token_has_the_version_that_sampled_it(connect: Callable[..., Any], incremental: bool) -> None:
    async def scenario(backend: Any) -> None:
        task = asyncio.create_task(backend.sample(request("across")))
        reached, weights = hold(backend, 20), [backend.gate.weights]
        for version in (1, 2, 3):
            await reached
            await backend.stage(version, model(seed=version).state_dict())
            await backend.pause("keep")
            await backend.install(version)
            reached = hold(backend, 20)
            await backend.resume()
            weights.append(backend.gate.weights)
        await reached
        await backend.abort(["across"])
        result = await task
        assert result.spans == [Span(20 * version, 20 * (version + 1), version) for version in range(4)]
        seed = backend.gate.seeds[-1]
        assert result.token_ids == [token_of(weights[place // 20], seed, 3 + place) for place in range(80)]
        assert len(set(weights)) == 4 and len(result.logprobs) == 80

    run_over(connect(incremental=incremental), scenario)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_request_that_the_server_ends_continues_if_the_weights_are_in_force(
    connect: Callable[..., Any], restarted: bool
) -> None:
    async def scenario(backend: Any) -> None:
        task = asyncio.create_task(backend.sample(request()))
        await hold(backend, 20)
        backend.gate.version = "default" if restarted else backend.gate.version
        await backend._http.call("POST", "/abort_request", {"rid": ""}, reads=False)  # all of them
        go_on(backend)
        if restarted:
            with pytest.raises(EngineError, match="weights of another run: 'default'"):
                await task
        else:
            assert len((await task).token_ids) == LONG

    run_over(connect(), scenario)


def test_an_update_that_the_server_refuses_is_an_error(connect: Callable[..., Any]) -> None:
    async def scenario(backend: Any) -> None:
        await backend.stage(1, model(seed=1).state_dict())
        await backend.pause("keep")
        backend.gate.refuses_updates = True
        with pytest.raises(EngineError, match=r"version 1 could not be installed: .*broken"):
            await backend.install(1)

    run_over(connect(), scenario)


def test_an_abort_spares_requests_whose_id_begins_alike(connect: Callable[..., Any]) -> None:
    async def scenario(backend: Any) -> None:
        tasks = [asyncio.create_task(backend.sample(request(name))) for name in ("r", "r:1")]
        await hold(backend, 40)
        await backend.abort(["r"])
        go_on(backend)
        assert [(await task).finish_reason for task in tasks] == ["abort", "length"]
        assert len(backend.gate.seeds) == 3, "the probe and both requests: none was sent again"

    run_over(connect(), scenario)


def test_a_response_ends_at_its_own_stop_tokens_only(connect: Callable[..., Any]) -> None:
    async def scenario(backend: Any) -> None:
        def stopping(token: int) -> SampleRequest:
            return request(params=SamplingParams(max_tokens=60, stop_ids=(token,)))

        whole = (await backend.sample(request(max_tokens=60))).token_ids
        ended = await backend.sample(stopping(whole[5]))
        assert (ended.finish_reason, ended.token_ids) == ("stop", whole[: whole.index(whole[5]) + 1])
        backend.gate.end_token = whole[0]
        continued = await backend.sample(stopping(VOCABULARY))
        assert (continued.finish_reason, continued.token_ids[0], len(continued.token_ids)) == ("length", whole[0], 60)

    run_over(connect(), scenario)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lacks": ("/pause_generation", "/model_info")}, "no route /pause_generation, /model_info"),
        ({"settings": {"hicache_storage_backend": "file"}}, "without --hicache-storage-backend"),
        ({"settings": {"disaggregation_mode": "prefill"}}, "without --disaggregation-mode"),
        ({"processed": False}, "SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ({"reports_versions": False}, "use abort or wait"),
        ({"api": "openai"}, "is an SGLang server; use sglang"),
    ],
)
def test_a_server_that_cannot_keep_the_promises_is_refused(
    connect: Callable[..., Any], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        connect(**changes)


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_a_run_over_two_servers_installs_weights_in_both(tmp_path: Path, model_dir: Path, mode: str) -> None:
    with SglangStandIn(CONTEXT) as one, SglangStandIn(CONTEXT) as other:
        config = run_config(tmp_path, model_dir, [one.url, other.url], backend="sglang", sync_mode=mode)
        result = run_plan(plan_of(parse_config(config), tmp_path))
    assert (result.outcome, result.steps, result.version) == ("finished", STEPS, STEPS)
    assert {event.replica for event in events_of(tmp_path, WeightsInstalled)} == {0, 1}
    assert any(event.newest_version > 0 for event in events_of(tmp_path, GroupGenerated))
    assert all(server.labels[0].endswith(":0") and len(server.labels) > 1 for server in (one, other))
    check_record(tmp_path)
