"""Tensors in the safetensors files of a model, read part by part and written under the names that the files use.

transformers has one tensor for all experts of a layer, but files have several for each expert. `matching` says which
tensors of the files make up each tensor of a model, so that a rank reads only its own experts and a checkpoint has the
names of the files. Called by `model_files` and `model_checkpoint`. Nothing here is ever unpickled.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file. Indexing reads that part of it."""

    file: str
    name: str
    shape: torch.Size

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        with safe_open(self.file, framework="pt") as opened:  # closed again: pages that are mapped count as memory
            part: Tensor = opened.get_slice(self.name)[rows]
        return part

    @property
    def names(self) -> list[str]:
        return [self.name]

    def divide(self, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What the files have of a whole tensor, by name."""
        yield self.name, whole.contiguous()


@dataclass(frozen=True, slots=True)
class StackedTensor:
    """A tensor that files have in pieces: for each index of its first dimension one or several, which follow one
    another in its second. Indexing reads the pieces of these indices."""

    pieces: tuple[tuple[StoredTensor, ...], ...]

    @property
    def shape(self) -> torch.Size:
        first = self.pieces[0]
        return torch.Size([len(self.pieces), sum(piece.shape[0] for piece in first), *first[0].shape[1:]])

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        chosen = self.pieces if rows is ... else self.pieces[rows]
        return torch.stack([torch.cat([piece[...] for piece in pieces]) for pieces in chosen])

    @property
    def names(self) -> list[str]:
        return [piece.name for pieces in self.pieces for piece in pieces]

    def divide(self, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        for pieces, own in zip(self.pieces, whole, strict=True):
            parts = own.split([piece.shape[0] for piece in pieces])
            yield from ((piece.name, part.clone()) for piece, part in zip(pieces, parts, strict=True))


Stored: TypeAlias = StoredTensor | StackedTensor


def stored_tensors(path: str) -> dict[str, StoredTensor]:
    """The tensors in the safetensors files of a model, which is a directory, or a name that transformers resolves; none
    if it has no such files."""
    found: dict[str, StoredTensor] = {}
    for file in _files_of(path):
        with safe_open(file, framework="pt") as opened:
            shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
        found |= {name: StoredTensor(file, name, torch.Size(shape)) for name, shape in shapes.items()}
    return found


def _files_of(path: str) -> list[str]:
    def resolved(name: str) -> str | None:
        file: str | None = cached_file(
            path, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_gated_repo=False
        )
        return file

    whole = resolved(SAFE_WEIGHTS_NAME)
    if whole is not None:
        return [whole]
    index = resolved(SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        return []
    names = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()
    return [file for name in sorted(set(names)) if (file := resolved(name)) is not None]


def matching(stored: Mapping[str, StoredTensor], model: PreTrainedModel) -> dict[str, Stored] | None:
    """What is stored of each tensor of a model, by the model's names; tied tensors may be stored under one of theirs.
    None if a tensor is not stored or has another shape: transformers converts it in another way, or it is of another
    model."""
    own = named_tensors(model)
    files = {**_converted(stored, model), **stored}
    names: dict[int, list[str]] = {}
    for name, value in own.items():
        names.setdefault(id(value), []).append(name)
    found: dict[str, Stored] = {}
    for tied in names.values():
        copies = [files[name] for name in tied if name in files]
        if not copies or any(copy.shape != own[tied[0]].shape for copy in copies):
            return None
        if any(not _equal(copies[0], copy) for copy in copies[1:]):  # then transformers does not tie them
            return None
        found |= dict.fromkeys(tied, copies[0])
    return found


def _converted(stored: Mapping[str, StoredTensor], model: PreTrainedModel) -> dict[str, Stored]:
    """The tensors that transformers makes of the files' by giving them other names and by stacking them, by the names
    they get; without those that it converts in another way."""
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    found: dict[str, Stored] = {}
    pieces: dict[str, dict[str, list[StoredTensor]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters)
        if pattern is None:
            found[target] = stored[name]
        else:
            pieces[target][pattern].append(stored[name])
    for target, by_pattern in pieces.items():
        converter = next(each for each in converters if set(by_pattern) <= set(each.source_patterns))
        lists = [by_pattern[pattern] for pattern in converter.source_patterns]
        if _stacks(converter) and len({len(each) for each in lists}) == 1:
            found[target] = StackedTensor(tuple(zip(*lists, strict=True)))
    return found


def _stacks(converter: WeightConverter) -> bool:
    """Whether it stacks tensors along a new first dimension and joins the stacks along the second."""
    merge, *join = converter.operations
    if not isinstance(merge, MergeModulelist) or merge.dim != 0:
        return False
    if not join:
        return len(converter.source_patterns) == 1
    return len(join) == 1 and isinstance(join[0], Concatenate) and join[0].dim == 1


def _equal(one: Stored, other: Stored, rows: int = 4096) -> bool:
    parts = [slice(start, start + rows) for start in range(0, one.shape[0], rows)]
    return all(torch.equal(one[part], other[part]) for part in parts)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Everything in the model's `state_dict`, with the parameters themselves."""
    known = dict(model.named_parameters(remove_duplicate=False))
    known |= dict(model.named_buffers(remove_duplicate=False))
    return {name: known[name] for name in model.state_dict()}
