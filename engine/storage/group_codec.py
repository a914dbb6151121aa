"""Packs trajectory groups as bytes, for transfer between processes and for disk.

    [group, [row, text, fields, source], [[trajectory], ...]]       msgpack
    trajectory: prompt ids, token ids (int32), log-probs (float64), loss mask (uint8), spans (int64: start, stop,
                version) as little-endian arrays, then text, finish reason, reward, whether it continues another,
                whether it is unparsable, the parts of the reward by name, the figures of the rollout by name, the
                positions (int32) and values (float64) of the rewards of single tokens, the prompt that samples show,
                and the routes of its tokens

    growth:     [group, [[place, known tokens, trajectory], ...]]; any number of them may follow a group. Of a
                trajectory with known tokens, the prompt ids are empty, and arrays and routes continue after these

Used by `actors` and by the durable store, whose frames have a format version and checksums. Only the fields of a
prompt, which a generator may change, are checked here. Must never unpickle.
"""

import sys
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgpack

from engine.errors import DataFailure, EngineError
from engine.protocols.big_integers import pack_big, unpack_big
from engine.storage.prefixes import OF_TOKENS, Growth, routes_before
from engine.trajectory import Prompt, Span, StepReward, Trajectory, TrajectoryGroup

MAX_GROUP_BYTES = 1 << 29
"""Limit for one packed group: 64 responses of half a million tokens."""
FIELD_DEPTH = 64
"""Maximum nesting of lists and mappings in a prompt's field."""
NATIVE = sys.byteorder == "little"


def pack_group(group: TrajectoryGroup) -> bytes:
    """Pack a group. Raises: `DataFailure` with the prompt's row if the prompt cannot be packed, `EngineError` if a
    trajectory cannot or the group is larger than `MAX_GROUP_BYTES`."""
    prompt = plain_prompt(group.prompt)
    data = _packed(group.group, lambda: (prompt, [_plain_trajectory(trajectory) for trajectory in group.trajectories]))
    if len(data) > MAX_GROUP_BYTES:
        law = f"group {group.group} has {len(data)} bytes; at most {MAX_GROUP_BYTES} are allowed"
        raise EngineError(law, group=group.group)
    return data


def pack_growth(growth: Growth) -> bytes:
    """Pack the growth of a group. After the bytes of the stored group, they are the bytes of the group. Raises:
    `EngineError` if a trajectory cannot be packed."""

    def gained(place: int) -> tuple[Any, ...]:
        trajectory, known = growth.group.trajectories[place], growth.known[place]
        if known:
            new = {name: getattr(trajectory, name)[known:] for name in OF_TOKENS}
            new["routes"] = trajectory.routes[routes_before(trajectory, known) :]
            trajectory = replace(trajectory, prompt_ids=[], **new)
        return place, known, _plain_trajectory(trajectory)

    return _packed(growth.group.group, lambda: ([gained(place) for place in growth.changed],))


def _packed(group: int, parts: Callable[[], tuple[Any, ...]]) -> bytes:
    try:
        data: bytes = msgpack.packb(
            (group, *parts()), use_bin_type=True, unicode_errors="surrogatepass", default=pack_big
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"group {group} cannot be stored: {error}", group=group) from None
    return data


def unpack_group(data: bytes) -> TrajectoryGroup:
    """Unpack a group and its growth."""
    values = msgpack.Unpacker(
        raw=False, strict_map_key=True, unicode_errors="surrogatepass", ext_hook=unpack_big, max_buffer_size=0
    )
    values.feed(data)
    number, prompt, trajectories = values.unpack()
    row, text, fields, source = prompt
    group = TrajectoryGroup(
        group=number,
        prompt=Prompt(row=row, text=text, fields=fields, source=source),
        trajectories=[_trajectory_from(one) for one in trajectories],
    )
    for _, changes in values:
        _grow(group, changes)
    return group


def plain_prompt(prompt: Prompt) -> tuple[Any, ...]:
    """A prompt as msgpack data. Raises: `DataFailure` with its row for fields that are not plain data."""
    for name, value in prompt.fields.items():
        problem = _not_plain(value, FIELD_DEPTH) if type(name) is str else f"is named by a {type(name).__name__}"
        if problem:
            law = "use only text, bytes, numbers, true, false, null, lists, and mappings with text keys"
            raise DataFailure(f"row {prompt.row}: its field {name!r} {problem}; {law}", row=prompt.row)
    return prompt.row, prompt.text, dict(prompt.fields), prompt.source


def _plain_trajectory(t: Trajectory) -> tuple[Any, ...]:
    spans = [number for span in t.spans for number in span]
    positions, values = zip(*t.step_rewards, strict=True) if t.step_rewards else ((), ())
    return (
        _bytes_of("i", t.prompt_ids), _bytes_of("i", t.token_ids), _bytes_of("d", t.logprobs), bytes(t.loss_mask),
        _bytes_of("q", spans), t.text, t.finish_reason, t.reward, t.continues, t.unparsable, t.reward_parts,
        t.figures, _bytes_of("i", positions), _bytes_of("d", values),
        t.shown_prompt, t.routes,
    )  # fmt: skip


def _grow(group: TrajectoryGroup, changes: Any) -> None:
    stored = group.trajectories
    for place, known, packed in changes:
        trajectory = _trajectory_from(packed)
        if place == len(stored):
            stored.append(Trajectory())
        before = stored[place]
        if known:
            for name in OF_TOKENS:
                getattr(before, name)[known:] = getattr(trajectory, name)
            tokens = {name: getattr(before, name) for name in OF_TOKENS}
            routes = before.routes + trajectory.routes
            trajectory = replace(trajectory, prompt_ids=before.prompt_ids, routes=routes, **tokens)
        stored[place] = trajectory


def _trajectory_from(plain: Any) -> Trajectory:
    (
        prompt_ids, token_ids, logprobs, mask, spans, text, finish_reason, reward, continues, unparsable, parts,
        figures, positions, values, shown_prompt, routes,
    ) = plain  # fmt: skip
    bounds = _list_of("q", spans)
    steps = list(zip(_list_of("i", positions), _list_of("d", values), strict=True))
    return Trajectory(
        prompt_ids=_list_of("i", prompt_ids),
        token_ids=_list_of("i", token_ids),
        logprobs=_list_of("d", logprobs),
        loss_mask=list(mask),
        spans=[Span(*bounds[at : at + 3]) for at in range(0, len(bounds), 3)],
        text=text,
        finish_reason=finish_reason,
        reward=reward,
        continues=continues,
        unparsable=unparsable,
        reward_parts=parts,
        figures=figures,
        step_rewards=[StepReward(*step) for step in steps],
        shown_prompt=shown_prompt,
        routes=routes,
    )


def _bytes_of(kind: str, values: Iterable[Any]) -> bytes:
    numbers = array(kind, values)
    if not NATIVE:
        numbers.byteswap()
    return numbers.tobytes()


def _list_of(kind: str, data: bytes) -> list[Any]:
    numbers = array(kind)
    numbers.frombytes(data)
    if not NATIVE:
        numbers.byteswap()
    return numbers.tolist()


def _not_plain(value: Any, depth: int) -> str:
    """The problem of a field; empty if it can be packed."""
    if value is None or isinstance(value, str | int | float | bytes):  # a bool is an int
        return ""
    if not depth:
        return f"is nested more than {FIELD_DEPTH} deep"
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        key = next((key for key in value if not isinstance(key, str)), "")
        if not isinstance(key, str):
            return f"has the key {key!r}, a {type(key).__name__}"
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    else:
        return f"is a {type(value).__name__}"
    return next((problem for one in inner if (problem := _not_plain(one, depth - 1))), "")
