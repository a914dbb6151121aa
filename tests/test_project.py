"""`engine init`: the project that it creates runs at once, and what it refuses."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from chat_tokenizers import save_chat_model
from file_limits import largest_file

from engine import cli
from engine.config import load_config
from engine.extras import EXTRAS, FOR_RUNS, install_command

ROOT = Path(__file__).resolve().parent.parent
Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("own_modules")


def checked(capsys: Capture, project: str) -> str:
    assert cli.main(["check", f"{project}/config.yaml"]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_new_project_passes_its_check_and_its_own_test(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["init", "mine/first"]) == 0
    said = capsys.readouterr().out
    assert said.endswith("next:\n  cd mine/first\n  engine check config.yaml\n  engine run config.yaml\n")
    monkeypatch.chdir("mine/first")
    assert {path.name for path in Path().iterdir()} == {
        "README.md", "answers.jsonl", "config.yaml", "data.jsonl", "held_out.jsonl", "model", "my_rewards.py",
        "test_my_rewards.py",
    }  # fmt: skip

    row = json.loads(Path("data.jsonl").read_text().partition("\n")[0])
    said = checked(capsys, ".")
    assert f"    | <|im_start|>user\n    | {row['prompt']}<|im_end|>\n    | <|im_start|>assistant\n" in said
    assert f"my_rewards:score returns 1 for the answer '{row['answer']}' to row 0 of data.path" in said
    assert "no prompt of data.validation_path is in data.path" in said and "model.warm_start.path has 1024" in said

    python = [
        sys.executable,
        "-c",
        "import sys; sys.modules['pytest'] = None; import runpy; runpy.run_path(*sys.argv[1:], None, '__main__')",
    ]
    clean = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), "."))}
    tested = subprocess.run([*python, "test_my_rewards.py"], env=clean, capture_output=True, text=True)
    assert tested.stdout == "5 responses get the expected reward\n", tested.stdout + tested.stderr


def test_the_files_and_commands_of_the_tutorial_work(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "TUTORIAL.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    commands = [line for line in "".join(blocks).splitlines() if line.startswith("engine ")]
    assert [cli._parser().parse_args(shlex.split(line)[1:]).run for line in commands], "each is understood"
    assert cli.main(shlex.split(commands[0])[1:]) == 0
    monkeypatch.chdir("smallest")
    files = re.findall(r"^```(?:python|yaml)\n(# (\S+)\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert [name for _, name in files] == ["make_data.py", "my_rewards.py", "config.yaml"]
    for text, name in files:
        Path(name).write_text(text, encoding="utf-8")
    capsys.readouterr()
    subprocess.run([sys.executable, "make_data.py"], check=True)
    row = json.loads(Path("data.jsonl").read_text().partition("\n")[0])
    said = checked(capsys, ".")
    assert f"    | <|im_start|>user\n    | {row['question']}<|im_end|>" in said
    for reward, which in ((1, r" \(from its column 'smallest'\)"), (0.1, r" \(a wrong answer"), (0, "\n")):
        assert re.search(rf"my_rewards:score returns {reward} for the answer '.*' to row 0 of data.path{which}", said)
    assert "model.warm_start.path has 1024" in said


@pytest.mark.parametrize("file", ["Makefile", "docs/TUTORIAL.md"])
def test_a_newcomer_gets_the_packages_of_every_command_that_reads_a_run(file: str) -> None:
    (extras,) = re.findall(r"-c constraints\.txt -e '\.\[(ray,.*?)\]'", (ROOT / file).read_text(encoding="utf-8"))
    reading = {EXTRAS[package] for package in ("textual", "pyarrow")}
    assert {*FOR_RUNS, *reading} == {*extras.split(",")}
    listed = re.search(r" -c \S*constraints\.txt -e \S*\[inspect\]", install_command("inspect"))
    assert listed, "the versions of the clone"


def test_a_new_project_for_a_model_of_ones_own_passes_its_check(capsys: Capture, tmp_path: Path) -> None:
    save_chat_model(tmp_path / "instruct", "chatml", context=512)
    assert cli.main(["init", "mine", "--model", "instruct"]) == 0
    assert not Path("mine/model").exists() and not Path("mine/answers.jsonl").exists()
    capsys.readouterr()
    said = checked(capsys, "mine")
    assert f"model.path {tmp_path / 'instruct'} has a model" in said and "returns 1 for the answer" in said


def test_the_name_of_a_model_on_the_hub_is_kept() -> None:
    assert cli.main(["init", "mine", "--model", "someone/some-model"]) == 0
    assert load_config("mine/config.yaml").model.path == "someone/some-model"


def test_a_preset_is_written_as_the_configuration_of_a_project(capsys: Capture) -> None:
    assert cli.main(["init", "mine", "--preset", "environment"]) == 0
    assert capsys.readouterr().out.startswith("created mine: config.yaml\n")
    assert load_config("mine/config.yaml").model.make == load_config(ROOT / "configs/environment.yaml").model.make
    assert "#     engine run config.yaml\n" in Path("mine/config.yaml").read_text()
    assert cli.main(["init", "mine", "--preset", "sync"]) == 2
    assert "NAME 'mine' is a directory with files" in capsys.readouterr().err


def test_dashboards_writes_the_boards_and_what_they_need(capsys: Capture) -> None:
    assert cli.main(["dashboards", "boards"]) == 0
    for name in ("prometheus.yml", "alerts.yml", "generated/overview.json"):
        assert Path("boards", name).read_bytes() == (ROOT / "dashboards" / name).read_bytes()
    assert [*Path("boards").rglob("*.py")] == []
    assert cli.main(["dashboards", "boards"]) == 2
    assert "DIR 'boards' is a directory with files; use a new or empty directory" in capsys.readouterr().err


REFUSED = {
    "files": (["used"], "NAME 'used' is a directory with files; use a new or empty directory"),
    "a file": (["used/file"], "NAME 'used/file' cannot be the directory of a project: File exists"),
    "below a file": (["used/file/mine"], "cannot be the directory of a project: Not a directory"),
    "no name": ([""], "NAME '' cannot be the directory of a project: it is empty"),
    "no path": (["mine\0"], "cannot be the directory of a project: "),
    "no model": (["mine", "--model", "./none"], "--model './none' is neither a directory nor a hub name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_project_is_refused(capsys: Capture, case: str) -> None:
    arguments, message = REFUSED[case]
    Path("used").mkdir()
    Path("used/file").write_text("kept")
    assert cli.main(["init", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert [*map(str, sorted(Path().rglob("*")))] == ["used", "used/file"] and Path("used/file").read_text() == "kept"


@pytest.mark.parametrize("bytes", [1000, 100_000], ids=["tokenizer", "weights"])
def test_on_a_full_disk_nothing_is_left_of_a_project(capsys: Capture, bytes: int) -> None:
    with largest_file(bytes):
        assert cli.main(["init", "mine"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("engine: NAME 'mine' cannot be written: ") and said.count("\n") == 1, said
    assert "File too large" in said and "; free some space, or give a path on another disk" in said
    assert not Path("mine").exists()
    Path("mine").mkdir()
    with largest_file(bytes):
        assert cli.main(["init", "mine"]) == 2
    assert list(Path("mine").iterdir()) == [], "the user's own directory stays"
