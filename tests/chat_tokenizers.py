"""Small tokenizers with chat templates in the style of the common families, and tiny models with them.

One token for each byte, and the special tokens of the family. Those of Llama, Mistral and Gemma put a token at the
beginning of every text, as the real ones do.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

CHATML = """\
{%- set ns = namespace(system='') -%}
{%- if messages[0].role == 'system' -%}{%- set ns.system = messages[0].content -%}{%- endif -%}
{%- if ns.system or tools -%}
{{- '<|im_start|>system\\n' + ns.system -}}
{%- for tool in tools or [] -%}{{- '\\n<tool>' + (tool | tojson) + '</tool>' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages if message.role != 'system' -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>' + call.function.name + ' ' + call.function.arguments.a | string + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""

LLAMA = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"""

MISTRAL = """\
{{- bos_token -}}
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{%- set ns.system = message.content + '\\n\\n' -%}
{%- elif message.role == 'user' -%}{{- '[INST] ' + ns.system + message.content + '[/INST]' -}}{%- set ns.system = '' -%}
{%- elif message.role == 'assistant' -%}{{- ' ' + message.content + eos_token -}}
{%- else -%}{{- raise_exception('only system, user and assistant roles are known') -}}{%- endif -%}
{%- endfor -%}"""

GEMMA = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}
{%- for message in messages -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"""


@dataclass(frozen=True, kw_only=True)
class Family:
    """`special` holds the special tokens; `bos` begins every text, `eos` is the tokenizer's own end."""

    template: str | None
    special: list[str] = field(default_factory=list)
    bos: str | None = None
    eos: str


FAMILIES = {
    "chatml": Family(template=CHATML, special=["<|im_start|>", "<|im_end|>"], eos="<|endoftext|>"),
    "llama": Family(
        template=LLAMA,
        special=["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        bos="<|begin_of_text|>",
        eos="<|end_of_text|>",
    ),
    "mistral": Family(template=MISTRAL, special=["[INST]", "[/INST]"], bos="<s>", eos="</s>"),
    "gemma": Family(template=GEMMA, special=["<start_of_turn>", "<end_of_turn>"], bos="<bos>", eos="<eos>"),
    "base": Family(template=None, bos="<s>", eos="</s>"),
}


def chat_tokenizer(name: str) -> Any:
    """A tokenizer in the style of a family; `base` has no template."""
    return made(FAMILIES[name])


def published_tokenizer(name: str) -> Any:
    """A tokenizer with a published template and the special tokens in it."""
    template = published(name)
    found = re.findall(r"<[|｜][^<>{}\n]+?[|｜]>|<(?:start|end)_of_turn>|\[gMASK]|<sop>", template)
    bos, eos = BEGINNINGS.get(name), "<|endoftext|>"
    special = [token for token in dict.fromkeys(found) if token not in (bos, eos)]
    return made(Family(template=template, special=special, bos=bos, eos=eos))


BEGINNINGS = {
    "deepseek_r1_distill": "<｜begin▁of▁sentence｜>",
    "deepseekv3": "<｜begin▁of▁sentence｜>",
    "gemma": "<bos>",
    "gemma3": "<bos>",
    "llama3": "<|begin_of_text|>",
    "llama3_1": "<|begin_of_text|>",
    "llama3_2": "<|begin_of_text|>",
}
"""The tokens that begin every text, by published template."""


def made(family: Family) -> Any:
    """The tokenizer of a family."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ends = [token for token in (family.bos, family.eos) if token is not None]
    tokenizer.add_special_tokens([*ends, *family.special])
    if family.bos is not None:
        first = (family.bos, tokenizer.token_to_id(family.bos))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{family.bos} $A", special_tokens=[first])
    given = {} if family.bos is None else {"bos_token": family.bos}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=family.eos, **given)
    wrapped.chat_template = family.template
    return wrapped


def published(name: str) -> str:
    """A chat template as its makers published it, from the package trl."""
    import trl

    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def tokens(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text as it is written: one for each special token, one for each byte of the rest."""
    known = {token: id for token, id in tokenizer.get_vocab().items() if id in tokenizer.added_tokens_decoder}
    pieces = re.split("(" + "|".join(map(re.escape, known)) + ")", text)
    alphabet = bytes_to_unicode()
    ids: list[int] = []
    for piece in pieces:
        ids += [known[piece]] if piece in known else [tokenizer.get_vocab()[alphabet[b]] for b in piece.encode()]
    return ids


def save_chat_model(directory: Path, name: str, *, context: int = 256, layers: int = 1) -> str:
    """A tiny model with random weights and the tokenizer of a family, as `save_pretrained` writes them."""
    return save_model(directory, chat_tokenizer(name), context=context, layers=layers)


def save_model(directory: Path, tokenizer: Any, *, context: int = 256, layers: int = 1) -> str:
    """A tiny model with random weights and this tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=32, max_position_embeddings=context, initializer_range=0.3,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def write_rows(file: Path, *rows: Any) -> str:
    """A JSONL file; a text is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(file)
