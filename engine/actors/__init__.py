"""Runs the engine over Ray: one scheduler actor, rollout actors, a trainer actor and two stores.

`run.launch` starts a run. `processes.py` implements the runtime's process port: commands become calls there.
"""
