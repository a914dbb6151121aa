"""The embedded backend: any Hugging Face causal language model, sampled in this process."""
