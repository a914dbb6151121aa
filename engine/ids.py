"""Names that every layer shares: what a number means when it crosses a boundary.

Plain aliases, not classes: an id is an int in the core, on the wire and in the record, and costs nothing.
"""

from typing import TypeAlias

GroupId: TypeAlias = int
"""A prompt group, numbered in the order its prompt was drawn. Never reused within a run."""

StepId: TypeAlias = int
"""An outer train step t, counted from 0."""

Version: TypeAlias = int
"""A weights version: the number of publications before it. 0 is the initial weights."""

NO_VERSION: Version = -1
"""The oldest and newest version of a group that has no token yet; no version where one may be named."""

ReplicaId: TypeAlias = int
"""One rollout engine instance."""

Incarnation: TypeAlias = int
"""Which life of a process, counted from 1. Numbered by the scheduler and never reused."""

EventId: TypeAlias = int
"""Position of an event in the record, counted from 0."""

ValidationId: TypeAlias = int
"""One validation run, numbered in the order they were queued."""

TimerId: TypeAlias = int
"""One `SetTimer`, numbered by the scheduler."""
