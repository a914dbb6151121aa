"""The engine over Ray: one scheduler actor, rollout actors, a trainer actor and two stores. `run.launch` starts a run.

The only package that imports Ray, but for the command line. Within it, `executor.py` is where commands become calls.
"""
