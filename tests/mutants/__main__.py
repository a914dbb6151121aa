"""Draws mutants of the scheduler, the record and the workers, and reports which of them no test notices.

    make mutants ARGS="--count 50 --only engine/states/ledger.py"
    make mutants ARGS=--survivors      # again, the mutants that survived

One traced run of the tests shows which lines each test reaches; it is kept beside the results, and only changed test
files are traced again. Then each mutant runs the tests that reach its lines, the fastest first, until one fails. All of
it happens in copies of the repository. Results are appended as they come: an interrupted run goes on where it was.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from tests.mutants.draw import Mutant, draw, mutants_of
from tests.mutants.tracing import TIMED_OUT

ROOT = Path(__file__).resolve().parents[2]
ONLY = [f"engine/{name}" for name in ("states", "scheduling", "policies", "record", "workers", "storage")]
TESTS = [
    *("core", "modes", "record", "workers", "storage", "runtime", "oracle", "inspect", "control"),
    *("test_config_bounds.py", "test_extensions.py", "test_run_view.py"),
]
"""Folders and files of tests that run in this process: no Ray, no vLLM."""
ARGUMENTS = ["-m", "not ray and not gpu"]
TRACING_LIMIT_S = 3600
FIRST_FILES, QUICK_S = 3, 0.3


def limit_s(measured_s: float) -> float:
    """How long a test may take on a mutant: far longer than it took, traced, on the original."""
    return 20 + 8 * measured_s


class Copy:
    """A copy of the repository, and a process there that runs tests."""

    def __init__(self, folder: Path) -> None:
        ignored = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".mutants", ".*_cache", ".hypothesis")
        self.root = Path(shutil.copytree(ROOT, folder / "repository", ignore=ignored))
        self.output = folder / "output"
        self.log = folder / "log"
        environment = {**os.environ, "PYTHONPATH": f"{self.root}:{os.environ.get('PYTHONPATH', '')}"}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.runner"],
            cwd=self.root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, arguments: list[str], limit: float, **plugin: Any) -> tuple[int, str]:
        """The exit status of pytest, and what its plugin wrote."""
        self.output.unlink(missing_ok=True)
        request = {"arguments": [*ARGUMENTS, *arguments], "output": str(self.output), "log": str(self.log), **plugin}
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({**request, "limit_s": limit}) + "\n")
        self.process.stdin.flush()
        status = int(self.process.stdout.readline())
        return status, self.output.read_text() if self.output.exists() else ""

    def try_mutant(self, mutant: Mutant, tests: dict[str, float]) -> dict[str, Any]:
        file = self.root / mutant.file
        source = file.read_bytes()
        file.write_bytes(mutant.apply(source))
        try:
            for batch in batches(tests):
                files = list(dict.fromkeys(file_of(test) for test in batch))
                limits = {test: limit_s(seconds) for test, seconds in batch.items()}
                status, by = self.run(["-x", *files], 120 + 5 * sum(batch.values()), limits=limits)
                if status:
                    return {"outcome": "timed out" if status == TIMED_OUT else "killed", "by": by or f"status {status}"}
        finally:
            file.write_bytes(source)
        return {"outcome": "survived", "by": f"{len(tests)} tests pass" if tests else "no test reaches it"}


class Reach:
    """Which lines each test reaches, kept in a file. Each test file is traced anew when it changed."""

    def __init__(self, path: Path, tests: list[str]) -> None:
        self.path = path
        self.test_files = sorted(file for test in tests for file in [ROOT / test, *(ROOT / test).rglob("test_*.py")])
        self.test_files = [file for file in self.test_files if file.is_file()]
        others = [file for folder in ("engine", "tests") for file in sorted((ROOT / folder).rglob("*.py"))]
        others = [file for file in others if file.name[:5] != "test_" and file.parent.name != "mutants"]
        self.base = digest(others)
        kept = json.loads(path.read_text()) if path.exists() else {}
        self.files: dict[str, Any] = kept.get("files", {}) if kept.get("base") == self.base else {}

    def trace(self, copy: Copy) -> None:
        stale = [f for f in self.test_files if self.files.get(name(f), {}).get("digest") != digest([f])]
        if stale:
            print(f"Tracing {len(stale)} test files", flush=True)
            status, text = copy.run([name(f) for f in stale], TRACING_LIMIT_S, folders=ONLY)
            if not text:
                sys.exit(f"The tests cannot be traced (status {status}):\n{copy.log.read_text()[-2000:]}")
            traced = json.loads(text)
            for file in stale:
                of_file = {test: kept for test, kept in traced["tests"].items() if test.startswith(name(file) + "::")}
                self.files[name(file)] = {"digest": digest([file]), "tests": of_file}
            self.path.write_text(json.dumps({"base": self.base, "files": self.files}))
            for test in traced["failed"]:
                print(f"left out, as it fails or skips without a mutant: {test}", flush=True)
        current = [self.files[name(file)] for file in self.test_files]
        self.tests: dict[str, Any] = {test: kept for each in current for test, kept in each["tests"].items()}

    def reaching(self, mutant: Mutant, budget_s: float) -> dict[str, float]:
        """The tests that reach a mutant, fastest first, with their seconds. Of lines that no test reaches, or only
        as the file is imported or on a first call: the tests that reach the file, or its folder."""
        first, last = mutant.lines
        lines = 0 if mutant.at_import else (1 << last + 1) - (1 << first)
        found = [test for test, kept in self.tests.items() if int(kept["lines"].get(mutant.file, "0"), 16) & lines]
        if not found:
            near = mutant.file if any(mutant.file in kept["lines"] for kept in self.tests.values()) else ""
            near = near or os.path.dirname(mutant.file)
            found = [test for test, kept in self.tests.items() if any(file.startswith(near) for file in kept["lines"])]
        chosen: dict[str, float] = {}
        for test in sorted(found, key=lambda test: self.tests[test]["seconds"]):
            budget_s -= self.tests[test]["seconds"]
            if budget_s < 0 and chosen:
                break
            chosen[test] = self.tests[test]["seconds"]
        return chosen


def batches(tests: dict[str, float]) -> list[dict[str, float]]:
    """The tests of the few files with most quick ones, then all others: importing every test file takes seconds."""
    quick = Counter(file_of(test) for test, seconds in tests.items() if seconds < QUICK_S)
    files = {file for file, _ in quick.most_common(FIRST_FILES)}
    first = {test: seconds for test, seconds in tests.items() if file_of(test) in files and seconds < QUICK_S}
    return [batch for batch in (first, {test: s for test, s in tests.items() if test not in first}) if batch]


def file_of(test: str) -> str:
    return test.partition("::")[0]


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def digest(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def report(results: dict[str, Any]) -> None:
    outcomes = Counter(result["outcome"] for result in results.values())
    for result in results.values():
        if result["outcome"] == "survived":
            print(f"\nsurvived: {result['file']}:{result['line']} {result['kind']} ({result['by']})\n{result['diff']}")
    detected = outcomes["killed"] + outcomes["timed out"]
    share = f", {detected / len(results):.1%} detected" if results else ""
    print(f"\n{len(results)} mutants: {', '.join(f'{count} {outcome}' for outcome, count in outcomes.items())}{share}")


def drawn(arguments: argparse.Namespace) -> dict[str, Mutant]:
    only = [ROOT / path for path in arguments.only or ONLY]
    files = sorted({file for path in only for file in ([path] if path.is_file() else path.rglob("*.py"))})
    return {diff_of(mutant): mutant for mutant in draw(ROOT, files, arguments.count, arguments.seed)}


def survivors(before: dict[str, Any]) -> dict[str, Mutant]:
    """The mutants that survived, where their lines are still as they were."""
    wanted = {diff: result for diff, result in before.items() if result["outcome"] == "survived"}
    files = sorted({ROOT / result["file"] for result in wanted.values()})
    places = {(result["file"], result["kind"]) for result in wanted.values()}
    found = [mutant for file in files for mutant in mutants_of(file.read_bytes(), name(file))]
    return {diff: m for m in found if (m.file, m.kind) in places and (diff := diff_of(m)) in wanted}


def diff_of(mutant: Mutant) -> str:
    """A mutant's name: its diff without line numbers."""
    lines = mutant.diff((ROOT / mutant.file).read_bytes()).splitlines()
    return "\n".join(line for line in lines if not line.startswith("@@"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", metavar="PATH", help="file or folder; may be repeated")
    parser.add_argument("--tests", action="append", metavar="PATH", help="test file or folder; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--budget", type=float, default=600, metavar="SECONDS", help="of tests for each mutant")
    parser.add_argument("--json", type=Path, default=ROOT / ".mutants" / "results.jsonl", metavar="FILE")
    parser.add_argument("--survivors", action="store_true", help="only those that survived, again")
    arguments = parser.parse_args()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    lines = arguments.json.read_text().splitlines() if arguments.json.exists() else []
    before = {result["diff"]: result for result in map(json.loads, lines)}
    mutants = survivors(before) if arguments.survivors else drawn(arguments)
    results = {diff: before[diff] for diff in mutants if diff in before and not arguments.survivors}
    work: Queue[tuple[str, Mutant]] = Queue()
    for diff, mutant in mutants.items():
        if diff not in results:
            work.put((diff, mutant))
    reach = Reach(arguments.json.with_suffix(".reached"), arguments.tests or [f"tests/{each}" for each in TESTS])

    def try_all(copy: Copy) -> None:
        while True:
            try:
                diff, mutant = work.get_nowait()
            except Empty:
                return
            outcome = copy.try_mutant(mutant, reach.reaching(mutant, arguments.budget))
            result = {"file": mutant.file, "line": mutant.lines[0], "kind": mutant.kind, **outcome, "diff": diff}
            results[diff] = result
            with arguments.json.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{outcome['outcome']:9} {mutant.file}:{mutant.lines[0]} {mutant.kind} ({outcome['by']})", flush=True)

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [Copy(Path(folder, str(job))) for job in range(arguments.jobs if not work.empty() else 0)]
        try:
            if copies:
                reach.trace(copies[0])
            threads = [threading.Thread(target=try_all, args=[copy], daemon=True) for copy in copies]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for copy in copies:
                copy.process.kill()
    report(results)


if __name__ == "__main__":
    main()
