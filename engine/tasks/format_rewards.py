"""Rewards for the form of a response: a regular expression, and JSON that matches a schema.

Named in `reward.functions`. Both end in bounded time: the `regex` package stops a search that takes too long, and
schemas, whose patterns run in `re` and hold the GIL, are checked in a separate process. A schema cannot fetch another
one from an address.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from engine.errors import DataFailure
from engine.extras import install_command
from engine.tasks.reward_forms import Problem, declare
from engine.tasks.rewards import column_of
from engine.trajectory import NoAnswer, Prompt, Trajectory

_BLOCK = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)

# -- regular expressions -----------------------------------------------------------------------------------------------


def _check_pattern(*, pattern: str = "", whole: bool = False, limit_s: float = 1.0) -> Problem:
    try:
        import regex
    except ImportError:
        return "pattern", "needs the package regex, which is not installed", install_command("rewards")
    if not isinstance(pattern, str) or not pattern:
        return "pattern", "must be a regular expression", r"for example <answer>.*</answer>"
    try:
        regex.compile(pattern)
    except regex.error as error:
        return "pattern", f"is not a regular expression: {error}", "correct it"
    if type(limit_s) not in (int, float) or not 0 < limit_s <= 3600:
        return "limit_s", "must be a number of seconds above 0, 3600 at most", "use 1.0"
    return None


@declare(check=_check_pattern)
def regular_expression(
    prompt: Prompt, trajectory: Trajectory, *, pattern: str, whole: bool = False, limit_s: float = 1.0
) -> float:
    """1.0 if `pattern` matches somewhere in the response, or with `whole` all of it. `.` matches line ends, too.

    Raises: `DataFailure` if the search takes longer than `limit_s`: the pattern backtracks too much."""
    import regex

    compiled = regex.compile(pattern, regex.DOTALL)
    search = compiled.fullmatch if whole else compiled.search
    try:
        return float(search(trajectory.text, timeout=limit_s, concurrent=True) is not None)
    except TimeoutError:
        size = len(trajectory.text)
        law = f"the pattern {pattern!r:.80} took longer than {limit_s:g} s on a response of {size} characters"
        raise DataFailure(f"{law}; use one that backtracks less", row=prompt.row) from None


# -- JSON --------------------------------------------------------------------------------------------------------------


def _check_schema(*, schema: Mapping[str, Any] | None = None, column: str = "schema") -> Problem:
    try:
        import jsonschema
    except ImportError:
        return "schema", "needs the package jsonschema, which is not installed", install_command("rewards")
    if schema is None:
        return None
    try:
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except (jsonschema.SchemaError, TypeError, AttributeError) as error:
        return "schema", f"is not a JSON schema: {getattr(error, 'message', error)}", "correct it"
    return None


@declare(processes=1, check=_check_schema)
def json_schema(
    prompt: Prompt, trajectory: Trajectory, *, schema: Mapping[str, Any] | None = None, column: str = "schema"
) -> float:
    """1.0 if the response is JSON that matches `schema`, or the schema in the row's column. The JSON is the last
    block between ``` lines, else the whole response, each without the thoughts before `</think>`.

    Raises: `DataFailure` if the row has no schema, or one that cannot be used."""
    import jsonschema
    import referencing

    wanted = _schema_of(prompt, column) if schema is None else schema
    said = trajectory.text.rpartition("</think>")[2]
    blocks = _BLOCK.findall(said)
    try:
        value = json.loads(blocks[-1] if blocks else said, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return NoAnswer()
    try:
        kind = jsonschema.validators.validator_for(wanted, default=jsonschema.Draft202012Validator)
        validator = kind(wanted, registry=referencing.Registry())  # an empty one: it fetches nothing
        return float(validator.is_valid(value))
    except RecursionError:
        return 0.0
    except Exception as error:
        law = f"the schema of row {prompt.row} cannot be used: {type(error).__name__}: {error}"
        raise DataFailure(law[:1000], row=prompt.row) from error


def _schema_of(prompt: Prompt, column: str) -> Any:
    found = column_of(prompt, column)
    if not isinstance(found, str):
        return found
    try:
        return json.loads(found)
    except ValueError as error:
        law = f"the column {column!r} of row {prompt.row} is not JSON: {error}"
        raise DataFailure(law, row=prompt.row) from error


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
