"""Step Engine: asynchronous RL post-training of language models as explicit, recorded steps."""

__version__ = "0.1.0"
