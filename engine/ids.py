"""Type names that every layer shares. They say what a number means.

They are plain aliases, not classes: an id is an int in the core, on the wire and in the record.
"""

from typing import TypeAlias

GroupId: TypeAlias = int
"""A prompt group, numbered in the order in which prompts were drawn. Never reused within a run."""

StepId: TypeAlias = int
"""An outer train step t, counted from 0."""

Version: TypeAlias = int
"""A weights version: the number of publications before it. 0 is the initial weights."""

NO_VERSION: Version = -1
"""Stands for the oldest and the newest version of a group without tokens, and for a missing version."""

ReplicaId: TypeAlias = int
"""One rollout engine instance."""

LifeNumber: TypeAlias = int
"""Number of starts of a process, counted from 1. Assigned by the scheduler and never reused."""

EventId: TypeAlias = int
"""Position of an event in the record, counted from 0."""

ValidationId: TypeAlias = int
"""One validation, numbered in the order in which validations were queued."""

TimerId: TypeAlias = int
"""One `SetTimer`, numbered by the scheduler."""
