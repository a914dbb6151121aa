"""What a run's endpoint leaves behind, without Ray."""

from dataclasses import replace
from pathlib import Path

from ray_plans import plan

from engine.actors.endpoint import leave_no_word, places_of
from engine.control import place as control
from engine.metrics.endpoint import FILE, announce


def test_of_a_run_whose_scheduler_died_at_its_end_no_word_is_left(tmp_path: Path) -> None:
    """Else it is scraped, and missed, for ever."""
    folder = tmp_path / ".endpoints"
    ended, other = (replace(plan(tmp_path / name), endpoints=folder) for name in ("ended", "other"))
    for made in (ended, other):
        assert made.run_dir is not None
        announce(places_of(made), "127.0.0.1:1", made.run_dir.name)
        control.announce(made.run_dir, control.ControlPlace(url="http://127.0.0.1:2", token=control.new_token()))
    leave_no_word(ended)
    leave_no_word(ended)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {f"other/{FILE}", f"other/{control.FILE}", ".endpoints/other.json"}


def test_a_run_without_a_directory_says_it_nowhere(tmp_path: Path) -> None:
    nowhere = replace(plan(tmp_path), run_dir=None)
    assert places_of(nowhere) == []
    leave_no_word(nowhere)
