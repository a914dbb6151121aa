"""The first line of advice about a run, for the table at its end and for `engine top`."""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.hardware import gpu_count

MOST_RECORD_BYTES = 1 << 20
"""Reading a larger record would delay the end of a run by more than a few seconds."""
ADVICE_EVERY_S = 30.0
ADVICE_SHARE = 0.01
"""Maximum share of a core that `engine top` uses for advice."""


def first_advice(run_dir: Path) -> str:
    """The first line of advice about a run, or how to get it; empty if its record cannot be read here."""
    with ThreadPoolExecutor(1) as thread:  # in a notebook, this thread runs an event loop already
        return thread.submit(_first_advice, run_dir).result()


def _first_advice(run_dir: Path) -> str:
    from engine.inspect.history_reader import read_history
    from engine.simulation.advice import FEW_GROUPS, advise

    try:
        if sum(path.stat().st_size for path in (run_dir / "schedule").iterdir()) > MOST_RECORD_BYTES:
            return "the record is long: use `engine explain`"
        history = read_history(run_dir)
        return advise(history, gpus=may_have_gpus(history.config), most_groups=FEW_GROUPS).lines[0]
    except (EngineError, OSError):
        return ""
    except Exception as error:  # a defect here must not fail a run that has finished
        return f"none: unexpected {type(error).__name__}: {error}"


def may_have_gpus(config: Mapping[str, Any]) -> bool:
    """Whether a run may get more GPUs. Its record does not say what `auto` was: a cluster may have some, or this
    machine."""
    devices = {(config.get(section) or {}).get("device", "auto") for section in ("rollout", "trainer")}
    joined = (config.get("cluster") or {}).get("address") is not None
    return devices != {"cpu"} and (joined or gpu_count() != 0)


class AdviceWatch:
    """The first line of advice about a running run, without figures. A thread reads its record again at intervals."""

    def __init__(self, run_dir: Path) -> None:
        self.line = ""
        self._run_dir = run_dir
        self._never = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        pause_s = 0.0
        while not self._never.wait(pause_s):
            began = time.thread_time()
            self.line = _first_advice(self._run_dir).partition(";")[0]
            pause_s = max(ADVICE_EVERY_S, (time.thread_time() - began) / ADVICE_SHARE)
