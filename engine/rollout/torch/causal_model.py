"""Wraps a Hugging Face causal language model for the batch sampler: two calls, prefill and decode, with a row cache.

Called by `rollout.torch.batch_sampler` on the sampling thread. Uses only the public forward (`input_ids`,
`attention_mask`, `position_ids`, `past_key_values`). Must never accept a model that it cannot batch: it checks the
signature of the forward, and compares the results of a probe at construction.
"""

import inspect
from contextlib import nullcontext
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from engine.errors import ConfigError
from engine.training.expert_routes import Routers
from engine.training.lora import Lora, adapter_tensors, add_adapter, drawn_adapter

# -- keys and values ---------------------------------------------------------------------------------------------------


GROUPED_ATTENTION = "engine_grouped"


class RowCache(Cache):
    """Two tensors [rows, kv heads, columns, head size] per layer. Active requests always have the rows 0 to n - 1.

    Before each forward, call `begin_prefill` or `begin_decode` to say what the forward writes.
    """

    def __init__(self, layers: int, rows: int, columns: int) -> None:
        super().__init__(layers=[])
        self.rows = rows
        self.columns = columns
        self.keys: list[torch.Tensor | None] = [None] * layers
        self.values: list[torch.Tensor | None] = [None] * layers
        self._prefill_rows: torch.Tensor | None = None
        self._write: tuple[Any, ...] = ()
        self._read = slice(0, 0)
        self._length = 0

    def begin_prefill(self, rows: torch.Tensor) -> None:
        """The next forward writes these rows [n] from column 0 on, and attends only to its own tokens."""
        self._prefill_rows = rows
        self._length = 0

    def begin_decode(self, columns: torch.Tensor, length: int, first: int = 0) -> None:
        """The next forward writes one token of rows `first` to `first + n - 1` at `columns` [n] and attends to the
        first `length` columns."""
        self._prefill_rows = None
        self._read = slice(first, first + columns.shape[0])
        self._write = (torch.arange(first, self._read.stop, device=columns.device), slice(None), columns)
        self._length = length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values [n, kv heads, tokens, head size] of new tokens. Returns those that the tokens may
        attend to."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if keys is None or values is None:
            keys = self.keys[layer_idx] = self._allocate(key_states)
            values = self.values[layer_idx] = self._allocate(value_states)
        if self._prefill_rows is None:
            keys[self._write] = key_states[:, :, 0]
            values[self._write] = value_states[:, :, 0]
            return keys[self._read, :, : self._length], values[self._read, :, : self._length]
        tokens = key_states.shape[2]
        keys[self._prefill_rows, :, :tokens] = key_states
        values[self._prefill_rows, :, :tokens] = value_states
        return key_states, value_states

    def reserve(self, columns: int, limit: int) -> None:
        """Provide at least this many columns: doubles the number, up to `limit`, and keeps the contents."""
        if columns <= self.columns:
            return
        self.columns = min(max(columns, 2 * self.columns), limit)
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                if old is not None:
                    new = tensors[layer] = self._allocate(old)
                    new[:, :, : old.shape[2]] = old

    @torch.inference_mode()
    def copy_row(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` columns of row `source` to row `target`."""
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                if tensor is not None:
                    tensor[target, :, :tokens] = tensor[source, :, :tokens]

    def clear(self) -> None:
        """Drop all contents, so that a NaN from a failed step cannot reach a later request (0 x NaN is NaN)."""
        self.keys = [None] * len(self.keys)
        self.values = [None] * len(self.values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self._length - 1, 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return max(self._length, query_length), 0

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros((self.rows, like.shape[1], self.columns, like.shape[3]))


class Masks:
    """Additive attention masks in the form that the model takes: one tensor, or one per kind of layer if their windows
    differ."""

    def __init__(self, config: PretrainedConfig, context: int, dtype: torch.dtype, device: torch.device) -> None:
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        window = getattr(config, "sliding_window", None)
        if kinds == {"full_attention"} and getattr(config, "layer_types", None) is None and window:
            kinds = {"sliding_attention"}
        self.windows: dict[str, int | None] = {}
        for kind in sorted(kinds):
            self.windows[kind] = window if kind == "sliding_attention" and window and window < context else None
        if not any(self.windows.values()):
            self.windows = {"full_attention": None}
        self.dtype = dtype
        self.device = device

    def decode(self, columns: torch.Tensor, length: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """For one token per row at `columns` [n]: [n, 1, 1, length]."""
        return self._build(columns[:, None, None, None], length)

    def prefill(self, tokens: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """For the first `tokens` tokens of any row: [1, 1, tokens, tokens]."""
        return self._build(torch.arange(tokens, device=self.device)[None, None, :, None], tokens)

    def _build(self, queries: torch.Tensor, length: int) -> torch.Tensor | dict[str, torch.Tensor]:
        keys = torch.arange(length, device=self.device)
        masks = {}
        for kind, window in self.windows.items():
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            masks[kind] = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(
                hidden, -torch.inf
            )
        return masks if len(masks) > 1 else next(iter(masks.values()))


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention that does not copy the cache to repeat its kv heads.

    For one query per row: `query` [rows, heads, 1, size], `key` and `value` [rows, kv heads, columns, size]; returns
    [rows, 1, heads, size]. All other calls use the library's own function. Both give equal results up to rounding.
    """
    rows, heads, queries, size = query.shape
    kv_heads = key.shape[1]
    if (
        queries != 1
        or attention_mask is None
        or attention_mask.shape[1] != 1
        or kwargs.get("position_bias") is not None
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    scale = size**-0.5 if scaling is None else scaling
    grouped = (query * scale).view(rows, kv_heads, heads // kv_heads, size)
    scores = torch.matmul(grouped, key.transpose(2, 3)).add_(attention_mask)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(weights, value).view(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Use `grouped_attention` if the model accepts attention by name and uses `sdpa`, which gives equal results."""
    if model._supports_attention_backend and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(GROUPED_ATTENTION)


def _use_float32(head: Any) -> None:
    """Let a linear head compute in float32, whatever the type of its weight."""
    head.forward = lambda hidden: torch.nn.functional.linear(
        hidden.float(), head.weight.float(), None if head.bias is None else head.bias.float()
    )


# -- the model ---------------------------------------------------------------------------------------------------------


FIXED_ROWS = 32
"""Rows of every decode call with fixed shapes, for any number of slots. Vector loops of 32 floats then end where a row
ends, and no row is in the tail of a loop, which may round differently."""

_PROBE_TOKENS = 6
_FIRST_COLUMNS = 64


class CausalModel:
    """The model, its cache of `rows` requests and its masks. `context` is the maximum length of prompt plus response in
    tokens.

    With `fixed_shapes` the cache has all its columns from the start, and its rows are rounded up to a multiple of
    `FIXED_ROWS`. A probe then checks that a row's bits depend neither on its place in a call nor on its neighbors. With
    `lora` the model has an adapter, which has no effect until weights are installed in it.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        *,
        rows: int,
        context: int | None,
        device: str,
        fixed_shapes: bool,
        lora: Lora | None = None,
        notes_routes: bool = False,
        fp32_head: bool = False,
    ) -> None:
        if isinstance(model, str):
            model = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False)
        if lora is not None:
            add_adapter(model, lora)
        self.adapted = lora is not None
        self.device = torch.device(device)
        self.model: Any = model.to(self.device).eval().requires_grad_(False)
        if fp32_head:
            _use_float32(model.get_output_embeddings())
        self.context = context_of(model, context)
        self._call = _accepted_options(model)
        use_grouped_attention(model)
        config = model.config.get_text_config()
        self.vocabulary: int = config.vocab_size
        columns = self.context if fixed_shapes else min(_FIRST_COLUMNS, self.context)
        self.rows = -(-rows // FIXED_ROWS) * FIXED_ROWS if fixed_shapes else rows
        self.cache = RowCache(config.num_hidden_layers, self.rows, columns)
        self.masks = Masks(config, self.context, model.dtype, self.device)
        with drawn_adapter(self.model) if self.adapted else nullcontext():
            self._probe()
            if fixed_shapes:
                self._probe_places()
        self.routers = Routers(model) if notes_routes else None
        if self.routers is not None:
            self.routers.note()

    def installable(self) -> dict[str, torch.Tensor]:
        """The tensors that a new version replaces, by the names under which it is published. Tied tensors appear under
        each of their names."""
        parameters: dict[str, torch.Tensor] = self.model.state_dict(keep_vars=True)
        return adapter_tensors(self.model) if self.adapted else parameters

    def prefill(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Write the keys and values of `token_ids` [n, tokens], padded on the right, into these rows [n] of the
        cache."""
        tokens = token_ids.shape[1]
        self.cache.reserve(tokens, self.context)
        self.cache.begin_prefill(rows)
        positions = torch.arange(tokens, device=self.device)[None].expand(token_ids.shape)
        self._forward(token_ids, positions, self.masks.prefill(tokens))

    def decode(self, token_ids: torch.Tensor, columns: torch.Tensor, length: int, first: int = 0) -> torch.Tensor:
        """Feed one token to each row from `first` on: `token_ids` [n] at positions `columns` [n]. Returns the logits
        [n, vocabulary] of the next tokens.

        `length`: number of columns that the tokens attend to, at least the largest position plus one.
        """
        self.cache.reserve(length, self.context)
        self.cache.begin_decode(columns, length, first)
        return self._forward(token_ids[:, None], columns[:, None], self.masks.decode(columns, length))[:, -1]

    def sleep(self) -> None:
        """Free the cache, and move the model to the CPU. The cached keys and values are lost."""
        self.cache.clear()
        if self.device.type != "cpu":
            self.model.to("cpu")
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Move the model back to its device. Raises what torch raises; the model then stays on the CPU."""
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
        """Reject a model whose batched decoding differs from its plain forward (recurrent state, ALiBi, chunks)."""
        tokens = min(_PROBE_TOKENS, self.context)
        ids = (torch.arange(tokens, device=self.device) * 7 + 1) % self.vocabulary
        plain = self.model(input_ids=ids[None]).logits[0, -1].float()
        try:
            if tokens > 1:
                self.prefill(torch.zeros(1, dtype=torch.long, device=self.device), ids[None, :-1])
            last = torch.full((1,), tokens - 1, device=self.device)
            ours = self.decode(ids[-1:], last, self.cache.columns)[0].float()
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise _unbatchable(self.model, f"its forward fails with the row cache ({error})") from error
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 5e-2
        difference = (ours - plain).abs().max().item() / max(plain.abs().max().item(), 1e-6)
        if not difference <= tolerance:
            raise _unbatchable(self.model, f"decoding with the row cache changes its logits by {difference:.1%}")
        self.cache.clear()

    @torch.inference_mode()
    def _probe_places(self) -> None:
        """Reject fixed shapes if rows still depend on other rows: odd widths leave tails in vector loops, and experts
        share calls.

        Decodes every row a second time in another place, with half of its neighbors replaced.
        """
        tokens = min(_PROBE_TOKENS, self.context)
        drawn = torch.Generator().manual_seed(0)
        first, others = torch.randint(self.vocabulary, (2, FIXED_ROWS, tokens), generator=drawn).to(self.device)
        other = torch.arange(FIXED_ROWS, device=self.device)[:, None] % 2 == 0
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # like the sampling thread
        try:
            expected = self._probe_logits(first)
            again = self._probe_logits(torch.where(other, others, first).flip(0)).flip(0)
        finally:
            torch.set_num_threads(threads)
        if not torch.equal(expected[~other[:, 0]], again[~other[:, 0]]):
            law = f"on this machine, results of {type(self.model).__name__} depend on the other rows of the batch"
            raise ConfigError("rollout.deterministic", True, law, "use false, or a model of even sizes without experts")

    def _probe_logits(self, ids: torch.Tensor) -> torch.Tensor:
        """The logits [rows, tokens, vocabulary] of every token of `ids` [FIXED_ROWS, tokens], one decode call after the
        other."""
        logits = []
        for place in range(ids.shape[1]):
            columns = torch.full((FIXED_ROWS,), place, device=self.device)
            logits.append(self.decode(ids[:, place], columns, self.context))
        self.cache.clear()
        return torch.stack(logits, dim=1)


def context_of(model: PreTrainedModel, wanted: int | None) -> int:
    """Maximum tokens of prompt plus response: the wanted number, or the model's maximum if None. Raises: `ConfigError`
    if the model cannot have that many."""
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    context = limit if wanted is None else wanted
    if context is None:
        raise ConfigError(
            "rollout.context",
            None,
            "this model does not declare its maximum context",
            "set it to prompt + response tokens",
        )
    if context < 2 or (limit is not None and context > limit):
        raise ConfigError("rollout.context", wanted, f"must be from 2 to {limit}, the model's max_position_embeddings")
    return context


def _accepted_options(model: PreTrainedModel) -> dict[str, Any]:
    """The constant keyword arguments of every forward. Raises: `ConfigError` if the forward does not take positions or
    a cache."""
    accepted = inspect.signature(model.forward).parameters
    for name in ("position_ids", "past_key_values"):
        if name not in accepted:
            raise _unbatchable(model, f"its forward has no parameter {name}")
    return {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in accepted else {})


def _unbatchable(model: PreTrainedModel, why: str) -> ConfigError:
    return ConfigError(
        "rollout.backend",
        "torch",
        f"{type(model).__name__} cannot be sampled by the embedded backend: {why}",
        "use vllm",
    )
