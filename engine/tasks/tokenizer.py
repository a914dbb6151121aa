"""A tokenizer with one token per character, in Hugging Face's format: `AutoTokenizer.from_pretrained` loads it.

Used by `tasks.quickstart`; a user's own small tasks may use it too. Writes files, never downloads.
"""

import json
from pathlib import Path

END = "<end>"
PAD = "<pad>"
UNKNOWN = "<unknown>"


def vocabulary(alphabet: str) -> dict[str, int]:
    """Token ids: the special tokens first, then the characters in their order."""
    return {token: number for number, token in enumerate((PAD, END, UNKNOWN, *dict.fromkeys(alphabet)))}


def save_character_tokenizer(directory: str | Path, alphabet: str) -> int:
    """Write a tokenizer for the characters of `alphabet` into an existing directory; returns its vocabulary's size.

    Characters outside the alphabet become `<unknown>`. Nothing is added around a text.
    """
    from tokenizers import (
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
    )  # late: reading a configuration needs none

    ids = vocabulary(alphabet)
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, END, UNKNOWN])
    target = Path(directory)
    tokenizer.save(str(target / "tokenizer.json"))
    special = {"eos_token": END, "pad_token": PAD, "unk_token": UNKNOWN}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return len(ids)
