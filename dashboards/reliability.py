"""The reliability board: what failed and how often, the retry budgets, and whether record, store and disk keep up."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.panels import board, glance, graph, row
from dashboards.queries import of, rate
from engine.metrics import names

DOWN = ("starting", "stopping", "gone")
"""States of a replica whose process is not up."""
UP = tuple(state for state in names.REPLICAS.labels["state"] if state not in DOWN)
BAD: tuple[tuple[float | None, str], ...] = ((None, "green"), (1.0, "red"))
STORED_GROUPS = f"{of(names.BATCHES_KEPT)} * {of(names.BATCH_SIZE)}"
"""Groups in the batches of steps that no checkpoint contains."""


def any_of(values: tuple[str, ...]) -> str:
    """A label value that matches each of these."""
    return "~" + "|".join(values)


def grown(expression: str) -> str:
    """How much counters grew over the window."""
    return f"sum (increase({expression}[$window]))"


def reliability() -> Dashboard:
    page = board("reliability", "Reliability", "What failed, what recovered, and whether record and disk keep up?")
    for panel in _at_a_glance():
        page = page.with_panel(panel)
    page = page.with_row(row("Failures"))
    page = page.with_panel(
        graph(
            "Failed attempts, by cause",
            "0, or rare, within the window. group_data: prompts or rewards; group_infrastructure, replica_lost and "
            "process_lost: machines; weight_sync, publish: transfers.",
            "suffix: attempts",
            {"{{cause}}": f"sum by (cause) (increase({of(names.RETRIES)}[$window]))"},
            stacked=True,
        )
    )
    page = page.with_panel(
        graph(
            "Groups that failed or were dropped",
            "0. A group fails when it has used up a budget of attempts; the budgets are shown, too.",
            "short",
            {"{{state}}": of(names.GROUPS_ENDED, state="~failed|dropped"), "budget, {{budget}}": of(names.BUDGET)},
        )
    )
    page = page.with_panel(
        graph(
            "Replicas that went down and came up",
            "A replica that goes down is started again. The distance between the lines is the number of replicas that "
            "are up. Replicas that are gone cannot restart: 0.",
            "suffix: times",
            {
                "went down": f"sum ({of(names.TRANSITIONS, machine='replica', to='down')}) or vector(0)",
                "came up": f"sum ({of(names.TRANSITIONS, machine='replica', source='down')}) or vector(0)",
                "gone": of(names.REPLICAS, state="gone"),
            },
            steps=True,
        )
    )
    page = page.with_panel(
        graph(
            "Processes that ended, by kind",
            "0, or rare: each is followed by a start. The alert EngineProcessDying covers all kinds except replicas.",
            "suffix: times",
            {"{{kind}}": of(names.PROCESS_DEATHS)},
            steps=True,
        )
    )
    page = page.with_panel(
        graph(
            "Processes that start or stop",
            "0 when the run has started. A process that starts for long loads, trains steps again, or waits for room: "
            "`engine waits RUN` shows which.",
            "suffix: processes",
            {"{{kind}}, {{state}}": of(names.PROCESSES, state="~starting|stopping")},
            steps=True,
        )
    )
    page = page.with_panel(
        graph(
            "Retried steps, publications, checkpoints and weight syncs",
            "0. Each retry costs the time of the failed work.",
            "suffix: times",
            {"{{cause}}": of(names.RETRIES, cause="~train_step|publish|checkpoint|weight_sync")},
            steps=True,
        )
    )
    page = _recovery(page.with_row(row("Recoveries, requests and drains")))
    page = page.with_row(row("Storage"))
    page = page.with_panel(
        graph(
            "Trajectory store",
            "Rises and falls with the groups in flight and the steps since the newest checkpoint. Endless growth is a "
            "leak. On disk: up to twice as much, because it includes discarded groups that are not deleted yet.",
            "bytes",
            {"stored": of(names.STORE_BYTES), "on disk": of(names.STORE_DISK_BYTES)},
        )
    )
    page = page.with_panel(
        graph(
            "Groups in the trajectory store",
            "Below the other line, which shows the live groups and those of steps that no checkpoint contains.",
            "suffix: groups",
            {
                "stored": of(names.STORE_GROUPS),
                "live, or in stored batches": f"sum ({of(names.GROUPS, state='~[^q].*')}) + sum ({STORED_GROUPS})",
            },
        )
    )
    page = page.with_panel(
        graph(
            "Record: bytes per second, and waiting bytes",
            "Waiting bytes at or near 0: every frame is handed to the operating system before its commands are sent.",
            "bytes",
            {"written per second": rate(names.RECORD_BYTES), "waiting": of(names.RECORD_LAG)},
        )
    )
    return page.with_panel(
        graph(
            "Disk of the run's directory",
            "Free space well above the size of the checkpoints and the record to come.",
            "bytes",
            {"free": of(names.DISK_FREE), "size": of(names.DISK_SIZE)},
        )
    )


def _recovery(page: Dashboard) -> Dashboard:
    page = page.with_panel(
        graph(
            "Recoveries, by kind",
            "0, or as many as you caused. resumed: new processes lost no train step; branched: new processes continued "
            "from a checkpoint and repeat the later steps; scheduler: a new scheduler took over the running actors.",
            "suffix: times",
            {"{{kind}}": of(names.RECOVERIES)},
            steps=True,
        )
    )
    page = page.with_panel(
        graph(
            "Replicas wanted and up",
            "One line. Fewer up than wanted for minutes: machines are missing. The alert EngineReplicasMissing "
            "covers this.",
            "suffix: replicas",
            {
                "wanted": of(names.REPLICAS_WANTED),
                "up": f"sum ({of(names.REPLICAS, state=any_of(UP))})",
                "draining or drained": f"sum ({of(names.REPLICAS, state='~drain.*')})",
            },
            steps=True,
        )
    )
    page = page.with_panel(
        graph(
            "Requests from users, by kind",
            "Your requests: stops, drains, changes of replicas and settings. Each request raises a line by one.",
            "suffix: requests",
            {"{{request}}": of(names.REQUESTS_TAKEN)},
            steps=True,
        )
    )
    page = page.with_panel(
        graph(
            "Running groups that were parked, by reason",
            "0, or rare. timeout: the attempt exceeded timeouts.group_s and counts as failed; moved: a faster "
            "replica continues the group, which costs no attempt.",
            "suffix: groups",
            {"{{reason}}": of(names.PARKED)},
            steps=True,
        )
    )
    page = page.with_panel(
        graph(
            "Train steps that no checkpoint contains",
            "Rises and falls to 0 at each checkpoint. After a crash, these steps are trained again. The alert "
            "EngineNoCheckpoint covers this.",
            "suffix: steps",
            {
                "since the newest checkpoint": f"{of(names.STEPS)} - {of(names.CHECKPOINT_STEPS)}",
                "stored batches": of(names.BATCHES_KEPT),
                "from one checkpoint to the next": of(names.CHECKPOINT_EVERY),
            },
            steps=True,
        )
    )
    return page.with_panel(
        graph(
            "Duration of a drain, and age of the checkpoint",
            "Draining is 0, or short: a draining run ends when its batch is trained. The checkpoint's age falls to 0 "
            "at each checkpoint.",
            "s",
            {"draining": of(names.DRAINING), "age of the newest checkpoint": of(names.CHECKPOINT_AGE)},
        )
    )


def _at_a_glance() -> list:
    return [
        glance(
            "Failed attempts",
            "Within the window. 0 is good; a few cost only time.",
            "none",
            grown(of(names.RETRIES)),
            steps=((None, "green"), (1.0, "yellow"), (20.0, "red")),
            decimals=0,
        ),
        glance("Groups failed", "Since the start: 0.", "none", of(names.GROUPS_ENDED, state="failed"), steps=BAD),
        glance(
            "Replicas down now",
            "0: no replica is starting, stopping or gone.",
            "none",
            f"sum ({of(names.REPLICAS, state=any_of(DOWN))})",
            steps=BAD,
        ),
        glance(
            "Newest checkpoint",
            "Age of the checkpoint: at most about the time of trainer.checkpoint_every steps.",
            "s",
            of(names.CHECKPOINT_AGE),
        ),
        glance(
            "Stored trajectories",
            "Limited by the groups in flight and the steps since the newest checkpoint.",
            "bytes",
            of(names.STORE_BYTES),
        ),
        glance(
            "Disk free",
            "Above 10 %. The alert EngineDiskFilling covers this.",
            "percentunit",
            f"{of(names.DISK_FREE)} / {of(names.DISK_SIZE)}",
            steps=((None, "red"), (0.1, "yellow"), (0.2, "green")),
        ),
    ]
