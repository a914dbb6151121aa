"""The results of the user's functions, checked before anything uses them.

Called by the train step at each call, and by `objective_check.py` on synthetic tensors.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.training.custom_functions import CustomFunction


def parts_of(custom: CustomFunction, found: Any, like: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The values and the metrics of a result: each has the shape of `like`, and the values have its type.

    Raises: `ConfigError` for another form.
    """
    values, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise custom.refuse(f"returned metrics of type {type(metrics).__name__}, not {{name: Tensor}}")
    for name, metric in metrics.items():
        _require(custom, metric, like, f"returned for the metric {name!r}")
    values = _require(custom, values, like, "returned")
    if values.dtype != like.dtype:
        raise custom.refuse(f"returned {_name(values.dtype)}, not {_name(like.dtype)}")
    return values, metrics


def _require(custom: CustomFunction, found: Any, like: Tensor, returned: str) -> Tensor:
    if not isinstance(found, Tensor):
        raise custom.refuse(f"{returned} a value of type {type(found).__name__}, not a Tensor")
    if found.shape != like.shape:
        law = f"{returned} the shape {[*found.shape]} for {len(like)} {custom.items}"
        if not found.dim():
            law += "; it must not average: trainer.aggregation says how the engine does"
        raise custom.refuse(law)
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
