"""Prompts, data sets and rewards: what a run trains on. Nothing in here imports torch, Ray or the scheduler."""
