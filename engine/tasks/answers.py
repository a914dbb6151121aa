"""Final answers of responses, for the majority vote of a validation (maj@k).

Called by replicas, on a thread, for validation sets with several responses to a prompt. A function is named like a
reward, as module:function. It must return the same text for answers that are equal.
"""

from collections.abc import Callable
from typing import Any

from engine.errors import ConfigError
from engine.tasks import extraction, rewards
from engine.trajectory import Prompt, Trajectory

Answer = Callable[[Prompt, Trajectory], str | None]
"""The answer of a response; None: it has none."""


def last_number(prompt: Prompt, trajectory: Trajectory) -> str | None:
    """The last number of the response; 72 and 72.0 are equal."""
    found = extraction.last_number(trajectory.text)
    return None if found is None else format(found.normalize(), "f")


def last_boxed(prompt: Prompt, trajectory: Trajectory) -> str | None:
    r"""The content of the last `\boxed{...}`, without spaces."""
    found = extraction.last_boxed(trajectory.text)
    return None if found is None else "".join(found.split()) or None


def last_choice(prompt: Prompt, trajectory: Trajectory) -> str | None:
    """The last letter of a choice."""
    return extraction.last_choice(trajectory.text, extraction.choices_of(prompt))


def whole_text(prompt: Prompt, trajectory: Trajectory) -> str | None:
    """The response without white space around it."""
    return trajectory.text.strip() or None


def boxed_or_number(prompt: Prompt, trajectory: Trajectory) -> str | None:
    r"""The content of the last `\boxed{...}`, else the last number."""
    return last_boxed(prompt, trajectory) or last_number(prompt, trajectory)


BUILT_IN: dict[str, Answer] = {
    "number": last_number,
    "boxed": last_boxed,
    "choice": last_choice,
    "text": whole_text,
    "boxed_or_number": boxed_or_number,
}
"""The built-in functions, by their name in `validation.sets.answer`."""
OF_REWARDS: dict[Any, Answer] = {
    rewards.final_number: last_number,
    rewards.boxed_answer: last_boxed,
    rewards.multiple_choice: last_choice,
    rewards.exact_match: whole_text,
}
"""The answers that the built-in rewards compare."""
AUTO, NONE = "auto", "none"
NAMED = r"^(auto|none|number|boxed|choice|text|boxed_or_number|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)$"
"""Pattern of `validation.sets.answer`."""


def answer_of(name: str, reward: Any, directory: str | None, *, config_field: str) -> Answer:
    """The function for a value of `validation.sets.answer`. `auto`: the `extract` of the reward function if it has one,
    else what a built-in reward compares, else `boxed_or_number`.

    Raises: `ConfigError` for a function that cannot be imported or called with (prompt, trajectory).
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name != AUTO:
        found = rewards.find(name, directory, config_field)
        rewards.check_signature(found, name, config_field)
        if rewards.is_async(found):
            raise ConfigError(config_field, name, "is a coroutine function", "define it with def")
        answer: Answer = found
        return answer
    own = getattr(reward, "extract", None)
    if callable(own):
        extract: Answer = own
        return extract
    return OF_REWARDS.get(reward, boxed_or_number) if getattr(reward, "__hash__", None) else boxed_or_number
