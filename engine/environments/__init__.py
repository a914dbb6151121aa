"""Environments: multi-turn tasks with tools, which a user writes or adapts (docs/ENVIRONMENTS.md)."""

from engine.environments.protocol import Environment, StepResult, ToolCall, Turn

__all__ = ["Environment", "StepResult", "ToolCall", "Turn"]
