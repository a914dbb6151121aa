"""Continuous batching: the rows of running requests, and the step that samples the next token of each.

Called by `rollout.torch.torch_backend` on its sampling thread, one method at a time. Does not use threads, event loops
or pauses. Must never let one request change another's tokens, and never run Python code per row and token: all state of
the rows is in arrays.

A row holds known tokens (prompt, prefix, then sampled tokens) and a position: the next token to feed to the model. A
*cold* row has to feed more than its last known token. Prefill feeds them all at once, except in deterministic mode.
There, every token goes through the same decode shape, with `FIXED_ROWS` rows and all columns in each call. A row's bits
then depend neither on its neighbors, nor on the number of rows, nor on whether it was resumed.
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


_DRAW_BITS = 52  # u <= 1 - 2^-52, so u * total is less than total in float64 for every total


@dataclass(frozen=True, slots=True)
class RowSettings:
    """The sampling settings of each row, on the model's device. Rebuilt only when a row joins or leaves.

    `temperature` [rows] float32, 1 for greedy rows; `greedy` [rows] bool, None if no row is greedy; `top_p` [rows]
    float64, None if every row keeps all tokens.
    """

    temperature: torch.Tensor
    greedy: torch.Tensor | None
    top_p: torch.Tensor | None

    @classmethod
    def of(cls, temperature: np.ndarray, top_p: np.ndarray, device: torch.device) -> "RowSettings":
        """Build them from the settings of the requests, both [rows]."""
        greedy = temperature == 0.0
        return cls(
            temperature=torch.from_numpy(np.where(greedy, 1.0, temperature).astype(np.float32)).to(device),
            greedy=torch.from_numpy(greedy).to(device) if greedy.any() else None,
            top_p=torch.from_numpy(top_p.astype(np.float64)).to(device) if (top_p < 1.0).any() else None,
        )


def uniform_draws(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per row, a function of (seed, position) only. `seeds` [rows] uint64, `positions` [rows]
    int64.

    `seeds` must come from `rollout.backend.derive_seed`, so that neighboring seeds do not give shifted copies of one
    stream.
    """
    state = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(FIRST_MULTIPLIER)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(SECOND_MULTIPLIER)
    state ^= state >> np.uint64(31)
    return (state >> np.uint64(64 - _DRAW_BITS)).astype(np.float64) * 2.0**-_DRAW_BITS


def choose(logits: torch.Tensor, settings: RowSettings, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [rows] int64 and their behavior log-probs [rows] float32, from `logits` [rows, vocabulary].

    Draws by inverting the cumulative distribution in vocabulary order. The log-prob is that of the sampled
    distribution: after temperature, and renormalized over the nucleus. A greedy row samples a point mass, so its
    log-prob is 0. Logits that are not finite give a NaN log-prob, which the caller must reject.
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
        mass = torch.where(settings.top_p[:, None] < 1.0, total, 1.0)  # other rows must not change a row that keeps all
        chosen = chosen - mass.log().float()
    if settings.greedy is not None:
        chosen = torch.where(settings.greedy[:, None], chosen - chosen, chosen)
    return tokens[:, 0], chosen[:, 0]


def nucleus(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The tokens [rows, vocabulary] (bool) in the nucleus: the fewest whose total probability reaches `top_p` [rows].

    Holtzman et al.: The Curious Case of Neural Text Degeneration, ICLR 2020. Tokens of equal probability are taken in
    vocabulary order. The likeliest token is always in the nucleus. A row with `top_p` 1 keeps all tokens.
    """
    ordered, index = weights.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    inside = (before < top_p[:, None]) | (top_p[:, None] >= 1.0)
    inside[:, 0] = True
    return torch.zeros_like(inside).scatter_(1, index, inside)


# -- continuous batching -----------------------------------------------------------------------------------------------


Finish = Callable[[SampleResult | BaseException], None]
Report = Callable[[SampleResult], None]

_NEVER = np.iinfo(np.int64).max

_COLUMN_BUCKET = 32
_PREFILL_BUCKET = 16
_PREFILL_TOKENS = 4096  # padded tokens of one prefill call: bounds its memory, and the delay of the other requests


@dataclass(slots=True)
class SampledRow:
    """The state of a request that is not in the arrays."""

    request: SampleRequest
    finish: Finish
    first: int
    """Number of known tokens at the start: prompt plus prefix. New tokens start here."""
    report: Report | None = None
    """Called with the new tokens so far each time `request.report_every` more tokens have been sampled."""
    versions: list[tuple[int, Version]] = field(default_factory=list)
    """The known token at which each weights version began to sample."""
    top: list[Sequence[tuple[int, float]]] = field(default_factory=list)
    """Of each new token, the likeliest tokens at its place, if requested."""


class BatchSampler:
    """Up to `rows` requests at a time; the others wait in order of arrival."""

    def __init__(self, model: CausalModel, *, rows: int, version: Version, deterministic: bool) -> None:
        self.model = model
        self.version = version
        self.deterministic = deterministic
        self.tokens_sampled = 0
        self._rows = rows
        rows = model.rows  # from here on, the rows of the cache, which may have more
        self._waiting: deque[SampledRow] = deque()
        self._running: list[SampledRow] = []
        self._ids = np.zeros((rows, model.context), dtype=np.int64)
        self._logprobs = np.zeros((rows, model.context), dtype=np.float32)
        self._position = np.zeros(rows, dtype=np.int64)
        self._known = np.zeros(rows, dtype=np.int64)
        self._start = np.zeros(rows, dtype=np.int64)  # prompt tokens
        self._limit = np.zeros(rows, dtype=np.int64)  # number of known tokens at which the budget is used up
        self._report_at = np.full(rows, _NEVER)  # number of known tokens at the next report
        self._seed = np.zeros(rows, dtype=np.uint64)
        self._temperature = np.ones(rows, dtype=np.float64)
        self._top_p = np.ones(rows, dtype=np.float64)
        self._kv_version = np.zeros(rows, dtype=np.int64)
        self._stops = np.full((rows, 1), -1, dtype=np.int64)
        routers = model.routers
        self._routes = None if routers is None else np.zeros((rows, model.context, routers.route_bytes), dtype=np.uint8)
        self._settings: dict[int, RowSettings] = {}  # by the first row of each call
        self._any_cold = False

    @property
    def busy(self) -> bool:
        """Whether there are requests to sample."""
        return bool(self._running or self._waiting)

    @property
    def running(self) -> int:
        """Number of requests that have a row, and keys and values in it."""
        return len(self._running)

    def cache_used(self) -> float:
        """Share of the room for keys and values that the running requests use. Any thread may call this."""
        return float(self._known[: len(self._running)].sum()) / (self._rows * self.model.context)

    def submit(self, request: SampleRequest, finish: Finish, report: Report | None = None) -> None:
        """Add a request. `finish` is called once with its result or its error, possibly before this returns."""
        context, vocabulary = self.model.context, self.model.vocabulary
        running = any(run.request.id == request.id for run in (*self._running, *self._waiting))
        refusal = refusal_of(request, context=context, vocabulary=vocabulary, running=running)
        outcome = refusal or over_already(request, context)
        if outcome is not None:
            finish(outcome)
        else:
            first = len(request.prompt_ids) + len(request.prefix_ids)
            self._waiting.append(SampledRow(request, finish, first=first, report=report))

    def abort(self, ids: Sequence[str] | None = None) -> None:
        """End these requests (None: all requests) with the tokens that they have."""
        chosen = None if ids is None else set(ids)
        for row in reversed(range(len(self._running))):
            if chosen is None or self._running[row].request.id in chosen:
                self._end(row, "abort")
        remaining: deque[SampledRow] = deque()
        for run in self._waiting:
            if chosen is None or run.request.id in chosen:
                run.finish(nothing_new("abort"))
            else:
                remaining.append(run)
        self._waiting = remaining

    def fail(self, error: BaseException) -> None:
        """End every request with an error, and clear the cache, whose contents may be invalid."""
        failed = [*self._running, *self._waiting]
        self._running.clear()
        self._waiting.clear()
        self._position[:] = self._known[:] = 0
        self.model.cache.clear()
        self._settings = {}
        for run in failed:
            run.finish(error)

    def weights_changed(self, version: Version, *, recompute: bool) -> None:
        """Called after other weights are installed. `recompute`: feed the tokens of every running row again."""
        self.version = version
        for row, run in enumerate(self._running):
            if run.versions[-1][1] != version:
                run.versions.append((int(self._known[row]), version))
        if recompute:
            self._position[:] = 0
            self._any_cold = True

    @torch.inference_mode()
    def step(self) -> None:
        """Start waiting requests in free rows, prefill them, and sample one token of every running request."""
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
        """Feed one token to each of `count` rows from `first` on. Returns the next tokens and their log-probs, both
        [count]."""
        part = slice(first, first + count)
        position, device = self._position[part], self.model.device
        fed = self._ids[np.arange(first, first + count), position]
        logits = self.model.decode(
            torch.from_numpy(fed).to(device), torch.from_numpy(position.copy()).to(device), length, first
        )
        if self._routes is not None:
            self._routes[np.arange(first, first + count), position] = self._noted()
        if first not in self._settings:
            self._settings[first] = RowSettings.of(self._temperature[part], self._top_p[part], device)
        self._find_likeliest(first, logits, self._settings[first])
        draws = uniform_draws(self._seed[part], self._known[part] - self._start[part])
        tokens, logprobs = choose(logits, self._settings[first], torch.from_numpy(draws).to(device))
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    def _find_likeliest(self, first: int, logits: torch.Tensor, settings: RowSettings) -> None:
        """Keep the likeliest tokens of the rows that request them and get a new token now."""
        rows = range(first, min(first + len(logits), len(self._running)))
        wanted = [row for row in rows if self._running[row].request.params.top_logprobs]
        fresh = [row for row in wanted if self._position[row] + 1 == self._known[row]]
        if not fresh:
            return
        places = [row - first for row in fresh]
        logprobs = torch.log_softmax(logits[places].float() / settings.temperature[places, None], dim=-1)
        most = max(self._running[row].request.params.top_logprobs for row in fresh)
        values, ids = logprobs.topk(min(most, logprobs.shape[-1]))
        for row, some, named in zip(fresh, values.tolist(), ids.tolist(), strict=True):
            run = self._running[row]
            run.top.append(list(zip(named, some, strict=True))[: run.request.params.top_logprobs])

    def _append(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Store the new tokens of the rows, and end the requests that are done. A row that was fed a known token before
        its last one has no new token."""
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
            for index in np.flatnonzero(done)[::-1]:  # last row first: `_end` moves the last row to the free one
                self._end(int(fresh[index]), "stop" if stopped[index] else "length")
        count = len(self._running)
        for row in np.flatnonzero(self._known[:count] >= self._report_at[:count]).tolist():
            self._report(row)

    def _report(self, row: int) -> None:
        run = self._running[row]
        self._report_at[row] += run.request.report_every
        if run.report is not None:
            run.report(self._result(row, ""))

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
            reports = run.report is not None and request.report_every
            self._report_at[row] = run.first + request.report_every if reports else _NEVER
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
        """Fill the cache up to the last known token of each cold row. Equal rows, such as the new samples of a group,
        are computed once."""
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
            if self._routes is not None:
                self._routes[row] = self._routes[source]
        self._position[cold] = self._known[cold] - 1
        self._kv_version[cold] = self.version

    def _prefill_rows(self, rows: Sequence[int]) -> None:
        """Prefill `rows`, which are sorted by length, in calls of rows with similar lengths."""
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
            if self._routes is not None:
                self._routes[batch, :tokens] = self._noted().reshape(len(batch), tokens, -1)

    def _noted(self) -> np.ndarray:
        """The routes of the last call. [tokens, route bytes]"""
        assert self.model.routers is not None
        noted: np.ndarray = self.model.routers.take().numpy()
        return noted

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
            top=list(run.top),
            routes=self._routes_of(row),
        )

    def _routes_of(self, row: int) -> list[bytes]:
        fed = min(int(self._position[row]), int(self._known[row]) - 1)
        return [] if self._routes is None else [route.tobytes() for route in self._routes[row, :fed]]

    def _end(self, row: int, reason: str) -> None:
        """Return the new tokens of a row to its caller, and move the last row to the free row."""
        run, result = self._running[row], self._result(row, reason)
        last = len(self._running) - 1
        self._running[row] = self._running[last]
        self._running.pop()
        if row != last:
            self._move(last, row)
        self._settings = {}
        self._position[last] = 0  # deterministic mode also feeds idle rows: their position must fit any context
        self._known[last] = 0
        run.finish(result)

    def _move(self, source: int, target: int) -> None:
        for array in (
            self._ids, self._logprobs, self._position, self._known, self._start, self._limit, self._report_at,
            self._seed, self._temperature, self._top_p, self._kv_version, self._stops,
        ):  # fmt: skip
            array[target] = array[source]
        if self._routes is not None:
            self._routes[target] = self._routes[source]
        self.model.cache.copy_row(source, target, int(self._position[source]))

    def _bucket(self, tokens: int, size: int) -> int:
        return min(-(-tokens // size) * size, self.model.context)
