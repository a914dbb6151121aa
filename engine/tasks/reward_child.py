"""The process of a reward: reads calls from its standard input, and writes values to its original standard output.

`reward_processes.py` starts it and ends it. A message is its length in 4 bytes (little-endian) and msgpack. The process
ends when its standard input ends, or when a call exceeds its time limit; it then writes the stack first. It must never
unpickle, and never let the output of the reward reach the pipe.
"""

import asyncio
import faulthandler
import inspect
import os
import resource
import struct
import sys
import traceback
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread
from typing import Any, BinaryIO

import msgpack

from engine.errors import RewardFailure, describe_error
from engine.protocols.big_integers import pack_big, unpack_big
from engine.protocols.named_code import find
from engine.tasks.reward_forms import BoundReward, Unit, Value, bind, checked_values
from engine.trajectory import NoAnswer, Prompt, Scored, Span, Trajectory

LENGTH = struct.Struct("<I")
NO_ANSWER, SCORED = "no answer", "scored"
"""The keys of a `NoAnswer` and of a `Scored` in a message."""
LONGEST_STORY = 4000
"""Maximum characters of a traceback; the last ones are kept."""


# -- messages ----------------------------------------------------------------------------------------------------------


def pack(message: Any) -> bytes:
    """Raises: `TypeError`, `ValueError` or `OverflowError` for what is not plain data."""
    data: bytes = msgpack.packb(message, use_bin_type=True, unicode_errors="surrogatepass", default=pack_big)
    return LENGTH.pack(len(data)) + data


def unpack(data: bytes) -> Any:
    size = len(data)
    return msgpack.unpackb(
        data, raw=False, unicode_errors="surrogatepass", strict_map_key=False, ext_hook=unpack_big, max_ext_len=size,
        max_str_len=size, max_bin_len=size, max_array_len=size, max_map_len=size,
    )  # fmt: skip


def plain_call(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[Any]:
    """Prompts and responses as plain data. Each prompt is contained once."""
    numbers: dict[int, int] = {}
    places = [numbers.setdefault(id(prompt), len(numbers)) for prompt in prompts]
    distinct = {id(prompt): prompt for prompt in prompts}
    return [
        [[prompt.row, prompt.text, dict(prompt.fields)] for prompt in distinct.values()],
        places,
        [
            [
                trajectory.text, trajectory.finish_reason, array("i", trajectory.prompt_ids).tobytes(),
                array("i", trajectory.token_ids).tobytes(), array("d", trajectory.logprobs).tobytes(),
                bytes(trajectory.loss_mask), [tuple(span) for span in trajectory.spans],
            ]
            for trajectory in trajectories
        ],
    ]  # fmt: skip


def value_from(plain: Any) -> Any:
    """The reverse of `_plain`."""
    if isinstance(plain, dict):
        return NoAnswer(plain[NO_ANSWER]) if NO_ANSWER in plain else Scored(*plain[SCORED])
    return plain


def call_from(plain: Any) -> tuple[list[Prompt], list[Trajectory]]:
    """The reverse of `plain_call`."""
    distinct = [Prompt(row=row, text=text, fields=fields) for row, text, fields in plain[0]]
    trajectories = [
        Trajectory(
            text=text, finish_reason=finish_reason, prompt_ids=_numbers("i", prompt_ids),
            token_ids=_numbers("i", token_ids), logprobs=_numbers("d", logprobs), loss_mask=list(mask),
            spans=[Span(*span) for span in spans],
        )
        for text, finish_reason, prompt_ids, token_ids, logprobs, mask, spans in plain[2]
    ]  # fmt: skip
    return [distinct[place] for place in plain[1]], trajectories


def _numbers(kind: str, data: bytes) -> list[Any]:
    numbers = array(kind)
    numbers.frombytes(data)
    return numbers.tolist()


def read(stream: BinaryIO) -> Any:
    """The next message; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    return unpack(stream.read(length))


# -- the process -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Serve calls until standard input ends."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    faulthandler.enable()
    setup = read(requests)
    if setup is None:
        return
    sys.path[:] = setup["path"]
    try:
        if setup["memory_bytes"]:
            resource.setrlimit(resource.RLIMIT_DATA, (setup["memory_bytes"],) * 2)
        threads = setup["threads"]
        function = _on_threads(partial(find, setup["spec"], setup["directory"], "reward"), min(threads, 1))
        bound = bind(function, setup["arguments"], setup["spec"], "reward")
    except BaseException as error:
        replies.write(pack(_failure(error)))
        return
    replies.write(pack(["ready"]))
    while (plain := read(requests)) is not None:
        timeout_s, unit, optional, call = plain
        faulthandler.dump_traceback_later(timeout_s, exit=True)
        try:
            values = _on_threads(lambda: _values(bound, unit, optional, *call_from(call)), threads)  # noqa: B023
            reply = pack(["values", values])
        except BaseException as error:
            reply = pack(_failure(error))
        threads = min(threads, 1)
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        replies.write(reply)


def _on_threads(work: Callable[[], Any], count: int) -> Any:
    """The result of `work`, done on `count` new threads at once; 0: on this one. Raises: the first exception."""
    if not count:
        return work()
    outcomes: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcomes.append((work(), None))
        except BaseException as error:
            outcomes.append((None, error))

    threads = [Thread(target=run, name="reward", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _, error in outcomes:
        if error is not None:
            raise error
    return outcomes[0][0]


def _values(
    bound: BoundReward, unit: Unit, optional: bool, prompts: list[Prompt], trajectories: list[Trajectory]
) -> list[Any]:
    single = bound.form == "response"
    found = bound.call(prompts[0], trajectories[0]) if single else bound.call(prompts, trajectories)
    if inspect.isawaitable(found):
        found = asyncio.run(_result_of(found))
    values = checked_values(found, bound.form, unit, optional, trajectories)
    return [_plain(value) for value in values]


async def _result_of(found: Any) -> Any:
    return await found


def _plain(value: Value | str) -> Any:
    """A checked value as plain data."""
    if isinstance(value, NoAnswer):
        return {NO_ANSWER: float(value)}
    return {SCORED: [float(value), value.figures]} if isinstance(value, Scored) else value


def _failure(error: BaseException) -> list[Any]:
    """The reply for an exception: its description, its traceback, and whether the process must be replaced."""
    if isinstance(error, RewardFailure):
        return ["failed", str(error)]
    story = "".join(traceback.format_exception(error))[-LONGEST_STORY:]
    return ["raised", describe_error(error), story, isinstance(error, MemoryError)]


if __name__ == "__main__":
    main()
