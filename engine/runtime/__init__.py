"""One executor, one supervisor and one set of workers, whatever the processes of a run are.

Only the port of `port.py` varies: `actors/` implements it over Ray, `local/` in one process.
"""
