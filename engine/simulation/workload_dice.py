"""Draws the durations and lengths of a simulated run from a `config.workload.Workload`.

Used by `what_if`. A draw depends on the seed and on what it is for, never on the schedule: two schedules with one seed
get the same groups, and the same work in the same order.
"""

from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from math import exp
from random import Random
from statistics import NormalDist, fmean

from engine.config.workload import Workload, quantile, typical
from engine.ids import GroupId
from engine.simulation.run_settings import Setting
from engine.simulation.simulated_models import Dice
from engine.trajectory import Prompt

TOKENS_OF_MEAN = 48
"""Simulated tokens of a response of mean length. Longer ones would only make the simulation slower: times are exact,
and written lengths are rounded up to a simulated token."""
BLOCK = 64
"""So many groups in a row have mean lengths at equal shares of the cases, in a random order: a short run then has about
the lengths of a long one."""
ROWS = 1009
"""Number of rows that show the shares of sources. It is prime: a batch has no row in common with the next."""
WORD = 4
"""Bytes of a random number."""


class WorkloadDice(Dice):
    """The draws of one world, from the figures of a workload."""

    def __init__(self, setting: Setting, workload: Workload, *, ranks: int = 1) -> None:
        """`ranks`: of the trainer."""
        super().__init__(setting)
        self.workload = workload
        self.token_size = max(1, round(typical(workload.responses.tokens) / TOKENS_OF_MEAN))
        self.share_of_replica, self.share_of_trainer = workload.shared.replica, workload.shared.trainer
        self.trainer_slower = workload.shared.trainer_slower
        self.rewards_at_once = workload.rewards.at_once
        trainer = workload.trainer
        self._trainer_speed = (1 + trainer.rank_speedup * (ranks - 1)) / (
            1 + trainer.rank_speedup * (trainer.ranks - 1)
        )
        self._orders: dict[int, list[int]] = {}
        self._streams: dict[str, Random] = defaultdict(Random)
        self._token_s: dict[int, float] = {}
        self._normal = NormalDist()

    def seconds(self, task: str, tokens: int = 0) -> float:
        w = self.workload
        match task:
            case "train":
                step_s = self._draw(task, w.trainer.step_s) + tokens * self.token_size * w.trainer.token_s
                return step_s / self._trainer_speed
            case "score":
                return self._draw(task, w.trainer.score_s) / self._trainer_speed
            case "publish":
                return self._draw(task, w.trainer.publish_s)
            case "stage":
                return self._draw(task, w.weights.staging_s)
            case "pause":
                return self._draw(task, w.weights.pausing_s)
            case "install":
                return self._draw(task, w.weights.installing_s)
            case "measure":
                return self._draw(task, w.replica.row_s)
            case "prefill":
                return w.replica.prefill_s
            case "prompt":
                return w.replica.prompt_s
            case "overhead":
                return self._draw(task, w.replica.overhead_s)
            case _:
                return self._draw(task, w.states.get(task, 0.0))

    def _draw(self, task: str, figure: float | Sequence[float]) -> float:
        if not isinstance(figure, Sequence):
            return figure
        stream = self._streams.get(task)
        if stream is None:
            stream = self._streams[task] = Random(f"{self.setting.seed} {task}")
        return quantile(figure, stream.random())

    def token_s(self, responses: int) -> float:
        """Responses beyond the most that a replica samples at once take turns. One that waits for tools is not sampled
        meanwhile, so the others are faster."""
        if responses not in self._token_s:
            replica = self.workload.replica
            most = replica.most_responses or responses
            busy = seconds = 0.0
            for _ in range(20 if replica.wait_s else 1):
                busy = responses * (seconds / (seconds + replica.wait_s) if busy else 1.0)
                seconds = (replica.step_s + replica.response_s * min(busy, most)) * max(1.0, busy / (most or 1))
            self._token_s[responses] = (seconds + replica.wait_s) * self.token_size
        return self._token_s[responses]

    def waiting_share(self, responses: int) -> float:
        return self.workload.replica.wait_s * self.token_size / self.token_s(responses)

    def reward_calls(self) -> Sequence[float]:
        rewards = self.workload.rewards
        return [self._draw("reward", rewards.call_s) for _ in range(rewards.calls)]

    def _stratum(self, group: GroupId, share: float) -> float:
        block, place = divmod(group, BLOCK)
        if block not in self._orders:
            self._orders[block] = Random(f"{self.setting.seed} block {block}").sample(range(BLOCK), BLOCK)
        return (self._orders[block][place] + share) / BLOCK

    def ends(self, group: GroupId) -> Sequence[float]:
        """Lengths vary around the group's mean, and are cut at the limit."""
        responses, samples = self.workload.responses, self.setting.samples
        random = b"".join(
            blake2b(b"%d %d %d" % (self.setting.seed, group, part), digest_size=64).digest()
            for part in range(1 + samples * WORD // 64)
        )
        shares = [
            (int.from_bytes(random[at : at + WORD], "little") + 0.5) / (1 << 8 * WORD)
            for at in range(0, (samples + 1) * WORD, WORD)
        ]
        source = self.workload.sources.get(self.setting.prompt(group).source)
        tokens = responses.tokens if source is None else source.tokens
        mean = quantile(tokens, self._stratum(group, shares[-1]))
        mean *= (1 + responses.growth) ** (group / self.setting.limits.train_batch_size)
        lengths = _with_mean(
            [exp(responses.spread * self._normal.inv_cdf(share)) for share in shares[:-1]], mean, responses.max_tokens
        )
        most = self.setting.max_tokens or float("inf")
        return sorted(max(1.0, min(length, most)) / self.token_size for length in lengths)


def prompts_of(workload: Workload, seed: int) -> Sequence[Prompt]:
    """Prompts with their sources by share, in a random order, which groups have in turn; empty without sources."""
    found = [name for name, source in workload.sources.items() for _ in range(round(source.share * ROWS))]
    Random(f"{seed} sources").shuffle(found)
    return [Prompt(row=row, text="", source=name) for row, name in enumerate(found)]


def _with_mean(weights: list[float], mean: float, most: int | None) -> list[float]:
    """Lengths in proportion to `weights`, except for those cut at `most`, with this mean where the limit allows it."""
    scale = mean * len(weights) / sum(weights)
    if most is None:
        return [weight * scale for weight in weights]
    for _ in range(len(weights)):
        cut = [weight for weight in weights if weight * scale >= most]
        rest = sum(weights) - sum(cut)
        if not rest:
            break
        wanted = max(0.0, mean * len(weights) - most * len(cut)) / rest
        if wanted <= scale * (1 + 1e-9):
            break
        scale = wanted
    return [min(weight * scale, most) for weight in weights]


def spread_of(means: Sequence[float], longest: float, samples: int, most: int) -> float:
    """The `spread` with which the longest responses of groups with these mean lengths have a mean length of `longest`,
    if none is longer than `most`."""
    normal, draws = NormalDist(), Random(0)
    spaced = [quantile(sorted(means), (number + 0.5) / 200) for number in range(200)]
    groups = [(mean, [normal.inv_cdf(draws.random() or 0.5) for _ in range(samples)]) for mean in spaced]

    def longest_of(spread: float) -> float:
        return fmean(max(_with_mean([exp(spread * z) for z in one], mean, most)) for mean, one in groups)

    low, high = 0.0, 4.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if longest_of(middle) < longest else (low, middle)
    return round(low, 3)
