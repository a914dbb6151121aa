"""The scheduler board: states of groups, limits of admission, deadlines, and the speed of decisions."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.panels import board, glance, graph, row, timeline
from dashboards.queries import coded, of, quantile, rate
from engine.metrics import names

LIMIT_COLOURS = {
    **dict.fromkeys(names.ADMISSION_LIMIT.labels["limit"], "text"),
    "slots_full": "green",
    "no_replica": "red",
    "weight_sync": "yellow",
    "pool": "purple",
    "worker_bound": "blue",
    "staleness_bound": "orange",
    "reward": "dark-purple",
    "agent": "light-purple",
    "waiting_for_prompts": "light-yellow",
    "waiting_for_weights": "dark-yellow",
}


def scheduler() -> Dashboard:
    page = board(
        "scheduler", "Scheduler", "Which states are groups in, what limits admission, and how fast are decisions?"
    )
    for panel in _at_a_glance():
        page = page.with_panel(panel)
    page = page.with_row(row("Prompt groups"))
    page = page.with_panel(
        graph(
            "Prompt groups by state",
            "A stable mix. Many generated: the trainer is behind. Many aborted: parked groups wait for weights or "
            "slots.",
            "suffix: groups",
            {"{{state}}": of(names.GROUPS)},
            stacked=True,
        )
    )
    page = page.with_panel(
        graph(
            "Groups that may still start, by bound",
            "The lower line is the current limit. Both are usually 0 in a full pipeline. If staleness stays at 0, the "
            "trainer is the bottleneck.",
            "suffix: groups",
            {"under {{bound}}": of(names.CAPACITY)},
        )
    )
    page = page.with_panel(
        timeline(
            "What prevents the next group from starting",
            "slots_full (green) most of the time. If another limit stays for long, change it: workers (K), staleness "
            "(S), prompts, weight sync.",
            coded(names.ADMISSION_LIMIT, "limit"),
            "limit",
            LIMIT_COLOURS,
        )
    )
    page = page.with_row(row("Deadlines"))
    page = page.with_panel(
        graph(
            "Train steps left to the oldest deadline",
            "Above 0 most of the time. At 0, the next step must take the oldest groups, and may wait for them.",
            "suffix: steps",
            {"steps left": of(names.DEADLINE_ROOM), "bound S": of(names.MAX_STALENESS)},
            steps=True,
        )
    )
    page = page.with_panel(
        graph(
            "Age of the oldest group, time since the last step and the last event",
            "The first two follow the length of a step. If only the oldest group's age grows, it is a straggler. If "
            "both grow, the run makes no progress. If there is no event either, nothing that the run waits for "
            "answers.",
            "s",
            {
                "oldest group": of(names.OLDEST_GROUP_AGE),
                "last train step": of(names.STEP_AGE),
                "last event": of(names.SILENCE),
            },
        )
    )
    page = page.with_row(row("Rewards"))
    page = page.with_panel(
        graph(
            "Groups that wait for rewards",
            "Few. If it stays high, rewards are slower than generation: raise the setting that engine waits names, or "
            "make the function faster.",
            "suffix: groups",
            {"all": of(names.UNREWARDED), "{{function}}": of(names.FUNCTION_GROUPS)},
        )
    )
    page = page.with_panel(
        graph(
            "Time of a call, by function",
            "Constant. It rises if a judge or another server that a reward calls is overloaded.",
            "s",
            {
                "{{function}}": f"{rate(names.FUNCTION_SECONDS, by='function')} / "
                f"{rate(names.FUNCTION_CALLS, by='function')}"
            },
        )
    )
    page = page.with_row(row("Events and decisions"))
    page = page.with_panel(
        graph(
            "State changes per second, by machine",
            "Mostly groups; few steps and versions.",
            "suffix: /s",
            {"{{machine}}": rate(names.TRANSITIONS, by="machine")},
        )
    )
    page = page.with_panel(
        graph(
            "From an event to its commands",
            "The 99th percentile is a few milliseconds. If it is more, the scheduler's process lacks CPU, or its disk "
            "is slow.",
            "s",
            {
                "median": quantile(0.5, names.DECISION_SECONDS),
                "p95": quantile(0.95, names.DECISION_SECONDS),
                "p99": quantile(0.99, names.DECISION_SECONDS),
            },
        )
    )
    page = page.with_panel(
        graph(
            "Events per second, by kind",
            "A few events for each group. Many GroupFailed, SyncFailed or StepFailed: see the Reliability board.",
            "suffix: events/s",
            {"{{event}}": rate(names.EVENTS, by="event")},
        )
    )
    page = page.with_panel(
        graph(
            "Pools leased and returned per second",
            "Both rates are equal: each task of a pool leases it once and returns it. Leased but not returned: a task "
            "does not end.",
            "suffix: /s",
            {
                "leased": f"{rate(names.TRANSITIONS, machine='pool', to='leased')} or vector(0)",
                "returned": f"{rate(names.TRANSITIONS, machine='pool', to='free')} or vector(0)",
            },
        )
    )
    return page.with_panel(
        graph(
            "Events that wait to be handled",
            "At or near 0. If the queue grows, the scheduler cannot keep up.",
            "suffix: events",
            {
                "waiting": of(names.EVENTS_WAITING),
                "stale echoes per minute": f"60 * {rate(names.STALE_ECHOES)}",
            },
        )
    )


def _at_a_glance() -> list:
    return [
        glance("Groups running", "At most K.", "suffix: groups", of(names.GROUPS_RUNNING)),
        glance("Bound K", "Groups that may run at once.", "suffix: groups", of(names.MAX_GROUPS)),
        glance("Batch size B", "Groups that a train step takes.", "suffix: groups", of(names.BATCH_SIZE)),
        glance(
            "Groups ready for a step",
            "Up to B times S are usual. If it stays at that number, the trainer is the bottleneck.",
            "suffix: groups",
            of(names.GROUPS, state="generated"),
        ),
        glance(
            "Time since the last train step",
            "About the length of a step. The alert EngineNoStepFinished covers this.",
            "s",
            of(names.STEP_AGE),
        ),
        glance(
            "Events waiting",
            "At or near 0.",
            "suffix: events",
            of(names.EVENTS_WAITING),
            steps=((None, "green"), (1000.0, "yellow"), (10000.0, "red")),
        ),
    ]
