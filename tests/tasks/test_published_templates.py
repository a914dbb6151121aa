"""The token ids of chats with the templates that the makers of common models published: written out, and compared with
what transformers makes of them."""

import re
from typing import Any

import pytest
from chat_tokenizers import published_tokenizer, tokens

from engine.rollout.agents.conversation import Chat
from engine.tasks.chat import ChatSettings, PromptRenderer, turn_end
from engine.trajectory import Prompt

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "<think>\neasy\n</think>\n\n4"}
AGAIN = {"role": "user", "content": " 3+3? "}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 7}'}}]}
RESULT = {"role": "tool", "content": "14", "name": "add"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}

CHATML = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
    "<|im_start|>assistant\n{answer}<|im_end|>\n<|im_start|>user\n{again}<|im_end|>\n<|im_start|>assistant\n{begin}"
)
LLAMA = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{system}Be brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n<think>\neasy\n</think>\n\n4<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n3+3?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
GEMMA = (
    "<bos><start_of_turn>user\n{system}2+2?<end_of_turn>\n<start_of_turn>model\n<think>\neasy\n</think>\n\n4<end_of_turn>\n"
    "<start_of_turn>user\n3+3?<end_of_turn>\n<start_of_turn>model\n"
)
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>Be brief.<｜User｜>2+2?<｜Assistant｜>\n\n4<｜end▁of▁sentence｜>"
    "<｜User｜> 3+3? <｜Assistant｜><think>\n"
)
PHI = (
    "<|system|>\nBe brief.<|end|>\n<|user|>\n2+2?<|end|>\n<|assistant|>\n<think>\neasy\n</think>\n\n4<|end|>\n"
    "<|user|>\n 3+3? <|end|>\n<|assistant|>\n"
)
THOUGHT = {"answer": "<think>\neasy\n</think>\n\n4", "again": " 3+3? ", "begin": ""}
EMPTY = "<think>\n\n</think>\n\n"

GOLDEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen2.5": ("qwen2_5", {}, CHATML.format(**THOUGHT)),
    "qwen3": ("qwen3", {}, CHATML.format(answer="4", again=" 3+3? ", begin="")),
    "qwen3 without thinking": (
        "qwen3", {"enable_thinking": False}, CHATML.format(answer="4", again=" 3+3? ", begin=EMPTY)
    ),
    "qwen3.5": ("qwen3_5_think", {}, CHATML.format(answer="4", again="3+3?", begin="<think>\n")),
    "qwen3.5 without thinking": (
        "qwen3_5_think", {"enable_thinking": False}, CHATML.format(answer="4", again="3+3?", begin=EMPTY)
    ),
    "nemotron 3": (
        "nemotron_3_nano", {}, CHATML.format(answer="<think></think>\n\n4", again=" 3+3? ", begin="<think>\n")
    ),
    "llama 3": ("llama3", {}, LLAMA.format(system="")),
    "llama 3.1": (
        "llama3_1",
        {"date_string": "26 Jul 2024"},
        LLAMA.format(system="Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"),
    ),
    "gemma": ("gemma", {}, GEMMA.format(system="")),
    "gemma 3": ("gemma3", {}, GEMMA.format(system="Be brief.\n\n")),
    "deepseek v3": ("deepseekv3", {}, DEEPSEEK),
    "deepseek r1 distilled": ("deepseek_r1_distill", {}, DEEPSEEK),
    "glm 4.5": (
        "glm4moe",
        {},
        "[gMASK]<sop><|system|>\nBe brief.<|user|>\n2+2?<|assistant|>\n<think></think>\n4"
        "<|user|>\n 3+3? <|assistant|>",
    ),
    "gpt-oss": (
        "gptoss",
        {"reasoning_effort": "low"},
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\nCurrent date: DATE\n\nReasoning: low\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|><|start|>user<|message|>2+2?<|end|>"
        "<|start|>assistant<|channel|>final<|message|><think>\neasy\n</think>\n\n4<|end|>"
        "<|start|>user<|message|> 3+3? <|end|><|start|>assistant",
    ),
    "phi 3": ("phi3", {}, PHI),
    "phi 3.5": ("phi3_5", {}, PHI),
}  # fmt: skip


@pytest.mark.parametrize("case", GOLDEN)
def test_chats_have_the_tokens_written_here(case: str) -> None:
    name, arguments, written = GOLDEN[case]
    tokenizer = published_tokenizer(name)
    messages = [SYSTEM, USER, ANSWER, AGAIN] if name != "gemma" else [USER, ANSWER, AGAIN]  # it refuses the system
    prompt = Prompt(row=0, text="not read", fields={"messages": messages})
    renderer = PromptRenderer(tokenizer, ChatSettings(template_kwargs=arguments))
    text = renderer.text(prompt)
    today = re.search(r"Current date: (\S+)", text)
    written = written.replace("DATE", today[1] if today else "")
    assert text == renderer.quick_text(prompt) == written
    assert renderer.ids(prompt) == tokens(tokenizer, written) == theirs(tokenizer, messages, None, arguments)
    agents = Chat(tokenizer, [0], arguments)
    assert agents.encode_rendered(agents.template(messages), True) == renderer.ids(prompt)


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "qwen3_5_think", "nemotron_3_nano", "glm4moe", "llama3_1", "gptoss"]
)
def test_chats_with_tools_have_the_tokens_of_transformers(name: str) -> None:
    tokenizer = published_tokenizer(name)
    messages = [USER, CALL, RESULT]
    prompt = Prompt(row=0, text="not read", fields={"messages": messages, "tools": [TOOL]})
    renderer = PromptRenderer(tokenizer)
    parsed = [USER, {**CALL, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 7}}}]}, RESULT]
    ids = renderer.ids(prompt)
    assert ids == tokens(tokenizer, renderer.text(prompt)) == theirs(tokenizer, parsed, [TOOL], {})
    assert all(word in renderer.text(prompt) for word in ("Adds.", "add", "14", "7"))


def theirs(tokenizer: Any, messages: Any, tools: Any, arguments: Any) -> list[int]:
    """What `apply_chat_template` makes of a chat."""
    made = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=True, **arguments
    )
    return list(made["input_ids"])


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("qwen2_5", "<|im_end|>"),
        ("qwen3", "<|im_end|>"),
        ("qwen3_5_think", "<|im_end|>"),
        ("llama3_1", "<|eot_id|>"),
        ("gemma3", "<end_of_turn>"),
        ("deepseekv3", "<｜end▁of▁sentence｜>"),
        ("gptoss", "<|return|>"),
        ("phi3_5", "<|end|>"),
        ("glm4moe", None),
    ],
)
def test_the_end_of_a_turn_is_read_off_a_published_template(name: str, token: str | None) -> None:
    tokenizer = published_tokenizer(name)
    found = turn_end(tokenizer)
    assert found is not None
    assert found.token == (None if token is None else tokenizer.convert_tokens_to_ids(token))
