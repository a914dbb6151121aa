"""Writes the boards as JSON: `python -m dashboards.generate [FOLDER]`, into `dashboards/generated/` if none is given.

Exit codes: 0 done, 2 the folder cannot be written, or is none.
"""

import argparse
import json
import sys
from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards.overview import overview
from dashboards.reliability import reliability
from dashboards.rollout import rollout
from dashboards.scheduler import scheduler
from dashboards.training import training

GENERATED = Path(__file__).resolve().parent / "generated"
BOARDS = {board.__name__: board for board in (overview, scheduler, rollout, training, reliability)}


def text_of(board: Dashboard) -> str:
    """A board as Grafana takes it; panels numbered from 1 in their order."""
    plain = json.loads(json.dumps(board.build(), cls=JSONEncoder))
    for number, panel in enumerate(plain["panels"], start=1):
        panel["id"] = number
    return json.dumps(plain, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dashboards.generate", description="Write the boards as JSON.")
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, default=GENERATED)
    folder = parser.parse_args(arguments).folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, board in BOARDS.items():
            (folder / f"{name}.json").write_text(text_of(board()), encoding="utf-8")
    except OSError as error:
        print(f"dashboards: {folder} cannot be written: {error.strerror or error}", file=sys.stderr)
        return 2
    print(f"{len(BOARDS)} boards in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
