"""Samples: what the model said, as readable files in the `samples/` directory of a run.

`workers.sample_keeper` writes them, `engine samples` reads them. A file holds the rows of one *unit*: a train step, a
chunk of a validation, a failed attempt or a filtered group. It is written under a temporary name and renamed, so that a
repeated unit replaces its own rows. It has a line of JSON for each row, because a Parquet file takes ten times as long
to write. The files of 256 steps or groups, or of 16 validations, are merged into one Parquet file, so that a long run
has few files:

    step-000050.jsonl                    the rows of train step 50
    steps-000000-000255.parquet          those of 256 train steps
    validation-000003-0002.jsonl         chunk 2 of validation 3
    validations-000000-000015.parquet    those of 16 validations
    failure-000093-0001.jsonl            attempt 1 of group 93, whose reward failed
    failures-000000-000255.parquet       those of 256 groups
    filter-000050-000093.jsonl           group 93, which the filter dropped before train step 50 ended
    filters-000000-000255.parquet        those of 256 train steps

pyarrow is imported late: the base installation lacks it. Must never leave a half-written file under its name.
"""

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, BinaryIO, get_args, get_origin, get_type_hints

from engine.errors import RunDamaged, reason_of
from engine.ids import GroupId, StepId, ValidationId, Version
from engine.record.checked_lines import checked_line, object_of
from engine.record.files import make_directory, private_opener
from engine.storage.checkpoints import name_aside

if TYPE_CHECKING:
    import pyarrow

FOLDER = "samples"
"""The directory, in the run's directory."""
TRAIN, VALIDATION, FAILED, FILTERED = "train", "validation", "failed", "filtered"
BLOCKS = {"step": 256, "validation": 16, "failure": 256, "filter": 256}
"""Number of train steps, of validations, of groups with failures, and of train steps with filtered groups, in a merged
file."""
_FILES_OF = {TRAIN: "step", VALIDATION: "validation", FAILED: "failure", FILTERED: "filter"}
_NUMBER_OF = {TRAIN: "step", VALIDATION: "validation", FAILED: "group", FILTERED: "step"}
"""The column by which rows are found."""
MOST_IN_SINKS = 256
"""Maximum number of samples of a validation that go to the sinks of metrics: the first ones."""
MAPPINGS = ("reward_parts", "figures")
"""Columns that are JSON in the files, and mappings when they are read."""
MERGE_EVERY = 32
"""Train steps after which a writer looks for files to merge."""
ROWS_AT_ONCE = 256
"""Rows that a merge has in memory, and a reader of a merged file."""

_NAME = re.compile(
    r"(step|validation|failure|filter)-(\d{6,})(?:-(\d{4,}))?\.jsonl|"
    r"(steps|validations|failures|filters)-(\d{6,})-(\d{6,})\.parquet"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePolicy:
    """Which samples a run keeps."""

    per_step: int = 8
    """Maximum number of responses of each train step, of filtered ones before each train step, and of failed ones of
    each weights version in each replica; 0: none."""
    validation: int | None = None
    """Maximum number of prompts of each validation set, the same in each validation; 0: none; None: all."""
    max_characters: int = 20_000
    """Maximum length of a prompt or a response; the middle of a longer one is left out."""
    sink_every: int = 10
    """Samples go to the sinks of metrics after every so many train steps, and after each validation; 0: never."""
    seed: int = 0

    @property
    def keeps_any(self) -> bool:
        return bool(self.per_step) or self.validation != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One response. A field that is None is unknown, or has no meaning for this kind of row."""

    kind: str
    """`train`, `validation`, `failed` or `filtered`."""
    step: StepId | None = None
    """The train step, counted from 0, as in metrics.jsonl; of a filtered group, the first that had not ended."""
    validation: ValidationId | None = None
    chunk: int | None = None
    """The chunk of the validation."""
    validation_set: str | None = None
    """The name of the prompt's validation set."""
    version: Version | None = None
    """The weights version that the validation measured."""
    group: GroupId | None = None
    sample: int = 0
    """Number of the response to its prompt, from 0."""
    source: str | None = None
    """Name of the data source of the prompt; null if there is only one, without a name."""
    prompt_row: int
    """Row of the prompt in its data source."""
    reasons: tuple[str, ...] = ()
    """Why it was selected: `workers.sample_keeper.REASONS`, `validation`, `failed` or `filtered`."""
    attempt: int | None = None
    """The attempt of the group that failed."""
    error: str | None = None
    """Why it failed."""
    filter: str | None = None
    """The filter that dropped its group, and what the filter saw."""
    prompt: str
    response: str
    answer: str | None = None
    """The answer that a majority vote counts."""
    reward: float | None = None
    reward_parts: str | None = None
    """JSON: the value of each of several reward functions by its name, without its weight."""
    tokens: int = 0
    """Response tokens."""
    figures: str | None = None
    """JSON: figures of a rollout of several turns by name, such as `turns` and `tool_errors`."""
    segments: int = 1
    """Trajectories that the response consists of."""
    oldest_version: Version | None = None
    newest_version: Version | None = None
    finish_reason: str = ""
    staleness: int | None = None
    """Train steps that the group lags behind."""
    advantage: float | None = None
    logprob_gap: float | None = None
    """Largest |log-prob of the trainer - log-prob of the sampler| of a trained token."""


# -- files -------------------------------------------------------------------------------------------------------------


def lacks_pyarrow() -> bool:
    """Whether samples can be neither written nor read."""
    return importlib.util.find_spec("pyarrow") is None


COLUMNS: dict[str, tuple[type, ...]] = {
    name: get_args(hint) if get_origin(hint) is UnionType else (get_origin(hint) or hint,)
    for name, hint in get_type_hints(SampleRow).items()
}
"""The columns of every file and the types of their values: the fields of `SampleRow`."""


def schema() -> "pyarrow.Schema":
    """The columns of a merged file."""
    import pyarrow as pa

    kinds = {int: pa.int64(), float: pa.float64(), str: pa.string(), tuple: pa.list_(pa.string())}
    return pa.schema([(name, kinds[types[0]]) for name, types in COLUMNS.items()])


class SampleFiles:
    """The files in one directory. Raises: `OSError` and pyarrow's own errors."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write_step(self, step: StepId, rows: Sequence[SampleRow]) -> None:
        """Replace the rows of a train step."""
        self._write(f"step-{step:06d}.jsonl", rows)

    def write_chunk(self, validation: ValidationId, chunk: int, rows: Sequence[SampleRow]) -> None:
        """Replace the rows of a chunk of a validation."""
        self._write(f"validation-{validation:06d}-{chunk:04d}.jsonl", rows)

    def write_failure(self, group: GroupId, attempt: int, rows: Sequence[SampleRow]) -> None:
        """Replace the rows of a failed attempt."""
        self._write(f"failure-{group:06d}-{attempt:04d}.jsonl", rows)

    def write_filtered(self, step: StepId, group: GroupId, rows: Sequence[SampleRow]) -> None:
        """Replace the rows of a filtered group."""
        self._write(f"filter-{step:06d}-{group:06d}.jsonl", rows)

    def merge(self, *, ended: bool = False) -> None:
        """Merge the files of each block, but those of the newest block only if the run has `ended`. Call it from one
        process only."""
        for kind in BLOCKS:
            units = [found for found in self.names() if found.kind == kind and not found.merged]
            newest = max((found.block for found in units), default=0)
            for block in sorted({found.block for found in units if ended or found.block < newest}):
                self._merge(kind, block, [found for found in units if found.block == block])

    def rows(self, kind: str, numbers: Container[int] | None = None) -> Iterator[dict[str, Any]]:
        """Rows of train steps (`TRAIN`), validations (`VALIDATION`), failed attempts (`FAILED`) or filtered groups
        (`FILTERED`), each unit once, in the order of the files. `MAPPINGS` are decoded. `numbers`: only these steps,
        validations or groups. Reads one row group at a time.

        Raises: `RunDamaged` for a file that cannot be read, `FileNotFoundError` for one that was merged meanwhile."""
        names = [found for found in self.names() if found.kind == _FILES_OF[kind]]
        single = {found.unit for found in names if not found.merged}
        for found in sorted(names, key=lambda found: (found.first, found.chunk)):
            if numbers is not None and not any(number in numbers for number in found.numbers):
                continue
            for row in _rows_in(self.directory, found):
                wanted = numbers is None or number_of(row) in numbers
                if wanted and (not found.merged or _unit_of(row) not in single):
                    yield row | {name: json.loads(row[name] or "null") for name in MAPPINGS}

    def numbers(self, kind: str) -> list[int]:
        """The train steps, the validations, or the groups with failed attempts, that have rows of this kind."""
        found: set[int] = set()
        for name in self.names():
            if name.kind == _FILES_OF[kind]:
                found.update(row[_NUMBER_OF[kind]] for row in _rows_in(self.directory, name, [_NUMBER_OF[kind]]))
        return sorted(found)

    def has(self, kind: str) -> bool:
        return any(name.kind == _FILES_OF[kind] for name in self.names())

    def names(self) -> list["FileName"]:
        """The files, sorted by name."""
        if not self.directory.is_dir():
            return []
        return [found for name in sorted(os.listdir(self.directory)) if (found := FileName.of(name)) is not None]

    def _write(self, name: str, rows: Sequence[SampleRow]) -> None:
        lines = [checked_line(json.dumps(_plain(row), ensure_ascii=False)) for row in rows]
        with self._replaced(name) as file:
            file.writelines(lines)

    def _merge(self, kind: str, block: int, singles: Sequence["FileName"]) -> None:
        """The rows of single files replace the rows of the same units in the merged file. The single files are deleted
        last: after a crash before that, both have the same rows, and the single files count."""
        first = block * BLOCKS[kind]
        name = f"{kind}s-{first:06d}-{first + BLOCKS[kind] - 1:06d}.parquet"
        merged, units = FileName.of(name), {found.unit for found in singles}
        assert merged is not None
        old = _rows_in(self.directory, merged) if (self.directory / name).exists() else iter(())
        new = chain.from_iterable(_rows_in(self.directory, found) for found in singles)
        self.replace(name, chain((row for row in old if _unit_of(row) not in units), new))
        for found in singles:
            (self.directory / found.name).unlink(missing_ok=True)

    def replace(self, name: str, rows: Iterator[dict[str, Any]]) -> None:
        """Write a merged file, and rename it when it is complete."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        options: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}
        with self._replaced(name) as file, pq.ParquetWriter(file, schema(), **options) as writer:
            while some := [*islice(rows, ROWS_AT_ONCE)]:
                writer.write_table(pa.Table.from_pylist(some, schema()))

    @contextmanager
    def _replaced(self, name: str) -> Iterator[BinaryIO]:
        """A new file, which is renamed when it is complete."""
        make_directory(self.directory)
        temporary = self.directory / f".{name}.{os.getpid()}.tmp"
        try:
            with open(temporary, "wb", opener=private_opener) as file:
                yield file
            temporary.replace(self.directory / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def samples_for_sinks(directory: Path, policy: SamplePolicy) -> Callable[[Mapping[str, Any]], list[dict[str, Any]]]:
    """A function that returns the samples to send with a row of metrics.jsonl. It raises what `SampleFiles.rows`
    raises."""
    files = SampleFiles(directory)

    def samples_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
        if not policy.sink_every or lacks_pyarrow():
            return []
        if "validation" in row:
            return list(islice(files.rows(VALIDATION, [row["validation"]]), MOST_IN_SINKS))
        return [] if row["step"] % policy.sink_every else list(files.rows(TRAIN, [row["step"]]))

    return samples_of


def put_samples_aside(directory: Path, steps: int, validations: Sequence[ValidationId]) -> Path | None:
    """Set aside the samples that a resumed run will write again. Those of the first `steps` train steps and of these
    validations stay. Returns the new path of the earlier directory; None if there was nothing to set aside."""
    files = SampleFiles(directory)
    names = files.names()
    kept = [found for found in names if found.stays(steps, validations)]
    if len(kept) == len(names):
        return None
    partly = [found for found in names if found not in kept and found.merged and not lacks_pyarrow()]
    aside = name_aside(directory)
    os.rename(directory, aside)
    make_directory(directory)
    for found in kept:
        shutil.copy2(aside / found.name, directory / found.name)
    for found in partly:
        rows = _rows_in(aside, found)
        files.replace(found.name, (row for row in rows if _is_kept(row, steps, validations)))
    return aside


def _rows_in(directory: Path, found: "FileName", columns: Iterable[str] = COLUMNS) -> Iterator[dict[str, Any]]:
    """The rows of a file, with None in columns that it lacks. Raises: `RunDamaged`, `FileNotFoundError`."""
    import pyarrow

    path = directory / found.name
    try:
        for row in _rows_of_merged(path) if found.merged else map(object_of, path.read_bytes().splitlines()):
            yield {name: row.get(name) for name in columns}
    except FileNotFoundError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, AttributeError) as error:
        raise RunDamaged(str(path), f"is not a readable file of samples ({reason_of(error)}); delete it") from error


def _rows_of_merged(path: Path) -> Iterator[dict[str, Any]]:
    """Reads one row group at a time."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        for group in range(file.num_row_groups):
            yield from file.read_row_group(group).to_pylist()


@dataclass(frozen=True, slots=True)
class FileName:
    """The parts of a file's name."""

    name: str
    kind: str
    first: int
    last: int
    chunk: int
    merged: bool

    @staticmethod
    def of(name: str) -> "FileName | None":
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        kind, number, chunk, kinds, first, last = match.groups()
        if kinds is not None:
            return FileName(name, kinds.removesuffix("s"), int(first), int(last), 0, True)
        return FileName(name, kind, int(number), int(number), int(chunk or 0), False)

    @property
    def block(self) -> int:
        return self.first // BLOCKS[self.kind]

    @property
    def numbers(self) -> range:
        """The steps or validations that it may have."""
        return range(self.first, self.last + 1)

    @property
    def unit(self) -> tuple[str, int, int]:
        return self.kind, self.first, self.chunk

    def stays(self, steps: int, validations: Sequence[ValidationId]) -> bool:
        if self.kind == "failure":
            return True
        return (
            self.last < steps
            if self.kind in ("step", "filter")
            else all(number in validations for number in self.numbers)
        )


def number_of(row: Mapping[str, Any]) -> int:
    """The train step, the validation or the group of a row, depending on its kind."""
    return int(row[_NUMBER_OF[row["kind"]]])


def _unit_of(row: Mapping[str, Any]) -> tuple[str, int, int]:
    chunk = {TRAIN: None, VALIDATION: row["chunk"], FAILED: row["attempt"], FILTERED: row["group"]}[row["kind"]]
    return _FILES_OF[row["kind"]], number_of(row), chunk or 0


def _plain(row: SampleRow) -> dict[str, Any]:
    """Raises: `TypeError` for a value that a merged file cannot hold."""
    plain = {name: getattr(row, name) for name in COLUMNS}
    for name, types in COLUMNS.items():
        if not isinstance(plain[name], types):
            raise TypeError(f"{name} is {plain[name]!r}")
    return plain


def _is_kept(row: Mapping[str, Any], steps: int, validations: Sequence[ValidationId]) -> bool:
    return row["validation"] in validations if row["step"] is None else row["step"] < steps
