"""Generates and trains one group with the user's classes, and passes it through the added states, before a run:
`engine check` calls it.

Makes an object of each class that `rollout.backend` and `trainer.backend` name, and calls its methods in the order of a
run, each at least once; then calls the work of each added state. It must never leave an object open or a file behind.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.config import Config
from engine.config.custom_classes import GENERATOR, TRAINER
from engine.config.dry_run import MADE_ANSWER
from engine.config.prompts import load_tokenizer, renderer_of, stop_ids_of
from engine.errors import ConfigError, counted, describe_error
from engine.plans.rollouts import make_rollout
from engine.plans.run_inputs import Inputs, inputs_of
from engine.plans.state_rehearsal import rehearse_states
from engine.plans.trainers import make_custom_trainer, shapes_of, weights_check
from engine.protocols import Batch, Closable, Generated, Generator, GroupWork
from engine.tasks.warm_start import WarmStart
from engine.training.named_tensors import zeros_of
from engine.trajectory import Prompt, Span, Trajectory, TrajectoryGroup
from engine.workers.group_reports import Versions, check_generated
from engine.workers.plan import Rollout
from engine.workers.threads import OneThread, on_a_thread
from engine.workers.trainer import metrics_problem, read_metric

LONGEST_S = 120.0
"""Maximum seconds to generate one group and to bring weights into the generator."""


def rehearse_backends(config: Config) -> Iterator[str]:
    """Lines like those of `check_inputs`. Raises: `ConfigError` for a class whose object cannot be made, or that raises
    or returns what a run would refuse, and for such work of an added state."""
    cold = config.model.model_copy(update={"warm_start": WarmStart()})
    inputs = inputs_of(config.model_copy(update={"model": cold}))
    prompt = inputs.sources[0].load().data.prompt(0)
    group, weights, trained = None, None, False
    if config.rollout.custom:
        group = _bounded(config, _generated(config, inputs, prompt))
        rewards = [trajectory.reward for trajectory in group.trajectories if trajectory.reward is not None]
        found = f"rewards from {min(rewards):g} to {max(rewards):g}" if rewards else "no rewards yet"
        yield f"ok: {GENERATOR} {config.rollout.backend} generates a group of {group.tokens} tokens, with {found}"
    if config.trainer.custom:
        made = group or _made_group(config, inputs.model, prompt)
        metrics, weights, trained = *asyncio.run(_trained(config, inputs, made)), True
        problems = [problem for name, value in metrics.items() if (problem := read_metric(name, value)[1])]
        found = f"{counted(len(metrics) - len(problems), 'metric')}, weights"
        found += ", a checkpoint" if config.trainer.checkpoint_every else ""
        yield f"ok: {TRAINER} {config.trainer.backend} trains one group: {found}"
        yield from (f"note: {TRAINER} {config.trainer.backend}: train() returned {one}: skipped" for one in problems)
    if config.rollout.custom and trained:
        _bounded(config, _synchronized(config, inputs, weights))
        yield f"ok: {GENERATOR} {config.rollout.backend} installs the weights of {config.trainer.backend}"
    if config.scheduler.states:
        made = group or _made_group(config, inputs.model, prompt)
        yield from rehearse_states(config, made, weights if trained else zeros_of(shapes_of(inputs.model)))


def _bounded(config: Config, work: Any) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(LONGEST_S):
            return await work

    try:
        return asyncio.run(bounded())
    except ConfigError:
        raise
    except TimeoutError as error:
        law = f"has not finished one group after {LONGEST_S:g} s"
        raise ConfigError(GENERATOR, config.rollout.backend, law, "correct it, or use a smaller model") from error
    except (Exception, SystemExit) as error:
        raise _refusal(GENERATOR, config.rollout.backend, "cannot generate a group", error) from error


def _refusal(field: str, spec: str, what: str, error: BaseException) -> ConfigError:
    law = f"{what}: {describe_error(error)}"
    return ConfigError(field, spec, law, "correct the class (docs/EXTENDING.md)")


async def _rollout(config: Config, inputs: Inputs) -> Rollout:
    """Made on a thread, as in a run."""
    rollout: Rollout = await on_a_thread(make_rollout, config, inputs, 0)
    return rollout


async def _generated(config: Config, inputs: Inputs, prompt: Prompt) -> TrajectoryGroup:
    generator = (await _rollout(config, inputs)).generator
    work = GroupWork(group=0, attempt=1, prompt=prompt, samples=config.scheduler.samples_per_prompt)
    try:
        generated: Generated = await generator.generate(work)
        rewarded = not config.limits.added_states
        check_generated(work, generated, Versions(admitted=0, oldest=0, newest=0), rewarded=rewarded)
        return generated.group
    finally:
        await generator.close()


async def _synchronized(config: Config, inputs: Inputs, weights: Any) -> None:
    """Bring version 1 into a new generator, as a run does."""
    generator: Generator = (await _rollout(config, inputs)).generator
    try:
        await generator.stage(1, weights)
        await generator.pause(config.rollout.sync_mode)
        await generator.install(1)
        await generator.resume()
    finally:
        await generator.close()


def _made_group(config: Config, path: str, prompt: Prompt) -> TrajectoryGroup:
    """A group without a generator: the same answer several times, every other one right. `path`: of the model."""
    tokenizer = load_tokenizer(path)
    stops = stop_ids_of(config, tokenizer, path)
    ids = [*tokenizer.encode(MADE_ANSWER, add_special_tokens=False), stops[0]][-config.rollout.max_tokens :]
    prompt_ids = renderer_of(config, tokenizer).ids(prompt)
    trajectories = [
        Trajectory(
            prompt_ids=list(prompt_ids), token_ids=list(ids), logprobs=[-1.0] * len(ids), loss_mask=[1] * len(ids),
            spans=[Span(0, len(ids), 0)], text=MADE_ANSWER, finish_reason="stop", reward=float(index % 2),
        )
        for index in range(config.scheduler.samples_per_prompt)
    ]  # fmt: skip
    return TrajectoryGroup(group=0, prompt=prompt, trajectories=trajectories)


async def _trained(config: Config, inputs: Inputs, group: TrajectoryGroup) -> tuple[dict[str, Any], Any]:
    """The metrics and the weights of a trainer after one group. As in a run, it is made on a thread, and its blocking
    methods run on another one."""
    spec, doing, call = config.trainer.backend, "cannot be made", OneThread("trainer").call
    made: list[Any] = []

    def make() -> Any:
        made.append(make_custom_trainer(config, inputs.model, inputs.local))
        return made[-1]

    try:
        trainer = await on_a_thread(make)
        doing = "cannot train a group"
        metrics = await call(trainer.train, Batch(step=0, groups=[group], staleness=[0]))
        if metrics_problem(metrics):
            raise TypeError(metrics_problem(metrics))
        doing = "does not return its weights"
        weights = await call(trainer.weights)
        check = weights_check(config, inputs.model)
        if check is not None:
            check(weights)
        if config.trainer.checkpoint_every:
            with tempfile.TemporaryDirectory() as directory:
                doing = "cannot save a checkpoint"
                await call(trainer.save, directory, 1)
                if not any(Path(directory).iterdir()):
                    raise ValueError("save() wrote no file into the directory that it was given")
                doing = "cannot load its checkpoint"
                await on_a_thread(lambda: make().load(directory))
        return metrics or {}, weights
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise _refusal(TRAINER, spec, doing, error) from error
    finally:
        for trainer in made:
            if isinstance(trainer, Closable):
                await on_a_thread(trainer.close)
