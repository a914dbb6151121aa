"""What starts work after the events of a tick, in this order."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from engine.scheduling.core import Core
from engine.scheduling.departures import drain_replicas
from engine.scheduling.groups import order_state_work, start_groups
from engine.scheduling.pools import lease_pools
from engine.scheduling.processes import start_trainer_in_turn
from engine.scheduling.steps import form_batches, set_deadline_timer
from engine.scheduling.stragglers import move_groups_off_slow_replicas
from engine.scheduling.validation import reserve_replicas, send_rows
from engine.scheduling.weights import sync_weights


class Reaction(NamedTuple):
    """What follows from the events of a tick."""

    react: Callable[[Core], None]
    needs: Callable[[Core], Any] | None = None
    """Where this is false or empty, it has nothing to do. None: it finds that out itself."""


def assign_replicas_and_weights(core: Core) -> None:
    """After anything but a group has changed: which replicas leave, which task has which pool, and which version
    belongs where. Validations come before pools and weights: one that ends here leaves replicas to both."""
    drain_replicas(core)
    reserve_replicas(core)
    start_trainer_in_turn(core)
    lease_pools(core)
    sync_weights(core)
    core.state.changed = False


STARTS_WORK = (
    Reaction(form_batches),
    Reaction(assign_replicas_and_weights, attrgetter("state.changed")),
    Reaction(send_rows, attrgetter("state.validations.live")),
    Reaction(start_groups),
    Reaction(move_groups_off_slow_replicas, attrgetter("state.limits.straggler_factor")),
    Reaction(order_state_work, attrgetter("state.groups.state_queues.by_name")),
    Reaction(set_deadline_timer, attrgetter("decisions.policies.deadline.acts")),
)
