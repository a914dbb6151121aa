"""`engine init`: creates a small project of a user's own, with a configuration, a reward, its test and data.

Called by the CLI. Without `--model` it also makes a tiny untrained model, which needs torch, so that the project runs
at once without a download. Must never write into a directory that has files.
"""

import argparse
import json
import os
import random
import shlex
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from engine.cli.shipped_files import new_directory, presets
from engine.errors import ConfigError
from engine.tasks.tokenizer import save_chat_tokenizer

Row: TypeAlias = dict[str, str]

DONE = 0
CONFIG, REWARD, TEST, README, MODEL = "config.yaml", "my_rewards.py", "test_my_rewards.py", "README.md", "model"
DATA, HELD_OUT, ANSWERS = "data.jsonl", "held_out.jsonl", "answers.jsonl"
PROMPTS, HELD_OUT_PROMPTS, WRITTEN_ANSWERS = 512, 64, 1024
"""Rows of the files."""
WRONG_ANSWERS = 0.6
"""Share of the written answers that are wrong: the habit that the reward corrects."""

# -- the command -------------------------------------------------------------------------------------------------------


def add_command(commands: Any) -> None:
    """Add the command to the parsers of the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "init",
        help="create a project with your own data and reward",
        description="Create a directory with a configuration, a reward, its test and data that run at once.",
    )
    parser.add_argument("name", metavar="NAME", help="directory of the project; must be new or empty")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--model",
        metavar="PATH_OR_HUB_NAME",
        help="an instruct model, as a directory or a hub name (default: make a tiny model)",
    )
    source.add_argument("--preset", choices=presets(), help="write only a configuration: that of this preset")
    parser.set_defaults(run=init)


def init(arguments: argparse.Namespace) -> int:
    """`engine init NAME`. Raises: `ConfigError` for a name or a model that cannot be used; `ModuleNotFoundError`."""
    if arguments.preset is not None:
        return _write_preset(arguments.name, arguments.preset)
    model = None if arguments.model is None else _model_path(arguments.model)
    if model is None:
        for package in ("torch", "transformers", "tokenizers"):
            if find_spec(package) is None:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    with new_directory(arguments.name, "NAME", "the directory of a project") as project:
        _write_project(project, model)
    return _print_next_steps(arguments.name, project)


def _write_preset(name: str, preset: str) -> int:
    """A project of one file. A preset has a model and data of its own, or names those of the hub."""
    with new_directory(name, "NAME", "the directory of a project") as project:
        text = presets()[preset].read_text(encoding="utf-8")
        text = text.replace(f"configs/{preset}.yaml", CONFIG).replace(".venv/bin/", "")
        (project / CONFIG).write_text(text, encoding="utf-8")
    return _print_next_steps(name, project)


def _print_next_steps(name: str, project: Path) -> int:
    print(f"created {name}: {', '.join(sorted(path.name for path in project.iterdir()))}")
    print("next:")
    for line in (f"cd {shlex.quote(name)}", f"engine check {CONFIG}", f"engine run {CONFIG}"):
        print(f"  {line}")
    return DONE


def _model_path(model: str) -> str:
    """A hub name, or the absolute path of a directory. Raises: `ConfigError`."""
    from engine.config.paths import absolute_paths

    found: str = absolute_paths(model, os.getcwd(), "model.path")
    if not model.strip() or (os.path.isabs(found) and not os.path.isdir(found)):
        fix = "give the directory of a model in Hugging Face format, or the name of a model on the hub"
        raise ConfigError("--model", model, "is neither a directory nor a hub name", fix)
    return found


# -- data --------------------------------------------------------------------------------------------------------------


Question: TypeAlias = Callable[[random.Random], tuple[Row, str]]
"""Draws a row with its answer, and a wrong answer to it."""


def largest(source: random.Random) -> tuple[Row, str]:
    """The wrong answer is the second largest number."""
    numbers = source.sample(range(10), 5)
    *_, wrong, answer = sorted(numbers)
    text = f"Which number is the largest: {', '.join(map(str, numbers))}?"
    return {"prompt": text, "answer": str(answer)}, str(wrong)


def total(source: random.Random) -> tuple[Row, str]:
    """The wrong answer is one too small."""
    numbers = [source.randint(10, 99) for _ in range(4)]
    text = f"What is {' + '.join(map(str, numbers))}? Give the result at the end."
    return {"prompt": text, "answer": str(sum(numbers))}, str(sum(numbers) - 1)


def _distinct(question: Question) -> Iterator[tuple[Row, str]]:
    """Rows with different prompts, always the same ones."""
    source, seen = random.Random("project"), set[str]()
    while True:
        row, wrong = question(source)
        if row["prompt"] not in seen:
            seen.add(row["prompt"])
            yield row, wrong


def _write_prompts(project: Path, drawn: Iterator[tuple[Row, str]]) -> None:
    _write_rows(project / DATA, [row for row, _ in islice(drawn, PROMPTS)])
    _write_rows(project / HELD_OUT, [row for row, _ in islice(drawn, HELD_OUT_PROMPTS)])


def _write_rows(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_project(project: Path, model: str | None) -> None:
    """Raises: `OSError`; `ModuleNotFoundError`."""
    if model is None:
        _write_own_model(project)
    else:
        _write_for_model(project, model)
    (project / REWARD).write_text(REWARD_TEXT, encoding="utf-8")
    (project / TEST).write_text(TEST_TEXT, encoding="utf-8")
    (project / README).write_text(README_TEXT, encoding="utf-8")


def _write_for_model(project: Path, model: str) -> None:
    (project / CONFIG).write_text(CONFIG_OF_MODEL.replace("MODEL_PATH", json.dumps(model)), encoding="utf-8")
    _write_prompts(project, _distinct(total))


def _write_own_model(project: Path) -> None:
    """The tiny model, the configuration that trains it, and its data. Raises: `ModuleNotFoundError`."""
    from engine.training.warmup import ModelShape, save_untrained_model

    model = project / MODEL
    model.mkdir()
    save_chat_tokenizer(model)
    save_untrained_model(str(model), ModelShape(positions=256), seed=0)
    (project / CONFIG).write_text(CONFIG_OF_TINY_MODEL, encoding="utf-8")
    drawn, slips = _distinct(largest), random.Random("slips")
    _write_prompts(project, drawn)
    answers = [
        row | {"answer": wrong} if slips.random() < WRONG_ANSWERS else row
        for row, wrong in islice(drawn, WRITTEN_ANSWERS)
    ]
    _write_rows(project / ANSWERS, answers)


# -- texts -------------------------------------------------------------------------------------------------------------


CONFIG_OF_TINY_MODEL = """\
# Trains the tiny model in model/ to name the largest of five numbers: two cores, no GPU, no download.
# Paths are relative to this file. Every other field has a default: the run writes all of them into its config.yaml.

run:
  max_steps: 60                 # train steps
  epochs: null                  # as many passes over the data as the steps take

model:
  path: ./model                 # your own: a directory, or a hub name such as Qwen/Qwen2.5-0.5B-Instruct
  warm_start:                   # the model is untrained, so it learns written answers first; your model needs none
    path: answers.jsonl         # more than half of these answers are wrong: the reward corrects the habit
    epochs: 4
    learning_rate: 3.0e-3

data:
  path: data.jsonl              # one prompt per row; it becomes a user message in the chat template
  validation_path: held_out.jsonl

reward:
  function: my_rewards:score

scheduler:
  train_batch_size: 16          # B: prompts per train step
  samples_per_prompt: 8         # responses to each
  max_staleness_steps: 2        # S: train steps that a prompt group may lag behind

rollout:
  replicas: 1
  slots: 16                     # prompts at once on each replica
  max_tokens: 8                 # longest response

validation:
  every: 20                     # train steps

trainer:
  learning_rate: 2.0e-4         # for the tiny model; use about 1e-6 for a real one
  checkpoint_every: 20
  threads: 1
"""

CONFIG_OF_MODEL = """\
# Trains your model with your data and your reward. Paths are relative to this file.
# Every other field has a default: the run writes all of them into its config.yaml.

run:
  max_steps: 100                # train steps
  epochs: null                  # as many passes over the data as the steps take

model:
  path: MODEL_PATH

data:
  path: data.jsonl              # replace these sums; a string becomes a user message in the chat template
  validation_path: held_out.jsonl
  # system_prompt: Answer with one number.

reward:
  function: my_rewards:score

scheduler:
  train_batch_size: 16          # B: prompts per train step
  samples_per_prompt: 8         # responses to each
  max_staleness_steps: 1        # S: train steps that a prompt group may lag behind

rollout:
  # backend: vllm               # for GPUs; engine check says how to install it; its arguments go under engine_args
  replicas: 1
  slots: 16                     # prompts at once on each replica
  max_tokens: 256               # longest response; longer ones are truncated

validation:
  every: 20                     # train steps

trainer:
  learning_rate: 1.0e-6
  micro_batch_tokens: 4096      # tokens per forward pass; more tokens need more memory
  checkpoint_every: 20
"""

REWARD_TEXT = '''\
"""The reward of this project. config.yaml names it: reward.function: my_rewards:score."""

import re

NUMBER = re.compile(r"-?\\d+")


def score(prompt, trajectory):
    """1.0 if the last number of the response is the answer of the row, else 0.0.

    prompt.text       the prompt of the row
    prompt.fields     the other columns of the row, here the answer
    trajectory.text   the response, without its end token

    Return a finite number. If this raises, the group is retried. Calls run on several threads.
    """
    numbers = NUMBER.findall(trajectory.text)
    return 1.0 if numbers and numbers[-1] == prompt.fields["answer"] else 0.0
'''

TEST_TEXT = '''\
"""Tests of the reward: python test_my_rewards.py, or pytest."""

from my_rewards import score

from engine import Prompt, Trajectory

EXPECTED = {"42": 1.0, "7 is wrong, it is 42.": 1.0, "42 or 7": 0.0, "forty-two": 0.0, "": 0.0}


def test_the_last_number_counts():
    prompt = Prompt(row=0, text="What is 6 times 7?", fields={"answer": "42"})
    for response, reward in EXPECTED.items():
        assert score(prompt, Trajectory(text=response, finish_reason="stop")) == reward, response


if __name__ == "__main__":
    test_the_last_number_counts()
    print(f"{len(EXPECTED)} responses get the expected reward")
'''

README_TEXT = """\
# A project for Step Engine

| file | content |
|---|---|
| `config.yaml` | the run |
| `data.jsonl`, `held_out.jsonl` | prompts for training and validation, with the correct answers |
| `my_rewards.py` | the reward |
| `test_my_rewards.py` | its test |

In this directory:

```sh
python test_my_rewards.py        # test the reward
engine check config.yaml         # show the first prompt and call the reward; starts nothing
engine run config.yaml           # train
```

Then `engine samples latest` shows the responses, and `engine export latest --to my-model` writes the model for
transformers.
"""
