"""Write the golden records of the present format version:

    python tests/record/make_golden.py

Writes the records of a format version that is not released over the old ones, and says so; never those of one that was
released, since its records must stay readable forever. Writes golden/v<version>/: a few simulated runs with snapshots
on the way, and `every_type.json` with the bytes of one event and one command of each class.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any, get_type_hints

from msgspec import structs
from record_samples import LIMITS, record_run

from engine.commands import COMMANDS
from engine.events import EVENTS
from engine.record import FORMAT_VERSION
from engine.record.codec import pack
from engine.states.limits import Limits

RELEASED = 0
"""The newest format version that was released."""
GOLDEN = Path(__file__).parent / "golden"
RUNS: dict[str, dict[str, Any]] = {
    "keep": {"sync_mode": "keep", "max_concurrent_groups": 12, "max_steps": 8},
    "abort": {"sync_mode": "abort", "sync_every": 2},
    "wait": {"sync_mode": "wait", "scoring_tasks": ["ref_logprobs"]},
    "pools": {
        "max_steps": 8,
        "scoring_tasks": ["ref_logprobs", "old_logprobs"],
        "pools": [
            {"tasks": ["rollout"], "replicas": [0]},
            {"tasks": ["rollout", "old_logprobs", "train"], "replicas": [1]},
            {"tasks": ["ref_logprobs"], "replicas": []},
        ],
    },
    "added": {"max_steps": 6, "over_sample": 0.5, "added_states": [{"name": "rewarding", "concurrency": 2}]},
    "validation": {"max_steps": 6, "validation": {"rows": 13, "rows_per_slot": 3, "every": 2}},
}


def sample(cls: type[Any]) -> dict[str, Any]:
    """Fixed values for the fields of a class, stamps left out."""
    values = {int: 300, float: 0.25, bool: True, str: "grund: ±", tuple[int, ...]: (1, 200, 70_000)}
    values[tuple[float, ...]] = (0.25, -1.0)
    values[tuple[str, ...]] = ("trainer", "weights store")
    hints = get_type_hints(cls)
    given = [f.name for f in structs.fields(cls) if f.default != -1 or f.name == "number"]
    names = [name for name in given if name != "at"]
    return {name: values[hints[name]] for name in names if not (name == "cause" and hints[name] is int)}


def every_type() -> dict[str, Any]:
    return {
        table: {cls.__name__: {"fields": sample(cls), "bytes": pack(cls(**sample(cls))).hex()} for cls in classes}
        for table, classes in (("events", EVENTS), ("commands", COMMANDS))
    }


def main() -> int:
    directory = GOLDEN / f"v{FORMAT_VERSION}"
    if FORMAT_VERSION <= RELEASED:
        print(f"format {FORMAT_VERSION} is released: its golden records are never written again", file=sys.stderr)
        return 2
    if directory.exists():
        print(f"format {FORMAT_VERSION} is not released: its golden records are written again")
        shutil.rmtree(directory)
    for seed, (name, changes) in enumerate(RUNS.items()):
        limits = Limits.from_plain({**LIMITS.to_plain(), **changes})
        recorder = record_run(directory / name, seed=seed, limits=limits, segment_bytes=4096, snapshot_every=40)
        print(f"{directory / name}: {recorder.next_event} events")
    text = json.dumps(every_type(), indent=1, ensure_ascii=False)
    (directory / "every_type.json").write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
