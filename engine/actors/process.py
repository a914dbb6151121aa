"""What every actor's process does first: find the launching program's modules, log to a file of the run, bound the
threads of numerical libraries, register the file for its stacks."""

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
    """A plan on its way to other processes, with what they need to import the user's functions in it."""

    directory: str
    path: tuple[str, ...]
    data: bytes
    launch: str
    """What the names of this launch's actors begin with; no other launch has it."""
    lasts: bool
    """There is a record, from which a scheduler that ended can go on: the other actors outlive it."""
    orphan_s: float
    """How long they do if no other comes."""
    run_dir: Path | None
    """Absolute: for actors that do not unpack the plan."""

    @classmethod
    def of(cls, plan: Plan) -> "PackedPlan":
        path = tuple(os.path.abspath(place) for place in sys.path)
        launch = f"{plan.run_dir.name if plan.run_dir is not None else 'run'}-{uuid4().hex}"
        run_dir = None if plan.run_dir is None else plan.run_dir.absolute()
        data, lasts = cloudpickle.dumps(plan), plan.run_dir is not None
        return cls(os.getcwd(), path, data, launch, lasts, plan.orphan_s, run_dir)

    def register_stacks(self, name: str) -> None:
        """For an actor that calls no `prepare_process`: where it writes its stacks if it hangs."""
        if self.run_dir is not None:
            register_stacks(stacks_file(self.run_dir, name))

    def unpack(self) -> Plan:
        """The plan. This process then has the working directory of the launching one, and finds the modules that it
        finds."""
        if os.path.isdir(self.directory):
            os.chdir(self.directory)
        sys.path.extend(place for place in self.path if place not in sys.path)
        plan: Plan = cloudpickle.loads(self.data)
        return plan


def prepare_process(name: str, run_dir: Path | None, threads: int | None = None, *, private: bool = False) -> None:
    """To be called before torch is imported. `threads`: for OpenMP and the like; 0: one per core; None: as it is.
    `private`: take from others what they may do in the run's directory, and with whatever this process writes."""
    if threads is not None:
        count = str(threads or os.cpu_count() or 1)
        os.environ.update(OMP_NUM_THREADS=count, MKL_NUM_THREADS=count)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if run_dir is None:
        return
    failure = make_run_private(run_dir) if private else None
    umask = os.umask(UMASK)
    if not private:
        os.umask(umask & UMASK)  # as it was, but that this user may always use what is made
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
        logger.warning("others may read what the run writes: %s", failure)


class RunLog(logging.FileHandler):
    """The log of a process in the run's directory, for its user alone. Where that is gone what is logged goes
    to stderr: nothing may fail because it could not be logged."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:
            print(self.format(record), file=sys.stderr)

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=private_opener)


def collect_rarely() -> None:
    """Have Python look for garbage in cycles seldom, and never again among what there is now.

    For the scheduler's process: its state is up to millions of small objects, none of them in a cycle, and a look
    through them all stops every decision: half a second for 300 000 live groups.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
