"""Rewards in processes of their own: what they get and return, and how a hang, a crash or a leak ends."""

import os
import select
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import numpy as np
import pytest

from engine.errors import DataFailure, RewardFailure
from engine.tasks import reward_processes
from engine.tasks.reward_child import pack, unpack
from engine.tasks.reward_forms import checked_values
from engine.tasks.reward_processes import ProcessSettings, RewardProcesses
from engine.trajectory import NoAnswer, Prompt, Scored, Span, Trajectory

CODE = """
import asyncio, os, sys, threading, time
from contextlib import suppress

from engine.errors import RewardFailure
from engine.trajectory import NoAnswer, Scored

def echo(prompt, trajectory, *, factor=1.0):
    print("printed by the reward\\x1b]0;owned\\x07")
    same = trajectory.logprobs == [-0.5, -1.0] and trajectory.spans[0].version == 3 and trajectory.loss_mask == [1, 1]
    return factor * (prompt.fields["answer"] + len(trajectory.text)) if same else -1.0

def number(prompt, trajectory):
    return os.getpid()

async def later(prompt, trajectory):
    await asyncio.sleep(0)
    return 2.5

def lengths(prompt, trajectories):
    return [len(trajectory.text) for trajectory in trajectories]

def trl(prompts, completions, answer, **kwargs):
    return [None if text == "" else float(value) for text, value in zip(completions, answer)]

def wrong(prompt, trajectory):
    return {}["anser"]

def hang(prompt, trajectory):
    stuck_here = threading.Event()
    stuck_here.wait()

def crash(prompt, trajectory):
    import ctypes
    ctypes.string_at(0)

def leak(prompt, trajectory):
    return len(bytearray(1 << 30))

def leave(prompt, trajectory):
    sys.exit(3)

def text(prompt, trajectory):
    import numpy as np
    return eval(prompt.text, {**globals(), "np": np})

def unread(prompts, trajectories):
    return [NoAnswer(-0.5), 1.0, Scored(0.5, {"forged": 1.0})]

def parent(prompt, trajectory):
    child = os.fork()
    if not child:
        time.sleep(600)
    with open(prompt.text, "w") as file:
        file.write(str(child))
    os._exit(7)

def begin(prompt, trajectory):
    with open(prompt.text, "w"):
        hang(prompt, trajectory)

def stop_reading(prompt, trajectory):
    sys.setprofile(lambda frame, event, argument: frame.f_code.co_name == "read" and hang(None, None))
    return 1.0

def talk(prompt, trajectory):
    raise RewardFailure("x" * (65 << 20))

def claim(prompt, trajectory):
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and os.path.realpath(f"/proc/self/fd/{number}").rpartition("/")[2].startswith("pipe:"):
            with suppress(OSError):
                os.write(number, bytes([255] * 4))  # the reply, as the length of another
    hang(prompt, trajectory)

def loud(prompt, trajectory):
    print("x" * 2_000_000 + "end")
    return 1.0
"""
PROMPT = Prompt(row=4, text="?", fields={"answer": 2})


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "own_rewards.py").write_text(CODE)
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    (tmp_path / "slow_rewards.py").write_text(f"import threading; open({str(begun)!r}, 'w'); threading.Event().wait()")
    made: list[RewardProcesses] = []

    def make(name: str, timeout_s: float = 30.0, memory_mb: int | None = None, **arguments: Any) -> RewardProcesses:
        settings = ProcessSettings(
            spec=name if ":" in name else f"own_rewards:{name}", directory=str(tmp_path), arguments=arguments,
            timeout_s=timeout_s, memory_mb=memory_mb,
        )  # fmt: skip
        made.append(RewardProcesses(settings, 1))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def response(text: str = "abc") -> Trajectory:
    return Trajectory(
        prompt_ids=[1], token_ids=[5, 6], logprobs=[-0.5, -1.0], loss_mask=[1, 1], spans=[Span(0, 2, 3)], text=text
    )


def test_a_function_gets_the_response_and_its_arguments(pools: Any, capfd: pytest.CaptureFixture[str]) -> None:
    pool = pools("echo", factor=2.0)
    assert [pool([PROMPT], [response()]) for _ in range(3)] == [[10.0]] * 3
    pool.close()
    said = capfd.readouterr()
    assert said.err.count("printed by the reward") == 3 and not said.out
    assert "owned" in said.err and not set("\x1b\x07") & set(said.err)
    assert pool([PROMPT], [response("")]) == [4.0], "it starts again"


def test_only_the_beginning_of_what_a_call_prints_is_shown(pools: Any, capfd: pytest.CaptureFixture[str]) -> None:
    pool = pools("loud")
    assert [pool([PROMPT], [response()]) for _ in range(2)] == [[1.0], [1.0]]
    pool.close()
    said = capfd.readouterr().err
    assert "xx" in said and "the rest of what this call prints is not shown" in said
    assert len(said) < 100_000 and "end" not in said


@pytest.mark.parametrize("answer", [2**63, 2**64, 2**100, -(2**63) - 1, -(2**2000)])
def test_a_column_may_hold_integers_of_any_size(answer: int) -> None:
    assert unpack(pack([{"answer": [answer]}])[4:]) == [{"answer": [answer]}]


def test_other_forms_run_in_processes_too(pools: Any) -> None:
    assert pools("later")([PROMPT], [response()]) == [2.5]
    assert pools("lengths")([PROMPT] * 2, [response("a"), response("abcd")]) == [1, 4]
    assert pools("trl")([PROMPT] * 2, [response(""), response("x")], optional=True) == [None, 2.0]
    lost, found, odd = pools("unread")([PROMPT] * 3, [response("a"), response("b"), response("c")])
    assert (lost, type(lost), found, type(found)) == (-0.5, NoAnswer, 1.0, float)
    assert (odd, type(odd), odd.figures) == (0.5, Scored, {"forged": 1.0})


@pytest.mark.parametrize(
    ("name", "message", "story"),
    [
        ("wrong", "raised KeyError: 'anser' (own_rewards.py:27, in wrong)", 'return {}["anser"]'),
        ("leave", "raised SystemExit: 3 (own_rewards.py:41, in leave)", "in leave"),
        ("leak", "raised MemoryError (own_rewards.py:38, in leak)", "in leak"),
        ("crash", "crashed: its process was killed by SIGSEGV", "in crash"),
        ("hang", "took longer than 0.2 s; its process was killed", "in hang"),
    ],
)
def test_a_failure_costs_one_call_and_shows_where_it_happened(pools: Any, name: str, message: str, story: str) -> None:
    pool = pools(name, timeout_s=0.2 if name == "hang" else 30.0, memory_mb=512 if name == "leak" else None)
    for _ in range(2):
        with pytest.raises(RewardFailure) as caught:
            pool([PROMPT], [response()])
        assert str(caught.value) == message
        assert story in str(caught.value.__cause__)


def test_a_process_is_used_again_unless_it_failed(pools: Any) -> None:
    pool = pools("number")
    assert pool([PROMPT], [response()]) == pool([PROMPT], [response()]) != [os.getpid()]


def test_a_process_that_does_not_read_its_call_exceeds_the_limit(pools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_processes, "GRACE_S", 0.1)
    pool = pools("stop_reading", timeout_s=1.0)
    assert pool([PROMPT], [response()]) == [1.0]
    with pytest.raises(RewardFailure, match="took longer than 1 s; its process was killed"):
        pool([PROMPT], [response("longer than a pipe holds" * 10_000)])


def test_a_reply_of_more_than_64_mib_is_refused_before_it_is_read(pools: Any) -> None:
    for name, size in ("talk", 65), ("claim", 4095):
        with pytest.raises(RewardFailure, match=f"its reply has {size} MiB, but may have at most 64 MiB; return"):
            pools(name)([PROMPT], [response()])


def test_what_a_process_started_ends_with_it(pools: Any, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with pytest.raises(RewardFailure, match="crashed: its process ended with exit code 7"):
        pools("parent")([Prompt(row=0, text=str(file))], [response()])
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(int(file.read_text()))
        ended, _, _ = select.select([descriptor], [], [], 20)
        os.close(descriptor)
        assert ended


def test_what_cannot_be_sent_or_used_is_named(pools: Any) -> None:
    with pytest.raises(DataFailure, match="row 1 cannot be sent to the process of the reward: can"):
        pools("number")([Prompt(row=1, text="", fields={"odd": object()})], [response()])
    with pytest.raises(
        RewardFailure, match="raised ConfigError: reward is 'own_rewards:lost': module 'own_rewards' has no"
    ):
        pools("lost")([PROMPT], [response()])


def test_a_value_is_judged_in_a_process_as_in_a_thread(pools: Any) -> None:
    pool = pools("text")
    for value, judged in {
        "np.float32(0.5)": 0.5, "np.array(1.0)": 1.0, "True": 1.0, "2": 2.0, "NoAnswer(-0.0)": NoAnswer(-0.0),
        "Scored(1.0, {np.str_('n'): np.int64(3), 'ok': True})": Scored(1.0, {"n": 3.0, "ok": 1.0}),
        "'good'": "'good' of type str WHERE, not a finite number", "None": "None WHERE, not a finite number",
        "1e308": "1e+308 (beyond 1e+300) WHERE, not a finite number",
        "Scored(1.0, {'share': float('nan')})": "the figure 'share' as nan WHERE, not a finite number",
        "Scored(1.0, {'share': 'high'})": "the figure 'share' as 'high' of type str WHERE, not a finite number",
        "Scored(1.0, {3: 1.0})": "a figure named 3 WHERE, a int; a name must be a str",
        "Scored(1.0, {'': 1.0})": "a figure named '' WHERE, which must have 1 to 200 printable characters",
        "Scored(1.0, None)": "figures as a NoneType WHERE, not as a mapping of names to numbers",
        "Scored(1.0, dict.fromkeys(map(str, range(101)), 1.0))": "101 figures WHERE, more than 100",
        "Scored(float('nan'), {})": "nan WHERE, not a finite number",
    }.items():  # fmt: skip
        (here,) = checked_values(eval(value, {**globals(), "np": np}), "response", "response", False, [response()])
        (apart,) = pool([Prompt(row=4, text=value)], [response()])
        shown = [(one, type(one), getattr(one, "figures", None)) for one in (judged, here, apart)]
        assert shown[0] == shown[1] == shown[2]


def test_closing_during_a_call_closes_each_descriptor_once(
    pools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[OSError] = []
    close = os.close

    def noted(descriptor: int) -> None:
        try:
            close(descriptor)
        except OSError as error:
            errors.append(error)
            raise

    monkeypatch.setattr(os, "close", noted)
    pool = pools("begin")
    for _ in range(4):
        end_a_call(pool, tmp_path / "begun")
    assert not errors


def test_closing_ends_a_process_that_still_imports_its_function(pools: Any, tmp_path: Path) -> None:
    end_a_call(pools("slow_rewards:lost"), tmp_path / "begun")


def end_a_call(pool: RewardProcesses, begun: Path) -> None:
    """Close `pool` once its process writes to `begun`, and wait until the call has failed."""
    failures: Queue[str] = Queue()

    def call() -> None:
        with pytest.raises(RewardFailure) as caught:
            pool([Prompt(row=0, text=str(begun))], [response()])
        failures.put(str(caught.value))

    Thread(target=call, daemon=True).start()
    begun.open().close()
    pool.close()
    assert "killed by SIGKILL" in failures.get(timeout=20)
