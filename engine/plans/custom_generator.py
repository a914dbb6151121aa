"""Makes the generator of `rollout.backend: module:Class` for a replica, with the rewards of the configuration.

`rollouts` calls it in the process of a replica. The class samples; a group that it returns without rewards is scored
here, as those of the built-in generator are. A group that has a fault is never scored.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.config import Config
from engine.config.custom_classes import generator_class
from engine.config.pools import rewarding
from engine.config.prompts import model_config, renderer_of, stop_ids_of, text_ends_of
from engine.config.validation import SetSettings, validation_sets
from engine.errors import EngineError
from engine.ids import GroupId, ReplicaId, Version
from engine.plans.run_inputs import Inputs, reward_of
from engine.plans.validation_sets import answers_of_sets, judge_of, own_reward
from engine.protocols import (
    CallFigures,
    Fallible,
    Generated,
    Generator,
    GeneratorSetup,
    GroupWork,
    MeasuresCalls,
    SamplingSettings,
    Sleeper,
)
from engine.rollout.generator import TRAINING
from engine.rollout.scoring import Grader, first_failure
from engine.trajectory import TrajectoryGroup
from engine.workers.group_reports import Versions, check_generated
from engine.workers.plan import Rollout

ANY_VERSION = Versions(admitted=0, oldest=0, newest=1 << 62)
"""Only the worker knows which versions a group may have, and checks them."""


def make_custom_rollout(config: Config, inputs: Inputs, replica: ReplicaId) -> Rollout:
    """One object of the class, which also answers validation prompts. Raises what its constructor raises."""
    from transformers import AutoTokenizer

    r, model = config.rollout, inputs.model
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    stops = stop_ids_of(config, tokenizer, model)
    sampling = SamplingSettings(temperature=r.temperature, top_p=r.top_p, max_tokens=r.max_tokens, stop_ids=stops)
    sets = validation_sets(config.validation, config.rollout, config.reward)
    setup = GeneratorSetup(
        model=model,
        replica=replica,
        slots=r.slots,
        samples=config.scheduler.samples_per_prompt,
        seed=config.run.seed,
        device=r.device,
        sampling={TRAINING: sampling, **{one.name: _sampling_of(one, sampling) for one in sets}},
        prompt_ids=renderer_of(config, tokenizer, inputs.most_prompt_tokens).ids,
    )
    own = generator_class(config, inputs.local)(setup, **r.arguments)
    reward, timeout_s = reward_of(config, inputs), config.reward.timeout_s
    ends = text_ends_of(config, tokenizer, model)
    graders = {TRAINING: Grader(tokenizer, reward, timeout_s=timeout_s, later=bool(rewarding(config)), ends=ends)}
    for one in sets:
        judge = own_reward(config, one, reward, inputs.local)
        graders[one.name] = Grader(tokenizer, judge, timeout_s=timeout_s, ends=ends)
    generator = CustomGenerator(own, graders, None if config.trainer.custom else model_config(model).vocab_size)
    answers = answers_of_sets(config, judge_of(config, inputs.reward, inputs.local), inputs.local)
    return Rollout(generator=generator, evaluator=generator, answers=answers)


def _sampling_of(one: SetSettings, training: SamplingSettings) -> SamplingSettings:
    temperature, top_p, max_tokens, _ = one.way
    return replace(training, temperature=temperature, top_p=top_p, max_tokens=max_tokens)


class CustomGenerator:
    """A generator of the user that may leave texts and rewards to the engine. `graders`: by validation set.
    `vocabulary`: number of token ids that the trainer's model has; None: only the trainer knows what it can train."""

    def __init__(self, generator: Generator, graders: Mapping[str, Grader], vocabulary: int | None) -> None:
        self._generator = generator
        self._graders = graders
        self._vocabulary = vocabulary

    async def generate(self, work: GroupWork) -> Generated:
        """Raises: what the class and the reward raise, and as `check_generated` for what cannot be scored."""
        generated = await self._generator.generate(work)
        check_generated(work, generated, ANY_VERSION, rewarded=False)
        if not generated.aborted:
            self._require_trainable(generated.group)
            work.finished(work.samples)  # the replica gets its next group while this one is scored
            await self._graders[work.validation_set].score(generated.group, work.progress)
        return generated

    def _require_trainable(self, group: TrajectoryGroup) -> None:
        """Raises: `EngineError` for tokens that the built-in trainer's model cannot read."""
        if self._vocabulary is None:
            return
        for index, trajectory in enumerate(group.trajectories):
            if not trajectory.prompt_ids:
                raise EngineError(f"trajectory {index} has no prompt_ids; use setup.prompt_ids(work.prompt)")
            largest = max(*trajectory.prompt_ids, *trajectory.token_ids)
            if largest >= self._vocabulary:
                law = f"but the model has only those below {self._vocabulary}"
                raise EngineError(f"trajectory {index} has the token id {largest}, {law}")

    async def abort(self, groups: Sequence[GroupId]) -> None:
        await self._generator.abort(groups)

    async def truncate(self, groups: Sequence[GroupId]) -> None:
        await self._generator.truncate(groups)

    async def pause(self, mode: str) -> None:
        await self._generator.pause(mode)

    async def stage(self, version: Version, weights: Any) -> None:
        await self._generator.stage(version, weights)

    async def install(self, version: Version) -> None:
        await self._generator.install(version)

    async def resume(self) -> None:
        await self._generator.resume()

    async def sleep(self) -> None:
        """See `protocols.Sleeper`. Does nothing if the class cannot sleep."""
        if isinstance(self._generator, Sleeper):
            await self._generator.sleep()

    async def wake(self) -> None:
        if isinstance(self._generator, Sleeper):
            await self._generator.wake()

    async def close(self) -> None:
        for grader in self._graders.values():
            grader.close()
        await self._generator.close()

    async def failed(self) -> str:
        """See `protocols.Fallible`. The class says that it has failed, or too many reward calls hang."""
        own = [self._generator.failed()] if isinstance(self._generator, Fallible) else []
        return await first_failure(*own, *(grader.failed() for grader in self._graders.values()))

    def call_figures(self) -> list[CallFigures]:
        """See `protocols.MeasuresCalls`."""
        sources = [*self._measured(), *self._graders.values()]
        return [figures for source in sources for figures in source.call_figures()]

    def watch_calls(self, changed: Callable[[], None]) -> None:
        for source in (*self._measured(), *self._graders.values()):
            source.watch_calls(changed)

    def _measured(self) -> list[MeasuresCalls]:
        return [self._generator] if isinstance(self._generator, MeasuresCalls) else []
