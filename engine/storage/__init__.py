"""The storage of a run: trajectories, weights, checkpoints, and the directory with its files."""
