"""Runs a user's `Generator` and `Trainer`: commands in, events out, the same in one process and in a Ray actor.

Used by the processes of a run, which supply the stores and receive the events. Must never import Ray or torch.
"""
