"""The board of the scheduler: which group, step, replica and version is in which state, and what the next one waits
for."""

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
    "waiting_for_prompts": "light-yellow",
    "waiting_for_weights": "dark-yellow",
}


def scheduler() -> Dashboard:
    made = board(
        "scheduler", "Scheduler", "What is in which state, what limits admission, and how quick decisions are."
    )
    for panel in _at_a_glance():
        made = made.with_panel(panel)
    made = made.with_row(row("Prompt groups"))
    made = made.with_panel(
        graph(
            "Prompt groups by state",
            "A stable mix. Many generated: the trainer is behind. Many aborted: parked groups wait for weights or "
            "slots.",
            "suffix: groups",
            {"{{state}}": of(names.GROUPS)},
            stacked=True,
        )
    )
    made = made.with_panel(
        graph(
            "Groups that may still start, by bound",
            "The lower line is the one that binds. Both at 0 is usual in a full pipeline; staleness at 0 for long: "
            "the trainer is the bottleneck.",
            "suffix: groups",
            {"under {{bound}}": of(names.CAPACITY)},
        )
    )
    made = made.with_panel(
        timeline(
            "What keeps the next group from starting",
            "slots_full, green, most of the time. Whatever else is there for long is what to change: workers (K), "
            "staleness (S), prompts, weight sync.",
            coded(names.ADMISSION_LIMIT, "limit"),
            "limit",
            LIMIT_COLOURS,
        )
    )
    made = made.with_row(row("Deadlines"))
    made = made.with_panel(
        graph(
            "Train steps left to the oldest deadline",
            "Above 0 most of the time. At 0 the step that forms now must take the oldest groups and may wait for them.",
            "suffix: steps",
            {"steps left": of(names.DEADLINE_ROOM), "bound S": of(names.MAX_STALENESS)},
            steps=True,
        )
    )
    made = made.with_panel(
        graph(
            "Age of the oldest group, time since the last step and the last event",
            "The first two follow the length of a step. A group that grows old alone is a straggler; both growing: "
            "nothing moves. Nothing heard for as long: whatever the run waits for does not answer.",
            "s",
            {
                "oldest group": of(names.OLDEST_GROUP_AGE),
                "last train step": of(names.STEP_AGE),
                "nothing heard for": of(names.SILENCE),
            },
        )
    )
    made = made.with_row(row("Events and decisions"))
    made = made.with_panel(
        graph(
            "Changes of state a second, by machine",
            "Groups dominate; steps and versions tick along.",
            "suffix: /s",
            {"{{machine}}": rate(names.TRANSITIONS, by="machine")},
        )
    )
    made = made.with_panel(
        graph(
            "From an event to its commands",
            "The 99th percentile within a few milliseconds. More: the scheduler's process is short of CPU, or its disk "
            "is slow.",
            "s",
            {
                "median": quantile(0.5, names.DECISION_SECONDS),
                "p95": quantile(0.95, names.DECISION_SECONDS),
                "p99": quantile(0.99, names.DECISION_SECONDS),
            },
        )
    )
    made = made.with_panel(
        graph(
            "Events a second, by kind",
            "A few events for each group. Many GroupFailed, SyncFailed or StepFailed: see the Reliability board.",
            "suffix: events/s",
            {"{{event}}": rate(names.EVENTS, by="event")},
        )
    )
    made = made.with_panel(
        graph(
            "Decisions taken in place of a policy",
            "0. Each is a policy of yours that raised or broke a law, with policies.on_error: builtin.",
            "suffix: decisions",
            {"built-in": of(names.POLICY_ERRORS)},
            steps=True,
        )
    )
    made = made.with_panel(
        graph(
            "Pools taken and given back a second",
            "The two go together, once for each task of a pool, as a train step is. Taken and not given back: a task "
            "that does not end.",
            "suffix: /s",
            {
                "taken": f"{rate(names.TRANSITIONS, machine='pool', to='leased')} or vector(0)",
                "given back": f"{rate(names.TRANSITIONS, machine='pool', to='free')} or vector(0)",
            },
        )
    )
    return made.with_panel(
        graph(
            "Events that wait to be handled",
            "At or near 0. A queue that grows means the scheduler cannot keep up.",
            "suffix: events",
            {
                "waiting": of(names.EVENTS_WAITING),
                "echoes of what is over, a minute": f"60 * {rate(names.STALE_ECHOES)}",
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
            "Up to B times S are usual. As many for long: the trainer is the bottleneck.",
            "suffix: groups",
            of(names.GROUPS, state="generated"),
        ),
        glance(
            "Time since the last train step",
            "About the length of a step. The alert EngineNoStepFinished watches it.",
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
