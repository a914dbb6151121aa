"""`python -m engine.cli.keep_history RUN EVENTS PARENT`: reads the record of a running run into its history cache.

`runtime.history_process` starts it. It reads the stretches of at least EVENTS events whenever it gets a line on its
standard input, and ends with its PARENT. It imports the extensions of the run, as every process of the run does.
"""

import os
import sys
from pathlib import Path


def main() -> None:
    """Read until standard input ends."""
    os.nice(LOWEST_PRIORITY)
    from engine.cli.recorded_run import load_recorded_extensions
    from engine.inspect.history_reader import cache_history, end_with

    run, least, parent = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    end_with(parent)
    load_recorded_extensions(run, named=True)
    for _ in sys.stdin:
        cache_history(run, least)


LOWEST_PRIORITY = 19

if __name__ == "__main__":
    main()
