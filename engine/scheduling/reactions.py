"""What starts work after the events of a tick, in this order."""

from engine.scheduling.core import Core
from engine.scheduling.departures import drain_replicas
from engine.scheduling.groups import order_state_work, start_groups
from engine.scheduling.pools import lease_pools
from engine.scheduling.processes import start_trainer_in_turn
from engine.scheduling.steps import form_batches, set_deadline_timer
from engine.scheduling.stragglers import move_groups_off_slow_replicas
from engine.scheduling.validation import reserve_replicas, send_rows
from engine.scheduling.weights import sync_weights


def assign_replicas_and_weights(core: Core) -> None:
    """After anything but a group has changed: which replicas leave, which task has which pool, and which version
    belongs where. Validations come before pools and weights: one that ends here leaves replicas to both."""
    if not core.state.changed:
        return
    drain_replicas(core)
    reserve_replicas(core)
    start_trainer_in_turn(core)
    lease_pools(core)
    sync_weights(core)
    core.state.changed = False


STARTS_WORK = (
    form_batches,
    assign_replicas_and_weights,
    send_rows,
    start_groups,
    move_groups_off_slow_replicas,
    order_state_work,
    set_deadline_timer,
)
