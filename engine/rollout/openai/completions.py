"""The routes for sampling on a server: the request bodies, and the parsing of streamed events.

`rollout.openai.openai_backend` uses them. `Completions` is the OpenAI route, which every such server has. `TokensInOut`
is vLLM's route, which also reports the weights version of each token; it is used if the server has it. `Generate` is
SGLang's route.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.errors import EngineError
from engine.rollout.backend import SamplingParams
from engine.tasks.http_client import RefusedRequest

PROBED = 4
"""Number of likeliest tokens that `top_request` asks for."""
STREAM_INTERVAL = 16
"""Tokens between two events of SGLang. Each repeats all earlier tokens, unless the server streams increments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """The parameters of one HTTP request for tokens."""

    id: str
    model: str
    token_ids: Sequence[int]
    """Prompt and prefix."""
    max_tokens: int
    seed: int
    params: SamplingParams
    salt: str
    """Separates the server's prefix cache of these weights from that of other weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a response. `labels`: (label of the weights, start, stop) for the whole response, if reported."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    labels: list[tuple[str, int, int]] | None = None


class Wire(Protocol):
    """One route. `tells_weights`: whether it reports the weights of each token. `tokens_fix` and `logprobs_fix`: what
    to do if the server returns no token ids, or not the log-probs of its sampling distribution."""

    path: str
    tells_weights: bool
    tokens_fix: str
    logprobs_fix: str

    def body(self, ask: TokenRequest) -> dict[str, Any]: ...

    def piece(self, event: dict[str, Any], received: int) -> Piece | None:
        """The new tokens of an event. `received`: number of tokens in the earlier events of this request."""

    def server_id(self, id: str) -> str | None:
        """The server's name of a request, for aborts; None: a request can be aborted only by disconnecting."""

    def top_request(self, model: str, ids: Sequence[int], temperature: float) -> tuple[str, dict[str, Any]]:
        """Path and body of a request for the log-probs of the likeliest next tokens."""

    def top_of(self, answer: Any) -> dict[str, float]:
        """These log-probs by token. Raises: `KeyError`, `IndexError` or `TypeError` if the answer has none."""


class VllmWire:
    """What both of vLLM's routes have in common."""

    tokens_fix = "use vLLM 0.10.2 or newer"
    logprobs_fix = "start vLLM with --logprobs-mode processed_logprobs"

    def top_request(self, model: str, ids: Sequence[int], temperature: float) -> tuple[str, dict[str, Any]]:
        body = {"model": model, "prompt": list(ids), "max_tokens": 1, "logprobs": PROBED}
        return Completions.path, {**body, "return_tokens_as_token_ids": True, "temperature": temperature}

    def top_of(self, answer: Any) -> dict[str, float]:
        top: dict[str, float] = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        return top


class Completions(VllmWire):
    """`/v1/completions`. `fields`: the request fields in the server's schema; None: unknown, so all are sent."""

    path = "/v1/completions"
    tells_weights = False

    def __init__(self, fields: frozenset[str] | None = None) -> None:
        self._fields = fields

    def server_id(self, id: str) -> str | None:
        return None

    def body(self, ask: TokenRequest) -> dict[str, Any]:
        params = ask.params
        whole = {
            "model": ask.model,
            "prompt": list(ask.token_ids),
            "max_tokens": ask.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": ask.seed,
            "logprobs": 1,
            "stream": True,
            # Not part of OpenAI's API. Some servers' defaults for these would change the sampling distribution.
            "return_token_ids": True,
            "stop_token_ids": list(params.stop_ids),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "cache_salt": ask.salt,
            "return_tokens_as_token_ids": True,
        }
        return {name: value for name, value in whole.items() if self._fields is None or name in self._fields}

    def piece(self, event: dict[str, Any], received: int) -> Piece | None:
        choice = _choice(event)
        if choice is None:
            return None
        said = choice.get("logprobs") or {}
        return _piece(choice, choice.get("token_ids"), said.get("token_logprobs"), bool(choice.get("text")), None)


class TokensInOut(VllmWire):
    """vLLM's `/inference/v1/generate`."""

    path = "/inference/v1/generate"
    tells_weights = True

    def server_id(self, id: str) -> str | None:
        return f"generate-tokens-{id}"

    def body(self, ask: TokenRequest) -> dict[str, Any]:
        params = ask.params
        sampling = {
            "max_tokens": ask.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": ask.seed,
            "logprobs": 0,
            "stop_token_ids": list(params.stop_ids),
            "ignore_eos": True,
            "detokenize": False,
        }
        return {
            "request_id": ask.id,
            "model": ask.model,
            "token_ids": list(ask.token_ids),
            "sampling_params": sampling,
            "stream": True,
            "cache_salt": ask.salt,
        }

    def piece(self, event: dict[str, Any], received: int) -> Piece | None:
        choice = _choice(event)
        if choice is None:
            return None
        content = (choice.get("logprobs") or {}).get("content")
        logprobs = None if content is None else [token["logprob"] for token in content]
        spans = choice.get("weight_versions")
        labels = None if spans is None else [(span["version"], span["start"], span["end"]) for span in spans]
        return _piece(choice, choice.get("token_ids"), logprobs, False, labels)


class Generate:
    """SGLang's `/generate`. Newer servers report the weights of each token with the end of a request."""

    path = "/generate"
    tokens_fix = "use SGLang 0.5 or newer"
    logprobs_fix = "start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"

    def __init__(self, tells_weights: bool = False) -> None:
        self.tells_weights = tells_weights

    def server_id(self, id: str) -> str | None:
        """SGLang aborts every request whose id begins with the given one, so all ids have the same length."""
        return hashlib.blake2b(id.encode(), digest_size=16).hexdigest()

    def body(self, ask: TokenRequest) -> dict[str, Any]:
        params = ask.params
        sampling = {
            "max_new_tokens": ask.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "sampling_seed": ask.seed,
            "stop_token_ids": list(params.stop_ids),
            "ignore_eos": not params.stop_ids,  # it would ignore stop_token_ids, too
            "skip_special_tokens": False,
            "stream_interval": STREAM_INTERVAL,
        }
        return {
            "rid": self.server_id(ask.id),
            "input_ids": list(ask.token_ids),
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": True,
            "extra_key": ask.salt,
        }

    def piece(self, event: dict[str, Any], received: int) -> Piece | None:
        """Raises: `RefusedRequest` for a request that does not fit, `EngineError` for missing tokens or log-probs."""
        meta = event.get("meta_info")
        if not isinstance(meta, dict):
            return None
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort" and reason.get("status_code") == 400:
            said = str(reason.get("message"))
            raise RefusedRequest(f"SGLang refused the request: {said}", status=400, said=said)
        # An event has all tokens so far or the newest ones; the one that ends an aborted request may repeat some.
        new = max(0, meta.get("completion_tokens", received) - received)
        rows = (meta.get("output_token_logprobs") or [])[-new:] if new else []
        if len(rows) < new:
            raise EngineError(f"the server returned {len(rows)} log-probs for {new} tokens, but training needs all")
        spans = meta.get("weight_versions")
        labels = None if spans is None else [(span["version"], span["start"], span["end"]) for span in spans]
        return Piece(
            token_ids=[row[1] for row in rows],
            logprobs=[row[0] for row in rows],
            finish_reason=reason.get("type"),
            labels=labels,
        )

    def top_request(self, model: str, ids: Sequence[int], temperature: float) -> tuple[str, dict[str, Any]]:
        sampling = {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True}
        body = {"input_ids": list(ids), "sampling_params": sampling}
        return self.path, {**body, "return_logprob": True, "top_logprobs_num": PROBED}

    def top_of(self, answer: Any) -> dict[str, float]:
        return {str(row[1]): row[0] for row in answer["meta_info"]["output_top_logprobs"][0]}


def _choice(event: dict[str, Any]) -> dict[str, Any] | None:
    choices = event.get("choices") or [None]
    return choices[0] if isinstance(choices[0], dict) else None


def _piece(
    choice: dict[str, Any],
    token_ids: list[int] | None,
    logprobs: list[float | None] | None,
    has_text: bool,
    labels: list[tuple[str, int, int]] | None,
) -> Piece:
    """Raises: `EngineError` if token ids or log-probs are missing."""
    tokens, values = token_ids or [], logprobs or []
    if (has_text and not tokens) or len(values) > len(tokens):
        raise EngineError(
            "the server returns no token ids (`return_token_ids`), and text does not determine the sampled tokens: use "
            "vLLM 0.10.2 or newer"
        )
    known = [value for value in values if value is not None]
    if len(known) != len(tokens):
        raise EngineError(
            f"the server returned {len(known)} log-probs for {len(tokens)} tokens (`logprobs`), but training needs one "
            "for each token"
        )
    return Piece(token_ids=tokens, logprobs=known, finish_reason=choice.get("finish_reason"), labels=labels)
