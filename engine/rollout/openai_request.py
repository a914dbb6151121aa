"""One trajectory on its way: what has come of it so far, over as many HTTP requests as that took.

Used by `rollout.openai`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.errors import DataFailure, EngineError
from engine.ids import Version
from engine.rollout.backend import SampleRequest, SampleResult
from engine.rollout.openai_http import Refused
from engine.trajectory import Span


@dataclass(slots=True, eq=False)
class Running:
    """One request, from its arrival to its result."""

    request: SampleRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    cut: bool = False
    asked: int = 0
    """HTTP requests made for it."""
    fresh: bool = True
    """Nothing of the newest of them has come."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    told: int = 0
    """New tokens when it was last told of."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    reader: "asyncio.Future[str] | None" = None

    def was_cut(self) -> bool:
        return self.cut

    def rest(self) -> SampleRequest:
        """What is still to be sampled, as a request."""
        return replace(self.request, prefix_ids=[*self.request.prefix_ids, *self.token_ids])

    def mark(self, first: int, began: Version, told: Sequence[Span] | None) -> None:
        """Add the spans of the tokens from `first` on, which one HTTP request brought.

        Where the server did not tell them, or could not in the end, they count as sampled under `began`, the version
        in force when it was asked: never newer than they are.
        """
        for start, stop, version in told if told is not None else [Span(0, len(self.token_ids) - first, began)]:
            last = self.spans[-1] if self.spans else None
            if stop == start:
                continue
            if last is not None and last.version == version:
                self.spans[-1] = Span(last.start, first + stop, version)
            else:
                self.spans.append(Span(first + start, first + stop, version))

    def tell(self, first: int, version: Version) -> None:
        """Tell whoever wants to know, if it is time; the tokens from `first` on are of `version`."""
        request, tokens = self.request, len(self.token_ids)
        if request.tell is None or not 0 < request.tell_every <= tokens - self.told:
            return
        self.told = tokens
        so_far = replace(self, spans=[*self.spans])
        so_far.mark(first, version, None)
        request.tell(
            SampleResult(token_ids=[*self.token_ids], logprobs=[*self.logprobs], spans=so_far.spans, finish_reason="")
        )

    def result(self, reason: str) -> SampleResult:
        return SampleResult(token_ids=self.token_ids, logprobs=self.logprobs, spans=self.spans, finish_reason=reason)


def complaint_of(error: Refused, request: SampleRequest) -> EngineError:
    """A server's refusal as its caller should see it: what does not fit the context is the prompt's fault."""
    said = str(error.details.get("said", ""))
    if error.details.get("status") == 400 and "context" in said:
        return DataFailure(
            f"a prompt of {len(request.prompt_ids)} and a prefix of {len(request.prefix_ids)} tokens do not fit: "
            f"{error.message}", prompt_tokens=len(request.prompt_ids),
        )  # fmt: skip
    return error
