"""The parts of the scheduler's work: rollout, training, weight sync and validation. Only `scheduler.py` calls them."""
