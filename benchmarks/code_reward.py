"""The time of a reward that runs code, in this checkout and in others.

    python benchmarks/code_reward.py [--repeat N] [OTHER ...]

OTHER: directories of other checkouts, such as one of an older commit. They take turns, each time in a new process and
in another order. Prints the median seconds of one response with each kind of tests, and the ratio to the first OTHER.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

HERE = str(Path(__file__).resolve().parents[1])
ADD, ECHO = "def add(a, b):\n    return a + b\n", "print(int(input()) * 2)\n"
CASES = {
    "10 asserts": (ADD, [f"assert add({n}, 2) == {n + 2}" for n in range(10)]),
    "10 calls": (ADD, {"fn_name": "add", "inputs": [[n, 2] for n in range(10)], "outputs": list(range(2, 12))}),
    "10 outputs": (ECHO, {"inputs": [str(n) for n in range(10)], "outputs": [str(2 * n) for n in range(10)]}),
    "1 assert": (ADD, ["assert add(1, 2) == 3"]),
}


def measure() -> dict[str, float]:
    """Seconds of one response, by kind."""
    from engine.tasks.code_rewards import python_tests
    from engine.trajectory import Prompt, Trajectory

    taken = {}
    for name, (code, tests) in CASES.items():
        prompt = Prompt(row=0, text="?", fields={"tests": tests})
        began = time.perf_counter()
        assert python_tests(prompt, Trajectory(text=code)) == 1.0
        taken[name] = time.perf_counter() - began
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("others", nargs="*", metavar="OTHER")
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(measure()))
        return
    roots = [HERE, *map(os.path.abspath, asked.others)]
    taken: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for turn in range(asked.repeat):
        for root in roots if turn % 2 else roots[::-1]:
            command = [sys.executable, __file__, "--measure"]
            done = subprocess.run(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root}, check=True)
            for name, seconds in json.loads(done.stdout).items():
                taken[name][root].append(seconds)
    for name, by_root in taken.items():
        figures = {root: round(median(by_root[root]), 3) for root in roots}
        ratio = {"ratio": round(figures[HERE] / figures[roots[1]], 2)} if len(roots) > 1 else {}
        print(json.dumps({"tests": name, **figures, **ratio}))


if __name__ == "__main__":
    main()
