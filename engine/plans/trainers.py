"""The weights that a run begins with, its trainer and its scorers.

Called by `configured_plan`, in the launching process, and by the processes of a run. With `model.checkpoint_path`, a
run gets links to the files of that checkpoint, or copies, in its own directory, so that it can be resumed after the
other run has deleted them. It must never change the other run.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import Config
from engine.config.custom_classes import trainer_class
from engine.config.inputs import check_checkpoint
from engine.config.model_description import files_of, tensor_shapes
from engine.config.prompts import check_prompts, load_tokenizer, renderer_of, stop_ids_of
from engine.errors import EngineError
from engine.protocols import Closable, StartsFromWeights, TrainerSetup
from engine.protocols import Scorer as RoleScorer
from engine.protocols.named_code import Local
from engine.runtime.stacks import stacks_descriptor
from engine.storage.checkpoints import FIRST, verify_checkpoint
from engine.tasks.chat import turn_end
from engine.tasks.quickstart import Progress
from engine.tasks.warm_start import load_answers, warm_started
from engine.training.named_tensors import Shapes, require_finite, require_named_tensors
from engine.training.trainer_settings import TrainerSettings
from engine.trajectory import Prompt
from engine.workers.plan import Restore

if TYPE_CHECKING:
    from engine.training.ranked_trainer import Nodes

FOLDER = "start"
"""The folder in the run's directory."""


def start_of(config: Config, run_dir: Path, model: str) -> tuple[TrainerSettings, str]:
    """The trainer's settings, and the directory of the weights that the run begins with. The reference stays `model`.
    Raises: see `start_weights`."""
    settings, begin = config.trainer_settings, start_weights(config, run_dir, model)
    if begin != model and settings.needs_reference and settings.reference_path is None:
        settings = settings.model_copy(update={"reference_path": model})
    return settings, begin


def start_weights(config: Config, run_dir: Path, model: str) -> str:
    """The directory of the weights that the run begins with: `model`, or a copy of `model.checkpoint_path`.

    Raises: `ConfigError` if the checkpoint is missing or damaged, has an adapter, or is of another model than `model`.
    """
    if config.model.checkpoint_path is None:
        return model
    target = run_dir / FOLDER
    if target.is_dir():  # the run is resumed
        verify_checkpoint(target)
        return str(target.resolve())
    source = Path(config.model.checkpoint_path)
    check_checkpoint(source, files_of(model))
    verify_checkpoint(source, FIRST)
    unfinished = target.with_name(f".{FOLDER}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(source, unfinished, copy_function=_link_or_copy)
    os.rename(unfinished, target)
    return str(target.resolve())


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def make_trainer(
    model: str,
    settings: Any,
    scored_apart: Sequence[str] = (),
    optimizer: bool = False,
    *,
    in_turns: bool = False,
    nodes: "Nodes | None" = None,
) -> Any:
    """`optimizer`: `model` is a checkpoint, whose optimizer state the trainer begins with. `in_turns`: the trainer has
    its GPUs in turns with replicas, so it begins in host memory. `nodes`: of the ranks, if there are several."""
    trainer: Any
    if settings.ranks > 1:
        from engine.training.ranked_trainer import RankedTrainer

        trainer = RankedTrainer(
            model, settings, scored_apart=scored_apart, stacks=stacks_descriptor(), nodes=nodes, in_turns=in_turns
        )
    else:
        from engine.training.model_trainer import ModelTrainer
        from engine.training.ranks import ALONE, ON_HOST

        trainer = ModelTrainer(model, settings, scored_apart=scored_apart, ranks=ON_HOST if in_turns else ALONE)
    if optimizer:
        trainer.load(model)
    return trainer


def make_custom_trainer(config: Config, model: str, local: Local) -> Any:
    """An object of the class that `trainer.backend` names. Raises what its constructor raises."""
    t = config.trainer
    setup = TrainerSetup(
        model=model,
        device=t.device,
        seed=config.run.seed,
        temperature=config.rollout.temperature,
        policy_mini_batch_size=config.scheduler.policy_mini_batch_size,
        max_steps=config.run.max_steps,
    )
    trainer = trainer_class(config, local)(setup, **t.arguments)
    if config.model.checkpoint_optimizer:
        trainer.load(model)
    return trainer


def weights_check(config: Config, model: str) -> Callable[[Any], None] | None:
    """The value of `Plan.check_weights`: a custom trainer must return what the generator can install."""
    if not config.trainer.custom:
        return None
    if config.rollout.custom:
        return require_finite
    return partial(require_named_tensors, shapes_of(model))


def shapes_of(model: str) -> Shapes:
    """The shape of each tensor of a model, a path or a hub name, by its name; empty if unknown."""
    files = files_of(model)
    return {} if files is None else tensor_shapes(files)


def make_scorer(model: str, settings: Any, tasks: Sequence[str]) -> RoleScorer:
    from engine.training.model_scorer import ModelScorer

    return ModelScorer(model, settings, tasks)


def restore_trainer(trainer: Any, restore: Restore) -> None:
    """Restore a trainer: tensors bit for bit from a checkpoint, or published weights with new optimizer moments."""
    if restore.checkpoint is not None:
        trainer.load(restore.checkpoint)
    elif isinstance(trainer, StartsFromWeights):
        trainer.start_from(restore.weights, restore.optimizer_steps)
    else:
        law = "it has no start_from(weights, optimizer_steps), so only a checkpoint can restore it"
        raise EngineError(f"{type(trainer).__name__} cannot continue after {restore.steps} train steps: {law}")


def make_learner(model: str, settings: TrainerSettings) -> Any:
    """A trainer in a child process, also with one rank: this process, which outlives it, must not hold a part of a
    GPU."""
    from engine.training.ranked_trainer import RankedTrainer

    return RankedTrainer(model, settings)


def make_warm_start(config: Config, model: str, progress: Progress | None) -> str:
    """The directory of the model after its supervised warm start. Runs the warm start unless its result exists."""
    from transformers import AutoConfig

    from engine.training.model_checkpoint import export_model

    described, tokenizer = AutoConfig.from_pretrained(model, trust_remote_code=False), load_tokenizer(model)
    renderer = renderer_of(config, tokenizer)
    ends = stop_ids_of(config, tokenizer, model)
    turn = turn_end(tokenizer, config.data.chat_template_kwargs) if renderer.templated else None
    end = ends[0] if turn is None or turn.token is None else turn.token

    def encode(prompt: Prompt, answer: str) -> tuple[list[int], list[int]]:
        return renderer.ids(prompt), [*tokenizer.encode(answer, add_special_tokens=False), end]

    wanted = config.model.warm_start
    data, answers = load_answers(wanted, config.data.prompt_field)
    check_prompts(config, tokenizer, model, {"model.warm_start.path": data})
    plain = dict(
        kl_loss_coef=0.0, kl_reward_coef=0.0, reference_path=None, publish_dtype="float32", advantage="grpo",
        loss="ppo_clip", correction="none", masks=(), custom=(), ranks=config.trainer.ranks // config.trainer.nodes,
    )  # fmt: skip
    settings = config.trainer_settings.model_copy(update=plain)
    return warm_started(
        Path(config.run.dir) / ".made", model, wanted,
        [(data.prompt(row), answer) for row, answer in enumerate(answers)],
        seed=config.run.seed, encode=encode,
        settings=asdict(config.data.chat_settings()) | {"lora": settings.lora and settings.lora.model_dump()},
        longest=described.get_text_config().max_position_embeddings,
        export=partial(export_model, dtype=str(described.dtype or "float32").removeprefix("torch.")),
        learner=lambda: make_learner(model, settings),
        close=lambda trainer: trainer.close() if isinstance(trainer, Closable) else None,
        progress=progress or (lambda done, text: None),
    )  # fmt: skip
