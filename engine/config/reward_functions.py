"""Imports the reward functions of a configuration and says how each is called.

Used by `engine check`, by the launcher and by the processes that judge responses. Starts no process itself: a function
that runs in separate processes starts them when it is first called.
"""

from dataclasses import replace
from typing import Any

from engine.config.reward import NamedReward, RewardSection
from engine.errors import ConfigError
from engine.protocols.named_code import NO_LOCAL, Local, find
from engine.rollout.reward_parts import RewardPart, RewardParts
from engine.rollout.scoring import CALLS_AT_ONCE
from engine.tasks.reward_forms import bind, check_declared, declared_by
from engine.tasks.reward_processes import ProcessSettings, RewardProcesses

MOST_THREADS = 8
"""Maximum calls at once with which `engine check` tries a function."""
JUDGE = "engine.tasks.judge:llm_judge"

Settings = tuple[str, NamedReward]
"""The field of a function's settings, such as `reward.functions.0`, and the settings."""


def reward_of_section(
    section: RewardSection, directory: str | None, *, check: bool = False, apart: bool = False, local: Local = NO_LOCAL
) -> RewardParts | None:
    """The reward that the section names; None if it names none. `check`: also test what the functions need, for example
    that a server answers. `apart`: call the user's functions in separate processes, so that one that ends its process
    is reported, on threads there if a run calls them on threads. `local`: functions that cannot be imported, by field.

    Raises: `ConfigError` for a function that cannot be imported or called, or an argument that cannot be used.
    """
    if section.function is not None:
        alone = NamedReward(name="reward", function=section.function)
        return RewardParts((_part("reward.function", alone, section, directory, local, check, apart),))
    named = enumerate(section.functions)
    parts = [
        _part(f"reward.functions.{index}.function", part, section, directory, local, check, apart)
        for index, part in named
    ]
    return RewardParts(tuple(parts)) if parts else None


def reward_of_set(
    spec: str, section: RewardSection, directory: str | None, field: str, local: Local = NO_LOCAL, apart: bool = False
) -> RewardParts:
    """The own reward of a validation set. `spec` is module:function, or the name of one of the section's functions,
    which is then used without its weight. `field`: the configuration field of `spec`. `apart`: as in
    `reward_of_section`.

    Raises: `ConfigError` for a function that cannot be imported or called.
    """
    place, part = _of_set(spec, section, field)
    return RewardParts((replace(_part(place, part, section, directory, local, False, apart), name="", weight=1.0),))


def function_of_set(spec: str, section: RewardSection, directory: str | None, field: str, local: Local) -> Any:
    """The function of `reward_of_set`. Raises: `ConfigError`."""
    place, part = _of_set(spec, section, field)
    return find(part.function, directory, place, local)


def _of_set(spec: str, section: RewardSection, field: str) -> tuple[str, NamedReward]:
    """The settings of the reward of a set, and the field of its function."""
    if spec in section.names:
        index = section.names.index(spec)
        return f"reward.functions.{index}.function", section.functions[index]
    return field, NamedReward(name="reward", function=spec)


def _part(
    field: str, part: NamedReward, section: RewardSection, directory: str | None, local: Local, check: bool, apart: bool
) -> RewardPart:
    """`field`: the configuration field of the function."""
    settings_field = field.removesuffix(".function")
    function = find(part.function, directory, field, local)
    declared, timeout_s = declared_by(function), part.timeout_s or section.timeout_s
    arguments = ({declared.time_limit: timeout_s} if declared.time_limit else {}) | part.arguments
    bound = bind(function, arguments, part.function, field)
    note = check_declared(function, arguments, f"{settings_field}.arguments") if check else ""
    processes = declared.processes if part.processes is None else part.processes
    at_once = processes or part.concurrency or section.concurrency
    setting = f"{settings_field}.{'processes' if processes else 'concurrency'}"
    if section.function is not None or not (processes or part.concurrency):
        setting = "reward.concurrency"
    threads = 0
    if apart and not processes and field not in local and not part.function.startswith("engine."):
        processes, threads = 1, min(at_once or CALLS_AT_ONCE, MOST_THREADS)
    if part.memory_mb is not None and not processes:
        law = "limits the processes of the function, but it has none"
        raise ConfigError(
            f"{settings_field}.memory_mb", part.memory_mb, law, f"set {settings_field}.processes to 1 or more"
        )
    if processes and field in local:
        law = "belongs to a script or a notebook, or is inside a function, so that its processes cannot import it"
        raise ConfigError(field, part.function, law, "put it in a module, or give it no processes")
    pool = None
    if processes:
        settings = ProcessSettings(
            spec=part.function, directory=directory, arguments=arguments, timeout_s=timeout_s, memory_mb=part.memory_mb,
            threads=threads,
        )  # fmt: skip
        pool = RewardProcesses(settings, processes)
    plain = RewardPart(
        function=pool or bound.call,
        name="" if section.function is not None else part.name,
        weight=part.weight,
        form=bound.form,
        unit=part.unit,
        shown=part.function.replace(":", "."),
        judge=str(arguments.get("model", "")) if part.function == JUDGE else "",
        timeout_s=timeout_s,
        note=note,
        concurrency=at_once,
        setting=setting,
        batch_size=part.batch_size,
        limits_itself=pool is not None,
    )
    return plain if pool is None else replace(plain, close=pool.close)
