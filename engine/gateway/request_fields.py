"""What the gateway does with each field of OpenAI's requests: one table, which checks requests and documents them.

`openai_format.py` checks every request with it; docs/reference/REQUESTS.md shows it. A field that would change the
answer, and that the gateway cannot honor, must never be ignored: the request is refused with the field and the values
that it may have.
"""

import json
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


def named_function(value: Any) -> str:
    """The function that a `tool_choice` names; empty if it names none."""
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _only(*values: Any, reason: str) -> Rule:
    """A field that may have only these values. An empty one (`null`, `[]`, `{}`) allows every empty value."""
    allowed = " or ".join(one if isinstance(one, str) else json.dumps(one) for one in values)
    return Rule(
        treatment="refused",
        allowed=allowed,
        accepts=lambda value: any(_is_same(value, one) for one in values),
        reason=reason,
    )


def _is_same(value: Any, allowed: Any) -> bool:
    if allowed in (None, [], {}):
        return value in ([], {}, "")
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


DISTRIBUTION = "the trainer needs the log-probs of one distribution, that of the run"
GRAMMAR = "an answer cannot be forced into a form: " + DISTRIBUTION
RUN_SETTING = "the run's setting applies: " + DISTRIBUTION
ONE = "a rollout has one answer to each call"
OLD = "use tools and tool_choice"
LENGTH = "an answer ends where the model ends it, at `stop`, or at its limit"
SHOWN = "the answer is the whole text, without the token that ended it"
NO_PROMPT_LOGPROBS = "the prompt has no log-probs"
TEMPLATE_SETTING = "use data.chat_template_kwargs of the run"
NEW_MESSAGE = "the model begins a new message"
TEXT_ONLY = "answers are text"

HONORED = Rule(treatment="honored")
NO_EFFECT = Rule(treatment="no effect")
GRAMMARS = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag", "regex",
    "ebnf", "json_schema",
)  # fmt: skip
"""Fields that force an answer into a form."""
WITHOUT_EFFECT = (
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier", "store",
)  # fmt: skip

BOTH: Mapping[str, Rule] = {
    "model": Rule(treatment="honored", allowed="the name in GET /v1/models, or `model`", reason="else HTTP 404"),
    "max_tokens": Rule(treatment="honored", reason="rollout.max_tokens is the upper bound"),
    "stop": HONORED,
    "stream": Rule(treatment="honored", reason="the finished answer, in a few events"),
    "stream_options": Rule(treatment="honored", reason="`include_usage`"),
    "n": _only(1, reason=ONE),
    "temperature": Rule(treatment="the run's", reason=RUN_SETTING),
    "top_p": Rule(treatment="the run's", reason=RUN_SETTING),
    "seed": Rule(treatment="the run's", reason="the engine derives a seed for each call"),
    "logit_bias": _only({}, reason=DISTRIBUTION),
    "frequency_penalty": _only(0, reason=DISTRIBUTION),
    "presence_penalty": _only(0, reason=DISTRIBUTION),
    "top_k": _only(-1, 0, reason=DISTRIBUTION),
    "min_p": _only(0, reason=DISTRIBUTION),
    "repetition_penalty": _only(1, reason=DISTRIBUTION),
    **dict.fromkeys(GRAMMARS, _only(None, reason=GRAMMAR)),
    "allowed_token_ids": _only(None, reason=DISTRIBUTION),
    "bad_words": _only([], reason=DISTRIBUTION),
    "logits_processors": _only([], reason=DISTRIBUTION),
    "use_beam_search": _only(False, reason=DISTRIBUTION),
    "thinking_token_budget": _only(None, reason=DISTRIBUTION),
    "min_tokens": _only(0, reason=LENGTH),
    "ignore_eos": _only(False, reason=LENGTH),
    "stop_token_ids": _only([], reason="use stop"),
    "repetition_detection": _only(None, reason=LENGTH),
    "include_stop_str_in_output": _only(False, reason="an answer does not include the text that ended it"),
    "skip_special_tokens": _only(False, reason=SHOWN),
    "truncate_prompt_tokens": _only(None, reason="a conversation that is too long gets HTTP 400"),
    "prompt_logprobs": _only(None, reason=NO_PROMPT_LOGPROBS),
    "return_token_ids": _only(False, reason="the engine captures the ids by itself"),
    "user": NO_EFFECT,
}
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
        "([agent.tool_choice](../AGENTS.md#forced-tool-calls))",
    ),
    "parallel_tool_calls": _only(True, reason="the number of calls cannot be limited"),
    "response_format": Rule(
        treatment="refused",
        allowed='{"type": "text"}',
        accepts=lambda value: isinstance(value, dict) and value.get("type") == "text",
        reason="json_object and json_schema cannot be honored: " + GRAMMAR,
    ),
    "logprobs": HONORED,
    "top_logprobs": Rule(treatment="honored", allowed="0 to 20, with `logprobs`", reason="not with backend openai"),
    "functions": _only([], reason=OLD),
    "function_call": _only("none", reason=OLD),
    "reasoning_effort": _only(None, reason=TEMPLATE_SETTING),
    "chat_template_kwargs": _only({}, reason=TEMPLATE_SETTING),
    "chat_template": _only(None, reason="all chats are rendered with the template of the run's model"),
    "continue_final_message": _only(False, reason=NEW_MESSAGE),
    "add_generation_prompt": _only(True, reason=NEW_MESSAGE),
    "add_special_tokens": _only(False, reason="the chat template writes them"),
    "documents": _only([], reason="put them into a message"),
    "echo": _only(False, reason=NO_PROMPT_LOGPROBS),
    "include_reasoning": _only(True, reason="the answer is the model's whole text"),
    "verbosity": _only("medium", reason="no model reads it"),
    "modalities": _only(["text"], reason=TEXT_ONLY),
    "audio": _only(None, reason=TEXT_ONLY),
    "web_search_options": _only(None, reason="the engine has no search; offer a tool"),
    "metadata": NO_EFFECT,
    "prediction": NO_EFFECT,
    "moderation": _only(None, reason="answers are not moderated"),
    **dict.fromkeys(WITHOUT_EFFECT, NO_EFFECT),
}
"""Fields of `/v1/chat/completions`."""

COMPLETIONS: Mapping[str, Rule] = {
    "prompt": Rule(treatment="honored", reason="one text, or token ids"),
    **BOTH,
    "logprobs": Rule(treatment="honored", allowed="0 to 20", reason="the likeliest tokens: not with backend openai"),
    "echo": _only(False, reason=NO_PROMPT_LOGPROBS),
    "add_special_tokens": _only(True, reason="for a prompt without special tokens, give token ids"),
    "response_format": CHAT["response_format"],
    "prompt_embeds": _only(None, reason="a prompt is text or token ids"),
    "suffix": _only(None, reason="the model continues a text"),
    "best_of": _only(1, reason=ONE),
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
