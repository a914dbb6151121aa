"""Keys and values of every running request in fixed places, so that requests join and leave between tokens for nothing.

Called by `rollout.batch_sampler`, and by Hugging Face attention layers through `RowCache.update`. One row per request;
the token at position p of a request lies in column p. Must never copy the cache to append a token, as the library's own
growing cache does, and never let a row see a column beyond its own position.
"""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED_ATTENTION = "engine_grouped"


class RowCache(Cache):
    """Per layer two tensors [rows, kv heads, columns, head size]; active requests are always rows 0 to n - 1.

    Before each forward the sampler says what is being written: `begin_prefill` or `begin_decode`.
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
        """The next forward writes columns 0 up of these rows [n] and attends within itself only."""
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
        """Write the new tokens' keys and values [n, kv heads, tokens, head size]; return what they may attend to."""
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
        """Make room for this many columns, doubling up to `limit`; what is there stays."""
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
        """Give row `target` the first `tokens` columns of row `source`."""
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                if tensor is not None:
                    tensor[target, :, :tokens] = tensor[source, :, :tokens]

    def clear(self) -> None:
        """Forget everything, so that a NaN left by a failed step cannot reach a later request (0 x NaN is NaN)."""
        self.keys = [None] * len(self.keys)
        self.values = [None] * len(self.values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self._length - 1, 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return max(self._length, query_length), 0

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros((self.rows, like.shape[1], self.columns, like.shape[3]))


class Masks:
    """Additive attention masks in the form the model takes: one tensor, or one per kind of layer where
    windows differ."""

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
    [rows, 1, heads, size]. Anything else goes to the library's own function, which this equals up to rounding.
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
    """Swap the attention in where the model takes it by name and would otherwise use the one it equals."""
    if model._supports_attention_backend and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(GROUPED_ATTENTION)
