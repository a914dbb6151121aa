"""What a run's endpoint leaves behind, without Ray."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ray_plans import plan
from steady_world import steady_world

from engine.control import address_file as control
from engine.metrics import address_files
from engine.metrics.address_files import FILE, announce, remove_dead
from engine.runtime.metrics_endpoint import Endpoint, places_of, withdraw_addresses
from engine.workers.plan import ServerAddress

ANNOUNCER = """
import sys
from pathlib import Path
from engine.metrics.address_files import announce
folder, name = sys.argv[1:]
held = announce([Path(folder) / f"{name}.json"], "127.0.0.1:1", name)
print("announced", flush=True)
sys.stdin.read()
"""


def test_of_a_run_whose_scheduler_died_at_its_end_no_word_is_left(tmp_path: Path) -> None:
    """Else it is scraped, and missed, forever."""
    folder = tmp_path / ".endpoints"
    ended, other = (replace(plan(tmp_path / name), endpoints=folder) for name in ("ended", "other"))
    for made in (ended, other):
        assert made.run_dir is not None
        announce(places_of(made), "127.0.0.1:1", made.run_dir.name)
        control.announce(made.run_dir, control.ControlPlace(url="http://127.0.0.1:2", token=control.new_token()))
    withdraw_addresses(ended)
    withdraw_addresses(ended)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {f"other/{FILE}", f"other/{control.FILE}", ".endpoints/other.json"}


def test_a_run_without_a_directory_says_it_nowhere(tmp_path: Path) -> None:
    nowhere = replace(plan(tmp_path), run_dir=None)
    assert places_of(nowhere) == []
    withdraw_addresses(nowhere)


@contextmanager
def announcing(folder: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    """A process that says where a run's metrics are, and lives until it is killed."""
    command = [sys.executable, "-c", ANNOUNCER, str(folder), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "announced\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_run_that_begins_deletes_what_killed_runs_left_and_nothing_of_live_ones(tmp_path: Path) -> None:
    folder = tmp_path / ".endpoints"
    mine = replace(plan(tmp_path / "mine"), endpoints=folder)

    async def begin_and_end() -> None:
        world = steady_world()
        opened = Endpoint(mine, ServerAddress(), world.metrics, world.driver, None)
        opened.announce()
        assert names(folder) == ["live.json", "mine.json"]
        opened.close()

    with announcing(folder, "killed") as killed, announcing(folder, "live"):
        killed.kill()
        killed.wait()
        asyncio.run(begin_and_end())
        assert names(folder) == ["live.json"]
    remove_dead(folder)
    assert names(folder) == []


def test_a_file_that_no_run_of_this_machine_wrote_stays(tmp_path: Path) -> None:
    target = tmp_path / "target"
    announce([target, tmp_path / "moved.json"], "127.0.0.1:1", "run").close()
    (tmp_path / "link.json").symlink_to(target)
    elsewhere = [{"targets": ["10.0.0.7:8000"], "labels": {"run": "elsewhere", address_files.HOST: "another-machine"}}]
    (tmp_path / "elsewhere.json").write_text(json.dumps(elsewhere))
    (tmp_path / "own.json").write_text(json.dumps([{"targets": ["10.0.0.7:8000"], "labels": {"run": "own"}}]))
    (tmp_path / "torn.json").write_text("[{")
    before = names(tmp_path)
    remove_dead(tmp_path)
    assert names(tmp_path) == before


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
