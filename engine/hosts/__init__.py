"""What runs a user's `Generator` and `Trainer`: commands in, events out, the same in one process and in a Ray actor.

Called by `runtime.workers`, which says where the stores are and where events go. Nothing here knows Ray or torch.
"""
