"""Searches for a small run that fails, and shortens it: Hypothesis chooses what happens, in any order.

Called by `proof`. Nothing else imports it, so that no run needs Hypothesis.
"""

from collections.abc import Callable
from copy import copy
from itertools import count

from hypothesis import HealthCheck, Phase, Verbosity, reject, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from engine.errors import ConfigError
from engine.events import CacheMeasured, ReplicaLeaves, ReplicasWanted, SchedulerRecovered, SettingChanged
from engine.scheduling.settings import POLICIES, changed_settings, live_settings
from engine.simulation.small_run import SmallRun

Begin = Callable[..., SmallRun]
"""Makes a run: `begin(batch=, staleness=, prompts=, slots=, replicas=, together=)`."""
Failure = tuple[Exception, SmallRun]
MOST_RULES = 40
"""Maximum number of choices in a run, before it is completed without faults."""
SHRINKS = 100
"""Maximum number of runs in which Hypothesis tries to shorten one that fails."""
TICK_SIZES = (1, 1, 3, 64)
SETTINGS = [name for name in live_settings() if not name.startswith(POLICIES)]


class AnyOrder(RuleBasedStateMachine):
    """One run, completed at its end. A subclass makes it with `begin`."""

    begin: Begin
    run: SmallRun
    begun = False

    @initialize(
        batch=st.sampled_from((1, 2, 4)), staleness=st.integers(0, 3), prompts=st.integers(1, 24),
        slots=st.integers(1, 4), replicas=st.integers(1, 3), together=st.sampled_from(TICK_SIZES),
        stragglers=st.frozensets(st.integers(0, 9), max_size=2),
    )  # fmt: skip
    def begin_run(self, stragglers: frozenset[int], **sizes: int) -> None:
        self.run = type(self).begin(**sizes)
        self.run.stragglers = stragglers
        self.begun = True

    @property
    def goes_on(self) -> bool:
        return self.run.driver.outcome is None

    @precondition(lambda self: self.goes_on)
    @rule(place=st.integers(0, 20))
    def answer(self, place: int) -> None:
        if possible := self.run.possible():
            self.run.take(possible[place % len(possible)])

    @precondition(lambda self: self.goes_on)
    @rule(events=st.integers(1, 20))
    def advance(self, events: int) -> None:
        for _ in range(events):
            if self.goes_on:
                self.run.advance()

    @precondition(lambda self: self.goes_on)
    @rule(place=st.integers(0, 20))
    def fail(self, place: int) -> None:
        if possible := self.run.possible(faults=True):
            self.run.take(possible[place % len(possible)])

    @precondition(lambda self: self.goes_on and self.run.past)
    @rule(place=st.integers(0, 100))
    def repeat(self, place: int) -> None:
        self.run.deliver(copy(self.run.past[place % len(self.run.past)]))

    @precondition(lambda self: self.goes_on)
    @rule()
    def restore(self) -> None:
        self.run.restore_twin()

    @precondition(lambda self: self.goes_on)
    @rule()
    def fail_over(self) -> None:
        self.run.deliver(SchedulerRecovered())

    @precondition(lambda self: self.run.driver.outcome is None or self.run.driver.outcome.outcome != "finished")
    @rule(kept=st.booleans())
    def crash(self, kept: bool) -> None:
        self.run.crash(kept=kept)

    @precondition(lambda self: self.goes_on and not self.run.state.ending.draining)
    @rule()
    def drain(self) -> None:
        self.run.drain()

    @precondition(lambda self: self.goes_on and not self.run.limits.validators())
    @rule(replicas=st.integers(1, 3))
    def want(self, replicas: int) -> None:
        self.run.deliver(ReplicasWanted(replicas=replicas))

    @precondition(lambda self: self.goes_on)
    @rule(place=st.integers(0, 2))
    def take_away(self, place: int) -> None:
        replicas = list(self.run.state.replicas.by_id.values())
        replica = replicas[place % len(replicas)]
        self.run.deliver(ReplicaLeaves(replica=replica.id, life=replica.life, reason="spot"))

    @precondition(lambda self: self.goes_on)
    @rule(place=st.integers(0, 2), used=st.sampled_from((0.1, 0.7, 0.85, 0.95)))
    def measure_cache(self, place: int, used: float) -> None:
        replicas = list(self.run.state.replicas.by_id.values())
        self.run.deliver(CacheMeasured(**replicas[place % len(replicas)].process.address(), used=used))

    @precondition(lambda self: self.goes_on)
    @rule(setting=st.sampled_from(SETTINGS), value=st.integers(0, 12))
    def change(self, setting: str, value: int) -> None:
        self.run.arrive()  # a change is checked against the limits that the earlier changes made
        scheduler = self.run.scheduler
        try:
            changed_settings(scheduler.limits, scheduler.policies, setting, str(value))
        except ConfigError:
            return  # it breaks a law
        if self.goes_on:
            self.run.deliver(SettingChanged(setting=setting, value=str(value)))

    @rule()
    def nothing_happens(self) -> None:
        """The run may be over."""

    def teardown(self) -> None:
        if self.begun:
            self.run.complete()


def shortest_failure(begin: Begin, runs: int) -> Failure | None:
    """The shortest run found that fails, and why. The same program makes the same runs."""
    failures: list[Failure] = []
    tried = count()

    def begin_unless_short(**sizes: int) -> SmallRun:
        if failures and next(tried) >= SHRINKS:
            reject()
        return begin(**sizes)

    class UserOrder(AnyOrder):
        begin = staticmethod(begin_unless_short)

        def teardown(self) -> None:
            try:
                super().teardown()
            except Exception as error:
                failures.append((error, self.run))
                raise

    chosen = settings(
        max_examples=runs, stateful_step_count=MOST_RULES, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink), report_multiple_bugs=False,
        verbosity=Verbosity.quiet, print_blob=False,
    )  # fmt: skip
    try:
        run_state_machine_as_test(UserOrder, settings=chosen)
    except Exception:  # what Hypothesis makes of the failures, also if the policies fail at random
        if not failures:
            raise
    return min(failures, key=lambda failure: failure[1].driver.events_handled, default=None)
