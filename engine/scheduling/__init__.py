"""The three halves of the scheduler's work: rollout, training and weight sync. Only `scheduler.py` calls them."""
