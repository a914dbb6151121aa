"""The board of training: the loss and its neighbors, clipping, divergence, corrections, advantages, validation.

It shows what the trainer reports, by the names it gives: figures that a trainer adds under such a name appear by
themselves.
"""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.overview import STALENESS_SPREAD
from dashboards.panels import board, glance, graph, row
from dashboards.queries import mean, of, rate
from engine.metrics import names


def figure(name: str) -> str:
    """What the trainer last said under a name; a regular expression begins with `~`."""
    return of(names.TRAINER_FIGURE, figure=name)


def share(name: str) -> str:
    """A count that the trainer reports for a step, as a share of the groups of a batch."""
    return f"{figure(name)} / on (run) group_left {of(names.BATCH_SIZE)}"


def training() -> Dashboard:
    made = board("training", "Training", "Does the policy learn, and is what it learns from sound?")
    for panel in _at_a_glance():
        made = made.with_panel(panel)
    made = made.with_row(row("The update"))
    made = made.with_panel(
        graph(
            "Loss",
            "Of little meaning by itself in policy gradients; jumps and NaN are what to look for.",
            "short",
            {"{{figure}}": figure("~loss.*")},
            low=None,
        )
    )
    made = made.with_panel(
        graph(
            "Gradient norm, before clipping",
            "Stable. Spikes say that single batches pull hard; growth over hours precedes a collapse.",
            "short",
            {"{{figure}}": figure("~grad_norm.*")},
        )
    )
    made = made.with_panel(
        graph(
            "Share of tokens whose ratio is clipped",
            "A few percent. Near 0: the updates are small; above 20 %: too many updates on a batch, or too stale.",
            "percentunit",
            {"{{figure}}": figure("~clip_share.*|.*clipped_share.*")},
        )
    )
    made = made.with_panel(
        graph(
            "Divergence from the policies before (KL estimates)",
            "Small and stable. Steady growth means the policy leaves what sampled the data, or the reference.",
            "short",
            {"{{figure}}": figure("~.*kl.*")},
            low=None,
        )
    )
    made = made.with_panel(
        graph(
            "Entropy",
            "Falls slowly. Near 0 the policy has stopped exploring; a rise is usually noise taking over.",
            "suffix: nats",
            {"{{figure}}": figure("~.*entropy.*")},
        )
    )
    made = made.with_panel(graph("Learning rate", "As the schedule has it.", "sci", {"{{figure}}": figure("lr")}))
    made = made.with_row(row("How far off policy"))
    made = made.with_panel(
        graph(
            "Importance ratio, and by staleness where it is reported",
            "Near 1. Older data drift away from it; far off, the corrections throw the data away.",
            "short",
            {"{{figure}}": figure("~.*ratio.*")},
            low=None,
        )
    )
    made = made.with_panel(
        graph(
            "Effective sample size, and what corrections mask or truncate",
            "Effective size near 1, masked and truncated near 0: the data are nearly on policy.",
            "percentunit",
            {"{{figure}}": figure("~ess.*|.*truncated_share.*|.*masked_share.*|.*rejected_share.*")},
            high=1.0,
        )
    )
    made = made.with_panel(
        graph(
            "Largest gap between the log-probs of sampler and trainer",
            "Fresh groups: well below 1, whatever the precision. The alert EngineSamplerDisagrees watches them.",
            "suffix: nats",
            {"{{figure}}": figure("~logprob_gap.*")},
        )
    )
    made = made.with_panel(
        graph(
            "Staleness of what is trained on",
            "Train steps that the oldest token of a group lags behind. Never above the bound S.",
            "suffix: steps",
            STALENESS_SPREAD,
        )
    )
    made = made.with_row(row("The signal"))
    made = made.with_panel(
        graph(
            "Reward and its spread",
            "The mean rises; a spread near 0 leaves nothing to learn from.",
            "short",
            {"{{figure}}": figure("~reward_.*"), "newest step": of(names.REWARD)},
            low=None,
        )
    )
    made = made.with_panel(
        graph(
            "Groups without a signal",
            "Groups of equal rewards teach nothing. Filtered ones were not trained on; the others took a place in a "
            "batch.",
            "percentunit",
            {
                "filtered, of all that ended": (
                    f"{rate(names.GROUPS_ENDED, state='filtered')} / {rate(names.GROUPS_ENDED)}"
                ),
                "without advantage, of a batch": share("zero_advantage_groups"),
            },
            high=1.0,
        )
    )
    made = made.with_panel(
        graph(
            "Advantage spread",
            "Stable. Falls as prompts become too easy or too hard.",
            "short",
            {"{{figure}}": figure("~advantage.*|reward_std")},
        )
    )
    made = made.with_panel(
        graph(
            "Accuracy on held-out prompts, and in training",
            "Rises. Held out far below training: the policy fits its prompts, not the task.",
            "percentunit",
            {"held out": of(names.ACCURACY), "in training": figure("accuracy")},
            high=1.0,
        )
    )
    made = made.with_row(row("Validation"))
    made = made.with_panel(
        graph(
            "Validations in progress",
            "Mostly 0 or 1 running. Queued ones that pile up are cancelled by newer versions: measure less often, or on"
            " more replicas.",
            "suffix: validations",
            {"{{state}}": of(names.VALIDATIONS)},
        )
    )
    made = made.with_panel(
        graph(
            "Validations ended",
            "All of them reported. Cancelled: superseded or in conflict; failed: their rows or replicas were at fault.",
            "suffix: validations",
            {"{{state}}": of(names.VALIDATIONS_ENDED)},
        )
    )
    made = made.with_panel(
        graph(
            "How long a validation takes",
            "From the version that is to be measured to its report: well below the time between two of them.",
            "s",
            {"mean": mean(names.VALIDATION_SECONDS)},
        )
    )
    made = made.with_panel(
        graph(
            "Held-out rows measured a second",
            "0 between validations. Steady while one runs.",
            "suffix: rows/s",
            {"measured": rate(names.VALIDATION_ROWS)},
        )
    )
    return made.with_panel(
        graph(
            "Weights version measured last",
            "Follows the version trained, at the distance that validation.every says.",
            "none",
            {"measured": of(names.VALIDATION_VERSION), "published": of(names.WEIGHTS_VERSION)},
        )
    )


def _at_a_glance() -> list:
    return [
        glance("Loss now", "Finite. The alert EngineLossNotFinite watches it.", "short", figure("loss"), decimals=4),
        glance("Gradient norm", "Stable.", "short", figure("grad_norm"), decimals=3),
        glance("KL estimate", "Small.", "short", figure("approx_kl"), decimals=4),
        glance("Entropy now", "Well above 0.", "suffix: nats", figure("entropy"), decimals=3),
        glance(
            "Held-out accuracy",
            "Rises from one validation to the next.",
            "percentunit",
            of(names.ACCURACY),
            decimals=1,
        ),
        glance(
            "Measured after",
            "Train steps in the weights that were measured.",
            "suffix: steps",
            of(names.ACCURACY_STEPS),
        ),
    ]
