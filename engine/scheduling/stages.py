"""Added states: which groups enter them, when their work is ordered, and what follows.

Called by `scheduler.py` for each event about such work and after every event to order more work, and by `groups.py`
for each generated group. Changes state only through `State`'s operations.
"""

from engine.commands import EnterState
from engine.events import GroupGenerated, StateFailed, StateLeft, stamp
from engine.policies.custom_states import build_state
from engine.scheduling.decisions import Decisions
from engine.scheduling.issued_commands import Orders
from engine.states.group import Group
from engine.states.state import State
from engine.states.view import view_group


class StageScheduling:
    """Moves groups through the added states of a run, in order, first come first served."""

    def __init__(self, state: State, decisions: Decisions, orders: Orders) -> None:
        """Raises: `ConfigError` for a state that is not registered."""
        self.state = state
        self.decisions = decisions
        self.orders = orders
        for name in state.stages.by_name:
            policy = build_state(name)
            decisions.add(f"state {name}", policy, policy.enters)

    def enter(self, group: Group, after: int = -1) -> bool:
        """Move a group into the next state whose policy lets it in, after state number `after`. False if there is
        none."""
        for stage in self.state.stages.by_name.values():
            if stage.number > after and self.decisions.ask(f"state {stage.name}", (view_group(group),), (bool,)):
                if group.replica >= 0:
                    self.state.unseat(group)
                self.state.fire_group(group, stage.name)
                return True
        return False

    def leave(self, event: StateLeft) -> GroupGenerated | None:
        """A group's work is done: it continues to the next state. Where none is left: what came of the group."""
        group = self.state.groups[event.group]
        self.state.update(group, reward_mean=event.reward_mean)
        if self.enter(group, self.state.stages.by_name[event.state].number):
            return None
        outcome = GroupGenerated(
            group=group.id, attempt=group.attempt, replica=-1, incarnation=-1, tokens=group.tokens,
            oldest_version=group.oldest_version, newest_version=group.newest_version, live=event.live,
            reward_mean=event.reward_mean, reward_spread=event.reward_spread,
        )  # fmt: skip
        stamp(outcome, event.id, event.at)
        return outcome

    def fail(self, event: StateFailed) -> Group | None:
        """The work on a group failed, which is charged as an attempt. Returns the group if it was the last attempt."""
        group = self.state.groups[event.group]
        self.state.last_failure = event.reason
        if not self.decisions.another_attempt(group, event.cause):
            return group
        self.put_back(event.state, group)
        return None

    def put_back(self, name: str, group: Group) -> None:
        """Let a group wait for the work of its state again."""
        self.state.stages.leave(name, group.id)
        self.state.enter_stage(group)

    def advance(self) -> None:
        """Order the work of every state while it may have more in progress."""
        state = self.state
        if not state.started or state.outcome is not None or state.draining:
            return
        for stage in state.stages.by_name.values():
            while stage.waiting and stage.working < stage.concurrency:
                group = state.groups[state.stages.next(stage)]
                state.update(group, attempt=group.attempt + 1)
                self.orders.add(
                    EnterState(group=group.id, attempt=group.attempt, state=stage.name, cause=self.orders.cause)
                )
