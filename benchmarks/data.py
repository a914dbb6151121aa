"""The cost of checking many prompts: processor and wall seconds of `engine check`.

    python benchmarks/data.py [--rows 100000] [--words 80]

Makes a project with a tiny model (`engine init`), writes texts and chats for it, and checks them as a user would, in
another process. It also checks ten rows; the difference is the cost of the other rows.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

CONTEXT = 32_768


def main() -> None:
    asked = argparse.ArgumentParser(description="Processor seconds of checking many prompts.")
    asked.add_argument("--rows", type=int, default=100_000)
    asked.add_argument("--words", type=int, default=80, help="words of a prompt")
    given = asked.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "project"
        engine("init", str(project))
        model = json.loads((project / "model" / "config.json").read_text())
        (project / "model" / "config.json").write_text(json.dumps(model | {"max_position_embeddings": CONTEXT}))
        print(f"{'prompts':>20} {'MB':>6} {'processor s':>12} {'wall s':>7}")
        for kind in ("text", "chat"):
            for rows in (10, given.rows):
                file = project / f"{kind}-{rows}.jsonl"
                file.write_text("".join(json.dumps(row) + "\n" for row in made(kind, rows, given.words)))
                processor, wall = engine("check", str(project / "config.yaml"), "--set", f"data.path={file}")
                megabytes = file.stat().st_size / 1e6
                print(f"{f'{rows} {kind}s':>20} {megabytes:6.1f} {processor:12.1f} {wall:7.1f}", flush=True)


def made(kind: str, rows: int, words: int) -> Iterator[dict[str, object]]:
    draws = random.Random(rows)
    known = ["".join(draws.choices("abcdefghijklmnopqrstuvwxyz", k=draws.randint(2, 9))) for _ in range(5000)]
    for row in range(rows):
        question = " ".join(draws.choices(known, k=words)) + "?"
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
        yield {"prompt": question, "answer": str(row)} if kind == "text" else {"messages": chat, "answer": str(row)}


def engine(*arguments: str) -> tuple[float, float]:
    """Processor and wall seconds of a command of the engine."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "engine.cli", *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, time.perf_counter() - began


if __name__ == "__main__":
    main()
