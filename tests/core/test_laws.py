"""Every law after every event, whatever happens in whatever order; progress from every state; replay identical."""

from math import floor

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine import policies
from engine.errors import ConfigError
from engine.events import DrainRequested, ReplicaLeaves, ReplicasWanted, SettingChanged
from engine.record.reader import read
from engine.record.replayer import replay
from engine.scheduling.settings import POLICIES, check_setting, live_settings
from engine.states.limits import CONFLICTS, SYNC_MODES, Limits, Pool, ValidationLimits
from engine.states.timeouts import AUTO, KINDS, Timeouts
from tests.core.added_states import CHECKING, GATING, PROVING, SIFTING, WEIGHING
from tests.core.adversary import AT_REST, Adversary
from tests.shipped_policies import SHIPPED

LAYOUTS: tuple[tuple[Pool, ...], ...] = (
    (),
    (Pool(tasks=("rollout",), replicas=(0, 1)), Pool(tasks=("train", "old_logprobs", "ref_logprobs"))),
    (Pool(tasks=("rollout",), replicas=(0, 1)), Pool(tasks=("train", "old_logprobs")), Pool(tasks=("ref_logprobs",))),
    (Pool(tasks=("ref_logprobs",)), Pool(tasks=("old_logprobs",)), Pool(tasks=("train",))),
    (Pool(tasks=("rollout", "train", "old_logprobs", "ref_logprobs"), replicas=(0, 1)),),
    (Pool(tasks=("rollout",), replicas=(0,)), Pool(tasks=("rollout", "train"), replicas=(1,))),
    (Pool(tasks=("rollout", "ref_logprobs"), replicas=(0, 1)), Pool(tasks=("train", "old_logprobs"))),
    (Pool(tasks=("rollout", "old_logprobs"), replicas=(0,)), Pool(tasks=("rollout", "train"), replicas=(1,))),
)
"""Replicas take turns with nobody, scoring is done beside training, replicas take turns with one or more of them."""
ANY = st.integers(min_value=0, max_value=10_000)


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    """Any figures the laws allow, small."""
    batch = draw(st.integers(1, 4))
    staleness = draw(st.integers(0, 3))
    pools = draw(st.sampled_from(LAYOUTS))
    shared = any(pool.shared and "train" in pool.tasks for pool in pools)
    sync_every = draw(st.integers(1, staleness + 1))
    ratio = draw(st.none() | st.floats(sync_every - 1, staleness))
    over_sample = draw(st.sampled_from([0.0, 0.0, 0.25, 0.5, 1.5]))
    ahead = staleness + 1 if ratio is None else 1 + ratio
    most = floor(ahead * batch + 1e-9) + floor(over_sample * batch)
    return Limits(
        train_batch_size=batch,
        max_staleness_steps=staleness,
        max_concurrent_groups=draw(st.integers(batch, most)),
        sync_every=sync_every,
        async_ratio=ratio,
        over_sample=over_sample,
        max_steps=draw(st.none() | st.integers(1, 6)),
        sync_mode=draw(st.sampled_from(SYNC_MODES)),
        scoring_tasks=draw(st.sampled_from([(), ("old_logprobs",), ("ref_logprobs", "old_logprobs")])),
        max_drops=draw(st.integers(0, 3)),
        infrastructure_attempts=draw(st.integers(1, 5)),
        data_attempts=draw(st.integers(1, 2)),
        checkpoint_every=(every := draw(st.integers(0, 2))),
        validation=draw(st.none() | validations()),
        added_states=(
            *draw(st.sampled_from([(), (), (WEIGHING,), (WEIGHING, CHECKING)])),
            *draw(st.sampled_from([(), (GATING,), (PROVING,), (GATING, SIFTING, PROVING)])),
        ),
        pools=pools,
        train_after_sync=not shared and draw(st.booleans()),
        timeouts=draw(timeouts()),
        straggler_factor=draw(st.sampled_from([None, None, 1.1])),
        give_up_s=draw(st.sampled_from([0.0, 0.0, 5.0])),
        keeps_batches=every > 0 and draw(st.booleans()),
    )


@st.composite
def timeouts(draw: st.DrawFn) -> Timeouts:
    """No time limits, one for groups, one for every order, or the default."""
    chosen = draw(st.sampled_from(["none", "groups", "all", "all", "auto"]))
    if chosen in ("none", "groups"):
        return Timeouts.every(None, group_s=4.0 if chosen == "groups" else None)
    if chosen == "auto":
        return Timeouts()
    kinds = {f"{kind}_s": draw(st.sampled_from([4.0, 60.0, 60.0, AUTO, AUTO])) for kind in KINDS}
    return Timeouts(
        **kinds,
        floor_s=draw(st.sampled_from([0.01, 2.0, 10.0])),
        cut_s=draw(st.sampled_from([0.01, 2.0, 20.0])),
        max_s=draw(st.sampled_from([None, None, 1.0, 30.0])),
    )


@st.composite
def validations(draw: st.DrawFn) -> ValidationLimits:
    """Any way to validate. Replicas from 2 on are validators, where there are any."""
    return ValidationLimits(
        rows=draw(st.integers(1, 30)),
        rows_per_slot=draw(st.integers(1, 8)),
        at_start=draw(st.booleans()),
        every=draw(st.integers(0, 3)),
        at_end=draw(st.booleans()),
        replicas=draw(st.integers(1, 3)),
        own_from=draw(st.none() | st.just(2)),
        conflict=draw(st.sampled_from(CONFLICTS)),
    )


def generating(limits: Limits, replicas: int) -> int:
    """The number of replicas that generate: what the limits require, otherwise `replicas`."""
    if limits.validation is not None and limits.validation.own_from is not None:
        return limits.validation.own_from
    return len([replica for pool in limits.pools for replica in pool.replicas]) or replicas


def any_policies() -> st.SearchStrategy[dict[str, str]]:
    """Any built-in policy for every decision."""
    return st.fixed_dictionaries({d: st.sampled_from(names) for d, names in SHIPPED.items()})


class AnyOrder(RuleBasedStateMachine):
    """The adversary's actions as rules. A run that has ended takes no more."""

    @initialize(
        limits=limits(),
        names=any_policies(),
        prompts=st.integers(1, 24),
        slots=st.integers(1, 4),
        samples=st.integers(1, 4),
        replicas=st.integers(1, 3),
        together=st.sampled_from([1, 1, 3]),
    )
    def begin(
        self, limits: Limits, names: dict[str, str], prompts: int, slots: int, samples: int, replicas: int,
        together: int,
    ) -> None:  # fmt: skip
        self.world = Adversary(
            limits, policies.PolicySet.from_names(names), prompts, slots, samples=samples, together=together
        )
        self.replicas = max(replicas, limits.validators().stop)
        for id in range(self.replicas):
            self.world.join(id)

    @rule(choice=ANY)
    @precondition(lambda self: self.world.sources())
    def arrive_up(self, choice: int) -> None:
        sources = self.world.sources()
        self.world.arrive_up(sources[choice % len(sources)])

    @rule(choice=ANY)
    @precondition(lambda self: self.world.addressees())
    def arrive_down(self, choice: int) -> None:
        addressees = self.world.addressees()
        self.world.arrive_down(addressees[choice % len(addressees)])

    @rule(choice=ANY, tokens=st.integers(1, 3))
    @precondition(lambda self: self.world.running())
    def sample(self, choice: int, tokens: int) -> None:
        running = self.world.running()
        replica, group = running[choice % len(running)]
        replica.sample(group, tokens)

    @rule(choice=ANY, tokens=st.integers(0, 3), spread=st.sampled_from([0.0, 1.0]))
    @precondition(lambda self: self.world.running())
    def finish(self, choice: int, tokens: int, spread: float) -> None:
        running = self.world.running()
        replica, group = running[choice % len(running)]
        if not replica.frozen:
            replica.sample(group, tokens)
            replica.finish(group, spread=spread)

    @rule(choice=ANY, ended=st.integers(0, 4))
    @precondition(lambda self: self.world.running())
    def report_ended(self, choice: int, ended: int) -> None:
        running = self.world.running()
        replica, group = running[choice % len(running)]
        replica.report_ended(group, ended)

    @rule(choice=ANY)
    @precondition(lambda self: self.world.working())
    def progress(self, choice: int) -> None:
        working = self.world.working()
        working[choice % len(working)].progress()

    @rule(choice=ANY)
    @precondition(lambda self: self.world.running())
    def keep_prefix(self, choice: int) -> None:
        running = self.world.running()
        replica, group = running[choice % len(running)]
        replica.keep_prefix(group)

    @rule(choice=ANY, cause=st.sampled_from(["infrastructure", "data"]))
    @precondition(lambda self: self.world.running())
    def fail(self, choice: int, cause: str) -> None:
        running = self.world.running()
        replica, group = running[choice % len(running)]
        replica.fail(group, cause)

    @rule(choice=ANY, succeed=st.sampled_from([True, True, True, False]))
    @precondition(lambda self: self.world.syncing())
    def sync(self, choice: int, succeed: bool) -> None:
        syncing = self.world.syncing()
        syncing[choice % len(syncing)].sync(succeed)

    @rule(choice=ANY, succeed=st.sampled_from([True, True, True, False]))
    @precondition(lambda self: self.world.measuring())
    def measure(self, choice: int, succeed: bool) -> None:
        measuring = self.world.measuring()
        replica, chunk = measuring[choice % len(measuring)]
        replica.measure(chunk, succeed)

    @rule(choice=ANY, cause=st.sampled_from(["", "", "", "infrastructure", "data"]))
    @precondition(lambda self: self.world.judged)
    def leave(self, choice: int, cause: str) -> None:
        self.world.leave(choice, cause)

    @rule(choice=ANY, succeed=st.sampled_from([True, True, True, False]))
    @precondition(lambda self: self.world.working())
    def work(self, choice: int, succeed: bool) -> None:
        working = self.world.working()
        working[choice % len(working)].do(succeed)

    @rule(choice=ANY, count=st.integers(1, 3))
    @precondition(lambda self: self.world.done)
    def say_done(self, choice: int, count: int) -> None:
        self.world.say_done(choice, count)

    @rule(most=st.sampled_from([0, 1, 2, 99, 99]))
    @precondition(lambda self: self.world.draws and self.world.driver.outcome is None)
    def draw(self, most: int) -> None:
        self.world.draw(most)

    @rule(in_time=st.booleans())
    @precondition(lambda self: self.world.timers)
    def fire(self, in_time: bool) -> None:
        self.world.fire(in_time)

    @rule(choice=ANY, final=st.sampled_from([False, False, True]))
    @precondition(lambda self: self.world.replicas)
    def kill(self, choice: int, final: bool) -> None:
        ids = list(self.world.replicas)
        self.world.kill(ids[choice % len(ids)], final)

    @rule(choice=ANY)
    @precondition(lambda self: self.world.killable() and self.world.driver.outcome is None)
    def kill_worker(self, choice: int) -> None:
        killable = self.world.killable()
        self.world.kill_worker(*killable[choice % len(killable)])

    @rule(choice=ANY)
    @precondition(lambda self: self.world.starting)
    def come_up(self, choice: int) -> None:
        starting = list(self.world.starting)
        self.world.come_up(starting[choice % len(starting)])

    @rule(choice=ANY, final=st.sampled_from([False, False, True]))
    @precondition(lambda self: self.world.starting)
    def fail_start(self, choice: int, final: bool) -> None:
        starting = list(self.world.starting)
        self.world.fail_start(starting[choice % len(starting)], final)

    @rule()
    @precondition(lambda self: len(self.world.incarnations) < self.replicas + 1)
    def join_another(self) -> None:
        self.world.join(len(self.world.incarnations))

    @rule(replicas=st.integers(1, 3), kept=st.booleans(), every=st.sampled_from([0, 0, 1, 2]), twin=st.booleans())
    @precondition(lambda self: getattr(self.world.driver.outcome, "outcome", "") != "finished")
    def crash(self, replicas: int, kept: bool, every: int, twin: bool) -> None:
        """`every`: the trajectories of each such group are lost; 0: none. `twin`: restore one of the resumed state."""
        self.world.crash(
            max(replicas, self.world.limits.validators().stop), kept=kept,
            missing=lambda group: every > 0 and group % every == 0,
        )  # fmt: skip
        if twin and self.world.driver.outcome is None:
            self.world.restore_twin()

    @rule()
    @precondition(lambda self: not self.world.scheduler.state.ending.draining)
    def drain(self) -> None:
        self.world.deliver(DrainRequested(reason=AT_REST))

    @rule(replicas=st.integers(1, 3))
    @precondition(lambda self: not self.world.limits.pools and not self.world.limits.validators())
    def want(self, replicas: int) -> None:
        self.world.deliver(ReplicasWanted(replicas=replicas))

    @rule(choice=ANY)
    @precondition(lambda self: self.world.replicas)
    def take_away(self, choice: int) -> None:
        replicas = list(self.world.replicas.values())
        chosen = replicas[choice % len(replicas)]
        self.world.deliver(ReplicaLeaves(replica=chosen.id, incarnation=chosen.incarnation, reason="spot"))

    @rule(setting=st.sampled_from(live_settings()), value=st.integers(0, 12), choice=ANY)
    def change(self, setting: str, value: int, choice: int) -> None:
        scheduler, said = self.world.scheduler, str(value)
        decision = setting.removeprefix(POLICIES)
        if decision in policies.DEFAULTS:
            said = SHIPPED[decision][choice % len(SHIPPED[decision])]
        elif decision == "on_error":
            said = policies.registry.ON_ERROR[choice % 2]
        try:
            check_setting(scheduler.limits, scheduler.policies, setting, said)
        except ConfigError:
            return
        self.world.deliver(SettingChanged(setting=setting, value=said))

    def all_limited(self) -> bool:
        given = self.world.scheduler.limits.timeouts
        return all(given.given(kind) is not None for kind in KINDS) and self.world.driver.outcome is None

    @rule(choice=ANY)
    @precondition(lambda self: self.all_limited() and self.world.replicas)
    def hang_replica(self, choice: int) -> None:
        replicas = list(self.world.replicas.values())
        replicas[choice % len(replicas)].hung = True

    @rule(choice=ANY)
    @precondition(lambda self: self.all_limited() and self.world.working())
    def hang_worker(self, choice: int) -> None:
        working = self.world.working()
        working[choice % len(working)].hung = True

    @rule(choice=ANY)
    @precondition(lambda self: self.all_limited() and self.world.unanswered())
    def lose_order(self, choice: int) -> None:
        self.world.lose_order(choice)

    @rule(choice=ANY, waits_for=st.sampled_from(["", "trainer", "scorer 0", "weights store", "nobody"]))
    @precondition(lambda self: self.world.probes)
    def answer_probe(self, choice: int, waits_for: str) -> None:
        self.world.answer(choice, waits_for)

    @rule()
    @precondition(lambda self: self.world.scheduler.state.ending.outcome is None)
    def restore_twin(self) -> None:
        self.world.restore_twin()

    @rule(seconds=st.sampled_from([0.5, 3.0, 59.0, 61.0, 5000.0]))
    def nothing_happens_for(self, seconds: float) -> None:
        self.world.time += seconds

    @rule(choice=ANY)
    def repeat(self, choice: int) -> None:
        self.world.repeat(choice)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.complete()
        report = replay(read(self.world.recorder))
        assert report.divergence is None, report.divergence
        assert report.events == self.world.driver.events_handled


AnyOrder.TestCase.settings = settings(
    max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrder = AnyOrder.TestCase
