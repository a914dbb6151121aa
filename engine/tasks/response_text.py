"""The text of tokens, as code reads it: rewards, tool parsers, environments, agents, judges and samples.

Called wherever tokens become text. A marker such as `<think>` may be a special token of the tokenizer, so no special
token is ever left out, except the one that ended a response.
"""

from collections.abc import Collection, Sequence
from typing import Any


def text_of_tokens(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of all tokens, unchanged. `tokenizer`: a Hugging Face one."""
    return str(
        tokenizer.decode(
            token_ids,
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,  # it would remove spaces before punctuation
            spaces_between_special_tokens=False,
        )
    )


def text_of_response(tokenizer: Any, token_ids: Sequence[int], ends: Collection[int]) -> str:
    """The text of a response without the token of `ends` that ended it, if one did."""
    ended = bool(token_ids) and token_ids[-1] in ends
    return text_of_tokens(tokenizer, token_ids[:-1] if ended else token_ids)
