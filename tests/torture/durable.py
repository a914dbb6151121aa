"""An adversary whose record lies on disk, and which dies in the middle of a write: at any byte of it.

What the operating system had is there afterwards, to the byte; what was to follow from the frames that were being
written never left. Then the run is resumed from the file, and so on to its end. A seed says all of it:

    python -m tests.torture.durable --seed 17
    python -m tests.torture.durable --seeds 1000
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

from engine.commands import Command
from engine.errors import ConfigError
from engine.policies import PolicySet
from engine.record import Header, Record, Recorder, Recovered, read, replay
from engine.record.files import RecordLock
from engine.record.frames import Tick
from engine.states.laws import check_all
from engine.states.limits import Limits
from tests.core.adversary import Adversary


class Killed(BaseException):
    """The process ends here. No `except Exception` keeps it."""


class Dying(Recorder):
    """A recorder whose process dies once the record has `dies_at` bytes: what is beyond them is not written."""

    dies_at: float = float("inf")

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.write_frames = self.log.flush
        self.log.flush = self.flush_or_die  # type: ignore[method-assign]

    def flush_or_die(self, *, sync: bool = False) -> None:
        written, held = self.progress
        if written + held <= self.dies_at:
            self.write_frames(sync=sync)
            return
        data = b"".join(self.log._held)[: max(0, int(self.dies_at) - written)]
        os.write(self.log._require_open().fileno(), data)
        raise Killed


class Durable(Adversary):
    """The judge gets an event once its frame is whole in the file, as all others are."""

    def __init__(self, directory: Path, *given: Any, **options: Any) -> None:
        self.directory = directory
        self.torn = 0
        self.unjudged: list[Tick] = []
        super().__init__(*given, **options)

    def new_record(self, header: Header) -> Recorder:
        return Dying(self.directory, header, segment_bytes=3000)

    def _observe(self, tick: Tick) -> None:
        self.unjudged.append(tick)
        check_all(self.scheduler.state)

    def execute(self, commands: Sequence[Command]) -> None:
        self.judge_up_to(sys.maxsize)
        super().execute(list(commands))

    def judge_up_to(self, events: int) -> None:
        """The ticks before event `events` are in the file; of the others nothing is known to anybody."""
        ticks, self.unjudged = self.unjudged, []
        for tick in ticks:
            if tick.first < events:
                self.judge_tick(tick)

    def record(self) -> Record:
        assert isinstance(self.recorder, Recorder)
        self.recorder.log._lock.release()
        return read(self.directory)

    def go_on(self, recovered: Recovered) -> None:
        """Orders of the last frames never left, that to discard among them: what the state does not name is let go."""
        self.judge_up_to(recovered.events)
        state = recovered.scheduler.state
        wanted = {*state.groups.live, *chain.from_iterable(state.checkpoints.stored_batches.values())}
        self.store.discard(tuple(id for id in range(state.groups.ledger.drawn) if id not in wanted))
        after = recovered.end
        self.recorder = Dying(self.directory, after, segment_bytes=3000, lock=RecordLock(self.directory))
        self.torn = recovered.torn.bytes if recovered.torn else 0

    def crash_and_tell(self, replicas: int, kept: bool, random: Random) -> int:
        """Bytes that were torn off. A fifth of what the trajectory store held is gone as well."""
        self.crash(replicas, kept=kept, missing=lambda group: random.random() < 0.2)
        return self.torn


def figures(random: Random) -> tuple[Limits, dict[str, Any]]:
    batch, staleness = random.randint(1, 3), random.randint(0, 2)
    every = random.randint(1, 3)
    limits = Limits(
        train_batch_size=batch, max_staleness_steps=staleness, max_steps=random.randint(4, 8),
        max_concurrent_groups=random.randint(batch, batch * (staleness + 1)), checkpoint_every=every,
        sync_mode=random.choice(("keep", "abort", "wait")), keeps_batches=random.random() < 0.5,
        sync_every=random.randint(1, staleness + 1),
    )  # fmt: skip
    return limits, {"prompts": 40, "slots": random.randint(1, 4), "snapshot_every": random.choice((0, 3, 25))}


def torture(seed: int, directory: Path) -> tuple[int, int]:
    """One run, killed at as many places as its seed says; (kills, bytes torn off). Raises for a broken law."""
    random = Random(seed)
    try:
        limits, options = figures(random)
    except ConfigError:
        return torture(seed + 1_000_003, directory)
    made = Durable(directory, limits, PolicySet.from_names({}), **options)
    replicas = random.randint(1, 3)
    for id in range(replicas):
        made.join(id)
    kills = torn = 0
    for _ in range(random.randint(1, 4)):
        assert isinstance(made.recorder, Dying)
        made.recorder.dies_at = sum(made.recorder.progress) + random.randint(0, 6000)
        try:
            made.complete()
            break
        except Killed:
            kills += 1
        torn += made.crash_and_tell(replicas, limits.keeps_batches and random.random() < 0.7, random)
    else:
        assert isinstance(made.recorder, Dying)
        made.recorder.dies_at = float("inf")
    outcome = made.complete()
    made.recorder.close()
    assert outcome.outcome == "finished", outcome
    report = replay(read(directory))
    assert report.identical and report.torn is None, str(report)
    assert report.events == made.driver.events_handled
    return kills, torn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", type=int, default=200)
    chosen = parser.parse_args()
    seeds = range(chosen.seeds) if chosen.seed is None else [chosen.seed]
    kills = 0
    for seed in seeds:
        with tempfile.TemporaryDirectory() as directory:
            try:
                kills += torture(seed, Path(directory) / "schedule")[0]
            except Exception as error:
                kind = "correctness" if type(error).__name__ in ("Finding", "AssertionError") else "crash"
                print(f"seed {seed}: {kind}: {error}\nagain: python -m tests.torture.durable --seed {seed}")
                raise
    print(f"{len(seeds)} seeds, {kills} kills: every prompt ended once, every record replays")
    return 0


if __name__ == "__main__":
    sys.exit(main())
