"""The configuration of a resumed run: the one that it began with, except for fields that may change.

Two kinds of fields may change. Nothing in the record depends on the free ones. Settings of the scheduler change by an
event, right after the run has resumed. A change of any other field is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from engine.config.loading import load_config, parse_config
from engine.config.paths import moved
from engine.config.schema import Config
from engine.config.secrets import refuse_secrets
from engine.errors import ConfigError
from engine.errors.redaction import described
from engine.scheduling.settings import FIGURES, POLICIES, live_settings
from engine.section import Section

FREE = (
    "metrics",
    "control",
    "cluster",
    "run.dir",
    "run.code_dir",
    "run.silence_s",
    "rollout.replicas",
    "rollout.threads",
    "trainer.threads",
    "trainer.ranks",
    "trainer.nodes",
    "trainer.hybrid_sharding",
    "trainer.gpus_per_rank",
    "trainer.cpu_offload",
    "durability",
    "samples",
)
"""Fields and sections on which nothing in the record depends."""
REPLICAS = "rollout.replicas"
SHOWN = 8
"""Maximum number of differences in a message."""

Settings = tuple[tuple[str, str], ...]
"""(path, value) of the scheduler's settings to change, and of the number of replicas if it changed or was given
again."""


def resumed(path: Path, recorded: Mapping[str, Any], overrides: Sequence[str] = ()) -> tuple[Config, Settings]:
    """Load the configuration in `path`, with the overrides, and compare it with the one that the run began with.
    Returns the loaded one, and the settings that the scheduler must change.

    Raises: `ConfigError` that names the fields that must not change, at most `SHOWN`, with their old and new values.
    """
    if not recorded:
        raise ConfigError(
            "RUN",
            str(path.parent),
            "was not started from a configuration",
            "resume it with the program that started it",
        )
    tree: dict[str, Any] = {}
    try:
        wished = load_config(path, overrides, tree.update)
    except ConfigError:
        refuse_secrets(tree)
        if changes := list(_fixed_changes(tree, recorded)):
            raise _refusal(changes) from None  # reported first: no new value of these fields is allowed
        raise
    _refuse_other_extensions(wished, recorded)
    before = parse_config(recorded)
    was, now = dict(_flat(before)), dict(_flat(wished))
    live = live_settings()
    numbered = bool(before.pools) or before.validation.placement == "own"  # recorded: the replicas of each pool
    free = [field for field in FREE if not (numbered and field == "rollout.replicas")]
    other = [
        field
        for field in was
        if now[field] != was[field]
        and field not in live
        and not _is_in(field, free)
        and not moved(field, was[field], now[field])
    ]
    if other:
        raise _refusal([leaf for field in other for leaf in _leaves(field, was[field], now[field])])
    given = {override.partition("=")[0].strip() for override in overrides}
    settings = _settings(before, wished, [field for field in live if was[field] != now[field] or field in given])
    if REPLICAS in given or was[REPLICAS] != now[REPLICAS]:
        settings = (*settings, (REPLICAS, str(now[REPLICAS])))
    return wished, settings


def _is_in(field: str, sections: Sequence[str]) -> bool:
    return any(f"{field}.".startswith(f"{section}.") for section in sections)


def _fixed_changes(given: Mapping[str, Any], was: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, old value, new value) of changed fields that must not change. `given` may be an invalid configuration. Of
    lists of sections it says nothing: `was` has their defaults."""
    for key in [key for key in given if key in was]:
        field, old, new = f"{above}{key}", was[key], given[key]
        if isinstance(old, Mapping):
            yield from _fixed_changes(new, old, f"{field}.") if isinstance(new, Mapping) else ()
        elif isinstance(old, list) and any(isinstance(item, Mapping) for item in old):
            continue
        elif old != new and not (field in live_settings() or _is_in(field, FREE) or moved(field, old, new)):
            yield field, old, new


def _refusal(changes: Sequence[tuple[str, Any, Any]]) -> ConfigError:
    """The error for fields that must not change, as (path, old value, new value)."""
    (field, was, now), *others = changes
    more = f" and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
    also = "; ".join(
        f"{path} was {_shown(path, old)}, is {_shown(path, new)}" for path, old, new in others[: SHOWN - 1]
    )
    law = f"must stay {_shown(field, was)}: the run began with it" + (f" (also: {also}{more})" if also else "")
    fix = "leave the change out, or start a new run with `engine run CONFIG --from RUN`"
    return ConfigError(field, now, law, f"{fix}; docs/RESUME.md lists what a resume can change")


def _leaves(path: str, was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """(path, old value, new value) of the innermost differences. Mappings with other keys differ as a whole."""
    if isinstance(was, Mapping) and isinstance(now, Mapping) and was.keys() == now.keys():
        for key in was:
            yield from _leaves(f"{path}.{key}", was[key], now[key])
    elif was != now:
        yield path, was, now


def _shown(path: str, value: Any) -> str:
    return "null" if value is None else described(path, value)


def _settings(before: Config, wished: Config, changed: Sequence[str]) -> Settings:
    """The changed settings, in an order in which each step is valid: S rises first or falls last, so that K stays
    valid."""
    limits, names = wished.limits, wished.policies().names
    found = []
    for path in changed:
        decision = path.removeprefix(POLICIES)
        value = attrgetter(FIGURES[path])(limits) if path in FIGURES else names.get(decision, "stop")
        found.append((path, "null" if value is None else str(value)))
    falls = limits.max_staleness_steps < before.limits.max_staleness_steps
    return tuple(sorted(found, key=lambda one: falls and one[0] == "scheduler.max_staleness_steps"))


def _refuse_other_extensions(wished: Config, recorded: Mapping[str, Any]) -> None:
    """Raises: `ConfigError` for other extensions than the record names. Called before any of them is imported: a record
    is data and must not choose which code runs."""
    run = recorded.get("run")
    named = run.get("extensions", ()) if isinstance(run, Mapping) else ()
    where = run.get("code_dir") if isinstance(run, Mapping) else None
    if tuple(named or ()) != wished.run.extensions or (named and where != wished.run.code_dir):
        law = f"the run began with {list(named or ())} from {where!r}"
        raise ConfigError("run.extensions", list(wished.run.extensions), law, "use the same modules")


def _flat(section: Section, above: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every field. A mapping with free keys, or a section that may be missing, counts as one field."""
    plain = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section) and isinstance(field.annotation, type):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", plain[name]
