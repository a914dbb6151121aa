"""Samples of groups that the filter dropped: a few of each step, with what the filter saw, also after a restart."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from embedded_run import Quick, Saving, options

import engine.runtime.local
from engine import cli
from engine.ids import GroupId
from engine.protocols import GroupWork
from engine.runtime.filtered_samples import FilteredSamples
from engine.runtime.local import response
from engine.runtime.local.local_processes import LocalStores, LocalTrajectories, LocalWeights
from engine.storage.samples import FILTERED, FOLDER, SampleFiles, SamplePolicy
from engine.trajectory import Prompt, Trajectory, TrajectoryGroup
from engine.workers.sample_keeper import FILTERED_GROUPS, SampleKeeper


class Flat(Quick):
    """Every other group gets equal rewards."""

    async def sample(self, work: GroupWork, weights: Any, version: int) -> Sequence[Trajectory]:
        await asyncio.sleep(0)
        even = work.group % 2 == 1
        return [response([1], reward=0.5 if even else float(i), version=version) for i in range(work.samples)]


def kept(run_dir: Path) -> list[dict[str, Any]]:
    return list(SampleFiles(run_dir / FOLDER).rows(FILTERED))


def flat_run(run_dir: Path, **others: Any) -> None:
    flat = {"generators": lambda replica: Flat(), "policies": {"filter": "zero-variance"}, **others}
    assert engine.runtime.local.run(**options(run_dir, Saving(), **flat)).groups["filtered"] == 32


@pytest.mark.parametrize("trajectories", ["disk", "memory"])
def test_a_few_filtered_groups_of_each_step_are_kept_and_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trajectories: str
) -> None:
    flat_run(tmp_path, trajectories=trajectories)
    rows = kept(tmp_path)
    groups = {(row["step"], row["group"]) for row in rows}
    steps = [step for step, _ in groups]
    assert len({*steps}) > 1 and max(map(steps.count, steps)) <= FILTERED_GROUPS and len(rows) == 2 * len(groups)
    assert all(row["group"] % 2 and row["reward"] == 0.5 and row["reasons"][0] == FILTERED for row in rows)
    assert cli.main(["samples", str(tmp_path), "--filtered", "--limit", "1"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "sample 0 (filtered, " in said
    assert "zero-variance: 2 trainable responses, mean reward 0.5, largest minus smallest reward 0" in said
    assert cli.main(["samples", str(tmp_path), "--filtered", "--failed"]) == 2
    assert "--failed" in capsys.readouterr().err


def test_no_filtered_group_is_kept_if_samples_are_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat_run(tmp_path, sample_policy=SamplePolicy(per_step=0))
    assert kept(tmp_path) == []
    assert cli.main(["samples", str(tmp_path), "--filtered"]) == 2
    assert "has no samples of filtered groups" in capsys.readouterr().err


def flat_group(group: GroupId) -> TrajectoryGroup:
    one = [response([1], reward=1.0, version=0)]
    return TrajectoryGroup(group=group, prompt=Prompt(row=0, text="?"), trajectories=one)


def test_a_restarted_run_counts_the_filtered_groups_of_its_step(tmp_path: Path) -> None:
    async def add(first: int, read_fails: bool = False) -> None:
        async def read(groups: Sequence[GroupId]) -> list[TrajectoryGroup]:
            if read_fails:
                raise OSError("the store is gone")
            return [*map(flat_group, groups)]

        made = FilteredSamples(SampleKeeper(tmp_path, SamplePolicy(per_step=3)), read)
        made.keep([first, first + 1], 7, "mine")
        await asyncio.wait(made._tasks)

    asyncio.run(add(20, read_fails=True))
    asyncio.run(add(30))
    asyncio.run(add(40))
    assert [row["group"] for row in kept(tmp_path)] == [30, 31, 40], "three responses of a step"


def test_a_disk_that_hangs_delays_no_discard(tmp_path: Path) -> None:
    hanging = tmp_path / FOLDER / "filter-000007-000003.jsonl"
    hanging.parent.mkdir()
    os.mkfifo(hanging)  # to read it waits for a writer

    async def drop() -> None:
        store = LocalTrajectories()
        stores = LocalStores(store, LocalWeights())
        await store.put(flat_group(3), attempt=1)
        made = FilteredSamples(SampleKeeper(tmp_path, SamplePolicy()), stores.read)
        made.keep([3], 7, "mine")
        await asyncio.create_task(stores.discard([3]))
        assert store.store.stats().groups == 0
        (await asyncio.to_thread(open, hanging, "wb")).close()
        await asyncio.wait(made._tasks)

    asyncio.run(drop())
    assert [row["group"] for row in kept(tmp_path)] == [3]
