"""Policies: the order of resumption, whole batches, which versions are measured, errors, memories; worked out by
hand."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
from msgspec import structs

from engine import policies
from engine.commands import DrawPrompts, ResumeGroup, StageWeights, StartGroup
from engine.errors import ConfigError, PolicyError
from engine.events import (
    Event,
    GroupAborted,
    GroupGenerated,
    PrefixStored,
    ProcessLost,
    PromptsDrawn,
    ReplicaPaused,
    RunResumed,
    SettingChanged,
    WeightsInstalled,
    WeightsStaged,
)
from engine.ids import Version
from engine.policies import registry
from engine.record.frames import Header
from engine.record.reader import read
from engine.record.recorder import MemoryRecorder
from engine.record.recovery import recover
from engine.record.replayer import replay
from engine.simulation.world import Faults, Setting
from engine.states.limits import Limits, ValidationLimits
from engine.states.view import GroupView, View
from tests.core.scripted import Scripted
from tests.core.test_scenarios import small
from tests.judge.judged_world import JudgedWorld


@pytest.fixture
def registered() -> Iterator[None]:
    """What a test registers is known to that test alone."""
    before = {decision: dict(known) for decision, known in registry._REGISTERED.items()}
    yield
    registry._REGISTERED.clear()
    registry._REGISTERED.update(before)


# which parked group resumes first


def parked(order: str) -> list[int]:
    """Three groups are aborted with (tokens, trajectories unfinished) = (10, 3), (30, 2), (20, 2), a fourth with
    nothing; the order in which they resume."""
    figures = {"train_batch_size": 2, "max_staleness_steps": 2, "max_concurrent_groups": 6, "sync_mode": "abort"}
    run = Scripted(policies={"resume": order}, **figures)
    run.train_on(4, 5)
    run.tell(WeightsStaged(replica=0, life=1, attempt=1, version=1))
    for id, (tokens, unfinished) in enumerate([(10, 3), (30, 2), (20, 2), (0, 0)]):
        version = 0 if tokens else -1
        run.tell(
            GroupAborted(
                group=id, attempt=1, replica=0, life=1, tokens=tokens, oldest_version=version,
                newest_version=version, unfinished=unfinished,
            )
        )  # fmt: skip
    run.tell(ReplicaPaused(replica=0, life=1, attempt=1))
    new = run.tell(WeightsInstalled(replica=0, life=1, attempt=1, version=1))
    return [order.group for order in new if isinstance(order, StartGroup | ResumeGroup) and order.group < 4]


@pytest.mark.parametrize(
    ("order", "resumed"),
    [
        ("deadline", [0, 1, 2, 3]),
        ("fewest-unfinished", [1, 2, 0, 3]),
        ("longest", [1, 2, 0, 3]),
        ("stalest", [0, 1, 2, 3]),
        ("nearest-end", [1, 2, 0, 3]),
    ],
)
def test_the_resume_policy_orders_parked_groups(order: str, resumed: list[int]) -> None:
    assert parked(order) == resumed


@pytest.mark.parametrize(
    "loss",
    [
        ProcessLost(kind="replica", index=0, life=1, reason="killed"),
        RunResumed(steps=0, replicas=1, consumed=(), released=(), kept=True),
    ],
)
def test_the_resume_policy_sees_no_group_on_a_lost_replica(registered: None, loss: Event) -> None:
    seen: list[int] = []

    class Seeing:
        def key(self, view: View, group: GroupView) -> tuple[float, ...]:
            seen.extend(replica.running for replica in view.replicas())
            return (group.deadline,)

    policies.register("resume", "seeing")(Seeing)
    run = small(policies={"resume": "seeing"}, samples=2)
    running = run.state.groups.ledger.running
    for group in range(running):
        run.end_trajectories(group, 2)
    run.tell(loss)
    assert seen == [0] * running


def test_nearest_end_looks_at_length_then_at_staleness_among_equals() -> None:
    view: Any = None

    def group(unfinished: int, tokens: int, oldest: Version) -> GroupView:
        blank = dict.fromkeys(GroupView._fields, 0)
        return GroupView(**{**blank, "unfinished": unfinished, "tokens": tokens, "oldest_version": oldest})  # type: ignore[arg-type]

    key = policies.PolicySet.from_names({"resume": "nearest-end"}).resume.key
    ranked = [group(1, 5, 3), group(2, 9, 1), group(2, 9, 2), group(2, 8, 0), group(0, 0, -1)]
    assert sorted(reversed(ranked), key=lambda g: key(view, g)) == ranked


def test_a_generated_group_has_no_unfinished_trajectory() -> None:
    run = small()
    run.tell(PrefixStored(group=0, attempt=1, replica=0, life=1, tokens=4, oldest_version=0, newest_version=0,
                          unfinished=2))  # fmt: skip
    assert [group.unfinished for group in run.view.groups()][:2] == [2, 0]
    run.finish(0)
    assert [*run.view.ready_ids()] == [0] and {group.unfinished for group in run.view.groups()} == {0}


# registration


class WithoutMethod:
    acts = True


class WithoutActs:
    def decide(self, *given: Any) -> None: ...


@pytest.mark.parametrize(
    ("decision", "name", "cls", "says"),
    [
        ("batches", "mine", WithoutMethod, "is not a decision"),
        ("admission", "bounds", WithoutMethod, "is already registered for admission"),
        ("admission", "mine", WithoutMethod, r"has no method admit\(\)"),
        ("deadline", "mine", WithoutActs, "does not set the attribute acts"),
    ],
)
def test_what_is_no_policy_is_not_registered(decision: str, name: str, cls: type, says: str) -> None:
    before = registry.registered()
    with pytest.raises(ConfigError, match=says):
        policies.register(decision, name)(cls)
    assert registry.registered() == before


# whole batches


def whole(**others: Any) -> Scripted:
    """B = 2, S = 1, K = 4, batch by batch."""
    return small(policies={"admission": "whole-batches", **others.pop("policies", {})}, **others)


def test_a_batch_is_begun_only_where_all_of_it_may_start() -> None:
    run = Scripted(
        train_batch_size=2, max_staleness_steps=2, max_concurrent_groups=3, policies={"admission": "whole-batches"}
    )
    assert run.running() == [0, 1], "K leaves room for one more, which would be half a batch"
    run.finish(0)
    assert run.running() == [1, 2, 3]
    run.finish(2)
    assert run.running() == [1, 3], "one place under K"


def test_a_batch_begun_is_filled_as_slots_come_free_and_after_a_filter() -> None:
    run = whole(slots=3)
    assert run.running() == [0, 1, 2], "the second batch has only one slot so far"
    run.finish(0)
    assert run.running() == [1, 2, 3]
    run = whole(policies={"filter": "zero-variance"})
    run.finish(1, spread=0.0)
    assert run.running() == [0, 2, 3, 4], "its place is filled at once: its batch is begun"


def test_a_batch_begun_is_filled_also_where_only_a_part_of_the_rest_may_start() -> None:
    run = Scripted(
        train_batch_size=4, max_staleness_steps=1, max_concurrent_groups=8,
        policies={"admission": "whole-batches", "filter": "zero-variance"},
    )  # fmt: skip
    run.tell(SettingChanged(setting="scheduler.max_concurrent_groups", value="5"))
    run.finish(0, 1, 2, spread=0.0)
    run.finish(3)
    assert run.running() == [4, 5, 6, 7, 8], "three are missing, and one may start"


def test_a_last_batch_that_is_whole_is_begun_as_a_whole() -> None:
    run = Scripted(
        train_batch_size=2, max_staleness_steps=2, max_concurrent_groups=3, prompts=4,
        policies={"admission": "whole-batches"},
    )  # fmt: skip
    run.finish(0)
    assert run.state.groups.facts.exhausted and run.running() == [1, 2, 3]
    run = Scripted(
        train_batch_size=2, max_staleness_steps=2, max_concurrent_groups=3, prompts=4, answers_draws=False,
        policies={"admission": "whole-batches"},
    )  # fmt: skip
    run.tell(PromptsDrawn(first=0, count=4, exhausted=True, number=run.ordered(DrawPrompts)[-1].number))
    assert run.running() == [0, 1], "one of the last two may start, and waits for the other"


def test_the_last_batch_may_be_short() -> None:
    run = whole(prompts=3)
    assert run.running() == [0, 1, 2]


# which versions are measured


def test_a_validation_policy_says_which_versions_are_measured(registered: None) -> None:
    asked = []

    @policies.register("validation", "odd")
    class Odd:
        def due(self, view: View, version: Version, steps_before: int, steps: int) -> bool:
            asked.append((version, steps_before, steps))
            return version % 2 == 1

    limits = ValidationLimits(rows=4, at_start=True, at_end=False)
    run = small(policies={"validation": "odd"}, sync_every=2, validation=limits)
    for _ in range(4):
        run.finish(*run.running()[:2])
        run.train()
        if run.state.publishing:
            run.publish()
            run.install()
    assert asked == [(0, 0, 0), (1, 0, 2), (2, 2, 4)]
    assert [v.version for v in run.view.validations()] == [1]


# errors


class Greedy:
    """One more than is legal."""

    def admit(self, view: View, legal: int) -> int:
        return legal + 1


def test_an_error_names_the_policy_and_what_it_saw(registered: None) -> None:
    policies.register("admission", "greedy")(Greedy)
    with pytest.raises(PolicyError, match=r"'greedy' decided 5: .* from 0 to 4; it saw step 0, version 0, 6 waiting"):
        small(policies={"admission": "greedy"})


class Mute(BaseException):
    """Not an `Exception`, and its message cannot be made."""

    def __str__(self) -> str:
        raise SystemExit("not even that")

    __repr__ = __str__


@pytest.mark.parametrize(
    "error",
    [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Mute(), ValueError("\ud800"), PolicyError("of its own")],
)
def test_a_policy_that_leaves_the_process_is_one_in_error(registered: None, error: BaseException) -> None:
    class Leaving:
        def admit(self, view: View, legal: int) -> int:
            raise error

    policies.register("admission", "leaving")(Leaving)
    place = r" \(test_policy_decisions\.py:\d+, in admit\)"
    said = rf"the admission policy 'leaving' raised {type(error).__name__}.*{place}; it saw step 0, version 0"
    with pytest.raises(PolicyError, match=said) as raised:
        small(policies={"admission": "leaving"})
    assert str(raised.value).encode(), "it can be recorded"


def test_an_answer_that_cannot_be_shown_is_still_refused(registered: None) -> None:
    class Answer(int):
        def __repr__(self) -> str:
            raise Mute

    policies.register("admission", "odd")(type("Odd", (), {"admit": lambda self, view, legal: Answer(1)}))
    with pytest.raises(PolicyError, match=r"'odd' decided an object of type Answer: it must return int"):
        small(policies={"admission": "odd"})


def test_policies_that_start_nothing_stop_the_run(registered: None) -> None:
    @policies.register("admission", "never")
    class Never:
        def admit(self, view: View, legal: int) -> int:
            return 0

    with pytest.raises(PolicyError, match="start nothing"):
        small(policies={"admission": "never"})


@pytest.mark.parametrize("answer", [(), (float("nan"),), ("soon",), (True,), (1, "soon"), 3])
def test_a_resume_key_is_a_tuple_of_numbers(registered: None, answer: Any) -> None:
    policies.register("resume", "odd")(type("Odd", (), {"key": lambda self, view, group: answer}))
    run = small(policies={"resume": "odd"})
    with pytest.raises(PolicyError, match="the resume policy 'odd'"):
        run.abort(0)
    assert run.state.groups.live[0].state == "generating", "nothing was changed"


def test_a_policy_written_for_another_api_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a policy API version other than this engine's 1"):
        policies.register("filter", "later", api=2)(object)


# memory


class Widening:
    """Admits one more group at a time than the last time, and says so in its memory."""

    memory: dict[str, Any]

    def admit(self, view: View, legal: int) -> int:
        self.memory["asked"] = self.memory.get("asked", 0) + 1
        self.memory["seen"] = [view.step, view.running]
        return min(legal, self.memory["asked"])


def test_memory_is_fresh_for_each_run(registered: None) -> None:
    policies.register("admission", "widening")(Widening)
    run = small(policies={"admission": "widening"})
    assert _memory(run) == {"asked": 2, "seen": [0, 0]}, "asked before and after the replica joined"
    assert run.running() == [0, 1]
    assert _memory(small(policies={"admission": "widening"})) == {"asked": 2, "seen": [0, 0]}


def test_a_memory_ends_with_its_policy(registered: None) -> None:
    policies.register("admission", "widening")(Widening)
    run = small(policies={"admission": "widening"})
    assert "admission" in run.state.policies.memory
    run.tell(SettingChanged(setting="scheduler.policies.admission", value=policies.DEFAULTS["admission"]))
    assert "admission" not in run.state.policies.memory


def test_a_memory_that_the_class_was_given_is_each_run_s_own(registered: None) -> None:
    class Counting:
        memory: ClassVar[dict[str, Any]] = {"asked": [0]}

        def admit(self, view: View, legal: int) -> int:
            self.memory["asked"][0] += 1
            return legal

    policies.register("admission", "counting")(Counting)
    first, second = (_memory(small(policies={"admission": "counting"})) for _ in range(2))
    assert first == second != {"asked": [0]} and Counting.memory == {"asked": [0]}


def _memory(run: Scripted, decision: str = "admission") -> dict[str, Any]:
    memory: dict[str, Any] = getattr(run.scheduler.policies, decision).memory
    return memory


@pytest.mark.parametrize("kept", [{"x": (1, 2)}, {"x": object()}, {1: 2}, 7])
def test_memory_holds_plain_values_alone(registered: None, kept: Any) -> None:
    class Hoarding:
        memory: dict[str, Any]

        def admit(self, view: View, legal: int) -> int:
            self.memory = kept
            return legal

    policies.register("admission", "hoarding")(Hoarding)
    said = (
        r"'hoarding' left a memory that cannot be stored \(.+\): it may hold only None, bool, int, float, str, list and"
    )
    with pytest.raises(PolicyError, match=said):
        small(policies={"admission": "hoarding"})
    if isinstance(kept, dict):
        Hoarding.memory = kept  # what it begins with
        with pytest.raises(PolicyError, match=said):
            small(policies={"admission": "hoarding"})


class Remembering:
    """Keeps every second group; which one is next is all it remembers."""

    memory: dict[str, Any]

    def keep(self, view: View, outcome: Any) -> bool:
        self.memory["kept"] = not self.memory.get("kept", False)
        return bool(self.memory["kept"])


def test_memory_is_replayed_and_kept_over_a_resume(registered: None) -> None:
    policies.register("filter", "second")(Remembering)
    limits = Limits(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, sync_mode="abort")
    chosen = policies.PolicySet.from_names({"filter": "second"})
    recorder = MemoryRecorder(Header(run="memory", limits=limits.to_plain(), policies=dict(chosen.names)))
    faults = Faults(lose=0.1, duplicate=0.1, fail_group=0.05)
    world = JudgedWorld(Setting(limits=limits, prompts=41, seed=3, faults=faults), chosen, recorder)
    world.run()
    report = replay(read(recorder))
    assert report.divergence is None and report.events == world.driver.events_handled
    recovered = recover(read(recorder))
    again = recovered.scheduler.policies.filter
    assert again is not chosen.filter
    assert (
        again.memory == chosen.filter.memory == {"kept": world.scheduler.state.groups.ledger.consumed % 1 == 1}
        or again.memory
    )  # type: ignore[attr-defined]


@pytest.mark.parametrize("later", [False, True])
def test_a_policy_that_changes_an_event_changes_nothing_of_the_record(registered: None, later: bool) -> None:
    """`later`: the admission does, with a reference that the filter has kept."""
    seen: list[Any] = []

    def change() -> None:
        structs.force_setattr(seen[-1], "reward_mean", 7.0)
        structs.force_setattr(seen[-1], "tokens", 1)

    @policies.register("filter", "changing")
    class Changing:
        def keep(self, view: View, outcome: GroupGenerated) -> bool:
            seen.append(outcome)
            if not later:
                change()
            return outcome.group % 3 > 0

    @policies.register("admission", "changing")
    class ChangingLater:
        def admit(self, view: View, legal: int) -> int:
            if seen and later:
                change()
            return legal

    limits = Limits(train_batch_size=2, max_staleness_steps=1, max_concurrent_groups=4, max_steps=3)
    chosen = policies.PolicySet.from_names({"filter": "changing", "admission": "changing"})
    recorder = MemoryRecorder(Header(run="changing", limits=limits.to_plain(), policies=dict(chosen.names)))
    setting = Setting(limits=limits, replicas=1, slots=1, prompts=40, seed=1)
    assert JudgedWorld(setting, chosen, recorder).run().outcome == "finished"
    seen.clear()
    assert replay(read(recorder)).divergence is None


def test_the_sync_policy_is_not_asked_about_group_events(registered: None) -> None:
    """Two replicas have staged new weights, and one of them installs these while the other generates."""
    asked = []

    @policies.register("sync", "counting")
    class Counting:
        def pause(self, view: View, staged: Sequence[int], busy: int) -> Sequence[int]:
            asked.append(staged)
            return () if busy else staged[:1]

    run = small(replicas=2, slots=2, policies={"sync": "counting"})
    run.train_on(0, 1)
    for sync in run.ordered(StageWeights):
        run.tell(WeightsStaged(replica=sync.replica, life=1, attempt=sync.attempt, version=1))
    before = len(asked)
    generating = [id for id in run.running() if run.view.replicas()[run.replica_of(id)].state == "ready"]
    run.keep_prefix(generating[0])
    run.finish(generating[0])
    assert len(asked) == before > 0
