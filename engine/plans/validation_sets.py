"""The validation sets of a configured run: their prompts, and how they are sampled and judged on a replica.

Called by `configured_plan`, in the launching process and in replicas.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from engine.config import Config
from engine.config.reward_functions import function_of_set, reward_of_set
from engine.config.validation import SetSettings, validation_sets
from engine.errors import ConfigError
from engine.protocols.named_code import NO_LOCAL, Local, find
from engine.rollout.backend import SamplingParams
from engine.rollout.generator import Way
from engine.rollout.reward_parts import RewardParts
from engine.rollout.scoring import Grader
from engine.states.limits import ValidationSet
from engine.tasks.answers import answer_of
from engine.tasks.dataset import Dataset
from engine.trajectory import Prompt
from engine.workers.plan import Answer


def set_files(config: Config, default_field: str) -> dict[str, Dataset]:
    """The file of each set that names one, by the field that names it. `default_field`: column of the prompts.

    Raises: `ConfigError` for a file that cannot be read.
    """
    found = {}
    for one in validation_sets(config.validation, config.rollout, config.reward):
        if one.path is not None:
            field = f"{one.field}.path"
            found[field] = Dataset.load(one.path, prompt_field=one.prompt_field or default_field, config_field=field)
    return found


def held_out_rows(
    config: Config, data_of: Callable[[SetSettings], tuple[Dataset, Sequence[int] | None]]
) -> tuple[list[Prompt], tuple[ValidationSet, ...]]:
    """The prompt of each row of a validation, as many times as it gets responses, and the sets with their sizes.
    `data_of`: the prompts of a set, and those of them that fit the model; None: all do. Raises: `ConfigError`."""
    rows, sets = [], []
    for one in validation_sets(config.validation, config.rollout, config.reward):
        data, fitting = data_of(one)
        asked = range(min(one.prompts, len(data)))
        prompts = [data.prompt(row) for row in (asked if fitting is None else fitting) if row in asked]
        if not prompts:
            law = f"leaves no prompt of the validation set {one.name}"
            raise ConfigError("data.overlong", "drop", law, "raise the limit, or use more prompts")
        rows += [prompt for prompt in prompts for _ in range(one.samples)]
        sets.append(one.limited(len(prompts), dropped=len(asked) - len(prompts)))
    return rows, tuple(sets)


def ways_of_sets(
    config: Config,
    tokenizer: Any,
    stop_ids: tuple[int, ...],
    ends: Collection[int],
    reward: RewardParts | None,
    local: Local = NO_LOCAL,
) -> dict[str, Way]:
    """How each validation set is sampled and judged, by its name. `ends`: see `Grader`. `reward`: of the run."""
    made: dict[Any, Way] = {}
    sets = validation_sets(config.validation, config.rollout, config.reward)
    for one in sets:
        if one.way not in made:
            temperature, top_p, max_tokens, _ = one.way
            params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, stop_ids=stop_ids)
            judge = own_reward(config, one, reward, local)
            made[one.way] = Way(params, Grader(tokenizer, judge, timeout_s=config.reward.timeout_s, ends=ends))
    return {one.name: made[one.way] for one in sets}


def answers_of_sets(config: Config, judge: Any, local: Local = NO_LOCAL) -> Mapping[str, Answer]:
    """The functions that extract the answers for a majority vote, by the name of the set. `judge`: see `judge_of`.

    Raises: `ConfigError` for a function that cannot be imported or called.
    """
    found: dict[str, Answer] = {}
    for one in validation_sets(config.validation, config.rollout, config.reward):
        if one.limited(1).majority:
            field = f"{one.field}.reward"
            own = judge
            if one.reward is not None:
                own = function_of_set(one.reward, config.reward, config.run.code_dir, field, local)
            found[one.name] = answer_of(one.answer, own, config.run.code_dir, config_field=f"{one.field}.answer")
    return found


def judge_of(config: Config, given: str | None, local: Local = NO_LOCAL) -> Any:
    """The reward function of the run that says whether a response is right, and that may know how to extract an answer.
    None if there is not exactly one. `given`: the name of a function to use instead of the configuration's. Raises:
    `ConfigError`."""
    specs = config.reward.specs if given is None else {"reward.function": given}
    if config.reward.functions:
        of_parts = zip(config.reward.names, specs.items(), strict=True)
        specs = dict(one for name, one in of_parts if name in config.reward.correct_names)
    field, spec = next(iter(specs.items()), ("", ""))
    return find(spec, config.run.code_dir, field, local) if len(specs) == 1 else None


def own_reward(config: Config, one: SetSettings, reward: RewardParts | None, local: Local) -> RewardParts | None:
    """The set's own reward, else that of the run. Raises: `ConfigError`."""
    if one.reward is None:
        return reward
    return reward_of_set(one.reward, config.reward, config.run.code_dir, f"{one.field}.reward", local)
