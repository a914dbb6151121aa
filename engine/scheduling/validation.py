"""Validations: when one is due, which replicas it holds at its version, which rows each measures, how it ends.

Called by `scheduler.py`. A validation takes nothing but slots of the replicas it holds, and delays nothing but their
installs. Whatever becomes of it, the run continues.
"""

from typing import Any

from engine.commands import MeasureRows, StopMeasuring
from engine.events import RowsFailed, RowsMeasured
from engine.ids import StepId, Version
from engine.scheduling.core import Core
from engine.states.limits import ValidationLimits
from engine.states.orders import Order
from engine.states.replica import Replica
from engine.states.validation import Chunk, Validation

REASON_LENGTH = 1000
"""Maximum length of a stored reason, in characters."""


# events


def on_rows_measured(core: Core, event: RowsMeasured) -> None:
    validation, chunk = _subject(core, event)
    fits = 0 <= event.right <= event.measured <= chunk.count and _fits(event, chunk)
    if event.version != validation.version or not fits:
        reason = (
            f"its replica reported version {event.version} instead of {validation.version}, or {event.measured} rows "
            f"and {event.right} right ones of {chunk.count}"
        )
        _lose_attempt(core, validation, chunk, reason)
        return
    core.state.validations.count(validation, chunk, event)
    if validation.left:
        return
    reason = next((chunk.reason[:REASON_LENGTH] for chunk in validation.chunks if chunk.reason), "")
    if validation.measured:
        _end_validation(core, validation, "report", reason)
    else:
        _end_validation(core, validation, "fail", ": ".join(filter(None, ("no row could be measured", reason))))


def _fits(event: RowsMeasured, chunk: Chunk) -> bool:
    """Whether an answer names each measured row of its chunk once, or none, and only these in its other parts."""
    named = {*event.rows}
    known = not named or (len(named) == event.measured and len({*event.right_rows}) == event.right)
    inside = all(chunk.first <= row < chunk.first + chunk.count for row in event.rows)
    inside = inside and named.issuperset(event.right_rows) and named.issuperset(event.part_rows)
    parts = len(event.part_rows) == len(event.part_places) == len(event.part_values)
    return known and inside and parts and len(named) == len(event.rows) == len(event.rewards) == len(event.answers)


def on_rows_failed(core: Core, event: RowsFailed) -> None:
    _lose_attempt(core, *_subject(core, event), event.reason)


def cut_rows(core: Core, order: Order, reason: str) -> None:
    """A chunk exceeded its time limit: its replica stops measuring, and all chunks there wait again. Only the
    overdue one is charged an attempt."""
    late: Any = order.command
    validation, replica = core.state.validations.live[late.validation], core.state.replicas.by_id[late.replica]
    core.state.orders.add(StopMeasuring(validation=validation.id, replica=replica.id, life=replica.life))
    for _, index in list(core.state.orders.of(replica.id, "rows")):
        core.state.validations.put_back(validation, validation.chunks[index], failed=index == late.chunk)
    validation.reason = reason[:REASON_LENGTH]


def _is_stopping(core: Core, validation: Validation, replica: Replica) -> bool:
    """Whether a replica has not yet stopped measuring for a validation. It would drop new chunks too."""
    stop: Any = core.state.orders.find("stop rows", replica.id)
    return stop is not None and stop.command.validation == validation.id


def _subject(core: Core, event: RowsMeasured | RowsFailed) -> tuple[Validation, Chunk]:
    """The validation and the chunk of an answer."""
    validation = core.state.validations.live[event.validation]
    return validation, validation.chunks[event.chunk]


def _lose_attempt(core: Core, validation: Validation, chunk: Chunk, reason: str) -> None:
    core.state.validations.put_back(validation, chunk)
    validation.reason = reason[:REASON_LENGTH]


# orders


def reserve_replicas(core: Core) -> None:
    """Queue what is due, give the oldest validation its replicas, end what cannot continue."""
    state, limits = core.state, core.state.limits.validation
    if limits is None or not state.facts.started or state.ending.outcome is not None:
        return
    _queue_due(core, limits)
    if state.ending.draining:
        return  # a queued validation is measured after the resume
    for validation in list(state.validations.live.values()):
        _take_replicas(core, validation, limits)
        spent = _why_it_cannot(core, validation, limits)
        if spent:
            _end_validation(core, validation, "fail", spent)
        elif _in_conflict(core, validation, limits):
            reason = f"it kept every replica from version {state.training.latest_version}"
            _end_validation(core, validation, "cancel", reason)
        else:
            return


def send_rows(core: Core) -> None:
    """Fill free slots of the replicas that the served validation holds. Called before groups get the slots."""
    state, validation = core.state, core.state.validations.served
    if validation is None:
        return
    waiting = state.validations.waiting[validation.id]
    for id in validation.replicas if waiting else ():
        replica, pool = state.replicas.by_id[id], state.pools.of_replica(id)
        if replica.state != "ready" or replica.version != validation.version:
            continue
        if (pool is not None and pool.wanted) or _is_stopping(core, validation, replica):
            continue
        while waiting and state.replicas.for_chunks(replica) > 0:
            if validation.state == "queued":
                validation.started_at = state.facts.now
                state.validations.fire(validation, "start")
            _order_rows(core, validation, waiting.take(validation.chunks), replica)


def close_validations(core: Core) -> None:
    """No newer version will be published: measure the last one, if it was not measured, on all replicas."""
    limits, facts = core.state.limits.validation, core.state.validations.facts
    latest = core.state.training.latest_version
    if limits is None:
        return
    facts.closing = True
    if limits.at_end and facts.newest != latest:
        _queue_validation(core, latest, limits)


def begin_validations_again(core: Core, steps: StepId) -> None:
    """The run is resumed after `steps` train steps, and older versions and their validations are lost. The next
    version is measured instead: it contains their steps, and usually the same weights. A validation of steps that
    are trained again is queued again with them."""
    state, facts = core.state, core.state.validations.facts
    for validation in list(facts.live.values()):
        for id in list(validation.replicas):
            state.validations.release(validation, state.replicas.by_id[id])  # its process is gone, so no order to stop
        again = "its steps are trained again" if validation.steps > steps else "the next version is measured instead"
        _cut_off(core, validation, f"the run ended before the validation: {again}")
    facts.owed |= 0 <= facts.interrupted <= steps
    facts.interrupted, facts.closing = -1, False
    if state.limits.validation is not None:
        facts.considered = state.training.latest_version


def cancel_validations(core: Core, reason: str) -> None:
    """Cancel all validations, because the run ends."""
    for validation in list(core.state.validations.live.values()):
        _cut_off(core, validation, reason)


def _cut_off(core: Core, validation: Validation, reason: str) -> None:
    facts = core.state.validations.facts
    facts.interrupted = validation.steps if facts.interrupted < 0 else min(facts.interrupted, validation.steps)
    _end_validation(core, validation, "cancel", reason)


# deciding


def _queue_due(core: Core, limits: ValidationLimits) -> None:
    facts, steps_in = core.state.validations.facts, core.state.training.steps_in
    while facts.considered < core.state.training.latest_version:
        version = facts.considered = facts.considered + 1
        before = steps_in[max(version - 1, 0)]
        due = core.decisions.ask("validation", (version, before, steps_in[version]), (bool,))
        if due or facts.owed:
            facts.owed = False
            _queue_validation(core, version, limits)


def _queue_validation(core: Core, version: Version, limits: ValidationLimits) -> None:
    live = list(core.state.validations.live.values())
    for validation in (one for one in live if one.state == "queued"):
        _end_validation(core, validation, "cancel", f"superseded by version {version} before it started")
    steps = core.state.training.steps_in[version]
    core.state.validations.queue(version, steps, limits, core.state.facts.now)


def _take_replicas(core: Core, validation: Validation, limits: ValidationLimits) -> None:
    """Hold as many replicas as allowed: first those that have its version, then those that can install it."""
    if not core.state.validations.waiting[validation.id]:
        return
    present = [r for r in core.state.replicas.by_id.values() if r.validator == limits.own and r.present]
    most = len(present) if limits.own or core.state.validations.facts.closing else limits.replicas
    fit = [r for r in present if r.id not in validation.replicas and r.heading <= validation.version]
    fit.sort(key=lambda r: (r.version != validation.version, r.heading != validation.version, r.id))
    for replica in fit[: max(0, most - len(validation.replicas))]:
        core.state.validations.hold(validation, replica)


def _why_it_cannot(core: Core, validation: Validation, limits: ValidationLimits) -> str:
    """Why a validation must fail; empty if it need not."""
    attempts, waiting = core.state.limits.infrastructure_attempts, core.state.validations.waiting[validation.id]
    if validation.refused >= attempts:
        return f"{validation.refused} replicas could not install version {validation.version}"
    if waiting.worst >= attempts:
        last = validation.reason or core.state.ending.last_failure
        return f"{waiting.worst} attempts at the same rows failed; last error: {last}"
    if validation.replicas or not waiting:
        return ""
    kind = [replica for replica in core.state.replicas.by_id.values() if replica.validator == limits.own]
    if any(r.coming or (r.state != "down" and r.version <= validation.version) for r in kind):
        return ""
    if len(kind) < (limits.replicas if limits.own else 1):
        return ""
    return f"no replica is left that has or can install version {validation.version}"


def _in_conflict(core: Core, validation: Validation, limits: ValidationLimits) -> bool:
    """Whether the validation keeps every replica from a newer version although `conflict` is `cancel`."""
    if limits.own or limits.conflict != "cancel" or validation.version == core.state.training.latest_version:
        return False
    left = core.state.rollouts_left
    return 0 < left == len(validation.replicas)


# telling


def _rate_checkpoint(core: Core, validation: Validation) -> None:
    """Compute the figures of a validation, and note the one by which the best checkpoint is kept."""
    limits = core.state.limits
    assert limits.validation is not None
    validation.evaluate(limits.validation.measured_sets)
    value = validation.rating(limits.keep_best, limits.keep_best_mode) if limits.keep_best else None
    if value is not None:
        core.state.checkpoints.rate(validation.steps, value)


def _order_rows(core: Core, validation: Validation, chunk: Chunk, replica: Replica) -> None:
    core.state.orders.add(
        MeasureRows(validation=validation.id, chunk=chunk.index, attempt=chunk.attempt, replica=replica.id,
                    life=replica.life, version=validation.version, first=chunk.first, count=chunk.count)
    )  # fmt: skip


def _end_validation(core: Core, validation: Validation, trigger: str, reason: str) -> None:
    validation.reason = reason
    validation.ended_at = core.state.facts.now
    if trigger == "report":
        _rate_checkpoint(core, validation)
    for id in validation.replicas:
        replica = core.state.replicas.by_id[id]
        if core.state.replicas.measuring(replica):
            core.state.orders.add(StopMeasuring(validation=validation.id, replica=id, life=replica.life))
    core.state.validations.fire(validation, trigger)
