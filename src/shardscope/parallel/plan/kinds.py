"""Kinds of modules: which dim of which tensor a style cuts, and how its values then lie."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, final

from shardscope.parallel.placements import Placement, Replicate, Shard, Size
from shardscope.parallel.plan.outline import ModuleOutline

__all__ = ["Cut", "Shapes", "Way", "find_cut", "parameter_dim"]

Way = Literal["column", "row"]
Shapes = Mapping[str, tuple[Size, ...]]
"""The shapes of a module's own tensors, by their names in it."""


@final
@dataclass(frozen=True)
class Cut:
    """What a way of cutting does to a kind of module: dims by tensor, and its values' places."""

    dims: Mapping[str, int] = field(default_factory=dict)  # those not named stay whole
    input: Placement | None = None
    output: Placement | None = None


_WHOLE, _LAST = Replicate(), Shard(-1)

_LINEAR = {
    "column": Cut({"weight": 0, "bias": 0}, _WHOLE, _LAST),
    "row": Cut({"weight": 1}, _LAST, _WHOLE),
}
_TRANSPOSED_LINEAR = {
    "column": Cut({"weight": 1, "bias": 0}, _WHOLE, _LAST),
    "row": Cut({"weight": 0}, _LAST, _WHOLE),
}
_EMBEDDING = {
    "column": Cut({"weight": 1}, _WHOLE, _LAST),
    "row": Cut({"weight": 0}, _WHOLE, _WHOLE),
}
_BILINEAR = {"column": Cut({"weight": 0, "bias": 0}, _WHOLE, _LAST)}

# By the name of a class, or of one that it is made of. Torch's convolutions also take images
# without a batch, so their channels are counted from the back.
_CONV = re.compile(r"\w*Conv(Transpose)?([123])d")
_NAMED = (
    (re.compile(r"transformers\.pytorch_utils\.Conv1D"), _TRANSPOSED_LINEAR),
    (re.compile(r"(?:.*\.)?\w*Embedding(?:Bag)?"), _EMBEDDING),
    (re.compile(r"(?:.*\.)?\w*Bilinear"), _BILINEAR),
    (re.compile(r"(?:.*\.)?\w*Linear"), _LINEAR),
)
_NORM = re.compile(r"(?:.*\.)?\w*Norm(?:[123]d)?")


def find_cut(way: Way, module: ModuleOutline, shapes: Shapes) -> Cut | None:
    """What cutting the module that way means, or None where it means nothing."""
    for name in (module.type_name, *module.bases):
        ways = _ways_named(name)
        if ways is not None:  # a weight that its class lets expect may be computed from others
            return ways.get(way) if _has_weight(ways, shapes) else None
        if _NORM.fullmatch(name):
            return _cut_vectors(way, shapes) if _is_flat(module, shapes) else None
    return _cut_by_rank(way, module, shapes)


def parameter_dim(way: Way, name: str, module: ModuleOutline | None, shapes: Shapes) -> int | None:
    """The dim of one own tensor that the way cuts: as its module is cut, or else by its rank.

    As in a matrix of weights, outputs come before inputs, after whatever is stacked.
    """
    cut = find_cut(way, module, shapes) if module is not None else None
    if cut is not None and name in ("weight", "bias", *cut.dims):
        return cut.dims.get(name)
    num_dims = len(shapes[name])
    if num_dims < 2:
        return 0 if way == "column" and num_dims == 1 else None
    return num_dims - 2 if way == "column" else num_dims - 1


def _ways_named(name: str) -> Mapping[str, Cut] | None:
    if found := _CONV.fullmatch(name.rpartition(".")[2]):
        return _conv_ways(int(found[2]), is_transposed=found[1] is not None)
    return next((ways for pattern, ways in _NAMED if pattern.fullmatch(name)), None)


def _conv_ways(num_dims: int, *, is_transposed: bool) -> Mapping[str, Cut]:
    outwards, inwards = (1, 0) if is_transposed else (0, 1)
    channels = Shard(-1 - num_dims)
    return {
        "column": Cut({"weight": outwards, "bias": 0}, _WHOLE, channels),
        "row": Cut({"weight": inwards}, channels, _WHOLE),
    }


def _has_weight(ways: Mapping[str, Cut], shapes: Shapes) -> bool:
    """Whether the module has the weight that its class lets expect, of enough dims."""
    top = max(cut.dims["weight"] for cut in ways.values())
    return "weight" in shapes and len(shapes["weight"]) > max(top, 1)


def _is_flat(module: ModuleOutline, shapes: Shapes) -> bool:
    return bool(module.parameters) and all(len(shapes[name]) == 1 for name in module.parameters)


def _cut_vectors(way: Way, shapes: Shapes) -> Cut | None:
    """A norm's parameters, and its running statistics, which go by the same channels."""
    if way == "row":
        return None
    return Cut({name: 0 for name, shape in shapes.items() if len(shape) == 1})


def _cut_by_rank(way: Way, module: ModuleOutline, shapes: Shapes) -> Cut | None:
    """Of a class that says nothing: a matrix with perhaps a bias, or vectors alone."""
    if set(module.parameters) - {"bias"} == {"weight"} and len(shapes["weight"]) == 2:
        outwards, inwards = shapes["weight"]
        bias = shapes.get("bias", (outwards,))
        if bias == (outwards,):
            return _LINEAR[way]
        return _TRANSPOSED_LINEAR[way] if bias == (inwards,) else None
    return _cut_vectors(way, shapes) if _is_flat(module, shapes) else None
