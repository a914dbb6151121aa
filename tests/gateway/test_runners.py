"""How agents are run: coroutines and programs, what their failures cost, and that nothing of them is left."""

import asyncio
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_gateway_ray import configured

from engine.errors import ConfigError, DataFailure, EngineError
from engine.gateway.runners import MOST_BLOCKED, CommandRunner, FunctionRunner
from engine.plans.configured_plan import plan_of
from engine.trajectory import Prompt

PROMPT = Prompt(row=3, text="say it", fields={"answer": "4"})


def command(program: str) -> CommandRunner:
    return CommandRunner([sys.executable, "-c", program])


def run(runner: Any) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(runner.run("http://here/v1", "sk-1", PROMPT), 60)

    return asyncio.run(bounded())


def test_a_program_is_told_where_the_model_is_and_what_is_asked(tmp_path: Path) -> None:
    told = tmp_path / "told"
    program = (
        "import os, json; prompt = json.loads(os.environ['STEP_ENGINE_PROMPT']); "
        f"open({str(told)!r}, 'w').write(' '.join([os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY'], "
        "prompt['text'], prompt['fields']['answer'], str(prompt['row'])]))"
    )
    assert run(command(program)) is None
    assert told.read_text() == "http://here/v1 sk-1 say it 4 3"


def test_a_program_runs_in_the_given_directory(tmp_path: Path) -> None:
    (tmp_path / "agent.sh").write_text("#!/bin/sh\necho done > said\n")
    (tmp_path / "agent.sh").chmod(0o755)
    assert run(CommandRunner(["./agent.sh"], str(tmp_path))) is None
    assert (tmp_path / "said").read_text() == "done\n"


def test_a_program_that_fails_is_the_datas_fault_and_says_its_last_words() -> None:
    with pytest.raises(DataFailure, match=r"prompt row 3 ended with exit code 7: .*no tool"):
        run(command("import sys; print('x' * 9000, 'no tool', file=sys.stderr); sys.exit(7)"))


def test_a_program_that_is_killed_is_not() -> None:
    with pytest.raises(EngineError, match="was killed by SIGKILL") as failure:
        run(command("import os; os.kill(os.getpid(), 9)"))
    assert not isinstance(failure.value, DataFailure)


def test_a_program_that_cannot_be_started_is_named() -> None:
    with pytest.raises(EngineError, match="no-such-program cannot be started"):
        run(CommandRunner(["no-such-program"]))


def test_a_cancelled_program_takes_its_children_along(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    child = f"import os, signal; open({str(pipe)!r}, 'w').write(str(os.getpid())); signal.pause()"
    program = f"import subprocess, sys, signal; subprocess.Popen([sys.executable, '-c', {child!r}]); signal.pause()"

    async def scenario() -> int:
        running = asyncio.ensure_future(command(program).run("", "", PROMPT))
        pid = int(await asyncio.to_thread(pipe.read_text))
        running.cancel()
        await asyncio.wait([running])
        return pid

    pid = asyncio.run(scenario())
    try:
        psutil.Process(pid).wait(20)
    except psutil.NoSuchProcess:
        return


def test_a_coroutine_that_blocks_does_not_block_the_gateway() -> None:
    gate = threading.Event()

    async def blocking(base_url: str, key: str, prompt: Prompt) -> float:
        assert gate.wait(60)
        return 2.0

    async def scenario() -> float | None:
        runner = FunctionRunner(blocking)
        running = asyncio.ensure_future(runner.run("", "", PROMPT))
        gate.set()
        reward = await running
        runner.close()
        return reward

    assert asyncio.run(scenario()) == 2.0


def test_agents_that_wait_for_a_blocked_thread_get_another_and_its_stack_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        loop, entered, leave = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        async def agent(base_url: str, key: str, prompt: Prompt) -> float:
            if key == "blocks":
                loop.call_soon_threadsafe(entered.set)
                leave.wait()
            return 2.0

        runner = FunctionRunner(agent, answer_s=0.01)
        for blocked in range(1, MOST_BLOCKED + 1):
            blocking = asyncio.ensure_future(runner.run("", "blocks", PROMPT))
            await entered.wait()
            entered.clear()
            waiting = asyncio.ensure_future(runner.run("", "waits for the thread", PROMPT))
            await asyncio.sleep(0)
            blocking.cancel()
            assert await waiting == 2.0
            assert caplog.text.count("leave.wait()") == blocked
        assert re.match("agent .*agent blocks 16 threads and does not return", await runner.failed())
        leave.set()
        runner.close()

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(bounded())


def test_a_coroutine_that_raises_is_named() -> None:
    async def raising(base_url: str, key: str, prompt: Prompt) -> None:
        raise KeyError("tool")

    with pytest.raises(DataFailure, match=r"raising raised KeyError on prompt row 3: 'tool'"):
        run(FunctionRunner(raising))


@pytest.mark.parametrize(
    ("agent", "story"),
    [
        ({"function": "conversations:nobody"}, "has no attribute 'nobody'"),
        ({"function": "conversations:whole"}, "not a coroutine function; define it as async def whole"),
        ({"rollout": "conversations:converse"}, "cannot be called with client, prompt"),
        ({"rollout": "conversations:program", "command": ["x"]}, "agent.command is set too"),
    ],
)
def test_an_agent_that_cannot_run_is_refused_before_any_actor_starts(
    tmp_path: Path, agent: dict[str, Any], story: str
) -> None:
    with pytest.raises(ConfigError, match=story):
        plan_of(configured(tmp_path, agent), tmp_path)
