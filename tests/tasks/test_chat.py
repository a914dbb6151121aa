"""From prompts to token ids: what templates get, written out by hand."""

from typing import Any

import pytest
from chat_tokenizers import FAMILIES, chat_tokenizer, published, tokens
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import DataFailure
from engine.tasks import prompt_lengths
from engine.tasks.chat import ChatSettings, PromptRenderer, template_arguments, turn_end
from engine.trajectory import Prompt

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "2+2?"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 7}'}}]}
RESULT = {"role": "tool", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "4"}]}
TOOL = {"name": "add"}


def chat(*messages: dict[str, Any], **fields: Any) -> Prompt:
    return Prompt(row=0, text="not read", fields={"messages": list(messages), **fields})


def text(content: str) -> Prompt:
    return Prompt(row=0, text=content)


GOLDEN: dict[str, tuple[str, Prompt, dict[str, Any], str]] = {
    "chatml system prompt": (
        "chatml",
        text("2+2?"),
        {"system_prompt": "Be brief."},
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "chatml own system message": (
        "chatml",
        chat(SYSTEM, USER),
        {"system_prompt": "Be verbose."},
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "chatml tools, a call and parts": (
        "chatml",
        chat(USER, CALL, RESULT, tools=[TOOL]),
        {},
        '<|im_start|>system\n\n<tool>{"name": "add"}</tool><|im_end|>\n'
        "<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n\n<tool_call>add 7</tool_call><|im_end|>\n"
        "<|im_start|>tool\n14<|im_end|>\n"
        "<|im_start|>assistant"
        "\n",
    ),
    "no template": (
        "base",
        text("2+2?"),
        {},
        "<s>2+2?",
    ),
    "no template, begun": (
        "base",
        text("<s>2+2?"),
        {},
        "<s>2+2?",
    ),
    "never": (
        "llama",
        text(" 2+2? "),
        {"mode": "never"},
        "<|begin_of_text|> 2+2? ",
    ),
    "never, rendered before": (
        "llama",
        text("<|begin_of_text|>2"),
        {"mode": "never"},
        "<|begin_of_text|>2",
    ),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_prompts_have_the_tokens_written_here(case: str) -> None:
    family, prompt, settings, written = GOLDEN[case]
    tokenizer = chat_tokenizer(family)
    renderer = PromptRenderer(tokenizer, ChatSettings(**settings))
    expected = tokens(tokenizer, written)
    assert not renderer.templated or renderer.text(prompt) == written
    assert renderer.ids(prompt) == expected
    assert list(renderer.counts([renderer.text(prompt)] * 3)) == [len(expected)] * 3


@pytest.mark.parametrize(
    ("family", "prompt", "settings", "said"),
    [
        ("base", chat(USER), {}, "prompt row 0: the model's tokenizer has no chat template"),
        ("llama", chat(USER), {"mode": "never"}, "prompt row 0: data.chat is never, but messages need"),
        ("gemma", text("a"), {"system_prompt": "b"}, "the chat template refuses these messages: System role not"),
        ("mistral", chat(RESULT), {}, "only system, user and assistant roles are known"),
    ],
)
def test_messages_that_cannot_be_rendered_are_never_dropped(
    family: str, prompt: Prompt, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataFailure, match=said):
        PromptRenderer(chat_tokenizer(family), ChatSettings(**settings)).ids(prompt)


def test_a_template_without_an_end_of_turn_has_none() -> None:
    tokenizer = chat_tokenizer("base")
    assert turn_end(tokenizer) is None
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    found = turn_end(tokenizer)
    assert found is not None and (found.text, found.token) == ("\n", None)


def test_the_arguments_of_a_template_are_read_off_it() -> None:
    assert template_arguments(chat_tokenizer("chatml")) == ["enable_thinking"]
    assert [
        name for name in FAMILIES if name not in ("chatml", "base") and template_arguments(chat_tokenizer(name))
    ] == []
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}{% generation %}{{ m.content + style }}{% endgeneration %}{% endfor %}"
    )
    assert template_arguments(tokenizer) == ["style"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("deepseekv3", []),
        ("gemma3", []),
        ("gemma4", ["enable_thinking"]),
        ("glm4moe", ["enable_thinking"]),
        ("gptoss", ["builtin_tools", "model_identity", "reasoning_effort"]),
        ("llama3_1", ["builtin_tools", "custom_tools", "date_string", "tools_in_user_message"]),
        ("nemotron_3_nano", ["enable_thinking", "truncate_history_thinking"]),
        ("phi3", []),
        ("qwen2_5", []),
        ("qwen3", ["enable_thinking"]),
        ("qwen3_5_think", ["add_vision_id", "enable_thinking"]),
        ("qwen3_8", ["add_vision_id", "enable_thinking", "preserve_thinking", "reasoning_effort"]),
    ],
)
def test_names_that_a_published_template_assigns_are_no_arguments(name: str, arguments: list[str]) -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = published(name)
    assert template_arguments(tokenizer) == arguments


@pytest.mark.parametrize("family", FAMILIES)
@given(content=st.text(min_size=1, max_size=20))
def test_many_texts_are_rendered_like_one(family: str, content: str) -> None:
    renderer = RENDERERS[family]
    for prompt in (text(content), text("plain"), text(f"a {content} b"), text(f" {content}")):
        assert renderer.quick_text(prompt) == renderer.text(prompt)


@pytest.mark.parametrize("family", ["chatml", "llama", "mistral"])
@given(contents=st.lists(st.text(min_size=1, max_size=9), min_size=2, max_size=2), repeated=st.booleans())
def test_many_chats_are_rendered_like_one(family: str, contents: list[str], repeated: bool) -> None:
    renderer = RENDERERS[family]
    system, question = contents if not repeated else contents[:1] * 2
    for roles in (["user"], ["system", "user"], ["system", "user", "assistant", "user"]):
        messages = [
            {
                "role": role,
                "content": system if role == "system" else f"a {question}" if role == "assistant" else question,
            }
            for role in roles
        ]
        prompt = Prompt(row=0, text=question, fields={"messages": messages})
        assert renderer.quick_text(prompt) == renderer.text(prompt)


RENDERERS = {family: PromptRenderer(chat_tokenizer(family)) for family in FAMILIES}


def test_a_template_that_reads_the_text_is_asked_for_every_prompt() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | length }}: {{ m.content }}{% endfor %}"
    renderer = PromptRenderer(tokenizer)
    assert [renderer.quick_text(text(word)) for word in ("a", "abc")] == ["1: a", "3: abc"]
    chats = [
        Prompt(row=0, text=word, fields={"messages": [{"role": "user", "content": word}]}) for word in ("a", "abc")
    ]
    assert [renderer.quick_text(chat) for chat in chats] == ["1: a", "3: abc"]


@given(words=st.lists(st.text(max_size=30), min_size=1, max_size=8))
def test_no_text_has_more_tokens_than_its_bound(words: list[str]) -> None:
    for family in ("chatml", "llama"):
        renderer = RENDERERS[family]
        texts = [renderer.text(text(word)) for word in words]
        bounds = [renderer.most_tokens_of(one) for one in texts]
        assert all(count <= bound for count, bound in zip(renderer.counts(texts), bounds, strict=True))


def test_of_many_texts_those_that_may_be_too_long_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lengths, "COUNTED", 40)
    texts = ["a" * (length % 97) for length in range(1, 400)]
    counts = prompt_lengths.sampled_counts(texts, RENDERERS["base"], 60)
    whole = list(RENDERERS["base"].counts(texts))
    assert all(count in (exact, prompt_lengths.UNCOUNTED) for count, exact in zip(counts, whole, strict=True))
    assert [count for count in counts if count > 60] == [exact for exact in whole if exact > 60]
    assert list(counts).count(prompt_lengths.UNCOUNTED) > 100 and max(counts) == max(whole)


def test_long_texts_keep_their_end_and_their_first_token() -> None:
    base = chat_tokenizer("base")
    whole = PromptRenderer(base).ids(text("x" * 40))
    assert PromptRenderer(base, None, 20).ids(text("x" * 40)) == [whole[0], *whole[-19:]]
    assert PromptRenderer(base, None, len(whole)).ids(text("x" * 40)) == whole


def shown(renderer: PromptRenderer, prompt: Prompt) -> str:
    return str(chat_tokenizer("chatml").decode(renderer.ids(prompt)))


def written(*messages: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in (*messages, ("assistant", "")))[
        :-11
    ]


def test_long_chats_lose_their_oldest_messages_with_what_answers_them() -> None:
    told = [SYSTEM, USER, CALL, RESULT, {"role": "assistant", "content": "4."}, {"role": "user", "content": "3+3?"}]
    last = [("system", "Be brief."), ("user", "3+3?")]
    whole = len(PromptRenderer(chat_tokenizer("chatml")).ids(chat(*told)))
    for most in range(len(tokens(chat_tokenizer("chatml"), written(*last))), whole):
        assert shown(PromptRenderer(chat_tokenizer("chatml"), None, most), chat(*told)) == written(*last)
    working = [SYSTEM, USER, CALL, RESULT, CALL, {"role": "tool", "content": "15"}]
    whole = len(PromptRenderer(chat_tokenizer("chatml")).ids(chat(*working)))
    found = shown(PromptRenderer(chat_tokenizer("chatml"), None, whole - 1), chat(*working))
    assert found == written(
        ("system", "Be brief."), ("user", "2+2?"), ("assistant", "\n<tool_call>add 7</tool_call>"), ("tool", "15")
    )


@given(
    contents=st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<\ufffd"), max_size=30),
        min_size=1,
        max_size=4,
    ),
    room=st.integers(1, 60),
)
def test_a_cut_chat_keeps_its_frame_its_system_message_and_its_end(contents: list[str], room: int) -> None:
    roles = ["assistant", "user"] * 2
    turns = [(role, f"{content}_") for role, content in zip(roles[-len(contents) :], contents, strict=True)]
    prompt = chat(SYSTEM, *({"role": role, "content": content} for role, content in turns))
    frame = len(tokens(chat_tokenizer("chatml"), written(("system", "Be brief."), ("user", ""))))
    found = shown(PromptRenderer(chat_tokenizer("chatml"), None, frame + room), prompt)
    assert len(tokens(chat_tokenizer("chatml"), found)) <= frame + room
    end = "_<|im_end|>\n<|im_start|>assistant\n"
    assert found.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>") and found.endswith(end)
    question = found.removesuffix(end).rpartition("<|im_start|>user\n")[2]
    assert contents[-1].endswith(question)
    assert question == contents[-1] or found.count("<|im_start|>") == 3, "a text is cut only without other messages"


def test_a_chat_whose_system_message_is_too_long_is_refused() -> None:
    with pytest.raises(DataFailure, match="prompt row 0: it cannot be cut to 20 tokens: its system message"):
        PromptRenderer(chat_tokenizer("chatml"), None, 20).ids(chat(SYSTEM, USER))
