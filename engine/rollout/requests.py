"""What every backend must say of a request before it samples: refuse it, end it at once, or how much it may sample.

Called by the backends. Needs nothing but the request, so that no two backends can come to differ.
"""

from engine.errors import ConfigError, DataFailure
from engine.rollout.backend import SampleRequest, SampleResult


def nothing_new(finish_reason: str) -> SampleResult:
    """The result of a request that ended before its next token."""
    return SampleResult(token_ids=[], logprobs=[], spans=[], finish_reason=finish_reason)


def refusal_of(request: SampleRequest, *, context: int, vocabulary: int) -> Exception | None:
    """Why a model of `context` tokens and `vocabulary` ids cannot take a request; None if it can."""
    params = request.params
    if not 0.0 <= params.temperature < float("inf"):
        return ConfigError("rollout.temperature", params.temperature, "must be 0 (greedy) or more")
    if not 0.0 < params.top_p <= 1.0:
        return ConfigError("rollout.top_p", params.top_p, "must be above 0 and at most 1", "use 1 to keep every token")
    prompt = len(request.prompt_ids)
    if prompt == 0:
        return DataFailure("the prompt has no tokens", request=request.id)
    if prompt + 1 > context:
        return DataFailure(
            f"the prompt has {prompt} tokens and leaves no room for a response in the model's context of {context}",
            prompt_tokens=prompt, context_tokens=context,
        )  # fmt: skip
    foreign = [i for i in (*request.prompt_ids, *request.prefix_ids) if not 0 <= i < vocabulary]
    if foreign:
        return DataFailure(
            f"token id {foreign[0]} lies outside the model's vocabulary of {vocabulary}", token=foreign[0]
        )
    return None


def budget_of(request: SampleRequest, context: int) -> int:
    """Tokens the whole response may have, the prefix included."""
    return min(request.params.max_tokens, context - len(request.prompt_ids))


def over_already(request: SampleRequest, context: int) -> SampleResult | None:
    """The result of a request whose prefix has ended the response; None while there is something to sample."""
    prefix = request.prefix_ids
    if len(prefix) and prefix[-1] in request.params.stop_ids:
        return nothing_new("stop")
    return nothing_new("length") if len(prefix) >= budget_of(request, context) else None
