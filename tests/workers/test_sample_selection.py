"""Which responses are kept as samples: a bounded, pure choice that never misses the extremes."""

from hypothesis import example, given
from hypothesis import strategies as st

from engine.workers.sample_keeper import (
    BEST,
    LONGEST,
    RANDOM,
    REASONS,
    TRUNCATED,
    WORST,
    Candidate,
    select,
    shuffled,
)

CANDIDATES = st.lists(
    st.builds(
        Candidate,
        reward=st.none() | st.sampled_from([0.0, 0.5, 1.0]),
        tokens=st.integers(0, 9),
        truncated=st.booleans(),
    ),
    max_size=24,
)
NUMBERS = st.integers(0, 2**31 - 1)


@given(NUMBERS, NUMBERS, CANDIDATES, st.integers(0, 30))
@example(0, 0, [Candidate(0.0, 1, False), Candidate(1.0, 1, True)], 2)
def test_the_choice_is_bounded_and_pure_and_every_reason_is_true(
    seed: int, step: int, candidates: list[Candidate], count: int
) -> None:
    chosen = select(seed, step, candidates, count)
    assert chosen == select(seed, step, list(candidates), count)
    assert len(chosen) == min(count, len(candidates))
    assert list(chosen) == sorted(chosen)
    rewards = [candidate.reward for candidate in candidates if candidate.reward is not None]
    for index, reasons in chosen.items():
        assert reasons and list(reasons) == [reason for reason in REASONS if reason in reasons]
        assert TRUNCATED not in reasons or candidates[index].truncated
        assert not {BEST, WORST} & set(reasons) or (candidates[index].reward is not None and len(set(rewards)) > 1)


@given(NUMBERS, NUMBERS, CANDIDATES)
def test_five_are_enough_for_each_extreme(seed: int, step: int, candidates: list[Candidate]) -> None:
    chosen = select(seed, step, candidates, len(REASONS))
    rewards = [candidate.reward for candidate in candidates if candidate.reward is not None]
    extremes: dict[str, float] = {}
    if len(set(rewards)) > 1:
        extremes |= {WORST: min(rewards), BEST: max(rewards)}
    for reason, reward in extremes.items():
        assert reward in [candidates[index].reward for index, reasons in chosen.items() if reason in reasons], reason
    if candidates:
        longest = [candidates[index].tokens for index, reasons in chosen.items() if LONGEST in reasons]
        assert max(candidate.tokens for candidate in candidates) in longest
        assert any(RANDOM in reasons for reasons in chosen.values())
    assert any(candidate.truncated for candidate in candidates) == any(TRUNCATED in r for r in chosen.values())


def test_equal_candidates_are_chosen_anew_at_each_step_and_seed() -> None:
    equal = [Candidate(1.0, 5, False)] * 50
    chosen = {tuple(select(seed, step, equal, 4)) for seed in range(5) for step in range(5)}
    assert len(chosen) > 20


def test_a_seed_chooses_the_same_in_every_process() -> None:
    assert shuffled(7, "step 3", 8) == [1, 0, 3, 6, 4, 5, 7, 2]
