"""`engine check` shows what a run would do with its prompts: the tokens that the model reads, the lengths of all
prompts, where a response ends, and what the reward returns.

Called by `inputs.check_inputs`. It loads the tokenizer and the model's configuration, never weights, and calls the
user's reward. If a run would fail, it raises a `ConfigError` that names the field.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from math import inf
from statistics import fmean
from threading import Thread
from time import monotonic
from typing import Any

import numpy as np

from engine.config.pools import rewarding
from engine.config.prompts import (
    check_prompts,
    load_tokenizer,
    model_config,
    prompt_limit,
    renderer_of,
    stop_ids_of,
)
from engine.config.reward_functions import reward_of_section, reward_of_set
from engine.config.schema import Config
from engine.errors import ConfigError, DataFailure, RewardFailure, describe_error, message_of, place_of, suggestion
from engine.protocols.named_code import NO_LOCAL, Local
from engine.rollout.reward_parts import RewardPart, RewardParts
from engine.rollout.scoring import CALLS_AT_ONCE, Overdue, call_part, remedy_of
from engine.tasks.chat import PromptRenderer, has_template, turn_end
from engine.tasks.dataset import MESSAGES, Dataset
from engine.tasks.prompt_lengths import UNCOUNTED, fitting_prompts, sampled_counts
from engine.tasks.response_text import text_of_tokens
from engine.tasks.reward_forms import Value
from engine.trajectory import Prompt, Span, Trajectory

HELD_OUT = "data.validation_path"
SHOWN_CHARACTERS = 2000
"""Of the first prompt."""
MADE_ANSWER, MADE_NUMBER = r"The test answer is \boxed{42}.", "42"
"""A response with a number, so that rewards can extract an answer from it."""
ANSWER = "answer"
"""The column that most data sets use for the right answer."""
SHOWN_S, SLOW_S = 0.1, 5.0
"""The shortest time of a call that is shown; the longest time of all calls of a train step without a note."""
MOST_KINDS = 16
"""Maximum number of kinds of rows for which the reward is called."""
MOST_COLUMNS, MOST_ROWS = 4, 64
"""Maximum number of columns that are tried as the right answer, and of rows that are searched for a wrong one."""


def dry_run(config: Config, model: str, files: Mapping[str, Dataset], local: Local = NO_LOCAL) -> Iterator[str]:
    """Lines like those of `check_inputs`. `files`: the data sets of prompts, by the field that names them."""
    tokenizer = load_tokenizer(model)
    agents = config.several_turns
    check_prompts(config, tokenizer, model, {} if agents else files)
    renderer = None if agents else renderer_of(config, tokenizer)
    surveys = {field: survey(data, renderer, field) for field, data in files.items()}
    yield from _vocabulary_lines(tokenizer, model)
    yield from _ending_lines(config, tokenizer, model)
    if renderer is not None:
        for name, found in surveys.items():
            yield from _length_lines(config, model, tokenizer, found, name)
        for name, data in files.items():
            if not _is_held_out(name):
                yield from _first_prompt_lines(config, tokenizer, renderer, data, name)
    yield from _overlap_lines(surveys)
    for judge in _judges(config, surveys, local):
        yield from _reward_lines(judge, tokenizer, config)


# -- one pass over the prompts -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Survey:
    """The prompts of a file after one pass over them."""

    data: Dataset
    texts: list[str] = field(default_factory=list)
    """The text of each prompt as the model reads it; with agents, the prompt itself."""
    kinds: dict[Any, int] = field(default_factory=dict)
    """The first row of each kind. Rows of one kind have values of the same types in the same columns."""
    answered: int = 0
    """Number of chats that end with a message of the assistant."""


def survey(data: Dataset, renderer: PromptRenderer | None, field: str) -> Survey:
    """Raises: `ConfigError` for a prompt that cannot be rendered."""
    found = Survey(data)
    for row, prompt in enumerate(data.prompts()):
        try:
            found.texts.append(_plain(prompt) if renderer is None else renderer.quick_text(prompt))
        except DataFailure as error:
            law = f"row {row}: {error}"
            raise ConfigError(field, data.path, law, "correct the row, or use another template") from error
        kind = frozenset((name, type(value), value == "") for name, value in prompt.fields.items())
        found.kinds.setdefault(kind, row)
        messages = prompt.fields.get(MESSAGES)
        found.answered += 1 if messages and messages[-1]["role"] == "assistant" else 0
    return found


def _plain(prompt: Prompt) -> str:
    messages = prompt.fields.get(MESSAGES)
    return json.dumps(messages, sort_keys=True) if messages else prompt.text


# -- tokens ------------------------------------------------------------------------------------------------------------


def _vocabulary_lines(tokenizer: Any, model: str) -> Iterator[str]:
    rows = getattr(model_config(model), "vocab_size", None)
    if rows is not None and len(tokenizer) > rows:
        yield (
            f"note: the tokenizer of model.path has {len(tokenizer)} tokens, but the model has only {rows}: "
            f"prompts with one of the other tokens fail"
        )


def _ending_lines(config: Config, tokenizer: Any, model: str) -> Iterator[str]:
    """The tokens that end a response, and a note if the chat template never writes them. Raises: `ConfigError` if there
    is no such token."""
    chat = config.data.chat_settings()
    stop_ids = stop_ids_of(config, tokenizer, model)
    names = ", ".join(repr(text_of_tokens(tokenizer, [id])) for id in stop_ids)
    yield f"ok: a response ends at {names}, or after rollout.max_tokens = {config.rollout.max_tokens}"
    end = turn_end(tokenizer, chat.template_kwargs) if chat.mode != "never" else None
    if end is not None and end.token is None:
        yield (
            f"note: the chat template ends a turn with {end.text!r}, which contains no special token; it never writes "
            f"{names}, so responses may not end before rollout.max_tokens: name a token in rollout.stop"
        )
    if chat.mode == "never" and has_template(tokenizer):
        yield "note: data.chat is never: the model's chat template is not used"


def _length_lines(config: Config, model: str, tokenizer: Any, found: Survey, name: str) -> Iterator[str]:
    """Raises: `ConfigError` for prompts that are too long under `data.overlong: error`, or cannot be cut."""
    limit, renderer = prompt_limit(config, model), renderer_of(config, tokenizer)
    most = None if limit is None else limit.tokens
    if limit is not None and limit.context is not None:
        most = min(limit.tokens, limit.context - config.rollout.max_tokens)
    counts = sampled_counts(found.texts, renderer, most)
    if not counts.all():
        row = int(np.argmax(counts == 0))
        raise ConfigError(name, found.data.path, f"row {row} has no tokens", "correct or remove the row")
    known = counts[counts != UNCOUNTED]
    least, middle, longest = known.min(), int(np.median(known)), known.max()
    room = "" if limit is None else f", and may have {limit.tokens} ({limit.reason})"
    about = "" if len(known) == len(counts) else f" ({len(known)} of them were counted, with the longest ones)"
    yield f"ok: prompts of {name} have {least} to {longest} tokens, median {middle}{about}{room}"
    if limit is not None:
        cutter = renderer_of(config, tokenizer, limit.tokens)
        note = fitting_prompts(found.data, counts, limit, config.data.overlong, name, cutter).note
        if note:
            yield f"note: {note}"
        room_left = config.rollout.max_tokens
        tight = int(((counts + room_left > limit.context) & (counts <= limit.tokens)).sum()) if limit.context else 0
        if tight:
            yield (
                f"note: {tight} of {len(counts)} prompts of {name} leave less than rollout.max_tokens = {room_left} "
                f"tokens for the response in the context of {limit.context}; data.max_prompt_tokens limits prompts"
            )
    if found.answered:
        yield (
            f"note: {found.answered} of {len(counts)} prompts of {name} end with a message of the assistant: the model "
            f"is asked to add another answer"
        )


def _first_prompt_lines(
    config: Config, tokenizer: Any, renderer: PromptRenderer, data: Dataset, name: str
) -> Iterator[str]:
    prompt = data.prompt(0)
    ids = whole = renderer.ids(prompt)
    limit = prompt_limit(config, config.model.path or "") if config.data.overlong == "truncate_left" else None
    if limit is not None:
        ids = renderer_of(config, tokenizer, limit.tokens).ids(prompt)
    cut = "" if len(ids) == len(whole) else f", cut from {len(whole)}"
    text = text_of_tokens(tokenizer, ids)
    if len(text) > SHOWN_CHARACTERS:
        half = SHOWN_CHARACTERS // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters]\n{text[-half:]}"
    shown = "".join(f"\n    | {line}" for line in text.split("\n"))
    yield f"ok: the first prompt of {name} is these {len(ids)} tokens{cut}:{shown}"
    special = [added.content for added in tokenizer.added_tokens_decoder.values() if added.content in prompt.text]
    if renderer.templated and special and not prompt.fields.get(MESSAGES):
        yield (
            f"note: the first prompt of {name} contains {special[0]!r}, and the chat template is applied to it; "
            f"if the prompts are rendered already, set data.chat: never"
        )


# -- repeated rows ---------------------------------------------------------------------------------------------------


def _overlap_lines(surveys: Mapping[str, Survey]) -> Iterator[str]:
    seen = {name: set(found.texts) for name, found in surveys.items()}
    for name, found in surveys.items():
        if len(seen[name]) < len(found.texts):
            twice = len(found.texts) - len(seen[name])
            yield f"note: {twice} of {len(found.texts)} prompts of {name} are repetitions of earlier ones"
    training = [name for name in surveys if not _is_held_out(name)]
    for number, name in enumerate(training):
        for earlier in training[:number]:
            shared = len(seen[name] & seen[earlier])
            if shared:
                yield f"note: {shared} prompts of {name} are also in {earlier}"
    for held_out in filter(_is_held_out, surveys):
        texts, leaks = surveys[held_out].texts, 0
        for name in training:
            leaked = sum(text in seen[name] for text in texts)
            leaks += leaked
            if leaked:
                yield f"note: {leaked} of {len(texts)} prompts of {held_out} are also in {name}"
        if not leaks:
            yield f"ok: no prompt of {held_out} is in {' or '.join(training)}"


def _is_held_out(field: str) -> bool:
    """Whether a field names validation prompts."""
    return field == HELD_OUT or field.startswith("validation.")


# -- the reward --------------------------------------------------------------------------------------------------------

FORMS = {"response": "", "group": ", called once for each group", "batch": ", called for several groups at once"}


@dataclass(frozen=True, slots=True)
class _Trial:
    """An answer that was tried."""

    text: str
    why: str
    """Where it comes from, for messages. Empty for the value of the column `answer` and for the made-up answer."""
    values: Mapping[str, Value]
    """What each function returned, by its field."""
    reward: float
    """The weighted sum. Values for turns or tokens count by their mean, so a longer answer gets no more."""


@dataclass(slots=True)
class _Judge:
    """A reward, its functions by field, and the prompts whose responses it judges."""

    reward: RewardParts
    specs: Mapping[str, str]
    surveys: Mapping[str, Survey]
    took_s: dict[str, float] = field(default_factory=dict)
    """Duration of the fastest call, by field. The first call in a process of its own also starts it and is left out."""
    began: set[str] = field(default_factory=set)

    @property
    def rewards(self) -> list[tuple[str, str, RewardPart]]:
        return [(*spec, part) for spec, part in zip(self.specs.items(), self.reward.parts, strict=True)]

    def tried(self, tokenizer: Any, prompt: Prompt, answer: str, name: str, why: str = "") -> _Trial:
        """Raises: `ConfigError` if a call fails, or no function applies."""
        where = f"row {prompt.row} of {name}"
        values: dict[str, Value] = {}
        total = 0.0
        for path, spec, part in self.rewards:
            said = _test_trajectory(tokenizer, prompt, answer)
            at = monotonic()
            value = values[path] = _call(part, path, spec, prompt, said, where)
            if path in self.began or not part.limits_itself:
                self.took_s[path] = min(self.took_s.get(path, inf), monotonic() - at)
            self.began.add(path)
            total += part.weight * fmean((value or [0.0]) if isinstance(value, list) else [value or 0.0])
        if all(value is None for value in values.values()):
            law, fix = f"all returned None for {where}", "let at least one of them return a number for each row"
            raise ConfigError("reward.functions", [spec for _, spec, _ in self.rewards], law, fix)
        return _Trial(answer, why, values, total)

    def lines(self, prompt: Prompt, name: str, trials: Sequence[_Trial]) -> Iterator[str]:
        for one, (path, spec, part) in product(trials, self.rewards):
            call = f"{path} {spec} returns {_describe(one.values[path], part)}"
            yield f"ok: {call} for the answer {one.text!r:.60} to row {prompt.row} of {name}{one.why}{FORMS[part.form]}"


def _judges(config: Config, surveys: Mapping[str, Survey], local: Local) -> Iterator[_Judge]:
    """First the reward of the run, for its own prompts and for validation sets without a reward; then the reward of
    each other set. Raises: `ConfigError` for a reward that cannot be called."""
    directory = config.run.code_dir
    sets = [(f"validation.sets.{index}", one) for index, one in enumerate(config.validation.sets)]
    read = {path: HELD_OUT if one.path is None else f"{path}.path" for path, one in sets}
    others = {read[path] for path, one in sets if one.reward is not None}
    others -= {read[path] for path, one in sets if one.reward is None}
    reward = reward_of_section(config.reward, directory, check=True, apart=True, local=local)
    if reward is not None:
        own = {name: found for name, found in surveys.items() if name not in others}
        yield _Judge(reward, config.reward.specs, own)
    for path, one in sets:
        if one.reward is not None:
            apart = reward_of_set(one.reward, config.reward, directory, f"{path}.reward", local, True)
            found = {name: survey for name, survey in surveys.items() if name == read[path]}
            yield _Judge(apart, {f"{path}.reward": one.reward}, found)


def _reward_lines(judge: _Judge, tokenizer: Any, config: Config) -> Iterator[str]:
    """Call every function for the first row of each kind. Raises: `ConfigError` if a call fails."""
    try:
        yield from (f"ok: {path} {spec}: {part.note}" for path, spec, part in judge.rewards if part.note)
        for name, found in judge.surveys.items():
            first, *others = sorted(found.kinds.values())[:MOST_KINDS]
            yield from _first_row_lines(judge, tokenizer, found.data, found.data.prompt(first), name)
            for prompt in map(found.data.prompt, others):
                for answer in dict.fromkeys((*(str(prompt.fields[one]) for one in _columns(prompt)[:1]), MADE_ANSWER)):
                    judge.tried(tokenizer, prompt, answer, name)
        yield from _time_lines(judge, config)
    finally:
        judge.reward.close()


def _first_row_lines(judge: _Judge, tokenizer: Any, data: Dataset, prompt: Prompt, name: str) -> Iterator[str]:
    """The rewards of a right, a wrong and a made-up answer, and a note if the right answer does not get the most.

    The right answer is the first value of the row, alone or in the sentence of the made-up answer, that gets more than
    the made-up answer. If no value does, it is the one that gets the most. The wrong answer is that of another row.
    """
    trials, wrong = list[tuple[str, str, _Trial]](), [judge.tried(tokenizer, prompt, MADE_ANSWER, name)]
    for column, form in product(_columns(prompt), (MADE_NUMBER, MADE_ANSWER)):
        text = form.replace(MADE_NUMBER, str(prompt.fields[column]))
        why = f" (from its column {column!r})" * (column != ANSWER)
        trials.append((column, form, judge.tried(tokenizer, prompt, text, name, why)))
        if trials[-1][2].reward > wrong[0].reward:
            break
    if not trials:
        yield from judge.lines(prompt, name, wrong)
        return
    column, form, right = max(trials, key=lambda one: one[2].reward)
    others = (one for one in islice(data.prompts(), MOST_ROWS) if one.fields.get(column) is not None)
    other = next((one for one in others if one.fields[column] != prompt.fields[column]), None)
    if other is not None:
        text = form.replace(MADE_NUMBER, str(other.fields[column]))
        wrong.insert(0, judge.tried(tokenizer, prompt, text, name, f" (a wrong answer: that of row {other.row})"))
    yield from judge.lines(prompt, name, [right, *wrong])
    best, tried = max(wrong, key=lambda one: one.reward), ", ".join(_columns(prompt))
    if right.reward <= best.reward:
        who = ", ".join(f"{path} {spec}" for path, spec, _ in judge.rewards)
        yield (
            f"note: {who}: no answer to row {prompt.row} of {name} from its columns ({tried}) gets a higher "
            f"reward than {best.text!r:.60}{best.why}, which gets {best.reward:g}; make sure that a right answer gets "
            f"more: a run learns only from responses with different rewards"
        )


def _columns(prompt: Prompt) -> list[str]:
    """Columns whose value may be the right answer, the likeliest first."""
    fit = [name for name, value in prompt.fields.items() if isinstance(value, str | int | float) and str(value)]
    return sorted(fit, key=lambda name: name != ANSWER)[:MOST_COLUMNS]


def _time_lines(judge: _Judge, config: Config) -> Iterator[str]:
    """How long a call of each function takes, unless it is fast; a note if the calls for a train step take longer than
    `SLOW_S`."""
    sizes, replicas = config.scheduler, config.rollout.replicas
    for path, spec, part in judge.rewards:
        call_s = judge.took_s.get(path, 0.0)
        if call_s < SHOWN_S:
            continue
        takes = f"{path} {spec} takes {call_s:.2g} s a call"
        calls = sizes.train_batch_size * (sizes.samples_per_prompt if part.form == "response" else 1)
        at_once = part.concurrency or CALLS_AT_ONCE
        step_s = call_s * -(-calls // (at_once * replicas))
        if step_s <= SLOW_S or part.form == "batch" or path not in config.reward.specs or rewarding(config):
            yield f"ok: {takes}"
            continue
        yield (
            f"note: {takes}: the {calls} calls of a train step take about {step_s:.0f} s, {at_once} at once on each "
            f"replica; make it faster, or raise {part.setting}"
        )


def _describe(value: Value, part: RewardPart) -> str:
    if value is None:
        return "None (it does not apply)"
    return f"{len(value)} numbers, one for each {part.unit}," if isinstance(value, list) else f"{value:g}"


def _test_trajectory(tokenizer: Any, prompt: Prompt, answer: str) -> Trajectory:
    """A finished trajectory, as a replica passes it to the reward."""
    ids = tokenizer.encode(answer, add_special_tokens=False)
    trajectory = Trajectory(prompt_ids=tokenizer.encode(prompt.text), text=answer, finish_reason="stop")
    trajectory.extend(ids, [0.0] * len(ids), [Span(0, len(ids), 0)])
    return trajectory


def _call(part: RewardPart, field: str, spec: str, prompt: Prompt, trajectory: Trajectory, where: str) -> Value:
    """The value of a function; None if it does not apply. One that judges whole groups gets the response twice."""
    timeout_s = part.timeout_s
    times = 1 if part.form == "response" else 2
    outcome: list[list[Value | str] | BaseException] = []

    def run() -> None:
        try:
            outcome.append(call_part(part, [prompt] * times, [trajectory.copy() for _ in range(times)], timeout_s))
        except BaseException as error:  # `SystemExit` also fails only this call
            outcome.append(error)

    thread = Thread(target=run, name="reward", daemon=True)
    thread.start()
    thread.join(None if part.limits_itself else timeout_s)
    if not outcome or isinstance(outcome[0], Overdue):
        law = f"took longer than its limit of {timeout_s:g} s on {where}"
        raise ConfigError(field, spec, law, "make it faster, or raise its timeout_s or reward.timeout_s")
    if isinstance(outcome[0], list):
        value = outcome[0][0]
        if not isinstance(value, str):
            return value
        law = f"returned {value.replace('WHERE', f'for {where}')}"
        each = "" if part.unit == "response" else f" for each {part.unit}"
        raise ConfigError(field, spec, law, f"return a number (a float){each}")
    error = outcome[0]
    if isinstance(error, RewardFailure) and not str(error).startswith("raised"):
        slow = "make it faster, or raise its timeout_s or reward.timeout_s"
        fix = slow if str(error).startswith("took longer") else "correct the function"
        raise ConfigError(field, spec, f"{error}, on {where}", fix)
    if remedy_of(error):
        raise ConfigError(field, spec, f"{message_of(error)}, on {where}", remedy_of(error))
    columns = sorted(prompt.fields)
    quoted = re.search(r"'([^']+)'", str(error))
    near = suggestion(quoted.group(1), columns) if quoted is not None and quoted.group(1) not in columns else ""
    fix = f"{near} In" if near else "in"
    fix += f" addition to its prompt, the row has the columns {', '.join(columns) or '(none)'}"
    reason = str(error) + place_of(error) if isinstance(error, DataFailure) else describe_error(error)
    reason = reason.removeprefix("raised ").removeprefix("DataFailure: ").replace(f"row {prompt.row} ", "the row ")
    raise ConfigError(field, spec, f"raised on {where}: {reason}", fix)
