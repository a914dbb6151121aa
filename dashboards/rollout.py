"""The board of the rollout: each replica's state, slots, speed and pauses, and vLLM's own metrics beside ours."""

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
"""Names that vLLM exports, where Prometheus scrapes it."""

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
    made = board("rollout", "Rollout", "What each replica does, how fast it samples and how long it stands still.")
    for panel in _at_a_glance():
        made = made.with_panel(panel)
    made = made.with_row(row("Replicas"))
    made = made.with_panel(
        timeline(
            "State of each replica",
            "ready, green, with short gaps while weights are swapped. draining, drained: let go, or the run comes to "
            "rest; asleep: its pool trains; starting, stopping, gone: its process is not up; see the board "
            "Reliability.",
            coded(names.REPLICA_STATE, "state", by="replica"),
            "replica {{replica}}",
            STATE_COLOURS,
        )
    )
    made = made.with_panel(
        graph(
            "Slots of each replica",
            "Held slots near all of them on every replica; one that stays free takes no groups.",
            "suffix: slots",
            {"replica {{replica}} {{state}}": of(names.REPLICA_SLOTS)},
        )
    )
    made = made.with_panel(
        graph(
            "Response tokens a second, by replica",
            "About the same on like machines. Counted when a group is whole, so it comes in steps.",
            "suffix: tokens/s",
            {"replica {{replica}}": rate(names.REPLICA_TOKENS, by="replica")},
        )
    )
    made = made.with_panel(
        graph(
            "Slow replicas",
            "0. 1 marks a replica whose tokens take longer than those of the others by more than "
            "rollout.straggler_factor: a machine that throttles, or a neighbor. The alert EngineReplicaSlow watches "
            "it.",
            "bool_yes_no",
            {"replica {{replica}}": of(names.REPLICA_SLOW)},
            high=1.0,
            steps=True,
        )
    )
    made = made.with_panel(
        graph(
            "Slots held back by weight sync, a pool or draining",
            "pool: the trainer has the machines the slots stand on, as it does by turns in shared pools; draining: the "
            "replica drains, or the run does; weight_sync: pauses.",
            "suffix: slots",
            {"{{cause}}": rate(names.ROLLOUT_IDLE, by="cause", cause="~pool|draining|weight_sync")},
            stacked=True,
        )
    )
    made = made.with_row(row("Groups cut short"))
    made = made.with_panel(
        graph(
            "Attempts aborted, failed and gone on with, by replica",
            "With sync mode abort, each weight sync aborts what runs, and resumes follow. Failed ones should be 0.",
            "suffix: groups/s",
            {
                "replica {{replica}} aborted": rate(names.REPLICA_GROUPS, by="replica", end="aborted"),
                "replica {{replica}} failed": rate(names.REPLICA_GROUPS, by="replica", end="failed"),
                "replica {{replica}} resumed": rate(names.REPLICA_RESUMED, by="replica"),
            },
        )
    )
    made = made.with_panel(
        graph(
            "Partial groups",
            "Groups parked with what they have, and groups continuing from it. Parked ones that only grow find no "
            "replica new enough.",
            "suffix: groups",
            {"parked": of(names.GROUPS, state="aborted"), "continuing": of(names.GROUPS, state="resumed")},
        )
    )
    made = made.with_row(row("Weight sync"))
    made = made.with_panel(
        graph(
            "Share of time a replica stands still for new weights",
            "A few percent. Sync mode keep is the shortest.",
            "percentunit",
            {"replica {{replica}}, {{mode}}": rate(names.REPLICA_PAUSE, by="replica, mode")},
        )
    )
    made = made.with_panel(
        graph(
            "Seconds of a weight sync, by mode",
            "From the order to pause until sampling continues. Constant; growth means a slow network or disk.",
            "s",
            {
                "mean, {{mode}}": mean(names.SYNC_SECONDS, by="mode"),
                "p95, {{mode}}": quantile(0.95, names.SYNC_SECONDS, by="mode"),
            },
        )
    )
    made = made.with_row(row("Responses"))
    made = made.with_panel(
        graph(
            "Response length",
            "Mean length of each group's responses. A slow rise is usual; at the cap of rollout.max_tokens responses "
            "are cut.",
            "suffix: tokens",
            {
                "median": quantile(0.5, names.RESPONSE_TOKENS),
                "p95": quantile(0.95, names.RESPONSE_TOKENS),
                "mean": mean(names.RESPONSE_TOKENS),
            },
            exemplars=True,
        )
    )
    made = made.with_panel(
        graph(
            "Seconds of a group, from its first start to its last trajectory",
            "The gap between median and p95 is the long tail that stragglers come from. Exemplars name the group.",
            "s",
            {"median": quantile(0.5, names.GROUP_SECONDS), "p95": quantile(0.95, names.GROUP_SECONDS)},
            exemplars=True,
        )
    )
    made = made.with_panel(
        graph(
            "Response tokens of a group, by replica",
            "About the same on every replica. One whose groups are longer has the stragglers, or continues with many "
            "that were cut short.",
            "suffix: tokens",
            {"replica {{replica}}": f"{rate(names.REPLICA_TOKENS, by='replica')} / {GENERATED}"},
        )
    )
    return _vllm(made.with_row(row("vLLM's own, where Prometheus scrapes it")))


def _vllm(made: Dashboard) -> Dashboard:
    running, waiting, cache, tokens, hits, asked, preempted = VLLM
    made = made.with_panel(
        graph(
            "vLLM: requests",
            "Few waiting. Many: fewer slots, or more memory for keys and values.",
            "suffix: requests",
            {
                "{{instance}} running": running,
                "{{instance}} waiting": waiting,
                "{{instance}} preempted/s": f"rate({preempted}[$window])",
            },
        )
    )
    made = made.with_panel(
        graph(
            "vLLM: keys and values in use, prefixes found again",
            "In use below 90 %; above it requests are preempted and computed again.",
            "percentunit",
            {
                "{{instance}} in use": cache,
                "{{instance}} prefixes found": f"rate({hits}[$window]) / rate({asked}[$window])",
            },
            high=1.0,
        )
    )
    return made.with_panel(
        graph(
            "vLLM: tokens a second",
            "Every token as it is sampled; ours count whole groups, so the two agree over minutes.",
            "suffix: tokens/s",
            {"{{instance}}": f"rate({tokens}[$window])"},
        )
    )


def _at_a_glance() -> list:
    return [
        glance(
            "Replicas ready",
            "All of them, but for moments of weight sync.",
            "none",
            of(names.REPLICAS, state="ready"),
        ),
        glance("Slots generating", "Near all slots.", "suffix: slots", of(names.SLOTS, state="busy")),
        glance(
            "Slots free", "Near 0 when the rollout is the bottleneck.", "suffix: slots", of(names.SLOTS, state="free")
        ),
        glance("Tokens a second", "Steady.", "suffix: tokens/s", rate(names.TOKENS_GENERATED), decimals=0),
        glance(
            "Rollout idle",
            "Below 20 % is good.",
            "percentunit",
            idle_share(names.ROLLOUT_BUSY, names.ROLLOUT_IDLE),
            steps=((None, "green"), (0.2, "yellow"), (0.5, "red")),
        ),
        glance("Mean weight sync", "Constant.", "s", mean(names.SYNC_SECONDS), decimals=2),
    ]
