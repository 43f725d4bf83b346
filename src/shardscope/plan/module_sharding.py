"""How colwise and rowwise shard the modules of torch and of transformers, by class."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import final

from torch import nn

from shardscope.plan.placements import Placement, Replicate, Shard
from shardscope.plan.styles import Way


@final
@dataclass(frozen=True)
class ModuleSharding:
    """How a style shards a kind of module: the dim of each tensor, and its input and output."""

    dims: Mapping[str, int] = field(default_factory=dict)  # other tensors stay replicated
    input: Placement | None = None
    output: Placement | None = None


ClassShardings = Mapping[Way, ModuleSharding]
"""How the modules of a class are sharded by column and by row, if they can be."""

_REPLICATE, _SHARD_LAST = Replicate(), Shard(-1)

LINEAR: ClassShardings = {
    "column": ModuleSharding({"weight": 0, "bias": 0}, _REPLICATE, _SHARD_LAST),
    "row": ModuleSharding({"weight": 1}, _SHARD_LAST, _REPLICATE),
}
TRANSPOSED_LINEAR: ClassShardings = {
    "column": ModuleSharding({"weight": 1, "bias": 0}, _REPLICATE, _SHARD_LAST),
    "row": ModuleSharding({"weight": 0}, _SHARD_LAST, _REPLICATE),
}
_EMBEDDING: ClassShardings = {
    "column": ModuleSharding({"weight": 1}, _REPLICATE, _SHARD_LAST),
    "row": ModuleSharding({"weight": 0}, _REPLICATE, _REPLICATE),
}
_BILINEAR: ClassShardings = {
    "column": ModuleSharding({"weight": 0, "bias": 0}, _REPLICATE, _SHARD_LAST)
}

# By the name of a class or of a base class. Torch's convolutions also take images without a
# batch, so their channels are counted from the back.
_CONV = re.compile(r"\w*Conv(Transpose)?([123])d")
_SHARDINGS_BY_CLASS = (
    (re.compile(r"transformers\.pytorch_utils\.Conv1D"), TRANSPOSED_LINEAR),
    (re.compile(r"(?:.*\.)?\w*Embedding(?:Bag)?"), _EMBEDDING),
    (re.compile(r"(?:.*\.)?\w*Bilinear"), _BILINEAR),
    (re.compile(r"(?:.*\.)?\w*Linear"), LINEAR),
)


def class_names(module_class: type) -> tuple[str, ...]:
    """The dotted names of a module's class and of its bases, without nn.Module and its own."""
    bases = takewhile(lambda base: base is not nn.Module, module_class.__mro__[1:])
    return tuple(f"{base.__module__}.{base.__qualname__}" for base in (module_class, *bases))


def torch_first(names: Iterable[str]) -> list[str]:
    """Names of a class and its bases, torch's own first: `PatchEmbedding(nn.Linear)` is linear."""
    return sorted(names, key=lambda name: not name.startswith("torch.nn."))


def weight_dim(way: Way, module_class: type, tensor: str) -> int | None:
    """The dim of a module's weight or bias that is sharded, or None if the class is not known."""
    shardings = map(find_class_shardings, torch_first(class_names(module_class)))
    known = next((sharding for sharding in shardings if sharding is not None), {})
    return known[way].dims.get(tensor) if way in known else None


def find_class_shardings(name: str) -> ClassShardings | None:
    """How modules of the class with this dotted name are sharded, or None if it is not known."""
    if match := _CONV.fullmatch(name.rpartition(".")[2]):
        return _conv_shardings(int(match[2]), is_transposed=match[1] is not None)
    return next(
        (shardings for pattern, shardings in _SHARDINGS_BY_CLASS if pattern.fullmatch(name)), None
    )


def _conv_shardings(num_dims: int, *, is_transposed: bool) -> ClassShardings:
    out_dim, in_dim = (1, 0) if is_transposed else (0, 1)
    channels = Shard(-1 - num_dims)
    return {
        "column": ModuleSharding({"weight": out_dim, "bias": 0}, _REPLICATE, channels),
        "row": ModuleSharding({"weight": in_dim}, channels, _REPLICATE),
    }
