"""The training side: advantages, losses, off-policy corrections and the torch train step behind
`engine.protocols.Trainer`.

Used by `workers.trainer`, through `training.model_trainer.ModelTrainer`. Knows nothing of the
scheduler, and is the only place besides `rollout` and `actors` that may import torch; so this file imports nothing.
"""
