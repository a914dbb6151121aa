"""An OpenAI-compatible endpoint for agents that records every conversation token by token (docs/AGENTS.md)."""
