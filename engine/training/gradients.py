"""Forward and backward passes: log-probs of trainable tokens, and the gradient of one optimizer minibatch.

Called by `model_trainer.ModelTrainer`. The model's head is applied to the hidden states of trainable tokens only, so
many at a time that their logits stay small; the backward pass computes them again. Nothing here may step the optimizer.

The log-probs are of the full vocabulary after temperature. Behavior log-probs are after top-p as well: with top_p <
1 the sampler renormalises over its nucleus, whose mass is between top_p and 1, so that current / behavior is too
small by that factor on every token, and no clip or cap notices. A configuration with top_p < 1 is refused for this.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPast

from engine.errors import ConfigError, EngineError, reason_of
from engine.protocols import Grouping
from engine.training.batch import LEAST_SHARED, PADDED, MicroBatch, Packing, Sample, idle_pass, pack, units_of
from engine.training.device import choose_attention
from engine.training.diagnostics import Diagnostics, note_gaps
from engine.training.expert_routes import Routers
from engine.training.head_gradient import shared_weight
from engine.training.layout import load_of
from engine.training.losses import TokenTerms, policy_loss, without_unsound
from engine.training.masters import Masters
from engine.training.model_files import fill_model
from engine.training.packed_attention import NAME, VARLEN, pack_attention, why_not_varlen
from engine.training.ranks import ALONE, Move, Ranks, layers_of
from engine.training.stored_tensors import Stored
from engine.training.trainer_settings import TrainerSettings

log = logging.getLogger(__name__)

LOGIT_BYTES = 256 << 20
"""Most bytes of float32 logits that exist at a time. Their log-softmax and gradient take as much again, each."""


class TokenLogprobs(NamedTuple):
    """Of a micro-batch's trainable tokens."""

    chosen: Tensor
    """Log-prob of each token; carries the gradient. [tokens] float32"""
    entropy: Tensor
    """Entropy of the distribution it is drawn from, in nats; carries the gradient. Empty where not asked for. [tokens]
    float32"""


class Policy:
    """A causal language model together with how its log-probs are computed: temperature, device, precision, layout of
    the rows, ranks.

    It brings the model to the device and shards it over the ranks, which replaces its parameters. In bfloat16, the
    parameters of one rank are bfloat16 too. Raises `ConfigError` if its rows cannot be packed and the settings demand
    it.
    """

    def __init__(
        self, model: torch.nn.Module, settings: TrainerSettings, device: torch.device, bf16: bool,
        ranks: Ranks = ALONE, missing: Mapping[str, Stored] | None = None,
    ) -> None:  # fmt: skip
        """`missing`: the weights that a model of several ranks does not have yet."""
        choose_attention(device)
        _check_varlen(settings, device, bf16)
        self.model = model
        self.settings = settings
        self.device = device
        self.bf16 = bf16
        self.ranks = ranks
        self.masters = Masters()
        self._logprobs_of = torch.compile(logprobs_of, dynamic=True) if settings.compile else logprobs_of
        if ranks.count == 1:
            self._parts, self.packing, self._routers = _examine(model, settings)
            self._examined = True
            if bf16:  # several ranks gather float32 shards as bfloat16
                self.masters.divide(model)
            self._root = ranks.shard(model, device, bf16=bf16)
        else:
            self._parts, self.packing, self._routers = None, PADDED, None
            self._examined = False
            self._root = ranks.shard(model, device, bf16=bf16)
            fill_model(model, missing or {}, ranks)
        if not ranks.on_host:
            self.examine()
        self.masters.place(ranks.home(device), on_host=settings.cpu_offload)
        self.trained = self.masters.trained(model)
        """The tensors that the optimizer updates, and in which gradients are summed. float32"""
        self.progressed: Callable[[], None] = lambda: None
        """Called after each pass."""
        self.own_metrics: tuple[str, ...] = ()
        """Names of what the user's loss measures."""
        self._reached: list[Tensor] = []
        """Those with a gradient in the last minibatch that had any."""

    def examine(self) -> None:
        """Find out how the model's rows are computed, unless that is known. The model must be on its device.
        Collective."""
        if self._examined:
            return
        with torch.no_grad(), self.autocast():
            self._parts, self.packing, self._routers = self._root(_examine, self.model, self.settings)
        self.ranks.release(self._root)
        self._examined = True

    def move(self, to: Move) -> None:
        """Move the model and its masters."""
        self.ranks.move(self._root, to)
        self.masters.move(to)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16)

    def logprobs(self, micro: MicroBatch, *, entropy: bool = True) -> TokenLogprobs:
        """Log-probs and entropies of the trainable tokens; entropies are empty where not asked for. Collective."""
        logprobs: TokenLogprobs = self._root(self._logprobs, micro, entropy)
        return logprobs

    def _logprobs(self, micro: MicroBatch, entropy: bool) -> TokenLogprobs:
        if self._routers is not None:
            self._routers.repeat(micro.routes)
        with self.autocast():
            if self._parts is None:
                logits = micro.predictors(self.model(**micro.inputs(), use_cache=False).logits)
                return TokenLogprobs(*self._of_logits(logits, micro.targets, entropy))
            body, head = self._parts
            hidden = micro.predictors(body(**micro.inputs(), use_cache=False).last_hidden_state)
        size = max(1, LOGIT_BYTES // (4 * head.weight.shape[0]))
        if len(hidden) <= size:
            return TokenLogprobs(*self._of_hidden(hidden, micro.targets, head, lambda: head.weight, entropy))
        weight = shared_weight(head.weight)
        parts = [
            checkpoint(
                self._of_hidden, part, targets, head, weight, entropy, use_reentrant=False, preserve_rng_state=False
            )
            for part, targets in zip(hidden.split(size), micro.targets.split(size), strict=True)
        ]
        chosen, entropies = zip(*parts, strict=True)
        return TokenLogprobs(torch.cat(chosen), torch.cat(entropies))

    def close_gradient(self, *, empty: bool) -> None:
        """Make the gradient of an `empty` minibatch zeros, for the parameters that other minibatches reach: the
        optimizer takes its step for these."""
        if not empty:
            self._reached = [parameter for parameter in self.trained if parameter.grad is not None]
            return
        for parameter in self._reached or self.trained:
            parameter.grad = torch.zeros_like(parameter)

    def _of_hidden(
        self, hidden: Tensor, targets: Tensor, head: Any, weight: Callable[[], Tensor], entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """`weight`: gives the head's, for these tokens."""
        fp32, own = self.settings.fp32_head, weight()
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16 and not fp32):
            if fp32:
                hidden, own = hidden.float(), own.float()
            logits = head(hidden, own) if isinstance(head, OwnHead) else _applied(head, hidden, own)
        return self._of_logits(logits, targets, entropy)

    def _of_logits(self, logits: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        return self._logprobs_of(logits, targets, self.settings.temperature, entropy)

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Log-probs of each sample's trainable tokens under the present weights. Collective. [samples][tokens] float32,
        on the CPU"""
        own: dict[int, Tensor] = {}
        with torch.no_grad(), self.ranks.spoil_on_error():
            for micro, indices in self.passes(samples):
                chosen = self.logprobs(micro.to(self.device), entropy=False).chosen.cpu()
                tokens = [samples[index].tokens for index in indices]
                own.update(zip(indices, chosen.split(tokens), strict=True) if tokens else ())
            self.ranks.release(self._root)
            scored = self.ranks.joined(own)
        return [scored.get(index, torch.zeros(0)) for index in range(len(samples))]

    def passes(self, samples: Sequence[Sample]) -> Iterator[tuple[MicroBatch, list[int]]]:
        """Micro-batches of this rank's samples, with their indices. Every rank has as many, because each pass gathers
        the model's shards: a rank with fewer ends with passes over a token of its own, which have no index."""
        units = units_of(samples, self.packing, self.ranks.count)
        lengths = [len(sample.input_ids) for sample in samples]
        shares = self.ranks.share([load_of(unit, lengths) for unit in units])
        own = sorted(index for share in shares for index in units[share].members)
        packed = list(pack([samples[index] for index in own], self.settings.micro_batch_tokens, self.packing))
        most = self.ranks.most(len(packed))  # before any pass: all ranks ask at the same point
        for micro, indices in packed:
            yield micro, [own[index] for index in indices]
            self.progressed()
        for _ in range(most - len(packed)):
            yield idle_pass(), []
            self.progressed()


def _examine(
    model: Any, settings: TrainerSettings
) -> tuple[tuple[Callable[..., Any], Any] | None, Packing, Routers | None]:
    with torch.compiler.set_stance("force_eager"):
        parts = body_and_head(model)
        if parts is None and settings.fp32_head:
            law = f"{type(model).__name__} makes its logits in another way than by a linear head"
            raise ConfigError("trainer.fp32_head", True, law, "use false")
        routers = Routers(model) if settings.router_replay else None
        return parts, packing_for(model, settings), routers


def _check_varlen(settings: TrainerSettings, device: torch.device, bf16: bool) -> None:
    reason = why_not_varlen(device, torch.bfloat16 if bf16 else torch.float32) if settings.attention == "varlen" else ""
    if reason:
        raise ConfigError("trainer.attention", "varlen", reason, "use auto")


def packing_for(model: Any, settings: TrainerSettings) -> Packing:
    """How a model's rows are laid out. Its attention is replaced if they are packed.

    Raises `ConfigError` if the settings require packed rows and the model cannot compute them.
    """
    if settings.packing == "off":
        return PADDED
    reason = pack_attention(model, NAME if settings.attention == "sdpa" else VARLEN)
    if reason is None:
        shared = {"auto": LEAST_SHARED, "on": 0.0, "off": None}[settings.shared_prompts]
        return Packing(packed=True, shared=shared)
    if settings.packing_demands:
        raise settings.refuse_padding(f"{type(model).__name__} {reason}")
    log.warning("rows are padded, not packed: %s %s", type(model).__name__, reason)
    return PADDED


def logprobs_of(logits: Tensor, targets: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of each target, from [tokens, vocabulary]; the entropies are empty where not asked for."""
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, targets[:, None]).squeeze(1).clone()  # FSDP warns of views
    return chosen, entropy_of(logprobs) if entropy else chosen.new_zeros(0)


def entropy_of(logprobs: Tensor) -> Tensor:
    """-Σ p log p of each row of [tokens, vocabulary]. A token of probability 0 (log-prob -inf, or so low that exp is 0)
    adds 0, to the gradient as well, which a function of p alone would have infinite."""
    return -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(-1)


class OwnHead:
    """What a model does with the hidden states of its body, for a model that does more than to apply a linear head:
    that scales or caps its logits."""

    def __init__(self, model: Any, body: Any, linear: torch.nn.Linear) -> None:
        self._model = model
        self._body = body
        self._linear = linear

    @property
    def weight(self) -> Tensor:
        """Of the linear head. [vocabulary, hidden]"""
        return self._linear.weight

    def __call__(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """[tokens, hidden] to [tokens, vocabulary]: the model's own forward pass, with these as its body's result and
        this weight in its linear head."""
        output = BaseModelOutputWithPast(last_hidden_state=hidden[None])
        ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
        self._body.forward = lambda *_, **__: output
        self._linear.forward = lambda given: _applied(self._linear, given, weight)
        try:
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            del self._body.forward, self._linear.forward  # those of their classes are there again
        return logits


def _applied(linear: torch.nn.Linear, hidden: Tensor, weight: Tensor) -> Tensor:
    """What a linear layer makes of its input with this weight, in the weight's type."""
    bias = None if linear.bias is None else linear.bias.to(weight.dtype)
    return torch.nn.functional.linear(hidden, weight, bias)


def body_and_head(model: Any) -> tuple[Callable[..., Any], Any] | None:
    """The part of a transformers model that gives hidden states, and what makes logits of them: its linear head, or its
    `OwnHead`. None if neither gives the model's logits: then all of them are computed."""
    body, linear = getattr(model, "base_model", None), getattr(model, "get_output_embeddings", lambda: None)()
    if body is None or body is model or not isinstance(linear, torch.nn.Linear):
        return None
    ids = torch.arange(2, device=linear.weight.device)[None]
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits[0]
        hidden = body(input_ids=ids, use_cache=False).last_hidden_state[0]
        if torch.allclose(whole.float(), linear(hidden).float(), rtol=1e-4, atol=1e-5):
            return body, linear
        own = OwnHead(model, body, linear)
        if torch.allclose(whole.float(), own(hidden, linear.weight).float(), rtol=1e-4, atol=1e-5):
            return body, own
    return None


def compile_layers(model: Any, settings: TrainerSettings) -> None:
    """If `settings.compile`: compile each transformer layer, at its first pass, for any number of tokens. Attention
    over packed rows is not compiled. Call it before `checkpoint_layers` and before the model is sharded.

    Raises `ConfigError` if the model does not name its layers.
    """
    layers = layers_of(model) if settings.compile else []
    if settings.compile and not layers:
        raise ConfigError("trainer.compile", True, f"{type(model).__name__} does not name its layers", "use false")
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def checkpoint_layers(model: Any) -> int:
    """Make each transformer layer keep only its input for the backward pass, in evaluation mode, too. Returns how many
    there are."""
    layers = layers_of(model)
    for layer in layers:
        layer.forward = _checkpointed(layer.forward)
    return len(layers)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def again(*args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **options)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)

    return again


def accumulate_gradient(policy: Policy, samples: Sequence[Sample], *, moved: bool = False) -> Diagnostics:
    """Add the gradient of one optimizer minibatch to the parameters' `grad`, pass by pass; zeros if it has none.
    Collective; what it returns is of all ranks. `moved`: see `Diagnostics`.

    Each sample's `weight` is already relative to the whole minibatch, so the passes' losses add up to the minibatch's
    loss for any split into passes. Samples with a gradient of exactly zero are skipped, but their tokens count in the
    weights of the others.

    Raises, in every rank, if a loss cannot be computed: one of several ranks makes its other passes first, because the
    others wait for it there. `TrainerSpoiled` if a rank of several leaves a pass half-way.
    """
    settings = policy.settings
    diagnostics = Diagnostics(settings, moved=moved, own_metrics=policy.own_metrics)
    trained = _trained(samples, settings)
    empty = True
    failures: list[Exception] = []
    with policy.ranks.spoil_on_error(), _name_first(failures):
        for packed, indices in policy.passes(trained):
            empty = False
            micro = packed.to(policy.device)
            logprobs = policy.logprobs(micro, entropy=settings.needs_entropies)
            loss = logprobs.chosen.sum() * 0.0
            if indices and not failures:
                try:
                    loss = _loss(micro, logprobs, [trained[index] for index in indices], settings, diagnostics)
                except Exception as error:
                    if policy.ranks.count == 1:
                        raise
                    failures.append(error)
            (loss * policy.ranks.count).backward()  # gradients are averaged over the ranks
        policy.close_gradient(empty=empty)
        diagnostics.gather(policy.ranks)
    with policy.ranks.together():
        if failures:
            raise failures[0]
    return diagnostics


def finite_samples(policy: Policy, samples: Sequence[Sample]) -> list[Sample]:
    """Those samples of a minibatch that have a gradient and log-probs that are finite, under the present weights.
    Collective: every rank finds the same."""
    trained = _trained(samples, policy.settings)
    scored = policy.score(trained)
    return [sample for sample, logprobs in zip(trained, scored, strict=True) if logprobs.isfinite().all()]


def _trained(samples: Sequence[Sample], settings: TrainerSettings) -> list[Sample]:
    """Those that have a gradient."""
    return [sample for sample in samples if settings.needs_every_token or not sample.teaches_nothing]


@contextmanager
def _name_first(failures: Sequence[Exception]) -> Iterator[None]:
    """Context manager: an error that comes after others names the first of them, too, and is raised from it."""
    try:
        yield
    except Exception as error:
        if not failures:
            raise
        raise EngineError(f"{reason_of(failures[0])}; then {reason_of(error)}") from failures[0]


def _loss(
    micro: MicroBatch, logprobs: TokenLogprobs, samples: Sequence[Sample], settings: TrainerSettings,
    diagnostics: Diagnostics,
) -> Tensor:  # fmt: skip
    """The loss of one micro-batch, which is noted in its `samples` and in the diagnostics. Not collective."""
    proximal = logprobs.chosen.detach() if micro.proximal is None else micro.proximal
    rows = Grouping(micro.rows, micro.trajectories)
    terms = without_unsound(
        TokenTerms(
            logprobs.chosen, micro.behavior, proximal, micro.advantages, rows, micro.reference, micro.staleness,
            micro.causes, logprobs.entropy if settings.needs_entropies else None,
        )
    )  # fmt: skip
    result = policy_loss(terms, settings)
    note_gaps(samples, rows, result.importance)
    loss = (result.losses * micro.weights).sum()
    diagnostics.add(terms, result, loss)
    return loss
