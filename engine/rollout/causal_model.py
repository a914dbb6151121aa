"""A Hugging Face causal language model as the batch sampler sees it: two calls, prefill and decode, over a row cache.

Called by `rollout.batch_sampler` on the sampling thread. Uses only the public forward (`input_ids`, `attention_mask`,
`position_ids`, `past_key_values`). Must never accept a model that it cannot batch: what a signature does not show, a
probe at construction does.
"""

import inspect
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.errors import ConfigError
from engine.rollout.kv_cache import Masks, RowCache, use_grouped_attention

FIXED_ROWS = 32
"""Rows of every decode call at fixed shapes, whatever the slots. Vector loops of 32 floats then end where a row ends,
and no row falls into a loop's tail, which may round otherwise."""

_PROBE_TOKENS = 6
_FIRST_COLUMNS = 64


class CausalModel:
    """The model, its cache of `rows` requests and its masks. `context` is the longest prompt plus response,
    in tokens.

    With `fixed_shapes` the cache has all its columns from the start, its rows are rounded up to whole calls of
    `FIXED_ROWS`, and a probe makes sure that a row's bits depend neither on its place in a call nor on its neighbors.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        *,
        rows: int,
        context: int | None,
        device: str,
        dtype: str | None,
        fixed_shapes: bool,
    ) -> None:
        if isinstance(model, str):
            model = AutoModelForCausalLM.from_pretrained(model)
        self.device = torch.device(device)
        self.model: Any = model.to(self.device, type_named(dtype) or model.dtype).eval().requires_grad_(False)
        self.context = context_of(model, context)
        self._call = _accepted_options(model)
        use_grouped_attention(model)
        config = model.config.get_text_config()
        self.vocabulary: int = config.vocab_size
        columns = self.context if fixed_shapes else min(_FIRST_COLUMNS, self.context)
        self.rows = -(-rows // FIXED_ROWS) * FIXED_ROWS if fixed_shapes else rows
        self.cache = RowCache(config.num_hidden_layers, self.rows, columns)
        self.masks = Masks(config, self.context, model.dtype, self.device)
        self._probe()
        if fixed_shapes:
            self._probe_places()

    def prefill(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Write the keys and values of `token_ids` [n, tokens], padded on the right, into these rows [n] of
        the cache."""
        tokens = token_ids.shape[1]
        self.cache.reserve(tokens, self.context)
        self.cache.begin_prefill(rows)
        positions = torch.arange(tokens, device=self.device)[None].expand(token_ids.shape)
        self._forward(token_ids, positions, self.masks.prefill(tokens))

    def decode(self, token_ids: torch.Tensor, columns: torch.Tensor, length: int, first: int = 0) -> torch.Tensor:
        """Feed one token to each row from `first` on, `token_ids` [n] at positions `columns` [n]; return the next ones'
        logits [n, vocabulary].

        `length` is how many columns the attention looks at, at least the largest position plus one.
        """
        self.cache.reserve(length, self.context)
        self.cache.begin_decode(columns, length, first)
        return self._forward(token_ids[:, None], columns[:, None], self.masks.decode(columns, length))[:, -1]

    def sleep(self) -> None:
        """Give back the cache and, where the model is not on the CPU, its memory there. What was cached is gone."""
        self.cache.clear()
        if self.device.type != "cpu":
            self.model.to("cpu")
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Go back to the device. Raises what torch raises; the model is then where it slept."""
        try:
            self.model.to(self.device)
        except BaseException:
            self.model.to("cpu")
            raise

    def _forward(self, token_ids: torch.Tensor, positions: torch.Tensor, mask: Any) -> torch.Tensor:
        logits: torch.Tensor = self.model(
            input_ids=token_ids, position_ids=positions, attention_mask=mask, past_key_values=self.cache, **self._call
        ).logits
        return logits

    @torch.inference_mode()
    def _probe(self) -> None:
        """Refuse a model whose batched decoding differs from its own plain forward (recurrent state, ALiBi, chunks)."""
        tokens = min(_PROBE_TOKENS, self.context)
        ids = (torch.arange(tokens, device=self.device) * 7 + 1) % self.vocabulary
        plain = self.model(input_ids=ids[None]).logits[0, -1].float()
        try:
            if tokens > 1:
                self.prefill(torch.zeros(1, dtype=torch.long, device=self.device), ids[None, :-1])
            last = torch.full((1,), tokens - 1, device=self.device)
            ours = self.decode(ids[-1:], last, self.cache.columns)[0].float()
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise _unbatchable(self.model, f"its forward refuses the row cache ({error})") from error
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 5e-2
        moved = (ours - plain).abs().max().item() / max(plain.abs().max().item(), 1e-6)
        if not moved <= tolerance:
            raise _unbatchable(self.model, f"decoding over the row cache moves its logits by {moved:.1%}")
        self.cache.clear()

    @torch.inference_mode()
    def _probe_places(self) -> None:
        """Refuse fixed shapes where they do not help: odd widths leave tails to vector loops, and experts share calls.

        Every row is decoded once more in another place, among neighbors half of which are others.
        """
        tokens = min(_PROBE_TOKENS, self.context)
        drawn = torch.Generator().manual_seed(0)
        first, others = torch.randint(self.vocabulary, (2, FIXED_ROWS, tokens), generator=drawn).to(self.device)
        other = torch.arange(FIXED_ROWS, device=self.device)[:, None] % 2 == 0
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as the sampling thread has it
        try:
            here = self._probe_logits(first)
            there = self._probe_logits(torch.where(other, others, first).flip(0)).flip(0)
        finally:
            torch.set_num_threads(threads)
        if not torch.equal(here[~other[:, 0]], there[~other[:, 0]]):
            law = f"on this machine, results of {type(self.model).__name__} depend on the other rows of the batch"
            raise ConfigError("rollout.deterministic", True, law, "use false, or a model of even sizes without experts")

    def _probe_logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Of every token of `ids` [FIXED_ROWS, tokens], one decode call after the other: [rows, tokens, vocabulary]."""
        logits = []
        for place in range(ids.shape[1]):
            columns = torch.full((FIXED_ROWS,), place, device=self.device)
            logits.append(self.decode(ids[:, place], columns, self.context))
        self.cache.clear()
        return torch.stack(logits, dim=1)


def type_named(dtype: str | None) -> torch.dtype | None:
    """`float32`, `bfloat16` or `float16`; None stays None."""
    types = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype is not None and dtype not in types:
        raise ConfigError("rollout.dtype", dtype, f"must be one of {', '.join(types)}")
    return types[dtype] if dtype is not None else None


def context_of(model: PreTrainedModel, wanted: int | None) -> int:
    """Tokens of prompt plus response: what the config asks for, bounded by what the model can hold."""
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    context = limit if wanted is None else wanted
    if context is None:
        raise ConfigError(
            "rollout.context",
            None,
            "this model does not give its longest context",
            "set it to prompt + response tokens",
        )
    if context < 2 or (limit is not None and context > limit):
        raise ConfigError("rollout.context", wanted, f"must be from 2 to {limit}, the model's max_position_embeddings")
    return context


def _accepted_options(model: PreTrainedModel) -> dict[str, Any]:
    """The constant keyword arguments of every forward; refuses a model that cannot be told positions or a cache."""
    accepted = inspect.signature(model.forward).parameters
    for name in ("position_ids", "past_key_values"):
        if name not in accepted:
            raise _unbatchable(model, f"its forward takes no {name}")
    return {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in accepted else {})


def _unbatchable(model: PreTrainedModel, why: str) -> ConfigError:
    return ConfigError(
        "rollout.backend",
        "torch",
        f"{type(model).__name__} cannot be sampled by the embedded backend: {why}",
        "use vllm",
    )
