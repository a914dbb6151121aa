"""The user's prompts: rows of a JSONL or Parquet file, and the order in which a run draws them.

Called by whoever draws prompts for a run (the executors) and by validation. Reads files only while loading; never skips
a bad row silently; never draws from hidden random state: draw i of a seed is the same row in every process.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError, suggestion
from engine.trajectory import Prompt

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet", ".pq")


class Dataset:
    """Rows of one file, each a prompt and the fields its reward needs. Checked whole when loaded, decoded row by row.

    A row's prompt is the string under `prompt_field`. A chat is a list of `{"role", "content"}` under `prompt_field` or
    under `messages`: it becomes `fields["messages"]`, and `text` is the content of its last message.
    """

    def __init__(self, path: str, rows: "Rows", prompt_field: str) -> None:
        self.path = path
        self.prompt_field = prompt_field
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def prompt(self, row: int) -> Prompt:
        """The row as a prompt. Raises IndexError outside [0, len)."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} does not exist: the data set has {len(self)} rows, counted from 0")
        fields = self._rows.read(row)
        text = fields.pop(self.prompt_field, None)
        if isinstance(text, str):
            return Prompt(row=row, text=text, fields=fields)
        messages = fields["messages"] if text is None else text
        fields["messages"] = messages
        return Prompt(row=row, text=messages[-1]["content"], fields=fields)

    @classmethod
    def load(cls, path: str | Path, *, prompt_field: str = "prompt", config_field: str = "data.path") -> "Dataset":
        """Read a file whole. `config_field` is the configuration key that a `ConfigError` names."""
        file = Path(path).expanduser()
        if not file.exists():
            raise ConfigError(config_field, str(path), "does not exist", _nearest_file(file))
        if not file.is_file():
            raise ConfigError(config_field, str(path), "is not a file", "give one JSONL or Parquet file")
        if file.suffix in JSONL_SUFFIXES:
            rows: Rows = _load_jsonl(file, prompt_field, config_field)
        elif file.suffix in PARQUET_SUFFIXES:
            rows = _load_parquet(file, prompt_field, config_field)
        else:
            known = " or ".join((*JSONL_SUFFIXES, *PARQUET_SUFFIXES))
            law = f"has an unknown suffix {file.suffix!r}"
            raise ConfigError(config_field, str(path), law, f"use a file that ends in {known}")
        if len(rows) == 0:
            raise ConfigError(config_field, str(path), "has no rows", "add at least one row with a prompt")
        return cls(str(file), rows, prompt_field)


class Rows(Protocol):
    """Rows by number, decoded when asked for."""

    def __len__(self) -> int: ...

    def read(self, row: int) -> dict[str, Any]: ...


class JsonLines:
    """Keeps the raw lines, which are several times smaller than their decoded rows."""

    def __init__(self, lines: list[bytes]) -> None:
        self.lines = lines

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, row: int) -> dict[str, Any]:
        decoded: dict[str, Any] = json.loads(self.lines[row])
        return decoded


class TableRows:
    """Keeps the Arrow table."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def read(self, row: int) -> dict[str, Any]:
        decoded: dict[str, Any] = self.table.slice(row, 1).to_pylist()[0]
        return decoded


def _nearest_file(file: Path) -> str:
    if not file.parent.is_dir():
        return f"there is no directory {str(file.parent)!r} either"
    there = sorted(path.name for path in file.parent.iterdir())
    return suggestion(
        file.name, there, "give a JSONL or Parquet file that exists", prefix=str(file).removesuffix(file.name)
    )


def _load_jsonl(file: Path, prompt_field: str, config_field: str) -> "JsonLines":
    lines: list[bytes] = []
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
                where = f"line {number} is not valid JSON ({error})"
                raise ConfigError(config_field, str(file), where, "write one JSON object per line") from error
            if not isinstance(row, dict):
                where = f"line {number} is a JSON {type(row).__name__}"
                raise ConfigError(config_field, str(file), where, "write one JSON object per line")
            _check_prompt(row, f"line {number}", file, prompt_field, config_field)
            lines.append(line)
    return JsonLines(lines)


def _load_parquet(file: Path, prompt_field: str, config_field: str) -> "TableRows":
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(config_field, str(file), f"is not a readable Parquet file ({error})") from error
    names = [name for name in (prompt_field, "messages") if name in table.column_names]
    if not names:
        _missing_prompt(table.column_names, "the table", file, prompt_field, config_field)
    for number, row in enumerate(_rows_of(table.select(names)), start=1):
        _check_prompt(row, f"row {number}", file, prompt_field, config_field)
    return TableRows(table)


def _rows_of(table: Any) -> Iterable[Mapping[str, Any]]:
    for batch in table.to_batches(max_chunksize=4096):
        yield from batch.to_pylist()


def _check_prompt(row: Mapping[str, Any], where: str, file: Path, prompt_field: str, config_field: str) -> None:
    prompt = row.get(prompt_field)
    if isinstance(prompt, str) and prompt:
        return
    name = prompt_field
    if prompt is None and row.get("messages") is not None:
        name, prompt = "messages", row["messages"]
    elif prompt is None and name not in row:
        _missing_prompt(list(row), where, file, prompt_field, config_field)
    if _is_chat(prompt):
        return
    found = "empty" if prompt in ("", []) else f"{type(prompt).__name__} {prompt!r:.60}"
    law = f"{where}: {name!r} is {found}"
    raise ConfigError(config_field, str(file), law, 'use a non-empty string, or a list of {"role", "content"} messages')


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
        )
    )


def _missing_prompt(names: Sequence[str], where: str, file: Path, prompt_field: str, config_field: str) -> None:
    shown = ", ".join(repr(name) for name in names[:12]) or "none"
    fix = f"set data.prompt_field to one of {shown} {suggestion(prompt_field, names)}".strip()
    raise ConfigError(config_field, str(file), f"{where} has neither {prompt_field!r} nor 'messages'", fix)


class Draw(NamedTuple):
    """Which row a draw is, and in which pass over the data set."""

    epoch: int
    row: int


class PromptSource:
    """The order of draws: every epoch is a fresh permutation of all rows, a pure function of (seed, epoch).

    Without `shuffle` every epoch is the file from top to bottom. Draw i is the prompt of group i. `total` is None where
    `epochs` is None: then the source never ends.
    """

    def __init__(self, dataset: Dataset, *, seed: int, epochs: int | None = None, shuffle: bool = True) -> None:
        if not 0 <= seed < 2**64:
            raise ConfigError("run.seed", seed, "must be a whole number from 0 to 2**64 - 1", "for example 0")
        if epochs is not None and epochs < 1:
            raise ConfigError("data.epochs", epochs, "must be at least 1", "use 1, or null for no limit")
        self.dataset = dataset
        self.seed = seed
        self.epochs = epochs
        self.shuffle = shuffle
        self._permutations: dict[int, NDArray[np.int64]] = {}

    @property
    def total(self) -> int | None:
        """Draws until the source is empty."""
        return None if self.epochs is None else self.epochs * len(self.dataset)

    def draw(self, number: int) -> Draw:
        """Epoch and row of a draw. Raises IndexError past `total`."""
        if number < 0 or (self.total is not None and number >= self.total):
            raise IndexError(f"draw {number} does not exist: the data source has {self.total} draws, counted from 0")
        epoch, place = divmod(number, len(self.dataset))
        if not self.shuffle:
            return Draw(epoch, place)
        return Draw(epoch, int(self._permutation(epoch)[place]))

    def prompt(self, number: int) -> Prompt:
        """The prompt of a draw."""
        return self.dataset.prompt(self.draw(number).row)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._permutations:
            # Resumed and retried groups reach back over an epoch's border, seldom further.
            while len(self._permutations) >= 2:
                del self._permutations[min(self._permutations)]
            self._permutations[epoch] = self._shuffled(epoch)
        return self._permutations[epoch]

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        # Raw Philox words, sorted: unlike Generator.permutation, numpy promises them never to change with its version.
        key = np.array([self.seed, epoch], dtype=np.uint64)
        return np.argsort(np.random.Philox(key=key).random_raw(len(self.dataset)), kind="stable")
