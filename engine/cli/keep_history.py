"""`python -m engine.cli.keep_history RUN EVENTS PARENT`: reads the record of a running run into its history cache.

`runtime.history_process` starts it. It reads the stretches of at least EVENTS events whenever it gets a line on its
standard input, and ends with its PARENT. It imports the extensions of the run, as every process of the run does.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path


def main() -> None:
    """Read until standard input ends."""
    run_when_idle()
    from engine.cli.recorded_run import load_recorded_extensions
    from engine.inspect.history_reader import cache_history, end_with

    run, least, parent = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    end_with(parent)
    load_recorded_extensions(run, named=True)
    for _ in sys.stdin:
        cache_history(run, least)


def run_when_idle() -> None:
    """Give this thread, and those that it starts, only the processor time that no other process wants.

    On Linux, the lowest priority is not enough: it took up to 40 % of a busy run's groups/s (benchmarks/README.md).
    """
    os.nice(LOWEST_PRIORITY)
    if sys.platform == "linux":
        with suppress(OSError):  # a container may refuse it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


LOWEST_PRIORITY = 19

if __name__ == "__main__":
    main()
