"""Calls an environment's methods, with a time limit: coroutines on the event loop, others on a thread. Also its tools,
by their JSON schemas.

`rollout.agents.environment_program` has one `EpisodeCalls` per episode. All plain calls of an episode run on one
thread, because some libraries accept calls only from the thread that created an object. It must never block the event
loop, and never let a call that hangs keep the process from ending.
"""

import asyncio
import contextlib
import inspect
import json
import logging
import queue
from collections.abc import Awaitable, Callable, Mapping, Sequence
from threading import Thread
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from engine.environments.protocol import Tool
from engine.errors import EngineError, choice, message_of, type_and_message
from engine.protocols.user_code import HangingCalls, awaited, stack_of

log = logging.getLogger(__name__)


class CallTimeout(TimeoutError):
    """A call took longer than its limit."""


class EpisodeCalls:
    """The calls of one episode. Each may take at most `timeout_s` seconds."""

    def __init__(self, timeout_s: float, hanging: HangingCalls) -> None:
        self._timeout_s = timeout_s
        self._hanging = hanging
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: Thread | None = None

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function`, and await its result if that is a coroutine.

        Raises: its exception; `CallTimeout`; `RuntimeError` if it tried to end the process.
        """
        if inspect.iscoroutinefunction(function):
            return await self._awaited(function, *args, **kwargs)
        value = await self._on_thread(function, *args, **kwargs)
        return await self._awaited(_identity, value) if inspect.isawaitable(value) else value

    def end(self) -> None:
        """End the thread after its remaining calls."""
        self._work.put(None)
        self._work, self._thread = queue.SimpleQueue(), None

    async def _awaited(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        task = asyncio.ensure_future(awaited(function, *args, **kwargs))
        try:
            done, _ = await asyncio.wait([task], timeout=self._timeout_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            task.cancel()
            raise self._too_long(function)
        return task.result()

    async def _on_thread(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        hangs = False

        def work() -> None:
            result: tuple[Any, BaseException | None]
            try:
                result = function(*args, **kwargs), None
            except BaseException as error:  # `SystemExit` also fails only this call
                result = None, error
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
                loop.call_soon_threadsafe(returned, result)

        def returned(result: tuple[Any, BaseException | None]) -> None:
            if hangs:
                self._hanging.remove()
            elif not outcome.done():
                outcome.set_result(result)

        if self._thread is None:
            self._thread = Thread(target=_run, args=(self._work,), name="episode", daemon=True)
            self._thread.start()
        thread = self._thread
        self._work.put(work)
        await asyncio.wait([outcome], timeout=self._timeout_s)
        if not outcome.done():
            hangs = True
            self._hanging.add("environments", self._timeout_s)
            log.warning("%s hangs; it is in\n%s", _name_of(function), stack_of(thread))
            self.end()
            raise self._too_long(function)
        value, error = outcome.result()
        if error is None:
            return value
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise error
        raise RuntimeError(f"{_name_of(function)} raised {type_and_message(error)}") from error

    def _too_long(self, function: Callable[..., Any]) -> CallTimeout:
        return CallTimeout(f"{_name_of(function)} took longer than {self._timeout_s:g} s")


async def _identity(value: Any) -> Any:
    return await value


def _run(work: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (task := work.get()) is not None:
        task()


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


Invoke = Callable[..., Awaitable[Any]]
"""(function, keyword arguments) → what the function returns. Raises the function's exceptions, or `CallTimeout`."""


class ToolError(Exception):
    """A call that failed. Its message is what the model reads."""


class FunctionTool:
    """A Python function as a tool. Its parameters need type hints that JSON can express.

    Raises: `EngineError` for a function that cannot be called by name, or whose hints have no schema.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        try:
            self._arguments = _model_of(function, self.name)
            parameters = self._arguments.model_json_schema()
        except Exception as error:  # evaluating type hints can raise anything
            raise EngineError(f"tool {self.name!r} has no schema: {message_of(error)}") from error
        parameters.pop("title", None)
        described = {"description": text} if (text := inspect.getdoc(function)) else {}
        self.schema = {"type": "function", "function": {"name": self.name, **described, "parameters": parameters}}

    async def call(self, arguments: Mapping[str, Any], invoke: Invoke) -> str:
        """Raises: `ToolError`."""
        try:
            valid = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            raise ToolError(f"{self.name} got wrong arguments: {_faults(error)}") from error
        given = {name: getattr(valid, name) for name in type(valid).model_fields}
        try:
            result = await invoke(self.function, **given)
        except CallTimeout as error:
            raise ToolError(f"{self.name} took too long") from error
        except Exception as error:
            raise ToolError(f"{self.name} raised {type(error).__name__}: {message_of(error)}") from error
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


class Toolbox:
    """The tools of one episode.

    Raises: `EngineError` for a tool that is neither a function nor a schema, and for two tools with the same name.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._functions: dict[str, FunctionTool] = {}
        self.schemas: list[Mapping[str, Any]] = []
        names: list[str] = []
        for tool in tools:
            if callable(tool):
                made = FunctionTool(tool)
                self._functions[made.name] = made
                self.schemas.append(made.schema)
                names.append(made.name)
            else:
                names.append(_name_in(tool))
                self.schemas.append(tool)
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise EngineError(f"two tools have the name {twice!r}; give each its own name")
        self._names = names

    async def call(self, name: str, arguments: Mapping[str, Any], invoke: Invoke) -> str | None:
        """The result of a call; None for a tool that is only a schema. Raises: `ToolError`."""
        tool = self._functions.get(name)
        if tool is not None:
            return await tool.call(arguments, invoke)
        if name in self._names:
            return None
        known = f"the tools are {', '.join(self._names)}" if self._names else "there are no tools"
        raise ToolError(f"there is no tool {name!r}; {choice(name, self._names, known)}")


def _model_of(function: Callable[..., Any], name: str) -> type[BaseModel]:
    """A model whose fields are the function's parameters."""
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"parameter {parameter.name!r} cannot be given by name")
        if parameter.name not in hints:
            raise TypeError(f"parameter {parameter.name!r} has no type hint")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], Field(default))
    made: type[BaseModel] = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    return made


def _name_in(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        law = (
            "must be a Python function, or a schema {'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
        )
        raise EngineError(f"a tool is {tool!r:.80}, but {law}")
    return name


def _faults(error: ValidationError) -> str:
    """Every wrong argument in one line."""
    faults = ((".".join(str(part) for part in one["loc"]), one["msg"]) for one in error.errors(include_url=False))
    return "; ".join(f"{place}: {text}" if place else text for place, text in faults)
