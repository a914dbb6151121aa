"""Finds the files of a model and describes it without loading it: tensor shapes, the type of its numbers, its tokens.

Called by `inputs.py`. The files of a hub name are found if its model is in the local hub cache; nothing is downloaded.
"""

import json
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from engine.training.named_tensors import Shapes


def files_of(model: str) -> Path | None:
    """The directory with the files of a model, given as a path or as a hub name in the local cache; None if there is
    none."""
    if Path(model).is_dir():
        return Path(model)
    if find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # a path that does not exist
        return None
    return Path(found).parent if isinstance(found, str) else None


def read_json(file: Path) -> Any:
    """The content of a file; None if it cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def number_bytes(directory: Path) -> int:
    """Bytes of a number of the model, as `config.json` names its type. Without a type it is float32."""
    return 2 if _described(directory, "dtype", "torch_dtype") in ("bfloat16", "float16") else 4


def describes_experts(directory: Path) -> bool:
    """Whether `config.json` describes a mixture of experts."""
    return bool(_described(directory, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"))


def _described(directory: Path, *names: str) -> Any:
    """The value of the first of these fields that is set in `config.json` or in its `text_config`; None if none is."""
    plain = read_json(directory / "config.json")
    if not isinstance(plain, dict):
        return None
    parts = (plain, plain.get("text_config") or {})
    return next(filter(None, (part.get(name) for part in parts for name in names)), None)


def vocabulary(directory: Path) -> dict[str, int] | None:
    """Token ids by their text, from tokenizer.json; None if it cannot be read or has another format."""
    try:
        plain = read_json(directory / "tokenizer.json")
        found = plain["model"]["vocab"]
        tokens = dict(found) if isinstance(found, dict) else {token: id for id, (token, _) in enumerate(found)}
        return tokens | {added["content"]: added["id"] for added in plain["added_tokens"]}
    except (KeyError, TypeError, ValueError):
        return None


def tensor_shapes(directory: Path) -> Shapes:
    """The shape of each tensor in the model's safetensors files, by its name; empty if the files cannot be read, or
    some of them are not downloaded."""
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        index = read_json(directory / "model.safetensors.index.json")
        if index is not None and not all((directory / name).is_file() for name in index["weight_map"].values()):
            return {}
        for file in sorted(directory.glob("*.safetensors")):
            shapes |= _shapes_in(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return shapes


def numbers_in(shapes: Shapes) -> int:
    return sum(map(prod, shapes.values()))


def _shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """The header of a safetensors file: 8 bytes of length, then JSON."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError("not a safetensors file")
        header = json.loads(opened.read(length))
    return {name: tuple(map(int, tensor["shape"])) for name, tensor in header.items() if name != "__metadata__"}
