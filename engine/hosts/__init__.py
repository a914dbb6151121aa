"""What runs a user's `Generator` and `Trainer`: commands in, events out, the same in one process and in a Ray actor.

Called by `local` and `actors`, which say where the stores are and where events go. Nothing here knows Ray or torch.
"""
