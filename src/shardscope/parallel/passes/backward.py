"""The joint graph of one rank: the forward pass and the gradients of its parameters, simplified."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import Argument

from shardscope._torch.dispatch import is_overload
from shardscope._torch.export import expression_of, fake_mode_of
from shardscope._torch.export import traced as without_data
from shardscope.errors import ParallelError
from shardscope.parallel.ir.graph import (
    Role,
    ShardingGraph,
    Value,
    explained,
    symbols_in,
    values_in,
)
from shardscope.parallel.ir.shard_spec import MeshCoordinate
from shardscope.parallel.passes.exported import local_example
from shardscope.parallel.passes.lower import RankProgram
from shardscope.plan.placements import Size

_aten = torch.ops.aten
_ALIASES = (_aten.detach.default, _aten.alias.default)
_VIEWS = ("view.default", "_unsafe_view.default")
_TRANSPOSES = ("t.default", "transpose.int")
_DEDUPLICATED = (*_VIEWS, *_TRANSPOSES, "permute.default", "unsqueeze.default", "expand.default")


def eliminate_noops(graph: fx.Graph) -> None:
    """Remove aliases and inverse transposes, merge views of views, and deduplicate views."""
    seen: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_overload(node.target):
            continue
        _merge_views(node)
        alias = _find_alias(node)
        if alias is None:
            key = _view_key(node)
            alias = None if key is None else seen.setdefault(key, node)
        if alias is not None and alias is not node:
            node.replace_all_uses_with(alias)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def relax_views(graph: fx.Graph) -> None:
    """Replace view by reshape, which copies where it must.

    Whether a view is possible was decided on the strides of fake tensors, and kernels do not
    always return the strides that their meta functions compute: attention's depend on its mask.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.view.default):
        node.target = _aten.reshape.default


def move_to_cpu(graph: fx.Graph) -> None:
    """Create tensors on the CPU wherever the graph names a device, and drop its device checks.

    For programs of fake tensors, which are verified on generated data.
    """
    for node in list(graph.nodes):
        if _op_name(node).startswith("_assert_tensor_metadata"):
            graph.erase_node(node)
            continue
        node.args = fx.node.map_aggregate(node.args, _on_cpu)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _on_cpu)


def _on_cpu(item: Argument) -> Argument:
    return torch.device("cpu") if isinstance(item, torch.device) else item


def _find_alias(node: fx.Node) -> fx.Node | None:
    """The earlier node that has the same value; None if this one computes something."""
    if node.target in _ALIASES:
        return node.all_input_nodes[0]
    name = _op_name(node)
    if name in _VIEWS and _shape(node) == _shape(node.args[0]):
        return _as_node(node.args[0])
    source = node.args[0] if name in _TRANSPOSES else None
    if isinstance(source, fx.Node) and source.target is node.target:
        is_inverse = set(map(str, source.args[1:])) == set(map(str, node.args[1:]))
        return _as_node(source.args[0]) if is_inverse else None
    return None


def _merge_views(node: fx.Node) -> None:
    """Let a view of a view read the first view's input instead."""
    if _op_name(node) not in _VIEWS:
        return
    source = node.args[0]
    while isinstance(source, fx.Node) and _op_name(source) in _VIEWS:
        source = source.args[0]
    node.update_arg(0, source)


def _view_key(node: fx.Node) -> Hashable | None:
    """A key that equal views share; None for nodes that are no views."""
    if _op_name(node) not in _DEDUPLICATED or node.kwargs:
        return None
    return (_op_name(node), *map(_as_key, node.args))


def _as_key(item: object) -> Hashable:
    return tuple(map(_as_key, item)) if isinstance(item, (list, tuple)) else item


def unalias_outputs(graph: fx.Graph, start: int) -> None:
    """Give each output from `start` on a contiguous storage of its own.

    Optimizers change gradients in place, and two gradients may be one tensor in the program.
    """
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    taken = [_storage(node) for node in graph.nodes if node.op == "placeholder"]
    taken += [_storage(result) for result in results[:start]]
    for index, node in enumerate(results[start:], start):
        storage = _storage(node)
        if storage is not None and (_is_in(storage, taken) or not _is_dense(node.meta["val"])):
            with graph.inserting_before(output):
                results[index] = graph.call_function(
                    _aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
                )
                results[index].meta["val"] = node.meta["val"]
        taken.append(storage)
    output.args = (results,)


def _is_in(storage: torch.UntypedStorage, storages: list[torch.UntypedStorage | None]) -> bool:
    return any(candidate is storage for candidate in storages)


def _is_dense(value: Tensor) -> bool:
    """Whether the tensor is non-overlapping and dense."""
    sizes = sorted(zip(value.stride(), value.shape, strict=True), key=lambda pair: int(pair[0]))
    expected = 1
    for stride, size in sizes:
        if size != 1 and stride != expected:
            return False
        expected = expected * size
    return True


def _storage(node: object) -> torch.UntypedStorage | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.untyped_storage() if isinstance(value, Tensor) else None


def _op_name(node: fx.Node) -> str:
    """The name of a node's ATen op, such as `view.default`; "" if it calls no overload."""
    if not is_overload(node.target):
        return ""
    return str(node.target).removeprefix("aten.")


def _shape(node: Argument) -> tuple[Size, ...] | None:
    if not isinstance(node, fx.Node):
        return None
    return tuple(expression_of(size) for size in node.meta["val"].shape)


def _as_node(item: Argument) -> fx.Node | None:
    return item if isinstance(item, fx.Node) else None


@final
@dataclass(frozen=True, eq=False)
class JointGraph:
    """A graph that computes the forward outputs and then the gradients of the parameters.

    It takes the forward program's inputs, which must be contiguous. Each gradient has a storage of
    its own.
    """

    graph_module: fx.GraphModule
    num_outputs: int  # before the gradients
    parameters: tuple[str, ...]  # whose gradients follow, in order


def trace_joint(graph: ShardingGraph, rank: RankProgram) -> JointGraph:
    """Differentiate the rank's forward program with respect to its parameters."""
    forward = fx.Interpreter(rank.as_module())
    run = differentiate(graph, forward.run)
    mode = fake_mode_of([value.example for value, _ in graph.inputs])
    is_open = bool(graph.sizes.known)
    with without_data(mode, has_open_sizes=is_open), torch.fx.traceback.preserve_node_meta():
        examples = [_example(value, role, graph, rank.coordinate) for value, role in graph.inputs]
        traced = _trace(run, examples)
    _check_open(graph)
    eliminate_noops(traced.graph)
    relax_views(traced.graph)
    unalias_outputs(traced.graph, start=len(graph.outputs))
    traced.recompile()
    return JointGraph(traced, len(graph.outputs), tuple(trained_parameters(graph)))


def _check_open(graph: ShardingGraph) -> None:
    """Raise ParallelError if differentiating specialized a dynamic size."""
    fixed = [
        size for size in map(expression_of, graph.sizes.known.values()) if not symbols_in(size)
    ]
    if fixed:
        raise ParallelError(
            f"torch {torch.__version__} makes dynamic sizes of the program static when it "
            f"differentiates it ({', '.join(map(str, fixed))} is what they were exported with). "
            "Export it with static sizes, partition it for inference, or use a newer torch."
        )


def _trace(run: Callable[..., list[object]], examples: list[object]) -> fx.GraphModule:
    with explained(
        "the backward pass cannot be traced without data",
        "Replace the op whose gradient depends on values, or parallelize without a loss.",
    ):
        traced: fx.GraphModule = make_fx(run)(*examples)
    return traced


def _example(value: Value, role: Role, graph: ShardingGraph, coordinate: MeshCoordinate) -> object:
    """The rank's fake tensor; for inputs contiguous, because views are traced by strides."""
    example = local_example(value, coordinate, graph.sizes)
    is_input = role.kind == "input"
    return example.contiguous() if is_input and isinstance(example, Tensor) else example


def trained_parameters(graph: ShardingGraph) -> list[str]:
    """The parameters that have gradients, in the program's order."""
    return [role.name for _, role in _trained(graph)]


def differentiate(
    graph: ShardingGraph, forward: Callable[..., Sequence[object]]
) -> Callable[..., list[object]]:
    """A function that returns the outputs of `forward`, then the gradients of its loss."""
    inputs = [value for value, _ in graph.inputs]
    trained_indices = [inputs.index(value) for value, _ in _trained(graph)]
    loss = _loss_index(graph)

    def run(*inputs_and_state: Any) -> list[object]:
        values = list(inputs_and_state)
        for index in trained_indices:
            values[index] = values[index].detach().requires_grad_()
        with torch.enable_grad():
            outputs = forward(*values)
            gradients = torch.autograd.grad(
                _check_loss(outputs[loss]),
                [values[index] for index in trained_indices],
                allow_unused=True,
                materialize_grads=True,
            )
        detached = [output.detach() if isinstance(output, Tensor) else output for output in outputs]
        return [*detached, *gradients]

    return run


def _trained(graph: ShardingGraph) -> list[tuple[Value, Role]]:
    """The trained parameters that the loss depends on; others have no gradient, as in eager."""
    needed = _loss_dependencies(graph)
    return [
        (value, role)
        for value, role in graph.inputs
        if role.kind == "parameter" and value.example_tensor.requires_grad and value in needed
    ]


def _loss_dependencies(graph: ShardingGraph) -> set[Value]:
    needed = set(values_in(graph.outputs[_loss_index(graph)][0]))
    for op_node in reversed(graph.op_nodes):
        if needed.intersection(op_node.outputs):
            needed.update(op_node.inputs)
    return needed


def _check_loss(loss: object) -> Tensor:
    kind = type(loss).__name__
    if isinstance(loss, Tensor):
        if loss.requires_grad and loss.numel() == 1:
            return loss
        kind = f"a tensor of shape {list(loss.shape)}"
        if not loss.requires_grad:
            kind += " that depends on no parameter"
    raise ParallelError(
        f"the program's first output is {kind}, and training begins at one number that depends on "
        "the parameters. Return the loss first, or give parallelize() the model and loss=."
    )


def _loss_index(graph: ShardingGraph) -> int:
    for index, (_, role) in enumerate(graph.outputs):
        if role.kind == "output":
            return index
    raise ParallelError("the program returns nothing, so there is no loss to differentiate.")
