"""Records the scheduler's decisions. Run it before a change to the core, then compare with `compare.py` after it.

    python -m tests.oracle.export DIRECTORY           every event and command of a thousand worlds, one file each
    python -m tests.oracle.export DIRECTORY --corpus  also the summaries that the repository stores

A file is plain msgpack: the limits, the names of the policies, and the frames. A frame has its event and its commands,
by the names of classes and fields.
"""

import argparse
import gzip
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import msgpack

from engine.errors import EngineError
from tests.oracle import unclocked, worlds
from tests.oracle.forms import plain

CORPUS = Path(__file__).with_name("corpus.jsonl.gz")
FAMILY = {**worlds.FAMILY, "cut": unclocked.cut, "wild": unclocked.wild}


def play(family: str, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a world with this code. Returns its full record and its summary. A world in which the judge found an error is
    recorded too."""
    told, found = worlds.Told(), ""
    try:
        FAMILY[family](number, told)
    except EngineError as error:
        found = str(error)[:200]
    name = f"{family}-{number:03}"
    frames = [[e.id, e.at, *plain(e), [plain(command) for command in commands]] for e, commands in told.frames]
    full = {"name": name, "limits": told.limits.to_plain(), "policies": told.policies, "frames": frames}
    ends = [order["outcome"] for frame in frames for kind, order in frame[4] if kind == "FinishRun"]
    view = getattr(getattr(told, "scheduler", None), "view", None)
    phases = view.phase_counts() if hasattr(view, "phase_counts") else {}
    line = {"name": name, **summary(frames), "phases": phases, "outcome": ends[-1] if ends else "", "found": found}
    return full, line


def summary(frames: list[Any]) -> dict[str, Any]:
    """The results of a run, derived only from its events and commands."""
    steps: dict[int, Any] = {}
    versions: dict[int, Any] = {}
    ordered: dict[tuple[int, int], int] = {}
    drawn, trained, ended = 0, set(), set()
    for _, _, kind, said, commands in frames:
        if kind == "PromptsDrawn":
            drawn = max(drawn, said["first"] + said["count"])
        elif kind == "StepTrained" and said["step"] in steps:
            trained |= set(steps[said["step"]][0])
        elif kind == "RunResumed":  # steps that the weights do not contain are undone
            steps = {step: it for step, it in steps.items() if step < said["steps"]}
            trained -= set(said["consumed"])
            ended -= {*said["consumed"], *said["released"]}
        elif kind == "WeightsPublished" and (said["version"], said["attempt"]) in ordered:
            versions[said["version"]] = ordered[said["version"], said["attempt"]]
        for name, order in commands:
            if name == "TrainStep":
                steps[order["step"]] = [order["groups"], order["staleness"]]
            elif name == "PublishWeights":
                ordered[order["version"], order["attempt"]] = order["steps"]
            elif name == "DiscardGroups":
                ended |= set(order["groups"])
    return {
        "events": len(frames),
        "commands": sum(len(frame[4]) for frame in frames),
        "steps": [[step, *steps[step]] for step in sorted(steps)],
        "versions": sorted(versions.items()),
        "prompts": {"drawn": drawn, "trained": len(trained), "dropped": len(ended - trained)},
        "digest": hashlib.sha256(msgpack.packb(frames)).hexdigest()[:16],
    }


def read_corpus() -> dict[str, Any]:
    """The summaries that the repository stores, by world."""
    with gzip.open(CORPUS, "rt", encoding="utf-8") as lines:
        return {line["name"]: line for line in map(json.loads, lines)}


def chosen(prefix: str) -> Iterator[tuple[str, int]]:
    """The worlds whose names start with `prefix`."""
    return ((family, number) for family, number in worlds.corpus() if f"{family}-{number:03}".startswith(prefix))


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("directory", type=Path)
    asked.add_argument("--corpus", action="store_true", help="write the summaries that the repository keeps")
    asked.add_argument("--prefix", default="", help="worlds whose names begin so")
    said = asked.parse_args()
    said.directory.mkdir(parents=True, exist_ok=True)
    began, lines, seen, slowest = perf_counter(), [], Counter(), (0.0, "")
    for family, number in chosen(said.prefix):
        start = perf_counter()
        full, line = play(family, number)
        (said.directory / f"{full['name']}.msgpack").write_bytes(msgpack.packb(full))
        lines.append(json.dumps(line))
        seen.update(frame[2] for frame in full["frames"])
        seen.update(name for frame in full["frames"] for name, _ in frame[4])
        seen.update([f"ends {line['outcome']}"])
        if line["found"]:
            print(f"{line['name']}: {line['found']}")
        slowest = max(slowest, (perf_counter() - start, full["name"]))
    if said.corpus:
        packed = gzip.compress("\n".join(lines).encode(), mtime=0)
        CORPUS.write_bytes(packed)
    for name, count in sorted(seen.items()):
        print(f"{count:8} {name}")
    print(f"{len(lines)} worlds in {perf_counter() - began:.0f} s, the slowest {slowest[1]} in {slowest[0]:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
