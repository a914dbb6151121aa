"""S = 0 through the scheduler, one replica or two, equals a plain synchronous loop to the bit."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_sync import Outcome, Task, digest, run_reference, seen
from transformers import AutoTokenizer

import engine.runtime.local
from engine.actors.launch import start
from engine.config import Config
from engine.config.loading import parse_config
from engine.config.prompts import stop_ids_of
from engine.events import GroupGenerated
from engine.plans.configured_plan import plan_of
from engine.plans.trainers import make_trainer
from engine.protocols import Batch
from engine.protocols.named_code import find
from engine.record import read
from engine.rollout.backend import SamplingParams
from engine.rollout.generator import TRAINING, ModelGenerator, Way
from engine.rollout.scoring import Grader
from engine.rollout.torch.torch_backend import TorchBackend
from engine.runtime.prompt_sources import CountedPrompts
from engine.tasks.chat import PromptRenderer
from engine.tasks.quickstart import Prepared, Quickstart, prepare
from engine.trajectory import TrajectoryGroup

BATCH, SAMPLES, MAX_TOKENS, SEED, PROMPTS, EPOCHS = 4, 6, 30, 11, 9, 2
"""18 draws: four steps of four groups, an epoch's border in the third, and a tail of two."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """The smallest model there can be, hardly trained, so that its responses are of any length."""
    tiny = Quickstart(layers=1, hidden_size=16, heads=2, train_prompts=PROMPTS, validation_prompts=4, warmup_steps=40)
    return prepare(tmp_path_factory.mktemp("made"), tiny)


@pytest.fixture(scope="module")
def plain(made: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What the loop gives where a test changes no setting that it knows."""
    place = tmp_path_factory.mktemp("plain")
    return Pieces(configured(made, place), place).reference()


def configured(made: Prepared, tmp_path: Path, **sections: dict[str, Any]) -> Config:
    """As a user would write it."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": str(tmp_path), "epochs": EPOCHS, "seed": SEED},
        "model": {"path": made.model_path},
        "data": {"path": made.training_path, "validation_path": made.validation_path},
        "reward": {"function": "reference_sync:reward"},
        "scheduler": {"train_batch_size": BATCH, "samples_per_prompt": SAMPLES, "max_staleness_steps": 0},
        "rollout": {"deterministic": True, "slots": 3, "max_tokens": MAX_TOKENS},
        "trainer": {"learning_rate": 3e-3, "micro_batch_tokens": 512, "checkpoint_every": 0, "threads": 1},
        "validation": {"prompts": 4},
    }
    return parse_config({name: section | sections.get(name, {}) for name, section in tree.items()})


class Watched:
    """A trainer that passes every call on and writes down what it is given and what it publishes."""

    def __init__(self, trainer: Any, file: Path) -> None:
        self._trainer = trainer
        self._file = file
        self.steps: list[Any] = []
        self.published = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def train(self, batch: Batch) -> dict[str, float]:
        metrics: dict[str, float] = self._trainer.train(batch)
        self.steps.append(seen(batch.groups))
        return metrics

    def weights(self) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = self._trainer.weights()
        self.published = digest(weights)
        self._file.write_text(json.dumps([self.steps, self.published]))
        return weights


def watched(make: Callable[[], Any], file: Path) -> Watched:
    return Watched(make(), file)


class Pieces:
    """What a configuration names, for a loop and for a run in one process."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        plan = plan_of(config, run_dir)
        inputs = plan.make_prompts.args[1]  # type: ignore[attr-defined]
        self.config, self.plan, self.model = config, plan, inputs.model
        self.tokenizer = AutoTokenizer.from_pretrained(inputs.model)
        self.reward = find(inputs.reward, None, "reward.function")
        self.stop_ids = stop_ids_of(config, self.tokenizer, inputs.model)
        self.prompts = plan.make_prompts()

    def reference(self, keep: Callable[[TrajectoryGroup], bool] = lambda group: True) -> Outcome:
        task = Task(
            model_path=self.model,
            prompts=[self.prompts.prompt(number) for number in range(PROMPTS * EPOCHS)],
            reward=self.reward,
            tokenizer=self.tokenizer,
            stop_ids=self.stop_ids,
            settings=self.config.trainer_settings,
            batch=BATCH,
            samples=SAMPLES,
            max_tokens=MAX_TOKENS,
            temperature=self.config.rollout.temperature,
            seed=SEED,
            keep=keep,
        )
        return run_reference(task)

    def generator(self, slots: int) -> ModelGenerator:
        lora = self.config.trainer_settings.lora
        backend = TorchBackend(self.model, rows=slots * SAMPLES, deterministic=True, lora=lora)
        params = SamplingParams(
            temperature=self.config.rollout.temperature, max_tokens=MAX_TOKENS, stop_ids=self.stop_ids
        )
        ways = {TRAINING: Way(params, Grader(self.tokenizer, self.reward, ends=self.stop_ids))}
        return ModelGenerator(backend, PromptRenderer(self.tokenizer), ways, seed=SEED)

    def run_local(self, replicas: int, slots: int, file: Path) -> Watched:
        trainer = Watched(make_trainer(self.model, self.config.trainer_settings), file)
        total = PROMPTS * EPOCHS
        result = engine.runtime.local.run(
            generators=lambda replica: self.generator(slots),
            replicas=replicas,
            trainer=trainer,
            prompts=CountedPrompts(total, self.prompts.prompt),
            limits=replace(self.config.limits, validation=None),
            samples=SAMPLES,
            slots=slots,
            policies=self.config.policies().names,
        )
        assert (result.outcome, result.staleness_max) == ("finished", 0)
        return trainer


def varied(group: TrajectoryGroup) -> bool:
    return len({t.reward for t in group.trajectories}) > 1


def test_the_reference_has_something_to_get_wrong(made: Prepared, plain: Outcome, tmp_path: Path) -> None:
    assert [len(step) for step in plain.steps] == [4, 4, 4, 4, 2]
    slower = configured(made, tmp_path, trainer={"learning_rate": 1e-3})
    assert Pieces(slower, tmp_path).reference().weights != plain.weights
    assert len({len(t[0]) for step in plain.steps for _, group in step for t in group}) > 5, "of different lengths"


def test_one_process_equals_the_loop_to_the_bit(made: Prepared, plain: Outcome, tmp_path: Path) -> None:
    pieces = Pieces(configured(made, tmp_path), tmp_path)
    for replicas, slots in ((1, 2), (2, 1), (2, 4)):
        trained = pieces.run_local(replicas, slots, tmp_path / "seen")
        assert trained.steps == plain.steps, f"{replicas} replicas of {slots} slots"
        assert trained.published == plain.weights


@pytest.mark.parametrize(
    "sections",
    [
        {"scheduler": {"policy_mini_batch_size": 2}, "rollout": {"temperature": 0.9, "sync_order": "rolling"}},
        {"scheduler": {"policies": {"filter": "zero-variance"}}, "rollout": {"sync_mode": "abort"}},
        {"trainer": {"lora": {"rank": 8}}, "scheduler": {"policy_mini_batch_size": 2}},
    ],
    ids=["minibatches", "filtered", "lora"],
)
def test_each_setting_equals_its_loop_to_the_bit(made: Prepared, tmp_path: Path, sections: dict[str, Any]) -> None:
    pieces = Pieces(configured(made, tmp_path, **sections), tmp_path)
    filtered = pieces.config.scheduler.policies.filter != "none"
    expected = pieces.reference(varied if filtered else lambda group: True)
    if filtered:
        assert 4 < len([group for step in expected.steps for group in step]) < PROMPTS * EPOCHS
    trained = pieces.run_local(2, 4, tmp_path / "seen")
    assert trained.steps == expected.steps
    assert trained.published == expected.weights


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_ray_equals_the_loop_to_the_bit(made: Prepared, plain: Outcome, tmp_path: Path) -> None:
    pieces = Pieces(configured(made, tmp_path, rollout={"replicas": 2}), tmp_path)
    file = tmp_path / "seen.json"
    with start(replace(pieces.plan, make_trainer=partial(watched, pieces.plan.make_trainer, file))) as run:
        status = run.wait()
    assert (status.outcome, status.staleness_max) == ("finished", 0)
    used = {event.replica for event in read(tmp_path / "schedule").events() if isinstance(event, GroupGenerated)}
    assert used == {0, 1}, "every replica generated"
    steps, published = json.loads(file.read_text())
    assert steps == plain.steps
    assert published == plain.weights
