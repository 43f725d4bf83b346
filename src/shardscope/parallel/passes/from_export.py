"""Reads a torch.export program into a ShardingGraph, after making it functional."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, final

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputKind
from torch.fx.node import Target

from shardscope._torch.dispatch import (
    OpOverload,
    is_higher_order,
    is_overload,
    name_arguments,
    op_schema,
)
from shardscope._torch.export import expression_of
from shardscope._torch.tree import leaves
from shardscope.attribution.call_sites import user_line
from shardscope.parallel.ir.graph import (
    Attribute,
    Op,
    OpNode,
    Origin,
    Reshard,
    Role,
    RoleKind,
    ShardingGraph,
    SymbolicSizes,
    Value,
    map_nest,
)
from shardscope.parallel.sharding_rules.grouped_mm import grouped_mm

_INPUT_KINDS: dict[InputKind, RoleKind] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.CUSTOM_OBJ: "object",
    InputKind.TOKEN: "token",
    InputKind.USER_INPUT: "input",
}
_CONVERSIONS = (torch.ops.aten.to.dtype, torch.ops.aten.type_as.default)
# They write to their running statistics though their schemas do not declare it.
_UNDECLARED_WRITERS = ("aten::batch_norm", "aten::instance_norm")
_GROUPED_MM = "transformers::grouped_mm_fallback"
_COPIED_META = ("nn_module_stack", "stack_trace", "source_fn_stack", "torch_fn")
# Checks of dtype and device, which partitioning does not change.
_ASSERTIONS = ("aten::_assert_tensor_metadata",)


def make_functional(program: ExportedProgram) -> ExportedProgram:
    """The program without in-place ops and no_grad() regions; itself if it has none."""
    if not any(_is_unfunctional(node) for node in program.graph.nodes):
        return program
    simpler = _without_gradient_regions(program)
    if not any(_is_unfunctional(node) for node in simpler.graph.nodes):
        return simpler
    with _detached_regions(program.graph), warnings.catch_warnings():
        # Torch copies its own tree specs in a way that it warns of.
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        functional: ExportedProgram = program.run_decompositions(_decompositions(program.graph))
    return functional


def _decompositions(graph: fx.Graph) -> dict[OpOverload, Callable[..., object]]:
    """Decompositions of ops that torch keeps, though they hide a write or have no gradient."""
    table: dict[OpOverload, Callable[..., object]] = {torch.ops.aten.copy.default: _copy}
    table |= {node.target: grouped_mm for node in graph.nodes if _is_grouped_mm(node)}
    norm = torch.ops.aten.instance_norm.default
    calls = [node for node in graph.nodes if node.target is norm]
    norms = [name_arguments(norm, call.args, call.kwargs) for call in calls]
    if any(
        arguments["running_mean"] is not None and arguments["use_input_stats"]
        for arguments in norms
    ):
        table[norm] = _instance_norm
    return table


def _instance_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    """As a batch norm with a channel per sample and channel; running statistics are averaged."""
    num_samples, num_channels = input.shape[:2]
    wide = input.reshape(1, num_samples * num_channels, *input.shape[2:])
    mean, var, scale, shift = (
        None if tensor is None else tensor.repeat(num_samples)
        for tensor in (running_mean, running_var, weight, bias)
    )
    result = torch.batch_norm(
        wide, scale, shift, mean, var, use_input_stats, momentum, eps, cudnn_enabled
    )
    if use_input_stats:
        for old, new in ((running_mean, mean), (running_var, var)):
            if old is not None and new is not None:
                old.copy_(new.view(num_samples, num_channels).mean(0))
    return result.view(input.shape)


def _is_grouped_mm(node: fx.Node) -> bool:
    """Whether it is the op with which transformers exports experts that are not in bfloat16.

    Unlike ours, it cannot be differentiated on fake tensors.
    """
    return is_overload(node.target) and op_schema(node.target).name == _GROUPED_MM


def _copy(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """A differentiable `aten.copy`: torch's own decomposition has no gradient."""
    return src.to(self.device, self.dtype).expand(self.shape)


def _is_unfunctional(node: fx.Node) -> bool:
    if node.op != "call_function" or not (is_overload(node.target) or is_higher_order(node.target)):
        return False
    if is_higher_order(node.target) or _is_grouped_mm(node):
        return True
    schema = op_schema(node.target)
    return bool(schema.is_mutable) or schema.name in _UNDECLARED_WRITERS


@contextmanager
def _detached_regions(graph: fx.Graph) -> Iterator[None]:
    """Detach the results of no_grad() regions while the program is made functional.

    Making it functional removes the regions. The graph is restored afterwards.
    """
    regions = [node for node in graph.nodes if _disables_gradients(node)]
    items = [user for node in regions for user in node.users if user.target is operator.getitem]
    detached = [_detach_after(graph, item) for item in items if _is_tensor(item)]
    try:
        yield
    finally:
        for node in detached:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)


def _without_gradient_regions(program: ExportedProgram) -> ExportedProgram:
    """The program with its no_grad() regions inlined and detached, and without detach_().

    Most models have nothing else that is not functional, and `run_decompositions` traces the
    program again, which takes longer than everything else that is done for a forward pass.
    """
    inliner = _Inliner({node.name for node in program.graph.nodes})
    for node in program.graph.nodes:
        inliner.copy(node, program.graph_module)
    return ExportedProgram(
        root=program.graph_module,
        graph=inliner.graph,
        graph_signature=program.graph_signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )


@final
class _Inliner:
    """Copies nodes into a new graph; those of the program keep their names."""

    def __init__(self, names: set[str]) -> None:
        self.graph = fx.Graph()
        self._taken = set(names)
        self._copies: dict[fx.Node, Any] = {}  # the new node; for a region, its results

    def copy(self, node: fx.Node, owner: fx.GraphModule) -> None:
        """Copy a node of the program; instead of a region, all of its nodes."""
        region = _simple_region(node, owner)
        if region is not None:
            self._inline(node, region)
        elif node.target is operator.getitem and isinstance(self._copies[node.args[0]], tuple):  # type: ignore[index]
            self._take_result(node)
        else:
            self._copies[node] = self._copy_node(node, node.name)

    def _copy_node(self, node: fx.Node, name: str) -> fx.Node:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._copies.__getitem__)
        target = node.target
        if target is torch.ops.aten.detach_.default and len(node.all_input_nodes[0].users) == 1:
            target = torch.ops.aten.detach.default
        copied = self.graph.create_node(node.op, target, args, kwargs, name, node.type)
        # Inputs have the names of the model's arguments, which fx changes if they are a builtin's.
        copied.name = name
        copied.meta = copy(node.meta)
        return copied

    def _inline(self, node: fx.Node, region: fx.GraphModule) -> None:
        arguments = iter(node.args[2:])
        for inner in region.graph.nodes:
            if inner.op == "placeholder":
                self._copies[inner] = self._copies[next(arguments)]  # type: ignore[index]
            elif inner.op == "output":
                results = fx.node.map_arg(inner.args[0], self._copies.__getitem__)
                self._copies[node] = (tuple(results), node.args[0] is False)
            else:
                name = f"{node.name}_{inner.name}"
                while name in self._taken:
                    name += "_"
                self._taken.add(name)
                self._copies[inner] = self._copy_node(inner, name)

    def _take_result(self, node: fx.Node) -> None:
        results, is_detached = self._copies[node.args[0]]  # type: ignore[index]
        result = results[node.args[1]]
        op = torch.ops.aten.detach.default if is_detached else torch.ops.aten.alias.default
        if not isinstance(result, fx.Node) or not _is_tensor(node):
            self._copies[node] = result
            return
        self._copies[node] = self.graph.create_node("call_function", op, (result,), name=node.name)
        self._copies[node].meta = copy(node.meta)


def _simple_region(node: fx.Node, owner: fx.GraphModule) -> fx.GraphModule | None:
    """The graph of a region that switches gradients on or off and contains only ops."""
    if not _sets_gradients(node):
        return None
    region: fx.GraphModule = getattr(owner, str(node.args[1].target))  # type: ignore[union-attr]
    inner_nodes = [
        inner_node
        for inner_node in region.graph.nodes
        if inner_node.op not in ("placeholder", "output")
    ]
    is_simple = all(
        inner_node.op == "call_function" and not is_higher_order(inner_node.target)
        for inner_node in inner_nodes
    )
    return (
        region
        if is_simple and all(isinstance(argument, fx.Node) for argument in node.args[2:])
        else None
    )


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _sets_gradients(node: fx.Node) -> bool:
    name = "wrap_with_set_grad_enabled"
    return is_higher_order(node.target) and node.target.name() == name  # type: ignore[union-attr]


def _disables_gradients(node: fx.Node) -> bool:
    return _sets_gradients(node) and node.args[0] is False


def _detach_after(graph: fx.Graph, node: fx.Node) -> fx.Node:
    with graph.inserting_after(node):
        detached = graph.call_function(torch.ops.aten.detach.default, (node,))
    detached.meta = copy(node.meta)
    node.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached)
    return detached


def read_program(program: ExportedProgram) -> ShardingGraph:
    """The graph of a functional program, without its getitem nodes and assertions."""
    return _Reader(program).read()


@final
class _Reader:
    def __init__(self, program: ExportedProgram) -> None:
        self._program = program
        self._values: dict[fx.Node, Any] = {}
        self._inputs: list[tuple[Value, Role]] = []
        self._op_nodes: list[OpNode | Reshard] = []

    def read(self) -> ShardingGraph:
        specs = {spec.arg.name: spec for spec in self._program.graph_signature.input_specs}
        outputs: list[tuple[Any, Role]] = []
        for node in self._program.graph.nodes:
            if node.op == "placeholder":
                self._read_placeholder(node, specs[node.name])
            elif node.op == "call_function":
                self._read_call(node)
            elif node.op == "get_attr":
                attribute = operator.attrgetter(str(node.target))(self._program.graph_module)
                self._values[node] = Attribute(str(node.target), attribute)
            elif node.op == "output":
                outputs = self._read_outputs(node)
        graph = ShardingGraph(inputs=self._inputs, op_nodes=self._op_nodes, outputs=outputs)
        for value, _ in graph.inputs:
            graph.sizes.learn(value.example)
        return graph

    def _read_placeholder(self, node: fx.Node, spec: InputSpec) -> None:
        value = _make_value(node.name, node.meta.get("val"), SymbolicSizes())
        self._values[node] = value
        self._inputs.append((value, Role(_INPUT_KINDS[spec.kind], spec.target or node.name)))

    def _read_outputs(self, node: fx.Node) -> list[tuple[Any, Role]]:
        outputs = map_nest(node.args[0], self._value_of)
        roles = _output_roles(self._program.graph_signature)
        return list(zip(outputs, roles, strict=True))

    def _read_call(self, node: fx.Node) -> None:
        if node.target is operator.getitem and not isinstance(self._value_of(node.args[0]), Value):
            self._values[node] = self._value_of(node.args[0])[node.args[1]]
            return
        if is_overload(node.target) and op_schema(node.target).name in _ASSERTIONS:
            return
        unchanged = self._unchanged(node)
        if unchanged is not None:
            self._values[node] = unchanged
            return
        result = read_result(node.name, node.meta.get("val"))
        self._values[node] = result
        op = lower_op(node.target)
        arguments = name_arguments(op, node.args, node.kwargs)
        self._op_nodes.append(
            OpNode(
                op=op,
                arguments=map_nest(arguments, self._value_of),
                outputs=[leaf for leaf in leaves(result) if isinstance(leaf, Value)],
                result=result,
                origin=origin_of(node),
            )
        )

    def _unchanged(self, node: fx.Node) -> Value | None:
        """The argument of a conversion that already has the dtype and device; else None."""
        if node.target not in _CONVERSIONS or not isinstance(node.args[0], fx.Node):
            return None
        before, after = node.args[0].meta["val"], node.meta["val"]
        is_plain = len(node.args) == 2 and not node.kwargs
        if not is_plain or before.dtype != after.dtype or before.device != after.device:
            return None
        value = self._values[node.args[0]]
        return value if isinstance(value, Value) else None

    def _value_of(self, item: Any) -> Any:
        return self._values[item] if isinstance(item, fx.Node) else item


def _output_roles(signature: ExportGraphSignature) -> list[Role]:
    roles: list[Role] = []
    for index, spec in enumerate(signature.output_specs):
        if spec.kind is OutputKind.USER_OUTPUT:
            num_before = sum(role.kind == "output" for role in roles)
            roles.append(Role("output", str(num_before)))
        else:
            is_input = spec.kind is OutputKind.USER_INPUT_MUTATION
            kind: RoleKind = "input mutation" if is_input else "mutation"
            roles.append(Role(kind, str(spec.target or index)))
    return roles


def origin_of(node: fx.Node) -> Origin:
    """The module calls and the line of the user's program that a node comes from."""
    stack = node.meta.get("nn_module_stack") or {}
    calls = tuple((str(key), str(name)) for key, (name, _) in stack.items())
    return Origin(
        node=node.name,
        op=str(node.target),
        module=calls[-1][1] if calls else "",
        line=user_line(node.meta.get("stack_trace") or ""),
        calls=calls,
        meta={key: node.meta[key] for key in _COPIED_META if key in node.meta},
    )


def lower_op(op: Target) -> Op:
    """The op to use in ranks' programs: reshape instead of view, else the op itself.

    Kernels may return other strides than those that the program was traced with.
    """
    assert not isinstance(op, str), f"{op} is not a function"
    return torch.ops.aten.reshape.default if op is torch.ops.aten.view.default else op


def read_result(name: str, val: Any, sizes: SymbolicSizes | None = None) -> Any:
    """New values for a node's result, from its `meta["val"]`, nested as that is."""
    if isinstance(val, (list, tuple)):
        return [read_result(f"{name}_{i}", item, sizes) for i, item in enumerate(val)]
    return None if val is None else _make_value(name, val, sizes or SymbolicSizes())


def _make_value(name: str, val: object, sizes: SymbolicSizes) -> Value:
    if isinstance(val, torch.Tensor):
        shape = tuple(sizes.rewrite(expression_of(size)) for size in val.shape)
        return Value(name, shape=shape, dtype=val.dtype, example=val)
    return Value(name, scalar=sizes.rewrite(expression_of(val)), example=val)
