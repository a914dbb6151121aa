"""Compares tensors, by name, with those of the model that the samplers load.

Called before a run, on checkpoints, and in the trainer's process, on what a trainer of the user publishes. Must not
import torch when it is loaded: every process of a run loads it with the plan.
"""

import sys
from collections.abc import Mapping
from typing import Any

from engine.errors import EngineError

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each tensor by its name."""
TYPES = ("float32", "bfloat16", "float16")


def first_difference(ours: Shapes, theirs: Shapes) -> str:
    """The first tensor of which one side has none, or one of another shape, in words; empty if both sides fit. `ours`:
    of the model's files; empty: unknown. Tensors outside numbered layers may be missing, because they are tied."""
    for name in sorted({*ours, *theirs}) if ours else ():
        found, expected = (list(shapes[name]) if name in shapes else None for shapes in (theirs, ours))
        in_a_layer = any(part.isdigit() for part in name.split("."))
        if found != expected and (in_a_layer or None not in (found, expected)):
            return f"{name} has shape {found}, but {expected} in model.path"
    return ""


def zeros_of(shapes: Shapes) -> dict[str, Any]:
    """Synthetic weights in float32, without memory of their own before they are written."""
    import torch

    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def require_named_tensors(ours: Shapes, weights: Any) -> None:
    """Raises: `EngineError` that names the first reason why the built-in samplers cannot install what `weights`
    returned. `ours`: see `first_difference`."""
    problem = _problem(ours, weights)
    if problem:
        law = f"weights() must return a dict of the model's tensors by name; {problem}"
        raise EngineError(law)


def _problem(ours: Shapes, weights: Any) -> str:
    import torch

    if not isinstance(weights, Mapping):
        return f"it returned a {type(weights).__name__}"
    if not weights:
        return "it returned an empty one"
    for name, value in weights.items():
        if not isinstance(name, str) or not name:
            return f"a name is {name!r:.80}, not a text"
        if not isinstance(value, torch.Tensor):
            return f"{name} is a {type(value).__name__}, not a torch.Tensor"
        kind = str(value.dtype).removeprefix("torch.")
        if value.is_sparse or (kind not in TYPES and name in ours):
            return f"{name} is a {'sparse' if value.is_sparse else kind} tensor, not a dense one of {', '.join(TYPES)}"
    difference = first_difference(ours, {name: tuple(value.shape) for name, value in weights.items()})
    if difference:
        return difference.replace("has shape None, but", "is missing; it has shape")
    for name, value in weights.items() if ours else ():
        if name not in ours and not any(_is_same(value, weights[other]) for other in ours if other in weights):
            return f"{name} is not a tensor of the model"
    return _not_finite(weights)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two tensors are one tensor with two names, which the model ties."""
    alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return alike and bool(one.equal(other))


def require_finite(weights: Any) -> None:
    """Raises: `EngineError` if `weights` returned a dict with a tensor that has a NaN or an infinity. Accepts anything
    else, because only a custom generator reads it."""
    problem = _not_finite(weights) if isinstance(weights, Mapping) and "torch" in sys.modules else ""
    if problem:
        raise EngineError(f"weights() must return finite tensors; {problem}")


def _not_finite(weights: Mapping[Any, Any]) -> str:
    """Names the first tensor with a NaN or an infinity. Reads each value once and copies none."""
    import torch

    for name, value in weights.items():
        tensor = isinstance(value, torch.Tensor) and str(value.dtype).removeprefix("torch.") in TYPES and value.numel()
        if tensor and not all(bound.isfinite() for bound in value.aminmax()):
            return f"{name} has a value that is not finite"
    return ""
