"""A tokenizer as conversations use it: messages through its chat template, text to ids and back.

Used by the gateway and by `rollout.program`. Works on any Hugging Face tokenizer; brings neither torch nor
transformers itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import DataFailure
from engine.rollout.conversation import Message, content_of, parsed_arguments


class Chat:
    """`tokenizer` is a Hugging Face one; `stop_ids` are the tokens that end an answer."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)

    @property
    def has_template(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    def template(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Messages as the text that the model continues from. Raises: `DataFailure` where the template refuses them."""
        if not self.has_template:
            raise DataFailure("the model's tokenizer has no chat template: messages cannot be rendered")
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                [plain_message(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=True,
                tokenize=False,
            )
        except Exception as error:
            raise DataFailure(f"the chat template refuses these messages: {error}") from error
        return rendered

    def encode(self, text: str, begins: bool) -> list[int]:
        """Ids of a plain text; one that begins a sequence gets the tokenizer's own beginning."""
        return list(self._tokenizer.encode(text, add_special_tokens=begins))

    def encode_rendered(self, text: str, begins: bool) -> list[int]:
        """Ids of what `template` gave: it holds its special tokens already."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def shown(self, token_ids: Sequence[int]) -> str:
        """What a reader is shown of an answer: no special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def full(self, token_ids: Sequence[int]) -> str:
        """All of it."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def ending(self, token_ids: Sequence[int]) -> str:
        """The text of the token that ended an answer; empty where its length did."""
        return self.full(token_ids[-1:]) if token_ids and token_ids[-1] in self.stop_ids else ""

    def answer(self, token_ids: Sequence[int]) -> str:
        """An answer without the token that ended it."""
        ended = bool(token_ids) and token_ids[-1] in self.stop_ids
        return self.shown(token_ids[:-1] if ended else token_ids)

    def find_stop(self, token_ids: Sequence[int], stops: Sequence[str]) -> tuple[int, str] | None:
        """Where the first of some strings ends an answer: how many tokens it takes with that string, and the text
        before it."""
        text = self.answer(token_ids)
        places = [(text.find(stop), stop) for stop in stops if stop in text]
        if not places:
            return None
        place, stop = min(places)
        low, high = 0, len(token_ids)
        while low < high:  # the fewest tokens whose text holds the whole string
            middle = (low + high) // 2
            if len(self.answer(token_ids[:middle])) >= place + len(stop):
                high = middle
            else:
                low = middle + 1
        return low, text[:place]


def plain_message(message: Message) -> dict[str, Any]:
    """A message as chat templates take it: text for content, parsed arguments for tool calls."""
    plain = {name: value for name, value in message.items() if value is not None}
    plain["content"] = content_of(message)
    if message.get("tool_calls"):
        plain["tool_calls"] = [
            {
                **call,
                "function": {**call["function"], "arguments": parsed_arguments(call["function"].get("arguments", {}))},
            }
            for call in message["tool_calls"]
        ]
    return plain
