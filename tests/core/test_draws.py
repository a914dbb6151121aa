"""Orders for prompts: fewer than ordered close one, a failed draw is tried again, and an echo changes nothing."""

from engine.commands import DrawPrompts, FinishRun
from engine.events import DrawFailed, ProcessUp, PromptsDrawn, RunResumed
from engine.scheduling.groups import MOST_DRAWN

from .scripted import Scripted


def undrawn(**limits: int) -> Scripted:
    """Two groups a step; draws are answered by the test."""
    figures = {"train_batch_size": 2, "max_staleness_steps": 1, "max_concurrent_groups": 4, "max_steps": 3, **limits}
    return Scripted(answers_draws=False, **figures)


def last_draw(run: Scripted) -> DrawPrompts:
    return run.ordered(DrawPrompts)[-1]


def drawn(run: Scripted, count: int, exhausted: bool = False) -> PromptsDrawn:
    order = last_draw(run)
    return PromptsDrawn(first=run.state.groups.ledger.drawn, count=count, exhausted=exhausted, number=order.number)


def test_fewer_prompts_than_ordered_close_the_order_and_the_rest_is_ordered() -> None:
    run = undrawn()
    first = last_draw(run)
    run.tell(drawn(run, 1))
    second = last_draw(run)
    assert second.number > first.number and second.count == first.count - 1
    run.tell(drawn(run, second.count, exhausted=True))
    assert run.state.groups.ledger.drawn == first.count and run.state.groups.facts.exhausted and not run.state.asked


def test_only_so_many_prompts_are_ordered_at_once() -> None:
    groups = 3 * MOST_DRAWN
    assert last_draw(undrawn(train_batch_size=groups, max_concurrent_groups=groups)).count == MOST_DRAWN


def test_an_echo_of_a_draw_that_was_answered_changes_nothing() -> None:
    run = undrawn()
    answered, failed = drawn(run, 1), DrawFailed(number=last_draw(run).number, reason="late")
    run.tell(answered)
    before = run.state.groups.ledger.drawn, run.state.asked
    for echo in (answered, failed, DrawFailed(number=99, reason="of nothing")):
        assert run.tell(echo) == []
    assert (run.state.groups.ledger.drawn, run.state.asked) == before
    assert run.state.orders.facts.stale_echoes == 3 and run.state.ending.failed_draws == 0


def test_a_failed_draw_is_ordered_again_and_one_that_succeeds_forgives_it() -> None:
    run = undrawn()
    for _ in range(2):
        for _ in range(4):
            order = last_draw(run)
            (again,) = run.tell(DrawFailed(number=order.number, reason="the disk is asleep"))
            assert again == DrawPrompts(
                first=order.first, count=order.count, number=order.number + 1, cause=again.cause
            )
        run.tell(drawn(run, 1))
        assert run.state.ending.failed_draws == 0


def test_draws_that_fail_five_times_in_a_row_end_the_run_and_name_the_data_source() -> None:
    run = undrawn()
    for _ in range(5):
        new = run.tell(DrawFailed(number=last_draw(run).number, reason="OSError: no such file"))
    (end,) = [command for command in new if isinstance(command, FinishRun)]
    assert end.outcome == "failed"
    assert end.reason == "the data source failed 5 times in a row; last error: OSError: no such file"
    run.tell(RunResumed(steps=0, replicas=1, consumed=(), released=()))
    assert run.state.ending.outcome is None and run.state.ending.failed_draws == 0
    run.tell(ProcessUp(kind="replica", index=0, life=2, slots=4, version=0))
    run.tell(drawn(run, 4))
    assert run.state.groups.ledger.drawn == 4
