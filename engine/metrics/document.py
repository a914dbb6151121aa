"""`docs/METRICS.md`, written from `names.py`: `python -m engine.metrics.document > docs/METRICS.md`.

A test says when it is out of date.
"""

from engine.metrics.names import METRICS, Metric

HEAD = """# Metrics

What a run exports to Prometheus, on `http://127.0.0.1:PORT/metrics`. The port is `metrics.port` in the configuration;
0, the default, takes any free one, and the run prints it. Written from `engine/metrics/names.py` by `python -m
engine.metrics.document`.

| name | type | unit | labels | meaning |
|---|---|---|---|---|
"""

OTHERS = """
## The names you may know

| here | SkyRL | verl | vLLM |
|---|---|---|---|
| `engine_staleness_steps` | `async/staleness_{mean,min,max}` | | |
| `engine_groups_running` | | | `vllm:num_requests_running` |
| `engine_rollout_idle_slot_seconds_total` | | `fully_async/rollouter/idle_ratio` | |
| `engine_trainer_idle_seconds_total` | `timing/wait_for_generation_buffer` | `fully_async/trainer/idle_ratio` | |
| `engine_trainer_busy_seconds_total{task="training"}` | `timing/run_training` | | |
| `engine_weight_sync_seconds` | `timing/sync_weights` | | |
| `engine_transitions_total{machine="group",to="aborted"}` | | `fully_async/partial/total_partial_num` | |
| `engine_groups_ended_total{state="filtered"}` | `async/keep_rate` | | |
| `engine_tokens_generated_total` | | | `vllm:generation_tokens` |

An idle share over the last minute, for example:

    sum(rate(engine_rollout_idle_slot_seconds_total[1m]))
      / (sum(rate(engine_rollout_idle_slot_seconds_total[1m])) + rate(engine_rollout_busy_slot_seconds_total[1m]))

## metrics.jsonl

A line of JSON per train step; a figure that is not finite is null. Groups aborted, resumed and filtered count those
since the line before.

| key | meaning |
|---|---|
| `step` | train step, counted from 0 as in the recorded schedule |
| `version` | newest weights version published when the step was finished |
| `groups` | prompt groups trained on |
| `reward_mean` | mean reward over them |
| `accuracy` | share of trajectories with a reward of at least 1, as the trainer reports it |
| `loss` | as the trainer reports it |
| `staleness_min`, `staleness_mean`, `staleness_max` | of the groups, in train steps |
| `tokens` | response tokens of the groups |
| `elapsed_s` | seconds from the start of the run to the end of the step |
| `seconds` | seconds by phase: `collecting`, `scoring`, `training`, `publishing`, and their `total` |
| `groups_aborted`, `groups_resumed`, `groups_filtered` | since the line before |
| others | what the trainer reports ([OBJECTIVES.md](OBJECTIVES.md)), its own timings under `trainer_seconds` |
"""


def markdown() -> str:
    """The whole page."""
    return HEAD + "".join(_row(metric) for metric in METRICS) + OTHERS


def _row(metric: Metric) -> str:
    labels = "<br>".join(
        f"`{label}`" + (": " + ", ".join(f"`{value}`" for value in values) if values else "")
        for label, values in metric.labels.items()
    )
    return f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.help} |\n"


if __name__ == "__main__":
    print(markdown(), end="")
