"""What the gateway does with each field of OpenAI's requests: one table, which checks requests and documents them.

`openai_format.py` checks every request with it; docs/AGENTS.md shows it. A field that would change the answer, and that
the gateway cannot honor, must never be ignored: the request is refused with the field and the values that it may have.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Treatment = Literal["honored", "the run's", "no effect", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What happens to a field."""

    treatment: Treatment
    """`honored`: works as in OpenAI's documentation. `the run's`: the run's own setting applies instead. `no effect`:
    has no effect on the answer. `refused`: a value other than `allowed` gets HTTP 400."""
    allowed: str = ""
    """The allowed values, in words; empty: all values of the field's type."""
    accepts: Callable[[Any], bool] = lambda value: True
    """Whether a value is allowed. A field that is left out or null always is."""
    reason: str = ""
    """Why other values are refused, or a remark."""


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value == one and type(value) is not bool for one in values)


def _is(wanted: bool) -> Callable[[Any], bool]:
    return lambda value: value is wanted


def named_function(value: Any) -> str:
    """The function that a `tool_choice` names; empty if it names none."""
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _empty(value: Any) -> bool:
    return value in ({}, [], "")


DISTRIBUTION = "the trainer needs the log-probs of one distribution, that of the run"
GRAMMAR = "an answer cannot be forced into a form: " + DISTRIBUTION
RUN_SETTING = "the run's setting applies: " + DISTRIBUTION
ONE = "a rollout has one answer to each call"
OLD = "use tools and tool_choice"
LENGTH = "an answer ends where the model ends it, at `stop`, or at its limit"
SHOWN = "the answer is the text without its special tokens"

HONORED = Rule(treatment="honored")
NO_EFFECT = Rule(treatment="no effect")

BOTH: Mapping[str, Rule] = {
    "model": Rule(treatment="honored", allowed="the name in GET /v1/models, or `model`", reason="else HTTP 404"),
    "max_tokens": Rule(treatment="honored", reason="rollout.max_tokens is the upper bound"),
    "stop": HONORED,
    "stream": Rule(treatment="honored", reason="the finished answer, in a few events"),
    "stream_options": Rule(treatment="honored", reason="`include_usage`"),
    "n": Rule(
        treatment="refused", allowed="1", accepts=_one_of(1), reason=ONE
    ),
    "temperature": Rule(treatment="the run's", reason=RUN_SETTING),
    "top_p": Rule(treatment="the run's", reason=RUN_SETTING),
    "seed": Rule(treatment="the run's", reason="the engine derives a seed for each call"),
    "logit_bias": Rule(treatment="refused", allowed="{}", accepts=_empty, reason=DISTRIBUTION),
    "frequency_penalty": Rule(treatment="refused", allowed="0", accepts=_one_of(0), reason=DISTRIBUTION),
    "presence_penalty": Rule(treatment="refused", allowed="0", accepts=_one_of(0), reason=DISTRIBUTION),
    "top_k": Rule(treatment="refused", allowed="-1 or 0", accepts=_one_of(-1, 0), reason=DISTRIBUTION),
    "min_p": Rule(treatment="refused", allowed="0", accepts=_one_of(0), reason=DISTRIBUTION),
    "repetition_penalty": Rule(treatment="refused", allowed="1", accepts=_one_of(1), reason=DISTRIBUTION),
    "structured_outputs": Rule(treatment="refused", allowed="null", accepts=_empty, reason=GRAMMAR),
    "guided_json": Rule(treatment="refused", allowed="null", accepts=_empty, reason=GRAMMAR),
    "guided_regex": Rule(treatment="refused", allowed="null", accepts=_empty, reason=GRAMMAR),
    "guided_choice": Rule(treatment="refused", allowed="null", accepts=_empty, reason=GRAMMAR),
    "guided_grammar": Rule(treatment="refused", allowed="null", accepts=_empty, reason=GRAMMAR),
    "structural_tag": Rule(treatment="refused", allowed="null", accepts=_empty, reason=GRAMMAR),
    "regex": Rule(treatment="refused", allowed="null", accepts=_empty, reason=GRAMMAR),
    "ebnf": Rule(treatment="refused", allowed="null", accepts=_empty, reason=GRAMMAR),
    "json_schema": Rule(treatment="refused", allowed="null", accepts=_empty, reason=GRAMMAR),
    "allowed_token_ids": Rule(treatment="refused", allowed="null", accepts=_empty, reason=DISTRIBUTION),
    "bad_words": Rule(treatment="refused", allowed="[]", accepts=_empty, reason=DISTRIBUTION),
    "logits_processors": Rule(treatment="refused", allowed="[]", accepts=_empty, reason=DISTRIBUTION),
    "use_beam_search": Rule(treatment="refused", allowed="false", accepts=_is(False), reason=DISTRIBUTION),
    "thinking_token_budget": Rule(treatment="refused", allowed="null", accepts=_empty, reason=DISTRIBUTION),
    "min_tokens": Rule(treatment="refused", allowed="0", accepts=_one_of(0), reason=LENGTH),
    "ignore_eos": Rule(treatment="refused", allowed="false", accepts=_is(False), reason=LENGTH),
    "stop_token_ids": Rule(treatment="refused", allowed="[]", accepts=_empty, reason="use stop"),
    "repetition_detection": Rule(treatment="refused", allowed="null", accepts=_empty, reason=LENGTH),
    "include_stop_str_in_output": Rule(
        treatment="refused", allowed="false", accepts=_is(False), reason="an answer is without what ended it"
    ),
    "skip_special_tokens": Rule(treatment="refused", allowed="true", accepts=_is(True), reason=SHOWN),
    "truncate_prompt_tokens": Rule(
        treatment="refused", allowed="null", accepts=_empty, reason="a conversation that is too long gets HTTP 400"
    ),
    "prompt_logprobs": Rule(treatment="refused", allowed="null", accepts=_empty, reason="the prompt has no log-probs"),
    "return_token_ids": Rule(
        treatment="refused", allowed="false", accepts=_is(False), reason="the engine captures the ids by itself"
    ),
    "user": NO_EFFECT,
}  # fmt: skip
"""Fields of both endpoints: OpenAI's, and those that servers such as vLLM and SGLang add."""

CHAT: Mapping[str, Rule] = {
    "messages": Rule(treatment="honored", reason="parts of type `text` only"),
    **BOTH,
    "max_completion_tokens": Rule(treatment="honored", reason="rollout.max_tokens is the upper bound"),
    "tools": HONORED,
    "tool_choice": Rule(
        treatment="honored",
        allowed="auto, none, required or a named function",
        accepts=lambda value: value in ("auto", "none", "required") or bool(named_function(value)),
        reason="required and a named function: honored with backend vllm, or treated as auto "
        "([agent.tool_choice](#forced-tool-calls))",
    ),
    "parallel_tool_calls": Rule(
        treatment="refused", allowed="true", accepts=_is(True), reason="the number of calls cannot be limited"
    ),
    "response_format": Rule(
        treatment="refused",
        allowed='{"type": "text"}',
        accepts=lambda value: isinstance(value, dict) and value.get("type") == "text",
        reason="json_object and json_schema cannot be honored: " + GRAMMAR,
    ),
    "logprobs": HONORED,
    "top_logprobs": Rule(treatment="honored", allowed="0 to 20, with `logprobs`", reason="not with backend openai"),
    "functions": Rule(treatment="refused", allowed="[]", accepts=_empty, reason=OLD),
    "function_call": Rule(treatment="refused", allowed="none", accepts=_one_of("none"), reason=OLD),
    "reasoning_effort": Rule(
        treatment="refused", allowed="null", accepts=_empty, reason="use data.chat_template_kwargs of the run"
    ),
    "chat_template_kwargs": Rule(
        treatment="refused", allowed="{}", accepts=_empty, reason="use data.chat_template_kwargs of the run"
    ),
    "chat_template": Rule(
        treatment="refused", allowed="null", accepts=_empty, reason="the template of the run's model renders all chats"
    ),
    "continue_final_message": Rule(
        treatment="refused", allowed="false", accepts=_is(False), reason="the model begins a new message"
    ),
    "add_generation_prompt": Rule(
        treatment="refused", allowed="true", accepts=_is(True), reason="the model begins a new message"
    ),
    "add_special_tokens": Rule(
        treatment="refused", allowed="false", accepts=_is(False), reason="the chat template writes them"
    ),
    "documents": Rule(treatment="refused", allowed="[]", accepts=_empty, reason="put them into a message"),
    "echo": Rule(treatment="refused", allowed="false", accepts=_is(False), reason="the prompt has no log-probs"),
    "include_reasoning": Rule(
        treatment="refused", allowed="true", accepts=_is(True), reason="the answer is the model's whole text"
    ),
    "verbosity": Rule(treatment="refused", allowed="medium", accepts=_one_of("medium"), reason="no model reads it"),
    "modalities": Rule(
        treatment="refused", allowed='["text"]', accepts=_one_of(["text"]), reason="answers are text"
    ),
    "audio": Rule(treatment="refused", allowed="null", accepts=_empty, reason="answers are text"),
    "web_search_options": Rule(
        treatment="refused", allowed="null", accepts=_empty, reason="the engine has no search; offer a tool"
    ),
    "metadata": NO_EFFECT,
    "prediction": NO_EFFECT,
    "moderation": Rule(treatment="refused", allowed="null", accepts=_empty, reason="answers are not moderated"),
    "prompt_cache_key": NO_EFFECT,
    "prompt_cache_options": NO_EFFECT,
    "prompt_cache_retention": NO_EFFECT,
    "safety_identifier": NO_EFFECT,
    "service_tier": NO_EFFECT,
    "store": NO_EFFECT,
}  # fmt: skip
"""Fields of `/v1/chat/completions`."""

COMPLETIONS: Mapping[str, Rule] = {
    "prompt": Rule(treatment="honored", reason="one text, or token ids"),
    **BOTH,
    "logprobs": Rule(treatment="honored", allowed="0 to 20", reason="the likeliest tokens: not with backend openai"),
    "echo": Rule(treatment="refused", allowed="false", accepts=_is(False), reason="the prompt has no log-probs"),
    "add_special_tokens": Rule(
        treatment="refused", allowed="true", accepts=_is(True), reason="give token ids for a prompt without them"
    ),
    "response_format": CHAT["response_format"],
    "prompt_embeds": Rule(treatment="refused", allowed="null", accepts=_empty, reason="a prompt is text or token ids"),
    "suffix": Rule(treatment="refused", allowed="null", accepts=_empty, reason="the model continues a text"),
    "best_of": Rule(treatment="refused", allowed="1", accepts=_one_of(1), reason=ONE),
}
"""Fields of `/v1/completions`."""


def refusal_of(rules: Mapping[str, Rule], fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first field with a value that is refused, and what is wrong with it; None if there is none. Fields that
    neither OpenAI nor the table knows have no effect."""
    for name, value in fields.items():
        rule = rules.get(name)
        if rule is not None and value is not None and not rule.accepts(value):
            return name, f"{name} is {value!r:.80}, but must be {rule.allowed}, or left out ({rule.reason})"
    return None
