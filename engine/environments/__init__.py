"""Environments: multi-turn tasks with tools, which a user writes or adapts (docs/ENVIRONMENTS.md)."""

from engine.environments.protocol import Environment, Step, ToolCall, Turn

__all__ = ["Environment", "Step", "ToolCall", "Turn"]
