"""What a configured run reads, and what a resume does if that has changed: data is refused or accepted, code is noted.

Called in the launching process, before any other process of the run starts.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from engine.config import Config
from engine.config.model_description import files_of
from engine.errors import ConfigError, RunDamaged
from engine.input_identity import InputIdentity, as_ids, describe_changes, row_ids, shown_rows
from engine.plans.run_inputs import Inputs, mixture_of
from engine.record import read, recover
from engine.storage.input_files import INPUTS, read_inputs, write_inputs
from engine.tasks.data_files import files_of as data_files
from engine.tasks.source_files import LoadedSource
from engine.workers.plan import Plan

SMALL_BYTES, END_BYTES = 16 << 20, 1 << 20
"""Files of up to `SMALL_BYTES` are compared whole; of larger ones the size, and `END_BYTES` at both ends."""
WARM_START = "model.warm_start.path"
SHOWN = 8
"""Maximum number of files that a note names."""


def settle_inputs(config: Config, inputs: Inputs, plan: Plan, accept: bool, say: Callable[[str], None]) -> None:
    """Keep in the run's directory what a new run reads. For a run that resumes, note other code and models than it
    began with; refuse changed data, or keep it for `history_of` to begin with.

    Raises: `ConfigError` for changed data, `RunDamaged` if the directory does not say what the run read.
    """
    assert plan.run_dir is not None
    loaded = [source.load() for source in inputs.sources]
    rows = {one.files.name: one.data.ids() for one in loaded}
    held_out = row_ids([prompt.text, prompt.fields] for prompt in plan.held_out)
    now = InputIdentity(rows=rows, held_out=held_out, files=dict(_digests(config, inputs)))
    if not plan.resume:
        write_inputs(plan.run_dir, 0, now)
        return
    kept = read_inputs(plan.run_dir)
    if not kept:
        raise RunDamaged(str(plan.run_dir / INPUTS), "is missing: it says what the run read; restore it from a copy")
    began = kept[0].files
    if other := sorted(name for name, digest in now.files.items() if began.get(name, digest) != digest):
        say(f"note: changed since the run began: {', '.join(other[:SHOWN])}{', ...' * (len(other) > SHOWN)}")
    changes = list(_data_changes(config, loaded, kept[-1], now))
    if changes and not accept:
        fix = "restore the data, or continue by the content of rows with `engine resume RUN --accept-data-change`"
        (field, path, words), *others = changes
        more = [f"{field}: {words}" for field, _, words in others]
        more += _losses(config, loaded, plan.run_dir, [*kept, now])
        raise ConfigError(field, path, "; ".join([f"has changed since the run read it: {words}", *more]), fix)
    if changes:
        say(f"note: the run continues with changed data: {'; '.join(f'{field}: {what}' for field, _, what in changes)}")
        write_inputs(plan.run_dir, len(kept), structs.replace(now, files={}))


def _digests(config: Config, inputs: Inputs) -> Iterator[tuple[str, str]]:
    for name, path in _files(config):
        if path.is_file():
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                content = file.read(SMALL_BYTES if size <= SMALL_BYTES else END_BYTES)
                file.seek(max(len(content), size - END_BYTES))
                yield name, sha256(b"%d " % size + content + file.read(END_BYTES)).hexdigest()
    for field, found in inputs.local.items():
        with suppress(OSError, TypeError):  # typed into a console
            yield field, sha256(inspect.getsource(found).encode()).hexdigest()


def _files(config: Config) -> Iterator[tuple[str, Path]]:
    """(name, path) of the files of models, of a warm start's answers, and of the user's code that was imported."""
    for field, model in (("model.path", config.model.path), ("trainer.reference_path", config.trainer.reference_path)):
        directory = None if model is None else files_of(model)
        yield from [] if directory is None else ((f"{field} {path.name}", path) for path in directory.iterdir())
    answers = config.model.warm_start.path
    for path in [] if answers is None else data_files(answers, WARM_START):
        yield from ((f"{WARM_START} {one.name}", one) for one in (path.iterdir() if path.is_dir() else [path]))
    code, text = Path(config.run.code_dir or os.getcwd()), config.model_dump_json()
    for name, module in [*sys.modules.items()]:
        path = Path(getattr(module, "__file__", None) or "")
        own = path.is_relative_to(code) and not path.is_relative_to(sys.prefix) and "site-packages" not in path.parts
        if path.suffix == ".py" and name.partition(".")[0] != "engine" and (own or f'"{name}:' in text):
            yield str(path.relative_to(code)) if own else name, path
    yield from ((f"agent.command {part}", code / part) for part in config.agent.command or ())


def _data_changes(
    config: Config, loaded: Sequence[LoadedSource], before: InputIdentity, now: InputIdentity
) -> Iterator[tuple[str, Any, str]]:
    """(field, path, what happened to its rows). Raises: `ConfigError` for another number of validation rows."""
    for one in loaded:
        if words := describe_changes(before.ids(one.files.name), now.ids(one.files.name)):
            yield one.files.field, one.files.path, words
    path = config.data.validation_path
    field, given = ("validation.sets", len(config.validation.sets)) if path is None else ("data.validation_path", path)
    if words := describe_changes(as_ids(before.held_out), as_ids(now.held_out)):
        if len(before.held_out) != len(now.held_out):
            law = f"must have as many rows as the run measures: {words}"
            raise ConfigError(field, given, law, "restore the rows, or start a new run")
        yield field, given, f"{words}; figures before and after do not compare"


def _losses(
    config: Config, loaded: Sequence[LoadedSource], run_dir: Path, inputs: Sequence[InputIdentity]
) -> Iterator[str]:
    """What the epoch would repeat and leave out if it continued by the numbers of the rows."""
    drawn = recover(read(run_dir / "schedule", missing_end=True)).scheduler.state.groups.ledger.drawn
    by_content = mixture_of(config, loaded, [*inputs[:-1], structs.replace(inputs[-1], drawn=drawn)])
    by_number = mixture_of(config, loaded, [])
    rest = range(drawn, drawn + sum(by_content.left))  # empty if choices depend on the run
    rows = zip(loaded, by_content.rows_of(rest), by_number.rows_of(rest), strict=True)
    for one, right, wrong in rows if rest else ():
        repeated, lost = (np.setdiff1d(*both).tolist() for both in ((wrong, right), (right, wrong)))
        if repeated or lost:
            again = f"by number, this epoch would repeat {shown_rows(repeated)} of {one.files.field}"
            yield f"{again} and leave out {shown_rows(lost)}"
