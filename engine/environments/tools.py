"""The tools of an environment: their JSON schemas, and the calls of those that are Python functions.

`rollout.agents.environment_program` uses a `Toolbox` per episode, `engine check` one to test an environment. A call
that goes wrong must never end an episode: its error is the result, which the model reads.
"""

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from engine.environments.calls import CallTimeout
from engine.environments.protocol import Tool
from engine.errors import EngineError, message_of, suggestion

Invoke = Callable[..., Awaitable[Any]]
"""(function, keyword arguments) → what the function returns. Raises what it raises, or `CallTimeout`."""


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

    Raises: `EngineError` for a tool that is neither a function nor a schema, and for two of one name.
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
        raise ToolError(f"there is no tool {name!r}; {suggestion(name, self._names, known)}")


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
