"""What each mode is, as statements about the course of a run (docs/MODES.md says them in words).

Each raises AssertionError where the record does not keep to it. They hold where no group is filtered, fails or is lost,
and no validation holds a replica back from newer weights; "at most" holds always.
"""

from tests.modes.course import Course


def is_synchronous(course: Course) -> None:
    """Every token is of the weights that are trained on it, and nothing generates while a step is trained."""
    assert course.steps
    assert set(course.every_staleness()) == {0}
    for step, trained in course.steps.items():
        assert not trained.beside, f"groups {sorted(trained.beside)} ran beside step {step}"


def is_one_step_off(course: Course) -> None:
    """The first batch and the second are of the initial weights; from then on every group is exactly one step old."""
    assert len(course.steps) > 2
    for step in course.steps:
        assert set(course.staleness(step)) == {min(step, 1)}, f"step {step}: {course.staleness(step)}"
    starts_whole_batches(course, len(course.steps[0].groups))
    takes_batches_in_order(course)
    assert any(set(course.steps[step].beside) & set(course.steps[step + 1].groups) for step in list(course.steps)[:-1])


def is_generate_ahead(course: Course, ahead: int) -> None:
    """Whole batches in order, each begun `ahead` train steps before its own at most, and some of them as early."""
    batch = len(course.steps[0].groups)
    starts_whole_batches(course, batch)
    takes_batches_in_order(course)
    early = {b.group // batch - course.steps_in[b.version] for b in course.begun.values()}
    assert max(early) == ahead, f"batches were begun {sorted(early)} steps early"
    assert max(course.every_staleness()) == ahead


def is_fully_async(course: Course, staleness: int) -> None:
    """No group is older than the bound, rollout goes on beside training, and what is ready first is trained first."""
    assert max(course.every_staleness()) <= staleness
    assert any(trained.beside for trained in course.steps.values()), "nothing ran beside training"
    takes_ready_first(course)


def is_partial_rollout(course: Course, batch: int, slots: int) -> None:
    """Whatever runs when a batch is full is interrupted, sleeps through training, and goes on from its prefixes."""
    for step, trained in course.steps.items():
        assert not trained.beside, f"groups {sorted(trained.beside)} ran beside step {step}"
    interrupted = [cut for cut in course.cut if cut.asleep and cut.tokens]
    assert interrupted, "no group was interrupted with tokens"
    resumed = {group for _, group in course.resumed}
    last = course.steps[max(course.steps)].ordered
    assert {cut.group for cut in interrupted if cut.at < last} & resumed, "no interrupted group went on"
    trained_groups = {group for batch_of in course.batches for group in batch_of}
    assert {cut.group for cut in interrupted} & trained_groups, "no interrupted group was trained on"
    assert all(cut.group in resumed for cut in interrupted if cut.group in trained_groups)
    kept_busy(course, batch, slots)


def is_stream(course: Course, steps: int) -> None:
    """Every version but the last holds exactly so many train steps more than the one before it."""
    versions = sorted(course.steps_in)
    held = [course.steps_in[v] - course.steps_in[v - 1] for v in versions[1:]]
    assert len(held) > 1
    assert set(held[:-1]) == {steps}, held
    assert 1 <= held[-1] <= steps


def starts_whole_batches(course: Course, batch: int) -> None:
    """Groups start `batch` at a time, all of them on one version."""
    begun = sorted(course.begun.values(), key=lambda b: b.group)
    for first in range(0, len(begun) - len(begun) % batch, batch):
        versions = {b.version for b in begun[first : first + batch]}
        assert len(versions) == 1, f"the batch from group {first} on started on versions {sorted(versions)}"


def takes_batches_in_order(course: Course) -> None:
    """Step after step the groups in the order of their draws, none left out."""
    taken = [group for batch in course.batches for group in sorted(batch)]
    assert taken == sorted(taken) == list(range(len(taken)))


def takes_ready_first(course: Course) -> None:
    """A group is passed over only for one that is due earlier: that started on older weights."""
    for step, trained in course.steps.items():
        later = [group for other in course.steps if other > step for group in course.steps[other].groups]
        for left in later:
            passed = [g for g in trained.groups if course.ready_at[g] > course.ready_at[left]]
            older = [
                course.steps_in[course.begun[g].version] < course.steps_in[course.begun[left].version] for g in passed
            ]
            assert all(older), f"step {step} passed over group {left}, which was ready before {passed}"


def kept_busy(course: Course, batch: int, slots: int) -> None:
    """Whenever a group ends and the batch is not full, another one takes its slot in the same breath."""
    full = 0
    for group, at in course.ready_at.items():
        formed = sum(1 for trained in course.steps.values() if trained.ordered <= at)
        ready = sum(1 for other in course.ready_at.values() if other <= at) - formed * batch
        if ready < batch and formed < len(course.steps):
            assert course.running_after[at] == slots, f"a slot stayed empty when group {group} ended"
            full += 1
    assert full, "no group ended before its batch was full"
