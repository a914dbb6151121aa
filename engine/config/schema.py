"""`Config`: the configuration of a run, which can only be made if every law holds.

It builds `states.limits.Limits` for the scheduler and `training.trainer_settings.TrainerSettings` for the trainer, once
each; both check laws of their own. Reads no file: `loading.py` does.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

import yaml
from pydantic import ModelWrapValidatorHandler, model_validator

from engine.config.deterministic import settle_deterministic
from engine.config.laws import refuse_unlawful
from engine.config.limit_fields import given_limits
from engine.config.pools import check_pools, limit_pools, rewarding, settle_pools
from engine.config.secrets import refuse_secrets
from engine.config.sections import Sections
from engine.config.trainer import settled_correction
from engine.config.validation import validation_limits
from engine.policies import DEFAULTS, PolicySet, added_states
from engine.policies.registry import is_built_in
from engine.states.limits import Limits
from engine.training.trainer_settings import TrainerSettings


class Config(Sections):
    """The configuration of a whole run. Cannot be made if a law is broken."""

    @model_validator(mode="wrap")
    @classmethod
    def _laws(cls, given: Any, make: ModelWrapValidatorHandler[Self]) -> Self:
        """Fields that the user left open are set before the configuration is made; nothing changes it later."""
        if isinstance(given, cls):
            return given
        sections = Sections.model_validate(given)
        refuse_secrets(sections.model_dump(mode="json"))
        sections = settle_deterministic(sections)
        trainer = settled_correction(sections.trainer, sections.rollout.backend)
        sections = sections.model_copy(update={"trainer": trainer})
        check_pools(sections)
        config = make(dict(settle_pools(sections)))
        refuse_unlawful(config, config.limits, config.trainer_settings)
        return config

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A configuration with other sections. Raises: `ConfigError` if these break a law."""
        sections = {name: getattr(self, name) for name in Sections.model_fields}
        return type(self).model_validate({**sections, **(update or {})})

    @cached_property
    def limits(self) -> Limits:
        """The limits for the scheduler. Raises: ConfigError if they break law 2 (docs/ARCHITECTURE.md)."""
        s, r, v = self.scheduler, self.rollout, self.validation
        return Limits(
            **given_limits(self),
            sync_mode=r.sync_mode,
            scoring_tasks=self.trainer_settings.scoring_tasks(s.train_batch_size),
            keep_best="" if self.trainer.keep_best is None else self.trainer.keep_best.metric,
            keep_best_mode="max" if self.trainer.keep_best is None else self.trainer.keep_best.mode,
            validation=validation_limits(v, r, self.reward, s.samples_per_prompt) if self.held_out else None,
            pools=limit_pools(self),
            train_after_sync=s.train_after_sync,
            async_ratio=s.async_ratio,
            over_sample=s.over_sample,
            added_states=(*rewarding(self), *added_states(s.states)),
            keeps_batches=self.trainer.checkpoint_every > 0,
            timeouts=self.timeouts.limits(
                group=self.reward.longest_s,
                state=s.state_timeout_s,
                sync=max(r.transport_timeout_s, r.install_timeout_s),
            ),
        )

    @property
    def described(self) -> tuple[str, ...] | None:
        """The value of `Plan.described`: only added states and filters of the user see more than figures."""
        s = self.scheduler
        asks = s.states or s.policy_fields or not is_built_in("filter", s.policies.filter)
        return s.policy_fields if asks else None

    @property
    def measures_cache(self) -> bool:
        """Whether replicas report how full their KV caches are: only some concurrency policies use it."""
        return self.scheduler.policies.concurrency != DEFAULTS["concurrency"]

    def policies(self) -> PolicySet:
        """The policy of each decision. Raises: ConfigError for a name that is not registered, or not yet."""
        chosen = self.scheduler.policies.model_dump()
        return PolicySet.from_names({**chosen, "sync": chosen["sync"] or self.rollout.sync_order})

    @cached_property
    def trainer_settings(self) -> TrainerSettings:
        """The trainer's settings, including those that it shares with the rollout. Raises: ConfigError."""
        # Over several turns `max_tokens` limits each answer, and only the context limits the whole response.
        return self.trainer.settings(
            response_tokens=self.rollout.longest if self.several_turns else self.rollout.max_tokens,
            samplers="float32" if self._scores_old_log_probs_apart() else self.rollout.sampler_dtype,
            code_dir=self.run.code_dir,
            policy_mini_batch_size=self.scheduler.policy_mini_batch_size,
            temperature=self.rollout.temperature,
            seed=self.run.seed,
        )

    def _scores_old_log_probs_apart(self) -> bool:
        """Whether a scorer computes old log-probs from published weights. These must not be rounded, because rounded
        weights are not the trainer's policy."""
        return any("old_logprobs" in pool.tasks and "train" not in pool.tasks for pool in self.pools)

    def dump_yaml(self) -> str:
        """The configuration with every default written out; loads back to an equal one."""
        return str(yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120))
