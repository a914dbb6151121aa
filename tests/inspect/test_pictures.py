"""The pictures of the docs that are drawn from simulated runs."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["modes.svg", "staleness.svg", "recovery.svg", "debug.svg", "top.svg"])
def test_a_picture_is_what_its_runs_draw_now(name: str) -> None:
    if name == "debug.svg":
        pytest.importorskip("textual")
    drawn = load().PICTURES[name]()
    stale = f"docs/img/{name} is stale: run python docs/pictures.py, and look at it"
    assert (DOCS / "img" / name).read_text(encoding="utf-8") == drawn, stale


def test_the_picture_of_a_report_is_of_the_present_page() -> None:
    drawn_from = load().source_of_report().encode()
    assert drawn_from in (DOCS / "img" / "report.png").read_bytes(), "run python docs/pictures.py, and look at it"


def test_help_and_an_unknown_name_draw_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for argument, code in (("--help", 0), ("nothing.svg", 2)):
        monkeypatch.setattr(sys, "argv", ["pictures.py", argument])
        with pytest.raises(SystemExit) as ended:
            load().main()
        assert ended.value.code == code
    shown = capsys.readouterr().out
    assert "report.png" in shown and "docs/img/" not in shown.partition("options:")[2]


def test_every_picture_of_the_program_is_on_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    assert [name for name in load().PICTURES if f"(img/{name})" not in pages] == []
