"""The HTTP backend: an OpenAI-compatible server somewhere else."""
