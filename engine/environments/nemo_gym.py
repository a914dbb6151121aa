"""Plays environments of NeMo Gym: its resources servers, which have the tools and verify the result.

    environment:
      class_name: engine.environments.nemo_gym:NemoGym
      arguments: {url: "http://127.0.0.1:8000"}

    python -m engine.environments.nemo_gym dataset.jsonl rows.jsonl     # the rows for data.path

The server runs by itself, for example with NeMo Gym's own command; this side needs no package of it. The engine calls
the tools by HTTP and verifies the episode after the first answer without a tool call, as NeMo Gym's simple agent does.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from engine.environments.protocol import Environment, Messages, StepResult, Tool, ToolCall, Turn
from engine.errors import DataFailure
from engine.tasks.chat import Message
from engine.trajectory import Prompt

ROW = "nemo_gym"
"""The column with the whole row of NeMo Gym's data set, which the server gets."""
PARAMS = "responses_create_params"


class NemoGym(Environment):
    """One session with the resources server at `url`. `headers` are added to each request, and `timeout_s` limits it.

    Numbers and truth values in the server's verification become figures. The tools of servers that offer them by MCP
    alone cannot be called.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, timeout_s: float = 60.0) -> None:
        self._url = url.rstrip("/")
        self._headers = headers
        self._timeout_s = timeout_s
        self._row: Mapping[str, Any] = {}
        self._output: list[dict[str, Any]] = []
        self._session: Any = None

    @property
    def tools(self) -> Sequence[Tool]:
        return [_chat_tool(tool) for tool in self._params.get("tools") or () if tool.get("type") == "function"]

    async def reset(self, prompt: Prompt, seed: int) -> Messages:
        """The messages of the row, after the server has begun a session."""
        import aiohttp

        if not isinstance(prompt.fields.get(ROW), Mapping):
            raise DataFailure(f"row {prompt.row} has no column {ROW!r}: write the rows with {__name__}", row=prompt.row)
        self._row = prompt.fields[ROW]
        limit = aiohttp.ClientTimeout(total=self._timeout_s)
        jar = aiohttp.CookieJar(unsafe=True)  # a server may have an address instead of a name
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=limit, cookie_jar=jar)
        await self._post("seed_session", self._row)
        return messages_of(self._row)

    async def step(self, turn: Turn) -> StepResult:
        """Call the tools, or verify the episode. A tool that fails is an error for the model to read."""
        if turn.text:
            content = [{"type": "output_text", "text": turn.text, "annotations": []}]
            said = {"type": "message", "role": "assistant", "status": "completed", "content": content}
            self._output.append({"id": f"msg_{len(self._output)}", **said})
        wrong, answers = 0, list[Message]()
        for call in turn.calls:
            answer, failed = await self._answer(call)
            wrong += failed and not call.failed
            answers += [] if call.failed else [call.answer(answer)]
            named = {"call_id": call.id, "name": call.name, "arguments": json.dumps(dict(call.arguments))}
            self._output.append({"type": "function_call", **named})
            self._output.append({"type": "function_call_output", "call_id": call.id, "output": answer})
        if turn.calls:
            return StepResult(messages=answers, figures={"tool_errors": float(wrong)})
        found = await self._post("verify", {**self._row, "response": self._response()})
        left_out = ("reward", "response", PARAMS)
        numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
        figures = {name: float(value) for name, value in numbers.items() if name not in left_out}
        return StepResult(reward=float(found["reward"]), done=True, figures=figures)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _answer(self, call: ToolCall) -> tuple[str, bool]:
        """What the model reads, and whether it is an error."""
        if call.failed:
            return call.result or "", True
        async with self._session.post(f"{self._url}/{call.name}", json=dict(call.arguments)) as response:
            text: str = await response.text()
            return (text, False) if response.status < 400 else (f"Error: {text}", True)

    async def _post(self, path: str, body: Any) -> Any:
        """Raises: `DataFailure` if the server refuses it."""
        async with self._session.post(f"{self._url}/{path}", json=body) as response:
            text = await response.text()
            if response.status >= 400:
                raise DataFailure(f"{self._url}/{path} answered {response.status}: {text:.300}")
            return json.loads(text)

    @property
    def _params(self) -> Mapping[str, Any]:
        return self._row.get(PARAMS, {})

    def _response(self) -> dict[str, Any]:
        """The episode as a response of OpenAI's Responses API."""
        params = self._params
        return {
            "id": "resp_0", "created_at": 0, "model": "model", "object": "response", "status": "completed",
            "output": self._output, "tools": params.get("tools") or [],
            "parallel_tool_calls": params.get("parallel_tool_calls", True),
            "tool_choice": params.get("tool_choice", "auto"),
        }  # fmt: skip


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of the Responses API in the form of the chat API."""
    known = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": known}


def messages_of(row: Mapping[str, Any]) -> list[Message]:
    """The first messages of a row. Raises: `DataFailure` for input that is neither text nor messages of text."""
    params = row.get(PARAMS) or {}
    given = params.get("input", "")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    begun: list[Message] = []
    if params.get("instructions"):
        begun.append({"role": "system", "content": params["instructions"]})
    for item in items:
        content = item.get("content")
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        if not isinstance(content, str) or "role" not in item:
            raise DataFailure(f"{PARAMS}.input has an item that is no message of text: {item!r:.200}")
        begun.append({"role": item["role"], "content": content})
    return begun


def main(arguments: list[str]) -> int:
    """Write the rows of a data set of NeMo Gym for data.path."""
    parser = argparse.ArgumentParser(prog="python -m engine.environments.nemo_gym", description=main.__doc__)
    parser.add_argument("dataset", help=f"JSONL file whose rows have {PARAMS}")
    parser.add_argument("file", help="JSONL file to write")
    chosen = parser.parse_args(arguments)
    try:
        with open(chosen.dataset, encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
        made = [{"messages": messages_of(row), ROW: row} for row in rows]
    except (OSError, ValueError, DataFailure) as error:
        print(f"engine: {chosen.dataset}: {error}", file=sys.stderr)
        return 2
    with open(chosen.file, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in made)
    print(f"{chosen.file}: {len(made)} prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
