"""An OpenAI-compatible endpoint for agents, which keeps every conversation token by token (docs/AGENTS.md)."""
