"""The first board: whether the run is healthy, what limits it, and whether it learns."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.panels import board, glance, graph, row
from dashboards.queries import RUN, idle_share, mean, of, rate, share_by_cause, whole_quantile
from engine.metrics import names

STALENESS_SPREAD = {
    "least": of(names.STEP_STALENESS, stat="min"),
    "mean": of(names.STEP_STALENESS, stat="mean"),
    "p95": whole_quantile(0.95, names.STALENESS, names.MAX_STALENESS),
    "most": of(names.STEP_STALENESS, stat="max"),
    "bound S": of(names.MAX_STALENESS),
}

ALERTS_FIRING = (
    f'sum by (alertname) (ALERTS{{alertstate="firing", run="{RUN}"}}'
    f' or label_replace(0 * {of(names.UPTIME)}, "alertname", "none", "", ""))'
)
"""Firing alerts by name, with a line at 0 that shows that Prometheus answers."""


def overview() -> Dashboard:
    page = board("overview", "Overview", "Is the run healthy, what limits it, and does it learn?")
    for panel in _at_a_glance():
        page = page.with_panel(panel)
    page = page.with_row(row("What is wrong"))
    page = page.with_panel(
        graph(
            "Firing alerts",
            "None. docs/TROUBLESHOOTING.md explains each alert by name: what it means, and what to do.",
            "short",
            {"{{alertname}}": ALERTS_FIRING},
            span=24,
            steps=True,
        ).height(5)
    )
    page = page.with_row(row("Does it learn"))
    page = page.with_panel(
        graph(
            "Reward of the newest train step",
            "Should rise over many steps. A sudden fall is a collapse. A flat line at the highest reward means that "
            "the prompts are too easy.",
            "short",
            {"mean reward": of(names.REWARD), "validation accuracy": of(names.ACCURACY)},
            low=None,
        )
    )
    page = page.with_panel(
        graph(
            "Staleness of trained groups",
            "Train steps that the oldest token of a group lags behind. Never above the bound S. A mean well below S "
            "means that the rollout keeps up.",
            "suffix: steps",
            STALENESS_SPREAD,
        )
    )
    page = page.with_row(row("How fast it is"))
    page = page.with_panel(
        graph(
            "Prompt groups per second",
            "In a balanced run, the rates of generated and trained groups are about equal. Filtered, dropped and "
            "failed groups are wasted work.",
            "suffix: groups/s",
            {
                "generated": rate(names.REPLICA_GROUPS, end="generated"),
                "trained": rate(names.GROUPS_ENDED, state="consumed"),
                "filtered, dropped or failed": rate(names.GROUPS_ENDED, state="~filtered|dropped|failed"),
            },
        )
    )
    page = page.with_panel(
        graph(
            "Response tokens per second",
            "Steady. The difference between generated and trained tokens was filtered or dropped.",
            "suffix: tokens/s",
            {"generated": rate(names.TOKENS_GENERATED), "trained": rate(names.TOKENS_TRAINED)},
        )
    )
    page = page.with_panel(
        graph(
            "Seconds of a train step, by phase",
            "Training should take most of the time. Much collecting: the rollout is too slow. Much publishing: the "
            "transfer of the weights from the trainer is too slow.",
            "s",
            {"{{phase}}": mean(names.STEP_SECONDS, by="phase")},
            stacked=True,
        )
    )
    page = page.with_panel(
        graph(
            "Weights version, trained and on each replica",
            "Replicas follow the trainer within a step. A replica that stays behind does not install new weights.",
            "none",
            {"trained": of(names.WEIGHTS_VERSION), "replica {{replica}}": of(names.REPLICA_WEIGHTS_VERSION)},
            steps=True,
        )
    )
    page = page.with_row(row("Where the time goes"))
    page = page.with_panel(
        graph(
            "Idle share of the rollout, by cause",
            "Low. reward: rewards are slower than generation; staleness_bound: the trainer is the bottleneck; "
            "weight_sync: pauses; pool: the trainer uses the machines; draining: replicas or the run are "
            "draining; no_prompts: no prompts are left.",
            "percentunit",
            {"{{cause}}": share_by_cause(names.ROLLOUT_BUSY, names.ROLLOUT_IDLE)},
            stacked=True,
            high=1.0,
        )
    )
    return page.with_panel(
        graph(
            "Idle share of the trainer, by cause",
            "Low. waiting_for_groups: the rollout is the bottleneck; waiting_for_stragglers: a few long responses "
            "delay the step; restarting: the trainer died; pool: replicas are going to sleep; "
            "waiting_for_weight_sync: replicas must install the newest weights first.",
            "percentunit",
            {"{{cause}}": share_by_cause(names.TRAINER_BUSY, names.TRAINER_IDLE)},
            stacked=True,
            high=1.0,
        )
    )


def _at_a_glance() -> list:
    return [
        glance(
            "Train steps done",
            "Rises steadily. The Scheduler board shows the time since the last step.",
            "none",
            of(names.STEPS),
        ),
        glance("Reward", "Mean of the newest train step. Should rise.", "short", of(names.REWARD), decimals=3),
        glance(
            "Oldest trained token",
            "Largest staleness in the newest train step. Never above S.",
            "suffix: steps behind",
            of(names.STEP_STALENESS, stat="max"),
        ),
        glance(
            "Rollout idle",
            "Share of slot time without generation. Below 20 % is good.",
            "percentunit",
            idle_share(names.ROLLOUT_BUSY, names.ROLLOUT_IDLE),
            steps=((None, "green"), (0.2, "yellow"), (0.5, "red")),
        ),
        glance(
            "Trainer idle",
            "Share of time in which no step is scored or trained. Below 20 % is good.",
            "percentunit",
            idle_share(names.TRAINER_BUSY, names.TRAINER_IDLE),
            steps=((None, "green"), (0.2, "yellow"), (0.5, "red")),
        ),
        glance(
            "What limits the rollout now",
            "slots_full: the replicas are busy, as they should be. Any other value says what the next group waits for.",
            "none",
            f"{of(names.ADMISSION_LIMIT)} == 1",
            legend="{{limit}}",
        ),
    ]
