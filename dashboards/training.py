"""The training board: loss, gradient norm, clipping, divergence, corrections, advantages, validation.

It shows what the trainer reports, by the names it gives: figures that a trainer adds under such a name appear by
themselves.
"""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.overview import STALENESS_SPREAD
from dashboards.panels import board, glance, graph, heat, row
from dashboards.queries import buckets, mean, of, rate
from engine.metrics import names


def figure(name: str) -> str:
    """The trainer's newest metric with a name; a regular expression begins with `~`."""
    return of(names.TRAINER_FIGURE, figure=name)


def share(name: str) -> str:
    """A count that the trainer reports for a step, as a share of the groups of a batch."""
    return f"{figure(name)} / on (run) group_left {of(names.BATCH_SIZE)}"


AGENTS = ("agent_",)
"""Begin the names of figures that only runs with agents or an environment have."""


def training() -> Dashboard:
    page = board("training", "Training", "Does the policy learn, and is its data sound?")
    for panel in _at_a_glance():
        page = page.with_panel(panel)
    page = page.with_row(row("The update"))
    page = page.with_panel(
        graph(
            "Loss",
            "In policy gradients, the loss itself says little. Look for jumps and NaN.",
            "short",
            {"{{figure}}": figure("~loss.*")},
            low=None,
        )
    )
    page = page.with_panel(
        graph(
            "Gradient norm, before clipping",
            "Stable. A spike means that one batch has a strong effect. Growth over hours precedes a collapse.",
            "short",
            {"{{figure}}": figure("~grad_norm.*")},
        )
    )
    page = page.with_panel(
        graph(
            "Share of tokens whose ratio is clipped",
            "A few percent. Near 0: the updates are small. Above 20 %: too many updates on a batch, or data too stale.",
            "percentunit",
            {"{{figure}}": figure("~clip_share.*|.*clipped_share.*")},
        )
    )
    page = page.with_panel(
        graph(
            "Divergence from earlier policies (KL estimates)",
            "Small and stable. Steady growth: the policy moves away from the one that sampled the data, or from the "
            "reference.",
            "short",
            {"{{figure}}": figure("~.*kl.*")},
            low=None,
        )
    )
    page = page.with_panel(
        graph(
            "Entropy",
            "Falls slowly. Near 0, the policy has stopped exploring. A rise usually means that outputs become noise.",
            "suffix: nats",
            {"{{figure}}": figure("~.*entropy.*")},
        )
    )
    page = page.with_panel(
        graph(
            "Health checks that find something",
            "0: no check. The alert EngineHealthFinding covers them; `engine top RUN` says what to do.",
            "suffix: findings",
            {"{{check}}": of(names.HEALTH_FINDING)},
            steps=True,
        )
    )
    page = page.with_panel(graph("Learning rate", "Follows its schedule.", "sci", {"{{figure}}": figure("lr")}))
    page = page.with_row(row("Agents and environments"))
    page = page.with_panel(
        graph(
            "Turns, tool calls and tool errors of a rollout",
            "Tool errors fall as the model learns its tools; turns at their limit mean that episodes do not end.",
            "short",
            {"{{figure}}": figure("~agent_(turns|tool_calls|tool_errors|max_turns_share)")},
        )
    )
    page = page.with_panel(
        graph(
            "Tokens of a rollout by role",
            "What the model samples, and what tools and users insert. Only sampled tokens are trained.",
            "short",
            {"{{figure}}": figure("~agent_tokens_.*")},
        )
    )
    page = page.with_row(row("How far off policy"))
    page = page.with_panel(
        graph(
            "Importance ratio, and by staleness if reported",
            "Near 1. It is further from 1 for older data. Far from 1, the corrections discard the data.",
            "short",
            {"{{figure}}": figure("~.*ratio.*")},
            low=None,
        )
    )
    page = page.with_panel(
        graph(
            "Effective sample size, and shares that corrections mask or truncate",
            "If the effective size is near 1 and the other shares are near 0, the data is nearly on policy.",
            "percentunit",
            {"{{figure}}": figure("~ess.*|.*truncated_share.*|.*masked_share.*|.*rejected_share.*")},
            high=1.0,
        )
    )
    page = page.with_panel(
        graph(
            "Gap between the log-probs of sampler and trainer, by cause",
            "For fresh tokens, the largest is well below 1 and the mean near 0. The alerts EngineSamplerDisagrees and "
            "EngineLogprobGap cover them.",
            "suffix: nats",
            {"{{figure}}": figure("~logprob_gap.*")},
        )
    )
    page = page.with_panel(
        graph(
            "Staleness of trained groups",
            "Train steps that the oldest token of a group lags behind. Never above the bound S.",
            "suffix: steps",
            STALENESS_SPREAD,
        )
    )
    page = page.with_row(row("The signal"))
    page = page.with_panel(
        graph(
            "Reward and its spread",
            "The mean rises. With a spread near 0, there is nothing to learn from.",
            "short",
            {"{{figure}}": figure("~reward_.*"), "newest step": of(names.REWARD)},
            low=None,
        )
    )
    page = page.with_panel(
        heat(
            "Responses by reward",
            "Moves to higher rewards. All in one bucket: there is nothing to learn from.",
            buckets(names.REWARD_HISTOGRAM, figure="reward"),
        )
    )
    page = page.with_panel(
        graph(
            "Truncated, empty, repeated and unparsable responses",
            "Cut off, empty, or identical to another one of their group. More repeats: the policy becomes less varied.",
            "percentunit",
            {"{{figure}}": figure("~(truncated|empty|repeated|unparsable)_share")},
            high=1.0,
        )
    )
    page = page.with_panel(
        graph(
            "Groups without a signal",
            "Groups with equal rewards teach nothing. Filtered groups were not trained; the others took a place in a "
            "batch.",
            "percentunit",
            {
                "filtered, share of ended groups": (
                    f"{rate(names.GROUPS_ENDED, state='filtered')} / {rate(names.GROUPS_ENDED)}"
                ),
                "without advantage, share of a batch": share("zero_advantage_groups"),
            },
            high=1.0,
        )
    )
    page = page.with_panel(
        graph(
            "Advantage spread",
            "Stable. Falls if prompts become too easy or too hard.",
            "short",
            {"{{figure}}": figure("~advantage.*|reward_std")},
        )
    )
    page = page.with_panel(
        graph(
            "Accuracy on validation prompts, and in training",
            "Rises. Far lower on validation prompts than in training: the policy learns its prompts, not the task.",
            "percentunit",
            {
                "held out": of(names.ACCURACY),
                "in training": figure("accuracy"),
                "held out, failed": of(names.FAILED_SHARE),
            },
            high=1.0,
        )
    )
    page = page.with_row(row("Data sources"))
    page = page.with_panel(
        graph(
            "Reward by data source",
            "Each rises. A source that stays at 0 or at its maximum teaches nothing: change its weight, or filter it.",
            "short",
            {"{{source}}": of(names.SOURCE_REWARD)},
            low=None,
        )
    )
    page = page.with_panel(
        graph(
            "Share of a batch by data source",
            "As the weights say, on average; it moves with the stages of a curriculum.",
            "percentunit",
            {"{{source}}": of(names.SOURCE_SHARE)},
            stacked=True,
            high=1.0,
        )
    )
    page = page.with_panel(
        graph(
            "Groups drawn by data source",
            "In the proportion of the weights.",
            "suffix: groups/s",
            {"{{source}}": rate(names.SOURCE_DRAWN, by="source")},
        )
    )
    page = page.with_panel(
        graph(
            "Rows left out by data source",
            "Before the run, and rows that rest now and then. Nearly all rows at rest: the source is learned or too "
            "hard.",
            "suffix: rows",
            {
                "{{source}}, before the run": of(names.SOURCE_DROPPED),
                "{{source}}, at rest": of(names.SOURCE_RESTED),
            },
        )
    )
    page = page.with_row(row("Validation"))
    page = page.with_panel(
        graph(
            "Accuracy, pass@k and maj@k of each set",
            "Rise. A change within the 95 % interval says nothing yet; the next panel shows the intervals.",
            "percentunit",
            {"{{set}} {{figure}}": of(names.VALIDATION_FIGURE, figure="~.*@.*", estimate="value")},
            high=1.0,
        )
    )
    page = page.with_panel(
        graph(
            "Their 95 % confidence intervals",
            "Narrow. Wide: the set has too few prompts for the difference that you look for.",
            "percentunit",
            {"{{set}} {{figure}} {{estimate}}": of(names.VALIDATION_FIGURE, figure="~.*@.*", estimate="~low|high")},
            high=1.0,
        )
    )
    page = page.with_panel(
        graph(
            "Validations in progress",
            "Mostly 0 or 1 running. If many are queued, newer versions cancel them: validate less often, or on more "
            "replicas.",
            "suffix: validations",
            {"{{state}}": of(names.VALIDATIONS)},
        )
    )
    page = page.with_panel(
        graph(
            "Validations ended",
            "All are reported. cancelled: superseded or in conflict; failed: because of its rows or replicas.",
            "suffix: validations",
            {"{{state}}": of(names.VALIDATIONS_ENDED)},
        )
    )
    page = page.with_panel(
        graph(
            "How long a validation takes",
            "From the request to the report: well below the time between two validations.",
            "s",
            {"mean": mean(names.VALIDATION_SECONDS)},
        )
    )
    page = page.with_panel(
        graph(
            "Validation rows measured per second",
            "0 between validations. Steady during a validation.",
            "suffix: rows/s",
            {"measured": rate(names.VALIDATION_ROWS)},
        )
    )
    return page.with_panel(
        graph(
            "Newest measured weights version",
            "Follows the trained version at intervals of validation.every.",
            "none",
            {"measured": of(names.VALIDATION_VERSION), "published": of(names.WEIGHTS_VERSION)},
        )
    )


def _at_a_glance() -> list:
    return [
        glance("Loss now", "Finite. The alert EngineLossNotFinite covers this.", "short", figure("loss"), decimals=4),
        glance("Gradient norm", "Stable.", "short", figure("grad_norm"), decimals=3),
        glance("KL estimate", "Small.", "short", figure("approx_kl"), decimals=4),
        glance("Entropy now", "Well above 0.", "suffix: nats", figure("~entropy|entropy_estimate"), decimals=3),
        glance(
            "Validation accuracy",
            "Rises from one validation to the next.",
            "percentunit",
            of(names.ACCURACY),
            decimals=1,
        ),
        glance(
            "Newest measured step",
            "Train steps in the weights of the newest validation.",
            "suffix: steps",
            of(names.ACCURACY_STEPS),
        ),
    ]
