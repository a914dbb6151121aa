"""The names that other systems give to settings, and the fields that replace them here.

`loading` reads this table when a configuration has an unknown key; `python -m engine.config.migration` prints the
tables of the pages in docs/migrate/, which a test compares. A row is for one flag, or for several with the same
prefix (`rollout.val_kwargs.*`). It must never guess: the row of a flag without a counterpart says why.
"""

import re
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Flag(NamedTuple):
    """One flag of another system."""

    theirs: str
    here: str
    """Fields or commands that replace it, separated by commas; empty: none."""
    note: str = ""


MEMORY_NOTE = "passes are packed by tokens, whatever the number of trajectories"
DIRECTORY_NOTE = "checkpoints are in the run's directory, `runs/<id>/checkpoints`"
TRACKERS = "metrics.sinks.wandb, metrics.sinks.tensorboard, metrics.sinks.mlflow"

TRL = (
    Flag("model_name_or_path", "model.path"),
    Flag("output_dir", "run.dir", DIRECTORY_NOTE),
    Flag("learning_rate", "trainer.learning_rate"),
    Flag("torch_dtype", "trainer.bf16", "weights are trained in float32 and computed in bfloat16"),
    Flag("dtype", "trainer.bf16", "as `torch_dtype`"),
    Flag("bf16", "trainer.bf16"),
    Flag("max_prompt_length", "data.max_prompt_tokens, data.overlong"),
    Flag("max_completion_length", "rollout.max_tokens"),
    Flag("use_peft", "trainer.lora", "set the section `trainer.lora`"),
    Flag("lora_r", "trainer.lora.rank"),
    Flag("lora_alpha", "trainer.lora.alpha"),
    Flag("lora_target_modules", "trainer.lora.target_modules"),
    Flag("log_completions", "samples.per_step, engine samples"),
    Flag("per_device_train_batch_size", "scheduler.train_batch_size", "counted in prompts, over all devices: "
        "per_device_train_batch_size × processes × gradient_accumulation_steps / num_generations"),
    Flag("gradient_accumulation_steps", "scheduler.policy_mini_batch_size", MEMORY_NOTE),
    Flag("num_generations", "scheduler.samples_per_prompt"),
    Flag("num_generations_eval", "validation.sets", "`samples` of a set"),
    Flag("generation_batch_size", "scheduler.train_batch_size", "counted in prompts"),
    Flag("steps_per_generation", "scheduler.train_batch_size, scheduler.policy_mini_batch_size",
        "a batch of n minibatches is n optimizer steps on one generation"),
    Flag("num_iterations", "trainer.epochs_per_batch"),
    Flag("importance_sampling_level", "trainer.loss", "sequence: `gspo`"),
    Flag("epsilon", "trainer.clip_low"),
    Flag("epsilon_high", "trainer.clip_high"),
    Flag("delta", "trainer.clip_dual", "for negative advantages only"),
    Flag("beta", "trainer.kl_loss_coef"),
    Flag("loss_type", "trainer.aggregation, trainer.loss", "grpo: `sequence_mean`; dapo: `token_mean`; dr_grpo: "
        "`constant`; cispo: the loss; sapo: a [function](../OBJECTIVES.md#your-own-objective)"),
    Flag("scale_rewards", "trainer.advantage", "group: `grpo`; none: `dr_grpo`; batch: `reinforce_pp_baseline`"),
    Flag("reward_funcs", "reward.functions", "functions with TRL's signature are accepted"),
    Flag("reward_weights", "reward.functions", "`weight` of each function"),
    Flag("mask_truncated_completions", "trainer.filter_overlong"),
    Flag("top_entropy_quantile", "trainer.masks",
          "your own measure that `needs(entropies=True)`, with a fixed bound; "
        "a quantile over the batch has no counterpart"),
    Flag("off_policy_mask_threshold", "trainer.masks", "`mean_k1` with `negative_only: true`"),
    Flag("use_bias_correction_kl", "trainer.kl_loss_ratio"),
    Flag("vllm_importance_sampling_correction", "trainer.correction"),
    Flag("vllm_importance_sampling_mode", "trainer.correction, trainer.masks", "token_truncate: `token_tis`; "
        "sequence_truncate: `sequence_tis`; masks: `token_ratio`, `product_ratio`"),
    Flag("vllm_importance_sampling_cap", "trainer.correction_cap"),
    Flag("use_vllm", "rollout.backend", "`vllm`"),
    Flag("vllm_mode", "pools", "colocate: one pool with all tasks; server: `rollout.backend: openai`"),
    Flag("vllm_server_base_url", "rollout.urls"),
    Flag("vllm_gpu_memory_utilization", "rollout.engine_args", "`gpu_memory_utilization`"),
    Flag("vllm_tensor_parallel_size", "rollout.engine_args", "`tensor_parallel_size`"),
    Flag("vllm_enable_sleep_mode", "", "replicas sleep whenever their pool's other tasks work"),
    Flag("vllm_max_model_length", "rollout.engine_args", "`max_model_len`"),
    Flag("max_staleness", "scheduler.max_staleness_steps", "TRL discards older samples; here no sample gets older"),
    Flag("weight_sync_steps", "scheduler.sync_every"),
    Flag("chat_template_kwargs", "data.chat_template_kwargs"),
    Flag("gradient_checkpointing", "trainer.activation_checkpointing"),
    Flag("max_grad_norm", "trainer.max_grad_norm"),
    Flag("weight_decay", "trainer.weight_decay"),
    Flag("adam_beta1", "trainer.betas"),
    Flag("adam_beta2", "trainer.betas"),
    Flag("adam_epsilon", "trainer.adam_eps"),
    Flag("lr_scheduler_type", "trainer.lr_schedule"),
    Flag("warmup_steps", "trainer.lr_warmup_steps"),
    Flag("max_steps", "run.max_steps"),
    Flag("num_train_epochs", "run.epochs"),
    Flag("save_steps", "trainer.checkpoint_every"),
    Flag("save_strategy", "trainer.checkpoint_every", "no: 0"),
    Flag("save_total_limit", "trainer.keep_checkpoints"),
    Flag("eval_steps", "validation.every"),
    Flag("eval_strategy", "validation.every, validation.at_end"),
    Flag("resume_from_checkpoint", "engine resume"),
    Flag("report_to", TRACKERS, "trackio is not supported"),
    Flag("sync_ref_model", "", "the reference model never changes"),
    Flag("disable_dropout", "", "the model is always in evaluation mode"),
    Flag("top_k", "", "training with truncated sampling biases the importance ratio; `rollout.top_p` has a switch"),
    Flag("min_p", "", "as `top_k`"),
    Flag("repetition_penalty", "", "the behavior log-probs would not be those of the policy"),
)  # fmt: skip

VERL = (
    Flag("algorithm.adv_estimator", "trainer.advantage", "grpo, rloo; reinforce_plus_plus: `reinforce_pp`; gae: none, "
        "there is no critic"),
    Flag("algorithm.use_kl_in_reward", "trainer.kl_reward_coef", "0: off"),
    Flag("algorithm.kl_ctrl.kl_coef", "trainer.kl_reward_coef"),
    Flag("algorithm.rollout_correction.*", "trainer.correction, trainer.correction_cap, trainer.masks"),
    Flag("algorithm.filter_groups.*", "scheduler.policies.filter", "`zero-variance`"),
    Flag("data.train_files", "data.path"),
    Flag("data.val_files", "data.validation_path"),
    Flag("data.prompt_key", "data.prompt_field"),
    Flag("data.train_batch_size", "scheduler.train_batch_size"),
    Flag("data.gen_batch_size", "", "groups start one by one"),
    Flag("data.max_prompt_length", "data.max_prompt_tokens"),
    Flag("data.max_response_length", "rollout.max_tokens"),
    Flag("data.filter_overlong_prompts", "data.overlong", "`drop`"),
    Flag("data.truncation", "data.overlong", "error: `error`; left: `truncate_left`"),
    Flag("data.shuffle", "data.shuffle"),
    Flag("data.seed", "run.seed"),
    Flag("data.return_raw_chat", "", "messages are used unchanged"),
    Flag("actor_rollout_ref.hybrid_engine", "pools", "False: no pool with both tasks; True: one pool"),
    Flag("actor_rollout_ref.model.path", "model.path"),
    Flag("actor_rollout_ref.model.use_remove_padding", "trainer.packing"),
    Flag("actor_rollout_ref.model.enable_gradient_checkpointing", "trainer.activation_checkpointing"),
    Flag("actor_rollout_ref.model.lora_rank", "trainer.lora.rank"),
    Flag("actor_rollout_ref.model.lora_alpha", "trainer.lora.alpha"),
    Flag("actor_rollout_ref.model.target_modules", "trainer.lora.target_modules"),
    Flag("actor_rollout_ref.model.override_config.*", "", "change the model's config.json"),
    Flag("actor_rollout_ref.actor.strategy", "trainer.ranks", "FSDP2 whenever there are several ranks"),
    Flag("actor_rollout_ref.actor.optim.lr", "trainer.learning_rate"),
    Flag("actor_rollout_ref.actor.optim.lr_warmup_steps", "trainer.lr_warmup_steps"),
    Flag("actor_rollout_ref.actor.optim.weight_decay", "trainer.weight_decay"),
    Flag("actor_rollout_ref.actor.ppo_mini_batch_size", "scheduler.policy_mini_batch_size"),
    Flag("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "trainer.micro_batch_tokens", MEMORY_NOTE),
    Flag("actor_rollout_ref.actor.use_dynamic_bsz", "", "passes always have as many trajectories as fit"),
    Flag("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "trainer.micro_batch_tokens"),
    Flag("actor_rollout_ref.actor.ppo_epochs", "trainer.epochs_per_batch"),
    Flag("actor_rollout_ref.actor.use_kl_loss", "trainer.kl_loss_coef", "0: off"),
    Flag("actor_rollout_ref.actor.kl_loss_coef", "trainer.kl_loss_coef"),
    Flag("actor_rollout_ref.actor.kl_loss_type", "trainer.kl_loss", "kl: `k1`; mse: `k2`; low_var_kl: `k3`"),
    Flag("actor_rollout_ref.actor.entropy_coeff", "trainer.entropy_coef"),
    Flag("actor_rollout_ref.actor.grad_clip", "trainer.max_grad_norm"),
    Flag("actor_rollout_ref.actor.clip_ratio", "trainer.clip_low, trainer.clip_high"),
    Flag("actor_rollout_ref.actor.clip_ratio_low", "trainer.clip_low"),
    Flag("actor_rollout_ref.actor.clip_ratio_high", "trainer.clip_high"),
    Flag("actor_rollout_ref.actor.clip_ratio_c", "trainer.clip_dual"),
    Flag("actor_rollout_ref.actor.loss_agg_mode", "trainer.aggregation", "token-mean: `token_mean`; "
        "seq-mean-token-mean: `sequence_mean`; seq-mean-token-sum-norm: `constant`"),
    Flag("actor_rollout_ref.actor.policy_loss.loss_mode", "trainer.loss", "vanilla: `ppo_clip`; gspo, cispo; others: a "
        "[function](../OBJECTIVES.md#your-own-objective)"),
    Flag("actor_rollout_ref.actor.ulysses_sequence_parallel_size", "", "a trajectory is computed on one rank"),
    Flag("actor_rollout_ref.actor.fsdp_config.param_offload", "trainer.cpu_offload"),
    Flag("actor_rollout_ref.actor.fsdp_config.optimizer_offload", "trainer.cpu_offload"),
    Flag("actor_rollout_ref.actor.fsdp_config.fsdp_size", "trainer.ranks"),
    Flag("actor_rollout_ref.rollout.name", "rollout.backend", "vllm; sglang: a server with `rollout.backend: openai`"),
    Flag("actor_rollout_ref.rollout.n", "scheduler.samples_per_prompt"),
    Flag("actor_rollout_ref.rollout.temperature", "rollout.temperature"),
    Flag("actor_rollout_ref.rollout.top_p", "rollout.top_p", "below 1 only with `rollout.allow_truncated_sampling`"),
    Flag("actor_rollout_ref.rollout.top_k", "", "training with truncated sampling biases the importance ratio"),
    Flag("actor_rollout_ref.rollout.val_kwargs.*", "validation.greedy, validation.sets", "`samples` of a set"),
    Flag("actor_rollout_ref.rollout.tensor_model_parallel_size", "rollout.engine_args", "`tensor_parallel_size`"),
    Flag("actor_rollout_ref.rollout.gpu_memory_utilization", "rollout.engine_args", "`gpu_memory_utilization`"),
    Flag("actor_rollout_ref.rollout.enable_chunked_prefill", "rollout.engine_args", "`enable_chunked_prefill`"),
    Flag("actor_rollout_ref.rollout.max_num_batched_tokens", "rollout.engine_args", "`max_num_batched_tokens`"),
    Flag("actor_rollout_ref.rollout.enforce_eager", "rollout.engine_args", "`enforce_eager`"),
    Flag("actor_rollout_ref.rollout.load_format", "", "vLLM loads the model's files"),
    Flag("actor_rollout_ref.rollout.layered_summon", "", "weights are gathered tensor by tensor"),
    Flag("actor_rollout_ref.rollout.calculate_log_probs", "", "behavior log-probs always come from the sampler"),
    Flag("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", "trainer.micro_batch_tokens", MEMORY_NOTE),
    Flag("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz", "", "as `use_dynamic_bsz`"),
    Flag("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu", "trainer.micro_batch_tokens"),
    Flag("actor_rollout_ref.rollout.multi_turn.*", "environment.class_name, environment.max_turns"),
    Flag("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "trainer.micro_batch_tokens", MEMORY_NOTE),
    Flag("actor_rollout_ref.ref.log_prob_use_dynamic_bsz", "", "as `use_dynamic_bsz`"),
    Flag("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", "trainer.micro_batch_tokens"),
    Flag("actor_rollout_ref.ref.fsdp_config.param_offload", "pools", "a pool for `ref_logprobs` gives it its own GPUs"),
    Flag("actor_rollout_ref.ref.ulysses_sequence_parallel_size", "", "a trajectory is computed on one rank"),
    Flag("critic.*", "", "there is no critic"),
    Flag("reward_model.reward_manager", "reward.function", "dapo: the `overlong_*` fields of `trainer`"),
    Flag("reward_model.reward_kwargs.overlong_buffer_cfg.enable", "trainer.overlong_cache_tokens", "0: off"),
    Flag("reward_model.reward_kwargs.overlong_buffer_cfg.len", "trainer.overlong_cache_tokens"),
    Flag("reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor", "trainer.overlong_penalty"),
    Flag("reward_model.reward_kwargs.overlong_buffer_cfg.log", "", "`overlong_share` is always reported"),
    Flag("reward_model.reward_kwargs.max_resp_len", "trainer.overlong_max_tokens", "default: `rollout.max_tokens`"),
    Flag("custom_reward_function.path", "reward.function"),
    Flag("custom_reward_function.name", "reward.function"),
    Flag("trainer.critic_warmup", "", "there is no critic"),
    Flag("trainer.val_before_train", "validation.at_start"),
    Flag("trainer.test_freq", "validation.every"),
    Flag("trainer.save_freq", "trainer.checkpoint_every", "-1: 0"),
    Flag("trainer.max_actor_ckpt_to_keep", "trainer.keep_checkpoints"),
    Flag("trainer.default_local_dir", "run.dir", DIRECTORY_NOTE),
    Flag("trainer.resume_mode", "engine resume", "auto: start again with this command"),
    Flag("trainer.total_epochs", "run.epochs"),
    Flag("trainer.total_training_steps", "run.max_steps"),
    Flag("trainer.logger", TRACKERS),
    Flag("trainer.project_name", "metrics.sinks.wandb.project"),
    Flag("trainer.experiment_name", "run.name"),
    Flag("trainer.nnodes", "trainer.ranks", "ranks are on one machine"),
    Flag("trainer.n_gpus_per_node", "trainer.ranks"),
    Flag("rollout.nnodes", "rollout.replicas"),
    Flag("rollout.n_gpus_per_node", "rollout.replicas, rollout.gpus"),
    Flag("async_training.*", "scheduler.async_ratio, scheduler.sync_every, rollout.sync_mode",
        "see [verl, fully asynchronous](../MODES.md#verl-fully-asynchronous)"),
)  # fmt: skip

SKYRL = (
    Flag("data.train_data", "data.path"),
    Flag("data.val_data", "data.validation_path"),
    Flag("trainer.fully_async.max_staleness_steps", "scheduler.max_staleness_steps"),
    Flag("trainer.fully_async.num_parallel_generation_workers", "scheduler.max_concurrent_groups"),
    Flag("trainer.fully_async.*", "", "see [SkyRL](../MODES.md#skyrl)"),
    Flag("trainer.algorithm.advantage_estimator", "trainer.advantage", "grpo, rloo; reinforce++: `reinforce_pp`; gae: "
        "none, there is no critic"),
    Flag("trainer.algorithm.policy_loss_type", "trainer.loss", "regular: `ppo_clip`; dual_clip: `trainer.clip_dual`; "
        "gspo, cispo; others: a [function](../OBJECTIVES.md#your-own-objective)"),
    Flag("trainer.algorithm.loss_reduction", "trainer.aggregation", "token_mean, sequence_mean; "
        "seq_mean_token_sum_norm: `constant`"),
    Flag("trainer.algorithm.eps_clip_low", "trainer.clip_low"),
    Flag("trainer.algorithm.eps_clip_high", "trainer.clip_high"),
    Flag("trainer.algorithm.use_kl_loss", "trainer.kl_loss_coef", "0: off"),
    Flag("trainer.algorithm.kl_loss_coef", "trainer.kl_loss_coef"),
    Flag("trainer.algorithm.use_kl_in_reward", "trainer.kl_reward_coef", "0: off"),
    Flag("trainer.algorithm.use_entropy_loss", "trainer.entropy_coef", "0: off"),
    Flag("trainer.algorithm.entropy_loss_coef", "trainer.entropy_coef"),
    Flag("trainer.algorithm.off_policy_correction.tis_ratio_type", "trainer.correction",
          "token: `token_tis`; sequence: "
        "`sequence_tis`"),
    Flag("trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high", "trainer.correction_cap"),
    Flag("trainer.algorithm.dynamic_sampling.*", "scheduler.policies.filter", "`zero-variance`"),
    Flag("trainer.policy.model.path", "model.path"),
    Flag("trainer.policy.model.lora.rank", "trainer.lora.rank"),
    Flag("trainer.policy.model.lora.alpha", "trainer.lora.alpha"),
    Flag("trainer.policy.optimizer_config.lr", "trainer.learning_rate"),
    Flag("trainer.policy.optimizer_config.weight_decay", "trainer.weight_decay"),
    Flag("trainer.policy.optimizer_config.max_grad_norm", "trainer.max_grad_norm"),
    Flag("trainer.policy.optimizer_config.num_warmup_steps", "trainer.lr_warmup_steps"),
    Flag("trainer.placement.colocate_all", "pools", "false: no pool with both tasks"),
    Flag("trainer.strategy", "trainer.ranks", "FSDP2 whenever there are several ranks; Megatron: none"),
    Flag("trainer.placement.policy_num_gpus_per_node", "trainer.ranks"),
    Flag("trainer.placement.critic_num_gpus_per_node", "", "there is no critic"),
    Flag("trainer.placement.ref_num_gpus_per_node", "pools", "a pool for `ref_logprobs`"),
    Flag("trainer.epochs", "run.epochs"),
    Flag("trainer.train_batch_size", "scheduler.train_batch_size"),
    Flag("trainer.policy_mini_batch_size", "scheduler.policy_mini_batch_size"),
    Flag("trainer.update_epochs_per_batch", "trainer.epochs_per_batch"),
    Flag("trainer.micro_forward_batch_size_per_gpu", "trainer.micro_batch_tokens", MEMORY_NOTE),
    Flag("trainer.micro_train_batch_size_per_gpu", "trainer.micro_batch_tokens", MEMORY_NOTE),
    Flag("trainer.eval_batch_size", "", "validation rows fill free slots"),
    Flag("trainer.eval_before_train", "validation.at_start"),
    Flag("trainer.eval_interval", "validation.every"),
    Flag("trainer.ckpt_interval", "trainer.checkpoint_every"),
    Flag("trainer.max_ckpts_to_keep", "trainer.keep_checkpoints"),
    Flag("trainer.ckpt_path", "run.dir", DIRECTORY_NOTE),
    Flag("trainer.resume_mode", "engine resume"),
    Flag("trainer.max_prompt_length", "data.max_prompt_tokens"),
    Flag("trainer.logger", TRACKERS),
    Flag("trainer.project_name", "metrics.sinks.wandb.project"),
    Flag("trainer.run_name", "run.name"),
    Flag("generator.n_samples_per_prompt", "scheduler.samples_per_prompt"),
    Flag("generator.batched", "", "groups start one by one"),
    Flag("generator.max_turns", "environment.max_turns"),
    Flag("generator.sampling_params.max_generate_length", "rollout.max_tokens"),
    Flag("generator.sampling_params.temperature", "rollout.temperature"),
    Flag("generator.sampling_params.top_p", "rollout.top_p"),
    Flag("generator.eval_n_samples_per_prompt", "validation.sets", "`samples` of a set"),
    Flag("generator.inference_engine.num_engines", "rollout.replicas"),
    Flag("generator.inference_engine.tensor_parallel_size", "rollout.engine_args", "`tensor_parallel_size`"),
    Flag("generator.inference_engine.backend", "rollout.backend", "vllm"),
    Flag("generator.inference_engine.run_engines_locally", "rollout.backend", "false: `openai`, with `rollout.urls`"),
    Flag("generator.inference_engine.weight_sync_backend", "rollout.transport, rollout.transport_backend"),
    Flag("generator.inference_engine.async_engine", "", "always"),
    Flag("generator.inference_engine.gpu_memory_utilization", "rollout.engine_args", "`gpu_memory_utilization`"),
    Flag("generator.inference_engine.enforce_eager", "rollout.engine_args", "`enforce_eager`"),
    Flag("generator.inference_engine.enable_ray_prometheus_stats", "metrics.port", "always served"),
    Flag("environment.env_class", "environment.class_name, reward.function", "a task of one turn needs only a reward; "
        "environments of SkyRL-Gym: [adapter](../ENVIRONMENTS.md#skyrl-gym)"),
)  # fmt: skip

PRIME_RL = (
    Flag("max_steps", "run.max_steps"),
    Flag("seq_len", "rollout.engine_args", "`max_model_len`; the trainer needs no length"),
    Flag("model.name", "model.path"),
    Flag("deployment.num_train_gpus", "trainer.ranks"),
    Flag("deployment.num_infer_gpus", "rollout.replicas, rollout.gpus"),
    Flag("wandb.project", "metrics.sinks.wandb.project"),
    Flag("wandb.name", "run.name"),
    Flag("ckpt.interval", "trainer.checkpoint_every"),
    Flag("ckpt.keep_last", "trainer.keep_checkpoints"),
    Flag("ckpt.resume_step", "engine resume"),
    Flag("max_off_policy_steps", "scheduler.max_staleness_steps",
          "prime-rl drops rollouts beyond it; here a step waits "
        "for them"),
    Flag("orchestrator.batch_size", "scheduler.train_batch_size", "counted in prompts: batch_size / group_size"),
    Flag("orchestrator.group_size", "scheduler.samples_per_prompt"),
    Flag("orchestrator.rollouts_per_example", "scheduler.samples_per_prompt"),
    Flag("orchestrator.seq_len", "rollout.engine_args", "`max_model_len`"),
    Flag("orchestrator.train.sampling.max_completion_tokens", "rollout.max_tokens"),
    Flag("orchestrator.train.sampling.temperature", "rollout.temperature"),
    Flag("orchestrator.train.env", "agent.function", "each environment as an agent, with its rows in a file: "
        "[verifiers](../ENVIRONMENTS.md#verifiers); several environments: `data.sources`"),
    Flag("orchestrator.renderer.*", "data.chat, data.chat_template_kwargs", "the chat template of the tokenizer"),
    Flag("orchestrator.eval.*", "validation.every, validation.sets"),
    Flag("trainer.optim.lr", "trainer.learning_rate"),
    Flag("trainer.optim.weight_decay", "trainer.weight_decay"),
    Flag("trainer.optim.max_norm", "trainer.max_grad_norm"),
    Flag("trainer.scheduler.*", "trainer.lr_schedule, trainer.lr_warmup_steps"),
    Flag("trainer.model.lora.rank", "trainer.lora.rank"),
    Flag("trainer.model.lora.alpha", "trainer.lora.alpha"),
    Flag("trainer.model.lora.dropout", "trainer.lora.dropout", "must be 0"),
    Flag("trainer.model.lora.target_modules", "trainer.lora.target_modules"),
    Flag("trainer.model.ac.*", "trainer.activation_checkpointing"),
    Flag("trainer.model.seq_len", "", "passes are packed from whole trajectories"),
    Flag("trainer.loss.*", "trainer.loss, trainer.masks", "also as a [function](../OBJECTIVES.md#your-own-objective)"),
    Flag("inference.model.max_model_len", "rollout.engine_args", "`max_model_len`"),
    Flag("inference.model.tool_call_parser", "agent.tool_parser"),
    Flag("inference.parallel.*", "rollout.engine_args", "`tensor_parallel_size`, `data_parallel_size`"),
)  # fmt: skip

AREAL = (
    Flag("experiment_name", "run.name"),
    Flag("trial_name", "run.name"),
    Flag("seed", "run.seed"),
    Flag("enable_offload", "pools", "in one pool, replicas and trainer take turns on the GPU"),
    Flag("total_train_epochs", "run.epochs"),
    Flag("total_train_steps", "run.max_steps"),
    Flag("tokenizer_path", "", "the tokenizer is beside the model"),
    Flag("cluster.*", "cluster.address", "Ray knows the nodes and GPUs"),
    Flag("allocation_mode", "rollout.replicas, rollout.engine_args, trainer.ranks", "vllm:d4+d4: 4 of each"),
    Flag("scheduler.type", "", "Ray starts the processes"),
    Flag("rollout.max_concurrent_rollouts", "scheduler.max_concurrent_groups", "counted in groups in both"),
    Flag("rollout.queue_size", "", "S bounds the number of ready groups"),
    Flag("rollout.consumer_batch_size", "scheduler.train_batch_size"),
    Flag("rollout.max_head_offpolicyness", "scheduler.max_staleness_steps"),
    Flag("rollout.enable_rollout_tracing", "engine replay", "always recorded"),
    Flag("rollout.dump_to_file", "samples.per_step"),
    Flag("rollout.scheduling_spec", "rollout.gpus"),
    Flag("gconfig.n_samples", "scheduler.samples_per_prompt"),
    Flag("gconfig.min_new_tokens", "", "the behavior log-probs would not be those of the policy"),
    Flag("gconfig.max_new_tokens", "rollout.max_tokens"),
    Flag("gconfig.greedy", "validation.greedy", "training samples; validation may be greedy"),
    Flag("gconfig.temperature", "rollout.temperature"),
    Flag("gconfig.top_p", "rollout.top_p"),
    Flag("gconfig.top_k", "", "training with truncated sampling biases the importance ratio"),
    Flag("actor.path", "model.path"),
    Flag("actor.init_from_scratch", "model.make", "only for the built-in tiny models"),
    Flag("actor.disable_dropout", "", "the model is always in evaluation mode"),
    Flag("actor.gradient_checkpointing", "trainer.activation_checkpointing"),
    Flag("actor.dtype", "trainer.bf16", "weights are trained in float32 and computed in bfloat16"),
    Flag("actor.mb_spec.max_tokens_per_mb", "trainer.micro_batch_tokens"),
    Flag("actor.optimizer.type", "", "AdamW"),
    Flag("actor.optimizer.lr", "trainer.learning_rate"),
    Flag("actor.optimizer.weight_decay", "trainer.weight_decay"),
    Flag("actor.optimizer.beta1", "trainer.betas"),
    Flag("actor.optimizer.beta2", "trainer.betas"),
    Flag("actor.optimizer.eps", "trainer.adam_eps"),
    Flag("actor.optimizer.lr_scheduler_type", "trainer.lr_schedule"),
    Flag("actor.optimizer.gradient_clipping", "trainer.max_grad_norm"),
    Flag("actor.optimizer.warmup_steps_proportion", "trainer.lr_warmup_steps", "in optimizer steps"),
    Flag("actor.group_size", "scheduler.samples_per_prompt"),
    Flag("actor.eps_clip", "trainer.clip_low, trainer.clip_high"),
    Flag("actor.eps_clip_higher", "trainer.clip_high"),
    Flag("actor.c_clip", "trainer.clip_dual"),
    Flag("actor.reward_scaling", "reward.functions", "`weight`"),
    Flag("actor.reward_bias", "", "advantages subtract a baseline, so a constant has no effect"),
    Flag("actor.kl_ctl", "trainer.kl_reward_coef"),
    Flag("actor.ppo_n_minibatches", "scheduler.policy_mini_batch_size", "B / n"),
    Flag("actor.recompute_logprob", "trainer.old_policy", "`proximal`"),
    Flag("actor.use_decoupled_loss", "trainer.loss", "`decoupled_ppo`"),
    Flag("actor.behav_imp_weight_cap", "trainer.correction, trainer.correction_cap"),
    Flag("actor.behave_imp_weight_cap", "trainer.correction, trainer.correction_cap"),
    Flag("actor.reward_norm.*", "trainer.advantage", "group: `grpo`, and without std `dr_grpo`"),
    Flag("actor.adv_norm.*", "trainer.advantage", "batch: `reinforce_pp_baseline`; after a norm by group: a "
        "[function](../OBJECTIVES.md#your-own-objective)"),
    Flag("actor.weight_update_mode", "rollout.transport"),
    Flag("actor.max_new_tokens", "rollout.max_tokens"),
    Flag("actor.scheduling_spec", "trainer.gpus_per_rank"),
    Flag("ref.*", "trainer.reference_path", "needed only with a KL term"),
    Flag("sglang.*", "", "a server with `rollout.backend: openai`, or `vllm`"),
    Flag("vllm.model", "model.path"),
    Flag("vllm.*", "rollout.engine_args", "`max_model_len`, `gpu_memory_utilization`"),
    Flag("train_dataset.path", "data.path"),
    Flag("train_dataset.batch_size", "scheduler.train_batch_size"),
    Flag("train_dataset.shuffle", "data.shuffle"),
    Flag("train_dataset.max_length", "data.max_prompt_tokens"),
    Flag("train_dataset.type", "", "the columns determine it"),
    Flag("train_dataset.pin_memory", "", "prompts stay texts"),
    Flag("train_dataset.num_workers", "", "prompts stay texts"),
    Flag("valid_dataset.path", "data.validation_path"),
    Flag("valid_dataset.*", "", "validation rows fill free slots"),
    Flag("saver.*", "trainer.checkpoint_every", "in train steps"),
    Flag("recover.*", "engine resume, durability.snapshot_every", "every run can be resumed"),
    Flag("evaluator.*", "validation.every", "in train steps"),
    Flag("stats_logger.*", TRACKERS),
    Flag("perf_tracer.*", "engine timeline", "from the record of any run"),
)  # fmt: skip

SYSTEMS: dict[str, tuple[Flag, ...]] = {
    "TRL": TRL, "verl": VERL, "SkyRL": SKYRL, "prime-rl": PRIME_RL, "AReaL": AREAL,
}  # fmt: skip


def exact_hint(path: str) -> str:
    """The fix for a key whose path is a name of another system, or the end of one: `rollout.n` is
    `actor_rollout_ref.rollout.n`. Empty if none has it."""
    return _hint(lambda theirs: theirs == path) or _hint(lambda theirs: "." in path and theirs.endswith(f".{path}"))


def loose_hint(path: str) -> str:
    """The fix for a key of a group of settings of another system, or for one of its names in another section, such as
    `scheduler.num_generations`. Empty if there is none."""
    last = path.rpartition(".")[2]
    return _hint(lambda theirs: theirs.endswith(".*") and path.startswith(theirs.removesuffix("*"))) or _hint(
        lambda theirs: "_" in last and theirs.rpartition(".")[2] == last
    )


def _hint(matches: Callable[[str], bool]) -> str:
    found = ((system, row) for system, rows in SYSTEMS.items() for row in rows if matches(row.theirs))
    system, row = next(found, ("", Flag("", "")))
    note = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", row.note).replace("`", "")
    if not row.here:
        return f"{row.theirs} of {system} has no counterpart: {note}" if system else ""
    meaning = f"; {note}" if note else ""
    return f"did you mean {row.here.replace(', ', ' or ')}? ({row.theirs} of {system}{meaning})"


def table(system: str) -> Iterator[str]:
    """The lines of a page's table."""
    yield f"| {system} | here | note |"
    yield "|---|---|---|"
    for row in SYSTEMS[system]:
        here = ", ".join(f"`{name.strip()}`" for name in row.here.split(",")) if row.here else "none"
        yield f"| `{row.theirs}` | {here} | {row.note} |"


if __name__ == "__main__":
    for name in sys.argv[1:] or SYSTEMS:
        print("\n".join(table(name)))
