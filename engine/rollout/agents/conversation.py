"""The token-exact capture of a conversation: what was sampled, what was put between, and under which weights.

Used by the gateway, one `Conversation` for every agent, and by `rollout.agents.program_generator` for rollouts in
Python. A call brings the whole history, as a chat or as text or ids; what it adds to a captured segment is appended
masked from the loss, and the model continues from the captured ids, never from a second tokenization of its own words.
A history that continues no captured segment begins a new one. It must never put into a trajectory a token that the
model was not conditioned on in just that place.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from engine.errors import DataFailure
from engine.ids import Version
from engine.rollout.backend import SampleResult
from engine.trajectory import Trajectory

# -- the capture of a conversation -------------------------------------------------------------------------------------


Message: TypeAlias = Mapping[str, Any]
History: TypeAlias = str | list[int]
"""What a call brings, rendered: text, or token ids."""
Encode: TypeAlias = Callable[[str, bool], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One call's history, in a form that can be compared with what came before. Make it with `chat`, `text` or
    `ids`."""

    form: str
    render: Callable[["Segment | None"], History]
    """The history; for a segment, with that segment's own turns marked in it instead of written out."""
    encode: Encode
    """Ids of a text; True for one that begins a sequence."""
    place: int = 0
    """Of a chat: the number of its messages, which is the place that the answer will have."""


@dataclass(slots=True)
class Turn:
    """One answer of the model that the history continues."""

    place: int
    key: object
    """What the message must be equal to, in the history of a later call."""


@dataclass(slots=True, eq=False)
class Segment:
    """One unbroken sequence of tokens."""

    number: int
    trajectory: Trajectory
    form: str
    known: History
    """The history up to and with the last answer, as `Asked.render` gives it."""
    hidden: str = ""
    """Text at the end of the last answer that was not shown, such as the end of a turn; the history may repeat it."""
    turns: list[Turn] = field(default_factory=list)
    calls: int = 0
    busy: bool = False
    """A call is running: no other call can continue from here yet."""

    @property
    def ids(self) -> list[int]:
        return self.trajectory.prompt_ids + self.trajectory.token_ids

    def mark(self, place: int) -> str:
        """Stands for the answer in `place` while a history is rendered. One word, which no template changes."""
        return f"xTURN{self.number}AT{place}OF{id(self):x}x"


@dataclass(slots=True, eq=False)
class Call:
    """A running call, from the match of its history to its answer."""

    segment: Segment
    history: History
    place: int
    given_ids: list[int]
    """Tokens that the history adds to the segment; for a new one, the prompt."""
    fresh: bool
    """The segment begins with this call."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    parts: list[SampleResult] = field(default_factory=list)
    finish_reason: str = ""

    @property
    def prompt_ids(self) -> list[int]:
        """What the model is to continue from, without what this call has sampled already."""
        return self.segment.ids + self.given_ids

    def take(self, result: SampleResult) -> None:
        """Keep what a sampling, whole or aborted, has brought."""
        self.token_ids.extend(result.token_ids)
        self.logprobs.extend(result.logprobs)
        if result.token_ids:
            self.parts.append(result)
        self.finish_reason = result.finish_reason

    def cut(self, tokens: int) -> None:
        """Keep the first so many sampled tokens: a string that ends the answer stands right after them."""
        del self.token_ids[tokens:], self.logprobs[tokens:]
        left, parts = tokens, []
        for part in self.parts:
            keep, left = min(left, len(part.token_ids)), left - min(left, len(part.token_ids))
            spans = [s._replace(stop=min(s.stop, keep)) for s in part.spans if s.start < keep]
            if keep:
                parts.append(
                    SampleResult(
                        token_ids=part.token_ids[:keep], logprobs=part.logprobs[:keep], spans=spans, finish_reason=""
                    )
                )
        self.parts = parts


class Conversation:
    """Every token of one rollout, in segments. Not for several threads."""

    def __init__(self) -> None:
        self._begun = 0
        self.segments: list[Segment] = []
        self.running: list[Call] = []
        self.finish_reason = ""
        """That of the last answer, or `length` where the context was spent."""

    @property
    def newest_version(self) -> Version | None:
        """The newest weights that any token was sampled under; None before the first."""
        seen = [segment.trajectory.spans[-1].version for segment in self.segments if segment.trajectory.spans]
        seen += [part.spans[-1].version for call in self.running for part in call.parts]
        return max(seen, default=None)

    def begin(self, asked: Asked) -> Call:
        """Return the longest segment that a history continues, or a new one."""
        best: tuple[Segment, History] | None = None
        for segment in self.segments:
            if segment.busy or segment.form != asked.form:
                continue
            history = asked.render(segment)
            if _added(segment, history) and (best is None or len(segment.ids) > len(best[0].ids)):
                best = segment, history
        if best is not None:
            segment, history = best
            rest = _rest(segment, history)
            given = asked.encode(rest, False) if isinstance(rest, str) else rest
            call = Call(segment, history, asked.place, given, fresh=False)
        else:
            history = asked.render(None)
            given = asked.encode(history, True) if isinstance(history, str) else history
            segment = Segment(self._begun, Trajectory(), asked.form, history)
            call = Call(segment, history, asked.place, given, fresh=True)
            self._begun += 1
            self.segments.append(segment)
        segment.busy = True
        segment.calls += 1
        self.running.append(call)
        return call

    def drop(self, call: Call) -> None:
        """Forget a call that nobody waits for any more, and what it sampled. Twice is once."""
        if call not in self.running:
            return
        self.running.remove(call)
        call.segment.busy = False
        if call.fresh:
            self.segments.remove(call.segment)

    def commit(self, call: Call, *, shown: str, hidden: str, key: object = None) -> None:
        """A call was answered with `shown`; `hidden` is text of its tokens after that, `key` what it will be known
        by."""
        self.running.remove(call)
        segment = call.segment
        segment.busy = False
        self.finish_reason = call.finish_reason
        _append(segment.trajectory, call)
        if not call.parts:
            return  # nothing was sampled: the next history tells again what this one added
        segment.hidden = hidden
        if segment.form == "chat":
            segment.turns.append(Turn(call.place, key))
            segment.known = str(call.history) + segment.mark(call.place)
        elif segment.form == "text":
            segment.known = str(call.history) + shown
        else:
            segment.known = segment.ids

    def trajectories(self) -> list[Trajectory]:
        """What there is, finished or not, in segments of one rollout; at least one, be it empty.

        Includes the tokens that running calls have sampled so far. The trajectories share nothing with the
        conversation.
        """
        found = []
        running = {call.segment.number: call for call in self.running}
        for segment in self.segments:
            copy = segment.trajectory.copy()
            call = running.get(segment.number)
            if call is not None:
                _append(copy, call)
            found.append(copy)
        found = [one for one in found if one.token_ids] or found[:1] or [Trajectory()]
        for one in found[1:]:
            one.continues = True
        return found


def _append(trajectory: Trajectory, call: Call) -> None:
    """The tokens of a call; those it was given belong to the version that continued from them."""
    given = call.given_ids
    if call.fresh:
        trajectory.prompt_ids = list(given)
        given = []
    for part in call.parts:
        trajectory.extend(part.token_ids, part.logprobs, part.spans, given)
        given = []


def _added(segment: Segment, history: History) -> bool:
    """Whether a history continues a segment and adds something to it."""
    known: Any = segment.known
    rest: Any = history[len(known) :]
    if history[: len(known)] != known or not rest:
        return False
    return not isinstance(history, str) or rest.startswith(segment.hidden)


def _rest(segment: Segment, history: History) -> History:
    return history[len(segment.known) + (len(segment.hidden) if isinstance(history, str) else 0) :]


def text(prompt: str, encode: Encode) -> Asked:
    """A history as plain text."""
    return Asked(form="text", render=lambda segment: prompt, encode=encode)


def ids(prompt: Sequence[int], encode: Encode) -> Asked:
    """A history as token ids."""
    return Asked(form="ids", render=lambda segment: list(prompt), encode=encode)


def chat(messages: Sequence[Message], template: Callable[[Sequence[Message]], str], encode: Encode) -> Asked:
    """A history as messages, through a chat template."""

    def render(segment: Segment | None) -> str:
        marked = list(messages)
        for turn in segment.turns if segment is not None else ():
            if turn.place < len(marked) and key_of(marked[turn.place]) == turn.key:
                marked[turn.place] = {"role": "assistant", "content": segment.mark(turn.place)}  # type: ignore[union-attr]
        return template(marked)

    return Asked(form="chat", render=render, encode=encode, place=len(messages))


def key_of(message: Message) -> object:
    """What makes two assistant messages the same: their text but for white space around it, and their tool calls."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(function["name"], parsed_arguments(function["arguments"])) for function in functions]
    return message.get("role"), content_of(message).strip(), calls


def content_of(message: Message) -> str:
    """The text of a message, whose content may be text, parts of text, or nothing."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def parsed_arguments(arguments: Any) -> Any:
    """Arguments of a tool call, which travel as JSON in a string; what is no JSON stays as it is."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


# -- templates ---------------------------------------------------------------------------------------------------------


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
