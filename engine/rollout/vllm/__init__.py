"""The vLLM backend. The only folder that imports vLLM."""
