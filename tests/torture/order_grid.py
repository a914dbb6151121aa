"""Search every order of events of a grid of small runs, and find seeded defects: part of `make torture`.

    python -m tests.torture.order_grid                # two processes
    python -m tests.torture.order_grid --only 3       # one run of the grid

Together, the runs have each bound at its maximum, every sync mode, and every failure that `order_answers` knows, except
those of added states of train steps.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from engine.states.limits import Pool, ValidationLimits
from tests.core.added_states import CHECKING
from tests.torture.every_order import Found, Search, SmallWorld
from tests.torture.order_defects import DEFECTS, FRESHEST, ROLLING, Patch

SHARED = Pool(tasks=("rollout", "train"), replicas=(0, 1))
APART = (Pool(tasks=("ref_logprobs",)), Pool(tasks=("train",)))
GRID: Sequence[SmallWorld] = (
    SmallWorld(2, 2, 4, replicas=3),
    SmallWorld(2, 2, 4, slots=4, prompts=6),
    SmallWorld(2, 2, 4, slots=4, prompts=5, sync_mode="wait"),
    SmallWorld(2, 2, 4, slots=4, prompts=6, sync_every=2),
    SmallWorld(2, 2, 4, slots=2, prompts=6, sync_mode="abort", names={"deadline": "truncate"}),
    SmallWorld(2, 1, 4, slots=4, prompts=6, sync_mode="abort", names={"deadline": "drop"}),
    SmallWorld(2, 2, 4, replicas=2, prompts=4, sync_mode="abort", names=ROLLING),
    SmallWorld(2, 2, 4, replicas=2, prompts=4, sync_mode="abort", sync_every=2),
    SmallWorld(2, 1, 4, replicas=2, prompts=4, sync_mode="abort", pools=(SHARED,)),
    SmallWorld(2, 1, 2, replicas=3, slots=1, sync_mode="wait", names=ROLLING),
    SmallWorld(1, 2, 3, slots=3, prompts=4, names=FRESHEST),
    SmallWorld(1, 1, 2, replicas=2, slots=1, prompts=2, validation=ValidationLimits(rows=2, every=1)),
    SmallWorld(2, 1, 4, slots=4, prompts=4, added_states=(CHECKING,)),
    SmallWorld(2, 1, 4, slots=4, prompts=4, scoring_tasks=("ref_logprobs",), pools=APART),
    SmallWorld(2, 1, 3, slots=4, prompts=4, checkpoint_every=1),
    SmallWorld(2, 1, 3, slots=4, prompts=5, over_sample=0.5, sync_mode="abort"),
)


def search(world: SmallWorld, put_in: Callable[[Patch], None] = lambda patch: None) -> Found:
    """Search a run, with a defect in the core."""
    gc.freeze()
    with Patch.context() as patch:
        put_in(patch)
        return Search(world).run()


def main() -> None:
    parser = argparse.ArgumentParser(description="Search every order of events of small runs.")
    parser.add_argument("--only", type=int, help="search only the run in this line of the table")
    given = parser.parse_args()
    grid = GRID if given.only is None else GRID[given.only - 1 :][:1]
    began, wrong = time.monotonic(), 0
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        print("   states   events   ends  CPU s  run")
        for world, found in zip(grid, pool.map(search, grid), strict=True):
            print(f"{found.states:9} {found.ticks:8} {found.ends:6} {found.cpu_s:6.1f}  {world.title}", flush=True)
            print(found.story, end="\n" if found.story else "")
            wrong += bool(found.story)
        print(f"{time.monotonic() - began:.0f} s in two processes. Seeded defects:")
        worlds = [world for world, _ in DEFECTS.values()]
        for (put_in, (_, law)), found in zip(DEFECTS.items(), pool.map(search, worlds, DEFECTS), strict=True):
            missed = law not in found.story
            print(f"\n{put_in.__name__}: {found.story or 'NOT FOUND'}")
            wrong += missed
    sys.exit(f"{wrong} runs are not as they should be" if wrong else 0)


if __name__ == "__main__":
    main()
