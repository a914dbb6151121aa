"""Runs the engine on Ray: one scheduler actor, rollout actors, a trainer actor and two stores.

`launch.launch` starts a run. `ray_processes.py` implements the runtime's process port: commands become calls there.
"""
