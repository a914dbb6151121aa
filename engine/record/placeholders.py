"""Events and facts without the texts of a run: each text is replaced by a placeholder, equal texts by the same one.

    Placeholders(names).replaced(event)      # GroupFailed(..., reason="text 4 (KeyError)")

Called by `inspect.bug_report`. A text is kept only if it is one of `WORDS`, the name of a process, or one of the
names that the caller gives. Nothing else of a run can pass, whatever field it is in: a new field is safe by itself.
Numbers stay, because decisions depend on them; the hashes of validation answers become numbers in their order.
"""

import builtins
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from inspect import isclass
from typing import Any, TypeVar

import msgpack
from msgspec import Struct

from engine import errors
from engine.commands import COMMANDS
from engine.events import NO_ANSWER
from engine.policies.registry import DEFAULTS, is_built_in, names
from engine.scheduling.settings import NO_VALUE, live_settings
from engine.states import limits, orders, process
from engine.states.group import GROUP
from engine.states.pool import POOL
from engine.states.replica import REPLICA
from engine.states.step import STEP
from engine.states.timeouts import AUTO
from engine.states.validation import VALIDATION
from engine.states.version import VERSION

AnyValue = TypeVar("AnyValue")

TABLES = (GROUP, STEP, process.PROCESS, REPLICA, VERSION, VALIDATION, POOL)
WORDS = frozenset((
    *(table.name for table in TABLES), *(state for table in TABLES for state in table.states),
    *process.KINDS, process.POOL_TAKEN, "infrastructure", "data", "resumed", "branched", "scheduler",
    *(relation.subject for relation in orders.RELATIONS.values()), *(cls.__name__ for cls in COMMANDS),
    orders.DATA_SOURCE, orders.TIMERS, orders.DEADLINE, orders.GIVE_UP, orders.DRAIN, "finished", "stopped",
    *limits.TASKS, *(f"{orders.SCORER_OF}{task}" for task in limits.TASKS), limits.REWARDING,
    orders.state_owner(limits.REWARDING), *limits.SYNC_MODES, "sleep", *limits.CONFLICTS, limits.HELD_OUT, "max", "min",
    AUTO, *NO_VALUE, "off", *live_settings(), *DEFAULTS, "source", "fields", "lengths", "rewards",
    *(name for decision in DEFAULTS for name in names(decision) if is_built_in(decision, name)),
))  # fmt: skip
"""Texts of the engine itself. Decisions compare some of them."""
CAUSES = frozenset(
    name
    for module in (builtins, errors)
    for name, cls in vars(module).items()
    if isclass(cls) and issubclass(cls, BaseException)
)
"""Names of exceptions. A placeholder names those in its text."""
PROCESS = re.compile(rf"({'|'.join(process.KINDS)})( [0-9]{{1,9}})?")
NUMBER = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?(e[+-]?[0-9]{1,3})?")
METRIC = re.compile(r"accuracy|reward_mean|(avg|pass|maj)@[0-9]{1,9}")
OF_PART = "reward_"
"""A figure of a validation set with this before its name is that of a part of the reward."""
CAUSES_SHOWN = 4


class Placeholders:
    """The placeholders of one run."""

    def __init__(self, names: Iterable[str]) -> None:
        """`names`: texts that stay, such as names of policies, added states and columns that policies see."""
        names = tuple(names)
        self._names = {*names, *map(str, map(orders.state_owner, names))} - WORDS
        self.names: dict[str, None] = {}
        """Those of the names that were found and stayed."""
        self._texts: dict[str, str] = {}
        self._answers: dict[int, int] = {NO_ANSWER: NO_ANSWER}

    def __len__(self) -> int:
        """Number of texts that were replaced so far."""
        return len(self._texts)

    def replaced(self, value: AnyValue, field: str = "") -> AnyValue:
        """A value of the same type with placeholders in it. `field`: the name of the field that it is in."""
        found: Any = value
        if isinstance(value, str):
            found = self._text(value, field)
        elif isinstance(value, bytes):  # the memory of a policy
            found = msgpack.packb(self.replaced(msgpack.unpackb(value, raw=False, strict_map_key=True)))
        elif isinstance(value, Struct):
            found = type(value)(**{name: self.replaced(getattr(value, name), name) for name in value.__struct_fields__})
        elif is_dataclass(value) and not isinstance(value, type):
            found = replace(value, **{f.name: self.replaced(getattr(value, f.name), f.name) for f in fields(value)})
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            found = type(value)(*(self.replaced(getattr(value, name), name) for name in value._fields))
        elif isinstance(value, Mapping):
            found = {self.replaced(key): self.replaced(inner, field) for key, inner in value.items()}
        elif field == "answers" and isinstance(value, tuple):
            found = tuple(self._answers.setdefault(answer, len(self._answers)) for answer in value)
        elif isinstance(value, list | tuple):
            found = type(value)(self.replaced(inner, field) for inner in value)
        return found  # type: ignore[no-any-return]

    def _text(self, text: str, field: str) -> str:
        if text in self._names:
            self.names[text] = None
            return text
        if not text or text in WORDS or PROCESS.fullmatch(text):
            return text
        if field in ("value", "settings") and NUMBER.fullmatch(text):
            return text
        if field == "described":
            return self._described(text)
        if field in ("metric", "keep_best"):
            return self._figure(text)
        return self._placeholder(text)

    def _described(self, text: str) -> str:
        """What policies see of groups: JSON, whose numbers stay."""
        try:
            known = json.loads(text)
        except (ValueError, RecursionError):
            known = None
        return json.dumps(self.replaced(known)) if isinstance(known, dict | list) else self._placeholder(text)

    def _figure(self, text: str) -> str:
        """The name of a figure of a validation, such as `SET/avg@4` or `reward_PART`."""
        set, slash, metric = text.rpartition("/")
        if not METRIC.fullmatch(metric):
            part = metric.removeprefix(OF_PART)
            metric = f"{OF_PART if part != metric else ''}{self._text(part, '')}"
        return f"{self._text(set, '')}{slash}{metric}"

    def _placeholder(self, text: str) -> str:
        found = self._texts.get(text)
        if found is None:
            causes = [*dict.fromkeys(word for word in re.findall(r"\w+", text) if word in CAUSES)][:CAUSES_SHOWN]
            said = f" ({', '.join(causes)})" if causes else ""
            found = self._texts[text] = f"text {len(self._texts) + 1}{said}"
        return found
