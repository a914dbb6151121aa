"""The pages that docs/reference.py writes: every field of a configuration and every command."""

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic.fields import FieldInfo

from engine.cli import main
from engine.config.schema import Config

DOCS = Path(__file__).resolve().parent.parent / "docs"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def page(name: str) -> str:
    return (DOCS / "reference" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["CONFIG.md", "COMMANDS.md", "MIGRATION.md", "REQUESTS.md"])
def test_a_page_of_the_reference_is_what_the_code_says_now(name: str) -> None:
    assert page(name) == load().PAGES[name](), f"docs/reference/{name} is stale: run python docs/reference.py"


def fields_below(node: Any, definitions: Any) -> Iterator[str]:
    """The name of every field in a JSON schema, wherever the sections are: in lists, in choices, alone."""
    for text in re.findall(r'"#/\$defs/(\w+)"', json.dumps(node)):
        for name, field in definitions[text]["properties"].items():
            yield name
            yield from fields_below(field, definitions)


def test_every_field_of_a_configuration_is_in_the_reference() -> None:
    schema = Config.model_json_schema()
    wanted = sorted(fields_below(schema["properties"], schema["$defs"]))
    assert len(wanted) > 250
    assert sorted(re.findall(r"^\| `(\w+)`", page("CONFIG.md"), re.MULTILINE)) == wanted


def test_every_command_is_in_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    named = re.findall(r"^    (\w+)", capsys.readouterr().out.partition("commands:")[2], re.MULTILINE)
    assert len(named) > 20
    assert re.findall(r"^## engine (\w+)$", page("COMMANDS.md"), re.MULTILINE) == named


def test_an_example_is_a_value_that_the_field_accepts() -> None:
    field = FieldInfo.from_annotated_attribute(int, FieldInfo(default=6, ge=5, le=7))
    written: list[Any] = [{"a": {"b": "text"}}, {"a": {"b": 4}}, {"a": {"b": 5}}]
    assert load().example_of("a.b", field, 6, written) == 5


def test_a_field_of_which_no_example_is_known_is_named() -> None:
    with pytest.raises(LookupError, match=r"no example of run\.place is known"):
        load().example_of("run.place", FieldInfo(annotation=str), "here", [{"run": {"place": None}}])
