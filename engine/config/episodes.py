"""The environment of a configuration: its class, the settings of its episodes, and a test before the run.

Called by `engine check`, by the launching process before any actor starts, and by the replicas. It imports the user's
class and begins one episode, so that most faults of an environment are found before a model samples a token.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from threading import Thread
from typing import TYPE_CHECKING, Any

from engine.config.prompts import load_tokenizer
from engine.config.schema import Config
from engine.environments.calls import EpisodeCalls
from engine.environments.protocol import Environment
from engine.errors import ConfigError, DataFailure, counted, message_of
from engine.protocols.named_code import NO_LOCAL, Local, find
from engine.protocols.user_code import HangingCalls
from engine.rollout.agents.environment_program import Episode, EpisodeSettings
from engine.rollout.agents.tool_calls import MARKS, PARSERS, Parser
from engine.tasks.chat import Message, render
from engine.trajectory import Prompt

if TYPE_CHECKING:
    from engine.tasks.dataset import Dataset


def load_environment(config: Config, local: Local = NO_LOCAL) -> Callable[[], Environment]:
    """A constructor of environments without arguments. `local`: classes that cannot be imported, by field.

    Raises: `ConfigError` for a class that cannot be imported, is no `Environment`, or does not take the arguments.
    """
    path, arguments = config.environment.class_name or "", config.environment.arguments
    found = find(path, config.run.code_dir, "environment.class_name", local)
    known_class = inspect.isclass(found) and issubclass(found, Environment)
    if not known_class and not inspect.isfunction(found):
        law = f"is a {type(found).__name__}, not a class derived from engine.environments.Environment"
        raise ConfigError("environment.class_name", path, law, "derive it: class MyTask(Environment)")
    if known_class and inspect.isfunction(inspect.getattr_static(found, "tools")):
        law = f"{found.__name__}.tools is a method, not a property"
        raise ConfigError("environment.class_name", path, law, "put @property before def tools(self)")
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        law = f"{found.__name__} cannot be called with these arguments: {error}"
        known = [name for name in inspect.signature(found).parameters]
        fix = f"its parameters are {', '.join(known)}" if known else "remove them: it takes none"
        raise ConfigError("environment.arguments", arguments, law, fix) from error
    return partial(_make_environment, found, arguments)


def _make_environment(make: Callable[..., Any], arguments: Mapping[str, Any]) -> Environment:
    """Raises: `TypeError` if a user's function returns something else."""
    found = make(**arguments)
    if not isinstance(found, Environment):
        raise TypeError(f"{make.__qualname__} returned {type(found).__name__}, not an engine.environments.Environment")
    return found


def parser_of(name: str, directory: str | None, field: str) -> Parser:
    """A parser by its name, or the user's own as module:function. Raises: `ConfigError`."""
    if name in PARSERS:
        return PARSERS[name]
    found = find(name, directory, field)
    try:
        inspect.signature(found).bind("text")
    except TypeError as error:
        fix = "define it as def parse(text) -> tuple[str, list[ParsedCall]]"
        raise ConfigError(field, name, f"cannot be called with the text of an answer: {error}", fix) from error
    parser: Parser = found
    return parser


def settings_of(config: Config, local: Local = NO_LOCAL) -> EpisodeSettings:
    """The settings of every episode."""
    section = config.environment
    return EpisodeSettings(
        name=section.class_name or "",
        make=load_environment(config, local),
        parser=parser_of(section.tool_parser, config.run.code_dir, "environment.tool_parser"),
        call_mark=MARKS.get(section.tool_parser, ""),
        max_turns=section.max_turns,
        max_tokens=section.max_tokens,
        call_timeout_s=section.call_timeout_s,
        system_prompt=config.data.system_prompt,
    )


def check_environment(config: Config, model: str, data: "Dataset", local: Local = NO_LOCAL) -> Iterator[str]:
    """Begin an episode with the first prompt, and render it. Yields lines like those of `check_inputs`; none without an
    environment. Raises: `ConfigError` if this fails."""
    path = config.environment.class_name
    if path is None:
        return
    settings, tokenizer = settings_of(config, local), load_tokenizer(model)
    yield from _untried(find(path, config.run.code_dir, "environment.class_name", local))
    try:
        messages, schemas = begin_episode(settings, data.prompt(0), config.run.seed)
    except DataFailure as error:
        raise ConfigError("environment.class_name", path, f"cannot begin an episode: {error}", "correct it") from error
    try:
        text = render(tokenizer, messages, schemas, config.data.chat_template_kwargs)
    except DataFailure as error:
        law = f"begins an episode that the model of {model} cannot read: {message_of(error)}"
        raise ConfigError("environment.class_name", path, law, "use a model whose chat template takes it") from error
    names = [schema.get("function", schema)["name"] for schema in schemas]
    tools = f"the tools {', '.join(names)}" if names else "no tools"
    yield f"ok: environment.class_name {path} begins an episode with {counted(len(messages), 'message')} and {tools}"
    if names and text == render(tokenizer, messages, None, config.data.chat_template_kwargs):
        yield f"note: the chat template of {model} does not write the tools: name them in the prompt, or in the warm-up"


def _untried(adapter: Any) -> Iterator[str]:
    """A note if the adapter of another package was not tested with the installed version."""
    package, tried = getattr(adapter, "package", ""), getattr(adapter, "tried", "")
    with suppress(PackageNotFoundError):
        if package and not f"{(found := version(package))}.".startswith(f"{tried}."):
            yield (
                f"note: {adapter.__module__}:{adapter.__qualname__} was tested with {package} {tried}, not with the "
                f"installed {found} (docs/AGENTS.md)"
            )


def begin_episode(
    settings: EpisodeSettings, prompt: Prompt, seed: int
) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]]]:
    """The first messages of an episode and its tools. Uses a thread with its own event loop, because the caller may
    have one."""
    outcome: list[Any] = []

    async def begin() -> Any:
        episode = Episode(settings, EpisodeCalls(settings.call_timeout_s, HangingCalls()), prompt)
        try:
            return await episode.reset(seed)
        finally:
            await episode.close()

    def run() -> None:
        try:
            outcome.append(asyncio.run(begin()))
        except BaseException as error:
            outcome.append(error)

    thread = Thread(target=run, name="environment", daemon=True)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    messages, schemas = outcome[0]
    return messages, schemas
