"""Registry of policies by name: a config chooses policies from it, and users add their own.

    @policies.register("filter", "keep-hard")
    class KeepHard: ...

Used by the config layer, by the scheduler's builder, and by replay, which reads the names from a record's header.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from engine.errors import ConfigError, choice, describe_error
from engine.policies.protocols import (
    AdmissionPolicy,
    BatchingPolicy,
    ConcurrencyPolicy,
    DeadlinePolicy,
    DispatchPolicy,
    FilterPolicy,
    ResumePolicy,
    RetryPolicy,
    SyncPolicy,
    ValidationPolicy,
)

Kind = TypeVar("Kind", bound=type)

API_VERSION = 1
"""Version of the policy API: the protocols, and every field of `View` and `GroupView`. It is raised when one of these
is removed or changes its meaning, not when one is added."""
BUILT_IN = "engine.policies."
"""The modules of built-in policies begin with this."""

DEFAULTS: dict[str, str] = {
    "admission": "bounds",
    "dispatch": "least-loaded",
    "concurrency": "slots",
    "batching": "deadline-first",
    "deadline": "wait",
    "sync": "together",
    "filter": "none",
    "retry": "budgets",
    "resume": "deadline",
    "validation": "every",
}
METHODS: dict[str, str] = {
    "admission": "admit",
    "dispatch": "choose",
    "concurrency": "limit",
    "batching": "select",
    "deadline": "decide",
    "sync": "pause",
    "filter": "keep",
    "retry": "retry",
    "resume": "key",
    "validation": "due",
}
_REGISTERED: dict[str, dict[str, type[Any]]] = {decision: {} for decision in DEFAULTS}


def is_built_in(decision: str, name: str) -> bool:
    """Whether a name is that of a built-in policy. False for one that is not registered."""
    found = _REGISTERED[decision].get(name)
    return found is not None and found.__module__.startswith(BUILT_IN)


def register(decision: str, name: str, *, api: int = API_VERSION) -> Callable[[Kind], Kind]:
    """Class decorator: register a policy for a decision under a name. The class is created without arguments for each
    run.

    `api` is the version of the policy API that the class was written for. Raises `ConfigError` if this engine has
    another version, the decision is unknown, the name is in use, or the class does not have the decision's method.
    """

    def add(cls: Kind) -> Kind:
        require_api(api, f"policy {name!r}")
        if decision not in _REGISTERED:
            raise ConfigError(
                "policies.register", decision, "is not a decision", f"use one of {', '.join(_REGISTERED)}"
            )
        if name in _REGISTERED[decision]:
            raise ConfigError("policies.register", name, f"is already registered for {decision}", "use another name")
        if not callable(getattr(cls, METHODS[decision], None)):
            raise ConfigError(
                "policies.register", cls.__name__, f"has no method {METHODS[decision]}()", "see policies/protocols.py"
            )
        if decision == "deadline" and not isinstance(getattr(cls, "acts", None), bool):
            raise ConfigError(
                "policies.register", cls.__name__, "does not set the attribute acts", "set acts = True or acts = False"
            )
        _REGISTERED[decision][name] = cls
        return cls

    return add


def require_api(api: int, what: str) -> None:
    """Raises: `ConfigError` if an extension was written for another version of the policy API."""
    if api != API_VERSION:
        law = f"the {what} needs a policy API version other than this engine's {API_VERSION}"
        raise ConfigError("policies.register", api, law, f"adapt it, then pass api={API_VERSION}")


def names(decision: str) -> list[str]:
    """Registered names for a decision."""
    return sorted(_REGISTERED[decision])


def registered() -> list[type]:
    """The class of every policy."""
    return [cls for policies in _REGISTERED.values() for cls in policies.values()]


def forget(classes: Collection[type]) -> None:
    """Remove the policies of these classes, because the import of their module failed."""
    for policies in _REGISTERED.values():
        for name in [name for name, cls in policies.items() if cls in classes]:
            del policies[name]


def _build(decision: str, name: str) -> Any:
    found = _REGISTERED[decision].get(name)
    if found is None:
        fix = choice(name, names(decision))
        raise ConfigError(f"scheduler.policies.{decision}", name, "is not a registered policy", fix)
    try:
        return found()
    except Exception as error:
        law = f"it cannot be made without arguments: {describe_error(error)}"
        raise ConfigError(f"scheduler.policies.{decision}", name, law) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySet:
    """One policy per decision."""

    admission: AdmissionPolicy
    dispatch: DispatchPolicy
    concurrency: ConcurrencyPolicy
    batching: BatchingPolicy
    deadline: DeadlinePolicy
    sync: SyncPolicy
    filter: FilterPolicy
    retry: RetryPolicy
    resume: ResumePolicy
    validation: ValidationPolicy
    names: Mapping[str, str]
    """The registered name of each policy, for the header of a record."""

    @property
    def custom(self) -> list[str]:
        """The policies that are not built in, as `decision name`."""
        return [
            f"{decision} {name}"
            for decision, name in self.names.items()
            if not type(getattr(self, decision)).__module__.startswith(BUILT_IN)
        ]

    @classmethod
    def from_names(cls, chosen: Mapping[str, str]) -> "PolicySet":
        """Build the chosen policies; every other decision gets its default.

        Raises: `ConfigError` for unknown decisions and names, and for a policy whose class cannot be called without
        arguments.
        """
        known = [f.name for f in fields(cls) if f.name != "names"]
        for decision in chosen:
            if decision not in known:
                fix = choice(decision, known)
                law = "this decision does not exist"
                raise ConfigError(f"scheduler.policies.{decision}", chosen[decision], law, fix)
        resolved = {**DEFAULTS, **chosen}
        built = {decision: _build(decision, name) for decision, name in resolved.items()}
        return cls(**built, names=resolved)
