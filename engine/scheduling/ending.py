"""How a run ends: finished, stopped at rest, or failed with a named cause.

A run that has all its steps ends with a last publication, a last checkpoint and a last validation, in this order. A run
that can make no progress ends with the cause (law 7).
"""

from engine.errors import PolicyError, are, counted
from engine.scheduling.core import Core
from engine.scheduling.departures import is_at_rest
from engine.scheduling.groups import drop_group, order_discards
from engine.scheduling.reactions import assign_replicas_and_weights
from engine.scheduling.steps import is_unsaved, no_step_left, order_checkpoint, order_publication
from engine.scheduling.validation import cancel_validations, close_validations, send_rows
from engine.states.causes import waits_for_groups
from engine.states.orders import DEADLINE, GIVE_UP
from engine.states.replica import Replica
from engine.states.state import State


def close_run(core: Core) -> None:
    """The run is over: a resume works on what was running again. `FinishRun` is the last command."""
    outcome = core.state.ending.outcome
    assert outcome is not None
    cancel_validations(core, f"the run ended: {outcome.reason}")
    core.state.groups.state_queues.put_back()
    order_discards(core)
    core.state.orders.add(outcome)


def _come_to_rest(core: Core) -> None:
    """End a run that was asked to, resumably, once nothing is running; with a checkpoint of where it is."""
    state = core.state
    if not is_at_rest(core):
        return
    if is_unsaved(core):
        order_checkpoint(core)
    if not state.checkpoint_pending and not state.deletion_pending:
        core.state.end_run("stopped", state.ending.draining, drained=True)


def finish_or_require_progress(core: Core) -> None:
    """End the run once no step can follow: publish steps that no version contains, save a last checkpoint, and
    drop the remaining groups."""
    state = core.state
    training = state.training
    if state.ending.draining:
        _come_to_rest(core)
        return
    if not state.facts.started or len(training.steps) > 1 or state.publishing:
        return
    if not no_step_left(core):
        _require_progress(core)
        return
    if training.steps_trained > training.steps_in[training.latest_version]:
        order_publication(core)
        return
    if is_unsaved(core):  # also if an earlier attempt failed
        order_checkpoint(core)
    untrainable = _why_untrainable(core)
    if core.state.limits.validation is not None and not state.validations.facts.closing and not untrainable:
        close_validations(core)
        state.changed = True
        assign_replicas_and_weights(core)
        send_rows(core)
    if state.checkpoint_pending or state.deletion_pending or state.validations.live:
        return
    for group in list(state.groups.live.values()):
        drop_group(core, group)
    state.groups.waiting.clear()
    if untrainable:
        core.state.end_run("failed", untrainable)
    else:
        core.state.end_run("finished", counted(training.steps_trained, "train step"))


def end_without_progress(core: Core) -> None:
    """Fail a run that would only use up prompts (law 7)."""
    state, limits = core.state, core.state.limits
    ending = state.ending
    failed, filtered = ending.failed_in_a_row, ending.filtered_in_a_row
    if not (failed or filtered or ending.misjudged):
        return
    if failed >= limits.failures_in_a_row:
        reason = f"{failed} prompt groups in a row have failed; last error: {ending.last_failure}"
        core.state.end_run("failed", reason)
    elif ending.misjudged == ending.judged and limits.are_hopeless(ending.judged):
        reason = (
            f"the first {ending.judged} attempts all failed on their prompt, agent or reward; last error: "
            f"{ending.last_failure}"
        )
        core.state.end_run("failed", reason)
    elif ending.misjudged > _most_misjudged(core):
        reason = (
            f"{ending.misjudged} of the latest {ending.judged} attempts failed on their prompt, agent or reward, "
            f"more than reward.max_failure_share = {limits.max_failure_share:g}: training without them would bias "
            f"the data; last error: {ending.last_failure}"
        )
        core.state.end_run("failed", reason)
    elif filtered >= limits.filtered_in_a_row:
        reason = (
            f"{_filter_name(core)} dropped {filtered} prompt groups in a row; set a filter that keeps some, or raise "
            "scheduler.max_filtered_in_a_row"
        )
        core.state.end_run("failed", reason)


def _most_misjudged(core: Core) -> float:
    """Attempts that may have failed among the latest. Before there is a window of them, all may."""
    share, judged = core.state.limits.max_failure_share, core.state.ending.judged
    return judged if share is None or judged < core.state.limits.failures_in_a_row else share * judged


def _why_untrainable(core: Core) -> str:
    """Why a run that drew prompts ends without a train step; empty if it had a step or drew no prompt."""
    state = core.state
    ending = state.ending
    drawn, filtered = state.groups.ledger.drawn, ending.filtered_in_a_row
    if state.training.steps_trained or not drawn:
        return ""
    causes = []
    if filtered:
        causes.append(
            f"{_filter_name(core)} dropped {f'all {drawn}' if filtered == drawn else f'{filtered} of {drawn}'}"
        )
    if ending.last_failure and filtered < drawn:
        causes.append(f"the last failure: {ending.last_failure}")
    return "; ".join(["no group could be trained on", *(causes or [f"all {drawn} were filtered or dropped"])])


def _filter_name(core: Core) -> str:
    return f"the filter {core.decisions.policies.names['filter']!r}"


def _require_progress(core: Core) -> None:
    """Law 7: something is in progress whose end will be an event, or the run ends here with a named cause."""
    state = core.state
    if not _is_stuck(state):
        return
    if not state.ending.none_left:
        raise _stuck_error(core)
    core.state.end_run("failed", state.ending.none_left)


def _is_stuck(state: State) -> bool:
    """Whether nothing is in progress whose end will be an event."""
    if (
        state.groups.ledger.running
        or state.asked
        or state.checkpoint_pending
        or state.validations.out
        or state.groups.state_queues.out
    ):
        return False
    if state.timer_is_set(GIVE_UP):
        return False
    if state.orders.open["stop rows"]:
        return False  # rows that were cut short are measured again
    if state.ending.none_left:
        return True
    rollouts = state.replicas.rollouts
    lost = all(replica.state == "down" for replica in rollouts)
    return not (lost or any(_will_report(state, replica) for replica in rollouts) or state.timer_is_set(DEADLINE))


def _stuck_error(core: Core) -> PolicyError:
    """The error of policies that start nothing, although nothing is running."""
    seen = core.decisions.describe_view()
    return PolicyError(
        f"nothing is running and the policies start nothing: {why_stuck(core.state)}; they saw {seen}",
        policies=str(dict(core.decisions.policies.names)),
    )


def _will_report(state: State, replica: Replica) -> bool:
    """Whether a replica will cause an event: it joins, returns or is in a sync."""
    return replica.coming or replica.state not in ("ready", "down") or state.is_staging(replica)


def why_stuck(state: State) -> str:
    """Who waits for what in a stuck run, where nothing in flight can end a wait."""
    groups = state.groups
    sentences = [waits_for_groups(state)]
    free = sum(state.replicas.for_groups(replica) for replica in _open_to_groups(state))
    if groups.waiting:
        room = f"{state.capacity} may be and {are(free, 'slot')} free"
        sentences.append(f"{_waiting(len(groups.waiting))} to be started, where {room}")
    if parked := [group for group in groups.live.values() if group.state == "aborted"]:
        oldest = min(group.resumes_from for group in parked)
        newest = max((replica.version for replica in _open_to_groups(state)), default=None)
        free_version = "none has a free slot" if newest is None else f"the newest with a free slot has {newest}"
        sentences.append(f"{_waiting(len(parked))} for a replica with version {oldest} or newer, {free_version}")
    if not groups.waiting and not parked:
        used_up = ", the prompts are used up" if groups.facts.exhausted else ""
        sentences.append(f"no group waits to be started{used_up}")
    return "; ".join(sentences)


def _waiting(groups: int) -> str:
    return f"{counted(groups, 'group')} {'waits' if groups == 1 else 'wait'}"


def _open_to_groups(state: State) -> list[Replica]:
    known = state.replicas
    return [one for one in known.by_id.values() if one.state == "ready" and known.for_groups(one) > 0]
