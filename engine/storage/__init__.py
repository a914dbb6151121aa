"""What a run keeps: trajectories, weights and checkpoints, and the directory that holds its files."""
