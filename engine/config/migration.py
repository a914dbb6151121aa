"""The names that other systems give to settings, and the fields that replace them here.

`loading` reads this table when a configuration has an unknown key; `python -m engine.config.migration` prints the
tables of the pages in docs/migrate/, which a test compares. A row is of one flag, or of several whose names begin
alike (`rollout.val_kwargs.*`). It must never guess: a flag without a counterpart says why.
"""

import re
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Row(NamedTuple):
    """One flag of another system."""

    theirs: str
    here: str
    """Fields or commands that replace it, separated by commas; empty: none."""
    note: str = ""


MEMORY_NOTE = "passes are packed by tokens, whatever the number of trajectories"
DIRECTORY_NOTE = "checkpoints are in the run's directory, `runs/<id>/checkpoints`"
TRACKERS = "metrics.sinks.wandb, metrics.sinks.tensorboard, metrics.sinks.mlflow"

TRL = (
    Row("model_name_or_path", "model.path"),
    Row("output_dir", "run.dir", DIRECTORY_NOTE),
    Row("learning_rate", "trainer.learning_rate"),
    Row("torch_dtype", "trainer.bf16", "weights are trained in float32 and computed in bfloat16"),
    Row("dtype", "trainer.bf16", "as `torch_dtype`"),
    Row("bf16", "trainer.bf16"),
    Row("max_prompt_length", "data.max_prompt_tokens, data.overlong"),
    Row("max_completion_length", "rollout.max_tokens"),
    Row("use_peft", "trainer.lora", "set the section `trainer.lora`"),
    Row("lora_r", "trainer.lora.rank"),
    Row("lora_alpha", "trainer.lora.alpha"),
    Row("lora_target_modules", "trainer.lora.target_modules"),
    Row("log_completions", "samples.per_step, engine samples"),
    Row("per_device_train_batch_size", "scheduler.train_batch_size", "counted in prompts, over all devices: "
        "per_device_train_batch_size × processes × gradient_accumulation_steps / num_generations"),
    Row("gradient_accumulation_steps", "scheduler.policy_mini_batch_size", MEMORY_NOTE),
    Row("num_generations", "scheduler.samples_per_prompt"),
    Row("num_generations_eval", "validation.sets", "`samples` of a set"),
    Row("generation_batch_size", "scheduler.train_batch_size", "counted in prompts"),
    Row("steps_per_generation", "scheduler.train_batch_size, scheduler.policy_mini_batch_size",
        "a batch of n minibatches is n optimizer steps on one generation"),
    Row("num_iterations", "trainer.epochs_per_batch"),
    Row("importance_sampling_level", "trainer.loss", "sequence: `gspo`"),
    Row("epsilon", "trainer.clip_low"),
    Row("epsilon_high", "trainer.clip_high"),
    Row("delta", "trainer.clip_dual", "for negative advantages only"),
    Row("beta", "trainer.kl_loss_coef"),
    Row("loss_type", "trainer.aggregation, trainer.loss", "grpo: `sequence_mean`; dapo: `token_mean`; dr_grpo: "
        "`constant`; cispo: the loss; sapo: a [function](../OBJECTIVES.md#your-own-objective)"),
    Row("scale_rewards", "trainer.advantage", "group: `grpo`; none: `dr_grpo`; batch: `reinforce_pp_baseline`"),
    Row("reward_funcs", "reward.functions", "functions with TRL's signature are accepted"),
    Row("reward_weights", "reward.functions", "`weight` of each function"),
    Row("mask_truncated_completions", "trainer.filter_overlong"),
    Row("top_entropy_quantile", "trainer.masks", "a measure of yours that `needs(entropies=True)`, with a fixed bound; "
        "a quantile over the batch has no counterpart"),
    Row("off_policy_mask_threshold", "trainer.masks", "`mean_k1` with `negative_only: true`"),
    Row("use_bias_correction_kl", "trainer.kl_loss_ratio"),
    Row("vllm_importance_sampling_correction", "trainer.correction"),
    Row("vllm_importance_sampling_mode", "trainer.correction, trainer.masks", "token_truncate: `token_tis`; "
        "sequence_truncate: `sequence_tis`; masks: `token_ratio`, `product_ratio`"),
    Row("vllm_importance_sampling_cap", "trainer.correction_cap"),
    Row("use_vllm", "rollout.backend", "`vllm`"),
    Row("vllm_mode", "pools", "colocate: one pool with all tasks; server: `rollout.backend: openai`"),
    Row("vllm_server_base_url", "rollout.urls"),
    Row("vllm_gpu_memory_utilization", "rollout.engine_args", "`gpu_memory_utilization`"),
    Row("vllm_tensor_parallel_size", "rollout.engine_args", "`tensor_parallel_size`"),
    Row("vllm_enable_sleep_mode", "", "replicas sleep whenever their pool's other tasks work"),
    Row("vllm_max_model_length", "rollout.context"),
    Row("max_staleness", "scheduler.max_staleness_steps", "TRL discards older samples; here none gets older"),
    Row("weight_sync_steps", "scheduler.sync_every"),
    Row("chat_template_kwargs", "data.chat_template_kwargs"),
    Row("gradient_checkpointing", "trainer.activation_checkpointing"),
    Row("max_grad_norm", "trainer.max_grad_norm"),
    Row("weight_decay", "trainer.weight_decay"),
    Row("adam_beta1", "trainer.betas"),
    Row("adam_beta2", "trainer.betas"),
    Row("adam_epsilon", "trainer.adam_eps"),
    Row("lr_scheduler_type", "trainer.lr_schedule"),
    Row("warmup_steps", "trainer.lr_warmup_steps"),
    Row("max_steps", "run.max_steps"),
    Row("num_train_epochs", "run.epochs"),
    Row("save_steps", "trainer.checkpoint_every"),
    Row("save_strategy", "trainer.checkpoint_every", "no: 0"),
    Row("save_total_limit", "trainer.keep_checkpoints"),
    Row("eval_steps", "validation.every"),
    Row("eval_strategy", "validation.every, validation.at_end"),
    Row("resume_from_checkpoint", "engine resume"),
    Row("report_to", TRACKERS, "trackio has none"),
    Row("sync_ref_model", "", "the reference model stays as it is"),
    Row("disable_dropout", "", "the model is always in evaluation mode"),
    Row("top_k", "", "training with truncated sampling biases the importance ratio; `rollout.top_p` has a switch"),
    Row("min_p", "", "as `top_k`"),
    Row("repetition_penalty", "", "the behavior log-probs would not be those of the policy"),
)  # fmt: skip

VERL = (
    Row("algorithm.adv_estimator", "trainer.advantage", "grpo, rloo; reinforce_plus_plus: `reinforce_pp`; gae: none, "
        "there is no critic"),
    Row("algorithm.use_kl_in_reward", "trainer.kl_reward_coef", "0: off"),
    Row("algorithm.kl_ctrl.kl_coef", "trainer.kl_reward_coef"),
    Row("algorithm.rollout_correction.*", "trainer.correction, trainer.correction_cap, trainer.masks"),
    Row("algorithm.filter_groups.*", "scheduler.policies.filter", "`zero-variance`"),
    Row("data.train_files", "data.path"),
    Row("data.val_files", "data.validation_path"),
    Row("data.prompt_key", "data.prompt_field"),
    Row("data.train_batch_size", "scheduler.train_batch_size"),
    Row("data.gen_batch_size", "", "groups start one by one"),
    Row("data.max_prompt_length", "data.max_prompt_tokens"),
    Row("data.max_response_length", "rollout.max_tokens"),
    Row("data.filter_overlong_prompts", "data.overlong", "`drop`"),
    Row("data.truncation", "data.overlong", "error: `error`; left: `truncate`"),
    Row("data.shuffle", "data.shuffle"),
    Row("data.seed", "run.seed"),
    Row("data.return_raw_chat", "", "messages are used as they are"),
    Row("actor_rollout_ref.hybrid_engine", "pools", "False: no pool with both tasks; True: one pool"),
    Row("actor_rollout_ref.model.path", "model.path"),
    Row("actor_rollout_ref.model.use_remove_padding", "trainer.packing"),
    Row("actor_rollout_ref.model.enable_gradient_checkpointing", "trainer.activation_checkpointing"),
    Row("actor_rollout_ref.model.lora_rank", "trainer.lora.rank"),
    Row("actor_rollout_ref.model.lora_alpha", "trainer.lora.alpha"),
    Row("actor_rollout_ref.model.target_modules", "trainer.lora.target_modules"),
    Row("actor_rollout_ref.model.override_config.*", "", "change the model's config.json"),
    Row("actor_rollout_ref.actor.strategy", "trainer.ranks", "FSDP2 whenever there are several ranks"),
    Row("actor_rollout_ref.actor.optim.lr", "trainer.learning_rate"),
    Row("actor_rollout_ref.actor.optim.lr_warmup_steps", "trainer.lr_warmup_steps"),
    Row("actor_rollout_ref.actor.optim.weight_decay", "trainer.weight_decay"),
    Row("actor_rollout_ref.actor.ppo_mini_batch_size", "scheduler.policy_mini_batch_size"),
    Row("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "trainer.micro_batch_tokens", MEMORY_NOTE),
    Row("actor_rollout_ref.actor.use_dynamic_bsz", "", "passes always have as many trajectories as fit"),
    Row("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "trainer.micro_batch_tokens"),
    Row("actor_rollout_ref.actor.ppo_epochs", "trainer.epochs_per_batch"),
    Row("actor_rollout_ref.actor.use_kl_loss", "trainer.kl_loss_coef", "0: off"),
    Row("actor_rollout_ref.actor.kl_loss_coef", "trainer.kl_loss_coef"),
    Row("actor_rollout_ref.actor.kl_loss_type", "trainer.kl_loss", "kl: `k1`; mse: `k2`; low_var_kl: `k3`"),
    Row("actor_rollout_ref.actor.entropy_coeff", "trainer.entropy_coef"),
    Row("actor_rollout_ref.actor.grad_clip", "trainer.max_grad_norm"),
    Row("actor_rollout_ref.actor.clip_ratio", "trainer.clip_low, trainer.clip_high"),
    Row("actor_rollout_ref.actor.clip_ratio_low", "trainer.clip_low"),
    Row("actor_rollout_ref.actor.clip_ratio_high", "trainer.clip_high"),
    Row("actor_rollout_ref.actor.clip_ratio_c", "trainer.clip_dual"),
    Row("actor_rollout_ref.actor.loss_agg_mode", "trainer.aggregation", "token-mean: `token_mean`; "
        "seq-mean-token-mean: `sequence_mean`; seq-mean-token-sum-norm: `constant`"),
    Row("actor_rollout_ref.actor.policy_loss.loss_mode", "trainer.loss", "vanilla: `ppo_clip`; gspo, cispo; others: a "
        "[function](../OBJECTIVES.md#your-own-objective)"),
    Row("actor_rollout_ref.actor.ulysses_sequence_parallel_size", "", "a trajectory is computed on one rank"),
    Row("actor_rollout_ref.actor.fsdp_config.param_offload", "trainer.cpu_offload"),
    Row("actor_rollout_ref.actor.fsdp_config.optimizer_offload", "trainer.cpu_offload"),
    Row("actor_rollout_ref.actor.fsdp_config.fsdp_size", "trainer.ranks"),
    Row("actor_rollout_ref.rollout.name", "rollout.backend", "vllm; sglang: a server with `rollout.backend: openai`"),
    Row("actor_rollout_ref.rollout.n", "scheduler.samples_per_prompt"),
    Row("actor_rollout_ref.rollout.temperature", "rollout.temperature"),
    Row("actor_rollout_ref.rollout.top_p", "rollout.top_p", "below 1 only with `rollout.allow_truncated_sampling`"),
    Row("actor_rollout_ref.rollout.top_k", "", "training with truncated sampling biases the importance ratio"),
    Row("actor_rollout_ref.rollout.val_kwargs.*", "validation.greedy, validation.sets", "`samples` of a set"),
    Row("actor_rollout_ref.rollout.tensor_model_parallel_size", "rollout.engine_args", "`tensor_parallel_size`"),
    Row("actor_rollout_ref.rollout.gpu_memory_utilization", "rollout.engine_args", "`gpu_memory_utilization`"),
    Row("actor_rollout_ref.rollout.enable_chunked_prefill", "rollout.engine_args", "`enable_chunked_prefill`"),
    Row("actor_rollout_ref.rollout.max_num_batched_tokens", "rollout.engine_args", "`max_num_batched_tokens`"),
    Row("actor_rollout_ref.rollout.enforce_eager", "rollout.engine_args", "`enforce_eager`"),
    Row("actor_rollout_ref.rollout.load_format", "", "vLLM loads the model's files"),
    Row("actor_rollout_ref.rollout.layered_summon", "", "weights are gathered tensor by tensor"),
    Row("actor_rollout_ref.rollout.calculate_log_probs", "", "behavior log-probs always come from the sampler"),
    Row("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", "trainer.micro_batch_tokens", MEMORY_NOTE),
    Row("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz", "", "as `use_dynamic_bsz`"),
    Row("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu", "trainer.micro_batch_tokens"),
    Row("actor_rollout_ref.rollout.multi_turn.*", "environment.class_name, environment.max_turns"),
    Row("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "trainer.micro_batch_tokens", MEMORY_NOTE),
    Row("actor_rollout_ref.ref.log_prob_use_dynamic_bsz", "", "as `use_dynamic_bsz`"),
    Row("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", "trainer.micro_batch_tokens"),
    Row("actor_rollout_ref.ref.fsdp_config.param_offload", "pools", "a pool for `ref_logprobs` gives it its own GPUs"),
    Row("actor_rollout_ref.ref.ulysses_sequence_parallel_size", "", "a trajectory is computed on one rank"),
    Row("critic.*", "", "there is no critic"),
    Row("reward_model.reward_manager", "reward.function", "dapo: the `overlong_*` fields of `trainer`"),
    Row("reward_model.reward_kwargs.overlong_buffer_cfg.enable", "trainer.overlong_cache_tokens", "0: off"),
    Row("reward_model.reward_kwargs.overlong_buffer_cfg.len", "trainer.overlong_cache_tokens"),
    Row("reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor", "trainer.overlong_penalty"),
    Row("reward_model.reward_kwargs.overlong_buffer_cfg.log", "", "`overlong_share` is always reported"),
    Row("reward_model.reward_kwargs.max_resp_len", "trainer.overlong_max_tokens", "default: `rollout.max_tokens`"),
    Row("custom_reward_function.path", "reward.function"),
    Row("custom_reward_function.name", "reward.function"),
    Row("trainer.critic_warmup", "", "there is no critic"),
    Row("trainer.val_before_train", "validation.at_start"),
    Row("trainer.test_freq", "validation.every"),
    Row("trainer.save_freq", "trainer.checkpoint_every", "-1: 0"),
    Row("trainer.max_actor_ckpt_to_keep", "trainer.keep_checkpoints"),
    Row("trainer.default_local_dir", "run.dir", DIRECTORY_NOTE),
    Row("trainer.resume_mode", "engine resume", "auto: start again with this command"),
    Row("trainer.total_epochs", "run.epochs"),
    Row("trainer.total_training_steps", "run.max_steps"),
    Row("trainer.logger", TRACKERS),
    Row("trainer.project_name", "metrics.sinks.wandb.project"),
    Row("trainer.experiment_name", "run.name"),
    Row("trainer.nnodes", "trainer.ranks", "ranks are on one machine"),
    Row("trainer.n_gpus_per_node", "trainer.ranks"),
    Row("rollout.nnodes", "rollout.replicas"),
    Row("rollout.n_gpus_per_node", "rollout.replicas, rollout.gpus"),
    Row("async_training.*", "scheduler.async_ratio, scheduler.sync_every, rollout.sync_mode",
        "see [verl, fully asynchronous](../MODES.md#verl-fully-asynchronous)"),
)  # fmt: skip

SKYRL = (
    Row("data.train_data", "data.path"),
    Row("data.val_data", "data.validation_path"),
    Row("trainer.fully_async.max_staleness_steps", "scheduler.max_staleness_steps"),
    Row("trainer.fully_async.num_parallel_generation_workers", "scheduler.max_concurrent_groups"),
    Row("trainer.fully_async.*", "", "see [SkyRL](../MODES.md#skyrl)"),
    Row("trainer.algorithm.advantage_estimator", "trainer.advantage", "grpo, rloo; reinforce++: `reinforce_pp`; gae: "
        "none, there is no critic"),
    Row("trainer.algorithm.policy_loss_type", "trainer.loss", "regular: `ppo_clip`; dual_clip: `trainer.clip_dual`; "
        "gspo, cispo; others: a [function](../OBJECTIVES.md#your-own-objective)"),
    Row("trainer.algorithm.loss_reduction", "trainer.aggregation", "token_mean, sequence_mean; "
        "seq_mean_token_sum_norm: `constant`"),
    Row("trainer.algorithm.eps_clip_low", "trainer.clip_low"),
    Row("trainer.algorithm.eps_clip_high", "trainer.clip_high"),
    Row("trainer.algorithm.use_kl_loss", "trainer.kl_loss_coef", "0: off"),
    Row("trainer.algorithm.kl_loss_coef", "trainer.kl_loss_coef"),
    Row("trainer.algorithm.use_kl_in_reward", "trainer.kl_reward_coef", "0: off"),
    Row("trainer.algorithm.use_entropy_loss", "trainer.entropy_coef", "0: off"),
    Row("trainer.algorithm.entropy_loss_coef", "trainer.entropy_coef"),
    Row("trainer.algorithm.off_policy_correction.tis_ratio_type", "trainer.correction", "token: `token_tis`; sequence: "
        "`sequence_tis`"),
    Row("trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high", "trainer.correction_cap"),
    Row("trainer.algorithm.dynamic_sampling.*", "scheduler.policies.filter", "`zero-variance`"),
    Row("trainer.policy.model.path", "model.path"),
    Row("trainer.policy.model.lora.rank", "trainer.lora.rank"),
    Row("trainer.policy.model.lora.alpha", "trainer.lora.alpha"),
    Row("trainer.policy.optimizer_config.lr", "trainer.learning_rate"),
    Row("trainer.policy.optimizer_config.weight_decay", "trainer.weight_decay"),
    Row("trainer.policy.optimizer_config.max_grad_norm", "trainer.max_grad_norm"),
    Row("trainer.policy.optimizer_config.num_warmup_steps", "trainer.lr_warmup_steps"),
    Row("trainer.placement.colocate_all", "pools", "false: no pool with both tasks"),
    Row("trainer.strategy", "trainer.ranks", "FSDP2 whenever there are several ranks; Megatron: none"),
    Row("trainer.placement.policy_num_gpus_per_node", "trainer.ranks"),
    Row("trainer.placement.critic_num_gpus_per_node", "", "there is no critic"),
    Row("trainer.placement.ref_num_gpus_per_node", "pools", "a pool for `ref_logprobs`"),
    Row("trainer.epochs", "run.epochs"),
    Row("trainer.train_batch_size", "scheduler.train_batch_size"),
    Row("trainer.policy_mini_batch_size", "scheduler.policy_mini_batch_size"),
    Row("trainer.update_epochs_per_batch", "trainer.epochs_per_batch"),
    Row("trainer.micro_forward_batch_size_per_gpu", "trainer.micro_batch_tokens", MEMORY_NOTE),
    Row("trainer.micro_train_batch_size_per_gpu", "trainer.micro_batch_tokens", MEMORY_NOTE),
    Row("trainer.eval_batch_size", "", "validation rows fill free slots"),
    Row("trainer.eval_before_train", "validation.at_start"),
    Row("trainer.eval_interval", "validation.every"),
    Row("trainer.ckpt_interval", "trainer.checkpoint_every"),
    Row("trainer.max_ckpts_to_keep", "trainer.keep_checkpoints"),
    Row("trainer.ckpt_path", "run.dir", DIRECTORY_NOTE),
    Row("trainer.resume_mode", "engine resume"),
    Row("trainer.max_prompt_length", "data.max_prompt_tokens"),
    Row("trainer.logger", TRACKERS),
    Row("trainer.project_name", "metrics.sinks.wandb.project"),
    Row("trainer.run_name", "run.name"),
    Row("generator.n_samples_per_prompt", "scheduler.samples_per_prompt"),
    Row("generator.batched", "", "groups start one by one"),
    Row("generator.max_turns", "environment.max_turns"),
    Row("generator.sampling_params.max_generate_length", "rollout.max_tokens"),
    Row("generator.sampling_params.temperature", "rollout.temperature"),
    Row("generator.sampling_params.top_p", "rollout.top_p"),
    Row("generator.eval_n_samples_per_prompt", "validation.sets", "`samples` of a set"),
    Row("generator.inference_engine.num_engines", "rollout.replicas"),
    Row("generator.inference_engine.tensor_parallel_size", "rollout.engine_args", "`tensor_parallel_size`"),
    Row("generator.inference_engine.backend", "rollout.backend", "vllm"),
    Row("generator.inference_engine.run_engines_locally", "rollout.backend", "false: `openai`, with `rollout.urls`"),
    Row("generator.inference_engine.weight_sync_backend", "rollout.transport, rollout.transport_backend"),
    Row("generator.inference_engine.async_engine", "", "always"),
    Row("generator.inference_engine.gpu_memory_utilization", "rollout.engine_args", "`gpu_memory_utilization`"),
    Row("generator.inference_engine.enforce_eager", "rollout.engine_args", "`enforce_eager`"),
    Row("generator.inference_engine.enable_ray_prometheus_stats", "metrics.port", "always served"),
    Row("environment.env_class", "environment.class_name, reward.function", "a task of one turn needs only a reward; "
        "environments of SkyRL-Gym: [adapter](../ENVIRONMENTS.md#skyrl-gym)"),
)  # fmt: skip

PRIME_RL = (
    Row("max_steps", "run.max_steps"),
    Row("seq_len", "rollout.context", "the trainer packs whole trajectories, so it needs no length"),
    Row("model.name", "model.path"),
    Row("deployment.num_train_gpus", "trainer.ranks"),
    Row("deployment.num_infer_gpus", "rollout.replicas, rollout.gpus"),
    Row("wandb.project", "metrics.sinks.wandb.project"),
    Row("wandb.name", "run.name"),
    Row("ckpt.interval", "trainer.checkpoint_every"),
    Row("ckpt.keep_last", "trainer.keep_checkpoints"),
    Row("ckpt.resume_step", "engine resume"),
    Row("max_off_policy_steps", "scheduler.max_staleness_steps", "prime-rl drops rollouts beyond it; here a step waits "
        "for them"),
    Row("orchestrator.batch_size", "scheduler.train_batch_size", "counted in prompts: batch_size / group_size"),
    Row("orchestrator.group_size", "scheduler.samples_per_prompt"),
    Row("orchestrator.rollouts_per_example", "scheduler.samples_per_prompt"),
    Row("orchestrator.seq_len", "rollout.context"),
    Row("orchestrator.train.sampling.max_completion_tokens", "rollout.max_tokens"),
    Row("orchestrator.train.sampling.temperature", "rollout.temperature"),
    Row("orchestrator.train.env", "agent.function", "each environment as an agent, with its rows in a file: "
        "[verifiers](../ENVIRONMENTS.md#verifiers); several environments: `data.sources`"),
    Row("orchestrator.renderer.*", "data.chat, data.chat_template_kwargs", "the chat template of the tokenizer"),
    Row("orchestrator.eval.*", "validation.every, validation.sets"),
    Row("trainer.optim.lr", "trainer.learning_rate"),
    Row("trainer.optim.weight_decay", "trainer.weight_decay"),
    Row("trainer.optim.max_norm", "trainer.max_grad_norm"),
    Row("trainer.scheduler.*", "trainer.lr_schedule, trainer.lr_warmup_steps"),
    Row("trainer.model.lora.rank", "trainer.lora.rank"),
    Row("trainer.model.lora.alpha", "trainer.lora.alpha"),
    Row("trainer.model.lora.dropout", "trainer.lora.dropout", "must be 0"),
    Row("trainer.model.lora.target_modules", "trainer.lora.target_modules"),
    Row("trainer.model.ac.*", "trainer.activation_checkpointing"),
    Row("trainer.model.seq_len", "", "as `seq_len`"),
    Row("trainer.loss.*", "trainer.loss, trainer.masks", "also as a [function](../OBJECTIVES.md#your-own-objective)"),
    Row("inference.model.max_model_len", "rollout.context"),
    Row("inference.model.tool_call_parser", "agent.tool_parser"),
    Row("inference.parallel.*", "rollout.engine_args", "`tensor_parallel_size`, `data_parallel_size`"),
)  # fmt: skip

AREAL = (
    Row("experiment_name", "run.name"),
    Row("trial_name", "run.name"),
    Row("seed", "run.seed"),
    Row("enable_offload", "pools", "in one pool, replicas sleep and the trainer leaves the GPU by turns"),
    Row("total_train_epochs", "run.epochs"),
    Row("total_train_steps", "run.max_steps"),
    Row("tokenizer_path", "", "the tokenizer is beside the model"),
    Row("cluster.*", "cluster.address", "Ray knows the nodes and GPUs"),
    Row("allocation_mode", "rollout.replicas, rollout.engine_args, trainer.ranks", "vllm:d4+d4: 4 of each"),
    Row("scheduler.type", "", "Ray starts the processes"),
    Row("rollout.max_concurrent_rollouts", "scheduler.max_concurrent_groups", "counted in groups in both"),
    Row("rollout.queue_size", "", "S bounds the number of ready groups"),
    Row("rollout.consumer_batch_size", "scheduler.train_batch_size"),
    Row("rollout.max_head_offpolicyness", "scheduler.max_staleness_steps"),
    Row("rollout.enable_rollout_tracing", "engine replay", "always recorded"),
    Row("rollout.dump_to_file", "samples.per_step"),
    Row("rollout.scheduling_spec", "rollout.gpus"),
    Row("gconfig.n_samples", "scheduler.samples_per_prompt"),
    Row("gconfig.min_new_tokens", "", "the behavior log-probs would not be those of the policy"),
    Row("gconfig.max_new_tokens", "rollout.max_tokens"),
    Row("gconfig.greedy", "validation.greedy", "training samples; validation may be greedy"),
    Row("gconfig.temperature", "rollout.temperature"),
    Row("gconfig.top_p", "rollout.top_p"),
    Row("gconfig.top_k", "", "training with truncated sampling biases the importance ratio"),
    Row("actor.path", "model.path"),
    Row("actor.init_from_scratch", "model.make", "only for the made models"),
    Row("actor.disable_dropout", "", "the model is always in evaluation mode"),
    Row("actor.gradient_checkpointing", "trainer.activation_checkpointing"),
    Row("actor.dtype", "trainer.bf16", "weights are trained in float32 and computed in bfloat16"),
    Row("actor.mb_spec.max_tokens_per_mb", "trainer.micro_batch_tokens"),
    Row("actor.optimizer.type", "", "AdamW"),
    Row("actor.optimizer.lr", "trainer.learning_rate"),
    Row("actor.optimizer.weight_decay", "trainer.weight_decay"),
    Row("actor.optimizer.beta1", "trainer.betas"),
    Row("actor.optimizer.beta2", "trainer.betas"),
    Row("actor.optimizer.eps", "trainer.adam_eps"),
    Row("actor.optimizer.lr_scheduler_type", "trainer.lr_schedule"),
    Row("actor.optimizer.gradient_clipping", "trainer.max_grad_norm"),
    Row("actor.optimizer.warmup_steps_proportion", "trainer.lr_warmup_steps", "in optimizer steps"),
    Row("actor.group_size", "scheduler.samples_per_prompt"),
    Row("actor.eps_clip", "trainer.clip_low, trainer.clip_high"),
    Row("actor.eps_clip_higher", "trainer.clip_high"),
    Row("actor.c_clip", "trainer.clip_dual"),
    Row("actor.reward_scaling", "reward.functions", "`weight`"),
    Row("actor.reward_bias", "", "advantages subtract a baseline, so a constant has no effect"),
    Row("actor.kl_ctl", "trainer.kl_reward_coef"),
    Row("actor.ppo_n_minibatches", "scheduler.policy_mini_batch_size", "B / n"),
    Row("actor.recompute_logprob", "trainer.old_policy", "`proximal`"),
    Row("actor.use_decoupled_loss", "trainer.loss", "`decoupled_ppo`"),
    Row("actor.behav_imp_weight_cap", "trainer.correction, trainer.correction_cap"),
    Row("actor.behave_imp_weight_cap", "trainer.correction, trainer.correction_cap"),
    Row("actor.reward_norm.*", "trainer.advantage", "group: `grpo`, and without std `dr_grpo`"),
    Row("actor.adv_norm.*", "trainer.advantage", "batch: `reinforce_pp_baseline`; after a norm by group: a "
        "[function](../OBJECTIVES.md#your-own-objective)"),
    Row("actor.weight_update_mode", "rollout.transport"),
    Row("actor.max_new_tokens", "rollout.max_tokens"),
    Row("actor.scheduling_spec", "trainer.gpus_per_rank"),
    Row("ref.*", "trainer.reference_path", "needed only with a KL term"),
    Row("sglang.*", "", "a server with `rollout.backend: openai`, or `vllm`"),
    Row("vllm.model", "model.path"),
    Row("vllm.*", "rollout.engine_args", "`max_model_len`: `rollout.context`"),
    Row("train_dataset.path", "data.path"),
    Row("train_dataset.batch_size", "scheduler.train_batch_size"),
    Row("train_dataset.shuffle", "data.shuffle"),
    Row("train_dataset.max_length", "data.max_prompt_tokens"),
    Row("train_dataset.type", "", "the columns say it"),
    Row("train_dataset.pin_memory", "", "prompts stay texts"),
    Row("train_dataset.num_workers", "", "prompts stay texts"),
    Row("valid_dataset.path", "data.validation_path"),
    Row("valid_dataset.*", "", "validation rows fill free slots"),
    Row("saver.*", "trainer.checkpoint_every", "in train steps"),
    Row("recover.*", "engine resume, durability.snapshot_every", "every run can be resumed"),
    Row("evaluator.*", "validation.every", "in train steps"),
    Row("stats_logger.*", TRACKERS),
    Row("perf_tracer.*", "engine timeline", "from the record of any run"),
)  # fmt: skip

SYSTEMS: dict[str, tuple[Row, ...]] = {
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
    system, row = next(found, ("", Row("", "")))
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
