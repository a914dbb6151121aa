"""The search of every order of events: what it passes over decides nothing, and it finds defects."""

from collections.abc import Callable

import pytest

from engine.scheduling.scheduler import Scheduler
from engine.states.limits import ValidationLimits
from engine.states.state import RunFacts
from tests.core.added_states import CHECKING
from tests.torture import order_defects
from tests.torture.every_order import Search, SmallWorld, hash_state
from tests.torture.order_defects import DEFECTS, Patch
from tests.torture.order_grid import APART


class FullSearch(Search):
    """Passes over nothing: every acknowledgment, name and count makes states of its own."""

    def __init__(self, world: SmallWorld) -> None:
        super().__init__(world)
        self.alike: set[bytes] = set()
        """The hashes of the states that a reduced search has for them."""
        self.reduced = Search(world)

    def acknowledge(self, scheduler: Scheduler) -> None:
        """Each acknowledgment is an event."""

    def encode(self, facts: RunFacts) -> bytes:
        data = self.encoder.encode(facts)
        scheduler = self.reduced.scheduler(data)
        self.reduced.acknowledge(scheduler)
        self.alike.add(hash_state(self.reduced.encode(scheduler.state.facts)))
        return data


@pytest.mark.parametrize(
    "world",
    [
        SmallWorld(1, 0, 1, replicas=2, slots=1, prompts=1),
        SmallWorld(1, 0, 1, prompts=1, checkpoint_every=1),
        SmallWorld(1, 0, 1, prompts=1, added_states=(CHECKING,)),
        SmallWorld(1, 0, 1, prompts=1, scoring_tasks=("ref_logprobs",), pools=APART),
        SmallWorld(1, 1, 2, prompts=2, failure=False),
        SmallWorld(1, 0, 2, prompts=2, failure=False, over_sample=1.0),
        *(
            pytest.param(world, marks=pytest.mark.long)
            for world in (
                SmallWorld(1, 0, 1, prompts=1, validation=ValidationLimits(rows=2, every=1)),
                SmallWorld(1, 0, 1, prompts=2, sync_mode="wait"),
                SmallWorld(1, 1, 2, prompts=2, sync_mode="abort", names={"deadline": "drop"}),
            )
        ),
    ],
    ids=lambda world: world.title,
)
def test_a_reduced_search_has_the_states_of_a_full_one(world: SmallWorld) -> None:
    full, reduced = FullSearch(world), Search(world)
    assert full.run().story == reduced.run().story == ""
    assert full.alike == reduced.numbers.keys()
    assert len(full.numbers) > 2 * len(reduced.numbers)


@pytest.mark.parametrize(
    "put_in", [order_defects.one_place_too_many, order_defects.weights_are_installed_again_and_again]
)
def test_a_seeded_defect_is_found_with_the_events_that_lead_to_it(
    put_in: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    world, law = DEFECTS[put_in]
    put_in(monkeypatch)
    story = Search(world).run().story
    assert story.startswith(law)
    assert "  1. ProcessUp" in story
