"""What the engine does on one GPU, in a few minutes: gradients, speed, memory, moves to the host, transfers.

    python benchmarks/gpu_smoke.py [--budget 360] [--parts machine,gradients] [--device auto] [--out FILE]

It needs no network: models are made on the spot, with random weights in the shapes of Qwen2.5-0.5B, Qwen3-0.6B and
Qwen3-4B. Only the parts `vllm` and `vllm-run` need vLLM and Ray. Each part runs in a separate process and prints one
line of JSON. A part that fails has `error`, the end of its standard error and the figures that it had so far; the
others still run. Parts are in the order of their value; when the budget is used up, the remaining parts are named as
skipped. `--device cpu` runs tiny shapes to test the program, and skips what needs a GPU; `auto` is the GPU if there
is one.
"""

import argparse
import faulthandler
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TAIL = 4000
"""Characters of a part's standard error that its line has."""
LEAST_S = 10.0
"""A part that would have less time than this is skipped."""
FOLDER_BYTES = 12 * 10**9
"""What the models need."""


FIRST_RUN_S = 400.0
"""What `--first-run` may take, compilers and the start of Ray included."""


class Part(NamedTuple):
    function: str
    """In the package `gpu`."""
    limit_s: float
    needs_gpu: bool = False


PARTS = {
    "machine": Part("machine.describe", 90),
    "gradients": Part("training.gradients", 90),
    "speed-0.6b": Part("training.speed_of_the_small_model", 90),
    "speed-4b": Part("training.speed_of_the_large_model", 150),
    "publication": Part("training.publication", 90),
    "tests": Part("machine.tests", 120, needs_gpu=True),
    "agreement": Part("sampling.agreement", 90),
    "offload": Part("training.offload", 90),
    "fsdp": Part("training.fsdp", 90),
    "attention": Part("kernels.attention", 60, needs_gpu=True),
    "attention-kernels": Part("training.attention_kernels", 150),
    "long-row": Part("training.long_row", 60),
    "transfers": Part("kernels.transfers", 90, needs_gpu=True),
    "repeat": Part("training.repeat", 90),
    "host-optimizer": Part("training.host_optimizer", 150, needs_gpu=True),
    "vllm": Part("engines.engine_alone", 300),
    "vllm-run": Part("engines.whole_run", FIRST_RUN_S),
}
"""By name, the most valuable first."""


def run_part(name: str, device: str, folder: Path, file: Path, limit_s: float) -> None:
    """In the part's own process: write its figures to a file, each time that there are more."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, limit_s - 2.0))
    from gpu.bench import Bench

    module, function = PARTS[name].function.split(".")
    figures: dict[str, Any] = {}
    for more in getattr(import_module(f"gpu.{module}"), function)(Bench(device, folder, limit_s)):
        figures |= more
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(figures))
        os.rename(unfinished, file)


def outcome_of(command: Sequence[str], file: Path, limit_s: float) -> dict[str, Any]:
    """Run a part's command, and kill it and all that it has started at its limit. Returns the figures in its file, and
    its error if it failed."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    began = time.monotonic()
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=words, stderr=words, env=environment, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            kill_group(process)
        words.seek(0)
        said = words.read().decode(errors="replace").strip()
    found: dict[str, Any] = {"seconds": time.monotonic() - began}
    if status is None:
        found["error"] = f"exceeded {limit_s:.0f} s"
    elif status != 0:
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        found["error"] = f"{how}: {error_in(said.splitlines())[:300]}"
    if status != 0:
        found["stderr"] = said[-TAIL:]
    return found | (json.loads(file.read_text()) if file.exists() else {})


def error_in(lines: Sequence[str]) -> str:
    """The last line that names an exception; without one, the last line."""
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exit|Interrupt)\b", line)]
    return (named or lines or [""])[-1]


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def rounded(figure: Any) -> Any:
    """With four significant digits."""
    if isinstance(figure, Mapping):
        return {name: rounded(one) for name, one in figure.items()}
    if isinstance(figure, list | tuple):
        return [rounded(one) for one in figure]
    if isinstance(figure, float):
        return float(f"{figure:.4g}") if math.isfinite(figure) else str(figure)
    return figure


def place_for_models() -> str | None:
    """Shared memory if it is large enough; None: the usual folder of temporary files."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and shutil.disk_usage(shared).free > 2 * FOLDER_BYTES else None


def device_named(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists() else "cpu"


def run_all(names: Sequence[str], device: str, budget_s: float, out: Path | None) -> bool:
    """Run parts and print their lines. Returns whether none of them failed."""
    ends = time.monotonic() + budget_s
    failed = False
    with tempfile.TemporaryDirectory(prefix="gpu-smoke-", dir=place_for_models()) as directory:
        for name in names:
            left = ends - time.monotonic()
            limit_s = min(PARTS[name].limit_s, left)
            line: dict[str, Any] = {"part": name}
            if PARTS[name].needs_gpu and device == "cpu":
                line["skipped"] = "no GPU"
            elif left < LEAST_S:
                line["skipped"] = f"the budget of {budget_s:.0f} s is used up"
            else:
                file = Path(directory) / f"{name}.json"
                own = ["--one", name, directory, str(file), str(limit_s), "--device", device]
                line |= outcome_of([sys.executable, __file__, *own], file, limit_s)
            failed |= "error" in line
            text = json.dumps(rounded(line))
            print(text, flush=True)
            if out is not None:
                with out.open("a") as opened:
                    opened.write(text + "\n")
    return not failed


def names_in(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(PARTS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=600.0, metavar="SECONDS", help="default: 600")
    parser.add_argument("--parts", type=names_in, default=list(PARTS), help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--out", type=Path, help="also append the lines to this file")
    parser.add_argument("--first-run", action="store_true", help=f"only vllm-run, within {FIRST_RUN_S:.0f} s")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        name, folder, file, limit_s = given.one
        run_part(name, given.device, Path(folder), Path(file), float(limit_s))
        return
    if given.first_run:
        given.parts, given.budget = ["vllm-run"], FIRST_RUN_S
    if not run_all(given.parts, device_named(given.device), given.budget, given.out):
        sys.exit(1)


if __name__ == "__main__":
    main()
