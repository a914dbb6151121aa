"""The rollout section of a configuration: engines, how they sample, and how new weights reach them."""

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from engine.config.limit_fields import limit_field
from engine.errors import ConfigError
from engine.rollout.vllm.engine_args import refuse_own, workers_of
from engine.section import DEVICE, GENERATOR, Section

# -- servers -----------------------------------------------------------------------------------------------------------


SERVERS = ("openai", "sglang")
"""The backends whose replicas are servers elsewhere."""


def replicas_of(backend: str, urls: Sequence[str], replicas: int | None, weights_dir: str | None) -> int | None:
    """Number of replicas of a backend of `SERVERS`, one for each server; None for other backends. `replicas`: the
    number in the configuration, or None.

    Raises: `ConfigError` for servers that are missing, repeated or miscounted, or without a directory for weights.
    """
    if backend not in SERVERS:
        if urls:
            law = f"only the openai and sglang backends use servers, and rollout.backend is {backend}"
            raise ConfigError("rollout.urls", list(urls), law, "remove them, or use rollout.backend: openai or sglang")
        return None
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                "rollout.urls", url, "must start with http:// or https://", "for example http://127.0.0.1:8000"
            )
    if not urls or len({url.rstrip("/").removesuffix("/v1") for url in urls}) != len(urls):
        law = "must list the address of every server once"
        raise ConfigError("rollout.urls", list(urls), law, "for example ['http://127.0.0.1:8000']")
    if replicas not in (None, len(urls)):
        law = f"must be {len(urls)}, the number of servers in rollout.urls"
        raise ConfigError("rollout.replicas", replicas, law, f"use {len(urls)}, or remove it")
    if weights_dir is None:
        law = "the servers read new weights from this directory"
        raise ConfigError("rollout.weights_dir", None, law, "set a directory that they see under the same path")
    return len(urls)


# -- the section -------------------------------------------------------------------------------------------------------


class RolloutSection(Section):
    """The rollout engines and how they sample."""

    backend: str = Field(
        "torch",
        pattern=GENERATOR,
        description="Sampler: torch (embedded), vllm (in the replica's process), openai (compatible servers), sglang "
        "(its servers), or your generator as module:Class.",
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, max_length=256, description="Keyword arguments of your generator's class."
    )
    replicas: int = Field(2, ge=1, le=4096, description="Rollout engines; with servers, one for each URL.")
    slots: int = Field(
        8,
        ge=1,
        le=65_536,
        description="Whole prompt groups that a replica runs at once, with slots * samples_per_prompt trajectories.",
    )
    threads: int = Field(0, ge=0, le=1024, description="CPU threads of a replica; 0: from its pool's share, or 1.")
    deterministic: bool = Field(
        False,
        description="The torch backend decodes at fixed shapes, so that S = 0 equals a synchronous loop bit for bit.",
    )
    context: int | None = Field(
        None,
        ge=2,
        le=10_000_000,
        description="Maximum tokens of prompt plus response in the torch backend; null: the model's maximum.",
    )
    sync_mode: Literal["keep", "abort", "wait"] = Field(
        "keep", description="Running groups at a weight install: frozen (keep), aborted and resumed, or finished first."
    )
    sync_order: Literal["together", "rolling"] = Field(
        "together", description="Whether replicas install new weights all at once or one by one."
    )
    kv: Literal["keep", "recompute"] = Field(
        "keep",
        description="Whether frozen requests keep the KV cache of the old weights or compute it again; recompute with "
        "the sglang backend.",
    )
    transport: Literal["object_store", "distributed", "vllm"] = Field(
        "object_store",
        description="How weights reach replicas: shared memory and Ray's object store, torch.distributed, or vLLM's "
        "own weight transfer.",
    )
    transport_backend: Literal["gloo", "nccl"] = Field(
        "gloo",
        description="Backend of distributed and vllm. nccl needs separate GPUs for the trainer, each replica and each "
        "scorer; with distributed, also for the weights store.",
    )
    transport_timeout_s: float = Field(
        60.0, gt=0, le=86_400, description="Seconds without an answer from the other side after which a transfer fails."
    )
    bucket_mb: int = Field(
        64,
        ge=1,
        le=16_384,
        description="Maximum size of one message of weights, and of one file of staged weights, in MiB. A sender and a "
        "receiver need that much memory in addition to the tensors.",
    )
    straggler_factor: float | None = limit_field("straggler_factor")
    give_up_s: float = limit_field("give_up_s")
    temperature: float = Field(1.0, gt=0, le=100, description="Sampling temperature.")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Probability mass of nucleus sampling; below 1 only with allow_truncated_sampling.",
    )
    allow_truncated_sampling: bool = Field(
        False, description="Train on responses sampled with top_p below 1, which biases every importance ratio."
    )
    max_tokens: int = Field(256, ge=1, le=10_000_000, description="Maximum tokens of a response.")
    stop: list[str] = Field(
        default_factory=list,
        max_length=64,
        description="Additional strings that end a response; each must be one token.",
    )
    device: str = Field("auto", pattern=DEVICE, description="Device of the torch backend: auto, cpu, cuda or cuda:N.")
    device_memory_gb: float = Field(
        0.0,
        ge=0,
        le=100_000,
        description="Memory of the device of a replica or vLLM worker; `engine check` refuses what cannot fit; 0: "
        "unknown.",
    )
    gpus: float = Field(
        0.0,
        ge=0,
        le=64,
        description="GPUs that Ray reserves for a replica; 0: a computed share, or one for each vLLM worker.",
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Passed to vLLM's AsyncEngineArgs, for example tensor_parallel_size."
    )
    """vLLM takes its model runner V2 wherever Triton works; the variable `VLLM_USE_V2_MODEL_RUNNER=0` chooses V1. The
    log of a replica names the runner."""
    heartbeat_s: float = Field(
        10.0,
        ge=0,
        le=86_400,
        description="Seconds between heartbeats; a process that misses three is killed. 0: never.",
    )
    install_timeout_s: float = Field(
        300.0,
        gt=0,
        le=86_400,
        description="Maximum seconds to install weights in vLLM, with their check (check_weights). A longer install is "
        "undone. A longer check logs a warning; the weights may then be loaded once more, within the same limit.",
    )
    check_weights: Literal["first", "always", "never"] = Field(
        "first",
        description="Installs after which each vLLM worker must prove that it holds the published weights. first: the "
        "first one after each start of a replica's process. A check installs the version again and reads all weights.",
    )

    urls: list[str] = Field(
        default_factory=list, max_length=4096, description="OpenAI-compatible or SGLang servers, each one a replica."
    )
    served_model_name: str | None = Field(
        None,
        min_length=1,
        description="Name of the model on the servers; null: the only one they serve. Not for sglang.",
    )
    api_key_env: str | None = Field(
        None,
        pattern=r"^[A-Z_][A-Z0-9_]{0,99}$",
        description="Environment variable with the servers' key; null: none.",
    )
    request_timeout_s: float = Field(
        120.0, gt=0, le=86_400, description="Maximum seconds to wait for a server's answer or its next token."
    )
    connect_timeout_s: float = Field(
        10.0,
        ge=0,
        le=3600,
        description="Maximum seconds to wait for a server, at the start and after its connection is lost.",
    )
    weights_dir: str | None = Field(
        None, min_length=1, description="Directory for new weights, with the same path here and on the servers."
    )

    @model_validator(mode="after")
    def _laws(self) -> Self:
        refuse_own(self.engine_args)
        self._refuse_truncation()
        self._check_gpus()
        given = self.replicas if "replicas" in self.model_fields_set else None
        if replicas := replicas_of(self.backend, self.urls, given, self.weights_dir):
            object.__setattr__(self, "replicas", replicas)
        self._settle_sglang()
        if self.context is not None and self.backend != "torch":
            law = f"only the torch backend uses it, and rollout.backend is {self.backend}"
            raise ConfigError("rollout.context", self.context, law, "remove it (vllm: use engine_args.max_model_len)")
        if self.context is not None and self.context <= self.max_tokens:
            law = f"must hold a prompt and a response of rollout.max_tokens = {self.max_tokens}"
            raise ConfigError("rollout.context", self.context, law, f"use more than {self.max_tokens}")
        if self.engine_args and self.backend != "vllm":
            law = f"only the vllm backend uses engine arguments, and rollout.backend is {self.backend}"
            raise ConfigError("rollout.engine_args", self.engine_args, law, "remove them, or use rollout.backend: vllm")
        if self.transport == "vllm" and self.backend != "vllm":
            law = f"only the vllm backend has this transport, and rollout.backend is {self.backend}"
            raise ConfigError("rollout.transport", self.transport, law, "use distributed")
        if self.check_weights != "first" and self.backend != "vllm":
            law = f"only the vllm backend checks installed weights, and rollout.backend is {self.backend}"
            raise ConfigError("rollout.check_weights", self.check_weights, law, "remove it")
        if self.arguments and not self.custom:
            law = f"only a custom generator has arguments, and rollout.backend is {self.backend}"
            raise ConfigError(
                "rollout.arguments", self.arguments, law, "remove them, or use rollout.backend: module:Class"
            )
        return self

    @property
    def served(self) -> bool:
        """Whether the replicas are servers elsewhere."""
        return self.backend in SERVERS

    @property
    def custom(self) -> bool:
        """Whether the generator is a class of the user."""
        return ":" in self.backend

    @property
    def sampler_dtype(self) -> str:
        """Type of the samplers' weights, where the configuration names it; else `auto`, that in the model's
        `config.json`."""
        asked = str(self.engine_args.get("dtype"))
        kind = {"half": "float16", "float": "float32"}.get(asked, asked)
        return kind if kind in ("float32", "bfloat16", "float16") else "auto"

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation, if the configuration limits them; else 0."""
        return int(self.context or self.engine_args.get("max_model_len") or 0)

    def _refuse_truncation(self) -> None:
        """Raises: `ConfigError` for sampling from a part of the vocabulary: the trainer's log-probs are of all of it.
        top_p is the only such setting: the backends fix top_k and min_p, and the gateway refuses them."""
        if self.top_p < 1 and not self.allow_truncated_sampling:
            law = "truncates sampling, but the trainer's log-probs are of the full vocabulary: every ratio is too small"
            fix = "use 1, or rollout.allow_truncated_sampling: true; for validation only, set top_p in validation.sets"
            raise ConfigError("rollout.top_p", self.top_p, law, fix)

    def _settle_sglang(self) -> None:
        """Raises: `ConfigError` for what an SGLang server cannot do."""
        if self.backend != "sglang":
            return
        if "kv" not in self.model_fields_set:
            object.__setattr__(self, "kv", "recompute")
        if self.kv == "keep":
            law = "SGLang labels tokens with the weights that sampled them only if frozen requests drop their KV cache"
            raise ConfigError("rollout.kv", "keep", law, "use recompute")
        if self.served_model_name is not None:
            law = "an SGLang server serves one model and renames it with each update"
            raise ConfigError("rollout.served_model_name", self.served_model_name, law, "remove it")
        if self.top_p < 1:
            law = "SGLang's log-probs are those before top_p, not those of the sampling distribution"
            raise ConfigError("rollout.top_p", self.top_p, law, "use 1; for validation only, set it in validation.sets")

    def require_one_token(self, text: str, tokens: int) -> None:
        """Raises: `ConfigError` if a stop string is another number of tokens."""
        if tokens != 1:
            law = f"must be single tokens, but this model's tokenizer splits {text!r} into {tokens} tokens"
            raise ConfigError("rollout.stop", self.stop, law, "use strings of one token each")

    def _check_gpus(self) -> None:
        workers = workers_of(self.engine_args)
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ConfigError("rollout.gpus", self.gpus, "must be a whole number if above 1", f"use {int(self.gpus)}")
        if self.gpus and workers > 1 and self.gpus != workers:
            law = f"must be {workers}: rollout.engine_args ask for {workers} vLLM workers, each with a GPU"
            raise ConfigError("rollout.gpus", self.gpus, law, f"use {workers}, or 0 to derive it")
