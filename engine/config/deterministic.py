"""The laws of `rollout.deterministic`: the other settings that a run with S = 0 needs to equal a synchronous loop bit
for bit, whatever the number of replicas, slots and cores. docs/STALENESS.md says why each is needed.

Called by `schema.py`. It sets the fields that the user left open and refuses a value that breaks the promise.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from engine.config.sections import Sections
from engine.errors import ConfigError


class Need(NamedTuple):
    """The value that one field must have, and why. `open`: the value that leaves the choice to the engine, even if the
    user writes it out."""

    field: str
    value: Any
    law: str
    open: Any = None


NEEDS = (
    Need("rollout.backend", "torch", "only the torch backend decodes at fixed shapes"),
    Need("rollout.threads", 1, "results depend on the number of threads", open=0),
    Need("rollout.device", "cpu", "only the CPU is deterministic", open="auto"),
    Need("trainer.threads", 1, "results depend on the number of threads"),
    Need("trainer.device", "cpu", "only the CPU is deterministic", open="auto"),
    Need("trainer.packing", "off", "packed rows are rounded differently from a plain loop's", open="auto"),
    Need("trainer.compile", False, "compiled layers are rounded differently from a plain loop's"),
    Need("trainer.ranks", 1, "sums over ranks are rounded differently"),
    Need("scheduler.policies.batching", "strict-order", "batches must be in the order drawn"),
    Need("scheduler.policies.deadline", "wait", "other deadline policies depend on the clock"),
)


def settle_deterministic(config: Sections) -> Sections:
    """The sections with every open field set that `rollout.deterministic` needs; without it, as they are.

    Raises: `ConfigError` for the first field that breaks the promise.
    """
    sections: dict[str, Any] = {}
    for need in NEEDS if config.rollout.deterministic else ():
        top, *path = need.field.split(".")
        section: Any = sections.get(top, getattr(config, top))
        holder = section
        for part in path[:-1]:
            holder = getattr(holder, part)
        value = getattr(holder, path[-1])
        if value == need.value:
            continue
        if path[-1] in holder.model_fields_set and value != need.open:
            law = f"rollout.deterministic is true, and {need.law}"
            raise ConfigError(need.field, value, law, f"use {need.value}, or rollout.deterministic: false")
        sections[top] = _with(section, path, need.value)
    return config.model_copy(update=sections)


def _with(section: Any, path: list[str], value: Any) -> Any:
    """A copy of a section in which the field at `path` is `value`."""
    name, *rest = path
    return section.model_copy(update={name: _with(getattr(section, name), rest, value) if rest else value})


def remarks(config: Sections) -> Iterator[str]:
    """The notes of `engine check` on a deterministic run."""
    if not config.rollout.deterministic:
        return
    stale = config.scheduler.max_staleness_steps
    if stale:
        yield (
            f"rollout.deterministic with S = {stale}: a trajectory is a function of the seed, its prompt and the "
            "weights that sampled each token, but which weights those are depends on time; S = 0 repeats the whole run"
        )
    yield (
        "rollout.deterministic is slower: every call has 32 rows and the full context, and prompts are read token by "
        "token"
    )
