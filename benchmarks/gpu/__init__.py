"""The parts of `gpu_smoke.py`, which runs each in a process of its own.

A part is a function of a `Bench` that yields figures by name as soon as it has them, so that a part that fails later
still reports those. Figures are numbers, texts, or mappings and lists of them.
"""
