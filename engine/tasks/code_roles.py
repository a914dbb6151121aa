"""The roles of a process that runs code: the program of a response, calls of its functions, or the tests of a row.

`code_child.py` calls it after it has isolated the process; a sandbox service runs its text. It imports nothing from the
engine. A response and its tests never share a process, unless `same_process` is set. Only plain values cross between
them, as lines of JSON: the process of the tests must never accept anything else from the other process.
"""

import ast
import atexit
import builtins
import importlib
import json
import os
import socket
import symtable
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

LONGEST_MESSAGE = 4 << 20
IN_PLACE = "_in_place"
"""The name of a function that `_InPlace` adds to tests."""
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
        if STREAMS is None:
            return {"iterator": [plain(one) for one in value]}
        STREAMS.append(value)
        return {"stream": len(STREAMS) - 1}
    if hasattr(value, "tolist"):  # numpy
        return plain(value.tolist())
    raise TypeError(f"a {kind.__name__} is not plain data")


STREAMS: list[Iterator[Any]] | None = None
"""In the process of a response: its iterators, of which the tests ask one item at a time. They may be endless."""
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

    def receive(self, longest: int = LONGEST_MESSAGE) -> Any:
        """The next message; None at the end, or if it has more bytes. Raises: an `Exception` if it is not JSON."""
        while (end := self._data.find(b"\n", self._searched)) < 0:
            self._searched = len(self._data)
            part = self._stream.recv(1 << 16)
            if not part or self._searched > longest:
                return None
            self._data += part
        line = self._data[:end]
        del self._data[: end + 1]
        self._searched = 0
        return json.loads(line)


# -- the response ------------------------------------------------------------------------------------------------------


def load(code: str, name: str, imports: str = "") -> dict[str, Any]:
    """Run code as the module of this name. Returns the names that it defines."""
    module = types.ModuleType(name)
    module.__file__ = "solution.py"
    sys.modules["__main__"] = sys.modules[name] = module
    sys.argv = ["solution.py"]
    sys.path.insert(0, os.getcwd())
    source = code.encode("utf-8", "replace")
    with open("solution.py", "wb") as file:
        file.write(source)
    names = module.__dict__
    exec(imports, names)
    exec(compile(source, "solution.py", "exec"), names)
    return names


def run_program(plan: dict[str, Any], channel: Any) -> None:
    """Run a program to its end, as the interpreter does: with its threads, its exit handlers and its open files."""
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    threading.Thread.start = _start_or_run  # type: ignore[method-assign, assignment]
    status = 0
    try:
        load(plan["code"], "__main__")
    except SystemExit as end:
        status = 0 if end.code in (None, 0) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush()  # while a stream of the program still has the globals that its `flush` uses
    names = sys.modules["__main__"].__dict__
    names |= dict.fromkeys(names)  # destructors run, and files are closed
    _flush()
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.__stdout__):
        with suppress(Exception):
            stream.flush()  # type: ignore[union-attr]


def _start_or_run(thread: Any, start: Any = threading.Thread.start) -> None:
    """Start a thread; if none is allowed, run its function here. Programs use a thread for its large stack."""
    try:
        start(thread)
    except RuntimeError:
        thread.join, thread.is_alive = lambda timeout=None: None, lambda: False
        with suppress(Exception):
            thread.run()


def serve(plan: dict[str, Any], channel: Any) -> None:
    """Load the response and answer calls of its functions."""
    global STREAMS
    names = load(plan["code"], "solution", plan["imports"])
    STREAMS = []
    channel.send({"ready": True})
    while (request := channel.receive()) is not None:
        channel.send(_answer(names, request))


def _answer(names: Mapping[str, Any], request: Mapping[str, Any]) -> Any:
    if "look" in request:
        found = names.get(name := request["look"])
        try:
            return {"function": True} if callable(found) else {"value": plain(found)} if name in names else {}
        except Exception:
            return {}
    try:
        return _result(names, request)
    except BaseException as error:
        return {"raised": [kind.__name__ for kind in type(error).__mro__], "text": _text_of(error)}


def _result(names: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    if "next" in request:
        item = next((STREAMS or [])[request["next"]], STREAMS)
        return {} if item is STREAMS else {"value": plain(item)}
    name, positional, keywords = request["call"], value_of(request["args"]), value_of(request["kwargs"])
    owner = names.get("Solution") if request.get("method") else None
    function = getattr(owner(), name) if hasattr(owner, name) else names[name]  # type: ignore[misc]
    value = plain(function(*positional, **keywords))
    if request.get("json"):
        return {"value": value_of(value)}
    return {"value": value, "arguments": plain([*positional, *keywords.values()]) if request["in_place"] else []}


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:1000]
    except BaseException:
        return ""


# -- the tests ---------------------------------------------------------------------------------------------------------


def run_tests(plan: dict[str, Any], channel: Any) -> Any:
    """Run tests whose functions live in another process. The verdict if they end without an error."""
    if channel.receive() != {"ready": True}:
        return None
    response, tree = CodeUnderTest(channel), _InPlace().visit(_tree_of(plan["test"], plan["token"]))
    scope: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    for name in plan["names"] or free_names(plan["test"]):
        try:
            scope[name] = response.find(name)
        except AttributeError:
            if hasattr(builtins, name):
                scope[name] = response.function(name)
            elif name in sys.stdlib_module_names:
                scope[name] = importlib.import_module(name)
    solution: Any = types.ModuleType("solution")
    solution.__getattr__ = response.find
    sys.modules["solution"] = solution
    MAKERS["stream"] = response.items
    scope[IN_PLACE] = lambda function: getattr(function, "__dict__", {}).get("in_place", function)
    return _verdict(plan.pop("sign"), _execute(ast.fix_missing_locations(tree), scope), response)


def run_together(plan: dict[str, Any], channel: Any) -> Any:
    """Run the response and then its tests in this process."""
    tree = _tree_of(plan["test"], plan["token"])
    names = load(plan["code"], "solution") | {"__name__": "__main__"}
    used = "solution" in plan["test"] or any(name in names for name in free_names(plan["test"]))
    return _verdict(plan.pop("sign"), _execute(tree, names), types.SimpleNamespace(used=used))


def _verdict(sign: str, tests: object, response: Any) -> Any:
    """A pass. `sign`: a random text. While the tests run, only the stack of their caller has it: neither a variable nor
    the garbage collector leads to it."""
    return {"sign": sign, "used": response.used}


def _execute(tree: ast.Module, scope: dict[str, Any]) -> object:
    """Run tests, then the functions in them that pytest would find, that need no arguments and that they do not use."""
    exec(compile(tree, "tests.py", "exec"), scope)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names = [name for name in scope if name.startswith("test") and name not in used]
    functions = [scope[name] for name in names if hasattr(scope[name], "__code__")]
    return [one() for one in functions if one.__code__.co_filename == "tests.py" and not one.__code__.co_argcount]


def free_names(source: str) -> list[str]:
    """The names that tests use without defining them: those of the response. If they use only names of Python itself
    and do not import the response, the one that they call, such as `sum`, is the response's; with several, it is
    unknown which."""
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
    nodes = list(ast.walk(ast.parse(source)))
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    imported |= {one.name for node in nodes if isinstance(node, ast.Import) for one in node.names}
    if free or "solution" in imported:
        return free
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    called = {call.id for call in calls if isinstance(call, ast.Name) and call.id not in bound}
    return list(called) if len(called) == 1 else []


class CodeUnderTest:
    """The response, in the process of the tests."""

    def __init__(self, channel: Any) -> None:
        self._channel, self.used = channel, False

    def find(self, name: str) -> Any:
        """A value or a function. Raises: `AttributeError` if the response has neither."""
        found = {} if name.startswith("__") else self._ask({"look": name})
        if not found:
            raise AttributeError(name)
        return found["value"] if "value" in found else self.function(name)

    def function(self, name: str) -> Any:
        call: Any = partial(self._call, name, False)
        call.__name__, call.in_place = name, partial(self._call, name, True)
        return call

    def _call(self, name: str, in_place: bool, /, *arguments: Any, **keywords: Any) -> Any:
        given = {"args": plain(list(arguments)), "kwargs": plain(keywords), "in_place": in_place}
        reply = self._ask({"call": name, **given})
        for ours, theirs in zip((*arguments, *keywords.values()), reply["arguments"], strict=False):
            if isinstance(ours, list | bytearray):
                ours[:] = theirs
            elif isinstance(ours, dict | set):
                ours.clear()
                ours.update(theirs)
        return reply["value"]

    def items(self, stream: int) -> Iterator[Any]:
        """The items of an iterator of the response, each when it is needed."""
        while "value" in (reply := self._ask({"next": stream})):
            yield reply["value"]

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply of the response. If there is none, ends this process: no test may catch that. Raises: what the
        response raised."""
        try:
            self._channel.send(request)
            reply = self._channel.receive()
            reply |= {name: value_of(reply[name]) for name in ("value", "arguments") if name in reply}
        except Exception:
            os._exit(1)
        self.used = self.used or "look" not in request or "value" in reply
        if "raised" in reply:
            raise _exception_of(reply)
        return dict(reply)


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


class _InPlace(ast.NodeTransformer):
    """Lets a call whose result is not used change the test's arguments, as the response changes its copies. Other calls
    leave them alone: their result may be compared with a value that is made of the arguments."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        if isinstance(node.value, ast.Call):
            node.value.func = ast.Call(ast.Name(IN_PLACE, ast.Load()), [node.value.func], [])
        return node


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

ROLES: dict[str, Callable[[dict[str, Any], Any], Any]] = {
    "program": run_program,
    "serve": serve,
    "tests": run_tests,
    "together": run_together,
}


def run(plan: dict[str, Any], channel: Any) -> None:
    """Play the role that the plan names, write a verdict to standard output, and end this process."""
    output = os.dup(1)
    if plan["role"] != "program":
        os.dup2(2, 1)  # what tests print goes nowhere
    try:
        sys.set_int_max_str_digits(0)
        verdict = ROLES[plan["role"]](plan, channel)
    except BaseException:
        os._exit(1)
    os.write(output, json.dumps(verdict).encode())
    os._exit(0)


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
    verdict = None
    try:
        sys.set_int_max_str_digits(0)
        verdict = ROLES[plan["role"]](plan, channel)
    except BaseException:
        verdict = None
    tell({"verdict": verdict, "sent": channel.sent})
