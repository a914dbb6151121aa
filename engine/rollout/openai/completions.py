"""The two routes for sampling on a server: the request bodies, and the parsing of streamed events.

`rollout.openai.openai_backend` uses them. `Completions` is the OpenAI route, which every such server has. `TokensInOut`
is vLLM's route, which also reports the weights version of each token; it is used if the server has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.errors import EngineError
from engine.rollout.backend import SamplingParams


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
    """One route. `tells_weights`: whether it reports the weights of each token. `id_prefix`: the prefix that the server
    adds to a request's id, for aborts by id; None: a request can be aborted only by disconnecting."""

    path: str
    tells_weights: bool
    id_prefix: str | None

    def body(self, ask: TokenRequest) -> dict[str, Any]: ...

    def piece(self, event: dict[str, Any]) -> Piece | None: ...


class Completions:
    """`/v1/completions`. `fields`: the request fields in the server's schema; None: unknown, so all are sent."""

    path = "/v1/completions"
    tells_weights = False
    id_prefix: str | None = None

    def __init__(self, fields: frozenset[str] | None = None) -> None:
        self._fields = fields

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

    def piece(self, event: dict[str, Any]) -> Piece | None:
        choice = _choice(event)
        if choice is None:
            return None
        said = choice.get("logprobs") or {}
        return _piece(choice, choice.get("token_ids"), said.get("token_logprobs"), bool(choice.get("text")), None)


class TokensInOut:
    """vLLM's `/inference/v1/generate`."""

    path = "/inference/v1/generate"
    tells_weights = True
    id_prefix: str | None = "generate-tokens-"

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

    def piece(self, event: dict[str, Any]) -> Piece | None:
        choice = _choice(event)
        if choice is None:
            return None
        content = (choice.get("logprobs") or {}).get("content")
        logprobs = None if content is None else [token["logprob"] for token in content]
        spans = choice.get("weight_versions")
        labels = None if spans is None else [(span["version"], span["start"], span["end"]) for span in spans]
        return _piece(choice, choice.get("token_ids"), logprobs, False, labels)


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
