"""Renders prompts as the model reads them: chat messages with the tokenizer's template, texts unchanged; and encodes
them as token ids.

Called by the built-in generator, the gateway, the warm start, the data set and `engine check`, so that all of them give
a model the same tokens. `tokenizer` is always a Hugging Face tokenizer. Reads no files, and imports no large package
before it reads a template.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple, TypeAlias

from engine.errors import DataFailure, message_of, suggestion
from engine.tasks.response_text import text_of_tokens
from engine.trajectory import Prompt

Message: TypeAlias = Mapping[str, Any]
Tool: TypeAlias = Mapping[str, Any]

# -- messages ----------------------------------------------------------------------------------------------------------


def content_of(message: Message) -> str:
    """The text of a message. Its content may be text, a list of text parts, or nothing."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def parsed_arguments(arguments: Any) -> Any:
    """Arguments of a tool call, parsed if they are JSON in a string; `{}` for null and an empty text; otherwise
    unchanged."""
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) and arguments.strip() else arguments
    except (ValueError, RecursionError):
        return arguments
    return {} if parsed is None or (isinstance(parsed, str) and not parsed.strip()) else parsed


def plain_message(message: Message) -> dict[str, Any]:
    """A message in one form: text as content, and calls as OpenAI writes them, with their arguments as given."""
    plain = {name: value for name, value in message.items() if value is not None and name != "tool_calls"}
    plain["content"] = content_of(message)
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    return plain


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in call.items() if value is not None}
    function = given.get("function") or {name: given.pop(name) for name in ("name", "arguments") if name in given}
    return {"type": "function", **given, "function": {**function, "arguments": function.get("arguments")}}


def problem_of(messages: Any, name: str) -> str:
    """What is wrong with a list of messages under this name; "" if it is valid."""
    if not isinstance(messages, list) or not messages:
        empty = isinstance(messages, str | list) and not messages
        return f"{name!r} is " + ("empty" if empty else f"{type(messages).__name__} {messages!r:.60}")
    for number, message in enumerate(messages, start=1):
        problem = _problem_of_message(message)
        if problem:
            return f"message {number} of {name!r} {problem}"
    return ""


def _problem_of_message(message: Any) -> str:
    if not isinstance(message, dict):
        return f"is {type(message).__name__} {message!r:.60}"
    if not isinstance(message.get("role"), str):
        return _missing("role", message)
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(_is_call(call) for call in calls)):
        return "has 'tool_calls' that are not a list of functions with a name and arguments"
    if content is None and calls:
        return ""
    if isinstance(content, list):
        unsupported = next((part for part in content if not _is_text(part)), None)
        kind = unsupported.get("type") if isinstance(unsupported, dict) else type(unsupported).__name__
        return "" if unsupported is None else f"has a part of type {kind!r}; only parts of type 'text' can be used"
    return "" if isinstance(content, str) else _missing("content", message)


def _missing(name: str, message: Mapping[str, Any]) -> str:
    near = suggestion(name, [str(key) for key in message])
    return f"has no text under {name!r}" + (f" ({near})" if near and name not in message else "")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_call(call: Any) -> bool:
    function = call.get("function") or call if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """The JSON schemas of a row's tools, from a list or its JSON; None if the value is neither."""
    tools = parsed_arguments(value)
    valid = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    return tools if valid else None


# -- templates ---------------------------------------------------------------------------------------------------------


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    answered: bool = False,
    whole: bool = True,
) -> str:
    """Render messages as the text that the model continues. `answered`: the messages already contain the answer, so do
    not add the beginning of one. `whole`: refuse to leave anything out.

    Raises: `DataFailure` if there is no template, or if it raises on these messages, or leaves out the text of one or
    a call, in every form that it may expect.
    """
    if not has_template(tokenizer):
        raise DataFailure("the model's tokenizer has no chat template: messages cannot be rendered")
    plain = [plain_message(message) for message in messages]
    others: list[Any] = [list(tools) if tools else None, dict(template_kwargs or {}), answered]
    probe = json.dumps([*_probed(plain), *others], default=str)
    form, lost = _fitting_form(tokenizer, json.dumps(tokenizer.chat_template), probe)
    if lost and whole:
        raise DataFailure(f"the chat template leaves out {lost}")
    return _written(tokenizer, plain, form, *others)


def _written(
    tokenizer: Any,
    messages: Sequence[Message],
    form: "Form",
    tools: list[Tool] | None,
    template_kwargs: Mapping[str, Any],
    answered: bool,
) -> str:
    """Raises: `DataFailure` if the template raises."""
    formed = [_formed(message, form) for message in messages]
    try:
        text: str = tokenizer.apply_chat_template(
            formed, tools=tools, add_generation_prompt=not answered, tokenize=False, **template_kwargs
        )
    except Exception as error:
        raise DataFailure(f"the chat template refuses these messages: {message_of(error)}") from error
    return text


# -- forms of messages -------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """How a template expects messages with tool calls."""

    parsed: bool
    """Whether arguments are mappings, and not JSON texts. Templates that take the one may write the other wrongly."""
    empty: bool
    """Whether a message of calls only has an empty text as its content, and not None."""
    nested: bool
    """Whether name and arguments are under `function`."""


FORMS = tuple(Form(*one) for one in product((True, False), repeat=3))
"""In the order in which they are tried: most templates take the first."""
MOST_PROBES = 1024
"""Maximum number of kinds of chats whose form is cached."""
_REASONING = re.compile(r".*(</[\w:]*think\w*>|\[/THINK\])", re.DOTALL)
"""The part of an answer that templates may leave out."""


def _formed(message: Message, form: Form) -> dict[str, Any]:
    """A plain message in a form."""
    calls = []
    for call in message.get("tool_calls", ()):
        given, function = call["function"]["arguments"], call["function"]
        parsed = parsed_arguments(given)
        text = given if isinstance(given, str) and parsed else json.dumps(parsed, ensure_ascii=False)
        function = {**function, "arguments": parsed if form.parsed else text}
        calls.append({**call, "function": function} if form.nested else function)
    silent = calls and not form.empty and not _REASONING.sub("", message["content"]).strip()
    return {**message, **({"tool_calls": calls} if calls else {}), **({"content": None} if silent else {})}


def _probed(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], dict[str, str], list[str]]:
    """Plain messages with a word in place of each text, name of a call and argument; what each word stands for; and
    texts that show wrong arguments: a mapping as Python writes it, and JSON of a text of JSON."""
    probes, words, wrong = list[dict[str, Any]](), dict[str, str](), list[str]()
    for number, message in enumerate(messages, start=1):
        of, calls = f"message {number} ({message.get('role')})", []
        thought = _REASONING.match(message["content"]) if message.get("role") == "assistant" else None
        content = "" if thought is None else f"<think>xTHOUGHTx{thought[1]}"
        if message["content"][0 if thought is None else thought.end() :].strip():
            content += f"xTEXT{number}x"
            words[f"xTEXT{number}x"] = f"the text of {of}"
        for place, call in enumerate(message.get("tool_calls", ())):
            word, function = f"x{number}CALL{place}x", call["function"]
            words[word] = f"the call of {function['name']!r} in {of}"
            given = parsed_arguments(function["arguments"])
            values = {key: f"{word}VALUE{index}x" for index, key in enumerate(given if isinstance(given, dict) else ())}
            words |= {value: f"the argument {key!r} of {function['name']!r} in {of}" for key, value in values.items()}
            wrong += [repr(values), json.dumps(json.dumps(values))[1:-1]] if values else []
            calls.append({**call, "function": {**function, "name": word, "arguments": values}})
        probes.append({**message, "content": content, **({"tool_calls": calls} if calls else {})})
    return probes, words, wrong


@lru_cache(maxsize=MOST_PROBES)
def _fitting_form(tokenizer: Any, template: str, probe: str) -> tuple[Form, str]:
    """The first form in which the template writes every word of a probe, and "". If there is none: the one in which it
    leaves out least, and the first thing that it leaves out. `template`: only to tell its probes from others."""
    messages, words, wrong, *others = json.loads(probe)
    found: list[tuple[int, Form, str]] = []
    for form in FORMS if any("tool_calls" in message for message in messages) else FORMS[:1]:
        try:
            text = _written(tokenizer, messages, form, *others)
        except DataFailure:
            continue
        lost = [meaning for word, meaning in words.items() if word not in text]
        lost += ["the right form of arguments"] if any(one in text for one in wrong) else []
        if not lost:
            return form, ""
        found.append((len(lost), form, lost[0]))
    _, form, first = min(found, key=lambda one: one[0], default=(0, FORMS[0], ""))
    return form, first


# -- ends of turns -----------------------------------------------------------------------------------------------------


ANSWER = "xANSWERx"
"""Placeholder for an answer, used to find out how a template ends one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """How a chat template ends an answer."""

    text: str
    """The text that the template writes after the answer."""
    token: int | None
    """The first added token in that text, which ends the answer; None if there is none."""


def turn_end(tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> TurnEnd | None:
    """How the tokenizer's template ends an answer. None if there is no template, or it does not show answers."""
    if not has_template(tokenizer):
        return None
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": ANSWER}]
    try:
        rendered = render(tokenizer, messages, None, template_kwargs, answered=True)
    except DataFailure:
        return None
    _, answer, text = rendered.rpartition(ANSWER)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    ids = tokenizer.encode(text, add_special_tokens=False) if text else []
    return TurnEnd(text=text, token=next((id for id in ids if id in added), None)) if answer else None


GIVEN = (
    "messages", "conversation", "tools", "add_generation_prompt", "continue_final_message", "chat_template",
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "raise_exception", "strftime_now",
)  # fmt: skip
"""Names that the engine and transformers pass to every template, or to the function that applies it."""


def template_arguments(tokenizer: Any) -> list[str]:
    """Names that the tokenizer's templates read and that `data.chat_template_kwargs` may set, sorted."""
    import jinja2
    from jinja2 import meta, nodes

    template = tokenizer.chat_template
    sources = list(template.values()) if isinstance(template, dict) else [template]
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    names: set[str] = set()
    for source in sources:
        known = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", source)  # a tag of transformers, without a name in it
        parsed = environment.parse(known)
        free = meta.find_undeclared_variables(parsed)  # with those that only some branches assign
        assigned = {name.name for name in parsed.find_all(nodes.Name) if name.ctx != "load"}
        names |= free - (assigned - _asked_for(parsed, set()))
    special = getattr(tokenizer, "special_tokens_map", {})
    return sorted(names - {*GIVEN, *special, "bos_token", "eos_token", "pad_token", "unk_token"})


def _asked_for(node: Any, assigned: set[str]) -> set[str]:
    """Names that a template tests before it assigns them, with `if date is not defined` or the filter `default`. Other
    names that it assigns are its own variables."""
    from jinja2 import nodes

    found: set[str] = set()
    if isinstance(node, nodes.Name) and node.ctx != "load":
        assigned.add(node.name)
    if isinstance(node, nodes.Test | nodes.Filter) and node.name in ("defined", "undefined", "default", "d"):
        asked = node.node.name if isinstance(node.node, nodes.Name) else None
        found = {asked} - assigned if asked else found
    read = node.node if isinstance(node, nodes.Assign) else getattr(node, "iter", None)
    children = sorted(node.iter_child_nodes(), key=lambda child: child is not read)  # reads come before assignments
    scope = set(assigned) if isinstance(node, nodes.Macro | nodes.CallBlock) else assigned
    return found.union(*(_asked_for(child, scope) for child in children))


# -- prompts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """Fields have the names of the config section `data`, except `mode`, which is `data.chat` there."""

    mode: str = "auto"
    """`auto`: a text becomes a user message if there is a template. `never`: no template is used."""
    system_prompt: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class PromptRenderer:
    """Renders prompts as texts and as token ids. A prompt with more than `most_tokens` ids is cut (`_cut`)."""

    def __init__(self, tokenizer: Any, settings: ChatSettings | None = None, most_tokens: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._settings = settings or ChatSettings()
        self._max_tokens = most_tokens
        self.templated = self._settings.mode != "never" and has_template(tokenizer)
        """Whether texts become user messages, and messages can be rendered."""
        self._frames: dict[tuple[str, ...], tuple[str, ...]] = {}

    def text(self, prompt: Prompt) -> str:
        """The text that the model reads. Raises: `DataFailure` if messages cannot be rendered."""
        chat = self._chat(prompt)
        return prompt.text if chat is None else self._rendered(prompt, chat)

    def _rendered(self, prompt: Prompt, chat: Sequence[Message]) -> str:
        return render(self._tokenizer, chat, prompt.fields.get("tools"), self._settings.template_kwargs)

    def _chat(self, prompt: Prompt) -> list[Message] | None:
        """The messages of a prompt; None if it is a text that no template renders."""
        messages = prompt.fields.get("messages")
        if not messages and not self.templated:
            return None
        if not self.templated and self._settings.mode == "never":
            raise DataFailure("data.chat is never, but messages need the chat template")
        chat = list(messages) if messages else [{"role": "user", "content": prompt.text}]
        system = self._settings.system_prompt
        if system is not None and chat[0].get("role") not in ("system", "developer"):
            chat.insert(0, {"role": "system", "content": system})
        return chat

    def quick_text(self, prompt: Prompt) -> str:
        """The same result as `text`, but fast for many prompts: a template writes the same text around the plain texts
        of all chats with the same roles, so it is rendered once for these roles.

        A text that starts or ends with white space, or has a character that templates look for, is rendered by itself.
        """
        if not self.templated or prompt.fields.get("tools"):
            return self.text(prompt)
        messages = prompt.fields.get("messages") or [{"role": "user", "content": prompt.text}]
        contents = [message.get("content") for message in messages]
        if any(len(message) != 2 for message in messages):
            return self.text(prompt)
        if not all(isinstance(content, str) and is_plain(content) for content in contents):
            return self.text(prompt)
        roles = tuple(str(message.get("role")) for message in messages)
        frame = self._frames.get(roles)
        if frame is None and len(self._frames) < MOST_FRAMES:
            frame = self._frames[roles] = self._frame_of(roles)
        if not frame:
            return self.text(prompt)
        pieces = [piece for pair in zip(frame, contents, strict=False) for piece in pair]
        return "".join([*map(str, pieces), frame[-1]])

    def _frame_of(self, roles: Sequence[str]) -> tuple[str, ...]:
        """The texts that a template writes before, between and after plain texts with these roles; empty if they are
        not the same for all texts."""
        found = []
        for probe in PROBES:
            contents = [f"({number}) {probe}" for number in range(len(roles))]
            messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
            try:
                rest, pieces = self.text(Prompt(row=0, text=probe, fields={"messages": messages})), []
            except DataFailure:
                return ()
            for text in contents:
                before, there, rest = rest.partition(text)
                pieces.append(before)
                if not there or text in rest:
                    return ()
            found.append((*pieces, rest))
        return found[0] if len(set(found)) == 1 else ()

    def ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises: `DataFailure` with its row if it cannot be rendered or cut, or has none."""
        try:
            ids = self._encoded(self.text(prompt))
            if self._max_tokens is not None and len(ids) > self._max_tokens:
                ids = self._cut(prompt, ids, self._max_tokens)
        except DataFailure as error:
            raise DataFailure(f"prompt row {prompt.row}: {error}", row=prompt.row) from error
        if not ids:
            raise DataFailure(f"prompt row {prompt.row} encodes to no tokens", row=prompt.row)
        return ids

    def counts(self, texts: Iterable[str]) -> Iterator[int]:
        """Number of tokens of each rendered text, before any are cut."""
        chunk: list[str] = []
        for text in texts:
            chunk.append(text)
            if len(chunk) == CHUNK:
                yield from self._counted(chunk)
                chunk = []
        yield from self._counted(chunk)

    def most_tokens_of(self, text: str) -> int:
        """An upper bound on the number of tokens of a rendered text. A token has at least one byte, but a normalizer
        may write up to 18 characters for one character (Unicode NFKC)."""
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if fast is None:
            return MANY_TOKENS
        longest = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        grows = fast.normalizer is not None and not text.isascii()
        return (18 if grows else 2 if fast.normalizer is not None else 1) * longest + ADDED_TOKENS

    def _counted(self, chunk: Sequence[str]) -> Iterator[int]:
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if fast is None or (not self.templated and any(self._has_beginning(text) for text in chunk)):
            yield from (len(self._encoded(text)) for text in chunk)
            return
        fast.no_truncation()
        fast.no_padding()
        yield from map(len, fast.encode_batch_fast(list(chunk), add_special_tokens=not self.templated))

    def _encoded(self, text: str) -> list[int]:
        options = {"add_special_tokens": False} if self._has_beginning(text) else {}
        return list(self._tokenizer.encode(text, **options))

    def _has_beginning(self, text: str) -> bool:
        """Whether a text already has the tokens that begin a sequence, because the template writes them."""
        begin = getattr(self._tokenizer, "bos_token", None)
        return self.templated or bool(begin and text.startswith(begin))

    def _cut(self, prompt: Prompt, ids: list[int], most: int) -> list[int]:
        """At most `most` ids. A chat loses whole messages first, and then the beginning of the last one that is left; a
        text its beginning, after a token that begins a sequence. Raises: `DataFailure` if what must stay is too long.
        """
        chat = self._chat(prompt)
        if chat is None:
            begin = ids[:1] if ids[0] == getattr(self._tokenizer, "bos_token_id", None) else []
            return begin + ids[len(ids) - most + len(begin) :]
        shorter = chat
        for shorter in _shorter_chats(chat):
            ids = self._encoded(self._rendered(prompt, shorter))
            if len(ids) <= most:
                return ids
        *system, last = shorter
        content = self._tokenizer.encode(content_of(last), add_special_tokens=False)
        while len(ids) > most:
            content = content[len(ids) - most :]
            if not content:
                raise DataFailure(f"it cannot be cut to {most} tokens: its system message and its frame need more")
            text = text_of_tokens(self._tokenizer, content).lstrip("\ufffd")  # the rest of a cut character
            ids = self._encoded(self._rendered(prompt, [*system, {**last, "content": text}]))
        return ids


def _shorter_chats(chat: Sequence[Message]) -> Iterator[list[Message]]:
    """The chat without its oldest messages, each time without more of them; at last only the system messages and the
    last message of the user. A question goes with its answer, and a call with its results."""
    roles = [message.get("role") for message in chat]
    last = max((place for place, role in enumerate(roles) if role == "user"), default=len(chat) - 1)
    begins = [place for place in range(1, last) if roles[place] == "user"]
    calls = [place for place in range(last + 2, len(chat)) if roles[place] == "assistant"]
    for begin in (*begins, last, *calls, len(chat)):
        system = [message for message in chat[: min(begin, last)] if message.get("role") in ("system", "developer")]
        yield [*system, *chat[last : last + (begin > last)], *chat[begin:]]


PROBES = ("Question", "What is 6 times 7, and why? " * 20 + "End.")


def is_plain(text: str) -> bool:
    """Whether templates treat this text like any other text."""
    return bool(text) and not text[0].isspace() and not text[-1].isspace() and _MARKUP.search(text) is None


_MARKUP = re.compile(r"[<>\[\]{}|\\]")

MANY_TOKENS = 2**62
ADDED_TOKENS = 16
"""Maximum number of tokens that a tokenizer adds to a text, such as one that begins it."""
MOST_FRAMES = 256
"""Maximum number of sequences of roles for which the texts that a template writes around messages are cached."""
CHUNK = 1024
"""Number of texts that are tokenized at once."""
