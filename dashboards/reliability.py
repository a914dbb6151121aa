"""The board of reliability: what failed and how often, what budgets allow, whether record, store and disk keep up."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.panels import board, glance, graph, row
from dashboards.queries import of, rate
from engine.metrics import names

DOWN = ("starting", "stopping", "gone")
"""States of a replica whose process is not up."""
UP = tuple(state for state in names.REPLICAS.labels["state"] if state not in DOWN)
BAD: tuple[tuple[float | None, str], ...] = ((None, "green"), (1.0, "red"))
KEPT = f"{of(names.BATCHES_KEPT)} * {of(names.BATCH_SIZE)}"


def any_of(values: tuple[str, ...]) -> str:
    """A label value that matches each of these."""
    return "~" + "|".join(values)


def grown(expression: str) -> str:
    """How much counters grew over the window."""
    return f"sum (increase({expression}[$window]))"


def reliability() -> Dashboard:
    made = board("reliability", "Reliability", "What failed, what came back, and whether record and disk keep up.")
    for panel in _at_a_glance():
        made = made.with_panel(panel)
    made = made.with_row(row("Failures"))
    made = made.with_panel(
        graph(
            "Failed attempts, by cause",
            "Over the window; 0, or rare. group_data: prompts or rewards; group_infrastructure, replica_lost and "
            "process_lost: machines; weight_sync, publish: transfers.",
            "suffix: attempts",
            {"{{cause}}": f"sum by (cause) (increase({of(names.RETRIES)}[$window]))"},
            stacked=True,
        )
    )
    made = made.with_panel(
        graph(
            "Groups that failed for good or were dropped",
            "0. A group fails once it has spent a budget: the attempts shown beside.",
            "short",
            {"{{state}}": of(names.GROUPS_ENDED, state="~failed|dropped"), "budget, {{budget}}": of(names.BUDGET)},
        )
    )
    made = made.with_panel(
        graph(
            "Replicas that went down and came up",
            "Each time one goes down, another life of it comes up. The distance between the lines is the replicas that "
            "are up; gone for good stays at 0.",
            "suffix: times",
            {
                "went down": f"sum ({of(names.TRANSITIONS, machine='replica', to='down')}) or vector(0)",
                "came up": f"sum ({of(names.TRANSITIONS, machine='replica', source='down')}) or vector(0)",
                "gone for good": of(names.REPLICAS, state="gone"),
            },
            steps=True,
        )
    )
    made = made.with_panel(
        graph(
            "Processes that ended, by kind",
            "0, or rare: each is followed by a start. The alert EngineProcessDying watches those that are no replicas.",
            "suffix: times",
            {"{{kind}}": of(names.PROCESS_DEATHS)},
            steps=True,
        )
    )
    made = made.with_panel(
        graph(
            "Processes that start or stop",
            "0 once the run has started. starting for long: it loads, trains steps again, or waits for room; "
            "`engine waits RUN` says which.",
            "suffix: processes",
            {"{{kind}}, {{state}}": of(names.PROCESSES, state="~starting|stopping")},
            steps=True,
        )
    )
    made = made.with_panel(
        graph(
            "Steps, publications and checkpoints that had to be tried again",
            "0. Each retry costs the time of the work that failed.",
            "suffix: times",
            {"{{cause}}": of(names.RETRIES, cause="~train_step|publish|checkpoint|weight_sync")},
            steps=True,
        )
    )
    made = _going_on(made.with_row(row("Stops, returns and changes")))
    made = made.with_row(row("Storage"))
    made = made.with_panel(
        graph(
            "Trajectory store",
            "Rises and falls with the groups in flight and the steps since the newest checkpoint; growth without end "
            "is a leak. On disk: up to twice as much, what is discarded and not yet cleared away included.",
            "bytes",
            {"held": of(names.STORE_BYTES), "on disk": of(names.STORE_DISK_BYTES)},
        )
    )
    made = made.with_panel(
        graph(
            "Groups in the trajectory store",
            "Below the other line: the groups that live, and those of the steps that no checkpoint contains.",
            "suffix: groups",
            {
                "held": of(names.STORE_GROUPS),
                "live, or of kept batches": f"sum ({of(names.GROUPS, state='~[^q].*')}) + sum ({KEPT})",
            },
        )
    )
    made = made.with_panel(
        graph(
            "Record: bytes a second, and bytes that wait",
            "Waiting bytes at or near 0: every frame is with the operating system before its commands leave.",
            "bytes",
            {"written a second": rate(names.RECORD_BYTES), "waiting": of(names.RECORD_LAG)},
        )
    )
    return made.with_panel(
        graph(
            "Disk of the run's directory",
            "Free space well above what checkpoints and the record will take.",
            "bytes",
            {"free": of(names.DISK_FREE), "size": of(names.DISK_SIZE)},
        )
    )


def _going_on(made: Dashboard) -> Dashboard:
    made = made.with_panel(
        graph(
            "Recoveries, by kind",
            "0, or as many as you caused. resumed: new processes, nothing lost; branched: from a checkpoint, what came "
            "after it is done again; scheduler: its process came back beside the living actors.",
            "suffix: times",
            {"{{kind}}": of(names.RECOVERIES)},
            steps=True,
        )
    )
    made = made.with_panel(
        graph(
            "Replicas wanted and there",
            "One line. Fewer there than wanted for minutes: machines are missing; the alert EngineReplicasMissing "
            "watches it.",
            "suffix: replicas",
            {
                "wanted": of(names.REPLICAS_WANTED),
                "there": f"sum ({of(names.REPLICAS, state=any_of(UP))})",
                "draining or drained": f"sum ({of(names.REPLICAS, state='~drain.*')})",
            },
            steps=True,
        )
    )
    made = made.with_panel(
        graph(
            "Requests of users, by kind",
            "Whatever you asked for: stops, drains, other replicas, other settings. Each is a step up.",
            "suffix: requests",
            {"{{request}}": of(names.REQUESTS_TAKEN)},
            steps=True,
        )
    )
    made = made.with_panel(
        graph(
            "Running groups that were parked, by reason",
            "0, or rare. timeout: attempts took longer than timeouts.group_s, and cost one; moved: a faster "
            "replica took over what a slow one had, at no cost.",
            "suffix: groups",
            {"{{reason}}": of(names.PARKED)},
            steps=True,
        )
    )
    made = made.with_panel(
        graph(
            "Train steps that no checkpoint contains",
            "A saw that falls to 0 every so many steps as checkpoints are apart. What a crash now would have to train "
            "again; the alert EngineNoCheckpoint watches it.",
            "suffix: steps",
            {
                "since the newest checkpoint": f"{of(names.STEPS)} - {of(names.CHECKPOINT_STEPS)}",
                "batches kept": of(names.BATCHES_KEPT),
                "from one checkpoint to the next": of(names.CHECKPOINT_EVERY),
            },
            steps=True,
        )
    )
    return made.with_panel(
        graph(
            "Coming to rest, age of the checkpoint",
            "Coming to rest is 0, or short: a drained run ends by itself once its batch is trained. The checkpoint's "
            "age is a saw.",
            "s",
            {"draining": of(names.DRAINING), "age of the newest checkpoint": of(names.CHECKPOINT_AGE)},
        )
    )


def _at_a_glance() -> list:
    return [
        glance(
            "Failed attempts",
            "In the window. 0 is good; a few cost time only.",
            "none",
            grown(of(names.RETRIES)),
            steps=((None, "green"), (1.0, "yellow"), (20.0, "red")),
            decimals=0,
        ),
        glance("Groups failed", "Since the run began. 0.", "none", of(names.GROUPS_ENDED, state="failed"), steps=BAD),
        glance(
            "Replicas down now",
            "0: none starts, stops, or is gone for good.",
            "none",
            f"sum ({of(names.REPLICAS, state=any_of(DOWN))})",
            steps=BAD,
        ),
        glance(
            "Newest checkpoint",
            "Its age. About the time that trainer.checkpoint_every steps take.",
            "s",
            of(names.CHECKPOINT_AGE),
        ),
        glance(
            "Trajectories held",
            "Bounded by the groups in flight and the steps since the newest checkpoint.",
            "bytes",
            of(names.STORE_BYTES),
        ),
        glance(
            "Disk free",
            "Above 10 %. The alert EngineDiskFilling watches it.",
            "percentunit",
            f"{of(names.DISK_FREE)} / {of(names.DISK_SIZE)}",
            steps=((None, "red"), (0.1, "yellow"), (0.2, "green")),
        ),
    ]
