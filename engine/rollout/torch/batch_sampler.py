"""Continuous batching: the rows of running requests, and the step that gives each its next token.

Called by `rollout.torch.torch_backend` on its sampling thread, one method at a time. Knows nothing of threads, event
loops or pauses. Must never let one request change another's tokens, and never touch Python per row and token: books are
kept in arrays.

A row holds known tokens (prompt, prefix, then what was sampled) and a position, the next one to feed to the model. A
*cold* row has more than its last known token to feed: prefill does that at once, except in deterministic mode, where
every token goes through the one decode shape, `FIXED_ROWS` rows and all columns a call, so that a row's bits depend
neither on its neighbors, nor on how many rows there are, nor on having been resumed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.errors import EngineError
from engine.ids import Version
from engine.rollout.backend import (
    FIRST_MULTIPLIER,
    GOLDEN,
    SECOND_MULTIPLIER,
    SampleRequest,
    SampleResult,
    budget_of,
    derive_seed,
    nothing_new,
    over_already,
    refusal_of,
)
from engine.rollout.torch.causal_model import FIXED_ROWS, CausalModel
from engine.trajectory import Span

# -- from logits to tokens ---------------------------------------------------------------------------------------------


_DRAW_BITS = 52  # u <= 1 - 2^-52, so that u * total stays below total in float64 whatever total is


@dataclass(frozen=True, slots=True)
class RowSettings:
    """How each row samples, on the model's device. Rebuilt only when a row joins or leaves.

    `temperature` [rows] float32, 1 where the row is greedy; `greedy` [rows] bool, None while no row is; `top_p` [rows]
    float64, None while every row keeps all tokens.
    """

    temperature: torch.Tensor
    greedy: torch.Tensor | None
    top_p: torch.Tensor | None

    @classmethod
    def of(cls, temperature: np.ndarray, top_p: np.ndarray, device: torch.device) -> "RowSettings":
        """From what the requests asked for, both [rows]."""
        greedy = temperature == 0.0
        return cls(
            temperature=torch.from_numpy(np.where(greedy, 1.0, temperature).astype(np.float32)).to(device),
            greedy=torch.from_numpy(greedy).to(device) if greedy.any() else None,
            top_p=torch.from_numpy(top_p.astype(np.float64)).to(device) if (top_p < 1.0).any() else None,
        )


def uniform_draws(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per row, a function of (seed, position) only. `seeds` [rows] uint64, `positions` [rows]
    int64.

    `seeds` come out of `rollout.backend.derive_seed`, so that neighbouring seeds do not give shifted copies of one
    stream.
    """
    state = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(FIRST_MULTIPLIER)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(SECOND_MULTIPLIER)
    state ^= state >> np.uint64(31)
    return (state >> np.uint64(64 - _DRAW_BITS)).astype(np.float64) * 2.0**-_DRAW_BITS


def choose(logits: torch.Tensor, settings: RowSettings, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [rows] int64 and their behavior log-probs [rows] float32, from `logits` [rows, vocabulary].

    Draws by inverting the cumulative distribution in vocabulary order. The log-prob is that of the distribution
    sampled: after temperature, and renormalised over the nucleus. A greedy row samples a point mass, so its log-prob is
    0. Logits that are not finite come back as a NaN log-prob, for the caller to refuse.
    """
    logprobs = torch.log_softmax(logits.float() / settings.temperature[:, None], dim=-1)
    weights = logprobs.double().exp_()
    if settings.top_p is not None:
        weights = weights * nucleus(weights, settings.top_p)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, draws[:, None] * total, right=True)
    tokens.clamp_(max=logits.shape[-1] - 1)
    if settings.greedy is not None:
        tokens = torch.where(settings.greedy[:, None], logits.argmax(dim=-1, keepdim=True), tokens)
    chosen = logprobs.gather(1, tokens)
    if settings.top_p is not None:
        mass = torch.where(settings.top_p[:, None] < 1.0, total, 1.0)  # a row that keeps all is as it is without others
        chosen = chosen - mass.log().float()
    if settings.greedy is not None:
        chosen = torch.where(settings.greedy[:, None], chosen - chosen, chosen)
    return tokens[:, 0], chosen[:, 0]


def nucleus(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Which tokens [rows, vocabulary] (bool) the nucleus keeps: the fewest whose probability reaches `top_p` [rows].

    Holtzman et al.: The Curious Case of Neural Text Degeneration, ICLR 2020. Equal probabilities are taken in
    vocabulary order; the likeliest token is always kept, and a row with `top_p` 1 keeps all.
    """
    ordered, index = weights.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = (before < top_p[:, None]) | (top_p[:, None] >= 1.0)
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(1, index, kept)


# -- continuous batching -----------------------------------------------------------------------------------------------


Outcome = Callable[[SampleResult | BaseException], None]
Told = Callable[[SampleResult], None]

_NEVER = np.iinfo(np.int64).max

_COLUMN_BUCKET = 32
_PREFILL_BUCKET = 16
_PREFILL_TOKENS = 4096  # padded tokens of one prefill call: bounds its memory and how long it holds up the others


@dataclass(slots=True)
class Running:
    """What a row remembers of its request outside the arrays."""

    request: SampleRequest
    ended: Outcome
    first: int
    """Known tokens when it came: prompt plus prefix. New tokens start here."""
    told: Told | None = None
    """Takes what there is each time `request.tell_every` more tokens have been sampled."""
    versions: list[tuple[int, Version]] = field(default_factory=list)
    """From which known token on each weights version sampled."""


class BatchSampler:
    """Up to `rows` requests at a time; the others wait in order of arrival."""

    def __init__(self, model: CausalModel, *, rows: int, version: Version, deterministic: bool) -> None:
        self.model = model
        self.version = version
        self.deterministic = deterministic
        self.tokens_sampled = 0
        self._rows = rows
        rows = model.rows  # from here on: of the cache, which may have more
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []
        self._ids = np.zeros((rows, model.context), dtype=np.int64)
        self._logprobs = np.zeros((rows, model.context), dtype=np.float32)
        self._position = np.zeros(rows, dtype=np.int64)
        self._known = np.zeros(rows, dtype=np.int64)
        self._start = np.zeros(rows, dtype=np.int64)  # prompt tokens
        self._limit = np.zeros(rows, dtype=np.int64)  # known tokens at which the budget is spent
        self._tell_at = np.full(rows, _NEVER)  # known tokens at which to tell of them
        self._seed = np.zeros(rows, dtype=np.uint64)
        self._temperature = np.ones(rows, dtype=np.float64)
        self._top_p = np.ones(rows, dtype=np.float64)
        self._kv_version = np.zeros(rows, dtype=np.int64)
        self._stops = np.full((rows, 1), -1, dtype=np.int64)
        self._settings: dict[int, RowSettings] = {}  # of the rows from a first one on
        self._any_cold = False

    @property
    def busy(self) -> bool:
        """Whether a step has something to do."""
        return bool(self._running or self._waiting)

    @property
    def running(self) -> int:
        """Requests that have rows, and keys and values in them."""
        return len(self._running)

    def holds(self, request_id: str) -> bool:
        return any(run.request.id == request_id for run in (*self._running, *self._waiting))

    def submit(self, request: SampleRequest, ended: Outcome, told: Told | None = None) -> None:
        """Take a request; `ended` is called once with its result or its failure, possibly at once."""
        refusal = refusal_of(request, context=self.model.context, vocabulary=self.model.vocabulary)
        if refusal is None and self.holds(request.id):
            refusal = EngineError(f"request {request.id} is running already", request=request.id)
        outcome = refusal or over_already(request, self.model.context)
        if outcome is not None:
            ended(outcome)
        else:
            first = len(request.prompt_ids) + len(request.prefix_ids)
            self._waiting.append(Running(request, ended, first=first, told=told))

    def abort(self, ids: Sequence[str] | None = None) -> None:
        """End these requests (all of them: None) with what they have."""
        chosen = None if ids is None else set(ids)
        for row in reversed(range(len(self._running))):
            if chosen is None or self._running[row].request.id in chosen:
                self._end(row, "abort")
        kept: deque[Running] = deque()
        for run in self._waiting:
            if chosen is None or run.request.id in chosen:
                run.ended(nothing_new("abort"))
            else:
                kept.append(run)
        self._waiting = kept

    def fail(self, error: BaseException) -> None:
        """End every request with a failure and forget the cache, which may hold anything."""
        failed = [*self._running, *self._waiting]
        self._running.clear()
        self._waiting.clear()
        self._position[:] = self._known[:] = 0
        self.model.cache.clear()
        self._settings = {}
        for run in failed:
            run.ended(error)

    def weights_changed(self, version: Version, *, recompute: bool) -> None:
        """The model has other weights now. `recompute` feeds every running row's tokens through them again."""
        self.version = version
        for row, run in enumerate(self._running):
            if run.versions[-1][1] != version:
                run.versions.append((int(self._known[row]), version))
        if recompute:
            self._position[:] = 0
            self._any_cold = True

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what fits, prefill it, then one token for every running request."""
        self._admit()
        if self._any_cold and not self.deterministic:
            self._prefill_cold_rows()
        count = len(self._running)
        if self.deterministic:
            drawn = [self._draw(first, FIXED_ROWS, self.model.context) for first in range(0, count, FIXED_ROWS)]
            self._append(*map(np.concatenate, zip(*drawn, strict=True)))
        else:
            length = self._bucket(int(self._position[:count].max()) + 1, _COLUMN_BUCKET)
            self._append(*self._draw(0, count, length))

    def _draw(self, first: int, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Feed `count` rows from `first` on one token each; the next ones and their log-probs, both [count]."""
        part = slice(first, first + count)
        position, device = self._position[part], self.model.device
        fed = self._ids[np.arange(first, first + count), position]
        logits = self.model.decode(
            torch.from_numpy(fed).to(device), torch.from_numpy(position.copy()).to(device), length, first
        )
        if first not in self._settings:
            self._settings[first] = RowSettings.of(self._temperature[part], self._top_p[part], device)
        draws = uniform_draws(self._seed[part], self._known[part] - self._start[part])
        tokens, logprobs = choose(logits, self._settings[first], torch.from_numpy(draws).to(device))
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    def _append(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Write the rows' new tokens down; end those that are done. Rows still fed known tokens sampled nothing."""
        count = len(self._running)
        position, known = self._position[:count], self._known[:count]
        position += 1
        fresh = np.flatnonzero(position == known)
        tokens, logprobs = tokens[fresh], logprobs[fresh]
        if not np.isfinite(logprobs).all():
            raise EngineError(
                f"weights of version {self.version} give logits that are not finite", version=self.version
            )
        self._ids[fresh, known[fresh]] = tokens
        self._logprobs[fresh, known[fresh]] = logprobs
        known[fresh] += 1
        self.tokens_sampled += len(fresh)
        stopped = (tokens[:, None] == self._stops[fresh]).any(axis=1)
        done = stopped | (known[fresh] >= self._limit[fresh])
        if done.any():
            for index in np.flatnonzero(done)[::-1]:  # from the last row down: ending a row moves the last one into it
                self._end(int(fresh[index]), "stop" if stopped[index] else "length")
        for row in np.flatnonzero(self._known[: len(self._running)] >= self._tell_at[: len(self._running)]).tolist():
            self._tell(row)

    def _tell(self, row: int) -> None:
        run = self._running[row]
        self._tell_at[row] += run.request.tell_every
        if run.told is not None:
            run.told(self._result(row, ""))

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._rows:
            run = self._waiting.popleft()
            row = len(self._running)
            self._running.append(run)
            request, params = run.request, run.request.params
            run.versions.append((run.first, self.version))
            self._ids[row, : run.first] = [*request.prompt_ids, *request.prefix_ids]
            self._position[row] = 0
            self._known[row] = run.first
            self._start[row] = len(request.prompt_ids)
            self._limit[row] = len(request.prompt_ids) + budget_of(request, self.model.context)
            self._tell_at[row] = run.first + request.tell_every if run.told and request.tell_every else _NEVER
            self._seed[row] = derive_seed(request.seed)
            self._temperature[row] = params.temperature
            self._top_p[row] = params.top_p
            self._set_stops(row, params.stop_ids)
            self._settings = {}
            self._any_cold = True

    def _set_stops(self, row: int, stop_ids: Sequence[int]) -> None:
        width = self._stops.shape[1]
        if len(stop_ids) > width:
            self._stops = np.pad(self._stops, ((0, 0), (0, len(stop_ids) - width)), constant_values=-1)
        self._stops[row] = -1
        self._stops[row, : len(stop_ids)] = stop_ids

    def _prefill_cold_rows(self) -> None:
        """Fill the cache up to each cold row's last known token; equal ones, a group's first samples, are computed
        once."""
        self._any_cold = False
        count = len(self._running)
        cold = np.flatnonzero(self._position[:count] < self._known[:count] - 1)
        if not len(cold):
            return
        is_cold = set(cold.tolist())
        donors = {
            self._ids[row, : self._start[row]].tobytes(): row
            for row in range(count)
            if row not in is_cold and self._kv_version[row] == self.version
        }
        unique: dict[bytes, int] = {}
        twins: list[tuple[int, int]] = []
        for row in cold.tolist():
            key = self._ids[row, : self._known[row]].tobytes()
            source = donors[key] if key in donors else unique.setdefault(key, row)
            if source != row:
                twins.append((source, row))
        self._prefill_rows(sorted(unique.values(), key=lambda row: int(self._known[row])))
        for source, row in twins:
            self.model.cache.copy_row(source, row, int(self._known[row]) - 1)
        self._position[cold] = self._known[cold] - 1
        self._kv_version[cold] = self.version

    def _prefill_rows(self, rows: Sequence[int]) -> None:
        """In calls of similar lengths, `rows` sorted by length."""
        while rows:
            take = len(rows)
            while take > 1 and take * int(self._known[rows[take - 1]]) > _PREFILL_TOKENS:
                take = (take + 1) // 2
            batch, rows = np.array(rows[:take]), rows[take:]
            tokens = self._bucket(int(self._known[batch[-1]]) - 1, _PREFILL_BUCKET)
            padded = self._ids[batch, :tokens].copy()
            padded[np.arange(tokens)[None] >= self._known[batch][:, None]] = 0
            device = self.model.device
            self.model.prefill(torch.from_numpy(batch).to(device), torch.from_numpy(padded).to(device))

    def _result(self, row: int, reason: str) -> SampleResult:
        run = self._running[row]
        first, known = run.first, int(self._known[row])
        bounds = [*(start for start, _ in run.versions), known]
        spans = [
            Span(start - first, stop - first, version)
            for (start, version), stop in zip(run.versions, bounds[1:], strict=True)
            if stop > start
        ]
        return SampleResult(
            token_ids=self._ids[row, first:known].tolist(),
            logprobs=self._logprobs[row, first:known].tolist(),
            spans=spans,
            finish_reason=reason,
        )

    def _end(self, row: int, reason: str) -> None:
        """Hand a row's new tokens back and move the last row into its place."""
        run, result = self._running[row], self._result(row, reason)
        last = len(self._running) - 1
        self._running[row] = self._running[last]
        self._running.pop()
        if row != last:
            self._move(last, row)
        self._settings = {}
        self._position[last] = 0  # idle rows of the deterministic mode stay where any context reaches
        self._known[last] = 0
        run.ended(result)

    def _move(self, source: int, target: int) -> None:
        for array in (
            self._ids, self._logprobs, self._position, self._known, self._start, self._limit, self._tell_at, self._seed,
            self._temperature, self._top_p, self._kv_version, self._stops,
        ):  # fmt: skip
            array[target] = array[source]
        self.model.cache.copy_row(source, target, int(self._position[source]))

    def _bucket(self, tokens: int, size: int) -> int:
        return min(-(-tokens // size) * size, self.model.context)
