"""Where a trajectory's random numbers come from: a hash of who it is, never a generator that remembers.

Called by `rollout.generator`, which seeds each trajectory, and by `rollout.sampling`, which draws from that seed. Pure
integers, so that a backend without torch can follow the same rule. Must never depend on an attempt, a replica or a
clock: a resumed or retried trajectory has the random numbers it would have had.

The mixer is splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
"""

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST_MULTIPLIER = 0xBF58476D1CE4E5B9
SECOND_MULTIPLIER = 0x94D049BB133111EB


def mix(value: int) -> int:
    """The 64-bit finaliser of splitmix64: a bijection in which every input bit moves every output bit."""
    value &= MASK
    value = ((value ^ (value >> 30)) * FIRST_MULTIPLIER) & MASK
    value = ((value ^ (value >> 27)) * SECOND_MULTIPLIER) & MASK
    return value ^ (value >> 31)


def derive_seed(*parts: int) -> int:
    """One 64-bit seed out of several numbers, in order: `derive_seed(run_seed, group, sample)`."""
    state = 0
    for part in parts:
        state = mix((state + GOLDEN) ^ mix(part + GOLDEN))
    return state
