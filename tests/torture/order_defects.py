"""Defects that the search of every order of events must find. Each is put into the pure core of this process."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from engine.commands import RetireWeights
from engine.events import DrawFailed, WeightsInstalled
from engine.scheduling import processes, steps, weights
from engine.scheduling.core import Core
from engine.scheduling.scheduler import HANDLERS
from engine.states.group import Group
from engine.states.groups import Groups
from engine.states.replica import Replica
from engine.states.state import State
from engine.states.step import Step
from tests.core.test_worlds import (
    only_those_due_now,
    parked_groups_resume_on_older_versions,
    short_steps_not_charged_in_full,
)
from tests.torture.every_order import SmallWorld

Patch = pytest.MonkeyPatch
handlers: Any = HANDLERS


def one_place_too_many(patch: Patch) -> None:
    honest = State.places
    patch.setattr(State, "places", lambda self, version: honest(self, version) + 1)


def weights_are_dropped_while_a_replica_takes_them(patch: Patch) -> None:
    def retire(core: Core, latest: int) -> None:
        for id in [id for id in core.state.training.versions if id < latest]:
            core.state.fire_version(core.state.training.versions[id], "retire")
            core.state.orders.add(RetireWeights(version=id))

    patch.setattr(weights, "_retire_versions", retire)


def failed_group_is_not_resumed(patch: Patch) -> None:
    honest = Groups._enter_parked

    def enter(self: Groups, group: Group) -> None:
        honest(self, group)
        if group.infrastructure_failures:
            del self.parked[group.id]

    patch.setattr(Groups, "_enter_parked", enter)


def failed_step_is_not_repeated(patch: Patch) -> None:
    patch.setattr(steps, "begin_step_again", lambda core, step: None)


def failed_draw_ends_the_data(patch: Patch) -> None:
    def on_draw_failed(core: Core, event: DrawFailed) -> None:
        core.state.groups.facts.exhausted = True

    patch.setitem(handlers, DrawFailed, on_draw_failed)


def first_loss_ends_the_run(patch: Patch) -> None:
    patch.setattr(processes, "may_restart", lambda core, process: False)


def a_batched_group_is_dropped(patch: Patch) -> None:
    honest = steps._drop_surplus

    def drop(core: Core, step: Step) -> None:
        honest(core, step)
        steps.drop_group(core, core.state.groups.live[step.groups[-1]])

    patch.setattr(steps, "_drop_surplus", drop)


def pause_forgets_the_groups_it_waits_for(patch: Patch) -> None:
    honest = weights._pause_replica

    def pause(core: Core, replica: Replica) -> None:
        honest(core, replica)
        for id in list(core.state.replicas.running(replica)):
            core.state.orders.withdraw("group", id)

    patch.setattr(weights, "_pause_replica", pause)


def weights_are_installed_again_and_again(patch: Patch) -> None:
    def on_weights_installed(core: Core, event: WeightsInstalled) -> None:
        replica = core.state.replicas.by_id[event.replica]
        before = replica.version
        weights.on_weights_installed(core, event)
        replica.version = before

    patch.setitem(handlers, WeightsInstalled, on_weights_installed)


def last_short_batch_never_forms(patch: Patch) -> None:
    patch.setattr(steps, "_no_group_comes", lambda core: False)


FRESHEST, SHRINK, ROLLING = {"batching": "freshest"}, {"deadline": "shrink"}, {"sync": "rolling"}
DEFECTS: Mapping[Callable[[Patch], None], tuple[SmallWorld, str]] = {
    one_place_too_many: (SmallWorld(1, 1, 2, slots=3, failure=False), "law 4"),
    only_those_due_now: (SmallWorld(1, 2, 3, slots=3, prompts=5, failure=False, names=FRESHEST), "law 4"),
    short_steps_not_charged_in_full: (SmallWorld(2, 1, 4, slots=4, prompts=6, failure=False, names=SHRINK), "law 4"),
    parked_groups_resume_on_older_versions: (
        SmallWorld(1, 1, 2, replicas=2, slots=1, prompts=4, failure=False, sync_mode="abort", names=ROLLING), "law 6",
    ),
    weights_are_dropped_while_a_replica_takes_them: (SmallWorld(1, 1, 2, failure=False), "law 6"),
    failed_group_is_not_resumed: (SmallWorld(1, 0, 1), "nothing is running"),
    failed_step_is_not_repeated: (SmallWorld(1, 0, 1), "law 10"),
    failed_draw_ends_the_data: (SmallWorld(1, 0, 1), "law 5"),
    first_loss_ends_the_run: (SmallWorld(1, 0, 1), "law 9"),
    a_batched_group_is_dropped: (SmallWorld(1, 0, 2, failure=False, over_sample=1.0), "cannot drop in state batched"),
    pause_forgets_the_groups_it_waits_for: (SmallWorld(1, 1, 2, failure=False, sync_mode="wait"), "law 1"),
    weights_are_installed_again_and_again: (SmallWorld(1, 0, 1, failure=False), "law 7"),
    last_short_batch_never_forms: (SmallWorld(2, 0, 2, failure=False), "nothing is running"),
}  # fmt: skip
"""Each with a run in which it is found, and the law that it breaks."""
