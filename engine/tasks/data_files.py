"""Rows of data files, by format: JSON lines, JSON, CSV, Parquet, and directories of `datasets.Dataset.save_to_disk`.

    files = files_of("data/*.jsonl", "data.path")     # a path, a glob, or a list of both
    rows = read_rows(files[0], "data.path")           # by number, decoded on demand

Called by `dataset.py`, which knows what a prompt is. A file is read whole and once; a broken line is refused with its
number. Must never skip a row.
"""

import csv
import glob
import io
import json
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from engine.errors import ALIKE, ConfigError, counted, suggestion
from engine.tasks.hub_files import HUB, download_files

MESSAGES, TOOLS = "messages", "tools"
"""Columns with a fixed meaning."""
NESTED = (MESSAGES, TOOLS)
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
CSV_DELIMITERS = {".csv": ",", ".tsv": "\t"}
PARQUET_SUFFIXES = (".parquet", ".pq")
FORMATS = (
    "a JSONL, JSON, CSV or Parquet file, a directory that datasets' save_to_disk wrote, a glob, an address on the hub "
    "(hf://datasets/...), or a list of these"
)
STATE, SPLITS = "state.json", "dataset_dict.json"
"""The files that identify a directory of `Dataset.save_to_disk`, and one of `DatasetDict.save_to_disk`."""
MOST_FILES = 100_000
LONGEST_CSV_FIELD = 1 << 30
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""One escape of a surrogate pair. A surrogate without its pair cannot be encoded as UTF-8."""

Paths = str | Path | Sequence[str | Path]


class DataRows(Protocol):
    """Rows by number, decoded on demand."""

    where: str
    """What a row is called: `line` or `row`."""

    def __len__(self) -> int: ...

    def read(self, row: int) -> dict[str, Any]: ...

    def all(self, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Every row with its number in the file: lines count from 1, rows from 0. From a table, only the columns
        `names` are read."""

    def columns(self) -> Sequence[str] | None:
        """The columns that every row has; None if rows may differ."""


# -- which files -------------------------------------------------------------------------------------------------------


def files_of(path: Paths, config_field: str) -> list[Path]:
    """The files that a path, a glob, an address on the hub or a list of these names. A glob is sorted by name; a list
    keeps its order.

    Raises: `ConfigError` for a path that does not exist, or is not a file of a known format.
    """
    files: list[Path] = []
    for one in [path] if isinstance(path, str | Path) else path:
        named = str(one)
        local = download_files(named, config_field) if named.startswith(HUB) else Path(one).expanduser()
        files += _files_of_one(local, config_field)
    if not files:
        raise ConfigError(config_field, [], "names no file", f"give {FORMATS}")
    if len(files) > MOST_FILES:
        raise ConfigError(config_field, str(path), f"names {len(files)} files", f"use at most {MOST_FILES}")
    twice = next((file for number, file in enumerate(files) if file in files[:number]), None) if _few(files) else None
    if twice is not None:
        raise ConfigError(
            config_field,
            str(twice),
            "is named twice",
            "remove one of them; to draw its rows more often, use data.sources with weights",
        )
    return files


def _few(files: Sequence[Path]) -> bool:
    return len(files) <= 1000


def _files_of_one(path: Path, config_field: str) -> list[Path]:
    if not path.exists() and glob.has_magic(str(path)):
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        if not found:
            raise ConfigError(config_field, str(path), "matches no file", _nearest_file(path))
        return [file for one in found for file in _files_of_one(one, config_field)]
    if not path.exists():
        raise ConfigError(config_field, str(path), "does not exist", _nearest_file(path))
    if path.is_dir() and not (path / STATE).is_file():
        raise ConfigError(config_field, str(path), *_why_no_data(path))
    return [path]


def _why_no_data(directory: Path) -> tuple[str, str]:
    """What is wrong with a directory, and what to do."""
    if (directory / SPLITS).is_file():
        splits = _json_of(directory / SPLITS).get("splits")
        names = [str(name) for name in splits] if isinstance(splits, list) else []
        shown = ", ".join(str(directory / name) for name in names) or f"{directory}/train"
        return f"has the splits {', '.join(names)}", f"give the directory of one split: {shown}"
    suffixes = [path.suffix for path in sorted(directory.iterdir()) if path.suffix in _known_suffixes()]
    fix = f"use {directory}/*{suffixes[0]} for all its files" if suffixes else f"give {FORMATS}"
    return "is a directory that datasets' save_to_disk did not write", fix


def _known_suffixes() -> tuple[str, ...]:
    return (*JSON_SUFFIXES, *CSV_DELIMITERS, *PARQUET_SUFFIXES)


def _nearest_file(file: Path) -> str:
    if not file.parent.is_dir():
        return f"its directory {str(file.parent)!r} does not exist either"
    names = sorted(path.name for path in file.parent.iterdir())
    prefix = str(file).removesuffix(file.name)
    return suggestion(file.name, names, "give a file that exists", prefix=prefix, alike=ALIKE)


# -- rows of a file ----------------------------------------------------------------------------------------------------


def read_rows(file: Path, config_field: str) -> DataRows:
    """Raises: `ConfigError` for a file that cannot be read, with the line."""
    if file.is_dir():
        return _load_saved(file, config_field)
    loaders: dict[str, Callable[[Path, str], DataRows]] = {
        **dict.fromkeys(JSON_SUFFIXES, _load_json),
        **dict.fromkeys(CSV_DELIMITERS, _load_csv),
        **dict.fromkeys(PARQUET_SUFFIXES, _load_parquet),
    }
    if file.suffix not in loaders:
        law = f"has an unknown suffix {file.suffix!r}"
        raise ConfigError(config_field, str(file), law, f"use a file that ends in {' or '.join(_known_suffixes())}")
    try:
        return loaders[file.suffix](file, config_field)
    except OSError as error:
        raise ConfigError(config_field, str(file), f"cannot be read: {error.strerror or error}") from error


class JsonLines:
    """Keeps the raw lines, which are several times smaller than their decoded rows."""

    def __init__(self, lines: Sequence[bytes], file: Path, config_field: str, where: str = "line") -> None:
        """`lines`: blank ones are not rows."""
        self.where = where
        first = 1 if where == "line" else 0
        self._numbers = array("q", (number for number, line in enumerate(lines, first) if line.strip()))
        self._lines = [line for line in lines if line.strip()]
        self._file, self._config_field = file, config_field

    def __len__(self) -> int:
        return len(self._lines)

    def read(self, row: int) -> dict[str, Any]:
        decoded: dict[str, Any] = json.loads(self._lines[row])
        return decoded

    def all(self, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Raises: `ConfigError` for a line that is not a JSON object."""
        decode = json.JSONDecoder().decode
        for number, line in zip(self._numbers, self._lines, strict=True):
            try:
                row = decode(line.decode("utf-8").strip())
                if SURROGATE.search(line):
                    json.dumps(row, ensure_ascii=False).encode("utf-8")
            except (ValueError, RecursionError) as error:
                law = f"{self.where} {number} cannot be read as JSON ({_reason(error)})"
                raise self._refused(law) from error
            if not isinstance(row, dict):
                raise self._refused(f"{self.where} {number} is a JSON {type(row).__name__}")
            yield number, row

    def columns(self) -> None:
        return None

    def _refused(self, law: str) -> ConfigError:
        fix = "write one JSON object per line" if self.where == "line" else "write a list of JSON objects"
        return ConfigError(self._config_field, str(self._file), law, fix)


def _load_json(file: Path, config_field: str) -> JsonLines:
    """JSON lines; in a `.json` file also one list of objects."""
    with file.open("rb") as stream:
        lines = list(stream)
    if lines:
        lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
    first = next((line.strip() for line in lines if line.strip()), b"")
    if file.suffix == ".json" and first.startswith(b"["):
        return _load_list(b"".join(lines), file, config_field)
    return JsonLines(lines, file, config_field)


def _load_list(text: bytes, file: Path, config_field: str) -> JsonLines:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        at = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "the file"
        law = f"{at} cannot be read as JSON ({_reason(error)})"
        raise ConfigError(config_field, str(file), law, "write a list of JSON objects") from error
    return JsonLines([json.dumps(row).encode() for row in rows], file, config_field, where="row")


def _reason(error: Exception) -> str:
    """The column instead of the line: the text is one line."""
    return f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


class CsvRows:
    """Keeps the cells, all of them texts. The columns `messages` and `tools` may contain JSON."""

    where = "line"

    def __init__(self, names: Sequence[str], cells: Sequence[tuple[int, list[str]]]) -> None:
        self._names, self._cells = tuple(names), cells

    def __len__(self) -> int:
        return len(self._cells)

    def read(self, row: int) -> dict[str, Any]:
        return self._row(self._cells[row][1])

    def all(self, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        for number, cells in self._cells:
            yield number, self._row(cells)

    def columns(self) -> Sequence[str]:
        return self._names

    def _row(self, cells: Sequence[str]) -> dict[str, Any]:
        row: dict[str, Any] = dict(zip(self._names, cells, strict=True))
        for name in NESTED:
            if name in row:
                row[name] = _decode(row[name])
        return row


def _decode(cell: str) -> Any:
    """JSON of a list, or the text itself; None for an empty cell."""
    if not cell:
        return None
    try:
        return json.loads(cell) if cell.lstrip().startswith("[") else cell
    except ValueError:
        return cell


def _load_csv(file: Path, config_field: str) -> CsvRows:
    fix = "quote fields that contain delimiters, quotes or line breaks"
    csv.field_size_limit(LONGEST_CSV_FIELD)
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(config_field, str(file), f"line {line} is not UTF-8 text", "save it as UTF-8") from error
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=CSV_DELIMITERS[file.suffix], strict=True)
    cells: list[tuple[int, list[str]]] = []
    names: list[str] | None = None
    begins = 1
    try:
        for row in reader:
            if row and names is None:
                names = row
                _require_names(names, file, config_field)
            elif row and names is not None:
                if len(row) != len(names):
                    law = f"line {begins} has {counted(len(row), 'field')}, but the header has {len(names)}"
                    raise ConfigError(config_field, str(file), law, fix)
                cells.append((begins, row))
            begins = reader.line_num + 1
    except csv.Error as error:
        raise ConfigError(config_field, str(file), f"line {begins} is not valid CSV ({error})", fix) from error
    return CsvRows(names or (), cells)


def _require_names(names: Sequence[str], file: Path, config_field: str) -> None:
    for number, name in enumerate(names):
        if not name or name in names[:number]:
            law = f"its header has the column {name!r} twice" if name else f"column {number + 1} of its header is empty"
            raise ConfigError(config_field, str(file), law, "give each column its own name in the first line")


class TableRows:
    """Keeps an Arrow table. In the columns `messages` and `tools`, and in `nested`, it drops keys whose value is null:
    the format adds such keys if other rows or items have them."""

    where = "row"

    def __init__(self, table: Any) -> None:
        self.table = table
        self.nested = set(NESTED)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def read(self, row: int) -> dict[str, Any]:
        return self._plain(self.table.slice(row, 1).to_pylist()[0])

    def all(self, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        chosen = self.table.select([name for name in names if name in self.table.column_names])
        rows = _batched_rows(chosen)
        return enumerate(map(self._plain, rows) if self.nested & {*chosen.column_names} else rows)

    def columns(self) -> Sequence[str]:
        return [str(name) for name in self.table.column_names]

    def _plain(self, decoded: dict[str, Any]) -> dict[str, Any]:
        return {name: _without_nulls(value) if name in self.nested else value for name, value in decoded.items()}


def _batched_rows(table: Any) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches(max_chunksize=4096):
        yield from batch.to_pylist()


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return value


def _load_parquet(file: Path, config_field: str) -> TableRows:
    import pyarrow
    import pyarrow.parquet

    try:
        return TableRows(pyarrow.parquet.read_table(file))
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(config_field, str(file), f"is not a readable Parquet file ({error})") from error


def _load_saved(directory: Path, config_field: str) -> TableRows:
    """Load a directory that `datasets.Dataset.save_to_disk` wrote. Its `state.json` lists Arrow files in the streaming
    format."""
    import pyarrow

    listed = _json_of(directory / STATE).get("_data_files")
    names = [str(one.get("filename")) for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    if not names or not all(Path(name).name == name for name in names):
        law = f"has a {STATE} without a list of data files"
        raise ConfigError(config_field, str(directory), law, "write it again with Dataset.save_to_disk")
    tables = []
    for name in names:
        try:
            with pyarrow.memory_map(str(directory / name)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
                tables.append(stream.read_all())
        except FileNotFoundError as error:
            law = f"lacks its data file {name}"
            raise ConfigError(config_field, str(directory), law, "copy the directory again") from error
        except (pyarrow.ArrowException, OSError) as error:
            law = f"has a data file {name} that is not a readable Arrow stream ({error})"
            raise ConfigError(config_field, str(directory), law, "write it with Dataset.save_to_disk") from error
    try:
        return TableRows(pyarrow.concat_tables(tables))
    except pyarrow.ArrowException as error:
        raise ConfigError(config_field, str(directory), f"has data files of different columns ({error})") from error


def _json_of(file: Path) -> dict[str, Any]:
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return plain if isinstance(plain, dict) else {}
