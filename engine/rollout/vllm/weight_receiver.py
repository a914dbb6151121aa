"""Installs weights in one vLLM engine: staged ones, or ones sent by the trainer's process during the install.

`rollout.vllm.vllm_backend.VllmBackend` uses it. The backend pauses the engine before an install, and after a failed
install installs the version before it again.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import torch

from engine.errors import EngineError
from engine.ids import Version
from engine.rollout.model_tensors import ModelTensors
from engine.rollout.sent_weights import OUTDATED, Check, Join, Send, SentWeights, WeightsAnswer, WeightsCall
from engine.rollout.vllm.mapped_weights import UNUSABLE
from engine.rollout.vllm.staged_weights import StagingArea
from engine.rollout.vllm.weight_checks import OVERDUE, WeightChecks, checksums_of
from engine.training.shared_weights import Manifest

log = logging.getLogger(__name__)

Control = Callable[..., Awaitable[Any]]
"""`VllmBackend._control`: calls vLLM and returns its answer. The number is a limit in seconds, after which the backend
has failed."""
ADAPTER = 1
"""vLLM's number of the adapter. Each version replaces the one before under the same number, so that requests that are
frozen during an install continue with the new one."""
JOIN_S = 300.0
"""Maximum seconds for forming a group before an install. It is long because the trainer's process may be busy."""


NEWER = "the trainer has published a newer version"


class Outdated(EngineError):
    """The holder has another version now. The group is as before."""


class Incoming:
    """The staged weights of one engine, and how they are installed."""

    def __init__(self, area: StagingArea, engine: Any, control: Control, grace_s: float, checks: WeightChecks) -> None:
        """`grace_s`: seconds beyond its limit that vLLM gets to answer an install before it counts as stuck."""
        self._area = area
        self._engine = engine
        self._control = control
        self._grace_s = grace_s
        self.checks = checks
        self._was_checked = False
        self._published: dict[Version, dict[str, str]] = {}
        """Checksums of staged tensors, where the install will be checked."""
        self._sent: dict[Version, tuple[SentWeights, tuple[tuple[str, str], ...]]] = {}
        self._group: str | None = None

    async def open(self, version: Version) -> None:
        """Called once, before any request."""

    def adapter(self, version: Version) -> Any:
        """vLLM's `LoRARequest` for what is sampled under an installed version; None where versions are whole models."""
        return None

    async def stage(self, version: Version, weights: Any) -> None:
        """If no group can be formed, so that weights cannot be sent, they are taken from the weights store. Raises:
        `EngineError` if the weights do not fit the model, or the store cannot give them either."""
        if isinstance(weights, SentWeights):
            wanted = wanted_names(self._area.tensors, version, weights.manifest)
            try:
                await self._join(weights, JOIN_S)
            except EngineError as error:
                log.warning("version %s is taken from the weights store: %s", version, error)
                weights = await weights.stored()
            else:
                self._sent[version] = weights, wanted
                return
        await self._write(version, weights)

    async def _write(self, version: Version, weights: Any) -> None:
        await asyncio.to_thread(self._area.write, version, weights)
        self._sent.pop(version, None)
        if self._check_is_due:
            self._published[version] = await asyncio.to_thread(self._checksums, version, weights)

    def holds(self, version: Version) -> bool:
        return version in self._sent or self._area.directory(version) is not None

    def keep_only(self, *versions: Version) -> None:
        self._area.keep_only(*versions)
        self._sent = {version: sent for version, sent in self._sent.items() if version in versions}
        self._published = {version: one for version, one in self._published.items() if version in versions}

    async def replaces_everything(self) -> bool:
        """Whether an install is known to replace all weights of the engine, so that they may be dropped before it."""
        return not await self._attempt("require_complete_installs", limit_s=0.0)

    async def swap(self, version: Version, limit_s: float) -> str:
        """Install a version. Returns an empty text, or why it failed. A version that is not staged is the one that the
        engine started with. A version whose transfer fails, or takes longer than half of `limit_s`, is taken from the
        weights store. If a worker cannot use the shared memory that the version lies in, the version is staged as files
        and installed from them, and so are all later ones.

        `limit_s`: seconds after which a worker stops the install. Raises: `EngineError` if vLLM then does not answer.
        """
        until = time.monotonic() + limit_s
        if version in self._sent:
            weights, wanted = self._sent[version]
            not_sent = await self._receive(weights, version, wanted, limit_s / 2)
            if not not_sent:
                return ""
            log.warning("version %s is taken from the weights store: %s", version, not_sent)
            try:
                async with asyncio.timeout(left_s(until)):
                    stored = await weights.stored()
                await self._write(version, stored)  # no limit: its thread would write on, into the next install
            except (EngineError, TimeoutError) as error:
                why = str(error) or "no answer in time"
                return f"{not_sent}; the copy in the weights store could not be used: {why}"
        wrong = await self._load(version, left_s(until))
        if not any(UNUSABLE in one for one in wrong):
            return "; ".join(wrong)
        if self._area.maps:
            log.warning("version %s and all later ones are staged as files: %s", version, "; ".join(wrong))
        try:
            await asyncio.to_thread(self._area.use_files, version)
        except EngineError as error:
            return "; ".join([*wrong, str(error)])
        return "; ".join(await self._load(version, left_s(until)))

    async def install(self, version: Version, limit_s: float) -> str:
        """`swap` and, if it is due, `check`, which share the limit. Returns an empty text, or why it failed."""
        began = time.monotonic()
        wrong = await self.swap(version, limit_s)
        if wrong or not self._check_is_due or not (version in self._sent or version in self._published):
            return wrong
        try:
            return await self.check(version, time.monotonic() - began, began + limit_s, limit_s)
        except EngineError as error:
            with suppress(EngineError):  # vLLM may have failed
                await self._attempt("end_check", limit_s=limit_s)
            return f"the weights of its workers could not be checked: {error}"

    async def check(self, version: Version, swap_s: float, until: float, limit_s: float) -> str:
        """Prove that every worker of every engine holds its part of the version that was just installed. Returns an
        empty text, or what is wrong.

        vLLM fuses, divides and packs tensors, so a worker's parameters have no published checksums. Therefore the
        version is installed again: each tensor that a worker loads must have the checksum of the published one, and its
        parameters must be the same afterwards.

        A check that is not done by `until` (of `time.monotonic`) proves nothing, so the version is accepted. A second
        load for which too little time is left is not begun: the first took `swap_s`. If it is cut all the same, the
        version is loaded again without a check, for at most `limit_s`. If the trainer has published a newer version
        before the comparison, this one is accepted, too, and the next one is checked.

        Raises: `EngineError` if vLLM does not answer."""
        cut = False
        wrong = await self._attempt_until(until, "begin_check")
        if not wrong and left_s(until) < swap_s:
            wrong = [f"the check {OVERDUE} before its second load"]
        if not wrong:
            again = await self.swap(version, left_s(until))
            cut = bool(again) and time.monotonic() >= until
            wrong = [again] if again else await self._compare(version, until)
        if wrong:
            await self._attempt("end_check", limit_s=limit_s)
        overdue = cut or (bool(wrong) and all(OVERDUE in one for one in wrong))
        self._was_checked = (overdue or not wrong) and not any(NEWER in one for one in wrong)
        if not overdue:
            return "; ".join(wrong)
        log.warning(
            "version %s was installed but not checked (%s): installing it twice and hashing it must end within "
            "rollout.install_timeout_s = %g and, with rollout.transport: vllm, before the trainer publishes again; "
            "raise the limit, or set rollout.check_weights: never",
            version, "; ".join(wrong), limit_s,
        )  # fmt: skip
        return await self.swap(version, limit_s) if cut else ""

    @property
    def _check_is_due(self) -> bool:
        return self.checks == "always" or (self.checks == "first" and not self._was_checked)

    def _checksums(self, version: Version, weights: Any) -> dict[str, str]:
        return checksums_of(self._area.tensors.checked(version, weights))

    async def _compare(self, version: Version, until: float) -> list[str]:
        """Have the workers compare what they loaded with what was published. Returns what differs."""
        if version in self._sent:
            weights, wanted = self._sent[version]
            try:
                async with asyncio.timeout(left_s(until)):
                    call = await weights.exchange(Check(version=version, wanted=wanted))
            except TimeoutError:
                return [f"the check {OVERDUE} while the trainer's process hashed its tensors"]
            assert call is not None
            if call == OUTDATED:
                return [f"the check {OVERDUE}: {NEWER}"]
            published = call.argument
        else:
            published = self._published[version]
        tied = {alias: published[name] for alias, name in self._area.tensors.aliases.items()}
        return await self._attempt_until(until, "compare_with", {**published, **tied})

    async def _attempt_until(self, until: float, method: str, *arguments: Any) -> list[str]:
        """`_attempt` with a method whose last argument is its limit."""
        limit_s = left_s(until)
        return await self._attempt(method, *arguments, limit_s, limit_s=limit_s)

    async def _load(self, version: Version, limit_s: float) -> list[str]:
        """Have the workers load a version. Returns why they failed, if any did."""
        directory = self._area.directory(version)
        place = None if directory is None else str(directory)
        return await self._attempt("load_staged", place, self._area.tensors.aliases, limit_s, limit_s=limit_s)

    async def _attempt(self, method: str, *arguments: Any, limit_s: float) -> list[str]:
        """Have all workers call a method of theirs. Returns why they failed, if any did.

        vLLM's own calls return the answers of the first of several engines only (data parallelism). Raises:
        `EngineError` if vLLM does not answer."""
        given = ("attempt", None, (method, *arguments), None)
        asked = self._engine.engine_core.call_utility_all_async("collective_rpc", *given)
        answers = [wrong for engine in await self._control(asked, limit_s + self._grace_s) for wrong in engine]
        if len(answers) == 1:
            return [wrong for wrong in answers if wrong]
        return [f"worker {number}: {wrong}" for number, wrong in enumerate(answers) if wrong]

    async def _receive(
        self, weights: SentWeights, version: Version, wanted: tuple[tuple[str, str], ...], limit_s: float
    ) -> str:
        until = time.monotonic() + limit_s
        try:
            await self._join(weights, limit_s)
            assert self._group is not None
            await self._converse(weights, Send(group=self._group, version=version, wanted=wanted), left_s(until))
        except Outdated as error:
            return str(error)
        except EngineError as error:
            return await self._leave(str(error))
        return ""

    async def _join(self, weights: SentWeights, limit_s: float) -> None:
        """Form the group: once for each engine, and again after a failure."""
        if self._group is not None:
            return
        parallel = self._engine.vllm_config.parallel_config
        workers = parallel.world_size * parallel.data_parallel_size
        group = secrets.token_hex(8)
        await self._converse(weights, Join(group=group, workers=workers), limit_s)
        self._group = group

    async def _leave(self, wrong: str) -> str:
        """Leave the group and drop partly received weights. Returns `wrong`, with the error if this fails."""
        self._group = None
        try:
            failed = await self._attempt("abandon_weight_update", limit_s=0.0)
        except EngineError as error:
            failed = [str(error)]
        return f"{wrong}; the engine could not leave its group: {'; '.join(failed)}" if failed else wrong

    async def _converse(self, weights: SentWeights, turn: Join | Send, limit_s: float) -> None:
        """Carry out the calls of the sender until it is done. Raises: `EngineError`."""
        until = time.monotonic() + limit_s
        group = turn.group
        try:
            async with asyncio.timeout(limit_s):
                call = await weights.exchange(turn)
            if call == OUTDATED:
                raise Outdated(NEWER)
            while call is not None:
                wrong = await self._carry_out(call, until - time.monotonic())
                async with asyncio.timeout(left_s(until)):
                    call = await weights.exchange(WeightsAnswer(group=group, wrong=wrong))
        except TimeoutError:
            raise EngineError(f"the weights did not arrive within {limit_s:g} s") from None

    async def _carry_out(self, call: WeightsCall, left_s: float) -> str:
        """Carry out one call. Returns an empty text, or why vLLM refused it."""
        arguments = [] if call.argument is None else [call.argument]
        limit_s = max(0.0, left_s)
        try:
            if call.name == "update_weights":
                arguments += [self._area.tensors.aliases, limit_s]
                return "; ".join(await self._attempt("update_in_time", *arguments, limit_s=limit_s))
            return "; ".join(await self._attempt(call.name, *arguments, limit_s=limit_s))
        except EngineError as error:
            return str(error)


class IncomingAdapter(Incoming):
    """Versions that are adapters. vLLM loads each from its staged directory, in place of the one before."""

    async def open(self, version: Version) -> None:
        """Install an adapter of zeros: a request without one would never get one. Raises: `EngineError`."""
        await self.stage(version, self._area.tensors.zeros())
        wrong = await self.swap(version, JOIN_S)
        if wrong:
            raise EngineError(f"vLLM cannot sample with an adapter: {wrong}")

    def adapter(self, version: Version) -> Any:
        from vllm.lora.request import LoRARequest

        directory = self._area.directory(version)
        return LoRARequest(lora_name="policy", lora_int_id=ADAPTER, lora_path=str(directory))

    async def replaces_everything(self) -> bool:
        """The model under an adapter stays."""
        return False

    async def swap(self, version: Version, limit_s: float) -> str:
        """Install a staged version. Returns nothing, or why it failed; then vLLM may hold parts of both."""
        try:
            return "; ".join(
                await self._attempt("load_adapter", ADAPTER, str(self._area.directory(version)), limit_s=limit_s)
            )
        except EngineError as error:
            return str(error)


def left_s(until: float) -> float:
    """Seconds until a time of `time.monotonic`; 0 after it."""
    return max(0.0, until - time.monotonic())


def wanted_names(model: ModelTensors, version: Version, manifest: Manifest) -> tuple[tuple[str, str], ...]:
    """(name in the model, name in the manifest) for every tensor of the model. Raises: `EngineError`, which names the
    tensor that does not fit."""
    shapes = [torch.empty(shape, dtype=getattr(torch, kind), device="meta") for kind, shape in manifest.tensors]
    owners: dict[str, tuple[str, int]] = {}
    for name, index in manifest.names:
        owner = model.aliases.get(name, name)
        held, place = owners.setdefault(owner, (name, index))
        if place != index:
            raise EngineError(
                f"weights of version {version}: {held} and {name} are one tensor in this model (tied), but two tensors "
                "were published", version=version, name=name,
            )  # fmt: skip
    model.checked(version, {name: shapes[index] for name, index in manifest.names})
    return tuple([(name, owners[name][0]) for name in model.shapes])
