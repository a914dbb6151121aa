"""Prepares the process of an actor: module paths, log file, thread counts of numerical libraries, file for stacks.

Called by every actor when it starts.
"""

import gc
import logging
import os
import sys
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from uuid import uuid4

from ray import cloudpickle

from engine.actors.stacks import register_stacks, stacks_file
from engine.private_files import UMASK, make_directory, make_run_private, private_opener
from engine.runtime.plan import Plan


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """A pickled plan, with the paths that other processes need to import the user's functions in it."""

    directory: str
    path: tuple[str, ...]
    data: bytes
    launch: str
    """Prefix of the names of this launch's actors, unique to it."""
    lasts: bool
    """Whether the other actors survive the scheduler's process: a restarted scheduler recovers from the record."""
    orphan_s: float
    """Seconds that they survive if the scheduler is not restarted."""
    run_dir: Path | None
    """Absolute path, for actors that do not unpack the plan."""

    @classmethod
    def of(cls, plan: Plan) -> "PackedPlan":
        path = tuple(os.path.abspath(place) for place in sys.path)
        launch = f"{plan.run_dir.name if plan.run_dir is not None else 'run'}-{uuid4().hex}"
        run_dir = None if plan.run_dir is None else plan.run_dir.absolute()
        data, lasts = cloudpickle.dumps(plan), plan.run_dir is not None
        return cls(os.getcwd(), path, data, launch, lasts, plan.orphan_s, run_dir)

    def register_stacks(self, name: str) -> None:
        """Register the file for the stacks, in an actor that does not call `prepare_process`."""
        if self.run_dir is not None:
            register_stacks(stacks_file(self.run_dir, name))

    def unpack(self) -> Plan:
        """The plan. Also gives this process the working directory and the module path of the launching one."""
        if os.path.isdir(self.directory):
            os.chdir(self.directory)
        sys.path.extend(place for place in self.path if place not in sys.path)
        plan: Plan = cloudpickle.loads(self.data)
        return plan


def prepare_process(name: str, run_dir: Path | None, threads: int | None = None, *, private: bool = False) -> None:
    """Set up threads, logs and stacks. Call it before torch is imported. `threads`: for OpenMP and MKL; 0: one per
    core; None: unchanged. `private`: remove the permissions of others in the run's directory, and for the files that
    this process writes."""
    if threads is not None:
        count = str(threads or os.cpu_count() or 1)
        os.environ.update(OMP_NUM_THREADS=count, MKL_NUM_THREADS=count)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if run_dir is None:
        return
    failure = make_run_private(run_dir) if private else None
    umask = os.umask(UMASK)
    if not private:
        os.umask(umask & UMASK)  # unchanged, except that this user keeps all permissions
    directory = run_dir / "logs"
    make_directory(directory)
    handler = RunLog(directory / f"{name}.log", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("engine")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    register_stacks(stacks_file(run_dir, name))
    if failure is not None:
        logger.warning("other users may be able to read the run's files: %s", failure)


class RunLog(logging.FileHandler):
    """The log file of a process in the run's directory, readable only by its user. If it cannot be written, records go
    to stderr. Must never raise."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:
            print(self.format(record), file=sys.stderr)

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=private_opener)


def collect_rarely() -> None:
    """Make Python's cyclic garbage collection rare, and exclude all existing objects from it.

    For the scheduler's process: its state has up to millions of small objects and no cycles. A full collection would
    block decisions, for half a second at 300 000 live groups.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
