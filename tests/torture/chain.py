"""A run over Ray whose weights are a chain of digests, and a death in the middle of it.

Weights are the digest of those before and of every token of the step's groups; tokens are digests of the weights that
they were sampled from. So at S = 0 the last weights can be computed without any run, and one batch lost, changed or
trained twice anywhere makes them others.

    python -m tests.torture.chain DIRECTORY SEED MODE LIFE      # what `torture.py` starts, kills and starts again

Death comes from within, at an exact byte of the record, and takes every process of the tree, the dying write half done;
or one actor alone. The processes of a run know one another by `MARK` in their environment.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from engine.actors.launch import start
from engine.policies import added_states
from engine.protocols import Batch, GroupWork
from engine.record import Recorder
from engine.runtime.local import SimpleGenerator, SimpleTrainer, response
from engine.runtime.prompt_sources import CountedPrompts, listed
from engine.states.limits import Limits, Pool
from engine.trajectory import Trajectory
from engine.workers.plan import Plan, Restore, Rollout
from tests.torture.inspections import DEATH, STATES

ROOT = Path(__file__).resolve().parents[2]
MARK = "STEP_ENGINE_TORTURE"
ACTORS = ("RolloutActor", "TrainerActor", "ScorerActor", "TrajectoryStoreActor", "WeightsStoreActor", "SchedulerActor")
TREE = "tree"
STATES_ACTOR = "AddedStatesActor"
INSPECTING = "inspecting"
"""The mode in which death comes while an added state inspects a batch or weights."""
SAMPLES = 2


@dataclass(frozen=True)
class Point:
    """What a seed says: the run, what dies, and when."""

    seed: int
    staleness: int
    steps: int
    batch: int
    checkpoint_every: int
    victim: str
    kills: tuple[int, ...]
    """Bytes of the record at each death, counted from where the life that dies began; with a `state`, the number of the
    step, or of the steps in the weights, that it inspects then."""
    state: str = ""
    """The added state whose work brings death."""

    @classmethod
    def of(cls, seed: int, mode: str) -> "Point":
        random = Random(f"{mode}-{seed}")
        victim = TREE if mode == TREE else ACTORS[seed % len(ACTORS)]
        kills = random.randint(1, 2) if mode == TREE else 1
        point = cls(
            seed=seed, staleness=random.choice((0, 0, 2)), steps=random.randint(6, 10), batch=4,
            checkpoint_every=random.choice((1, 2, 3)), victim=victim,
            kills=tuple(random.randint(200, 7000) for _ in range(kills)),
        )  # fmt: skip
        if mode != INSPECTING:
            return point
        state, victim = ("batch-torture", "weights-torture")[seed // 2 % 2], (TREE, STATES_ACTOR)[seed % 2]
        return replace(point, state=state, victim=victim, kills=(random.randint(1, 5),))


def digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


FIRST = digest("initial weights")


def tokens_of(weights: str, prompt: str, sample: int) -> list[int]:
    return [int(digest(weights, prompt, sample, place)[:4], 16) for place in range(3)]


def trained(weights: str, groups: Sequence[tuple[int, Sequence[Sequence[int]]]]) -> str:
    """The weights after a step on these (group, tokens of each sample), whose order does not matter."""
    return digest(weights, sorted((group, [list(tokens) for tokens in samples]) for group, samples in groups))


def last_weights(point: Point) -> str:
    """Of a run at S = 0, in which step t trains on the t-th batch of prompts under the weights of its own step."""
    weights = FIRST
    for step in range(point.steps):
        groups = range(step * point.batch, (step + 1) * point.batch)
        sampled = [(g, [tokens_of(weights, f"question {g}", i) for i in range(SAMPLES)]) for g in groups]
        weights = trained(weights, sampled)
    return weights


class Sampler(SimpleGenerator):
    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        await asyncio.sleep(0.002 * (1 + work.group % 3))
        sampled = [tokens_of(weights or FIRST, work.prompt.text, i) for i in range(work.samples)]
        return [response(tokens, reward=float(i % 2), version=version) for i, tokens in enumerate(sampled)]


class Chain(SimpleTrainer):
    def __init__(self) -> None:
        self.steps, self.chain = 0, FIRST

    def train(self, batch: Batch) -> dict[str, float]:
        assert batch.step == self.steps, "a step was lost or done twice"
        self.chain = trained(self.chain, [(g.group, [t.token_ids for t in g.trajectories]) for g in batch.groups])
        self.steps += 1
        return {"loss": 0.0, "optimizer_steps": 1.0}

    def weights(self) -> str:
        return self.chain

    def save(self, directory: str, step: int) -> None:
        assert step == self.steps
        Path(directory, "chain.json").write_text(json.dumps({"steps": self.steps, "chain": self.chain}))


class Reference:
    """A scorer whose log-probs nobody needs."""

    def score(self, batch: Batch, task: str) -> list[list[list[float]]]:
        return [[[0.0] * len(t.token_ids) for t in group.trajectories] for group in batch.groups]

    def load(self, weights: Any) -> None: ...


def restore(trainer: Any, restore: Restore) -> None:
    trainer.steps = restore.steps
    trainer.chain = restore.weights
    if restore.checkpoint is not None:
        kept = json.loads(Path(restore.checkpoint, "chain.json").read_text())
        trainer.steps, trainer.chain = kept["steps"], kept["chain"]


def prompts(point: Point, dies_at: int | None, sprung: Path) -> CountedPrompts:
    """Called where the scheduler lives, which is where death comes from; once, also where another takes its place."""
    if dies_at is not None and not sprung.exists():
        lay_trap(point.victim, dies_at, sprung)
    return listed([f"question {n}" for n in range(point.batch * (point.steps + 4))])


def plan(run_dir: Path, point: Point, dies_at: int | None) -> Plan:
    apart = point.victim == "ScorerActor"
    pools = (Pool(tasks=("rollout",), replicas=(0, 1)), Pool(tasks=("train",)), Pool(tasks=("ref_logprobs",)))
    limits = Limits(
        train_batch_size=point.batch, max_staleness_steps=point.staleness, max_steps=point.steps,
        max_concurrent_groups=point.batch * (point.staleness + 1), checkpoint_every=point.checkpoint_every,
        keeps_batches=point.seed % 3 > 0,  # a third branches
        scoring_tasks=("ref_logprobs",) if apart else (), pools=pools if apart else (),
        added_states=added_states(tuple(STATES)) if point.state else (),
    )  # fmt: skip
    return Plan(
        limits=limits, samples=SAMPLES, replicas=2, slots=8,
        make_rollout=lambda replica: Rollout(generator=Sampler()), make_trainer=Chain, restore_trainer=restore,
        make_prompts=lambda: prompts(point, dies_at, run_dir / f"sprung-{dies_at}"),
        make_scorer=(lambda tasks: Reference()) if apart else None,
        trajectories="disk" if point.seed % 3 else "memory", run_dir=run_dir, snapshot_every=60,
        resume=(run_dir / "schedule" / "00000000.seg").exists(),
        config={"run": {"extensions": ["tests.torture.inspections"]}} if point.state else {},
    )  # fmt: skip


# death


def marked(mark: str) -> Iterator[tuple[int, str]]:
    """(pid, command line) of every process that carries a mark and has not ended."""
    wanted = f"{MARK}={mark}".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            if wanted not in Path(entry.path, "environ").read_bytes().split(b"\0"):
                continue
            yield int(entry.name), Path(entry.path, "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue  # it has ended


def kill_tree(mark: str) -> None:
    """Kill every process that carries the mark, this one last."""
    kill_others(mark)
    strike(os.getpid())


def kill_others(mark: str) -> None:
    """Kill every process that carries the mark but this one, also those that are started meanwhile."""
    struck = {os.getpid()}
    while others := [pid for pid, _ in marked(mark) if pid not in struck]:
        struck.update(others)
        for pid in others:
            strike(pid)


def strike(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def lay_trap(victim: str, dies_at: int, sprung: Path) -> None:
    """Have the recorder of this process bring death once it has written so many bytes."""
    written, honest, mark = [0], Recorder.flush, os.environ[MARK]

    def flush(recorder: Recorder) -> None:
        held = recorder.progress[1]
        if written[0] >= 0 and written[0] + held > dies_at:
            sprung.touch()
            if victim == TREE:
                data = b"".join(recorder.log._held)[: max(0, dies_at - written[0])]
                os.write(recorder.log._require_open().fileno(), data)
                kill_tree(mark)
            for pid in [pid for pid, said in marked(mark) if victim in said][:1]:
                written[0] = -1 << 40
                strike(pid)
        written[0] += held
        honest(recorder)

    Recorder.flush = flush  # type: ignore[method-assign]


def main() -> int:
    run_dir, seed, mode, life = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    point = Point.of(seed, mode)
    run_dir.mkdir(exist_ok=True)
    dies_at = point.kills[life] if life < len(point.kills) else None
    if point.state:
        death = {"state": point.state, "number": dies_at, "victim": point.victim, "sprung": str(run_dir / "sprung")}
        os.environ[DEATH], dies_at = json.dumps(death), None
    with start(plan(run_dir, point, dies_at)) as run:
        status = run.wait()
    print(json.dumps({"outcome": status.outcome, "step": status.step}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
