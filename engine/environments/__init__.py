"""Environments: multi-turn tasks with tools, which a user writes or adapts (docs/AGENTS.md)."""

from engine.environments.protocol import Environment, Opening, StepResult, ToolCall, Turn

__all__ = ["Environment", "Opening", "StepResult", "ToolCall", "Turn"]
