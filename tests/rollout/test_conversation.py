"""Conversations of several turns with published templates: one segment, and only tokens that the template writes."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import published_tokenizer

sys.path.append(str(Path(__file__).resolve().parent.parent / "gateway"))
from gateway_rig import runs_of

from engine.rollout.agents.conversation import Chat, Conversation, chat, key_of
from engine.rollout.backend import SampleResult
from engine.trajectory import Span, Trajectory

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALLS = [{"id": "c1234567a", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}]
SYSTEM = {"role": "system", "content": "Be brief."}


class Talk:
    """A conversation with one tokenizer. Each `answer` is a call with the whole history so far."""

    def __init__(self, name: str, end: str, arguments: dict[str, Any] | None = None, tools: Sequence[Any] = ()) -> None:
        self.tokens = published_tokenizer(name)
        self.end = end
        self.chat = Chat(self.tokens, [self.tokens.convert_tokens_to_ids(end)], arguments)
        self.tools = tools
        self.conversation = Conversation()
        self.messages: list[Any] = []

    def answer(self, said: str, calls: Sequence[Any] = (), shown: str | None = None, end: bool = True) -> None:
        call = self.conversation.begin(chat(self.messages, self.tools, self.chat))
        ids = self.tokens.encode(said + (self.end if end else ""), add_special_tokens=False)
        spans = [Span(0, len(ids), 0)]
        call.take(SampleResult(token_ids=ids, logprobs=[-1.0] * len(ids), spans=spans, finish_reason="stop"))
        message: dict[str, Any] = {"role": "assistant", "content": said if shown is None else shown or None}
        message |= {"tool_calls": list(calls)} if calls else {}
        self.conversation.commit(call, shown=said, hidden=self.chat.ending(call.token_ids), key=key_of(message))
        self.messages.append(message)

    def say(self, content: str, role: str = "user", **more: Any) -> None:
        self.messages.append({"role": role, "content": content, **more})

    def inserted(self, segment: int = 0) -> list[str]:
        """The texts between the answers of a segment."""
        return [text for mask, text in runs_of(self.trajectories[segment], self.tokens) if not mask]

    @property
    def trajectories(self) -> list[Trajectory]:
        return self.conversation.trajectories()


CHATML = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
EMPTY = "<think>\n\n</think>\n\n"
THOUGHT = "hm\n</think>\n\n4"
TEMPLATES: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    "qwen2.5": ("qwen2_5", "<|im_end|>", {}, "4", CHATML),
    "qwen3": ("qwen3", "<|im_end|>", {}, f"<think>\n{THOUGHT}", CHATML),
    "qwen3 without thinking": ("qwen3", "<|im_end|>", {"enable_thinking": False}, "4", CHATML + EMPTY),
    "qwen3.5": ("qwen3_5_think", "<|im_end|>", {}, THOUGHT, CHATML + "<think>\n"),
    "qwen3.5 without thinking": ("qwen3_5_nothink", "<|im_end|>", {}, "4", CHATML + EMPTY),
    "nemotron": ("nemotron_3_nano", "<|im_end|>", {}, THOUGHT, CHATML + "<think>\n"),
    "nemotron without thinking": (
        "nemotron_3_nano", "<|im_end|>", {"enable_thinking": False}, "4", CHATML + "<think></think>"
    ),
    "deepseek v3": (
        "deepseekv3", "<｜end▁of▁sentence｜>", {}, THOUGHT, "<｜User｜>{}<｜Assistant｜><think>\n"
    ),
    "deepseek r1": (
        "deepseek_r1_distill", "<｜end▁of▁sentence｜>", {}, THOUGHT, "<｜User｜>{}<｜Assistant｜><think>\n"
    ),
    "glm": ("glm4moe", "<|user|>", {}, f"\n<think>{THOUGHT}", "\n{}<|assistant|>"),
    "glm without thinking": (
        "glm4moe", "<|user|>", {"enable_thinking": False}, "\n4", "\n{}/nothink<|assistant|>\n<think></think>"
    ),
    "llama 3.1": (
        "llama3_1", "<|eot_id|>", {}, "4",
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gemma 3": (
        "gemma3", "<end_of_turn>", {}, "4", "\n<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"
    ),
    "phi 3.5": ("phi3_5", "<|end|>", {}, "4", "\n<|user|>\n{}<|end|>\n<|assistant|>\n"),
}  # fmt: skip


@pytest.mark.parametrize("case", TEMPLATES)
def test_three_turns_are_one_segment(case: str) -> None:
    name, end, arguments, said, between = TEMPLATES[case]
    talk = Talk(name, end, arguments)
    talk.messages.append(SYSTEM)
    for number in range(3):
        talk.say(f"question {number}")
        talk.answer(said)
    assert len(talk.trajectories) == 1
    assert talk.inserted() == [between.format(f"question {number}") for number in (1, 2)]
    begun = talk.tokens.decode(talk.trajectories[0].prompt_ids)
    assert begun == talk.chat.template([SYSTEM, {"role": "user", "content": "question 0"}])


TOOL_TURNS: dict[str, tuple[str, str, str, str]] = {
    "qwen3": (
        "qwen3", "<|im_end|>", '<tool_call>\n{"name": "add",  "arguments": {"a":7}}\n</tool_call>',
        "\n<|im_start|>user\n<tool_response>\n14\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen3.5": (
        "qwen3_5_think", "<|im_end|>",
        "</think><tool_call><function=add><parameter=a>7</parameter></function></tool_call>",
        "\n<|im_start|>user\n<tool_response>\n14\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n",
    ),
    "glm": (
        "glm4moe", "<|observation|>", "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
        "\n<tool_response>\n14\n</tool_response><|assistant|>",
    ),
    "llama 3.1": (
        "llama3_1", "<|eot_id|>", '{"name": "add", "parameters": {"a":7}}',
        '<|start_header_id|>ipython<|end_header_id|>\n\n"14"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gpt-oss": (
        "gptoss", "<|call|>", ' to=functions.add<|channel|>commentary json<|message|>{"a":7}',
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"14"<|end|><|start|>assistant',
    ),
}  # fmt: skip


@pytest.mark.parametrize("shown", ["", "I add."])
@pytest.mark.parametrize("case", TOOL_TURNS)
def test_a_tool_call_and_its_result_stay_in_the_segment(case: str, shown: str) -> None:
    name, end, said, between = TOOL_TURNS[case]
    talk = Talk(name, end, tools=[TOOL])
    talk.say("2+2?")
    talk.answer(said, CALLS, shown=shown)
    talk.say("14", "tool", tool_call_id="c1234567a", name="add")
    talk.answer("14")
    assert len(talk.trajectories) == 1
    assert talk.inserted() == [between]


def test_a_template_with_results_inside_the_call_begins_a_segment_and_shows_them() -> None:
    """That of Gemma 4 puts the results before the end of the answer that called, where nothing can be inserted."""
    talk = Talk("gemma4", "<turn|>", tools=[TOOL])
    talk.say("2+2?")
    talk.answer("<|tool_call>call:add{a:7}<tool_call|>", CALLS, shown="")
    talk.say("14", "tool", tool_call_id="c1234567a", name="add")
    talk.answer("14")
    _, second = talk.trajectories
    assert "14" in talk.tokens.decode(second.prompt_ids) and second.continues


def test_an_answer_cut_by_its_length_is_ended_as_the_template_ends_it() -> None:
    talk = Talk("qwen3", "<|im_end|>", {"enable_thinking": False})
    talk.say("one")
    talk.answer("4", end=False)
    talk.say("two")
    talk.answer("5")
    assert talk.inserted() == ["<|im_end|>" + CHATML.format("two") + EMPTY]


CHANGES: dict[str, Any] = {
    "an edited answer": lambda talk: talk.messages[2].update(content="5"),
    "an edited question": lambda talk: talk.messages[1].update(content="three"),
    "another system message": lambda talk: talk.messages[0].update(content="Be long."),
    "no system message": lambda talk: talk.messages.pop(0),
    "other tools": lambda talk: setattr(talk, "tools", [TOOL]),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_history_begins_a_segment(what: str) -> None:
    talk = Talk("qwen3_5_think", "<|im_end|>")
    talk.messages.append(SYSTEM.copy())
    talk.say("one")
    talk.answer(THOUGHT)
    talk.say("two")
    CHANGES[what](talk)
    expected = talk.chat.template(talk.messages, talk.tools)
    talk.answer(THOUGHT)
    assert len(talk.trajectories) == 2
    assert talk.tokens.decode(talk.trajectories[1].prompt_ids) == expected


def test_what_a_template_writes_again_in_every_turn_begins_a_segment() -> None:
    """Some templates write the system message or the tools before the last question only: a conversation that has them
    several times is none that the template would ever write."""
    talk = Talk("qwen2_5", "<|im_end|>")
    talk.tokens.chat_template = (
        "{% for m in messages if m.role != 'system' %}"
        "{% if m.role == 'user' %}"
        "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }} {% endif %}"
        "[{{ m.content }}]{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    talk.messages.append(SYSTEM)
    for number in (1, 2):
        talk.say(f"question {number}")
        talk.answer("4")
    assert [talk.tokens.decode(one.prompt_ids) for one in talk.trajectories] == [
        "Be brief. [question 1]",
        "[question 1]4<|im_end|>Be brief. [question 2]",
    ]


def test_no_word_in_a_message_is_taken_for_the_end_of_an_answer() -> None:
    talk = Talk("qwen2_5", "<|im_end|>")
    talk.say("2+2?")
    talk.answer("4")
    said = "IMPORTANT " + "".join(f" xANSWER{n}x<|im_end|>\n" for n in range(3)) + "tail"
    talk.say(said)
    talk.answer("5")
    assert talk.inserted() == [CHATML.format(said)]
