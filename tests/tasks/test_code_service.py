"""Code that runs in a sandbox service, against a stand-in with the API of SandboxFusion on the loopback address."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from aiohttp import web
from test_code_forgeries import EQUAL, TASKS

from engine.errors import RewardFailure
from engine.tasks.code_rewards import python_tests
from engine.tasks.reward_forms import declared_by
from engine.trajectory import Prompt, Trajectory


class Service:
    """Runs each program in a process, without isolating it: only the API is that of a service."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.asked, self.broken = folder, list[Any](), False
        self._loop = asyncio.new_event_loop()
        self.url = self._loop.run_until_complete(self._listen())
        self._thread = Thread(target=self._loop.run_forever)
        self._thread.start()

    async def _listen(self) -> str:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/run_code", self._run)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _run(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.asked.append(asked)
        if self.broken:
            return web.json_response({"status": "SandboxError", "message": "no room"})
        main = self._folder / "main.py"
        main.write_text(asked["code"])
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", str(main), cwd=self._folder,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        said, _ = await process.communicate(asked["stdin"].encode())
        result = {"status": "Finished", "return_code": process.returncode, "stdout": said.decode(), "stderr": ""}
        status = "Success" if process.returncode == 0 else "Failed"
        return web.json_response({"status": status, "message": "", "run_result": result})

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    made.close()


def score(service: Service, code: str, tests: Any, **arguments: Any) -> float:
    prompt = Prompt(row=0, text="", fields={"tests": tests})
    return python_tests(prompt, Trajectory(text=f"```python\n{code}\n```"), sandbox=service.url, **arguments)


def test_a_service_runs_all_kinds_of_tests(service: Service) -> None:
    for task in ("add", "call", "double", "in place", "endless", "imported"):
        assert score(service, *TASKS[task]) == 1.0
    assert score(service, TASKS["add"][0], TASKS["add"][1], same_process=True) == 1.0
    for task, code in (
        ("add", "def add(a, b): return a - b"),
        ("call", "def add(a, b): return 3"),
        ("double", "print(8)"),
        ("double", "print('8' * (9 << 20))"),
    ):
        assert score(service, code, TASKS[task][1]) == 0.0
    sent = service.asked[0]
    assert {name: sent[name] for name in ("language", "memory_limit_MB")} == {
        "language": "python",
        "memory_limit_MB": 512,
    }
    assert 0 < sent["run_timeout"] <= 5.0


def test_a_service_sees_no_test_where_it_runs_a_response(service: Service) -> None:
    assert score(service, EQUAL + "def add(a, b): return Equal()", TASKS["add"][1]) == 0.0
    of_response = [asked for asked in service.asked if "Equal" in asked["stdin"]]
    assert of_response and not any("assert add" in json.dumps(asked) for asked in of_response)


def test_a_service_that_fails_is_no_wrong_answer(service: Service) -> None:
    service.broken = True
    with pytest.raises(RewardFailure, match=r"lost the sandbox service at .*: 'no room'"):
        score(service, *TASKS["double"])


def test_a_service_is_checked_before_a_run(service: Service) -> None:
    check = declared_by(python_tests).check
    assert check is not None
    assert check(sandbox=service.url) == f"code runs in the sandbox service at {service.url}"
    refused = check(sandbox="http://127.0.0.1:9")
    assert refused is not None and refused[0] == "sandbox" and "Connection refused" in refused[1]
    assert check(sandbox="nowhere") == (
        "sandbox",
        "must be an http or https address",
        "for example http://sandbox:8080",
    )
