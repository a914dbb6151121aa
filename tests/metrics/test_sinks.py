"""Sinks through their own clients, read back by their own readers; and sinks that are slow or broken."""

import json
import struct
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from steady_world import steady_world

from engine.config.loading import parse_config
from engine.errors import ConfigError
from engine.metrics.journal import Journal
from engine.metrics.sinks import (
    MLFLOW_RUN,
    QUEUED_ROWS,
    RowWriter,
    Sink,
    check_sinks,
    figures_at,
    figures_of,
    open_row_writer,
)
from engine.reward_histogram import Histograms
from engine.states.limits import ValidationLimits

RUN = "20260101-000000-sunk"
CONFIG = {"run": {"seed": 3}, "trainer": {"learning_rate": 0.5, "loss": "ppo_clip"}}


def kept(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A sample for each second step and for each validation."""
    if row.get("step", 0) % 2:
        return []
    name = f"validation {row['validation']}" if "validation" in row else f"step {row['step']}"
    texts = {"prompt": "3+4=", "response": f"{name}:\n<b>7</b>"}
    return [{"group": 5, "reasons": ["best", "random"], "reward": 0.5, "advantage": None, **texts}]


def train(directory: Path, chosen: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Four steps of a run that writes to the sinks; the lines of its metrics.jsonl."""
    directory.mkdir(parents=True, exist_ok=True)
    books = open_row_writer(directory, CONFIG, chosen, kept)
    world = steady_world(steps=4, validation=ValidationLimits(rows=4), journal=books).to_the_end()
    world.metrics.close()
    for sink in books.sinks:
        sink.wait(90)  # a busy machine may take longer than a run waits
    assert [sink.lost for sink in books.sinks] == [0] * len(chosen)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text("utf-8").splitlines()]
    rows = [line for line in lines if "step" in line]
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and len(lines) == 6, "one validation before and one after"
    return rows


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    rows = train(tmp_path / RUN, {"tensorboard": {}})
    read = EventAccumulator(str(tmp_path / RUN / "tensorboard"))
    read.Reload()
    for name in ("reward_mean", "loss", "staleness_max", "seconds/training", "trainer_seconds/pack"):
        points = read.Tensors(name)
        assert [point.step for point in points] == [0, 1, 2, 3]
        values = [float(tensor_util.make_ndarray(point.tensor_proto)) for point in points]
        assert values == pytest.approx([figures_of(row)[name] for row in rows])
    assert "ess" not in read.Tags()["tensors"], "a figure that is not finite is left out"
    texts = EventAccumulator(str(tmp_path / RUN / "tensorboard" / "samples"))
    texts.Reload()
    shown = {}
    for name in ("train", "validation"):
        for point in texts.Tensors(f"samples/{name}"):
            shown[name, point.step] = tensor_util.make_ndarray(point.tensor_proto).item().decode()
    assert sorted(shown) == [("train", 0), ("train", 2), ("validation", 0), ("validation", 4)]
    drawn = {
        point.step: tensor_util.make_ndarray(point.tensor_proto).tolist() for point in texts.Tensors("rewards/reward")
    }
    assert drawn == {row["step"]: row["reward_histograms"]["reward"] for row in rows}
    about = texts.SummaryMetadata("rewards/reward").plugin_data
    assert about.plugin_name == "histograms", "TensorBoard draws it"
    figures = "group: 5, reasons: best, random, reward: 0.5"
    assert shown["train", 2] == f"{figures}\n\n**prompt**\n\n    3+4=\n\n**response**\n\n    step 2:\n    <b>7</b>"


def transaction_log(data: bytes) -> Iterator[bytes]:
    """The records of a file of Weights & Biases: after a header of 7 bytes, a log as LevelDB writes it, in blocks of
    32 KiB of pieces with checksum, length and kind (whole, first, middle, last)."""
    assert data[:4] == b":W&B"
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    rows = train(tmp_path / RUN, {"wandb": {"project": "a-project", "mode": "offline"}})
    (path,) = (tmp_path / RUN / "wandb").glob("offline-run-*/run-*.wandb")
    logged: list[dict[str, Any]] = []
    for data in transaction_log(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            assert (record.run.project, record.run.display_name) == ("a-project", RUN)
        elif record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            logged.append({key: json.loads(value) for key, value in items.items()})
    assert [row["_step"] for row in logged] == [0, 1, 2, 3, 4]
    names = ("samples/train/path", "samples/validation/path")
    tables = {(name, row["_step"]): row[name] for row in logged for name in names if name in row}
    assert sorted(tables) == [(names[0], 0), (names[0], 2), (names[1], 0), (names[1], 4)]
    table = json.loads((path.parent / "files" / tables["samples/train/path", 2]).read_text("utf-8"))
    assert table["columns"] == ["group", "reasons", "reward", "advantage", "prompt", "response"]
    assert table["data"] == [[5, "best, random", 0.5, None, "3+4=", "step 2:\n<b>7</b>"]]
    assert "validation/accuracy" in logged[0] and "validation/accuracy" in logged[4]
    assert {row["rewards/reward/_type"] for row in logged[:4]} == {"histogram"}
    assert [sum(row["rewards/reward/values"]) for row in logged[:4]] == [
        sum(count for *_, count in row["reward_histograms"]["reward"]) for row in rows
    ]
    for name in ("reward_mean", "loss", "seconds/training"):
        assert [row[name] for row in logged[:4]] == pytest.approx([figures_of(row)[name] for row in rows])


def test_mlflow_in_a_local_store(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    rows = train(tmp_path / RUN, {"mlflow": {"experiment": "an-experiment"}})
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("an-experiment")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == (RUN, "FINISHED")
    assert run.data.params["trainer/learning_rate"] == "0.5"
    for name in ("reward_mean", "loss", "seconds/training"):
        points = sorted(client.get_metric_history(run.info.run_id, name), key=lambda point: point.step)
        assert [point.step for point in points] == [0, 1, 2, 3]
        assert [point.value for point in points] == pytest.approx([figures_of(row)[name] for row in rows])
    texts = [file.path for file in client.list_artifacts(run.info.run_id, "samples")]
    assert texts == [f"samples/{name}.md" for name in ("train-000000", "train-000002", "validation-000000",
                                                       "validation-000004")]  # fmt: skip
    path = client.download_artifacts(run.info.run_id, "samples/validation-000004.md", str(tmp_path))
    assert "    validation 1:\n    <b>7</b>" in Path(path).read_text("utf-8")


# -- a run that is resumed ---------------------------------------------------------------------------------------------


def two_lives(directory: Path, chosen: dict[str, Any]) -> None:
    """Steps 0 and 1, then in another life of the run, with another setting, 2 and 3."""
    directory.mkdir(parents=True)
    for steps, config in (((0, 1), CONFIG), ((2, 3), {**CONFIG, "seed": 8})):
        books = open_row_writer(directory, config, chosen)
        for step in steps:
            books.write({"step": step, "loss": 1.0 / (1 + step)})
        books.close()
        for sink in books.sinks:
            sink.wait(90)
        assert [sink.lost for sink in books.sinks] == [0]


def test_mlflow_goes_on_with_its_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    two_lives(tmp_path / RUN, {"mlflow": {}})
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("step-engine").experiment_id])
    assert run.info.status == "FINISHED"
    points = sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, "loss"))
    assert points == [(step, 1.0 / (1 + step)) for step in range(4)]

    client.delete_run(run.info.run_id)
    (tmp_path / RUN / MLFLOW_RUN).write_text("0" * 32)
    books = open_row_writer(tmp_path / RUN, CONFIG, {"mlflow": {}})
    books.write({"step": 4, "loss": 0.1})
    books.close()
    books.sinks[0].wait(90)
    assert books.sinks[0].lost == 0, "it begins another where the one of before is gone"


def test_tensorboard_goes_on_in_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    two_lives(tmp_path / RUN, {"tensorboard": {}})
    read = EventAccumulator(str(tmp_path / RUN / "tensorboard"))
    read.Reload()
    assert [point.step for point in read.Tensors("loss")] == [0, 1, 2, 3]


def test_weights_and_biases_has_both_lives_of_a_run_and_no_other_under_one_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    two_lives(tmp_path / RUN, {"wandb": {}})
    books = open_row_writer(tmp_path / "elsewhere" / RUN, CONFIG, {"wandb": {}})
    books.close()
    books.sinks[0].wait(90)
    ids = [[path.stem for path in folder.rglob("run-*.wandb")] for folder in (tmp_path / RUN, tmp_path / "elsewhere")]
    assert len(ids[0]) == 2 and ids[0][0] == ids[0][1] and len(ids[1]) == 1
    assert ids[0][0] != ids[1][0], "another run with the name of this one"


# -- what is wrong with a sink is not the run's affair -----------------------------------------------------------------


class Broken:
    """A client that takes nothing."""

    def write(self, step: int, figures: Mapping[str, float], histograms: Histograms) -> None:
        raise ConnectionError("no route to host")

    def show(self, step: int, name: str, samples: Sequence[Mapping[str, Any]]) -> None:
        raise ConnectionError("no route to host")

    def close(self) -> None:
        raise ConnectionError("no route to host")


class Stuck:
    """A client that stands still until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.steps: list[int] = []

    def write(self, step: int, figures: Mapping[str, float], histograms: Histograms) -> None:
        self.go.wait()
        self.steps.append(step)

    def show(self, step: int, name: str, samples: Sequence[Mapping[str, Any]]) -> None: ...

    def close(self) -> None: ...


def unmade() -> Any:
    raise RuntimeError("no account")


@pytest.mark.parametrize("make", [Broken, unmade], ids=["broken", "unmade"])
def test_a_sink_that_fails_costs_the_run_nothing(tmp_path: Path, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink("elsewhere", make, lambda row: [{"prompt": "?", "response": "!"}])
    world = steady_world(steps=4, journal=RowWriter(Journal(tmp_path / "metrics.jsonl"), [sink])).to_the_end()
    world.metrics.close()
    assert (
        world.scheduler.state.ending.outcome is not None and world.scheduler.state.ending.outcome.outcome == "finished"
    )
    assert len((tmp_path / "metrics.jsonl").read_text("utf-8").splitlines()) == 4
    assert sink.lost == 4
    assert "elsewhere" in caplog.text and caplog.text.count("Traceback") <= 3, "one report for all rows"
    assert caplog.text.count("did not accept samples") <= 1


def test_a_sink_that_stands_still_never_makes_the_run_wait() -> None:
    stuck = Stuck()
    sink = Sink("elsewhere", lambda: stuck)
    for step in range(QUEUED_ROWS + 10):
        sink.write({"step": step})
    assert 9 <= sink.lost <= 10, "the queue is full; one row may be with the client already"
    sink.end()
    stuck.go.set()
    sink.wait(30)
    assert stuck.steps == sorted(set(stuck.steps))
    assert len(stuck.steps) + sink.lost == QUEUED_ROWS + 10


def test_numbers_of_a_row_by_name() -> None:
    row = {"step": 3, "loss": None, "a": {"b": {"c": 1}}, "text": "x", "list": [1], "nan": float("nan"), "yes": True}
    assert figures_at({**row, "step": 3}) == (3, figures_of({**row, "step": 3}))
    validation = {
        "validation": 1,
        "version": 5,
        "steps": 4,
        "outcome": "reported",
        "accuracy": 0.5,
        "sets": {"math": {"prompts": 3, "pass@4": 0.25, "pass@4_low": None}},
        "seconds": {"running": 2.0},
    }
    assert figures_at(validation) == (
        4,
        {
            "validation/version": 5.0,
            "validation/steps": 4.0,
            "validation/accuracy": 0.5,
            "validation/seconds/running": 2.0,
            "validation/math/prompts": 3.0,
            "validation/math/pass@4": 0.25,
        },
    )
    assert figures_of(row) == {"step": 3.0, "a/b/c": 1.0, "yes": 1.0}


# -- configuration -----------------------------------------------------------------------------------------------------


def configured(sinks: Any) -> dict[str, dict[str, Any]]:
    return parse_config({"model": {"make": "arithmetic"}, "metrics": {"sinks": sinks}}).metrics.sinks.chosen()


def test_sinks_are_chosen_in_the_configuration() -> None:
    assert configured({}) == {}
    assert configured({"tensorboard": {"enabled": True}, "wandb": {"project": "p"}}) == {"tensorboard": {"dir": None}}
    chosen = configured(
        {"wandb": {"enabled": True, "project": "p"}, "mlflow": {"enabled": True, "uri": "http://x:5000"}}
    )
    assert chosen["wandb"] == {"project": "p", "entity": None, "mode": "offline"}
    assert chosen["mlflow"] == {"uri": "http://x:5000", "experiment": "step-engine"}
    with pytest.raises(ConfigError, match=r"metrics\.sinks\.tensorbord.*tensorboard"):
        configured({"tensorbord": {}})


def test_a_sink_whose_package_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"metrics\.sinks\.wandb.*not installed.*-m pip install .*\[wandb\]"):
        check_sinks(["wandb"])
