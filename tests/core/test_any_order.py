"""The search of `engine check` finds rules that docs/STALENESS.md refutes."""

import re
from collections.abc import Callable
from itertools import count

import pytest

from engine.errors import ConfigError
from engine.events import Event
from engine.policies import PolicySet
from engine.runtime.driver import Driver
from engine.simulation.order_answers import GivenPrompts
from engine.simulation.proof import prove
from engine.simulation.small_run import SmallRun
from engine.states.limits import Limits
from tests.core.test_worlds import only_those_due_now, parked_groups_resume_on_older_versions


@pytest.mark.parametrize(
    ("put_in", "names", "batch", "law"),
    [
        pytest.param(
            only_those_due_now,
            {"batching": "freshest"},
            1,
            "law 4: more groups are due by a step",
            marks=pytest.mark.long,
        ),
        (
            parked_groups_resume_on_older_versions,
            {"sync": "rolling"},
            2,
            "law 6: a replica reported tokens of versions",
        ),
    ],
)
def test_a_refuted_variant_is_found(
    put_in: Callable[[pytest.MonkeyPatch], None], names: dict[str, str], batch: int, law: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    put_in(monkeypatch)
    limits = Limits(
        train_batch_size=batch, max_staleness_steps=2, max_concurrent_groups=3 * batch, sync_mode="abort",
        deadline_timeout_s=1.0, infrastructure_attempts=50,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=re.escape(law)):
        prove(limits, names, runs=600)


def test_the_first_failure_of_a_run_is_the_one_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows from it is not: a scheduler that raised is in no lawful state."""
    limits = Limits(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4)
    run = SmallRun(limits, PolicySet.from_names({}), GivenPrompts())
    raised = (ValueError(f"failure {number}") for number in count(1))

    def fails(self: Driver, *events: Event) -> None:
        raise next(raised)

    monkeypatch.setattr(Driver, "deliver", fails)
    for act in (run.advance, run.advance, run.complete):
        with pytest.raises(ValueError, match="failure") as caught:
            act()
    assert str(caught.value) == "failure 1"
