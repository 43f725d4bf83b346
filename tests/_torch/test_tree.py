"""Walking nested containers: order, types of containers, and what is a leaf."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import torch

from shardscope._torch.tree import leaves, map_leaves, map_tensor_leaves, tensor_leaves


class Pair(NamedTuple):
    first: Any
    second: Any


class Outputs(OrderedDict[str, Any]):
    """A dict with an attribute of its own, as models return it."""

    note = ""


def test_leaves_come_in_order() -> None:
    nest = [1, (2, [3]), {"b": 4, "a": Pair(5, None)}, slice(6, None, 7)]
    assert leaves(nest) == [1, 2, 3, 4, 5, None, 6, None, 7]
    assert leaves(1) == [1]
    assert leaves([]) == []


def test_tensors_are_found_among_other_leaves() -> None:
    x, y = torch.ones(1), torch.zeros(2)
    assert [id(t) for t in tensor_leaves(([x], {"y": y}, 1.0, "z"))] == [id(x), id(y)]
    values = torch.max(torch.eye(2), 0)  # a structseq of torch
    assert len(tensor_leaves(values)) == 2


def test_mapping_keeps_the_types_of_containers() -> None:
    outputs = Outputs(a=1)
    outputs.note = "kept"
    default = defaultdict(list, {"c": 2})
    nest = (Pair(0, [1]), outputs, default, slice(1, 2), {"d": ()})
    mapped = map_leaves(lambda leaf: None if leaf is None else leaf + 1, nest)
    assert mapped == (Pair(1, [2]), {"a": 2}, {"c": 3}, slice(2, 3), {"d": ()})
    assert list(map(type, mapped)) == [Pair, Outputs, defaultdict, slice, dict]
    assert mapped[1].note == "kept"
    assert mapped[2].default_factory is list
    assert outputs == {"a": 1}


def test_mapping_tensors_leaves_the_rest() -> None:
    size = torch.Size([2, 3])
    nest = [torch.ones(2), size, 4, None]
    tensor, *rest = map_tensor_leaves(lambda tensor: tensor + 1, nest)
    assert tensor.tolist() == [2, 2]
    assert rest == [size, 4, None]
    assert type(rest[0]) is torch.Size


def test_results_of_torch_keep_their_type() -> None:
    result = map_tensor_leaves(lambda tensor: tensor * 2, torch.max(torch.eye(2), 0))
    assert type(result) is torch.return_types.max
    assert result.values.tolist() == [2, 2]
