"""The example of the library's use is short, free of Ray and torch, and does what its text says."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "embed.py"

PROGRAM = """
import sys
sys.path.insert(0, {directory!r})
import embed
result = embed.main()
assert result.steps == 20 and result.outcome == "finished"
assert result.staleness_max <= 2
assert result.metrics[-1]["reward"] > result.metrics[0]["reward"] + 0.3
assert not {{"ray", "torch", "transformers"}} & set(sys.modules)
"""


def test_it_is_at_most_60_lines() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 60


def test_it_runs_and_learns_without_ray_or_torch() -> None:
    program = PROGRAM.format(directory=str(EXAMPLE.parent))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=EXAMPLE.parents[1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("finished: 20 train steps")
