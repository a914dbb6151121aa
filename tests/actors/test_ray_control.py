"""A real run that gets commands while it continues."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray_plans import check_record, events_of, plan, slow

from engine import cli
from engine.actors.launch import RunHandle, start
from engine.control.address_file import FILE, place_of
from engine.control.client import tell
from engine.control.requests import Look
from engine.events import DrainRequested, ReplicasWanted, RunResumed, SettingChanged
from engine.metrics.status import Status
from engine.runtime.prompt_sources import listed

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


def until(run: RunHandle, holds: Callable[[Status], bool]) -> Status:
    return next(status for status in run.updates() if holds(status) or status.outcome is not None)


def without_end() -> Any:
    return listed([f"question {n}" for n in range(40)], epochs=100_000)


def test_a_run_is_scaled_set_drained_and_resumed_as_it_was_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = plan(tmp_path, slow, make_prompts=without_end, control_port=0, reward_timeout_s=30.0)
    with start(mine) as run:
        token = place_of(tmp_path, "it").token
        until(run, lambda status: status.step >= 1)
        assert cli.main(["scale", str(tmp_path), "--replicas", "3"]) == 0
        assert "3 replicas are wanted; K = 12 leaves some of their 18 slots empty" in capsys.readouterr().out
        changed = ["scheduler.max_staleness_steps=3", "scheduler.max_concurrent_groups=16"]
        assert cli.main(["set", str(tmp_path), *changed]) == 0
        up = until(run, lambda status: len(status.replica_versions) == 3 and status.max_concurrent_groups == 16)
        assert up.outcome is None and up.max_staleness_steps == 3
        assert cli.main(["set", str(tmp_path), "scheduler.max_concurrent_groups=99"]) == 2
        assert cli.main(["set", str(tmp_path), "timeouts.group_s=20"]) == 2
        assert "longer than reward.timeout_s = 30; use more than 30" in capsys.readouterr().err
        assert cli.main(["scale", str(tmp_path), "--replicas", "1"]) == 0
        assert "hold less than B" not in capsys.readouterr().out
        fewer = until(run, lambda status: list(status.replica_versions) == [0])
        assert fewer.outcome is None
        assert tell(tmp_path, "it", Look())["waits"]
        assert cli.main(["drain", str(tmp_path)]) == 0
        assert "the run drains" in capsys.readouterr().out
        last = run.wait()
        assert (last.outcome, last.reason, run.end_requested) == ("stopped", "asked by engine drain", True)
    assert not (tmp_path / FILE).exists()
    written = [path for path in tmp_path.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    assert written == [], "the token stood in control.json alone"
    assert check_record(tmp_path).state.groups.ledger.running == 0
    with start(replace(mine, resume=True, settings=[("scheduler.max_drops", "1")])) as run:
        until(run, lambda status: list(status.replica_versions) == [0])
        run.drain("enough")
        assert run.wait().outcome == "stopped"
    kinds = [
        type(event).__name__
        for event in events_of(tmp_path, RunResumed, SettingChanged, ReplicasWanted, DrainRequested)
    ]
    once = ["ReplicasWanted", "SettingChanged", "SettingChanged", "ReplicasWanted", "DrainRequested"]
    assert kinds == [*once, "RunResumed", "SettingChanged", "ReplicasWanted", "DrainRequested"]
    assert [event.replicas for event in events_of(tmp_path, ReplicasWanted)] == [3, 1, 1]
    limits = check_record(tmp_path).state.limits
    assert (limits.max_staleness_steps, limits.max_concurrent_groups, limits.max_drops) == (3, 16, 1)
