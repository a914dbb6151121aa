"""Small tokenizers in Hugging Face's format, with one token per character, byte or word:
`AutoTokenizer.from_pretrained` loads them.

Used by `tasks.quickstart` and `engine init`; users may use them for their own small tasks. Writes files, never
downloads.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

END = "<end>"
PAD = "<pad>"
UNKNOWN = "<unknown>"

CHAT_START, CHAT_END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
"""Chats without tools, as ChatML writes them."""


def vocabulary(alphabet: str) -> dict[str, int]:
    """Token ids: the special tokens first, then the characters in their order."""
    return {token: number for number, token in enumerate((PAD, END, UNKNOWN, *dict.fromkeys(alphabet)))}


def save_character_tokenizer(directory: str | Path, alphabet: str) -> int:
    """Write a tokenizer for the characters of `alphabet` into an existing directory; returns its vocabulary's size.

    Characters outside the alphabet become `<unknown>`. Nothing is added around a text. For a Qwen2 model, transformers
    loads it as a tokenizer of bytes, which drops white space: use `save_chat_tokenizer` there.
    """
    from tokenizers import (
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
    )  # late: not needed to read a configuration

    ids = vocabulary(alphabet)
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, END, UNKNOWN])
    target = Path(directory)
    _save_tokens(tokenizer, target)
    _save_settings(target, eos_token=END, pad_token=PAD, unk_token=UNKNOWN)
    return len(ids)


def save_chat_tokenizer(directory: str | Path, words: Sequence[str] = ()) -> int:
    """Write a tokenizer for every byte, with a chat template, into an existing directory; returns its vocabulary's
    size. Each of `words` is one token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # late, as above

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [TEXT_END, CHAT_START, CHAT_END]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    target = Path(directory)
    _save_tokens(tokenizer, target)
    _save_settings(target, eos_token=CHAT_END, pad_token=TEXT_END, chat_template=CHAT_TEMPLATE)
    return len(alphabet) + len(special) + len(words)


def _save_tokens(tokenizer: Any, directory: Path) -> None:
    """Like `Tokenizer.save`, but a failed write raises `OSError`."""
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def _save_settings(directory: Path, **given: str) -> None:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **given}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
