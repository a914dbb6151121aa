"""Mutants of a source file: small changes that a test should notice. Used by `make mutants`.

Never drawn is what cannot change behavior: annotations, docstrings, decorators, `__all__`, `__slots__`, assertions, log
calls, the text of errors, `__repr__`.
"""

import ast
import copy
import difflib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARED: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}  # fmt: skip
COMPUTED: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
RENAMED = {"min": "max", "max": "min", "any": "all", "all": "any"}
LOGGERS = {"log", "logger", "logging", "warnings", "print"}
UNTESTED_CALLS = {*LOGGERS, "cast", "TypeVar", "assert_never"}
UNTESTED_NAMES = {"__all__", "__slots__", "__repr__", "__str__"}


@dataclass(frozen=True)
class Mutant:
    """One change of one file. `start` and `end` are byte offsets."""

    file: str
    kind: str
    lines: tuple[int, int]
    start: int
    end: int
    text: str
    at_import: bool  # the lines run when the file is imported

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def diff(self, source: bytes) -> str:
        before, after = source.decode().splitlines(), self.apply(source).decode().splitlines()
        lines = difflib.unified_diff(before, after, self.file, self.file, lineterm="", n=1)
        return "\n".join(lines)


def draw(root: Path, files: list[Path], count: int, seed: int) -> list[Mutant]:
    """As many mutants as asked for, at most one a line, in random order: the first of them are a fair sample."""
    mutants = [mutant for file in files for mutant in mutants_of(file.read_bytes(), str(file.relative_to(root)))]
    random.Random(seed).shuffle(mutants)
    lines: set[tuple[str, int]] = set()
    drawn: list[Mutant] = []
    for mutant in mutants:
        line = (mutant.file, mutant.lines[0])
        if len(drawn) < count and line not in lines and changes((root / mutant.file).read_bytes(), mutant):
            lines.add(line)
            drawn.append(mutant)
    return drawn


def changes(source: bytes, mutant: Mutant) -> bool:
    """Whether the mutant is Python, and another program than before."""
    try:
        return ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def mutants_of(source: bytes, file: str) -> list[Mutant]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Mutant] = []
    for node, at_import in walk(ast.parse(source), True):
        for kind, target, text in mutations(node, at_import):
            found.append(
                Mutant(
                    file=file,
                    kind=kind,
                    lines=(target.lineno, target.end_lineno),
                    start=starts[target.lineno - 1] + target.col_offset,
                    end=starts[target.end_lineno - 1] + target.end_col_offset,
                    text=text,
                    at_import=at_import,
                )
            )
    return found


def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[ast.AST, bool]]:
    """The nodes worth changing, and whether each runs at import."""
    if is_untested(node, at_import):
        return
    yield node, at_import
    untested = {"annotation", "returns", "decorator_list", "type_params", "bases", "exc" if called(node) else ""}
    for name, value in ast.iter_fields(node):
        if name in untested:
            continue
        inside = at_import and not (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and name == "body")
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from walk(child, inside and not (isinstance(node, ast.Lambda) and name == "body"))


def is_untested(node: ast.AST, at_import: bool) -> bool:
    match node:
        case ast.JoinedStr() | ast.Assert() | ast.Import() | ast.ImportFrom() | ast.Pass():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call() as call) if called(call) in UNTESTED_CALLS:
            return True
        case ast.Call() if called(node) in UNTESTED_CALLS:
            return True
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.FunctionDef(name=name) if name in UNTESTED_NAMES:
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.BinOp(op=ast.BitOr()) | ast.Subscript() if at_import:  # types
            return True
    return False


def called(node: ast.AST) -> str:
    """The first name of the function that an expression calls; of an error that is raised, too."""
    node = node.exc if isinstance(node, ast.Raise) and node.exc is not None else node
    node = node.func if isinstance(node, ast.Call) else ast.Pass()
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def mutations(node: ast.AST, at_import: bool) -> Iterator[tuple[str, ast.AST, str]]:
    """Kinds of change to a node, each with the node that it replaces and the text that does."""
    match node:
        case ast.expr():
            for kind, new in expressions(node):
                text = ast.unparse(new)
                yield kind, node, text if isinstance(new, ast.Constant | ast.Call) else f"({text})"
        case ast.Return(value=value) if value is not None and not is_empty(value):
            yield "return None", node, "return None"
        case ast.Break() | ast.Continue():
            yield "statement removed", node, "pass"
        case ast.Raise() | ast.AugAssign() | ast.Delete() if not at_import:
            yield "statement removed", node, "pass"
        case ast.Expr(value=ast.Call() | ast.Await()) if not at_import:
            yield "statement removed", node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement removed", node, "pass"
        case ast.comprehension(ifs=[test, *_]):
            yield "condition removed", test, "True"
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
        yield "condition negated", node.test, f"(not ({ast.unparse(node.test)}))"


def expressions(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                for other in COMPARED[type(operator)]:
                    ops = [*node.ops[:index], other(), *node.ops[index + 1 :]]
                    yield "comparison", ast.Compare(node.left, ops, node.comparators)
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and/or", ast.BoolOp(other, node.values)
            for index in range(len(node.values)):
                rest = [*node.values[:index], *node.values[index + 1 :]]
                yield "operand removed", ast.BoolOp(node.op, rest) if len(rest) > 1 else rest[0]
        case ast.BinOp() if type(node.op) in COMPUTED and not is_text(node.left) and not is_text(node.right):
            yield "arithmetic", ast.BinOp(node.left, COMPUTED[type(node.op)](), node.right)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "unary removed", node.operand
        case ast.IfExp():
            yield "branches swapped", ast.IfExp(node.test, node.orelse, node.body)
        case ast.Constant(value=bool()):
            yield "constant", ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield "constant", ast.Constant(node.value + 1)
            yield "constant", ast.Constant(node.value - 1)
        case ast.Call(func=ast.Name(id=name)) if name in RENAMED:
            yield "min/max", ast.Call(ast.Name(RENAMED[name]), node.args, node.keywords)
        case ast.Call(args=[first, second, *rest]) if not isinstance(first, ast.Starred) and plain(second):
            yield "arguments swapped", ast.Call(node.func, [second, first, *rest], node.keywords)
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg == "reverse":
                yield "order reversed", without(node, keyword)


def without(call: ast.Call, keyword: ast.keyword) -> ast.Call:
    new = copy.copy(call)
    new.keywords = [each for each in call.keywords if each is not keyword]
    return new


def plain(node: ast.expr) -> bool:
    return isinstance(node, ast.Name | ast.Attribute)


def is_empty(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in (None, False)


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
