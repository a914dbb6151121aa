"""The roles of a process that runs code: the program of a response, calls of its functions, or the tests of a row.

`code_child.py` calls it after it has isolated the process; a sandbox service runs its text. It imports nothing from the
engine. A response and its tests never share a process, unless `same_process` is set. Only plain values cross between
them, as lines of JSON: the process of the tests must never accept anything else from the other process.
"""

import ast
import builtins
import importlib
import io
import json
import os
import socket
import symtable
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

PASSED = 77
"""The exit status of the process of the tests once they have passed."""
LONGEST_MESSAGE = 4 << 20
EVERY_INTEGER = 1 << 62
"""Larger integers travel in hexadecimal: Python limits the length of decimal ones."""


# -- values ------------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A value as JSON: numbers, text, bytes, None, and containers of them. Raises: `TypeError` for anything else."""
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if isinstance(value, int):
        number = int(value)
        return number if abs(number) < EVERY_INTEGER else {"int": hex(number)}
    if isinstance(value, str | float):
        return str(value) if isinstance(value, str) else float(value)
    if kind is list:
        return [plain(one) for one in value]
    for name, other in CONTAINERS.items():
        if isinstance(value, other):
            return {name: [plain(one) for one in value]}
    if isinstance(value, Mapping):
        return {"dict": [[plain(key), plain(one)] for key, one in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, Iterator):
        return {"iterator": [plain(one) for one in value]}
    if hasattr(value, "tolist"):  # numpy
        return plain(value.tolist())
    raise TypeError(f"a {kind.__name__} is not plain data")


CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
MAKERS: dict[str, Callable[[Any], Any]] = {
    "list": lambda items: [value_of(item) for item in items],
    "tuple": lambda items: tuple(map(value_of, items)),
    "set": lambda items: set(map(value_of, items)),
    "frozenset": lambda items: frozenset(map(value_of, items)),
    "dict": lambda pairs: {value_of(key): value_of(value) for key, value in pairs},
    "int": lambda digits: int(digits, 16),
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*parts),
    "range": lambda bounds: range(*bounds),
    "iterator": lambda items: iter([value_of(item) for item in items]),
}


def value_of(data: Any) -> Any:
    """The reverse of `plain`. Raises: an `Exception` for anything else."""
    if isinstance(data, list):
        return [value_of(one) for one in data]
    if isinstance(data, dict):
        ((name, inner),) = data.items()
        return MAKERS[name](inner)
    return data


class RoleChannel:
    """A stream of lines of JSON."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream, self._data, self._searched = stream, bytearray(), 0

    def send(self, message: Any) -> None:
        self._stream.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Any:
        """The next message; None at the end, or if it is too long. Raises: an `Exception` if it is not JSON."""
        while (end := self._data.find(b"\n", self._searched)) < 0:
            self._searched = len(self._data)
            part = self._stream.recv(1 << 16)
            if not part or self._searched > LONGEST_MESSAGE:
                return None
            self._data += part
        line = self._data[:end]
        del self._data[: end + 1]
        self._searched = 0
        return json.loads(line)


# -- the response ------------------------------------------------------------------------------------------------------


def load(code: str, imports: str = "") -> dict[str, Any]:
    """Run code as the main program. Returns the names that it defines."""
    module = types.ModuleType("__main__")
    module.__file__ = "solution.py"
    sys.modules["__main__"] = module
    sys.argv = ["solution.py"]
    sys.path.insert(0, os.getcwd())
    source = code.encode("utf-8", "replace")
    with open("solution.py", "wb") as file:
        file.write(source)
    names = module.__dict__
    exec(imports, names)
    exec(compile(source, "solution.py", "exec"), names)
    return names


def run_program(plan: dict[str, Any]) -> int:
    """Run a program. Returns its exit status."""
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    status = 0
    try:
        load(plan["code"])
    except SystemExit as end:
        status = 0 if end.code in (None, 0) else 1
    sys.stdout.flush()
    return status


def serve(plan: dict[str, Any], channel: Any) -> int:
    """Load the response and answer calls of its functions."""
    names = load(plan["code"], plan["imports"])
    channel.send({"ready": True})
    while (request := channel.receive()) is not None:
        channel.send(_answer(names, request))
    return 0


def _answer(names: Mapping[str, Any], request: Mapping[str, Any]) -> Any:
    name = request.get("look") or request["call"]
    if "look" in request:
        found = names.get(name)
        try:
            return {"function": True} if callable(found) else {"value": plain(found)} if name in names else {}
        except Exception:
            return {}
    try:
        owner = names.get("Solution") if request.get("method") else None
        function = getattr(owner(), name) if hasattr(owner, name) else names[name]  # type: ignore[misc]
        value = function(*value_of(request["args"]), **value_of(request["kwargs"]))
    except BaseException as error:
        return {"raised": [kind.__name__ for kind in type(error).__mro__], "text": _text_of(error)}
    return {"value": plain(value)}


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:1000]
    except BaseException:
        return ""


# -- the tests ---------------------------------------------------------------------------------------------------------


def run_tests(plan: dict[str, Any], channel: Any) -> int:
    """Run tests whose functions live in another process. `PASSED` if they end without an error."""
    ready = channel.receive()
    if ready != {"ready": True}:
        return 1
    source = plan["test"]
    scope: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    for name in plan["names"] or free_names(source):
        found = _ask(channel, {"look": name})
        if "value" in found:
            scope[name] = value_of(found["value"])
        elif found or hasattr(builtins, name):
            scope[name] = _proxy(channel, name)
        elif name in sys.stdlib_module_names:
            scope[name] = importlib.import_module(name)
    exec(compile(_tree_of(source, plan["token"]), "tests.py", "exec"), scope)
    return PASSED


def run_together(plan: dict[str, Any], channel: Any) -> int:
    """Run the response and then its tests in this process. The response can forge the sign that is sent here."""
    tests = compile(_tree_of(plan["test"], plan["token"]), "tests.py", "exec")
    sign = plan.pop("sign")
    names = load(plan["code"])
    exec(tests, names)
    channel.send(sign)
    return 0


def free_names(source: str) -> list[str]:
    """The names that tests use without defining them: those of the response. If they use only names of Python itself,
    the one that they call, such as `sum`, is the response's; with several, it is unknown which."""
    used: set[str] = set()
    bound: set[str] = set()
    tables = [symtable.symtable(source, "tests.py", "exec")]
    for table in tables:
        for symbol in table.get_symbols():
            if table is tables[0] or symbol.is_global():
                used |= {symbol.get_name()} if symbol.is_referenced() else set()
                bound |= {symbol.get_name()} if symbol.is_assigned() or symbol.is_imported() else set()
        tables += table.get_children()
    free = sorted(name for name in used - bound if not hasattr(builtins, name))
    if free:
        return free
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    called = {call.id for call in calls if isinstance(call, ast.Name) and call.id not in bound}
    return list(called) if len(called) == 1 else []


def _ask(channel: Any, request: Any) -> Any:
    """The reply of the process of the response. If there is none, ends this process: no test may catch that."""
    try:
        channel.send(request)
        reply = channel.receive()
        if isinstance(reply, dict):
            return reply
    except Exception:
        pass
    os._exit(1)


def _proxy(channel: Any, name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        reply = _ask(channel, {"call": name, "args": plain(list(arguments)), "kwargs": plain(keywords)})
        if "raised" in reply:
            raise _exception_of(reply)
        try:
            return value_of(reply["value"])
        except Exception:
            os._exit(1)

    call.__name__ = name
    return call


def _exception_of(reply: Mapping[str, Any]) -> Exception:
    """The nearest built-in exception. A test must not see one that ends an iteration or a program."""
    hidden = (StopIteration, StopAsyncIteration)
    for name in reply["raised"]:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, hidden):
            try:
                return kind(str(reply.get("text")))
            except TypeError:
                break
    return RuntimeError(str(reply.get("text")))


class _Impossible(ast.NodeTransformer):
    """Changes what asserts expect, so that no response can pass."""

    def __init__(self, token: str) -> None:
        self.token, self.changed = token, False

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        for inner in ast.walk(node.test):
            if isinstance(inner, ast.Compare) and isinstance(inner.ops[-1], ast.Eq):
                inner.comparators[-1] = ast.Constant(self.token)
                self.changed = True
        return node


def _tree_of(source: str, token: str) -> ast.Module:
    """The syntax tree of tests. With a token, of tests that no response can pass."""
    tree = ast.parse(source)
    if token:
        changer = _Impossible(token)
        changer.visit(tree)
        if not changer.changed:
            tree.body.append(ast.Raise(ast.Name("AssertionError", ast.Load()), None))
        ast.fix_missing_locations(tree)
    return tree


# -- one process, one role ---------------------------------------------------------------------------------------------

ROLES: dict[str, Callable[[dict[str, Any], Any], int]] = {
    "program": lambda plan, channel: run_program(plan),
    "serve": serve,
    "tests": run_tests,
    "together": run_together,
}


def run(plan: dict[str, Any], channel: Any) -> None:
    """Play the role that the plan names, and end this process."""
    status = 1
    try:
        sys.set_int_max_str_digits(0)
        status = ROLES[plan["role"]](plan, channel)
    except BaseException:
        os._exit(1)
    os._exit(status)


# -- in a sandbox service ----------------------------------------------------------------------------------------------


class Recorded:
    """A channel for a process that runs once: it knows the messages of the other side so far. At a question without
    an answer it ends the process and outputs the question."""

    def __init__(self, messages: list[Any], asks: bool) -> None:
        self._messages, self._asks = messages, asks
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self) -> Any:
        if self._messages:
            return self._messages.pop(0)
        if self._asks:
            tell({"need": self.sent[-1]})
        return None


def tell(answer: Any) -> None:
    """End this process. Its last line of output is the answer."""
    sys.stdout.flush()
    os.write(1, b"\n" + json.dumps(answer).encode() + b"\n")
    os._exit(0)


def run_recorded() -> None:
    """Play a role. Standard input has the plan and the messages of the other side."""
    given = json.loads(sys.stdin.read())
    plan = given["plan"]
    channel = Recorded(given["messages"], asks=plan["role"] == "tests")
    status = 1
    try:
        sys.set_int_max_str_digits(0)
        status = ROLES[plan["role"]](plan, channel)
    except BaseException:
        status = 1
    tell({"status": status, "sent": channel.sent})
