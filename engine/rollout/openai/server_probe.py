"""Finds out at the start what a server can do, and refuses one that cannot be used.

`rollout.openai.openai_backend` calls it before the first request. Every error is a `ConfigError` that names the field,
the server and the fix. The probe samples three tokens, one per request.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import ConfigError, EngineError
from engine.rollout.backend import SamplingParams
from engine.rollout.openai.completions import Completions, Generate, TokenRequest, TokensInOut, Wire
from engine.rollout.openai.server_controls import Controls, SglangControls, VllmControls
from engine.tasks.http_client import Http, RefusedRequest, Unavailable, pause

PROBE_TEXT = "12 + 30 = 42. The quick brown fox,\n"
DEV_MODE = "vLLM with VLLM_SERVER_DEV_MODE=1 in its environment"
EXTENSION = "engine.rollout.vllm.worker_extension.WeightsExtension"
LOAD_ADAPTER = "/v1/load_lora_adapter"
ADAPTER_FIX = "start vLLM with --enable-lora, --max-lora-rank and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
SGLANG_LOADS = "/update_weights_from_disk"
SGLANG_ROUTES = (
    Generate.path, SGLANG_LOADS, "/pause_generation", "/continue_generation", "/abort_request", "/model_info",
    "/server_info",
)  # fmt: skip
SGLANG_REFUSED = {
    "hicache_storage_backend": (None, "stored KV caches outlive the weights that computed them"),
    "disaggregation_mode": ("null", "a server of prefills alone keeps KV caches of old weights over an update"),
}
"""Settings of an SGLang server: the value that it must have, and why."""
UNIFORM = 1e-3
"""If the two largest log-probs differ by less than this, they cannot show the effect of the temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """The abilities of a server."""

    model: str
    context: int | None
    """Maximum number of tokens of prompt plus response; None if the server does not report it."""
    wire: Wire
    controls: Controls
    """Used if it `pauses`, or if the wire names requests for aborts."""
    pauses: bool
    sleeps: bool
    """Whether it has the routes. A server that was not started with sleep mode refuses the first call."""
    installs: bool
    adapts: bool
    """It loads adapters while it runs."""
    health: str
    """A path that the server answers while it can sample."""


async def abilities_of(
    http: Http,
    *,
    model: str | None,
    key_field: str,
    wait_s: float,
    encode: Callable[[str], Sequence[int]] | None,
    adapter: bool = False,
    api: str = "openai",
) -> Abilities:
    """Find out what the server can do. `wait_s`: seconds that it may take to start. `adapter`: the versions of the
    weights are adapters, which a request names; the server is not asked for its version. `api`: `openai` or `sglang`.
    Raises: `ConfigError`."""
    listed = await _until_up(http, key_field, wait_s)
    card = _card(http, listed, model)
    described = await _described(http, wait_s)
    if api == "sglang":
        found = await _sglang_abilities(http, card, described.get("paths", {}))
    else:
        found = _openai_abilities(http, card, described, adapter)
    ids = await _probe_ids(http, found, encode)
    if found.pauses:
        await _awake(http, found.controls)
    tells = await _check_samples(http, found, ids or [1])
    await _check_logprobs(http, found, ids or [1])
    return replace(found, wire=Generate(tells)) if api == "sglang" else found


def _openai_abilities(http: Http, card: dict[str, Any], described: dict[str, Any], adapter: bool) -> Abilities:
    paths = described.get("paths", {})
    if SGLANG_LOADS in paths and "/collective_rpc" not in paths:
        raise ConfigError("rollout.backend", "openai", f"{http.url} is an SGLang server", "use sglang")
    tells = not adapter and all(
        path in paths for path in (TokensInOut.path, "/abort_requests", "/update_weight_version", "/weight_info")
    )
    return Abilities(
        model=card["id"],
        context=card.get("max_model_len"),
        wire=TokensInOut() if tells else Completions(_fields(described)),
        controls=VllmControls(http),
        pauses="/pause" in paths and "/resume" in paths,
        sleeps=all(path in paths for path in ("/sleep", "/wake_up", "/pause", "/resume")),
        installs="/collective_rpc" in paths,
        adapts=LOAD_ADAPTER in paths,
        health="/health" if "/health" in paths else "/v1/models",
    )


async def _sglang_abilities(http: Http, card: dict[str, Any], paths: dict[str, Any]) -> Abilities:
    missing = [path for path in SGLANG_ROUTES if path not in paths]
    if missing:
        law = f"is no SGLang server that can be trained on: it has no route {', '.join(missing)}"
        fix = "start SGLang 0.5.23 or newer without DISABLE_OPENAPI_DOC, or use rollout.backend: openai"
        raise ConfigError("rollout.urls", http.url, law, fix)
    try:
        settings = await http.call("GET", "/server_info")
    except EngineError as error:
        raise ConfigError("rollout.urls", http.url, error.message) from None
    for name, (allowed, why) in SGLANG_REFUSED.items():
        value = settings.get(name, allowed) if isinstance(settings, dict) else allowed
        if value != allowed:
            law = f"{http.url} runs with {name} {value}: {why}"
            raise ConfigError("rollout.urls", http.url, law, f"start SGLang without --{name.replace('_', '-')}")
    return Abilities(
        model=card["id"],
        context=card.get("max_model_len"),
        wire=Generate(),
        controls=SglangControls(http),
        pauses=True,
        sleeps=False,
        installs=True,
        adapts=False,
        health="/health",
    )


def check_training(http: Http, found: Abilities, sync_mode: str, *, adapter: bool = False) -> None:
    """Raises: `ConfigError` if the server cannot install weights in this `sync_mode`."""
    if adapter:
        if not found.adapts:
            law = f"this server cannot load adapters: it has no route {LOAD_ADAPTER}"
            raise ConfigError("rollout.urls", http.url, law, ADAPTER_FIX)
        return
    if not found.installs:
        raise ConfigError(
            "rollout.urls", http.url,
            "this server cannot load new weights: it has no route /collective_rpc",
            f"use {DEV_MODE}, started with --worker-extension-cls {EXTENSION}",
        )  # fmt: skip
    if sync_mode == "keep" and not (found.pauses and found.wire.tells_weights):
        raise ConfigError(
            "rollout.sync_mode", sync_mode,
            f"{http.url} cannot pause requests and report the weights version of each token",
            f"use abort or wait; keep needs /pause, /resume and {TokensInOut.path} ({DEV_MODE}, --enable-scale-out), "
            "or an SGLang that reports weight_versions",
        )  # fmt: skip


async def _until_up(http: Http, key_field: str, wait_s: float) -> list[dict[str, Any]]:
    try:
        answer = await _answer_of(http, "/v1/models", wait_s)
    except RefusedRequest as error:
        if error.details["status"] in (401, 403):
            law = f"{http.url} refuses the request without a valid key"
            raise ConfigError(key_field, None, law, "set it to the environment variable that holds the key") from None
        fix = "use the address of an OpenAI-compatible server, like http://host:8000"
        raise ConfigError("rollout.urls", http.url, error.message, fix) from None
    except Unavailable as error:
        law = f"does not answer: {error.message}"
        raise ConfigError("rollout.urls", http.url, law, "start the server first") from None
    listed = answer.get("data") if isinstance(answer, dict) else None
    return [card for card in listed or [] if isinstance(card, dict) and "id" in card]


async def _answer_of(http: Http, path: str, wait_s: float) -> Any:
    """The answer to a GET, which is repeated for `wait_s` while the server is unavailable. Raises: `Unavailable`,
    `RefusedRequest`."""
    loop, pause_s = asyncio.get_running_loop(), 0.25
    until = loop.time() + wait_s
    while True:
        try:
            return await http.call("GET", path)
        except Unavailable:
            if loop.time() + pause_s > until:
                raise
            await pause(pause_s)
            pause_s *= 2


def _card(http: Http, listed: list[dict[str, Any]], model: str | None) -> dict[str, Any]:
    listed = [card for card in listed if not card.get("parent")]  # adapters, perhaps of an earlier run
    names = [card["id"] for card in listed]
    if model is None and len(listed) == 1:
        return listed[0]
    for card in listed:
        if card["id"] == model:
            return card
    law = f"{http.url} serves {', '.join(names) or 'no model'}"
    raise ConfigError("rollout.served_model_name", model, law, "use one of these" if names else "")


async def _described(http: Http, wait_s: float) -> dict[str, Any]:
    """The server's description of its routes; empty if it has none. Raises: `ConfigError` if the server does not
    answer."""
    try:
        answer = await _answer_of(http, "/openapi.json", wait_s)
    except Unavailable as error:
        if "status" in error.details:
            return {}
        law, fix = f"does not describe its routes: {error.message}", "look at the log of the server"
        raise ConfigError("rollout.urls", http.url, law, fix) from None
    except RefusedRequest:
        return {}
    return answer if isinstance(answer, dict) else {}


def _fields(described: dict[str, Any]) -> frozenset[str] | None:
    schema = described.get("components", {}).get("schemas", {}).get("CompletionRequest", {})
    return frozenset(schema["properties"]) if schema.get("properties") else None


async def _awake(http: Http, controls: Controls) -> None:
    """Resume the server. An earlier run that was killed may have left it paused, and then requests would hang."""
    try:
        await controls.resume()
    except EngineError as error:
        raise ConfigError("rollout.urls", http.url, error.message) from None


async def _probe_ids(http: Http, found: Abilities, encode: Callable[[str], Sequence[int]] | None) -> list[int] | None:
    """Token ids of a test text, which must be the same here and on the server. A server without /tokenize is not
    checked."""
    if encode is None:
        return None
    ours = list(encode(PROBE_TEXT))
    try:
        answer = await http.call("POST", "/tokenize", {"model": found.model, "prompt": PROBE_TEXT})
    except EngineError:
        return ours
    theirs = answer.get("tokens") if isinstance(answer, dict) else None
    if theirs is not None and theirs != ours:
        law = f"{http.url} has another tokenizer: {PROBE_TEXT!r} is {theirs[:8]}… there and {ours[:8]}… here"
        raise ConfigError("rollout.urls", http.url, law, "serve the model of model.path")
    return ours


async def _check_samples(http: Http, found: Abilities, ids: Sequence[int]) -> bool:
    """Sample one token with the same kind of request as the run. Returns whether the weights of the token came along.
    Raises: `ConfigError`."""
    ask = TokenRequest(
        id="probe", model=found.model, token_ids=ids, max_tokens=1, seed=1,
        params=SamplingParams(max_tokens=1), salt="probe",
    )  # fmt: skip
    tokens, tells = 0, False
    try:
        async for event in http.events(found.wire.path, found.wire.body(ask)):
            piece = found.wire.piece(event, tokens)
            if piece is not None:
                tokens += len(piece.token_ids)
                tells = tells or piece.labels is not None
    except EngineError as error:
        raise ConfigError("rollout.urls", http.url, error.message) from None
    if not tokens:
        law = "the server returns no token ids when asked for one token"
        raise ConfigError("rollout.urls", http.url, law, found.wire.tokens_fix)
    return tells


async def _check_logprobs(http: Http, found: Abilities, ids: Sequence[int]) -> None:
    """Check that log-probs are those of the sampling distribution: twice the temperature halves their differences."""
    warm, hot = [await _top_two(http, found, ids, temperature) for temperature in (1.0, 2.0)]
    common = [token for token in warm if token in hot]
    if len(common) < 2:
        return
    apart = [float(top[common[0]]) - float(top[common[1]]) for top in (warm, hot)]
    if abs(apart[0]) > UNIFORM and abs(apart[1] - apart[0] / 2) > abs(apart[1] - apart[0]):
        law = "the server returns log-probs from before temperature and top_p, not of the sampling distribution"
        raise ConfigError("rollout.urls", http.url, law, found.wire.logprobs_fix)


async def _top_two(http: Http, found: Abilities, ids: Sequence[int], temperature: float) -> dict[str, float]:
    path, body = found.wire.top_request(found.model, ids, temperature)
    try:
        top = found.wire.top_of(await http.call("POST", path, body))
    except EngineError as error:
        raise ConfigError("rollout.urls", http.url, error.message) from None
    except (KeyError, IndexError, TypeError):
        law = "the server returns no log-probs"
        raise ConfigError("rollout.urls", http.url, law, "use a server that returns one for each token") from None
    return top or {}
