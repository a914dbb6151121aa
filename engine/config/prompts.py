"""Checks that a configured model's tokenizer can read the prompts.

Called by a run in the launching process, before any actor starts, and by `engine check`. Imports transformers only when
needed; never loads weights.
"""

from collections.abc import Mapping
from typing import Any

from engine.config.schema import Config
from engine.config.validation import validation_sets
from engine.errors import ConfigError, DataFailure, choice, describe_error
from engine.tasks.chat import PromptRenderer, has_template, render, template_arguments, turn_end
from engine.tasks.dataset import Dataset
from engine.tasks.prompt_lengths import PromptLimit

HUB_TIMEOUT_S = 5.0
"""Time limit for asking the hub whether it has a model."""


MODEL_FIX = "give the directory of a model in Hugging Face format, or the name of a model on the hub"


def find_model(path: str, config_field: str = "model.path", fix: str = MODEL_FIX) -> None:
    """Raises: `ConfigError`, within seconds, for a hub name that is neither in the local cache nor on the hub."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        if isinstance(try_to_load_from_cache(path, "config.json"), str):
            return
        HfApi().model_info(path, timeout=HUB_TIMEOUT_S)
    except HFValidationError as error:
        raise ConfigError(config_field, path, f"is neither a directory nor a hub name: {error}", fix) from error
    except HfHubHTTPError as error:
        status = "" if error.response is None else f" (HTTP {error.response.status_code})"
        law = f"is neither a directory nor in the local cache, and the hub refuses it{status}"
        raise ConfigError(config_field, path, law, fix) from error
    except Exception as error:  # whatever its HTTP client raises without a connection
        law = f"is neither a directory nor in the local cache, and the hub cannot be reached: {describe_error(error)}"
        raise ConfigError(config_field, path, law, fix) from error


def load_tokenizer(model: str) -> Any:
    """Raises: `ConfigError` if the model has no tokenizer that transformers can load."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its files and its hub do
        law = f"has no tokenizer that transformers can load: {describe_error(error)}"
        raise ConfigError("model.path", model, law, "give a model with its tokenizer") from error


def renderer_of(config: Config, tokenizer: Any, most_tokens: int | None = None) -> PromptRenderer:
    """How the prompts of a run become tokens."""
    return PromptRenderer(tokenizer, config.data.chat_settings(), most_tokens)


def prompt_limit(config: Config, model: str) -> PromptLimit | None:
    """Raises: `ConfigError` if transformers cannot read the model's configuration."""
    context = config.rollout.longest or getattr(model_config(model), "max_position_embeddings", None)
    most = config.data.max_prompt_tokens
    room, less = 1, "one token"
    if config.data.overlong == "truncate_left":
        sets = validation_sets(config.validation, config.rollout, config.reward)
        room = max(config.rollout.max_tokens, *(one.way[2] for one in sets), 1)
        less = f"the {room} tokens of a response"
    if most is not None and (context is None or most < context - room):
        return PromptLimit(tokens=most, reason="data.max_prompt_tokens", context=context)
    if context is None:
        return None
    if room >= context:
        law = f"leaves no room for a prompt in the context of {context}, and data.overlong is truncate_left"
        raise ConfigError("rollout.max_tokens", room, law, "lower it")
    return PromptLimit(tokens=context - room, reason=f"{less} less than the context of {context}", context=context)


def model_config(model: str) -> Any:
    """The model's configuration, or that of its text part if it has several parts. Raises: `ConfigError` if
    transformers cannot load it."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
    except Exception as error:  # transformers raises whatever its files and its hub do
        law = f"has no configuration that transformers can load: {describe_error(error)}"
        raise ConfigError("model.path", model, law, "give a model in Hugging Face format") from error


def check_template(config: Config, tokenizer: Any, model: str) -> None:
    """Raises: `ConfigError` for settings of a chat template if the tokenizer has none, or if its template does not read
    them."""
    data = config.data
    given = {"data.system_prompt": data.system_prompt, "data.chat_template_kwargs": data.chat_template_kwargs}
    for field, value in given.items():
        if value and not has_template(tokenizer):
            law = f"needs a chat template, and the tokenizer of model.path {model} has none"
            raise ConfigError(field, value, law, "remove it, or use a model with a chat template")
    if data.system_prompt is not None:
        _check_system_prompt(config, tokenizer, model)
    known = template_arguments(tokenizer) if data.chat_template_kwargs else []
    for name in data.chat_template_kwargs:
        if name not in known:
            law = f"the chat template of model.path {model} does not read the argument {name!r}"
            raise ConfigError("data.chat_template_kwargs", name, law, choice(name, known, "" if known else "remove it"))


def _check_system_prompt(config: Config, tokenizer: Any, model: str) -> None:
    """Raises: `ConfigError` for a template that can render a question, but not a system message before it."""
    arguments, question = config.data.chat_template_kwargs, [{"role": "user", "content": "question"}]
    system = {"role": "system", "content": config.data.system_prompt}
    try:
        render(tokenizer, question, None, arguments)
    except DataFailure:
        return
    try:
        render(tokenizer, [system, *question], None, arguments)
    except DataFailure as error:
        law = f"{error}; these are a system message and a question, rendered by the template of model.path {model}"
        raise ConfigError("data.system_prompt", config.data.system_prompt, law, "put it into the prompts") from error


def check_prompts(config: Config, tokenizer: Any, model: str, files: Mapping[str, Dataset]) -> None:
    """Raises: `ConfigError` for settings of a template that the tokenizer cannot use, and for lists of messages without
    a template to render them. `files`: the data sets, by the field that names them."""
    check_template(config, tokenizer, model)
    for field, data in files.items():
        if not data.chats or renderer_of(config, tokenizer).templated:
            continue
        if config.data.chat == "never":
            law = f"the prompts of {field} are lists of messages, which need the chat template"
            raise ConfigError("data.chat", "never", law, "use auto")
        law = f"has lists of messages, but the tokenizer of model.path {model} has no chat template"
        raise ConfigError(field, data.path, law, "use a model with a chat template, or text prompts")


def stop_ids_of(config: Config, tokenizer: Any, model: str) -> tuple[int, ...]:
    """Ids of the tokens that end a response: the end tokens of tokenizer and model, `rollout.stop`, and for chats the
    token with which the template ends a turn.

    Raises: `ConfigError` for a string that is not one token, or if no token ends a response.
    """
    found, stop = _own_ends(config, tokenizer, model), config.rollout.stop
    for text in stop:
        ids = tokenizer.encode(text, add_special_tokens=False)
        config.rollout.require_one_token(text, len(ids))
        found += ids
    if not found:
        law = "neither the tokenizer nor the model names a token that ends a response"
        raise ConfigError("rollout.stop", stop, law, "name a string of one token")
    return tuple(dict.fromkeys(found))


def _own_ends(config: Config, tokenizer: Any, model: str) -> list[int]:
    """The tokens with which tokenizer, model and template end a response."""
    from transformers import GenerationConfig

    found: list[int] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    try:
        ends = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        ends = None
    found += [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    turn = turn_end(tokenizer, config.data.chat_template_kwargs) if config.data.chat != "never" else None
    return found + ([] if turn is None or turn.token is None else [turn.token])


def text_ends_of(config: Config, tokenizer: Any, model: str) -> frozenset[int]:
    """The stop tokens that are no part of a response's text: those of tokenizer, model and template, and the special
    ones that `rollout.stop` names. An ordinary one, such as `</answer>`, is read by rewards and parsers."""
    named = {id for text in config.rollout.stop for id in tokenizer.encode(text, add_special_tokens=False)}
    special = {id for id, added in tokenizer.added_tokens_decoder.items() if added.special}
    return frozenset(_own_ends(config, tokenizer, model)) | (named & special)
