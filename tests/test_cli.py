"""The command line: what it prints, where, and its exit codes; above all for bad input."""

import dataclasses
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from rich.console import Console
from steady_world import SteadyWorld, steady_world

from engine import cli
from engine.cli import interrupts
from engine.cli.interrupts import Interrupts
from engine.cli.run import Mode, watch
from engine.config import Config, load_config
from engine.errors import ConfigError, EngineError, InvariantViolated, RayProcessEnded, RecordError
from engine.metrics.journal import Journal
from engine.metrics.status import Status, read_status
from engine.record import Header, Recorder
from engine.record.files import RecordLock
from engine.record.frames import SCHEDULE
from engine.record.segment_log import Index, preamble, store_index
from engine.states.group import GROUP
from engine.states.machine import Table
from engine.states.pool import POOL
from engine.states.process import PROCESS
from engine.states.replica import REPLICA
from engine.states.step import STEP
from engine.states.validation import VALIDATION
from engine.states.version import VERSION
from engine.storage import run_directory
from engine.storage.samples import SampleFiles
from engine.tasks.tokenizer import save_character_tokenizer

ROOT = Path(__file__).resolve().parent.parent
TABLES = (GROUP, STEP, PROCESS, REPLICA, VERSION, VALIDATION, POOL)

Capture = pytest.CaptureFixture[str]
ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
pytestmark = pytest.mark.usefixtures("own_signals")


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_config(path: str = "tiny.yaml", **sections: dict[str, Any]) -> str:
    """A configuration that holds, but for what the test puts in."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"max_steps": 4},
        "model": {"make": "arithmetic"},
        "scheduler": {
            "train_batch_size": 4,
            "policy_mini_batch_size": 2,
            "samples_per_prompt": 4,
            "max_staleness_steps": 2,
            "max_concurrent_groups": 8,
        },
    }
    for name, fields in sections.items():
        tree[name] = {**tree.get(name, {}), **fields}
    Path(path).write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def own_data(**data: Any) -> dict[str, dict[str, Any]]:
    """Sections of a run on a model, data and reward of the user's own."""
    return {
        "model": {"make": None, "path": "mine"},
        "data": {"path": "prompts.jsonl", **data},
        "reward": {"function": "my_reward:score"},
    }


def write_data() -> None:
    Path("prompts.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}\n', encoding="utf-8")
    Path("my_reward.py").write_text("def score(prompt, trajectory):\n    return 1.0\n", encoding="utf-8")
    write_model("mine")


def refused(capture: Capture, *arguments: str) -> str:
    """What is said of bad input: on stderr, exit 2, without a traceback."""
    assert cli.main(arguments) == 2
    said = capture.readouterr()
    assert "Traceback" not in said.err
    assert said.err.startswith("engine: ")
    assert said.err.count("\n") == 1
    return said.err


# -- bad configurations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_field_out_of_law_is_named_with_its_value_and_its_fix(capsys: Capture, command: str) -> None:
    said = refused(capsys, command, write_config(), "--set", "scheduler.max_concurrent_groups=3")
    assert all(word in said for word in ("scheduler", "is 3", "B <= K <= B", "from 4 to 12")), said
    assert not Path("runs").exists(), "nothing is left behind"


def test_an_override_wins(capsys: Capture) -> None:
    assert cli.main(["check", write_config(), "--set", "scheduler.max_concurrent_groups=12"]) == 0
    assert "(4 <= 12 <= 12)" in capsys.readouterr().out


# -- bad data and rewards ----------------------------------------------------------------------------------------------


def spoil(name: str, text: str | None) -> Callable[[], None]:
    def write() -> None:
        Path(name).unlink() if text is None else Path(name).write_text(text, encoding="utf-8")

    return write


BAD_INPUTS: dict[str, tuple[Callable[[], None], list[str]]] = {
    "no data": (spoil("prompts.jsonl", None), ["data.path", "prompts.jsonl", "does not exist"]),
    "no prompt": (spoil("prompts.jsonl", '{"question": "?"}\n'), ["data.path", "line 1", "'question'"]),
    "no reward module": (spoil("my_reward.py", None), ["reward.function", "my_reward:score", "no module named"]),
}


@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_data_and_rewards_are_refused_before_anything_starts(capsys: Capture, case: str, command: str) -> None:
    spoilt, words = BAD_INPUTS[case]
    write_data()
    spoilt()
    said = refused(capsys, command, write_config(**own_data()))
    for word in words:
        assert word in said, (word, said)
    assert not Path("runs").exists()


@pytest.mark.usefixtures("own_modules")
def test_a_missing_model_directory_is_refused(capsys: Capture) -> None:
    write_data()
    sections = own_data()
    sections["model"]["path"] = "./no/such/model"
    looked = Path.cwd() / "no/such/model"
    assert f"model.path '{looked}' is not a directory" in refused(capsys, "check", write_config(**sections))


def write_model(directory: str, *missing: str) -> None:
    """The files of a model whose weights nobody reads."""
    Path(directory).mkdir(exist_ok=True)
    save_character_tokenizer(directory, "ab+=")
    header = json.dumps({"__metadata__": {}, "wide": {"shape": [1 << 20, 1 << 16], "dtype": "BF16"}}).encode()
    Path(directory, "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    Path(directory, "config.json").write_text('{"model_type": "qwen2"}')
    for name in missing:
        Path(directory, name).unlink()


@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_directory_without_a_model_is_refused(capsys: Capture, missing: str) -> None:
    write_data()
    write_model("mine", missing)
    said = refused(capsys, "check", write_config(**own_data()))
    assert said.startswith(f"engine: model.path '{Path.cwd() / 'mine'}' has no ") and missing in said


@pytest.mark.usefixtures("own_modules")
def test_a_teacher_with_another_tokenizer_is_refused(capsys: Capture) -> None:
    write_data()
    write_model("teacher")
    sections = {**own_data(), "model": {"make": None, "path": "mine"}, "trainer": {"advantage": "distillation"}}
    sections["trainer"]["reference_path"] = "./teacher"
    sections["scheduler"] = {"policies": {"filter": "none"}}
    assert cli.main(["check", str(write_config(**sections))]) == 0
    save_character_tokenizer("teacher", "abc+")
    said = refused(capsys, "check", write_config(**sections))
    assert "has another tokenizer than model.path: its token" in said and "use a model with the same tokenizer" in said


@pytest.mark.usefixtures("own_modules")
def test_a_stop_string_that_is_not_one_token_is_refused(capsys: Capture) -> None:
    write_data()
    own = write_config(**own_data())
    assert "splits 'ab' into 2" in refused(capsys, "check", own, "--set", "rollout.stop=[a, ab]")
    assert cli.main(["check", own, "--set", "rollout.stop=[a, <end>]"]) == 0
    assert "splits '12' into 2" in refused(capsys, "check", write_config(), "--set", "rollout.stop=['12']")


@pytest.mark.usefixtures("own_modules")
def test_weights_that_the_object_store_cannot_hold_are_reported(capsys: Capture) -> None:
    write_data()
    config = write_config(**own_data())
    assert cli.main(["check", config]) == 0
    assert "3 weights versions need 824.6 GB of shared memory" in capsys.readouterr().out
    Path("held_out.jsonl").write_text('{"prompt": "1 + 1"}\n')
    validated = ["--set", "data.validation_path=held_out.jsonl", "--set", "validation.every=2"]
    assert cli.main(["check", config, *validated]) == 0
    assert "5 weights versions" in capsys.readouterr().out, "one being measured, and one that waits for it"
    assert cli.main(["check", config, "--set", "rollout.transport=distributed"]) == 0
    assert "object store" not in capsys.readouterr().out


@pytest.mark.usefixtures("own_modules")
def test_what_holds_is_said(capsys: Capture) -> None:
    write_data()
    assert cli.main(["check", write_config(**own_data())]) == 0
    said = capsys.readouterr()
    assert "ok: data.path has 2 prompts" in said.out
    assert "ok: reward.function my_reward:score can be imported" in said.out
    assert f"ok: model.path {Path.cwd() / 'mine'} has a model and a tokenizer" in said.out
    assert "S >= k - 1" in said.out and "B <= K <= B*(S+1)" in said.out
    assert said.err == ""


@pytest.mark.usefixtures("own_modules")
def test_a_preset_with_relative_paths_is_checked_from_another_directory(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_data()
    tree = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    tree |= {**own_data(validation_path="prompts.jsonl"), "model": {"path": "mine"}}
    Path("copy.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli.main(["check", "../copy.yaml"]) == 0
    said = capsys.readouterr().out
    assert f"ok: model.path {tmp_path / 'mine'} has a model" in said
    assert "ok: data.path has 2 prompts" in said and "ok: reward.function my_reward:score" in said
    missing = refused(capsys, "check", "../copy.yaml", "--set", "data.path=prompts.jsonl")
    assert str(tmp_path / "elsewhere" / "prompts.jsonl") in missing, "the message says where the engine looked"
    (tmp_path / "my_reward.py").unlink()
    del sys.modules["my_reward"]
    assert f"put my_reward.py into {tmp_path}" in refused(capsys, "check", "../copy.yaml")


# -- the run directory -------------------------------------------------------------------------------------------------


def test_a_run_directory_has_its_place_and_latest_points_at_it() -> None:
    first = run_directory.create("runs", "quick", config_yaml="a: 1\n")
    second = run_directory.create("runs", "quick", config_yaml="a: 2\n")
    assert first.path != second.path, "two runs in one second"
    assert re.fullmatch(r"\d{8}-\d{6}-quick(-2)?", first.path.name)
    assert first.config.read_text() == "a: 1\n" and first.schedule.is_dir() and first.checkpoints.is_dir()
    assert Path("runs/latest").resolve() == second.path.resolve()
    assert run_directory.open_run("latest").path == Path("runs/latest")
    assert run_directory.open_run("runs/latest/schedule").path == Path("runs/latest")
    assert second.shown == f"runs/{second.path.name}"


def test_a_chosen_directory_is_linked_too_and_never_overwritten(tmp_path: Path) -> None:
    Path("chosen").mkdir()
    chosen = run_directory.create("runs", "quick", config_yaml="a: 1\n", chosen="chosen")
    assert chosen.path == Path("chosen")
    assert Path("runs/latest").resolve() == (tmp_path / "chosen").resolve()
    Recorder(chosen.schedule, Header(run="chosen", limits={})).close()
    with pytest.raises(ConfigError, match="run_dir 'chosen' already holds a run; a run needs a new or empty directory"):
        run_directory.create("runs", "quick", config_yaml="a: 2\n", chosen="chosen", argument="run_dir")
    Path("mine").mkdir()
    write_config("mine/config.yaml")
    with pytest.raises(ConfigError, match=r"--run-dir 'mine' is not empty: it has config.yaml; a run needs a new"):
        run_directory.create("runs", "quick", config_yaml="", chosen="mine")
    assert chosen.config.read_text() == "a: 1\n"


@pytest.mark.parametrize(
    ("command", "field"), [("run", "metrics.port"), ("check", "metrics.port"), ("check", "control.port")]
)
def test_each_command_refuses_a_port_in_use_before_anything_is_made(capsys: Capture, command: str, field: str) -> None:
    config = write_config()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(capsys, command, config, "--set", f"{field}={port}")
    assert f"{field} {port}" in said and "use 0 for any free port" in said
    assert not Path("runs").exists()


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_version_that_the_engine_cannot_use_is_refused(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    old = tmp_path / "site" / "transformers-4.57.0.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.0\n")
    monkeypatch.syspath_prepend(old.parent)
    said = refused(capsys, command, write_config())
    assert "package transformers '4.57.0' is not a version that this engine can use: it needs transformers" in said
    assert ">=5.16.1" in said and "[ray,train]" in said
    assert not Path("runs").exists()


def test_a_directory_that_cannot_be_made_is_bad_input(capsys: Capture) -> None:
    Path("file").write_text("")
    said = refused(capsys, "run", write_config(), "--run-dir", "file/run")
    assert "--run-dir 'file/run'" in said
    assert "run.dir" in refused(capsys, "run", write_config(), "--set", "run.dir=file")


# -- engine run --------------------------------------------------------------------------------------------------------


class FakeHandle:
    """A run on a virtual clock behind the interface of `actors.launch.RunHandle`."""

    metrics_url = "http://127.0.0.1:12345/metrics"

    def __init__(self, world: SteadyWorld, fail: Exception | None = None, interrupt_after: int | None = None) -> None:
        self.world = world
        self.fail = fail
        self.interrupt_after = interrupt_after
        self.end_requested = False
        self.resumed: tuple[Path, tuple[tuple[str, str], ...]] | None = None
        self.drained: str | None = None
        self.stopped: str | None = None
        self.closed = False

    def updates(self) -> Iterator[Status]:
        world = self.world
        while True:
            done = world.scheduler.state.training.steps_trained
            world.run_until(lambda state, done=done: state.training.steps_trained > done)
            yield read_status(world.metrics)
            if world.driver.outcome is not None:
                return
            if self.fail is not None and done >= 1:
                raise self.fail
            if self.interrupt_after is not None and done >= self.interrupt_after:
                self.interrupt_after = None
                raise KeyboardInterrupt

    def drain(self, reason: str) -> None:
        from engine.events import DrainRequested

        self.drained = reason
        self.world.tell(DrainRequested(reason=reason))

    def history(self) -> str:
        return "resumed from the initial weights"

    def stop(self, reason: str) -> None:
        from engine.events import StopRequested

        self.stopped = reason
        self.world.tell(StopRequested(reason=reason))

    def close(self) -> None:
        self.closed = True
        self.world.driver.recorder.close()


Launch = Callable[..., list[FakeHandle]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Puts a fake in place of the Ray actors; what it launches is appended to the list it returns."""

    def install(kind: type[FakeHandle] = FakeHandle, **options: Any) -> list[FakeHandle]:
        handles: list[FakeHandle] = []

        def launch(
            config: Config,
            run_dir: Path,
            *,
            progress: Callable[[float, str], None],
            resume: bool,
            force_from: str | None,
            settings: tuple[tuple[str, str], ...],
            local: Mapping[str, Any],
            accept_data_change: bool,
        ) -> FakeHandle:
            if resume:
                handles.append(kind(steady_world(batch=4, stale=2, workers=8, steps=4, replicas=2, slots=4), **options))
                handles[-1].resumed = (run_dir, settings)
                return handles[-1]
            progress(0.0, "making data")
            progress(0.1, "supervised warm-up: step 1 of 10")
            progress(1.0, "model ready")
            limits = dataclasses.replace(config.limits, validation=None, keeps_batches=False)
            fields = config.model_dump(mode="json")
            header = Header(run=run_dir.name, limits=limits.to_plain(), policies={}, config=fields)
            recorder = Recorder(run_dir / "schedule", header)
            world = SteadyWorld(limits, slots=4, journal=Journal(run_dir / "metrics.jsonl"), recorder=recorder)
            handles.append(kind(world, **options))
            return handles[-1]

        fake = ModuleType("engine.actors.launch")
        fake.launch = launch  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "engine.actors.launch", fake)
        return handles

    return install


def test_a_run_prints_lines_one_table_and_what_to_type_next(capsys: Capture, launched: Launch) -> None:
    (handles, config) = launched(), write_config("my config.yaml")
    assert cli.main(["run", config]) == 0
    out = capsys.readouterr().out
    (where,) = re.findall(r"^run: (runs/\d{8}-\d{6}-my-config)$", out, re.MULTILINE)
    assert "metrics: http://127.0.0.1:12345/metrics" in out
    assert "making data\nmodel ready\n" in out, "not a line for every step of the warm-up"
    assert re.findall(r"^step=(\d) done=\d/4 ", out, re.MULTILINE) == ["0", "1", "2", "3"]
    assert "run finished" in out and "staleness min / mean / max" in out
    assert f"  engine replay {where}\n" in out and "engine resume" not in out
    assert max(map(len, (line for line in out.splitlines() if not line.startswith("step=")))) <= 80
    assert handles[0].closed
    rows = [json.loads(line) for line in Path(where, "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert load_config(f"{where}/config.yaml") == load_config(config)


def test_warnings_are_printed_and_what_holds_is_not(capsys: Capture, launched: Launch) -> None:
    launched()
    assert cli.main(["run", write_config(trainer={"checkpoint_every": 0})]) == 0
    out = capsys.readouterr().out
    assert "note: trainer.checkpoint_every 0" in out and "ok:" not in out


def test_run_dir_chooses_the_place_once(capsys: Capture, launched: Launch) -> None:
    launched()
    assert cli.main(["run", write_config(), "--run-dir", "here"]) == 0
    assert Path("here/config.yaml").is_file() and Path("here/schedule").is_dir()
    capsys.readouterr()
    assert "already holds a run" in refused(capsys, "run", write_config(), "--run-dir", "here")


def test_an_interrupt_stops_the_run_and_says_where_it_is(capsys: Capture, launched: Launch) -> None:
    handles = launched(interrupt_after=1)
    assert cli.main(["run", write_config(), "--run-dir", "here"]) == 130
    said = capsys.readouterr()
    assert handles[0].drained == "interrupted by the user" and handles[0].stopped is None and handles[0].closed
    assert "draining: pending rewards are computed, the current batch is trained and a checkpoint " in said.out
    assert "is written; interrupt again to stop now" in said.out
    assert "interrupted; the run is in here" in said.err
    assert "run drained" in said.out
    assert "  engine resume here\n  engine explain here\n  engine replay here\n" in said.out


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError("model.path", "x", "no such model"), 2, "model.path is 'x': no such model"),
        (InvariantViolated("law 4: too stale"), 1, "InvariantViolated: law 4: too stale"),
        (EngineError("the trainer is gone"), 1, "engine: the trainer is gone"),
        (RayProcessEnded("the Ray process on this node (raylet) ended"), 1, "on this node (raylet) ended"),
    ],
)
def test_an_error_of_the_run_is_reported_without_a_traceback(
    capsys: Capture, launched: Launch, error: EngineError, code: int, words: str
) -> None:
    handles = launched(fail=error)
    assert cli.main(["run", write_config()]) == code
    said = capsys.readouterr()
    assert words in said.err and "Traceback" not in said.err
    assert "the files of the run are in runs/" in said.err
    assert handles[0].closed


def test_an_error_nobody_foresaw_has_a_message_and_a_traceback(capsys: Capture, launched: Launch) -> None:
    launched(fail=ZeroDivisionError("division by zero"))
    assert cli.main(["run", write_config()]) == 1
    said = capsys.readouterr().err
    assert said.startswith("engine: unexpected ZeroDivisionError: division by zero\n") and "Traceback" in said


def test_an_error_wrapped_on_its_way_is_still_known(capsys: Capture, launched: Launch) -> None:
    wrapped = RuntimeError("task failed")
    wrapped.cause = RecordError("schedule/000.seg", 17, "bad checksum")  # type: ignore[attr-defined]
    launched(fail=wrapped)
    assert cli.main(["run", write_config()]) == 2
    assert "schedule/000.seg: at byte 17: bad checksum" in capsys.readouterr().err


def test_a_failed_run_says_why(capsys: Capture, launched: Launch) -> None:
    from engine.events import ProcessLost

    class Doomed(FakeHandle):
        def updates(self) -> Iterator[Status]:
            self.world.until(lambda state: state.groups.ledger.running > 0)
            for replica in (0, 1):
                self.world.tell(ProcessLost(kind="replica", index=replica, life=1, final=True, reason="burnt"))
            self.world.to_the_end()
            yield read_status(self.world.metrics)

    launched(Doomed)
    assert cli.main(["run", write_config()]) == 1
    said = capsys.readouterr()
    assert "failed: no replica is left" in said.err and "burnt" in said.err
    assert "run failed" in said.out


def test_what_follows_a_run_that_failed_on_its_rewards_is_to_read_their_errors(
    capsys: Capture, launched: Launch
) -> None:
    class Misjudged(FakeHandle):
        def updates(self) -> Iterator[Status]:
            SampleFiles(Path("here/samples")).write_failure(3, 1, [])
            for status in super().updates():
                yield dataclasses.replace(status, outcome="failed", failures={"group_data": 4})

    launched(Misjudged)
    assert cli.main(["run", write_config(), "--run-dir", "here"]) == 1
    said = capsys.readouterr().out
    steps = ("engine samples here --failed", "correct the cause, then engine resume here", "engine explain")
    assert "next:\n  " + "\n  ".join(steps) in said
    said = refused(capsys, "samples", "here")
    assert "; the run has ended; `engine samples here --failed` shows those whose reward failed" in said


def test_what_to_type_next_is_in_the_record(capsys: Capture, launched: Launch) -> None:
    class Optimistic(FakeHandle):
        """Counts events that never reached the record."""

        def updates(self) -> Iterator[Status]:
            for status in super().updates():
                yield dataclasses.replace(status, events=status.events + 1000)

        def close(self) -> None:
            self.world.driver.recorder.close()
            store_index(Path("here/schedule"), Index([None]))  # nobody closed the record
            (record,) = Path("here/schedule").glob("*.seg")
            record.write_bytes(record.read_bytes()[: record.stat().st_size * 4 // 5])

    launched(Optimistic)
    assert cli.main(["run", write_config(), "--run-dir", "here"]) == 0
    (line,) = re.findall(r"engine (replay here --at .*)", capsys.readouterr().out)
    assert cli.main(line.split()) == 0


@pytest.mark.parametrize("arguments", [["--plain"], []])
def test_a_reader_that_leaves_does_not_end_the_run(
    capsys: Capture, launched: Launch, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    launched()
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as left:
        monkeypatch.setattr(sys, "stdout", left)
        assert cli.main(["run", write_config(), "--run-dir", "here", *arguments]) == 0
    assert len(Path("here/metrics.jsonl").read_text().splitlines()) == 4
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "the run continues" in said


def test_a_pipe_that_breaks_inside_the_run_is_a_failure(capsys: Capture, launched: Launch) -> None:
    launched(fail=BrokenPipeError("somebody else's"))
    assert cli.main(["run", write_config()]) == 1
    assert "BrokenPipeError" in capsys.readouterr().err


# -- continuing ----------------------------------------------------------------------------------------------------


def test_resume_auto_continues_the_newest_run_that_did_not_finish(
    capsys: Capture, launched: Launch, tmp_path: Path
) -> None:
    config = write_config("mine.yaml")
    handles = launched(interrupt_after=1)
    assert cli.main(["run", config, "--resume", "auto"]) == 130
    assert "resume: no unfinished run of this configuration; starting a new one" in capsys.readouterr().out
    first = handles[0]
    (directory,) = Path("runs").glob("*-mine")
    handles = launched()
    assert cli.main(["run", config, "--resume", "auto", "--set", "scheduler.max_drops=2"]) == 0
    assert f"resume: the newest unfinished run of this configuration is {directory}\n" in capsys.readouterr().out
    assert handles[0].resumed == (directory.absolute(), (("scheduler.max_drops", "2"),))
    assert first.resumed is None
    assert len(list(Path("runs").glob("*-mine"))) == 1


def test_a_run_that_finished_is_not_gone_on_with(capsys: Capture, launched: Launch) -> None:
    config = write_config("mine.yaml")
    handles = launched()
    assert cli.main(["run", config, "--resume", "auto"]) == 0
    Path("runs/20990101-000000-mine/schedule").mkdir(parents=True)  # ended before its record began
    Path("runs/20990101-000000-mine-too/schedule").mkdir(parents=True)
    head = preamble(SCHEDULE, 0, 0)
    for moment, begun_with in enumerate((b"", head[:9], head, head + b"\5\0\0\0torn")):
        begun = Path(f"runs/2099010{moment + 2}-000000-mine/schedule")
        begun.mkdir(parents=True)
        (begun / "00000000.seg").write_bytes(begun_with)
    assert cli.main(["run", config, "--resume", "auto"]) == 0
    assert "starting a new one" in capsys.readouterr().out
    assert [handle.resumed for handle in handles] == [None, None]


def test_a_run_that_starts_or_runs_is_not_resumed_and_the_error_says_so(capsys: Capture, launched: Launch) -> None:
    Path("begun/schedule").mkdir(parents=True)
    lock = RecordLock(Path("begun"))
    for command in ("resume", "replay", "top", "drain", "explain", "report"):
        words = "RUN 'begun' is starting: it has no event yet; try again once it trains\n"
        assert words in refused(capsys, command, "begun"), command
    assert "already holds a run" in refused(capsys, "run", write_config(), "--run-dir", "begun")
    lock.release()
    capsys.readouterr()
    for command in ("resume", "replay", "top", "drain", "explain", "report"):
        words = "RUN 'begun' is not started: its process ended before the first event; start it again with `engine run"
        assert words in refused(capsys, command, "begun"), command
    launched(interrupt_after=1)
    assert cli.main(["run", write_config(), "--resume", "auto", "--run-dir", "here"]) == 130
    capsys.readouterr()
    words = "RUN 'here' is running: another process resumes it or writes its record; watch it with `engine top here`"
    for held in ("here", "here/schedule"):
        lock = RecordLock(Path(held))
        assert words in refused(capsys, "resume", "here")
        assert cli.main(["run", write_config(), "--resume", "auto", "--run-dir", "here"]) == 2
        assert words in capsys.readouterr().err
        assert cli.main(["status", "here"]) == 3
        assert "running, but it does not answer: it is starting or ending" in capsys.readouterr().out
        lock.release()


def test_a_resume_in_a_directory_that_cannot_be_written_is_refused_at_once(
    capsys: Capture, launched: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(interrupt_after=1)
    assert cli.main(["run", write_config(), "--run-dir", "here"]) == 130
    capsys.readouterr()
    handles = launched()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert "RUN 'here' cannot be written; make its directory writable" in refused(capsys, "resume", "here")
    assert handles == []


def test_of_two_resumes_at_once_one_is_refused_as_of_a_running_run(capsys: Capture, launched: Launch) -> None:
    launched(interrupt_after=1)
    assert cli.main(["run", write_config(), "--run-dir", "here"]) == 130
    lock = RecordLock(Path("here"))
    with pytest.raises(ConfigError, match="RUN 'here' is running: another process resumes it"):
        watch(
            load_config("here/config.yaml"), run_directory.open_run("here"), Console(), Interrupts(), Mode(plain=True)
        )
    lock.release()


def test_a_finished_run_is_refused_before_anything_starts(capsys: Capture, launched: Launch) -> None:
    launched()
    assert cli.main(["run", write_config(), "--run-dir", "here"]) == 0
    handles = launched()
    words = "has finished (4 train steps); to train more steps, resume it with a larger run.max_steps"
    for more in ([], ["--set", "run.max_steps=3"], ["--force-from", "initial"]):
        assert words in refused(capsys, "resume", "here", *more)
    assert handles == []
    assert cli.main(["resume", "here", "--set", "run.max_steps=6"]) == 0
    assert handles[0].resumed == (Path("here"), (("run.max_steps", "6"),))


def test_a_run_of_a_changed_configuration_is_not_gone_on_with_silently(capsys: Capture, launched: Launch) -> None:
    launched(interrupt_after=1)
    assert cli.main(["run", write_config("mine.yaml"), "--resume", "auto"]) == 130
    capsys.readouterr()
    config = write_config("mine.yaml", trainer={"learning_rate": 0.25}, scheduler={"samples_per_prompt": 2})
    said = refused(capsys, "run", config, "--resume", "auto")
    assert "scheduler.samples_per_prompt is 2, but must stay 4: the run began with it" in said
    assert "trainer.learning_rate was " in said and "is 0.25" in said


def test_a_chosen_place_is_gone_on_with(capsys: Capture, launched: Launch) -> None:
    launched(interrupt_after=1)
    assert cli.main(["run", write_config(), "--resume", "auto", "--run-dir", "here"]) == 130
    handles = launched()
    assert cli.main(["run", write_config(), "--resume", "auto", "--run-dir", "here"]) == 0
    assert handles[0].resumed == (Path("here"), ())


def test_a_folder_without_runs_has_no_newest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    says = "runs/ contains no run; give the directory of a run, or start one with `engine run`"
    assert says in refused(capsys, "status", "latest")


def test_the_state_of_a_run_is_a_line_and_an_exit_code(capsys: Capture, launched: Launch) -> None:
    def state(run: str) -> tuple[int, str]:
        return cli.main(["status", run]), capsys.readouterr().out

    Path("begun/schedule").mkdir(parents=True)
    lock = RecordLock(Path("begun"))
    assert state("begun") == (6, "begun: starting: it has no event yet\n")
    lock.release()
    again = "start it again with `engine run begun/config.yaml`"
    assert state("begun") == (7, f"begun: not started: its process ended before the first event; {again}\n")
    launched()
    cli.main(["run", write_config(), "--run-dir", "whole"])
    launched(interrupt_after=1)
    cli.main(["run", write_config(), "--run-dir", "drained"])
    handles = launched(fail=EngineError("lost"))
    cli.main(["run", write_config(), "--run-dir", "killed"])
    assert handles[0].closed
    capsys.readouterr()
    assert state("whole") == (0, "whole: finished: 4 train steps\n")
    code, said = state("drained")
    assert code == 5 and re.fullmatch(
        r"drained: drained after \d train steps: interrupted by the user; it can be resumed\n", said
    )
    assert cli.main(["runs", ".", "--json"]) == 0
    listed = {row["name"]: row["state"] for row in json.loads(capsys.readouterr().out)["runs"]}
    assert listed["drained"] == "drained" and listed["whole"] == "finished"
    code, said = state("killed")
    assert code == 5 and "interrupted after" in said and "its processes were killed" in said
    assert "does not exist; the newest run is runs/latest" in refused(capsys, "status", "nowhere")
    assert cli.main(["waits", "whole"]) == 0 and capsys.readouterr().out == "the run has finished: 4 train steps\n"
    assert cli.main(["waits", "drained"]) == 0
    assert capsys.readouterr().out == "the run has drained: interrupted by the user\n"
    assert cli.main(["waits", "killed"]) == 0 and "according to the record" in capsys.readouterr().out
    assert "is not running: finished: 4 train steps; see its summary with `engine show whole`\n" in refused(
        capsys, "drain", "whole"
    )
    assert "is not running: finished: 4 train steps; see its" in refused(capsys, "top", "whole")
    said = refused(capsys, "stop", "drained")
    assert said.endswith("interrupted by the user; resume it with `engine resume drained`\n") and "can be" not in said
    Path("killed/endpoint.json").write_text('[{"targets": ["127.0.0.1:1"], "labels": {}}]')
    Path("killed/control.json").write_text('{"url": "http://127.0.0.1:1", "token": "gone"}')
    assert cli.main(["waits", "killed"]) == 0 and "according to the record" in capsys.readouterr().out, "nobody answers"
    assert "; `engine status killed` says whether it can be resumed\n" in refused(capsys, "top", "killed")


# -- requests to end ---------------------------------------------------------------------------------------------------


@pytest.fixture
def close_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests count however close they are."""
    monkeypatch.setattr(interrupts, "SENT_TWICE_S", 0.0)


@pytest.mark.usefixtures("close_requests")
def test_a_request_to_end_after_the_last_line_of_a_run_raises_nothing(capsys: Capture, launched: Launch) -> None:
    launched()
    assert cli.main(["run", write_config()]) == 0
    for number in ENDS[:2]:
        signal.raise_signal(number)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.usefixtures("close_requests")
@pytest.mark.parametrize("number", ENDS)
def test_a_request_to_end_stops_the_run(capsys: Capture, launched: Launch, number: signal.Signals) -> None:
    class Ended(FakeHandle):
        def updates(self) -> Iterator[Status]:
            for status in super().updates():
                yield status
                if self.drained is None:
                    signal.raise_signal(number)

        def close(self) -> None:
            signal.raise_signal(number)  # a second one, while everything is taken down
            super().close()

    handles = launched(Ended)
    assert cli.main(["run", write_config(), "--run-dir", "here"]) == 130
    assert handles[0].drained and not handles[0].stopped and handles[0].closed
    assert capsys.readouterr().err == "engine: interrupted; the run is in here\n"


SMALLEST = {"train_prompts": 40, "validation_prompts": 4, "hidden_size": 16, "layers": 1, "heads": 2}
"""Sizes of the smallest model that `model.make` can make."""


class Lingering(FakeHandle):
    """Drains forever. Raises a signal whenever its status is asked for after it was asked to end."""

    def updates(self) -> Iterator[Status]:
        yield read_status(self.world.metrics)
        if self.stopped is None:
            signal.raise_signal(signal.SIGTERM)
        self.world.run()
        yield read_status(self.world.metrics)

    def drain(self, reason: str) -> None:
        self.drained = reason


@pytest.mark.usefixtures("close_requests")
def test_a_second_request_stops_a_run_that_drains(capsys: Capture, launched: Launch) -> None:
    handles = launched(Lingering)
    assert cli.main(["run", write_config(), "--run-dir", "here"]) == 130
    assert handles[0].drained and handles[0].stopped and handles[0].closed
    said = capsys.readouterr()
    assert said.out.index("draining: ") < said.out.index("stopping now; interrupt again to end this process at once")
    assert said.err == "engine: interrupted; the run is in here\n"


@pytest.mark.usefixtures("close_requests")
def test_a_second_request_that_comes_while_the_first_is_passed_on_stops_too(launched: Launch) -> None:
    class Deaf(Lingering):
        def drain(self, reason: str) -> None:
            signal.raise_signal(signal.SIGTERM)

    handles = launched(Deaf)
    assert cli.main(["run", write_config(), "--run-dir", "here"]) == 130
    assert handles[0].stopped and handles[0].closed


@pytest.mark.usefixtures("close_requests")
def test_a_second_request_that_comes_while_the_first_is_shown_stops_too(
    launched: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pressed(io.StringIO):
        def write(self, text: str) -> int:
            if "draining: " in text:
                signal.raise_signal(signal.SIGINT)
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", Pressed())
    handles = launched(Lingering)
    assert cli.main(["run", write_config(), "--run-dir", "here"]) == 130
    assert handles[0].stopped and handles[0].closed


@pytest.mark.usefixtures("close_requests")
def test_a_request_that_is_sent_twice_at_once_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` sends its signal to its child, and then to the child's group."""
    monkeypatch.setattr(interrupts, "SENT_TWICE_S", 3600.0)
    requests = Interrupts()
    with pytest.raises(KeyboardInterrupt), requests:
        requests.waiting = True
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            for _ in range(2):
                signal.raise_signal(signal.SIGTERM)
            assert requests.count == 1
            signal.raise_signal(signal.SIGINT)
    assert requests.count == 2, "another signal is another request"


def test_a_third_request_ends_the_process(tmp_path: Path) -> None:
    code = (
        "import signal; from engine.cli import interrupts\n"
        "interrupts.SENT_TWICE_S = 0.0\n"
        "with interrupts.Interrupts() as interrupts:\n"
        "    interrupts.waiting = True\n"
        "    for _ in range(3):\n"
        "        try: signal.raise_signal(signal.SIGINT)\n"
        "        except KeyboardInterrupt: print('raised', flush=True)\n"
        "print('never')"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (130, "raised\nraised\n")
    assert "this process ends at once" in done.stderr


def test_a_run_that_somebody_else_ended_is_no_failure(capsys: Capture, launched: Launch) -> None:
    class EndedByRequest(FakeHandle):
        def updates(self) -> Iterator[Status]:
            self.end_requested = True
            for status in super().updates():
                yield dataclasses.replace(status, outcome="stopped", reason="asked by engine drain")

    launched(EndedByRequest)
    assert cli.main(["run", write_config(), "--run-dir", "here"]) == 130
    said = capsys.readouterr().err
    assert said == "engine: the run ended on request (stopped: asked by engine drain); its directory is here\n"


INTERRUPTED = (
    "engine: interrupted; the files of the run are in here; it has not started: "
    "start it again with `engine run here/config.yaml`\n"
)


def run_until_line(monkeypatch: pytest.MonkeyPatch, line: str, end: Callable[[], None]) -> tuple[str, Path]:
    """Run a config that makes its model, and `end` it at the first text that begins with `line`. Returns the config,
    and an earlier run that has a record."""

    class Pressed(io.StringIO):
        def write(self, text: str) -> int:
            if text.startswith(line):
                end()
            return super().write(text)

    earlier = run_directory.create("runs", "earlier", config_yaml="")
    Recorder(earlier.schedule, Header(run="earlier", limits={})).close()
    monkeypatch.setattr(sys, "stdout", Pressed())
    config = write_config(model={"make": "arithmetic", "arithmetic": SMALLEST | {"warmup_steps": 800}})
    assert cli.main(["run", config, "--run-dir", "here"]) == 130
    return config, earlier.path


@pytest.mark.parametrize("line", ["making data", "supervised"])
def test_a_request_to_end_while_the_model_is_made_leaves_nothing_half_made(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    config, earlier = run_until_line(monkeypatch, line, lambda: signal.raise_signal(signal.SIGTERM))
    assert capsys.readouterr().err == INTERRUPTED
    assert list(Path("runs/.made").iterdir()) == []
    assert Path("runs/latest").resolve() == earlier.resolve(), "the newest run that has a record"
    assert cli.main(["run", config, "--run-dir", "here"]) == 130, "the same command can be given again"


def test_a_link_that_cannot_be_restored_does_not_hide_why_a_run_ended(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end() -> None:
        Path(f"runs/.latest-{os.getpid()}").mkdir()  # the name of the next link
        signal.raise_signal(signal.SIGTERM)

    run_until_line(monkeypatch, "making data", end)
    assert capsys.readouterr().err == INTERRUPTED


# -- engine replay -----------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded() -> Path:
    """A run directory with the record of a small run."""
    world = steady_world(steps=3)
    directory = run_directory.create("runs", "small", config_yaml="").path
    header = Header(run="small", limits=world.setting.limits.to_plain(), policies=dict(world.scheduler.policies.names))
    recorder = Recorder(directory / "schedule", header)
    steady_world(steps=3, recorder=recorder).run()
    recorder.close()
    return directory


def segment(run: Path) -> Path:
    (found,) = (run / "schedule").glob("*.seg")
    return found


def test_a_replay_says_that_it_is_identical(capsys: Capture, recorded: Path) -> None:
    assert cli.main(["replay", str(recorded)]) == 0
    assert re.search(r"identical: \d+ events in \d+ ticks, \d+ commands", capsys.readouterr().out)
    assert cli.main(["replay", "latest"]) == 0, "a name under runs/"


def test_a_replay_that_diverges_exits_1(capsys: Capture, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.scheduling.groups._admit_groups", lambda *given: None)
    assert cli.main(["replay", str(recorded)]) == 1
    said = capsys.readouterr().out
    assert "diverged at tick" in said and "expected" in said and "got" in said


def test_a_corrupted_schedule_is_refused_with_file_and_offset(capsys: Capture, recorded: Path) -> None:
    path = segment(recorded)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    assert cli.main(["replay", str(recorded)]) == 2
    what, fix = capsys.readouterr().err.splitlines()
    assert path.name in what and re.search(r"at byte \d+", what)
    assert "restore this file from a copy" in fix


def test_an_event_and_the_story_of_a_group_are_shown(capsys: Capture, recorded: Path) -> None:
    assert cli.main(["replay", str(recorded), "--at", "6", "--group", "0"]) == 0
    said = capsys.readouterr().out
    assert "event 6" in said and "story of group 0" in said
    assert cli.main(["replay", str(recorded), "--at", "6"]) == 0
    assert "story of group" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "RUN 'nowhere' does not exist"),
        (["file"], "file: at byte 0: is no bug file: give the directory of a run"),
        (["bare"], "RUN 'bare' has no schedule/"),
        (["latest", "--group", "0"], "add --at N"),
        (["latest", "--at", "100000"], "--at 100000 does not exist"),
        (["latest", "--at", "3", "--group", "100000"], "--group 100000 does not exist"),
    ],
)
def test_a_replay_of_what_is_not_there_is_refused(
    capsys: Capture, recorded: Path, arguments: list[str], words: str
) -> None:
    Path("bare").mkdir()
    Path("file").write_text("")
    assert words in refused(capsys, "replay", *arguments)


# -- engine bug --------------------------------------------------------------------------------------------------------


def test_a_bug_file_is_shown_before_it_is_written_and_opened_in_place_of_a_run(
    capsys: Capture, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.inspect.bug_report.LEAST_EVENTS", 20)
    assert cli.main(["bug", "latest"]) == 0
    shown = capsys.readouterr().out
    assert "nothing is written yet: add --out FILE" in shown and not Path("x.bug").exists()
    for words in (
        "ends          finished: 3 train steps",
        "Python 3.",
        "policies      admission bounds",
        "names         none",
    ):
        assert words in shown, words
    assert cli.main(["bug", "latest", "--out", "x.bug"]) == 0
    assert shown.splitlines()[:-1] == capsys.readouterr().out.splitlines()[:-1]
    assert cli.main(["bug", "x.bug"]) == 0
    assert capsys.readouterr().out.splitlines() == shown.splitlines()[:6]
    assert cli.main(["replay", "x.bug"]) == 0
    assert "identical" in capsys.readouterr().out
    assert cli.main(["replay", "x.bug", "--at", "30"]) == 0
    assert "state after" in capsys.readouterr().out
    assert "is not a terminal" in refused(capsys, "debug", "x.bug")
    assert "is not a directory" in refused(capsys, "explain", "x.bug")


def test_a_run_without_an_event_and_a_file_that_cannot_be_written_give_no_bug_file(
    capsys: Capture, recorded: Path
) -> None:
    run_directory.create("runs", "empty", config_yaml="", chosen="runs/empty")
    assert "empty" in refused(capsys, "bug", "runs/empty")
    assert "no/x.bug" in refused(capsys, "bug", str(recorded), "--out", "no/x.bug")


# -- engine states -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_the_diagram_has_every_state_and_every_trigger(capsys: Capture, table: Table) -> None:
    assert cli.main(["states", "--format", "mermaid"]) == 0
    (part,) = [part for part in capsys.readouterr().out.split("## ")[1:] if part.startswith(table.name + "\n")]
    lines = [line.strip() for line in part.splitlines()]
    assert f"[*] --> {table.initial}" in lines
    for transition in table.transitions:
        for source in transition.sources:
            assert f"{source} --> {transition.target} : {transition.trigger}" in lines
    for state in table.states:
        assert any(re.search(rf"\b{state}\b", line) for line in lines), state
    assert {f"{state} --> [*]" for state in table.terminal} <= set(lines)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_the_table_has_every_state_and_every_trigger(capsys: Capture, table: Table) -> None:
    assert cli.main(["states", "--format", "table"]) == 0
    (part,) = [part for part in capsys.readouterr().out.split("## ")[1:] if part.startswith(table.name + "\n")]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in part.splitlines() if "|" in line]
    assert {row[0] for row in rows[2:]} == set(table.states)
    trigger = rows[0].index("trigger")
    assert {row[trigger] for row in rows[2:]} - {""} == {t.trigger for t in table.transitions}
    assert len({len(line) for line in part.splitlines() if "|" in line}) == 1, "columns are aligned"


def test_both_are_shown_by_default(capsys: Capture) -> None:
    assert cli.main(["states"]) == 0
    out = capsys.readouterr().out
    assert out.count("stateDiagram-v2") == out.count("| next state") == len(TABLES)


# -- the process -------------------------------------------------------------------------------------------------------


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)


def test_the_process_ends_with_the_code(capsys: Capture) -> None:
    assert python("-m", "engine.cli", "check", "nothing.yaml").returncode == 2
    for arguments, code in ((["--version"], 0), (["fly"], 2), (["replay", "x", "--at", "-3"], 2)):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == code
    assert capsys.readouterr().out == "step-engine 0.1.0\n"


def test_an_interrupt_during_the_imports_prints_no_traceback() -> None:
    code = """
import sys
class Interrupted:
    def find_spec(self, name, path, target=None):
        if name == "engine.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from engine.__main__ import main
sys.exit(main())
"""
    ended = python("-c", code)
    assert (ended.returncode, ended.stderr) == (130, "engine: interrupted\n")


def test_light_commands_load_nothing_heavy() -> None:
    config = write_config()
    code = (
        f"import sys; from engine import cli; cli.main(['check', {config!r}]); cli.main(['states']); "
        "print([m for m in ('ray', 'torch', 'transformers') if m in sys.modules])"
    )
    done = python("-c", code)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f"{sys.executable} -m engine.cli states | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, env=environment)
    assert done.stdout == "## group\n" and done.stderr == "" and done.returncode == 0
