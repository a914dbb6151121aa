"""How agents are run: coroutines and programs, what their failures cost, and that nothing of them is left."""

import asyncio
import gc
import json
import os
import re
import subprocess
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
from engine.trajectory import Prompt, RolloutResult

PROMPT = Prompt(row=3, text="say it", fields={"answer": "4"})


def command(program: str) -> CommandRunner:
    return CommandRunner([sys.executable, "-c", program])


def run(runner: Any, prompt: Prompt = PROMPT) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(runner.run("http://here/v1", "sk-1", prompt), 60)

    return asyncio.run(bounded())


SHOW = (
    "import json, os; path = os.environ['STEP_ENGINE_PROMPT_FILE']; "
    "json.dump({'env': dict(os.environ), 'prompt': json.load(open(path)), 'file': path}, open('shown', 'w'))"
)
"""Writes what a program can read of its environment and its prompt."""


def shown(directory: Path, prompt: Prompt = PROMPT, **more: Any) -> dict[str, Any]:
    runner = CommandRunner([sys.executable, "-c", SHOW], str(directory), **more)
    assert run(runner, prompt) == RolloutResult()
    said: dict[str, Any] = json.loads((directory / "shown").read_text())
    return said


def test_a_program_gets_the_model_the_prompt_and_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt may have more than the 128 KiB of a variable."""
    monkeypatch.setenv("WANDB_API_KEY", "kept-from-agents")
    row = {"answer": "gold", "messages": [{"role": "user", "content": "say it"}], "level": 3}
    text = "x" * (1 << 20)
    said = shown(tmp_path, Prompt(row=3, text=text, fields=row), fields=["level"])
    assert (said["env"]["OPENAI_BASE_URL"], said["env"]["OPENAI_API_KEY"]) == ("http://here/v1", "sk-1")
    assert said["env"]["PATH"] == os.environ["PATH"]
    assert "kept-from-agents" not in json.dumps(said) and "gold" not in json.dumps(said)
    assert said["prompt"] == {"row": 3, "text": text, "fields": {"messages": row["messages"], "level": 3}}
    assert not Path(said["file"]).exists(), "the file of an agent that has ended"


def test_a_program_behind_a_proxy_reaches_the_gateway_directly(tmp_path: Path) -> None:
    said = shown(tmp_path, environment={"HTTPS_PROXY": "http://proxy:8080", "NO_PROXY": "example.org"})
    assert said["env"]["no_proxy"] == said["env"]["NO_PROXY"] == "example.org,localhost,127.0.0.1,::1,here"


READS = (
    "import os, sys\ntry: open(f'/proc/{os.getppid()}/environ').read()\n"
    "except PermissionError: sys.exit(0)\nsys.exit('it reads the environment of the gateway')"
)
RUNS = (
    "import asyncio, sys\nfrom engine.gateway.runners import CommandRunner\nfrom engine.trajectory import Prompt\n"
    "runner = CommandRunner([sys.executable, '-c', sys.argv[1]])\n"
    "asyncio.run(runner.run('http://here/v1', 'sk-1', Prompt(row=3, text='')))"
)


def test_a_program_cannot_read_the_environment_of_the_gateway() -> None:
    """As an ordinary user: root may read everything."""
    stand_in = str(Path(__file__).parents[1] / "tasks" / "kernel_stand_ins.py")
    command = [sys.executable, stand_in, "user", sys.executable, "-c", RUNS, READS]
    path = os.pathsep.join(sys.path)
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)


def test_agent_env_adds_variables_with_a_value_or_from_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARCH_API_KEY", "for the agent")
    env = {"MODE": "fast", "SEARCH_API_KEY": None}
    agent = configured(tmp_path, {"command": ["x"], "env": env, "fields": ["level"]}).agent
    said = shown(tmp_path, environment=agent.environment(), fields=agent.fields)
    assert (said["env"]["MODE"], said["env"]["SEARCH_API_KEY"]) == ("fast", "for the agent")


def test_a_program_runs_in_the_given_directory(tmp_path: Path) -> None:
    (tmp_path / "agent.sh").write_text("#!/bin/sh\necho done > said\n")
    (tmp_path / "agent.sh").chmod(0o755)
    assert run(CommandRunner(["./agent.sh"], str(tmp_path))) == RolloutResult()
    assert (tmp_path / "said").read_text() == "done\n"


def test_a_program_that_fails_is_the_datas_fault_and_says_its_last_words() -> None:
    with pytest.raises(DataFailure, match=r"prompt row 3 ended with exit code 7: .*no tool"):
        run(command("import sys; print('x' * 9000, 'no tool', file=sys.stderr); sys.exit(7)"))


def test_a_program_that_is_killed_is_not() -> None:
    with pytest.raises(EngineError, match="was killed by SIGKILL") as failure:
        run(command("import os; os.kill(os.getpid(), 9)"))
    assert not isinstance(failure.value, DataFailure)


def test_a_program_that_cannot_be_started_is_named() -> None:
    with pytest.raises(DataFailure, match="no-such-program cannot be started"):
        run(CommandRunner(["no-such-program"]))


def test_a_programs_group_is_killed_while_its_number_is_its_own(kills: list[int]) -> None:
    assert run(command("pass")) == RolloutResult() and len(kills) == 1


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
            assert (await waiting).reward == 2.0
            assert caplog.text.count("leave.wait()") == blocked
        assert re.match("agent .*agent blocks 16 threads and does not return", await runner.failed())
        leave.set()
        runner.close()

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(bounded())


def test_closing_ends_the_agents_that_run_and_those_that_have_not_begun(recwarn: pytest.WarningsRecorder) -> None:
    leave, ended = threading.Event(), threading.Event()

    async def scenario() -> None:
        loop, entered = asyncio.get_running_loop(), asyncio.Event()

        async def agent(base_url: str, key: str, prompt: Prompt) -> None:
            try:
                if key == "runs":
                    loop.call_soon_threadsafe(entered.set)
                    await asyncio.Event().wait()
                leave.wait()
            finally:
                ended.set()

        runner = FunctionRunner(agent)
        running = asyncio.ensure_future(runner.run("", "runs", PROMPT))
        await entered.wait()
        entered.clear()
        others = [asyncio.ensure_future(runner.run("", "blocks its thread", PROMPT)) for _ in range(2)]
        await asyncio.sleep(0)
        runner.close()
        leave.set()
        _, late = await asyncio.wait([running, *others], timeout=20)
        assert not late and ended.is_set()

    asyncio.run(scenario())
    gc.collect()
    assert not [str(warning.message) for warning in recwarn if warning.category is RuntimeWarning]  # never awaited


def test_a_coroutine_that_raises_is_named() -> None:
    async def raising(base_url: str, key: str, prompt: Prompt) -> None:
        raise KeyError("tool")

    with pytest.raises(
        DataFailure, match=r"raising raised KeyError on prompt row 3: 'tool' \(test_runners\.py:\d+, in raising\)"
    ):
        run(FunctionRunner(raising))


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("good", "the reward 'good' of type str on prompt row 3, not a finite number"),
        (RolloutResult(reward=float("nan")), "the reward nan on prompt row 3, not a finite number"),
        (RolloutResult(turn_rewards=[1.0, "x"]), "the reward 'x' of type str on prompt row 3"),
        (RolloutResult(turn_rewards=None), "turn_rewards as a NoneType on prompt row 3, not as a list"),
        (RolloutResult(figures={"share": float("nan")}), "the figure 'share' as nan on prompt row 3"),
        (RolloutResult(figures=None), "figures as a NoneType on prompt row 3"),
        (RolloutResult(shown_prompt=3), "shown_prompt as a int on prompt row 3, not as a text"),
    ],
)
def test_an_agent_that_returns_no_result_is_named(returned: Any, problem: str) -> None:
    async def wrong(base_url: str, key: str, prompt: Prompt) -> Any:
        return returned

    with pytest.raises(DataFailure, match=f"agent test_runners.*wrong returned {problem}"):
        run(FunctionRunner(wrong))


@pytest.mark.parametrize(
    ("agent", "story"),
    [
        ({"function": "conversations:nobody"}, "has no attribute 'nobody'"),
        ({"function": "conversations:whole"}, "not a coroutine function; define it as async def whole"),
        ({"rollout": "conversations:converse"}, "cannot be called with client, prompt"),
        ({"rollout": "conversations:program", "command": ["x"]}, "agent.command is set too"),
        ({"command": ["no-such-program"]}, "agent.command 'no-such-program' is no program on the PATH"),
        ({"command": ["true"], "env": {"NOT_SET_HERE": None}}, "NOT_SET_HERE.*is not set in the environment"),
        ({"rollout": "conversations:program", "fields": ["level"]}, "applies only to agent.command"),
    ],
)
def test_an_agent_that_cannot_run_is_refused_before_any_actor_starts(
    tmp_path: Path, agent: dict[str, Any], story: str
) -> None:
    with pytest.raises(ConfigError, match=story):
        plan_of(configured(tmp_path, agent), tmp_path)
