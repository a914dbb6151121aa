"""Token-exact capture of a conversation: the sampled tokens, the inserted tokens, and the weights version of each.

The gateway uses one `Conversation` per agent, `rollout.agents.program_generator` one per rollout. A call brings the
whole history, as messages, text or ids. What the history adds to a captured segment is appended and masked from the
loss. The model continues from the captured ids; its own answers are never tokenized again, and what a template leaves
out of earlier answers, such as thinking, stays. A history that continues no captured segment starts a new one. It must
never put a token into a trajectory at a position where the model was not conditioned on that token.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple, TypeAlias

from engine.errors import DataFailure
from engine.ids import Version
from engine.rollout.backend import SampleResult
from engine.tasks.chat import Message, Tool, content_of, has_template, parsed_arguments, plain_message, render
from engine.tasks.response_text import text_of_response, text_of_tokens
from engine.trajectory import RolloutResult, StepReward, Trajectory

# -- the capture of a conversation -------------------------------------------------------------------------------------


History: TypeAlias = str | list[int]
"""The rendered history of a call: text, or token ids."""
Encode: TypeAlias = Callable[[str, bool], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHistory:
    """The history of one call, which can be compared with captured segments. `chat`, `text` and `ids` create it."""

    form: str
    whole: Callable[[], History]
    rest: Callable[["Segment"], "History | None"]
    """What the history adds to a segment, after the end of its last answer; None if it does not continue it."""
    encode: Encode
    """Tokenizes a text. The second argument says whether the text begins a sequence."""
    fewest_tokens: Callable[[str], int] = lambda text: 0
    """A lower bound of the tokens of a text, found without tokenizing it."""
    messages: Sequence[Message] = ()
    """For a chat, its messages. Their number is the place that the answer will have."""
    tools: Sequence[Tool] = ()
    """For a chat, the tools in its prompt."""


@dataclass(slots=True)
class PastAnswer:
    """One answer of the model that the history continues."""

    place: int
    key: object
    """`key_of` of the answer. In a later history, the message at `place` is this answer if its key is equal."""


@dataclass(slots=True, eq=False)
class Segment:
    """One unbroken sequence of tokens."""

    number: int
    trajectory: Trajectory
    form: str
    known: History
    """For a text and ids, the history including the last answer."""
    hidden: str = ""
    """Text at the end of the last answer that was not shown, such as an end-of-turn token. A later history must repeat
    it."""
    turns: list[PastAnswer] = field(default_factory=list)
    messages: Sequence[Message] = ()
    """For a chat, the messages before the last answer."""
    tools: Sequence[Tool] = ()
    calls: int = 0
    busy: bool = False
    """A call is running, so no other call can continue this segment yet."""

    @property
    def ids(self) -> list[int]:
        return self.trajectory.prompt_ids + self.trajectory.token_ids


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a history continues a conversation. `find_continuation` creates it."""

    segment: Segment | None
    """None: it begins a new one."""
    given_ids: list[int]
    """Tokens that it adds to the segment; for a new one, the prompt."""
    whole: History
    """For a new segment, the whole history."""


class HistoryTooLong(DataFailure):
    """A history has more tokens than fit, by a lower bound: it was not tokenized."""


@dataclass(slots=True, eq=False)
class Call:
    """A running call, from `Conversation.begin` to `commit` or `drop`."""

    segment: Segment
    asked: CallHistory
    given_ids: list[int]
    """Tokens that the history adds to the segment; for a new segment, the prompt."""
    fresh: bool
    """Whether this call started the segment."""
    added: Sequence[Message] = ()
    """For a chat, the messages that the history adds to the segment."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    parts: list[SampleResult] = field(default_factory=list)
    finish_reason: str = ""
    top: list[Sequence[tuple[int, float]]] = field(default_factory=list)
    """The likeliest tokens at each place, if requested."""

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens before the answer. They do not include tokens that this call has already sampled."""
        return self.segment.ids + self.given_ids

    def take(self, result: SampleResult) -> None:
        """Append the tokens of a sampling result, whether it finished or was aborted."""
        self.token_ids.extend(result.token_ids)
        self.logprobs.extend(result.logprobs)
        self.top.extend(result.top)
        if result.token_ids:
            self.parts.append(result)
        self.finish_reason = result.finish_reason

    def cut(self, tokens: int) -> None:
        """Keep only the first `tokens` sampled tokens, because a stop string ended the answer there."""
        del self.token_ids[tokens:], self.logprobs[tokens:], self.top[tokens:]
        left, parts = tokens, []
        for part in self.parts:
            keep, left = min(left, len(part.token_ids)), left - min(left, len(part.token_ids))
            spans = [s._replace(stop=min(s.stop, keep)) for s in part.spans if s.start < keep]
            if keep:
                parts.append(
                    SampleResult(
                        token_ids=part.token_ids[:keep],
                        logprobs=part.logprobs[:keep],
                        spans=spans,
                        finish_reason="",
                        routes=part.routes,
                    )
                )
        self.parts = parts


FIGURES = ("turns", "tokens_prompt", "tokens_assistant", "tokens_tool", "tokens_user")
"""Figures of every conversation: answers of the model, and tokens of the first prompts, sampled, and inserted."""


class Conversation:
    """Every token of one rollout, in segments. Not thread-safe."""

    def __init__(self) -> None:
        self._begun = 0
        self._answers: list[tuple[Segment, int]] = []
        """Of each answer, its segment and the position of its last token."""
        self.segments: list[Segment] = []
        self.running: list[Call] = []
        self.finish_reason = ""
        """Finish reason of the last answer, or `length` if the model's context is full."""
        self.figures: dict[str, float] = dict.fromkeys(FIGURES, 0.0)
        """Turns, and tokens by role, of all segments. Callers may add figures of their own."""

    @property
    def newest_version(self) -> Version | None:
        """The newest weights version of any sampled token; None if no token was sampled."""
        seen = [segment.trajectory.spans[-1].version for segment in self.segments if segment.trajectory.spans]
        seen += [part.spans[-1].version for call in self.running for part in call.parts]
        return max(seen, default=None)

    def open_segments(self, asked: CallHistory) -> list[Segment]:
        """The segments that a history may continue. They do not change before the next `begin`."""
        return [segment for segment in self.segments if not segment.busy and segment.form == asked.form]

    def begin(self, asked: CallHistory, found: Continuation | None = None) -> Call:
        """Start a call on the longest segment that the history continues, or on a new segment. `found`: the result of
        `find_continuation` for `open_segments`; None: find it now."""
        found = found or find_continuation(self.open_segments(asked), asked)
        if found.segment is not None:
            segment = found.segment
            added = asked.messages[segment.turns[-1].place + 1 :] if segment.turns else ()
            call = Call(segment, asked, found.given_ids, fresh=False, added=added)
        else:
            segment = Segment(self._begun, Trajectory(), asked.form, found.whole)
            call = Call(segment, asked, found.given_ids, fresh=True)
            self._begun += 1
            self.segments.append(segment)
        segment.busy = True
        segment.calls += 1
        self.running.append(call)
        return call

    def drop(self, call: Call) -> None:
        """Discard a call and its sampled tokens because its caller left. Does nothing if the call is not running."""
        if call not in self.running:
            return
        self.running.remove(call)
        call.segment.busy = False
        if call.fresh:
            self.segments.remove(call.segment)

    def commit(self, call: Call, *, shown: str, hidden: str, key: object = None) -> None:
        """End a call whose answer is `shown`.

        `hidden` is the text of its tokens after `shown`. `key` identifies the answer in later histories (`key_of`).
        """
        self.running.remove(call)
        segment = call.segment
        segment.busy = False
        self.finish_reason = call.finish_reason
        _append(segment.trajectory, call)
        if not call.parts:
            return  # nothing was sampled: the next history contains again what this one added
        self._answers.append((segment, len(segment.trajectory.token_ids) - 1))
        self._count(call)
        segment.hidden = hidden
        if segment.form == "chat":
            segment.turns.append(PastAnswer(len(call.asked.messages), key))
            segment.messages, segment.tools = call.asked.messages, call.asked.tools
        elif segment.form == "text":
            segment.known = str(call.asked.whole()) + shown
        else:
            segment.known = segment.ids

    def add_figure(self, name: str, value: float) -> None:
        """Add to a figure of the rollout."""
        self.figures[name] = self.figures.get(name, 0.0) + value

    def _count(self, call: Call) -> None:
        self.figures["turns"] += 1
        self.figures["tokens_assistant"] += len(call.token_ids)
        shares = {"tokens_prompt": len(call.given_ids)} if call.fresh else tokens_by_role(call.given_ids, call.added)
        for name, tokens in shares.items():
            self.figures[name] += tokens

    def trajectories(self) -> list[Trajectory]:
        """Copies of all segments of the rollout, finished or not: at least one, which may be empty.

        They include the tokens that running calls have sampled so far.
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
        for one in found:
            one.continues = one is not found[0]
            one.figures = dict(self.figures)
        return found

    def finished(self, result: RolloutResult) -> list[Trajectory]:
        """Copies of all segments of a rollout that has ended, with what its result says. Only answers in the last
        segment have turn rewards of their own; others count for the whole rollout."""
        found = self.trajectories()
        for trajectory in found:
            trajectory.finish_reason, trajectory.reward = "stop", result.reward
            trajectory.figures |= result.figures
            trajectory.shown_prompt = result.shown_prompt
        found[-1].finish_reason = result.finish_reason or self.finish_reason or "stop"
        last = next((segment for segment in reversed(self.segments) if segment.trajectory.token_ids), None)
        found[-1].step_rewards = [
            StepReward(position, reward)
            for (segment, position), reward in zip(self._answers, result.turn_rewards, strict=False)
            if reward is not None and segment is last
        ]
        return found


def find_continuation(segments: Sequence[Segment], asked: CallHistory, context: int | None = None) -> Continuation:
    """The longest of these segments that a history continues, and the tokens that it adds. Renders and tokenizes, so
    long histories take seconds; changes nothing, so another thread may call it.

    Raises: `DataFailure` for a history that the template refuses; `HistoryTooLong` if it cannot fit `context` tokens.
    """
    best: tuple[Segment, History] | None = None
    for one in segments:
        if best is None or len(one.ids) > len(best[0].ids):
            found = asked.rest(one)
            best = (one, found) if found is not None else best
    segment = None if best is None else best[0]
    added = asked.whole() if best is None else best[1]
    if not isinstance(added, str):
        return Continuation(segment, added, added)
    least = asked.fewest_tokens(added) + (0 if segment is None else len(segment.ids))
    if context is not None and least >= context:
        law = f"the conversation has at least {least} tokens, but the model's context is {context} tokens"
        raise HistoryTooLong(law)
    return Continuation(segment, asked.encode(added, segment is None), added)


def _append(trajectory: Trajectory, call: Call) -> None:
    """Append the tokens of a call. Its given tokens get the version of the sampled tokens after them."""
    given = call.given_ids
    if call.fresh:
        trajectory.prompt_ids = list(given)
        given = []
    for part in call.parts:
        trajectory.extend(part.token_ids, part.logprobs, part.spans, given, part.routes)
        given = []


def tokens_by_role(given_ids: Sequence[int], added: Sequence[Message]) -> dict[str, int]:
    """The tokens that a call inserted, by whose they are: of a tool, or of the user. If it inserted messages of both,
    the tokens are divided in proportion to the lengths of their texts."""
    lengths = {"tokens_tool": 0, "tokens_user": 0}
    for message in added:
        lengths["tokens_tool" if message.get("role") == "tool" else "tokens_user"] += 1 + len(content_of(message))
    tool = round(len(given_ids) * lengths["tokens_tool"] / max(1, sum(lengths.values())))
    return {"tokens_tool": tool, "tokens_user": len(given_ids) - tool}


# -- histories ---------------------------------------------------------------------------------------------------------


def text(prompt: str, encode: Encode, fewest_tokens: Callable[[str], int] = lambda text: 0) -> CallHistory:
    """A history as plain text."""

    def rest(segment: Segment) -> str | None:
        return _after(prompt, str(segment.known) + segment.hidden) if prompt != segment.known else None

    return CallHistory(form="text", whole=lambda: prompt, rest=rest, encode=encode, fewest_tokens=fewest_tokens)


def ids(prompt: Sequence[int], encode: Encode) -> CallHistory:
    """A history as token ids."""

    def rest(segment: Segment) -> list[int] | None:
        known = list(segment.known)
        return list(prompt[len(known) :]) if list(prompt[: len(known)]) == known != list(prompt) else None

    return CallHistory(form="ids", whole=lambda: list(prompt), rest=rest, encode=encode)


def chat(messages: Sequence[Message], tools: Sequence[Tool] | None, renderer: "Chat") -> CallHistory:
    """A history as messages, rendered by a chat template."""
    given, offered = [plain_message(message) for message in messages], list(tools or ())
    return CallHistory(
        form="chat",
        whole=lambda: renderer.template(given, offered),
        rest=lambda segment: _rest_of_chat(segment, given, offered, renderer),
        encode=renderer.encode_rendered,
        fewest_tokens=renderer.fewest_tokens,
        messages=given,
        tools=offered,
    )


def _after(text: str, beginning: str) -> str | None:
    return text[len(beginning) :] if text.startswith(beginning) else None


def _rest_of_chat(segment: Segment, messages: Sequence[Message], tools: Sequence[Tool], renderer: "Chat") -> str | None:
    """What the template writes after the last answer of a segment; None if the messages do not continue it.

    The template must write the same after that answer alone, and each added message in it: it may have changed what
    comes before the answer (most leave earlier thinking out), but what it adds must not depend on that.
    """
    if not segment.turns or not _continues(segment, messages, tools):
        return None
    place = segment.turns[-1].place
    answer, added = messages[place], messages[place + 1 :]
    probes = [
        message if message.get("role") == "assistant" else {**message, "content": f"xPROBE{n}x"}
        for n, message in enumerate(added)
    ]
    question: Message = {"role": "user", "content": "question"}
    end = End(segment.hidden, _word_in_none_of([*messages, *tools]))
    try:
        rest = _written_after(answer, messages[:place], added, tools, end, renderer)
        alone = _written_after(answer, [question], added, [], end, renderer)
        probed = _written_after(answer, [question], probes, [], end, renderer)
    except DataFailure:
        return None  # of a history that the template refuses, the whole is rendered, which says so
    shown = probed is not None and all(
        content_of(probe) in probed for probe in probes if probe.get("role") != "assistant"
    )
    return rest if rest == alone and shown else None


def _continues(segment: Segment, messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
    """Whether messages begin with those of a segment, its own answers included, and have the same tools."""
    keys = {turn.place: turn.key for turn in segment.turns}
    last = segment.turns[-1].place
    if len(messages) <= last or tools != segment.tools:
        return False
    same = (
        key_of(message) == keys[place] if place in keys else message == segment.messages[place]
        for place, message in enumerate(messages[: last + 1])
    )
    return all(same)


class End(NamedTuple):
    """How the end of an answer is found in a rendered history."""

    hidden: str
    """What ends the answer, and is not shown."""
    mark: str
    """Stands for the answer: one word, which templates do not change, and no message has."""


def _word_in_none_of(values: Sequence[Mapping[str, Any]]) -> str:
    """A word that occurs in none of these. A tool's result could have any word that is known before."""
    text = json.dumps(values, default=str)
    return next(word for n in count() if (word := f"xANSWER{n}x") not in text)


def _written_after(
    answer: Message,
    before: Sequence[Message],
    added: Sequence[Message],
    tools: Sequence[Tool],
    end: End,
    renderer: "Chat",
) -> str | None:
    """What the template writes after an answer and its end; None if it does not write them. Raises:
    `DataFailure` if it refuses the messages."""
    hidden, mark = end
    marked: Message = {"role": "assistant", "content": mark}
    calls = answer.get("tool_calls") if hidden else None
    if calls:  # some templates refuse or drop results without the call; the mark is also in what is last of the answer
        *others, last = calls
        function = {"name": last.get("function", last)["name"], "arguments": {"mark": mark}}
        marked = {**marked, "tool_calls": [*others, {**last, "function": function}]}
    text = renderer.template([*before, marked, *added], tools, whole=False)  # the answer is captured already
    _, found, tail = text.rpartition(mark)
    if not found or not tail:
        return None
    if not calls:
        return _after(tail, hidden)
    _, ended, rest = tail.partition(hidden)
    return rest if ended else None


def key_of(message: Message) -> object:
    """The key of a message: its role, its text without surrounding white space, and its tool calls. Messages with equal
    keys are the same answer."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(function["name"], parsed_arguments(function.get("arguments"))) for function in functions]
    return message.get("role"), content_of(message).strip(), calls


# -- templates ---------------------------------------------------------------------------------------------------------


LETTER = re.compile("[!-~]")
LETTERS = frozenset(map(chr, range(ord("!"), ord("~") + 1)))
"""Characters that no tokenizer drops, as it may drop spaces and accents. If each of them is a token, none of them
becomes part of a token for unknown text."""


class Chat:
    """`tokenizer` is a Hugging Face one; `stop_ids` are the tokens that end an answer; `template_kwargs` go to its chat
    template. `ends`: those of `stop_ids` that are no part of the answer's text; None: all."""

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: Sequence[int],
        template_kwargs: Mapping[str, Any] | None = None,
        ends: Collection[int] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs
        self.stop_ids = frozenset(stop_ids)
        self._ends = self.stop_ids if ends is None else ends
        tokenizer.encode("")  # drops a stored truncation: no other thread may tokenize meanwhile

    @property
    def has_template(self) -> bool:
        return has_template(self._tokenizer)

    def template(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, *, whole: bool = True
    ) -> str:
        """Messages as the text that the model continues from. See `render`."""
        return render(self._tokenizer, messages, tools, self._template_kwargs, whole=whole)

    def encode(self, text: str, begins: bool) -> list[int]:
        """Ids of a plain text. If it begins a sequence, the tokenizer adds its special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=begins))

    def encode_rendered(self, text: str, begins: bool) -> list[int]:
        """Ids of a text that `template` returned, which already contains its special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the tokens of a text; 0 if the tokenizer gives none. Counts the letters that no tokenizer
        drops, in units of the token that has the most of them."""
        return len(LETTER.findall(text)) // self._most_letters if self._most_letters else 0

    @cached_property
    def _most_letters(self) -> int:
        """Maximum number of letters that a token stands for; 0 if it may be any number. A normalizer may write one
        letter for two."""
        fast: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        tokens = self._tokenizer.get_vocab()
        if type(getattr(fast, "model", None)).__name__ not in ("BPE", "Unigram") or LETTERS - tokens.keys():
            return 0
        return (1 if fast.normalizer is None else 2) * max(len(LETTER.findall(token)) for token in tokens)

    def full(self, token_ids: Sequence[int]) -> str:
        """The text of all tokens."""
        return text_of_tokens(self._tokenizer, token_ids)

    def ending(self, token_ids: Sequence[int]) -> str:
        """The text of the token that ended an answer, if it is no part of the answer; else empty."""
        return self.full(token_ids[-1:]) if token_ids and token_ids[-1] in self._ends else ""

    def answer(self, token_ids: Sequence[int]) -> str:
        """The text of an answer without the token that ended it."""
        return text_of_response(self._tokenizer, token_ids, self._ends)

    def end(self, call: Call, stops: Sequence[str]) -> tuple[str, str]:
        """The text of an answer, and the hidden text after it. The stop string that comes first ends the answer: the
        tokens after it are dropped."""
        stopped = self.find_stop(call.token_ids, stops) if stops else None
        if stopped is None:
            return self.answer(call.token_ids), self.ending(call.token_ids)
        tokens, shown = stopped
        call.cut(tokens)
        call.finish_reason = "stop"
        return shown, self.full(call.token_ids)[len(shown) :]

    def find_stop(self, token_ids: Sequence[int], stops: Sequence[str]) -> tuple[int, str] | None:
        """Find the first of some stop strings in an answer: the number of tokens up to the end of that string, and the
        text before it. None if the answer has none of them."""
        text = self.answer(token_ids)
        places = [(text.find(stop), stop) for stop in stops if stop in text]
        if not places:
            return None
        place, stop = min(places)
        low, high = 0, len(token_ids)
        while low < high:  # the fewest tokens whose text includes the whole string
            middle = (low + high) // 2
            if len(self.answer(token_ids[:middle])) >= place + len(stop):
                high = middle
            else:
                low = middle + 1
        return low, text[:place]
