"""The user's prompts: rows of data files, and the order in which a run draws them.

Called by the executors, which draw prompts for a run, and by validation. Reads files only while loading; never skips a
bad row silently; never draws from hidden random state: draw i of a seed is the same row in every process.
"""

import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.errors import ConfigError, choice
from engine.input_identity import as_ids, row_ids
from engine.tasks.chat import content_of, problem_of, tools_of
from engine.tasks.data_files import MESSAGES, TOOLS, DataRows, Paths, TableRows, files_of, read_rows
from engine.trajectory import Prompt

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Dataset:
    """Rows of one or more files. Each has a prompt and the fields that its reward needs. All rows are checked at
    loading, and decoded one by one.

    A row's prompt is the string under `prompt_field`. A chat is a list of `{"role", "content"}` under `prompt_field` or
    under `messages`: it becomes `fields["messages"]`, and `text` is the content of its last message. The JSON schemas
    of its tools are under `tools`. All rows have the same kind of prompt. Rows are numbered from 0 over all files.
    """

    def __init__(
        self,
        path: str,
        rows: "Parts",
        prompt_field: str,
        chosen: Sequence[int] | None = None,
        columns: Mapping[str, str] | None = None,
        gaps: Sequence["Gap"] = (),
    ) -> None:
        """`chosen`: the rows of the data set; None: all. `columns`: new names of columns, by their names in the files.
        `gaps`: columns without a value in some rows of the files."""
        self.path = path
        self.prompt_field = prompt_field
        self.gaps = tuple(gaps)
        self._rows = rows
        self._chosen = chosen
        self._columns = dict(columns or {})

    def __len__(self) -> int:
        return len(self._rows) if self._chosen is None else len(self._chosen)

    def only(self, rows: Sequence[int]) -> "Dataset":
        """A part of the data set: these rows, in this order. Its prompts keep the row numbers that they have here."""
        chosen = rows if self._chosen is None else [self._chosen[row] for row in rows]
        return Dataset(self.path, self._rows, self.prompt_field, chosen, self._columns, self.gaps)

    @property
    def chats(self) -> bool:
        """Whether its prompts are lists of messages."""
        return bool(self.prompt(0).fields.get(MESSAGES))

    def prompt(self, row: int) -> Prompt:
        """The row as a prompt. Raises IndexError outside [0, len)."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} does not exist: the data set has {len(self)} rows, counted from 0")
        row = row if self._chosen is None else self._chosen[row]
        return self._to_prompt(row, self._rows.read(row))

    def ids(self) -> bytes:
        """The `row_ids` of its rows, as they are in the files."""
        ids = row_ids(self._rows.all())
        return ids if self._chosen is None else as_ids(ids)[self._chosen].tobytes()

    def prompts(self) -> Iterator[Prompt]:
        """Every prompt, in order. Much faster than `prompt` for the rows of a table."""
        if self._chosen is not None:
            yield from map(self.prompt, range(len(self)))
            return
        for row, fields in enumerate(self._rows.all()):
            yield self._to_prompt(row, fields)

    def _to_prompt(self, row: int, fields: dict[str, Any]) -> Prompt:
        if self._columns:
            fields = renamed(fields, self._columns)
        text = fields.pop(self.prompt_field, None)
        if fields.get(TOOLS) is not None:
            fields[TOOLS] = tools_of(fields[TOOLS])
        if isinstance(text, str):
            return Prompt(row=row, text=text, fields=fields)
        messages = fields[MESSAGES] if text is None else text
        fields[MESSAGES] = messages
        return Prompt(row=row, text=content_of(messages[-1]), fields=fields)

    @classmethod
    def load(
        cls,
        path: Paths,
        *,
        prompt_field: str = "prompt",
        config_field: str = "data.path",
        columns: Mapping[str, str] | None = None,
    ) -> "Dataset":
        """Read whole files. `config_field`: the configuration key that a `ConfigError` names. `columns`: new names of
        columns, by their names in the files; `prompt_field` is a new name."""
        check = _Check(prompt_field, config_field, dict(columns or {}))
        parts = [check.part(file) for file in files_of(path, config_field)]
        shown = str(path) if isinstance(path, str | Path) else ", ".join(map(str, path))
        if not any(map(len, parts)):
            raise ConfigError(config_field, shown, "has no rows", "add at least one row with a prompt")
        return cls(os.path.expanduser(shown), Parts(parts), prompt_field, columns=columns, gaps=check.gaps())


def renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A row with its columns under their new names. They replace columns that had these names."""
    new_names = {*columns.values()}
    unchanged = {name: value for name, value in row.items() if name not in columns and name not in new_names}
    return unchanged | {new: row[old] for old, new in columns.items() if old in row}


class Parts:
    """The rows of several files, numbered as if they were in one file."""

    def __init__(self, parts: Sequence[DataRows]) -> None:
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, row: int) -> dict[str, Any]:
        part = bisect_right(self._ends, row)
        return self._parts[part].read(row - (self._ends[part - 1] if part else 0))

    def all(self) -> Iterator[dict[str, Any]]:
        for part in self._parts:
            names = part.columns() or ()
            yield from (dict(row) for _, row in part.all(names))


# -- checks of a file --------------------------------------------------------------------------------------------------


class Gap(NamedTuple):
    """A column without a value in some rows: absent, null or an empty text."""

    column: str
    missing: int
    rows: int
    first: str
    """The first such row."""

    def __str__(self) -> str:
        return f"column {self.column!r} has no value in {self.missing} of {self.rows} rows, the first in {self.first}"


class _Check:
    """Reads the files of a data set, and refuses rows without a prompt and files that do not fit together."""

    def __init__(self, prompt_field: str, config_field: str, columns: Mapping[str, str]) -> None:
        self._prompt_field, self._config_field, self._columns = prompt_field, config_field, columns
        self._back = {new: old for old, new in columns.items()}
        self._first: tuple[str, str, Path] | None = None
        self._types: dict[str, tuple[str, Path]] = {}
        self._parts: list[tuple[Path, DataRows, Mapping[str, int]]] = []
        """Each file with the number of values in each of its columns."""

    def part(self, file: Path) -> DataRows:
        """The rows of the next file. Raises: `ConfigError`."""
        rows = read_rows(file, self._config_field)
        wanted = [self._back.get(name, name) for name in (self._prompt_field, MESSAGES, TOOLS)]
        names = rows.columns()
        if names is not None:
            self._require_columns(names, "the table" if isinstance(rows, TableRows) else "the header", file)
        if isinstance(rows, TableRows):
            rows.nested.update(name for name in wanted if name in rows.columns())
            self._require_plain(rows, file)
        types: dict[str, str] = {}
        filled: dict[str, int] = {}
        began: dict[str, int] = {}
        renames, first = self._columns, ""
        for number, raw in rows.all(wanted):
            row = renamed(raw, renames) if renames else raw
            where = f"{rows.where} {number}"
            if renames and names is None:
                self._require_renamed(raw, where, file)
            if self._prompt_field not in row and row.get(MESSAGES) is None:
                fix = f"give it a prompt, as in {first}, or remove it" if first else ""
                _missing_prompt(list(row), where, file, self._prompt_field, self._config_field, fix)
            first = first or where
            kind = _check_prompt(row, where, file, self._prompt_field, self._config_field)
            if self._first is None or kind != self._first[0]:
                self._one_kind(kind, where, file)
            if not isinstance(rows, TableRows):
                for name, value in raw.items():
                    if value is None or value == "":
                        continue
                    filled[name] = filled.get(name, 0) + 1
                    word = _type_word(value)
                    if types.setdefault(name, word) != word and name != wanted[2]:
                        law = f"{where}: its column {name!r} has {word}, but that of {rows.where} {began[name]} has "
                        raise ConfigError(
                            self._config_field, str(file), law + types[name], "use one type of value in a column"
                        )
                    began.setdefault(name, number)
        if isinstance(rows, TableRows):
            types, filled = _table_types(rows), _table_values(rows)
        self._parts.append((file, rows, filled))
        self._one_type({self._columns.get(name, name): word for name, word in types.items()}, file)
        return rows

    def gaps(self) -> list[Gap]:
        """The columns without a value in some rows of the files, except those of prompts and tools."""
        total, found = sum(len(rows) for _, rows, _ in self._parts), []
        names = dict.fromkeys(name for _, _, filled in self._parts for name in filled)
        for name in names:
            shown = self._columns.get(name, name)
            missing = total - sum(filled.get(name, 0) for _, _, filled in self._parts)
            if missing and shown not in (self._prompt_field, MESSAGES, TOOLS):
                file, rows, _ = next(part for part in self._parts if part[2].get(name, 0) < len(part[1]))
                number = next(number for number, row in rows.all([name]) if row.get(name) in (None, ""))
                of = f" of {file}" if len(self._parts) > 1 else ""
                found.append(Gap(shown, missing, total, f"{rows.where} {number}{of}"))
        return found

    def _require_columns(self, names: Sequence[str], where: str, file: Path) -> None:
        self._require_renamed(names, where, file)
        known = [self._columns.get(name, name) for name in names]
        if self._prompt_field not in known and MESSAGES not in known:
            _missing_prompt(known, where, file, self._prompt_field, self._config_field)

    def _require_plain(self, rows: TableRows, file: Path) -> None:
        """Refuse columns whose values cannot be stored with a prompt."""
        for field in rows.table.schema:
            kind = _not_plain(field.type)
            if kind is not None:
                law = f"its column {field.name!r} has values of the type {kind}, which cannot be stored with a prompt"
                raise ConfigError(
                    self._config_field, str(file), law, "write them as texts or numbers, or drop the column"
                )

    def _require_renamed(self, names: Mapping[str, Any] | Sequence[str], where: str, file: Path) -> None:
        for old in self._columns:
            if old not in names:
                shown = ", ".join(repr(name) for name in [*names][:12]) or "none"
                fix = choice(old, [*names], f"its columns are {shown}")
                law = f"{where} has no column {old!r}, which `columns` renames"
                raise ConfigError(self._config_field, str(file), law, fix)

    def _one_kind(self, kind: str, where: str, file: Path) -> None:
        """Refuse files in which some prompts are texts and others are chats."""
        if self._first is None:
            self._first = kind, where, file
        if kind != self._first[0]:
            of = "" if file == self._first[2] else f" of {self._first[2]}"
            law = f"{where} is {kind}, but {self._first[1]}{of} is {self._first[0]}"
            raise ConfigError(self._config_field, str(file), law, "use one kind of prompt in a data set")

    def _one_type(self, types: Mapping[str, str], file: Path) -> None:
        """Refuse files that have values of different types under one name."""
        for name, word in types.items():
            before, other = self._types.setdefault(name, (word, file))
            if word != before:
                law = f"its column {name!r} has {word}, but that of {other} has {before}"
                raise ConfigError(
                    self._config_field, str(file), law, "use one type, or make them separate data.sources"
                )


_WORDS = {str: "texts", bool: "booleans", int: "numbers", float: "numbers", list: "lists", dict: "mappings"}


def _type_word(value: Any) -> str:
    return _WORDS.get(type(value), type(value).__name__)


def _not_plain(kind: Any) -> Any:
    """The first type of dates, times or decimals that an Arrow type is or contains; None without one."""
    import pyarrow

    if pyarrow.types.is_temporal(kind) or pyarrow.types.is_decimal(kind):
        return kind
    inner = (_not_plain(kind.field(number).type) for number in range(kind.num_fields))
    return next((one for one in inner if one is not None), None)


def _table_types(rows: TableRows) -> dict[str, str]:
    import pyarrow

    kinds = {
        "texts": (pyarrow.types.is_string, pyarrow.types.is_large_string),
        "booleans": (pyarrow.types.is_boolean,),
        "numbers": (pyarrow.types.is_integer, pyarrow.types.is_floating),
        "lists": (pyarrow.types.is_list, pyarrow.types.is_large_list, pyarrow.types.is_fixed_size_list),
        "mappings": (pyarrow.types.is_struct, pyarrow.types.is_map),
    }
    words = {}
    for field in rows.table.schema:
        if not pyarrow.types.is_null(field.type):
            found = (word for word, tests in kinds.items() if any(test(field.type) for test in tests))
            words[field.name] = next(found, str(field.type))
    return words


def _table_values(rows: TableRows) -> dict[str, int]:
    """The number of values in each column of a table."""
    import pyarrow
    import pyarrow.compute

    filled = {}
    for name in rows.columns():
        column = rows.table.column(name)
        empty = pyarrow.compute.sum(pyarrow.compute.equal(column, "")).as_py() if _is_text(column.type) else 0
        filled[name] = len(rows) - column.null_count - (empty or 0)
    return filled


def _is_text(kind: Any) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind))


def _check_prompt(row: Mapping[str, Any], where: str, file: Path, prompt_field: str, config_field: str) -> str:
    """The kind of the row's prompt, in words. Raises: `ConfigError`."""
    prompt, messages = row.get(prompt_field), row.get(MESSAGES)
    if prompt is not None and messages is not None and prompt_field != MESSAGES:
        law = f"{where} has both {prompt_field!r} and {MESSAGES!r}, and only one of them can be the prompt"
        raise ConfigError(config_field, str(file), law, f"rename a column, or set data.prompt_field: {MESSAGES}")
    if row.get(TOOLS) is not None and tools_of(row[TOOLS]) is None:
        law = f"{where}: {TOOLS!r} is {type(row[TOOLS]).__name__} {row[TOOLS]!r:.60}"
        raise ConfigError(
            config_field, str(file), law, "use a list of JSON schemas, or JSON of one, or rename the column"
        )
    if isinstance(prompt, str) and prompt:
        return "a text"
    name, chat = (MESSAGES, messages) if prompt is None and messages is not None else (prompt_field, prompt)
    problem = problem_of(chat, name)
    if problem:
        fix = 'use a non-empty string, or a list of {"role", "content"} messages'
        raise ConfigError(config_field, str(file), f"{where}: {problem}", fix)
    return "a list of messages"


def _missing_prompt(
    names: Sequence[str], where: str, file: Path, prompt_field: str, config_field: str, fix: str = ""
) -> None:
    """`fix`: what to do; empty: name another column."""
    shown = ", ".join(repr(name) for name in names[:12]) or "none"
    fix = fix or choice(prompt_field, names, f"set data.prompt_field to one of {shown}")
    raise ConfigError(config_field, str(file), f"{where} has neither {prompt_field!r} nor 'messages'", fix)


class Draw(NamedTuple):
    """The row of a draw, and its pass over the data set."""

    epoch: int
    row: int


class PromptSource:
    """The order of draws: every epoch is a fresh permutation of all rows, a pure function of (seed, epoch).

    Without `shuffle`, every epoch reads the files from top to bottom. Draw i is the prompt of group i. If `epochs` is
    None, `total` is None: the source never ends.
    """

    def __init__(
        self, dataset: Dataset, *, seed: int, epochs: int | None = None, shuffle: bool = True, rows: int | None = None
    ) -> None:
        """`rows`: number of rows, if it is not that of the data set now."""
        self.dataset = dataset
        self.rows = len(dataset) if rows is None else rows
        self.begun, self.rest = -1, array("q")
        """Once the data has changed: the epoch that it changed in, and the rows of that epoch to draw."""
        self.seed = seed
        self.epochs = epochs
        self.shuffle = shuffle
        self._permutations: dict[int, NDArray[np.int64]] = {}

    @property
    def total(self) -> int | None:
        """Draws until the source is empty."""
        return None if self.epochs is None else self.epochs * self.rows

    def draw(self, number: int) -> Draw:
        """Epoch and row of a draw. Raises IndexError if there is no such draw."""
        if number < 0 or (self.total is not None and number >= self.total):
            raise IndexError(f"draw {number} does not exist: the data source has {self.total} draws, counted from 0")
        if number < len(self.rest):
            return Draw(self.begun, self.rest[number])
        epoch, place = divmod(number - len(self.rest), self.rows)
        epoch += self.begun + 1
        return Draw(epoch, int(self._permutation(epoch)[place]) if self.shuffle else place)

    def change(self, rows: int, epoch: int, taken: Sequence[int]) -> None:
        """Begin with changed data: draw the rest of an epoch, of which the rows `taken` were drawn, then others."""
        self.rows, self.begun, self._permutations = rows, epoch, {}
        drawn, order = set(taken), self._shuffled(epoch).tolist() if self.shuffle else range(rows)
        self.rest = array("q", (row for row in order if row not in drawn))

    def prompt(self, number: int) -> Prompt:
        """The prompt of a draw."""
        return self.dataset.prompt(self.draw(number).row)

    def _permutation(self, epoch: int) -> "NDArray[np.int64]":
        if epoch not in self._permutations:
            # Resumed and retried groups may need the previous epoch, but seldom an older one.
            while len(self._permutations) >= 2:
                del self._permutations[min(self._permutations)]
            self._permutations[epoch] = self._shuffled(epoch)
        return self._permutations[epoch]

    def _shuffled(self, epoch: int) -> "NDArray[np.int64]":
        import numpy as np  # late: `engine check` reads data without the extra `train`

        # Sort raw Philox words: numpy promises that they never change with its version, unlike Generator.permutation.
        key = np.array([self.seed, epoch], dtype=np.uint64)
        return np.argsort(np.random.Philox(key=key).random_raw(self.rows), kind="stable")
