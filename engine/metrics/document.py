"""Generates `docs/METRICS.md` from `names.py`: `python -m engine.metrics.document > docs/METRICS.md`.

A test fails if the page is out of date.
"""

from engine.metrics.names import METRICS, Metric

HEAD = """# Metrics

Every metric that a run exports to Prometheus, its name in other systems, and the fields of `metrics.jsonl`.
[MONITORING.md](MONITORING.md) shows how to set up Prometheus and Grafana.

A run serves its metrics on `http://127.0.0.1:PORT/metrics`. `metrics.port` sets the port; the default, 0, takes any
free port. The run prints the address and writes it to `endpoint.json` in its directory and to `runs/.endpoints/`, which
Prometheus reads as file-based service discovery.

A metric marked *run directory*, *Ray* or *data.sources* exists only in runs that use it. Values are read at each
scrape. No label contains the id of a group, step or version, so the number of series stays constant. Exemplars
(OpenMetrics; Prometheus with `--enable-feature=exemplar-storage`) carry the id of a group for `engine replay --group`.
This page is generated from `engine/metrics/names.py`: `python -m engine.metrics.document > docs/METRICS.md`.

| name | type | unit | labels | meaning |
|---|---|---|---|---|
"""

IDLE_SHARE = """\
    sum by (run) (rate(engine_rollout_idle_slot_seconds_total[1m]))
      / (
        sum by (run) (rate(engine_rollout_idle_slot_seconds_total[1m]))
          + sum by (run) (rate(engine_rollout_busy_slot_seconds_total[1m]))
      )
"""

OTHERS = f"""
## Names in other systems

| here | SkyRL | verl | vLLM |
|---|---|---|---|
| `engine_staleness_steps`, `engine_step_staleness_steps` | `async/staleness_{{mean,min,max}}` | | |
| `engine_staleness_steps` above 0 | `async/staleness_ratio` | `fully_async/count/stale_samples_processed` | |
| `engine_staleness_steps` above `engine_max_staleness_steps`: never | `async/staleness_violation_count` | | |
| `engine_groups_running` | | | `vllm:num_requests_running` |
| `engine_replica_slots` | | | `vllm:num_requests_running` |
| `engine_rollout_idle_slot_seconds_total` | | `fully_async/rollouter/idle_ratio` | |
| `engine_trainer_idle_seconds_total` | `timing/wait_for_generation_buffer` | `fully_async/trainer/idle_ratio` | |
| `engine_trainer_busy_seconds_total{{task="training"}}` | `timing/run_training` | | |
| `engine_step_phase_seconds` | `timing/step` | | |
| `engine_weight_sync_seconds` | `timing/sync_weights` | `timing_s/param_sync` | |
| `engine_transitions_total{{machine="group",to="aborted"}}` | | `fully_async/partial/total_partial_num` | |
| `engine_groups{{state="aborted"}}` | | `fully_async/partial/partial_ratio` | |
| `engine_groups_ended_total{{state="filtered"}}` | `async/keep_rate` | | |
| `engine_groups_ended_total{{state="dropped"}}` | | `fully_async/count/dropped_stale_samples` | |
| `engine_weights_version` | | `fully_async/count/current_param_version` | |
| `engine_tokens_generated_total` | | | `vllm:generation_tokens_total` |
| `engine_validation_seconds` | `timing/eval` | | |
| `engine_trainer_figure` | what the trainer logs | what the actor logs | |

Example: the idle share of slot time in the last minute, by run:

{IDLE_SHARE}
## metrics.jsonl

One line of JSON for each train step, and one for each validation that ended. Numbers that are not finite become null.
Lines of train steps have a `step`:

| key | meaning |
|---|---|
| `step` | train step, counted from 0 as in the recorded schedule |
| `version` | newest published weights version when the step finished |
| `groups` | number of prompt groups trained |
| `reward_mean` | their mean reward |
| `accuracy` | share of [right](EVALUATION.md#the-figures) responses |
| `loss` | as the trainer reports it |
| `staleness_min`, `staleness_mean`, `staleness_max` | staleness of the groups, in train steps |
| `tokens` | response tokens of the groups |
| `elapsed_s` | seconds from the start of the run to the end of the step |
| `seconds` | seconds by phase: `collecting`, `scoring`, `training`, `publishing`, and their `total` |
| `groups_aborted`, `groups_resumed`, `groups_filtered`, `groups_failed` | number of groups since the previous line |
| `truncated_share`, `empty_share`, `repeated_share` | responses cut off, without text, equal to another of the group |
| `unparsable_share` | responses in which a reward [found no answer](REWARDS.md#responses-without-an-answer) |
| `reward_min`, `reward_p25`, `reward_p50`, `reward_p75`, `reward_max` | quantiles of rewards |
| `reward_NAME` | mean of the reward NAME of `reward.functions`, without its weight ([REWARDS.md](REWARDS.md)) |
| `agent_NAME` | turns, tool calls, tokens by role and more ([ENVIRONMENTS.md](ENVIRONMENTS.md#figures)) |
| others | metrics of the trainer ([OBJECTIVES.md](OBJECTIVES.md)); its own timings under `trainer_seconds` |

Lines of validations have a `validation` instead:

| key | meaning |
|---|---|
| `validation` | number of the validation, counted from 0 |
| `version`, `steps` | the weights version that was measured, and the train steps in it |
| `outcome` | `reported`, `cancelled` or `failed`; `reason` says why it failed or was cancelled |
| `accuracy`, `reward_mean` | of the measured rows: share that is [right](EVALUATION.md#the-figures); mean reward |
| `rows`, `measured` | number of held-out rows (responses); number of those that could be measured |
| `sets` | by set: `prompts` and [figures](EVALUATION.md); `X_low` and `X_high` are the interval of `X` |
| `elapsed_s` | seconds from the start of the run to the end of the validation |
| `seconds` | seconds in the states `queued` and `running` |
"""


def markdown() -> str:
    """The whole page."""
    return HEAD + "".join(_row(metric) for metric in METRICS) + OTHERS


def _row(metric: Metric) -> str:
    labels = "<br>".join(
        f"`{label}`" + (": " + ", ".join(f"`{value}`" for value in values) if values else "")
        for label, values in metric.labels.items()
    )
    where = f" *{metric.where}*" if metric.where else ""
    return f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.help}{where} |\n"


if __name__ == "__main__":
    print(markdown(), end="")
