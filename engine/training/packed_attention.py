"""Attention over a packed row, for every transformers model whose layers look up their attention function.

`pack_attention` is called by `gradients.Policy` for each model that it is given. The model then takes a `layout` beside
its inputs (`batch.MicroBatch.inputs`); without one, it computes each of its rows as before. The results are exact:
linear layers see every token once and no padding. The varlen kernel, for sequences of variable length, takes all
pieces of the row in one call, without padding or masks. Where torch has no such kernel, each bucket of pieces goes
through the kernel that padded rows would take.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from engine.training.layout import Bucket, Layout, Prefix, buckets_of
from engine.training.packable import why_padded

log = logging.getLogger(__name__)

NAME = "step_engine_packed"
"""The name of this attention in transformers."""
VARLEN = "step_engine_varlen"
"""The same, with the varlen kernel where there is one."""
HALF = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
"""Maximum head size of the varlen kernel."""
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
    varlen: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """Called like transformers' attention functions. [rows, heads, tokens, size] to [rows, tokens, heads, size]

    `varlen`: compute the pieces of a packed row in one call, if torch can here.
    """
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
    if varlen and not dropout and _takes(query, value):
        return varlen_attention(query, key, value, layout, scaling, sliding_window)[None], None
    results = [
        bucket.unpadded(attend(bucket, bucket.padded(query), bucket.with_prefix(key), bucket.with_prefix(value)))
        for bucket in layout.buckets
    ]
    return torch.cat(results)[None], None


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float | None, window: int | None
) -> Tensor:
    """One call for a whole row. [tokens, heads, size] each, and so is the result."""
    from torch.nn.attention.varlen import varlen_attn

    options = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}  # always in torch 2.11
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (one.to(torch.get_autocast_dtype(query.device.type)) for one in (query, key, value))
    pieces = layout.sequences(query.device)
    if pieces.key_places is not None:
        key, value = (_Gathered.apply(one, pieces.key_places) for one in (key, value))
    attended: Tensor = varlen_attn(
        query, key, value, pieces.query_starts, pieces.key_starts, pieces.longest_query, pieces.longest_key,
        scale=scaling, window_size=(-1 if window is None else window - 1, 0), **options,
    )  # fmt: skip
    return attended


class _Gathered(torch.autograd.Function):
    """Rows of a tensor at given places, of which some are repeated: a prefix is there for each of its pieces. Their
    gradients are summed in float32, since a bfloat16 sum of many would lose the small ones."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.length = len(values)
        return values.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        [places] = ctx.saved_tensors
        wide = torch.promote_types(gradient.dtype, torch.float32)
        summed = gradient.new_zeros(ctx.length, *gradient.shape[1:], dtype=wide)
        return summed.index_add_(0, places, gradient.to(wide)).to(gradient.dtype), None


def _takes(query: Tensor, value: Tensor) -> bool:
    """Whether the varlen kernel can compute these. [tokens, heads, size] each"""
    kind, size = query.device.type, query.shape[-1]
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    return why_not_varlen(query.device, dtype) is None and _fits(size, value.shape[-1])


@cache
def _fits(size: int, value_size: int) -> bool:
    """Whether the varlen kernel can compute heads of these sizes."""
    fits = size == value_size <= LARGEST_HEAD and size % 8 == 0
    if not fits:
        sizes = f"keys of {size} and values of {value_size} numbers"
        log.warning("packed rows use sdpa attention for %s, which the varlen kernel does not take", sizes)
    return fits


@cache
def why_not_varlen(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the varlen kernel cannot be used; None if it can. The first call on a GPU tries the kernel, whose result must
    be that of `packed_attention` without it."""
    if device.type != "cuda":
        return f"needs a GPU of type cuda, but the device is {device}"
    if dtype not in HALF:
        return f"computes in bfloat16 or float16, not in {str(dtype).removeprefix('torch.')}"
    own = torch.empty(0, device=device).device  # with its number: the thread has another current device
    with ThreadPoolExecutor(1) as thread:  # it has no hooks of activation checkpointing, and no autocast
        reason = thread.submit(varlen_failure, own, dtype).result()
    if reason is not None:
        log.warning("packed rows use sdpa attention, because the varlen kernel %s", reason)
    return reason


def varlen_failure(device: torch.device, dtype: torch.dtype) -> str | None:
    """What is wrong with the varlen kernel on a device, compared with sdpa there; None if nothing is wrong."""
    roots, own = [300, 130], [200, 70, 3]
    row = [*buckets_of(roots, 0), *buckets_of(own, sum(roots), Prefix(0, roots[0]))]
    layout = Layout(buckets=tuple(row)).to(device)
    module: Any = torch.nn.Identity()
    module.num_key_value_groups = 2
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, sum(roots + own), 64, generator=generator).to(device, dtype).requires_grad_()
        for heads in (4, 2, 2)
    )
    differences: list[float] = []
    try:
        flat = [one[0].transpose(0, 1) for one in (query, key, value)]
        for window in (None, 100):
            options: dict[str, Any] = {"scaling": 0.125, "sliding_window": window, "layout": layout}
            [expected] = packed_attention(module, query, key, value, None, **options)[0]
            found = varlen_attention(flat[0], flat[1], flat[2], layout, 0.125, window)
            results = [
                (one, *torch.autograd.grad(one.float().square().sum(), (query, key, value), retain_graph=True))
                for one in (expected, found)
            ]
            pairs = zip(*results, strict=True)
            differences += [float(((one - other).norm() / one.norm()).detach()) for one, other in pairs]
    except Exception as error:  # whatever a kernel raises, the call cannot be used
        return f"fails in torch {torch.__version__}: {type(error).__name__}: {error}"
    wrong = [f"{one:.1g}" for one in differences if not one <= COARSE]  # NaN, too
    return f"gives results that differ from those of sdpa by {wrong[0]}" if wrong else None


def _mask(*given: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """None if every token attends to all tokens before it, which `packed_attention` does by itself."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    mask: Tensor | None = sdpa_mask(*given, attention_mask=attention_mask, **options)
    return mask


for name, varlen in ((NAME, False), (VARLEN, True)):
    # Where layers are compiled, attention is not: its shapes are new in nearly every pass.
    AttentionInterface.register(name, torch.compiler.disable(partial(packed_attention, varlen=varlen)))
    AttentionMaskInterface.register(name, _mask)


def pack_attention(model: Any, name: str = NAME) -> str | None:
    """Give a model this attention, in place, as `NAME` or `VARLEN`. Returns None for success. Otherwise the model is
    unchanged, and the result says why, to follow the model's name.

    The model is tested: packed rows, with a shared prompt, must give the hidden states of padded rows.
    """
    reason = why_padded(model.config.to_dict())
    if reason is not None:
        return reason
    found = model.config._attn_implementation
    if found in (NAME, VARLEN):
        model.set_attn_implementation(name)
        return None
    if found != "sdpa":
        return f"has {found} attention; packed rows need sdpa"
    if not type(model)._can_set_attn_implementation():
        return "does not let its attention be replaced"
    try:
        expected = _padded_states(model)
        model.set_attn_implementation(name)
        difference = float((_packed_states(model) - expected).abs().max() / expected.abs().max())
    except Exception as error:
        model.set_attn_implementation(found)
        return f"does not compute packed rows: {type(error).__name__}: {error}"
    if not difference <= ROUNDING.get(expected.dtype, COARSE):
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
    return states
