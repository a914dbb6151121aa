"""Resuming a run with a changed configuration: which changes are accepted or refused, and what the scheduler gets."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.cli.control_commands import require_live
from engine.config import load_config
from engine.config.resumption import resumed
from engine.errors import ConfigError
from engine.metrics.journal import cut_rows, line_of
from engine.scheduling.settings import live_settings


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A configuration file, and what the record of its run says."""
    path = tmp_path / "config.yaml"
    scheduler = {"train_batch_size": 4, "max_staleness_steps": 2, "max_concurrent_groups": 8}
    path.write_text(yaml.safe_dump({"model": {"make": "arithmetic"}, "scheduler": scheduler}))
    return path, load_config(path).model_dump(mode="json")


def test_nothing_changed_is_nothing_to_tell(begun: tuple[Path, dict[str, Any]]) -> None:
    config, settings = resumed(*begun)
    assert settings == () and config.model_dump(mode="json") == begun[1]


@pytest.mark.parametrize(
    ("overrides", "settings"),
    [
        (["scheduler.max_drops=2"], [("scheduler.max_drops", "2")]),
        (["scheduler.policies.deadline=drop"], [("scheduler.policies.deadline", "drop")]),
        (["scheduler.policies.sync=rolling"], [("scheduler.policies.sync", "rolling")]),
        (["timeouts.group_s=90"], [("timeouts.group_s", "90.0")]),
        (["timeouts.group_s=null"], [("timeouts.group_s", "null")]),
        (["scheduler.max_drops=4"], [("scheduler.max_drops", "4")]),
        (["trainer.keep_checkpoints=5"], [("trainer.keep_checkpoints", "5")]),
        (["trainer.keep_checkpoints_every=20"], [("trainer.keep_checkpoints_every", "20")]),
        (
            ["scheduler.max_concurrent_groups=16", "scheduler.max_staleness_steps=3"],
            [("scheduler.max_staleness_steps", "3"), ("scheduler.max_concurrent_groups", "16")],
        ),
        (
            ["scheduler.max_staleness_steps=0", "scheduler.max_concurrent_groups=4"],
            [("scheduler.max_concurrent_groups", "4"), ("scheduler.max_staleness_steps", "0")],
        ),
    ],
)
def test_live_settings_are_reported_in_an_order_that_holds(
    begun: tuple[Path, dict[str, Any]], overrides: list[str], settings: list[tuple[str, str]]
) -> None:
    """One that is given is reported even if it equals the first value: it may have been set meanwhile."""
    assert list(resumed(*begun, overrides)[1]) == settings


def test_free_fields_change_and_only_those_that_a_run_has_set_are_reported(begun: tuple[Path, dict[str, Any]]) -> None:
    overrides = [
        "rollout.replicas=5",
        "control.enabled=false",
        "run.silence_s=9",
        "durability.drain_s=30",
        "samples.per_step=3",
    ]
    config, settings = resumed(*begun, overrides)
    assert settings == (("durability.drain_s", "30.0"), ("rollout.replicas", "5"))
    assert (config.rollout.replicas, config.control.enabled, config.durability.drain_s) == (5, False, 30.0)


def test_a_run_whose_nodes_each_hold_a_model_resumes_on_one_node(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {make: arithmetic}\ntrainer: {ranks: 2, nodes: 2, hybrid_sharding: true}\n")
    recorded = load_config(path).model_dump(mode="json")
    overrides = ["trainer.nodes=1", "trainer.hybrid_sharding=false"]
    assert resumed(path, recorded, overrides)[0].trainer.nodes == 1


def test_every_other_difference_is_reported_with_what_was_and_is(begun: tuple[Path, dict[str, Any]]) -> None:
    overrides = ["scheduler.train_batch_size=8", "run.seed=3", "scheduler.max_drops=2", "rollout.replicas=5"]
    with pytest.raises(ConfigError) as caught:
        resumed(*begun, overrides)
    said = str(caught.value)
    assert "run.seed is 3, but must stay 0: the run began with it" in said
    assert "scheduler.train_batch_size was 4, is 8" in said
    assert "max_drops was" not in said and "rollout.replicas was" not in said
    assert "engine run CONFIG --from RUN" in said and "docs/RESUME.md" in said


def test_a_field_that_must_not_change_is_refused_before_the_laws_that_it_breaks(
    begun: tuple[Path, dict[str, Any]],
) -> None:
    with pytest.raises(ConfigError, match=r"^scheduler.train_batch_size is 64, but must stay 4: the run began with it"):
        resumed(*begun, ["scheduler.train_batch_size=64", "rollout.replicas=5", "scheduler.max_drops=2"])
    with pytest.raises(ConfigError, match=r"^scheduler.max_concurrent_groups is 64, but must be from 4 to 12 "):
        resumed(*begun, ["scheduler.max_concurrent_groups=64"])


def test_a_section_of_a_list_is_not_blamed_for_the_defaults_that_were_recorded(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    pools = [{"tasks": ["rollout", "train"]}]
    path.write_text(yaml.safe_dump({"model": {"make": "arithmetic"}, "pools": pools}))
    recorded = load_config(path).model_dump(mode="json")
    with pytest.raises(ConfigError, match=r"^scheduler.max_concurrent_groups is 9999, but must be from "):
        resumed(path, recorded, ["scheduler.max_concurrent_groups=9999"])


def test_the_innermost_differences_of_an_optional_section_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"model": {"make": "arithmetic"}, "trainer": {"lora": {"rank": 4}}}))
    recorded = load_config(path).model_dump(mode="json")
    with pytest.raises(ConfigError) as caught:
        resumed(path, recorded, ["trainer.lora.rank=8", "trainer.lora.alpha=64"])
    said = str(caught.value)
    assert said.startswith(
        "trainer.lora.rank is 8, but must stay 4: the run began with it (also: trainer.lora.alpha was"
    )
    assert len(said) < 400


def test_a_resume_takes_inputs_that_were_moved_and_no_others(tmp_path: Path) -> None:
    inputs = {"data": {"path": "old.jsonl"}, "reward": {"function": "engine.tasks.rewards:exact_match"}}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": "org/model"}, **inputs}))
    recorded = load_config(path).model_dump(mode="json")
    (tmp_path / "old.jsonl").write_text("")
    (tmp_path / "new.jsonl").write_text("")
    override = f"data.path={tmp_path / 'new.jsonl'}"
    with pytest.raises(ConfigError, match=r"data\.path is .*new\.jsonl"):
        resumed(path, recorded, [override])
    (tmp_path / "old.jsonl").unlink()
    assert resumed(path, recorded, [override])[0].data.path == str(tmp_path / "new.jsonl")


def test_where_runs_and_code_are_may_change(begun: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    config, settings = resumed(*begun, [f"run.dir={tmp_path / 'other'}", f"run.code_dir={tmp_path / 'code'}"])
    assert (config.run.dir, settings) == (str(tmp_path / "other"), ())


def test_every_live_setting_is_a_field_and_bounds_are_not_live() -> None:
    from engine.config.loading import fields

    known = {path for path, _ in fields()}
    assert set(live_settings()) <= known
    assert require_live("scheduler.max_drops") == "scheduler.max_drops"
    for path in ("scheduler.train_batch_size", "scheduler.sync_every", "trainer.loss"):
        with pytest.raises(ConfigError, match=path):
            require_live(path)


def test_a_line_of_the_metrics_that_is_no_row_is_reported_and_left_out(tmp_path: Path) -> None:
    path, complaints = tmp_path / "metrics.jsonl", []
    rows = [line_of({"step": step, "loss": 0.5}).rstrip(b"\n") for step in range(4)]
    whole = [
        rows[0],
        b'{"step": 1, "lo',
        b"\xff\xfe",
        b"[1, 2]",
        rows[1].replace(b"step", b"stop"),
        b"",
        rows[2],
        rows[3],
    ]
    path.write_bytes(b"\n".join(whole) + b"\n" + b'{"step": 4')
    assert [row["step"] for row in cut_rows(path, 3, complain=complaints.append)] == [0, 2]
    assert [said.partition(" is not a row")[0] for said in complaints] == [
        f"{path}: line {number}" for number in (2, 3, 4, 5, 6)
    ]
    assert path.read_bytes() == rows[0] + b"\n" + rows[2] + b"\n"


def test_arguments_that_are_added_or_removed_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    environment = {"class_name": "engine.environments.lookup:Lookup", "arguments": {"error_penalty": 0.2}}
    path.write_text(yaml.safe_dump({"model": {"make": "lookup"}, "environment": environment}))
    recorded = load_config(path).model_dump(mode="json")
    for arguments in ({}, {"error_penalty": 0.2, "extra": 1}, {"error_penalty": 0.3}):
        path.write_text(
            yaml.safe_dump({"model": {"make": "lookup"}, "environment": environment | {"arguments": arguments}})
        )
        with pytest.raises(ConfigError) as caught:
            resumed(path, recorded)
        assert "environment.arguments" in str(caught.value) and "error_penalty" in str(caught.value)
