"""The rollout board: state, slots, speed and pauses of each replica, and vLLM's own metrics."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.panels import board, glance, graph, row, timeline
from dashboards.queries import coded, idle_share, mean, of, quantile, rate
from engine.metrics import names

VLLM = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:num_preemptions_total",
)
"""Metrics that vLLM exports, if Prometheus scrapes it."""

GENERATED = rate(names.REPLICA_GROUPS, by="replica", end="generated")

STATE_COLOURS = {
    **dict.fromkeys(names.REPLICA_STATE.labels["state"], "yellow"),
    "starting": "light-blue",
    "stopping": "light-orange",
    "gone": "red",
    "ready": "green",
    "yielding": "light-purple",
    "asleep": "purple",
    "draining": "orange",
    "drained": "text",
}


def rollout() -> Dashboard:
    page = board("rollout", "Rollout", "What does each replica do, how fast does it sample, how long does it pause?")
    for panel in _at_a_glance():
        page = page.with_panel(panel)
    page = page.with_row(row("Replicas"))
    page = page.with_panel(
        timeline(
            "State of each replica",
            "ready (green), with short gaps while weights are swapped. draining, drained: the replica or the run "
            "drains; asleep: its pool trains; starting, stopping, gone: its process is not up (see the Reliability "
            "board).",
            coded(names.REPLICA_STATE, "state", by="replica"),
            "replica {{replica}}",
            STATE_COLOURS,
        )
    )
    page = page.with_panel(
        graph(
            "Slots of each replica",
            "Nearly all slots of every replica are held. A replica whose slots stay free gets no groups.",
            "suffix: slots",
            {"replica {{replica}} {{state}}": of(names.REPLICA_SLOTS)},
        )
    )
    page = page.with_panel(
        graph(
            "Groups allowed on each replica",
            "Constant with the concurrency policy slots. With kv-cache, a limit settles at the number of groups that "
            "fit into the replica's KV cache.",
            "suffix: groups",
            {"replica {{replica}}": of(names.REPLICA_LIMIT)},
            steps=True,
        )
    )
    page = page.with_panel(
        graph(
            "KV cache in use, by replica",
            "Normally 60 to 80 %; less if all slots are in use. Only with the concurrency policy kv-cache.",
            "percentunit",
            {"replica {{replica}}": of(names.REPLICA_CACHE)},
            high=1.0,
        )
    )
    page = page.with_panel(
        graph(
            "Response tokens per second, by replica",
            "About equal on equal machines. Tokens count when their group is finished, so the line moves in steps.",
            "suffix: tokens/s",
            {"replica {{replica}}": rate(names.REPLICA_TOKENS, by="replica")},
        )
    )
    page = page.with_panel(
        graph(
            "Slow replicas",
            "0. 1 marks a replica that needs more time per token than the others by more than "
            "rollout.straggler_factor: its machine throttles, or runs other jobs. The alert EngineReplicaSlow covers "
            "this.",
            "bool_yes_no",
            {"replica {{replica}}": of(names.REPLICA_SLOW)},
            high=1.0,
            steps=True,
        )
    )
    page = page.with_panel(
        graph(
            "Slots not usable because of weight sync, a pool or a drain",
            "pool: in a shared pool, the trainer has its turn on the machines; draining: the replica or the run "
            "drains; weight_sync: pauses.",
            "suffix: slots",
            {"{{cause}}": rate(names.ROLLOUT_IDLE, by="cause", cause="~pool|draining|weight_sync")},
            stacked=True,
        )
    )
    page = page.with_row(row("Interrupted groups"))
    page = page.with_panel(
        graph(
            "Aborted, failed and resumed attempts, by replica",
            "With sync mode abort, each weight sync aborts the running groups, which resume afterwards. No attempt "
            "should fail.",
            "suffix: groups/s",
            {
                "replica {{replica}} aborted": rate(names.REPLICA_GROUPS, by="replica", end="aborted"),
                "replica {{replica}} failed": rate(names.REPLICA_GROUPS, by="replica", end="failed"),
                "replica {{replica}} resumed": rate(names.REPLICA_RESUMED, by="replica"),
            },
        )
    )
    page = page.with_panel(
        graph(
            "Partial groups",
            "Groups parked with their prefixes, and groups that continue from them. If the number of parked groups "
            "only grows, no replica has weights that are new enough.",
            "suffix: groups",
            {"parked": of(names.GROUPS, state="aborted"), "continuing": of(names.GROUPS, state="resumed")},
        )
    )
    page = page.with_row(row("Weight sync"))
    page = page.with_panel(
        graph(
            "Share of time that a replica pauses for new weights",
            "A few percent. Sync mode keep has the shortest pauses.",
            "percentunit",
            {"replica {{replica}}, {{mode}}": rate(names.REPLICA_PAUSE, by="replica, mode")},
        )
    )
    page = page.with_panel(
        graph(
            "Seconds of a weight sync, by mode",
            "From the order to pause until sampling continues. Should be constant; growth means a slow network or "
            "disk.",
            "s",
            {
                "mean, {{mode}}": mean(names.SYNC_SECONDS, by="mode"),
                "p95, {{mode}}": quantile(0.95, names.SYNC_SECONDS, by="mode"),
            },
        )
    )
    page = page.with_row(row("Responses"))
    page = page.with_panel(
        graph(
            "Response length",
            "Mean length of each group's responses. A slow rise is usual. Responses are cut off at rollout.max_tokens.",
            "suffix: tokens",
            {
                "median": quantile(0.5, names.RESPONSE_TOKENS),
                "p95": quantile(0.95, names.RESPONSE_TOKENS),
                "mean": mean(names.RESPONSE_TOKENS),
            },
            exemplars=True,
        )
    )
    page = page.with_panel(
        graph(
            "Seconds of a group, from its first start to its last trajectory",
            "A large gap between median and p95 means a long tail of stragglers. Exemplars name the group.",
            "s",
            {"median": quantile(0.5, names.GROUP_SECONDS), "p95": quantile(0.95, names.GROUP_SECONDS)},
            exemplars=True,
        )
    )
    page = page.with_panel(
        graph(
            "Response tokens of a group, by replica",
            "About equal on every replica. A replica with longer groups has the stragglers, or resumes many "
            "interrupted groups.",
            "suffix: tokens",
            {"replica {{replica}}": f"{rate(names.REPLICA_TOKENS, by='replica')} / {GENERATED}"},
        )
    )
    return _vllm(page.with_row(row("vLLM's own metrics, if Prometheus scrapes them")))


def _vllm(page: Dashboard) -> Dashboard:
    running, waiting, cache, tokens, hits, queries, preempted = VLLM
    page = page.with_panel(
        graph(
            "vLLM: requests",
            "Few waiting requests. If there are many, use fewer slots, or more memory for keys and values.",
            "suffix: requests",
            {
                "{{instance}} running": running,
                "{{instance}} waiting": waiting,
                "{{instance}} preempted/s": f"rate({preempted}[$window])",
            },
        )
    )
    page = page.with_panel(
        graph(
            "vLLM: keys and values in use, prefixes found in the cache",
            "Below 90 % in use. Above that, vLLM preempts requests and computes them again.",
            "percentunit",
            {
                "{{instance}} in use": cache,
                "{{instance}} prefixes found": f"rate({hits}[$window]) / rate({queries}[$window])",
            },
            high=1.0,
        )
    )
    return page.with_panel(
        graph(
            "vLLM: tokens per second",
            "vLLM counts every token when it is sampled. The engine counts finished groups, so both agree over "
            "minutes.",
            "suffix: tokens/s",
            {"{{instance}}": f"rate({tokens}[$window])"},
        )
    )


def _at_a_glance() -> list:
    return [
        glance(
            "Replicas ready",
            "All replicas, except for moments of weight sync.",
            "none",
            of(names.REPLICAS, state="ready"),
        ),
        glance("Slots generating", "Nearly all slots.", "suffix: slots", of(names.SLOTS, state="busy")),
        glance(
            "Slots free", "Near 0 if the rollout is the bottleneck.", "suffix: slots", of(names.SLOTS, state="free")
        ),
        glance("Tokens per second", "Steady.", "suffix: tokens/s", rate(names.TOKENS_GENERATED), decimals=0),
        glance(
            "Rollout idle",
            "Below 20 % is good.",
            "percentunit",
            idle_share(names.ROLLOUT_BUSY, names.ROLLOUT_IDLE),
            steps=((None, "green"), (0.2, "yellow"), (0.5, "red")),
        ),
        glance("Mean weight sync", "Constant.", "s", mean(names.SYNC_SECONDS), decimals=2),
    ]
