"""The runtime of a run: executor, supervisor and workers, independent of where the processes are.

Only the implementation of `port.py` varies: `actors/` implements it over Ray, `local/` in one process.
"""
