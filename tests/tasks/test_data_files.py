"""Files of prompts in every format, alone and together, and how a bad one is reported."""

import json
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from engine.errors import ConfigError
from engine.tasks.dataset import Dataset

ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": "b, c", "answer": "2"}]


def saved(directory: Path, rows: list[dict[str, Any]], files: int = 1) -> Path:
    """A directory as `datasets.Dataset.save_to_disk` writes it."""
    directory.mkdir()
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    for number, name in enumerate(names):
        table = pyarrow.Table.from_pylist(rows[number::files])
        with pyarrow.OSFile(str(directory / name), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train", "_format_type": None}
    (directory / "state.json").write_text(json.dumps(state))
    (directory / "dataset_info.json").write_text("{}")
    return directory


def written(directory: Path, form: str, rows: list[dict[str, Any]] = ROWS, name: str = "rows") -> Path:
    file = directory / f"{name}.{form}"
    if form == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "json":
        file.write_text(json.dumps(rows, indent=2))
    elif form in ("csv", "tsv"):
        mark = "," if form == "csv" else "\t"
        lines = [mark.join(rows[0])] + [mark.join(f'"{value}"' for value in row.values()) for row in rows]
        file.write_text("\ufeff" + "\r\n".join(lines) + "\r\n\r\n", encoding="utf-8")
    elif form == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        return saved(directory / name, rows, files=2)
    return file


def refused(path: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Dataset.load(path, **options)
    return str(caught.value)


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "tsv", "parquet", "saved"])
def test_every_format_reads_the_same(tmp_path: Path, form: str) -> None:
    data = Dataset.load(written(tmp_path, form))
    prompts = [data.prompt(row) for row in range(len(data))]
    assert [(p.row, p.text, p.fields) for p in prompts] == [(0, "a", {"answer": "1"}), (1, "b, c", {"answer": "2"})]
    assert list(data.prompts()) == prompts


def test_a_csv_file_may_have_line_breaks_and_messages_in_its_cells(tmp_path: Path) -> None:
    chat = json.dumps([{"role": "user", "content": "2+2?"}]).replace('"', '""')
    (tmp_path / "rows.csv").write_text(f'messages,note\n"{chat}","two\nlines"\n')
    prompt = Dataset.load(tmp_path / "rows.csv").prompt(0)
    assert prompt.text == "2+2?" and prompt.fields["note"] == "two\nlines"


def test_lists_and_globs_number_their_rows_over_all_files(tmp_path: Path) -> None:
    for number, form in enumerate(("parquet", "jsonl", "csv")):
        written(tmp_path, form, [{"prompt": f"{form} {row}"} for row in range(2)], name=f"part{2 - number}")
    data = Dataset.load(str(tmp_path / "part*"))
    texts = [prompt.text for prompt in data.prompts()]
    assert texts == ["csv 0", "csv 1", "jsonl 0", "jsonl 1", "parquet 0", "parquet 1"], "by name"
    assert [data.prompt(row).text for row in range(6)] == texts and [p.row for p in data.prompts()] == list(range(6))
    listed = Dataset.load([str(tmp_path / "part2.parquet"), str(tmp_path / "part[01].*")])
    assert [prompt.text for prompt in listed.prompts()][:3] == ["parquet 0", "parquet 1", "csv 0"]
    assert [prompt.text for prompt in listed.only([4, 0]).prompts()] == ["jsonl 0", "parquet 0"]


def test_columns_get_new_names(tmp_path: Path) -> None:
    for form in ("jsonl", "parquet"):
        file = written(tmp_path, form, [{"problem": "a", "answer": "long", "final": "1"}])
        prompt = Dataset.load(file, columns={"problem": "prompt", "final": "answer"}).prompt(0)
        assert (prompt.text, prompt.fields) == ("a", {"answer": "1"})
        assert "has no column 'problm', which `columns` renames" in refused(file, columns={"problm": "prompt"})
        assert "did you mean problem?" in refused(file, columns={"problm": "prompt"})


BROKEN: dict[str, tuple[str, str, str]] = {
    "json": ("rows.json", '[\n {"prompt": "a"},\n {"prompt": }\n]', "line 3 cannot be read as JSON"),
    "json item": ("rows.json", '[{"prompt": "a"}, 7]', "row 1 is a JSON int"),
    "no prompt in a later line": (
        "rows.jsonl",
        '{"prompt": "a"}\n{"answer": "1"}\n',
        "line 2 has neither 'prompt' nor 'messages'; give it a prompt, as in line 1, or remove it",
    ),
    "half a character": ("rows.jsonl", '{"prompt": "a"}\n{"prompt": "\\ud83d"}\n', "line 2 cannot be read as JSON"),
    "half a character in a list": ("rows.json", '[{"prompt": "a", "answer": "\\udE00"}]', "row 0 cannot be read"),
    "number of 5000 digits": ("rows.jsonl", f'{{"prompt": "a", "answer": {"9" * 5000}}}', "line 1 cannot be read"),
    "number of 5000 digits in a list": ("rows.json", f"[{'9' * 5000}]", "the file cannot be read as JSON"),
    "short line": ("rows.csv", 'prompt,answer\na,1\n"b\nc"\nd,2\n', "line 3 has 1 field, but the header has 2"),
    "quote": ("rows.csv", 'prompt,answer\na,1\n"b"c,1\n', "line 3 is not valid CSV"),
    "open quote": ("rows.csv", 'prompt,answer\n"a,1\n', "line 2 is not valid CSV"),
    "twice": ("rows.csv", "prompt,prompt\na,1\n", "its header has the column 'prompt' twice"),
    "unnamed": ("rows.csv", "prompt,\na,1\n", "column 2 of its header is empty"),
    "empty cell": ("rows.csv", 'prompt,answer\na,1\n"",2\n', "line 3: 'prompt' is empty"),
    "no rows": ("rows.csv", "prompt,answer\n", "has no rows"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_with_its_line(tmp_path: Path, case: str) -> None:
    name, text, said = BROKEN[case]
    (tmp_path / name).write_text(text)
    assert said in refused(tmp_path / name)


@pytest.mark.parametrize("value", [datetime(2026, 1, 1), [{"price": Decimal("1.5")}]])
def test_a_column_of_dates_or_decimals_is_refused(tmp_path: Path, value: Any) -> None:
    file = written(tmp_path, "parquet", [{"prompt": "a", "answer": value}])
    assert "its column 'answer' has values of the type " in refused(file)


def test_a_later_file_is_corrected_by_its_own_rows(tmp_path: Path) -> None:
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    Path(files[0]).write_text('{"prompt": "a"}\n')
    Path(files[1]).write_text('{"prompt": "b"}\n{"answer": "1"}\n')
    assert "line 2 has neither 'prompt' nor 'messages'; give it a prompt, as in line 1, or remove it" in refused(files)


def test_text_that_is_not_utf_8_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"prompt\na\n\xff\n")
    assert "line 3 is not UTF-8" in refused(tmp_path / "rows.csv")


def test_directories_that_are_no_data_set_are_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert f"has the splits train, test; give the directory of one split: {tmp_path}/train" in refused(tmp_path)
    directory = saved(tmp_path / "train", ROWS)
    (directory / "data-00000-of-00001.arrow").write_bytes(b"ARROW1 and no more")
    assert "has a data file data-00000-of-00001.arrow that is not a readable Arrow stream" in refused(directory)
    (directory / "data-00000-of-00001.arrow").unlink()
    assert "lacks its data file data-00000-of-00001.arrow" in refused(directory)
    (directory / "state.json").write_text('{"_data_files": [{"filename": "../rows.arrow"}]}')
    assert "has a state.json without a list of data files" in refused(directory), "it names files beside it only"


def test_paths_that_match_nothing_or_one_file_twice_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "jsonl")
    assert "matches no file" in refused(str(tmp_path / "*.parquet"))
    assert "is named twice" in refused([str(file), str(tmp_path / "*.jsonl")])


def test_files_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    first = written(tmp_path, "jsonl", [{"prompt": "a", "answer": "1"}], name="a")
    second = written(tmp_path, "parquet", [{"prompt": "b", "answer": 2}], name="b")
    said = refused([str(first), str(second)])
    assert f"b.parquet' its column 'answer' has numbers, but that of {first} has texts" in said.replace(": its", " its")
    chat = written(tmp_path, "json", [{"messages": [{"role": "user", "content": "a"}]}], name="c")
    assert f"row 0 is a list of messages, but line 1 of {first} is a text" in refused([str(first), str(chat)])
