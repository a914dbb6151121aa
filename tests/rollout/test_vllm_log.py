"""A vLLM that does not start says why: its processes' stderr is kept in a file, and the cause is in the error."""

import os
from pathlib import Path
from typing import Any

import pytest
from backends import WIDE, build
from forked_engines import forked_engines
from vllm_arguments import ENGINE_ARGS, require_vllm

from engine.errors import EngineError
from engine.rollout.vllm.engine_log import EngineLog, causes_in

LOG = """\
(Worker_TP1 pid=71) INFO 11-26 10:00:01 [cpu_worker.py:90] Loading weights
(Worker_TP1 pid=71) ERROR 11-26 10:00:02 [multiproc_executor.py:900] Traceback (most recent call last):
(Worker_TP1 pid=71) ERROR 11-26 10:00:02 [multiproc_executor.py:900]   File "/a/worker.py", line 3, in load
(Worker_TP1 pid=71) ERROR 11-26 10:00:02 [multiproc_executor.py:900] torch.OutOfMemoryError: CUDA out of memory.
(Worker_TP0 pid=70) ERROR 11-26 10:00:02 [multiproc_executor.py:900] torch.OutOfMemoryError: CUDA out of memory.
\x1b[0;36m(EngineCore pid=69)\x1b[0;0m Process EngineCore:
\x1b[0;36m(EngineCore pid=69)\x1b[0;0m Exception: WorkerProc initialization failed.
"""


def test_causes_are_the_distinct_errors_of_all_processes() -> None:
    assert causes_in(LOG) == [
        "torch.OutOfMemoryError: CUDA out of memory.", "Exception: WorkerProc initialization failed.",
    ]  # fmt: skip


def test_the_death_of_a_worker_is_a_cause() -> None:
    died = "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor."
    log = f"(EngineCore pid=69) ERROR 11-26 10:00:02 [multiproc_executor.py:315] {died}\nRuntimeError: cancelled\n"
    assert causes_in(log) == [died, "RuntimeError: cancelled"]


def test_without_an_error_the_last_lines_are_the_cause() -> None:
    assert causes_in("one\ntwo\n\nthree\nfour\nkilled by the kernel\n") == [
        "two", "three", "four", "killed by the kernel",
    ]  # fmt: skip


def test_a_log_without_new_lines_adds_nothing(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "logs" / "rollout-0.vllm.log")
    with log.inherited():
        os.write(2, b"ValueError: of an earlier start\n")
    with log.inherited():
        pass
    assert log.with_causes("vLLM failed") == "vLLM failed"
    assert EngineLog(None).with_causes("vLLM failed") == "vLLM failed"


def test_an_engine_whose_context_does_not_fit_says_so(tmp_path: Path) -> None:
    require_vllm()
    from engine.rollout.vllm.vllm_backend import VllmBackend

    context = 1 << 20
    model: Any = build("qwen2", **WIDE, max_position_embeddings=context)
    model.save_pretrained(tmp_path / "model")
    arguments = ENGINE_ARGS | {"max_model_len": context}
    log = tmp_path / "logs" / "rollout-0.vllm.log"
    with (
        forked_engines(),
        pytest.raises(EngineError, match=rf"vLLM does not start: .*max seq len \({context}\).*more in {log}"),
    ):
        VllmBackend(str(tmp_path / "model"), engine_args=arguments, log=log)
    assert log.stat().st_mode & 0o077 == 0
