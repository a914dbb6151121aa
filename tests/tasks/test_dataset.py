"""Data sets: what a user's file may look like, how a bad one is reported, and the order in which rows are drawn."""

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from engine.errors import ConfigError
from engine.tasks.dataset import Dataset, Draw, PromptSource

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]


GOLDEN = [4, 1, 6, 3, 2, 7, 5, 0, 3, 1, 6, 2, 5, 4, 0, 7]
"""The first two epochs of eight rows under seed 7."""


def jsonl(directory: Path, *rows: Any, name: str = "rows.jsonl") -> Path:
    file = directory / name
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return file


def refused(path: Path | str, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Dataset.load(path, **options)
    return caught.value


def numbered(directory: Path, size: int) -> Dataset:
    return Dataset.load(jsonl(directory, *({"prompt": f"p{i}"} for i in range(size))))


def test_jsonl_rows_become_prompts(tmp_path: Path) -> None:
    file = jsonl(tmp_path, {"prompt": "a", "answer": 1}, "", {"prompt": "ü", "tags": ["x"]})
    data = Dataset.load(file)
    assert len(data) == 2
    assert (data.prompt(0).row, data.prompt(0).text, data.prompt(0).fields) == (0, "a", {"answer": 1})
    assert (data.prompt(1).row, data.prompt(1).text, data.prompt(1).fields) == (1, "ü", {"tags": ["x"]})
    with pytest.raises(IndexError):
        data.prompt(2)


def test_a_byte_order_mark_and_another_prompt_field_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "rows.ndjson"
    file.write_bytes(b"\xef\xbb\xbf" + b'{"question": "q", "prompt": "not this one"}\n')
    prompt = Dataset.load(file, prompt_field="question").prompt(0)
    assert prompt.text == "q" and prompt.fields == {"prompt": "not this one"}


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_chats_keep_their_messages(tmp_path: Path, field: str) -> None:
    prompt = Dataset.load(jsonl(tmp_path, {field: CHAT, "answer": "4"})).prompt(0)
    assert prompt.text == "2+2?" and prompt.fields == {"messages": CHAT, "answer": "4"}


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_chats_keep_their_tools_calls_and_parts(tmp_path: Path, tools: Any) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    chat = [CHAT[1], {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": parts}]
    prompt = Dataset.load(jsonl(tmp_path, {"messages": chat, "tools": tools})).prompt(0)
    assert prompt.text == "2+2?" and prompt.fields == {"messages": chat, "tools": [TOOL]}


def test_chats_of_a_table_have_no_filled_in_nulls(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"messages": [CHAT]}), file)
    assert Dataset.load(file).prompt(0).fields == {"messages": CHAT}
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    pyarrow.parquet.write_table(pyarrow.table({"messages": [[*CHAT, called]], "other": [[{"a": 1}, {"b": 2}]]}), file)
    fields = Dataset.load(file).prompt(0).fields
    assert fields["messages"] == [*CHAT, {"role": "assistant", "tool_calls": called["tool_calls"]}], (
        "no filled-in nulls"
    )
    assert fields["other"] == [{"a": 1, "b": None}, {"a": None, "b": 2}], "as the file has it"


def test_missing_files_are_named_with_the_nearest(tmp_path: Path) -> None:
    jsonl(tmp_path, {"prompt": "a"}, name="train.jsonl")
    error = refused(tmp_path / "trian.jsonl", config_field="data.validation_path")
    assert error.details["field"] == "data.validation_path"
    assert error.details["law"] == "does not exist" and "train.jsonl" in error.details["fix"]
    assert refused(tmp_path / "nofile.jsonl").details["fix"] == "give a file that exists"
    assert "does not exist either" in refused(tmp_path / "nowhere" / "x.jsonl").details["fix"]
    assert f"use {tmp_path}/*.jsonl for all its files" in str(refused(tmp_path))
    (tmp_path / "rows.txt").write_text("prompt\n")
    assert "unknown suffix '.txt'" in str(refused(tmp_path / "rows.txt"))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "has no rows"),
        (["", "  "], "has no rows"),
        ([{"prompt": "a"}, "", '{"prompt": "b"'], "line 3 cannot be read as JSON"),
        (['[{"prompt": "a"}]'], "line 1 is a JSON list"),
        ([{"prompt": "a"}, {"promt": "b"}], "line 2 has neither 'prompt' nor 'messages'"),
        ([{"promt": "a", "answer": 1}], "data.prompt_field to one of 'promt', 'answer'; did you mean promt?"),
        ([{"prompt": None}], "line 1: 'prompt' is NoneType None"),
        ([{"prompt": ""}], "line 1: 'prompt' is empty"),
        ([{"prompt": 7}], "line 1: 'prompt' is int 7"),
        ([{"messages": []}], "line 1: 'messages' is empty"),
        ([{"messages": [{"role": "user"}]}], "line 1: message 1 of 'messages' has no text under 'content'"),
        ([{"messages": [{"role": "user", "contents": "a"}]}], "no text under 'content' (did you mean contents?)"),
        (
            [{"messages": [CHAT[1], {"from": "user", "content": "a"}]}],
            "message 2 of 'messages' has no text under 'role'",
        ),
        ([{"messages": [CHAT[1], "b"]}], "line 1: message 2 of 'messages' is str 'b'"),
        ([{"messages": [{"role": "user", "content": [{"type": "image"}]}]}], "has a part of type 'image'; only parts"),
        ([{"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}], "'tool_calls' that are not a list"),
        ([{"prompt": "a"}, {"messages": CHAT}], "line 2 is a list of messages, but line 1 is a text"),
        ([{"prompt": "a", "messages": CHAT}], "line 1 has both 'prompt' and 'messages'"),
        ([{"messages": CHAT, "tools": "calculator"}], "line 1: 'tools' is str 'calculator'"),
    ],
)
def test_bad_rows_are_refused_by_line(tmp_path: Path, rows: list[Any], said: str) -> None:
    assert said in str(refused(jsonl(tmp_path, *rows)))


def test_columns_with_values_of_two_types_are_refused_with_both_lines(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a"},
        {"prompt": "b", "answer": "1"},
        {"prompt": "c", "answer": None},
        {"prompt": "d", "answer": 2},
    ]
    said = "line 4: its column 'answer' has numbers, but that of line 2 has texts"
    assert said in str(refused(jsonl(tmp_path, *rows)))
    mixed = [{"prompt": "a", "answer": 1, "tools": []}, {"prompt": "b", "answer": 2.5, "tools": "[]"}]
    assert len(Dataset.load(jsonl(tmp_path, *mixed))) == 2, "both are numbers; tools may be JSON"


def test_columns_without_a_value_in_some_rows_are_reported(tmp_path: Path) -> None:
    first = jsonl(tmp_path, {"prompt": "a", "answer": "1", "id": 1}, {"prompt": "b", "answer": "", "id": 2})
    second = jsonl(tmp_path, {"prompt": "c", "id": 3}, "", {"prompt": "d", "answer": "4", "id": None}, name="b.jsonl")
    assert Dataset.load(jsonl(tmp_path, {"prompt": "a", "answer": "1"}, name="c.jsonl")).gaps == ()
    assert list(map(str, Dataset.load([first, second]).gaps)) == [
        f"column 'answer' has no value in 2 of 4 rows, the first in line 2 of {first}",
        f"column 'id' has no value in 1 of 4 rows, the first in line 3 of {second}",
    ]
    table = pyarrow.table({"prompt": ["a", "b", "c"], "answer": ["1", None, ""], "n": [None, 1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert [(gap.column, gap.missing, gap.first) for gap in Dataset.load(tmp_path / "rows.parquet").gaps] == [
        ("answer", 2, "row 1"),
        ("n", 1, "row 0"),
    ]
    (tmp_path / "rows.csv").write_text("prompt,answer\na,1\nb,\n")
    assert [gap.first for gap in Dataset.load(tmp_path / "rows.csv").gaps] == ["line 3"]


def test_bad_text_and_bad_parquet_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    assert "line 2 cannot be read as JSON" in str(refused(tmp_path / "latin.jsonl"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    assert "not a readable Parquet file" in str(refused(tmp_path / "broken.parquet"))
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), file)
    assert "neither 'prompt' nor 'messages'" in str(refused(file))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", None]}), file)
    assert "row 1: 'prompt' is NoneType" in str(refused(file))


def test_every_epoch_is_another_permutation_of_all_rows(tmp_path: Path) -> None:
    source = PromptSource(numbered(tmp_path, 23), seed=5, epochs=3)
    assert source.total == 69
    draws = [source.draw(i) for i in range(69)]
    epochs = [[d.row for d in draws if d.epoch == e] for e in range(3)]
    assert all(sorted(rows) == list(range(23)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 3 and list(range(23)) not in epochs
    assert Counter(source.prompt(i).text for i in range(69)) == {f"p{i}": 3 for i in range(23)}
    for outside in (-1, 69):
        with pytest.raises(IndexError):
            source.draw(outside)


def test_draws_depend_on_nothing_but_seed_and_number(tmp_path: Path) -> None:
    data = numbered(tmp_path, 17)
    forward = PromptSource(data, seed=1)
    rows = [forward.draw(i) for i in range(85)]
    backward = PromptSource(data, seed=1)
    assert [backward.draw(i) for i in reversed(range(85))] == rows[::-1]
    assert [PromptSource(data, seed=2).draw(i) for i in range(85)] != rows
    assert forward.total is None


def test_the_order_of_a_seed_never_changes(tmp_path: Path) -> None:
    """Written down once: a run resumed under a newer release must draw the same rows."""
    source = PromptSource(numbered(tmp_path, 8), seed=7)
    assert [source.draw(i).row for i in range(16)] == GOLDEN


def test_a_part_of_a_data_set_keeps_the_row_numbers(tmp_path: Path) -> None:
    part = numbered(tmp_path, 5).only([1, 4])
    assert len(part) == 2 and [part.prompt(i).row for i in range(2)] == [1, 4] and part.prompt(1).text == "p4"


def test_without_shuffling_rows_come_in_file_order(tmp_path: Path) -> None:
    source = PromptSource(numbered(tmp_path, 3), seed=7, epochs=2, shuffle=False)
    assert [source.draw(i) for i in range(6)] == [Draw(e, r) for e in range(2) for r in range(3)]


def test_a_source_remembers_few_epochs_and_pickles(tmp_path: Path) -> None:
    source = PromptSource(numbered(tmp_path, 4), seed=0)
    rows = [source.draw(i) for i in range(400)]
    assert len(source._permutations) <= 2
    assert [source.draw(i) for i in range(400)] == rows
    copy = pickle.loads(pickle.dumps(source))
    assert [copy.prompt(i) for i in range(9)] == [source.prompt(i) for i in range(9)]
