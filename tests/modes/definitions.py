"""What each mode is, as statements about the course of a run (docs/MODES.md says them in words).

Each raises AssertionError where the record does not keep to it. They hold where no group is filtered, fails or is lost,
and no validation holds a replica back from newer weights; "at most" holds always.
"""

from itertools import pairwise

from engine.ids import GroupId
from tests.modes.course import Course


def is_synchronous(course: Course) -> None:
    """Every token is of the weights that are trained on it, and nothing generates while a step is trained."""
    assert course.steps
    assert set(course.every_staleness()) == {0}
    for step, groups in course.beside.items():
        assert not groups, f"groups {sorted(groups)} ran beside step {step}"


def is_one_step_off(course: Course) -> None:
    """The first batch and the second are of the initial weights; from then on every group is exactly one step old."""
    assert len(course.steps) > 2
    for step in course.steps:
        assert set(course.staleness(step)) == {min(step, 1)}, f"step {step}: {course.staleness(step)}"
    for batch in whole_batches(course):
        versions = {course.begun[group].version for group in batch}
        assert len(versions) == 1, f"the batch of group {batch[0]} began on versions {sorted(versions)}"
    assert any(course.beside[step] & set(course.steps[step + 1].groups) for step in list(course.steps)[:-1])


def is_generate_ahead(course: Course, ahead: int) -> None:
    """Whole batches in order, begun so many train steps before their own at most; none is trained when older."""
    assert max(course.every_staleness()) <= ahead
    assert max(steps_early(course)) <= ahead


def steps_early(course: Course) -> list[int]:
    """By batch: train steps between the weights it began on and its own step."""
    return [
        number - min(course.steps_in[course.begun[group].version] for group in batch)
        for number, batch in enumerate(whole_batches(course))
    ]


def is_fully_async(course: Course, staleness: int) -> None:
    """No group is older than the bound, rollout continues beside training, and what is ready first is trained first."""
    assert max(course.every_staleness()) <= staleness
    assert any(course.beside.values()), "nothing ran beside training"
    takes_ready_first(course)


def is_partial_rollout(course: Course, staleness: int, most: int) -> None:
    """At most `most` groups run. What runs when a batch is full is interrupted, sleeps through training, and continues
    from what it has."""
    assert max(course.every_staleness()) <= staleness
    for step, groups in course.beside.items():
        assert not groups, f"groups {sorted(groups)} ran beside step {step}"
    assert all(cut.reason == "pool" for cut in course.cut)
    assert {cut.group for cut in course.cut if cut.tokens} & course.trained <= course.resumed, (
        "an interrupted group began anew"
    )
    kept_busy(course, len(course.steps[0].groups), staleness, most)


def interrupted(course: Course) -> set[GroupId]:
    """Groups that were cut short with tokens, continued, and were trained on with tokens from before and after."""
    mixed = {group for group, end in course.generated.items() if end.oldest_version < end.newest_version}
    return {cut.group for cut in course.cut if cut.tokens} & course.resumed & mixed & course.trained


def is_stream(course: Course, steps: int, ahead: int) -> None:
    """Every version but the last holds so many train steps more than the one before it, and when a group begins at most
    `ahead` groups have begun, itself included, that the steps of its weights have not consumed."""
    versions = sorted(course.steps_in)
    held = [course.steps_in[v] - course.steps_in[v - 1] for v in versions[1:]]
    assert len(held) > 1
    assert set(held[:-1]) == {steps}, held
    assert 1 <= held[-1] <= steps
    batch = len(course.steps[0].groups)
    in_order = sorted(course.begun.values(), key=lambda begun: (begun.start, begun.group))
    beyond = [number - course.steps_in[begun.version] * batch for number, begun in enumerate(in_order, start=1)]
    assert max(beyond) <= ahead, beyond


def whole_batches(course: Course) -> list[tuple[GroupId, ...]]:
    """The batches in order, where each was begun only once the one before it was generated, and trained as it was."""
    batches = [tuple(sorted(batch)) for batch in course.batches]
    taken = [group for batch in batches for group in batch]
    assert taken == list(range(len(taken))), "batches are trained in the order of their draws"
    for before, batch in pairwise(batches):
        ended = max(course.generated[group].end for group in before)
        assert all(course.begun[group].start >= ended for group in batch), (
            f"the batch of group {batch[0]} began too early"
        )
    return batches


def takes_ready_first(course: Course) -> None:
    """A group is passed over only for one that is due earlier: that started on older weights."""
    for step, trained in course.steps.items():
        later = [group for other in course.steps if other > step for group in course.steps[other].groups]
        for left in later:
            passed = [g for g in trained.groups if course.generated[g].end > course.generated[left].end]
            older = [
                course.steps_in[course.begun[g].version] < course.steps_in[course.begun[left].version] for g in passed
            ]
            assert all(older), f"step {step} passed over group {left}, which was ready before {passed}"


def kept_busy(course: Course, batch: int, staleness: int, most: int) -> int:
    """Whenever a group ends and the batch is not full, its slot is filled at once. Three bounds leave it empty: `most`
    groups run; nothing is parked, and the weights have as many groups as the staleness bound allows; or the last step
    has all its groups. Returns how often no bound did."""
    looked_at = 0
    for ended in course.generated.values():
        at, replica = ended.end, ended.replica
        if course.is_paused(replica, at):
            continue
        running = [one for one in course.attempts if one.start <= at < one.end]
        version = max(one.version for one in course.attempts if one.replica == replica and one.start <= at)
        formed = sum(course.training(step).start <= at for step in course.steps)
        ready = sum(one.end <= at for one in course.generated.values()) - formed * batch
        begun = sum(one.start <= at for one in course.begun.values())
        places = min(staleness + 1 + course.steps_in[version], len(course.steps)) * batch
        if ready >= batch or len(running) >= most:
            continue
        if begun < places or any(one.newest_version <= version for one in course.parked_at(at)):
            held = sum(one.replica == replica for one in running)
            empty = course.history.slots[replica] - held
            assert empty <= 0, f"{empty} slots stayed empty at {at}, where group {ended.group} ran"
            looked_at += 1
    return looked_at
