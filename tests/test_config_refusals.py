"""What a configuration is refused for: the field that is named, and what is said of it.

A row is a configuration in YAML, the field, and words of the message; `…` stands for other words. A configuration
without a model makes its own. Refusals that need files, packages or devices are in the other files of their section.
"""

from pathlib import Path

import pytest
import yaml

from engine.config import load_config
from engine.errors import ConfigError

SHORT = {
    "SOURCES": "MINE, data: {sources: [{name: math, path: a}, {name: code, path: b}]",
    "MATH": "MINE, data: {sources: [{name: math, path: a}",
    "MINE": "model: {path: m}, reward: {function: mine:score}",
    "OWN": "DATA, reward: {function: mine:score}",
    "DATA": "model: {path: m}, data: {path: d}",
    "SERVED": "backend: openai, urls: [http://a:1, http://b:1/v1], weights_dir: /w",
    "SGLANG": "backend: sglang, urls: [http://a:1], weights_dir: /w",
    "SETS": "sets: [{name: a}, {name: b, path: b.jsonl, samples_per_prompt: 4, k: [1, 4], prompts: 9}]",
}
ROWS = r"""
# keys
scheduler: {max_stalenes_steps: 3} | scheduler.max_stalenes_steps | did you mean scheduler.max_staleness_steps?
scheduler: {policies: {admision: x}} | scheduler.policies.admision | did you mean scheduler.policies.admission?
scheduler: {learning_rate: 3} | scheduler.learning_rate | did you mean trainer.learning_rate?
trainer: {gpus: 1} | trainer.gpus | did you mean trainer.gpus_per_rank?
schduler: {a: 3} | schduler | did you mean scheduler?
metrics: {zzzzzz: 3} | metrics.zzzzzz | use one of host, hosts, port
# values
scheduler: {train_batch_size: x} | scheduler.train_batch_size | a whole number, at least 1
scheduler: {train_batch_size: 1.5} | scheduler.train_batch_size | a whole number
scheduler: {train_batch_size: 0} | scheduler.train_batch_size | at least 1
run: {seed: true} | run.seed | a whole number
trainer: {learning_rate: .nan} | trainer.learning_rate | a number, above 0
trainer: {learning_rate: .inf} | trainer.learning_rate | a number, above 0
trainer: {loss: ppo} | trainer.loss | one of ppo_clip, decoupled_ppo
trainer: {lr_schedule: linear} | trainer.lr_total_steps | above trainer.lr_warmup_steps
rollout: {sync_mode: drop} | rollout.sync_mode | one of keep, abort, wait
rollout: {stop: [1]} | rollout.stop.0 | text
rollout: {temperature: 0} | rollout.temperature | above 0
rollout: {device: gpu} | rollout.device | auto, cpu, cuda or cuda:N
rollout: 3 | rollout | a section with the keys backend,
trainer: {betas: [0.9]} | trainer.betas | is [0.9], but must be a list of 2 numbers (AdamW's decay rates, each
trainer: {betas: [a, b]} | trainer.betas | 'b'], but must be a list of 2 numbers (AdamW's decay rates, each in
trainer: {betas: [0.9, 1, 1]} | trainer.betas | must be a list of 2 numbers (AdamW's decay rates, each in [0, 1)
trainer: {betas: [0.9, 1]} | trainer.betas | must each be in [0, 1); for example (0.9, 0.999)
data: {shuffle: 'yes'} | data.shuffle | true or false
reward: {function: foo} | reward.function | module:function
run: {name: ../up} | run.name | text
model: {arithmetic: none} | model.arithmetic | a section
model: {path: m, make: arithmetic} | model.path | exactly one of model.path and model.make
model: {make: null} | model.path | exactly one of model.path and model.make
run: {epochs: null} | run.epochs | the run would never end
rollout: {context: 256} | rollout.context | more than 256
rollout: {context: 300, backend: vllm} | rollout.context | is 300: only the torch backend uses it
rollout: {top_p: 0.9} | rollout.top_p | is 0.9: truncates sampling … allow_truncated_sampling: true
# the whole law of a value
data: {path: []} | data.path | is [], but must be text … or a list of at least 1 and at most 10000 … a list of these)
data: {sources: [{name: A b, path: a}]}
    | data.sources.0.name | name is 'A b', but must be text, at most 64 long, that matches ^[
data: {curriculum: {stages: [{weights: {a: .nan}}]}}
    | data.curriculum.stages.0.weights.a | stages.0.weights.a is nan, but must be a number, at least 0
run: {max_steps: x, silence_s: y} | run.max_steps | until the data ends); also wrong: run.silence_s
trainer: {device: gpu} | trainer.device | device is 'gpu', but must be auto, cpu, cuda or cuda:N (
rollout: {device: null} | rollout.device | device is null, but must be auto, cpu, cuda or cuda:N (
agent: {function: mine} | agent.function | function is 'mine', but must be module:name or null (
model: {path: m}, reward: {function: bugs.typo}
    | reward.function | is 'bugs.typo', but must be module:name … ; did you mean bugs:typo?
model: {path: m}, reward: {function: ./bugs.py:typo}
    | reward.function | function is './bugs.py:typo', … ; did you mean bugs:typo?
data: {chat: 'on'} | data.chat | chat is 'on', but must be auto or never
trainer: {bf16: 'yes'} | trainer.bf16 | bf16 is 'yes', but must be one of auto, on, off (
data: {curriculum: {stages: []}}
    | data.curriculum.stages | stages is [], but must be a list of at least 1 and at most 1000, each a section
# distillation
trainer: {advantage: distillation} | trainer.reference_path | distillation needs a teacher
trainer: {advantage: distillation, reference_path: t}, scheduler: {policies: {filter: zero-variance}}
    | scheduler.policies.filter | none
trainer: {advantage: distillation, reference_path: t, kl_reward_coef: 0.1}, scheduler: {policies: {filter: none}}
    | trainer.kl_reward_coef | 0
# router replay
rollout: {backend: vllm}, trainer: {compile: true, router_replay: true}
    | trainer.router_replay | compiled layers do not take the experts
rollout: {SERVED}, trainer: {router_replay: true} | trainer.router_replay | rollout.backend openai does not say which
# rewards
DATA, reward: {functions: [{name: one, function: mine:score}], function: mine:score}
    | reward.function | together with reward.functions
DATA, reward: {functions: [{name: one, function: mine:score}, {name: one, function: mine:again}]}
    | reward.functions.1.name | must be unique
DATA, reward: {functions: [{name: mean, function: mine:score}]} | reward.functions.0.name | reward_mean is a metric
DATA, reward: {functions: [{name: Two words, function: mine:score}]} | reward.functions.0.name | text
DATA, reward: {functions: [{name: one, function: mine:score, weight: 0}]} | reward.functions.0.weight | must not be 0
DATA, reward: {functions: [{name: one, function: mine:score, weight: .nan}]} | reward.functions.0.weight | a number
DATA, reward: {functions: [{name: one, function: mine}]} | reward.functions.0.function | module:function
DATA, reward: {functions: [{name: one, function: mine:score, wieght: 1}]} | reward.functions.0.wieght | weight
DATA, reward: {functions: []} | reward.function | required with model.path
# sources of data
MATH, {name: code, path: b, weight: 0}]} | data.sources.1.weight | is 0, but must be a number, above 0
MATH, {name: code, path: b, weight: -1.0}]} | data.sources.1.weight | is -1.0, but must be a number
MATH, {name: code, path: b, weight: .nan}]} | data.sources.1.weight | is nan, but must be a number
MATH, {name: code, path: b, weight: 2}]} | data.sources.0.weight | is not set … 'math' has no weight, but … 'code'
MATH, {name: math, path: b}]} | data.sources.1.name | is 'math', but must be unique
MATH, {name: code, path: b, pass_rate: {column: rate}}]} | data.sources.1.pass_rate | min and max are both null
MATH, {name: code, path: b, pass_rate: {min: 1, max: 0}}]}
    | data.sources.1.pass_rate.min | is 1 … must be at most max = 0
MATH, {name: code, path: b, columns: {a: prompt, b: prompt}}]}
    | data.sources.1.columns | gives two columns the name 'prompt'
MATH, {name: code, path: b, wieght: 1}]} | data.sources.1.wieght | unknown key
SOURCES, path: a} | data.path | cannot be set together with data.sources
SOURCES, curriculum: {stages: [{weights: {maths: 1}}]}}
    | data.curriculum.stages.0.weights | 'maths' is not the name of a source; use one of math, code; did you mean math?
SOURCES, curriculum: {stages: [{weights: {math: 0}}]}} | data.curriculum.stages.0.weights | are all 0
SOURCES, curriculum: {stages: [{weights: {math: 1}}, {weights: {code: 1}}]}}
    | data.curriculum.stages.0.until | is not set: is required: only the last stage has no end; set it to a number of
SOURCES, curriculum: {stages: [{weights: {math: 1}, until: 3}]}}
    | data.curriculum.stages.0.until | is 3 … must be null
SOURCES, curriculum: {stages: [{weights: {math: 1}, until: 3}, {weights: {code: 1}, until: 3}, {weights: {math: 1}}]}}
    | data.curriculum.stages.1.until | is 3 … must be a whole number of train steps above 3
MINE, data: {sources: [{name: math, path: a, weight: 1}], curriculum: {stages: [{weights: {math: 1}}]}}
    | data.sources.0.weight | curriculum
OWN, data: {path: d, curriculum: {stages: [{weights: {math: 1}}]}} | data.curriculum | needs data.sour
# chat templates
MINE, data: {path: d, chat: never, system_prompt: a}
    | data.system_prompt | needs the chat template … use data.chat: auto
MINE, data: {path: d, chat: never, chat_template_kwargs: {a: 1}}
    | data.chat_template_kwargs | needs the chat template
MINE, data: {path: d, chat_template_kwargs: {tools: []}}
    | data.chat_template_kwargs | 'tools' is set by the engine … column tools
# environments and made models
DATA, environment: {class_name: a:B}, agent: {rollout: a:play} | environment.class_name | agent.rollout is set too
DATA, environment: {class_name: a:B, max_turns: 0} | environment.max_turns | is 0, but must be a whole number
DATA, environment: {class_name: a:B, timeout_s: 0} | environment.timeout_s | is 0
model: {make: lookup} | environment.class_name | engine.environments.lookup:Lookup
model: {make: lookup, lookup: {haste: 0.9}} | model.lookup.haste | is 0.9, but must be at most 0.85
data: {path: a} | data.path | model.make arithmetic builds its own model, data and reward
data: {validation_path: a} | data.validation_path | builds its own model, data and reward
data: {system_prompt: a} | data.system_prompt | builds its own model, data and reward
reward: {function: a:b} | reward.function | builds its own model, data and reward
reward: {functions: [{name: a, function: a:b}]} | reward.functions | builds its own model, data and reward
# masks of the loss
trainer: {masks: 3}
    | trainer.masks | must be a list of at most 12, each a section with the keys measure, arguments, low, high
trainer: {masks: [{measure: token_ratio, hi: 2}]}
    | trainer.masks.0.hi | unknown key; trainer.masks.0 must be a section with the keys measure, arguments, low
trainer: {masks: [{measure: token_ratio, low: 2}]} | trainer.masks.low | use 0.5
trainer: {masks: [{measure: ratio, low: 0.5}]} | trainer.masks.measure | one of token_ratio
# laws of the scheduler
scheduler: {train_batch_size: 8, max_concurrent_groups: 7} | scheduler.max_concurrent_groups | from 8 to 16
scheduler: {train_batch_size: 8, max_concurrent_groups: 17} | scheduler.max_concurrent_groups | from 8 to 16
scheduler: {train_batch_size: 8, policy_mini_batch_size: 3} | scheduler.policy_mini_batch_size | use 2
scheduler: {train_batch_size: 8, policy_mini_batch_size: 16} | scheduler.policy_mini_batch_size | use 8
scheduler: {max_staleness_steps: 1, sync_every: 3} | scheduler.max_staleness_steps | 2
scheduler: {samples_per_prompt: 1} | scheduler.samples_per_prompt | use 2 or more
# vLLM
rollout: {backend: vllm, engine_args: {model: x}} | rollout.engine_args.model | the engine sets it
rollout: {backend: torch, engine_args: {dtype: float32}} | rollout.engine_args | rollout.backend: vllm
rollout: {backend: torch, transport: vllm} | rollout.transport | use distributed
rollout: {backend: vllm, engine_args: {weight_transfer_config: {}}}
    | rollout.engine_args.weight_transfer_config | rollout.transport: vllm
rollout: {backend: vllm, engine_args: {tensor_parallel_size: '2'}}
    | rollout.engine_args.tensor_parallel_size | whole number
rollout: {backend: vllm, gpus: 2, engine_args: {tensor_parallel_size: 4}} | rollout.gpus | use 4
rollout: {gpus: 1.5} | rollout.gpus | use 1
rollout: {backend: vllm, install_timeout_s: 0.0} | rollout.install_timeout_s | above 0
rollout: {backend: vllm, bucket_mb: 0} | rollout.bucket_mb | at least 1
rollout: {backend: torch, check_weights: always} | rollout.check_weights | only the vllm backend checks
# servers by URL
rollout: {backend: openai, urls: [], weights_dir: /w} | rollout.urls | http://127.0.0.1:8000
rollout: {backend: openai, urls: [http://a:1, http://a:1/v1/], weights_dir: /w} | rollout.urls | every server once
rollout: {backend: openai, urls: [a:1], weights_dir: /w} | rollout.urls | http://127.0.0.1:8000
rollout: {SERVED, replicas: 3} | rollout.replicas | use 2
rollout: {backend: openai, urls: [http://a:1, http://b:1/v1], weights_dir: null}
    | rollout.weights_dir | under the same path
rollout: {backend: torch, urls: [http://a:1, http://b:1/v1], weights_dir: /w} | rollout.urls | rollout.backend: openai
rollout: {SERVED}, scheduler: {policies: {concurrency: kv-cache}}
    | scheduler.policies.concurrency | is 'kv-cache': rollout.backend openai does
rollout: {SGLANG, kv: keep} | rollout.kv | use recompute
rollout: {SGLANG, served_model_name: m} | rollout.served_model_name | renames it with each update
rollout: {SGLANG, top_p: 0.9, allow_truncated_sampling: true} | rollout.top_p | before top_p
rollout: {SGLANG, sync_mode: abort}, trainer: {lora: {}} | rollout.backend | does not load adapters
rollout: {SGLANG, urls: []} | rollout.urls | every server once
# pools
pools: [{tasks: [rolout]}, {tasks: [train]}] | pools.0.tasks | 'rolout' is not a task; … ; did you mean rollout
pools: [{tasks: [rollout]}, {tasks: [train, train]}] | pools.1.tasks | names a task twice … ['train']
pools: [{tasks: [rollout, train]}, {tasks: [train]}] | pools.1.tasks | train is in pools.0 already
pools: [{tasks: [rollout]}] | pools | train is in no pool
pools: [{tasks: [train]}] | pools | rollout is in no pool
pools: [{tasks: [rollout]}, {tasks: [train, reward]}] | pools.1.tasks | reward must share a pool with rollout
pools: [{tasks: [rollout]}, {tasks: [train, validation]}] | pools.1.tasks | validation must share a pool
pools: [{tasks: [rollout], share: 0.5}, {tasks: [train], share: 0.4}]
    | pools.share | add up to 1, not to 0.9 … 0.5556, 0.4444
pools: [{tasks: [rollout], share: 0.5}, {tasks: [train]}] | pools.1.share | give every pool a share
pools: [{tasks: [rollout]}, {tasks: [train], replicas: 2}] | pools.1.replicas | is 2: only a pool with rollout
pools: [{tasks: [rollout], replicas: 3}, {tasks: [train]}] | rollout.replicas | is 2 … add up to 3 … use 3
pools: [{tasks: [rollout]}, {tasks: [rollout, train]}] | pools.0.replicas | if 2 pools share … for example 1
pools: [{tasks: [rollout]}, {tasks: [train], slots: 4}] | pools.1.slots | is 4: only a pool with reward alone
pools: [{tasks: [rollout]}, {tasks: [train]}, {tasks: [validation]}], validation: {placement: shared}
    | validation.placement | is 'shared' … use own
pools: [{tasks: [rollout]}, {tasks: [train]}, {tasks: [validation], replicas: 2}], validation: {replicas: 3}
    | validation.replicas | is 3 … use 2
pools: [{tasks: [rollout]}, {tasks: [train]}, {tasks: [validation]}], validation: {at_start: false, at_end: false}
    | pools.2.tasks | never validates
pools: [{tasks: [rollout, train]}], scheduler: {train_after_sync: true}
    | scheduler.train_after_sync | is True … pool sleep … false
pools: [{tasks: [rollout]}, {tasks: [train]}, {tasks: [reward]}], DATA, agent: {rollout: agents:play}
    | pools.2.tasks | the agents or the environment compute the reward
pools: [{tasks: [rollout], size: 2}, {tasks: [train]}] | pools.0.size | unknown key
pools: [{share: 1.0}] | pools.0.tasks | required
# LoRA
trainer: {lora: {rank: 0}} | trainer.lora.rank | must be a whole number, at least 1
trainer: {lora: {alpha: 0}} | trainer.lora.alpha | must be a number, above 0
trainer: {lora: {dropout: 0.1}} | trainer.lora.dropout | with dropout, the sampler's log-probs differ
trainer: {lora: {target_modules: [3]}} | trainer.lora.target_modules.0 | is 3, but must be text
trainer: {lora: {target_modules: []}} | trainer.lora.target_modules | names no layer
trainer: {lora: {ranks: 4}} | trainer.lora.ranks | did you mean trainer.lora.rank?
trainer: {lora: 3} | trainer.lora | a section with the keys rank, alpha, target_modules, dropout
rollout: {backend: vllm, transport: vllm}, trainer: {lora: {}} | rollout.transport | is 'vllm': sends whole models
rollout: {backend: vllm, engine_args: {enable_lora: true}}, trainer: {lora: {}}
    | rollout.engine_args.enable_lora | trainer.lora sets it
rollout: {backend: vllm}, trainer: {lora: {rank: 513}} | trainer.lora.rank | highest rank that vLLM takes
rollout: {SERVED}, trainer: {lora: {}}
    | rollout.sync_mode | is 'keep': a request on a server ends with the adapter it began with
# validation
rollout: {replicas: 3}, validation: {replicas: 4} | validation.replicas | use 3
OWN, validation: {every: 2} | validation.every | or use 0
model: {path: m}, data: {path: d, validation_path: e}, reward: {}, validation: {at_start: true}
    | reward.function | set it
rollout: {SERVED}, validation: {placement: own} | validation.placement | use shared
validation: {conflict: wait} | validation.conflict | hold or cancel
validation: {every: -1} | validation.every | at least 0
validation: {sets: [{name: a}, {name: a}]} | validation.sets.1.name | another name
validation: {sets: [{name: accuracy}]} | validation.sets.0.name | another name
validation: {sets: [{name: A/B}]} | validation.sets.0.name | text
validation: {sets: [{name: a, k: [2]}]} | validation.sets.0.k | use at most 1
validation: {sets: [{name: a, samples_per_prompt: 3, k: [2, 2]}]} | validation.sets.0.k | name each once
validation: {sets: [{name: a, samples_per_prompt: 3, temperature: 0.0}]} | validation.sets.0.temperature | use 1.0
rollout: {context: 300}, validation: {sets: [{name: a, max_tokens: 300}]}
    | validation.sets.0.max_tokens | use at most 299
validation: {sets: [{name: a, answer: numbre}]} | validation.sets.0.answer | number
OWN, validation: {SETS} | validation.sets.0.path | set it to a file
trainer: {checkpoint_every: 5, keep_best: {metric: b/pass@3}}, validation: {every: 5, SETS}
    | trainer.keep_best.metric | did you mean b/pass@4?
trainer: {keep_best: {metric: x}, checkpoint_every: 0} | trainer.keep_best.metric | above
trainer: {checkpoint_every: 5, keep_best: {metric: b/pass@4}}, validation: {SETS} | validation.every | use 5
trainer: {checkpoint_every: 5, keep_best: {metric: b/pass@4}}, validation: {every: 7, SETS} | validation.every | use 5
agent: {function: my:agent}, rollout: {backend: vllm}, validation: {SETS} | validation.sets | the same sampling
"""


def rows() -> list[tuple[str, str, str]]:
    found = [line for line in ROWS.replace("\n    |", " |").strip().splitlines() if not line.startswith("#")]
    return [tuple(part.strip() for part in line.split(" |")) for line in found]  # type: ignore[misc]


@pytest.mark.parametrize(("given", "field", "words"), rows())
def test_a_configuration_is_refused_by_its_field_with_what_is_allowed(
    tmp_path: Path, given: str, field: str, words: str
) -> None:
    for name, text in SHORT.items():
        given = given.replace(name, text)
    tree = {"model": {"make": "arithmetic"}} | yaml.safe_load("{" + given + "}")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.yaml")
    assert caught.value.details["field"] == field
    said = str(caught.value)
    assert "pydantic" not in said.lower()
    for part in words.split(" … "):
        assert part in said, said
        said = said.partition(part)[2]
