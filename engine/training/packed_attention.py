"""Attention over a packed row, for every transformers model whose layers look up their attention function.

`pack_attention` is called by `gradients.Policy` for each model that it is given. The model then takes a `layout` beside
its inputs (`batch.MicroBatch.inputs`); without one, it computes each of its rows as before. The results are exact:
linear layers see every token once and no padding, and each bucket of pieces goes through the kernel that padded rows
would take.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from engine.training.layout import Bucket, Layout, Prefix, buckets_of
from engine.training.packable import why_padded

NAME = "step_engine_packed"
"""The name of this attention in transformers."""
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-10}
"""Largest allowed difference between hidden states of packed and padded rows, as a share of the largest one."""
COARSE = 2e-2
"""The same for narrower types."""
UNKNOWN = ("softcap", "s_aux", "position_bias", "cache")
"""Options that some models pass to their attention, and that this one does not compute."""


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    layout: Layout | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Called like transformers' attention functions. [rows, heads, tokens, size] to [rows, tokens, heads, size]"""
    unknown = [name for name in UNKNOWN if others.get(name) is not None]
    if unknown or not getattr(module, "is_causal", True):
        raise NotImplementedError(f"its attention needs {', '.join(unknown) or 'to see later tokens'}")
    if attention_mask is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling)

    def attend(bucket: Bucket, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[pieces, tokens, heads, size] each, and so is the result."""
        query, key, value = (values.transpose(1, 2) for values in (query, key, value))
        attended = []
        for part in bucket.parts(sliding_window, query.device):
            keys, values = key[:, :, part.keys], value[:, :, part.keys]
            attended.append(
                sdpa_attention_forward(
                    module, query[:, :, part.queries], keys, values, part.mask, dropout=dropout, scaling=scaling,
                    is_causal=True,
                )[0]
            )  # fmt: skip
        return attended[0] if len(attended) == 1 else torch.cat(attended, dim=1)

    query, key, value = (values.transpose(1, 2) for values in (query, key, value))
    if layout is None:
        [rows] = buckets_of([query.shape[1]] * len(query), 0)
        return attend(rows, query, key, value), None
    query, key, value = query[0], key[0], value[0]
    results = [
        bucket.unpadded(attend(bucket, bucket.padded(query), bucket.with_prefix(key), bucket.with_prefix(value)))
        for bucket in layout.buckets
    ]
    return torch.cat(results)[None], None


def _mask(*given: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """None if every token attends to all tokens before it, which `packed_attention` does by itself."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    mask: Tensor | None = sdpa_mask(*given, attention_mask=attention_mask, **options)
    return mask


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, _mask)


def pack_attention(model: Any) -> str | None:
    """Give a model this attention, in place. Returns None for success. Otherwise the model is unchanged, and the result
    says why, to follow the model's name.

    The model is tested: packed rows, with a shared prompt, must give the hidden states of padded rows.
    """
    reason = why_padded(model.config.to_dict())
    if reason is not None:
        return reason
    found = model.config._attn_implementation
    if found == NAME:
        return None
    if found != "sdpa":
        return f"has {found} attention; packed rows need sdpa"
    if not type(model)._can_set_attn_implementation():
        return "does not let its attention be replaced"
    try:
        expected = _padded_states(model)
        model.set_attn_implementation(NAME)
        difference = float((_packed_states(model) - expected).abs().max() / expected.abs().max())
    except Exception as error:
        model.set_attn_implementation(found)
        return f"does not compute packed rows: {type(error).__name__}: {error}"
    if not difference <= ROUNDING.get(model.dtype, COARSE):
        model.set_attn_implementation(found)
        return f"computes packed rows differently: hidden states differ by {difference:.1g} of the largest"
    return None


PROMPT, RESPONSES = [0, 1, 1], [[0, 1, 1, 0], [1, 0]]


def _padded_states(model: Any) -> Tensor:
    """The last hidden states of the prompt with each response, and of the first response alone, end to end."""
    rows = [[*PROMPT, *response] for response in RESPONSES] + [RESPONSES[0]]
    width = max(len(row) for row in rows)
    padded = [row + [0] * (width - len(row)) for row in rows]
    states = _states(model, torch.tensor(padded))
    return torch.cat([states[index, : len(row)] for index, row in enumerate(rows)])


def _packed_states(model: Any) -> Tensor:
    """The same, with the prompt computed once."""
    first, second = (len(response) for response in RESPONSES)
    alone, prompt = first, len(PROMPT)
    buckets = [*buckets_of([alone, prompt], 0), *buckets_of([first, second], alone + prompt, Prefix(alone, prompt))]
    ids = [*RESPONSES[0], *PROMPT, *RESPONSES[0], *RESPONSES[1]]
    positions = [*range(alone), *range(prompt), *range(prompt, prompt + first), *range(prompt, prompt + second)]
    states = _states(
        model, torch.tensor([ids]), position_ids=torch.tensor([positions]), layout=Layout(buckets=tuple(buckets))
    )[0]
    own = states.split([alone, prompt, first, second])
    return torch.cat([own[1], own[2], own[1], own[3], own[0]])


def _states(model: Any, ids: Tensor, **others: Any) -> Tensor:
    """The last hidden states, or the logits of a model without a body of its own."""
    device = model.get_input_embeddings().weight.device
    others = {name: value.to(device) for name, value in others.items()}
    with torch.no_grad():
        body = getattr(model, "base_model", model)
        found = body(input_ids=ids.to(device), use_cache=False, **others)
    states: Tensor = found.logits if body is model else found.last_hidden_state
    return states.float() if states.dtype not in ROUNDING else states
