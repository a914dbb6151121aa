r"""Final answers in texts: the last number, the last `\boxed{...}`, the last letter of a choice, the last code.

The built-in rewards compare them, and the majority vote counts them. Nothing here knows a row's right answer.
"""

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation

from engine.trajectory import Prompt

# -- numbers and boxes -------------------------------------------------------------------------------------------------

_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-+−])?"  # after a digit, as in 10-12, a minus is not a sign
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\d.])\.\d+)"
)
_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|\s+([^\s{}$]+))")


def last_number(text: str) -> Decimal | None:
    """The last number, with or without a sign, commas between thousands, and a point."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", "").replace("−", "-"))
    except InvalidOperation:
        return None


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\fbox{...}`; the word after `\boxed ` without braces."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    if boxes[-1][1] is not None:
        return boxes[-1][1].rstrip(".,;:")
    start, depth = boxes[-1].end(), 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place]
    return None


# -- choices -----------------------------------------------------------------------------------------------------------

_ALONE = re.compile(r"(?<![\w'])([A-Z])(?![\w']|-\w)(?=(\s+[a-z]+)?)")
"""A letter on its own, and the word after it."""
_MARKED = re.compile(
    r"""
      [(\[{*"`]\s?([A-Z])\s?[)\]}*"`]                                       # (J), {J}, **J**
    | ^[ \t]*([A-Z])[ \t]*(?:[.):]|$)                                       # at the beginning of a line, or on its own
    | (?i:\b(?:answer|option|choice)\b(?:\s+is)?\W{0,6})([A-Z])(?![\w'])    # answer: J
    """,
    re.VERBOSE | re.MULTILINE,
)
"""Forms in which a letter is a choice, not a name such as that of a variable."""
_AFTER_A_CHOICE = frozenset(
    re.findall(
        r"\w+",
        "is was and or but because since as so for if when while although which would will can could must should does "
        "has seems appears fits holds works matches here only alone",
    )
)
"""Words that follow the name of a choice. After any other, `A` is an article."""
PLAIN_CHOICES = 8
"""If the number of choices is not known, letters from A to H count in every form, later ones only in marked forms."""
COLUMNS = ("choices", "options")


def choices_of(prompt: Prompt) -> int | None:
    """The number of choices in the row's column `choices` or `options`, a list or a mapping with a list `text`."""
    for name in COLUMNS:
        value = prompt.fields.get(name)
        listed = value.get("text") if isinstance(value, Mapping) else value
        if isinstance(listed, list | tuple) and 2 <= len(listed) <= 26:
            return len(listed)
    return None


def last_choice(text: str, choices: int | None) -> str | None:
    """The last letter of a choice, from A on. `choices`: their number; None if it is not known."""
    marked = {found.start(found.lastindex or 0) for found in _MARKED.finditer(text)}
    last = None
    for found in _ALONE.finditer(text):
        letter, word = found.groups()
        number = ord(letter) - ord("A")
        counts = number < (choices or PLAIN_CHOICES) or (choices is None and found.start() in marked)
        if counts and not _is_word(letter, word):
            last = letter
    return last


def _is_word(letter: str, next_word: str | None) -> bool:
    """Whether a letter is the article `A` or the pronoun `I`, going by the word after it."""
    if letter not in "AI" or next_word is None:
        return False
    return letter == "I" or next_word.strip() not in _AFTER_A_CHOICE


# -- code --------------------------------------------------------------------------------------------------------------

_PYTHON = re.compile(r"\W*i?py(thon)?[\d.]*\b", re.IGNORECASE)


def last_python(text: str) -> str | None:
    """The content of the last code block that is marked as Python, else of the last one without a mark. As in Markdown,
    a block ends at a line that is only a fence, or with the text. The closing fence may also end the last line."""
    blocks: dict[str, list[str]] = {}
    opening, lines, indent = "", list[str](), 0
    for line in text.split("\n"):
        before, fence, mark = _fence_in(line)
        alone = not before.strip()
        if not opening:
            python = _PYTHON.match(mark) is not None
            if fence and (alone or python):
                opening, lines, indent = fence, [], len(before) * alone
                blocks["python" if python else mark] = lines
            continue
        quoted = before.count("'") % 2 or before.count('"') % 2
        if fence.startswith(opening) and not mark and (len(before) < indent + 4 if alone else not quoted):
            opening, line = "", before
        lines.append(line[min(indent, len(line) - len(line.lstrip())) :])
    code = blocks.get("python", blocks.get(""))
    return None if code is None else "\n".join(code)


def _fence_in(line: str) -> tuple[str, str, str]:
    """The text before a fence, the fence, and its mark, which has no back quote. Without a regular expression: one that
    goes back would take minutes for a line of a thousand tildes."""
    text, quote, mark = line.rpartition("`")
    before = text.rstrip("`")
    fence = text[len(before) :] + quote
    if len(fence) < 3:
        before, fence, tail = mark.partition("~~~")
        before, mark = text + quote + before, tail.lstrip("~")
        fence += tail[: len(tail) - len(mark)]
    return before, fence, mark.strip()
