"""The training side: advantages, losses, off-policy corrections and the torch train step behind `engine.roles.Trainer`.

Used by the Ray trainer actor and the in-process executor, through `training.trainer.ModelTrainer`. Knows nothing of the
scheduler, and is the only place besides `rollout` and `actors` that may import torch; so this file imports nothing.
"""
