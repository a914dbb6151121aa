"""What `make mutants` draws: every mutant is another program, and nothing that cannot matter is drawn."""

import ast

from tests.mutants.draw import changes, mutants_of

SOURCE = b'''"""Text 1."""
from typing import TYPE_CHECKING
__all__ = ["f"]
if TYPE_CHECKING:
    X = 1 + 1

@cache(1 + 1)
def f(a: "1 < 2", b=3) -> "int | None":
    """Text 2."""
    log.info("text", 1 + 1)
    assert a > 1
    if a < b and not a:
        raise ValueError(f"text {a + 1}")
    self.x = min(a, b)  # caf\xc3\xa9
    return [x for x in "\xc3\xa9" if x == b]
'''


def test_what_cannot_matter_is_not_drawn() -> None:
    drawn = [(mutant.lines[0], mutant.kind, mutant.text) for mutant in mutants_of(SOURCE, "f.py")]
    assert sorted(drawn) == [
        (8, "constant", "2"),
        (8, "constant", "4"),
        (12, "and/or", "(a < b or not a)"),
        (12, "comparison", "(a <= b)"),
        (12, "comparison", "(a >= b)"),
        (12, "condition negated", "(not (a < b and (not a)))"),
        (12, "operand removed", "(a < b)"),
        (12, "operand removed", "(not a)"),
        (12, "unary removed", "(a)"),
        (13, "statement removed", "pass"),
        (14, "min/max", "max(a, b)"),
        (14, "statement removed", "pass"),
        (15, "comparison", "(x != b)"),
        (15, "condition removed", "True"),
        (15, "return None", "return None"),
    ]


def test_each_mutant_is_another_program_with_one_line_changed() -> None:
    for mutant in mutants_of(SOURCE, "f.py"):
        assert changes(SOURCE, mutant)
        ast.parse(mutant.apply(SOURCE))
        removed = [line for line in mutant.diff(SOURCE).splitlines()[2:] if line.startswith("-")]
        assert len(removed) == 1
