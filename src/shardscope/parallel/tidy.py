"""Takes out of a joint program what autograd put in and nobody needs.

Every value stays what it is: what goes are other names for it, and views that are taken twice.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, fx

from shardscope._torch.dispatch import is_overload
from shardscope._torch.programs import expression_of

__all__ = ["move_to_cpu", "own_outputs", "relax_views", "tidy"]

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)
_VIEWS = ("view.default", "_unsafe_view.default")
_TURNS = ("t.default", "transpose.int")
_SHARED = (*_VIEWS, *_TURNS, "permute.default", "unsqueeze.default", "expand.default")


def tidy(graph: fx.Graph) -> None:
    """Drop other names for values, join views of views, take each view once."""
    seen: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_overload(node.target):
            continue
        _skip_inner_view(node)
        same = _find_same(node)
        if same is None:
            key = _key(node)
            same = None if key is None else seen.setdefault(key, node)
        if same is not None and same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def relax_views(graph: fx.Graph) -> None:
    """Replace view by reshape, which copies where it must.

    Whether a view is possible was decided on the strides of tensors without data, and kernels do
    not always return what their shape functions promise: attention's depend on its mask.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.view.default):
        node.target = _aten.reshape.default


def move_to_cpu(graph: fx.Graph) -> None:
    """Make tensors on the CPU wherever the graph names a device, and drop its device checks.

    For programs of tensors without data, which are run on numbers made up for them.
    """
    for node in list(graph.nodes):
        if _op_name(node).startswith("_assert_tensor_metadata"):
            graph.erase_node(node)
            continue
        node.args = fx.node.map_aggregate(node.args, _on_cpu)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _on_cpu)


def _on_cpu(item: Any) -> Any:
    return torch.device("cpu") if isinstance(item, torch.device) else item


def _find_same(node: fx.Node) -> fx.Node | None:
    """The value that the node only gives another name."""
    if node.target in _SAME:
        return node.all_input_nodes[0]
    name = _op_name(node)
    if name in _VIEWS and _shape(node) == _shape(node.args[0]):
        return _as_node(node.args[0])
    before = node.args[0] if name in _TURNS else None
    if isinstance(before, fx.Node) and before.target is node.target:
        is_turned_back = set(map(str, before.args[1:])) == set(map(str, node.args[1:]))
        return _as_node(before.args[0]) if is_turned_back else None
    return None


def _skip_inner_view(node: fx.Node) -> None:
    """A view of a view is one of what lies behind both: what a view can be is up to its memory."""
    if _op_name(node) not in _VIEWS:
        return
    before = node.args[0]
    while isinstance(before, fx.Node) and _op_name(before) in _VIEWS:
        before = before.args[0]
    node.update_arg(0, before)


def _key(node: fx.Node) -> Hashable | None:
    """What tells a view from others; None for what is computed."""
    if _op_name(node) not in _SHARED or node.kwargs:
        return None
    return (_op_name(node), *map(_plain, node.args))


def _plain(item: Any) -> Hashable:
    return tuple(map(_plain, item)) if isinstance(item, (list, tuple)) else item


def own_outputs(graph: fx.Graph, start: int) -> None:
    """Give each output from `start` on memory of its own, without gaps.

    Gradients are changed in place by whoever gets them, and may be one tensor in the program.
    """
    (last,) = graph.find_nodes(op="output")
    results = list(last.args[0])
    taken = [_storage(node) for node in graph.nodes if node.op == "placeholder"]
    taken += [_storage(one) for one in results[:start]]
    for index, node in enumerate(results[start:], start):
        storage = _storage(node)
        if storage is not None and (_is_in(storage, taken) or not _is_dense(node.meta["val"])):
            with graph.inserting_before(last):
                results[index] = graph.call_function(
                    _aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
                )
                results[index].meta["val"] = node.meta["val"]
        taken.append(storage)
    last.args = (results,)


def _is_in(storage: Any, storages: list[Any]) -> bool:
    return any(one is storage for one in storages)


def _is_dense(value: Tensor) -> bool:
    """Whether every element has a place of its own."""
    sizes = sorted(zip(value.stride(), value.shape, strict=True), key=lambda one: int(one[0]))
    expected = 1
    for stride, size in sizes:
        if size != 1 and stride != expected:
            return False
        expected = expected * size
    return True


def _storage(node: Any) -> torch.UntypedStorage | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.untyped_storage() if isinstance(value, Tensor) else None


def _op_name(node: fx.Node) -> str:
    """`view.default`; nothing for what is no op of ATen's."""
    if not is_overload(node.target):
        return ""
    return str(node.target).removeprefix("aten.")


def _shape(node: Any) -> tuple[Any, ...]:
    return tuple(expression_of(size) for size in node.meta["val"].shape)


def _as_node(item: Any) -> fx.Node | None:
    return item if isinstance(item, fx.Node) else None
