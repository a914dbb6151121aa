"""Runs a user's `Generator` and `Trainer`: commands in, events out, the same in one process and in a Ray actor.

Called by `runtime.worker`, which supplies the stores and receives the events. Must never import Ray or torch.
"""
