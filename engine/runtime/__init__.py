"""The runtime of a run: executor, supervisor and workers, independent of where the processes are.

Only the implementation of `process_port.py` varies: `actors/` implements it on Ray, `runtime/local/` in one process.
"""
