"""Reads a torch.export program into a flow."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, final

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind

from shardscope._torch.dispatch import is_higher_order, is_overload, op_schema
from shardscope._torch.programs import expression_of
from shardscope.comm.lines import user_line
from shardscope.parallel.flow import Attribute, Flow, Origin, Role, Step, Value, map_nest
from shardscope.parallel.rules.experts import grouped_mm
from shardscope.parallel.symbols import OpenSizes

__all__ = ["lower_op", "make_functional", "name_arguments", "read_program", "read_result"]

_INPUT_KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.CUSTOM_OBJ: "object",
    InputKind.TOKEN: "token",
    InputKind.USER_INPUT: "input",
}
_CONVERSIONS = (torch.ops.aten.to.dtype, torch.ops.aten.type_as.default)
# They write to their running statistics without saying so in their schemas.
_SECRET_WRITERS = ("aten::batch_norm", "aten::instance_norm")
_GROUPED_MM = "transformers::grouped_mm_fallback"
_KEPT_META = ("nn_module_stack", "stack_trace", "source_fn_stack", "torch_fn")
# What export saw when it traced; dtypes and devices are still as they were.
_DROPPED = ("aten::_assert_tensor_metadata",)


def make_functional(program: ExportedProgram) -> ExportedProgram:
    """The program without in-place ops and regions; as it is where it has none."""
    if not any(_is_unfunctional(node) for node in program.graph.nodes):
        return program
    simpler = _without_gradient_regions(program)
    if not any(_is_unfunctional(node) for node in simpler.graph.nodes):
        return simpler
    with _detached_regions(program.graph), warnings.catch_warnings():
        # Torch copies its own trees of inputs in a way that it warns of.
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        functional: ExportedProgram = program.run_decompositions(_made_of(program.graph))
    return functional


def _made_of(graph: fx.Graph) -> dict[Any, Any]:
    """Ops that torch leaves whole, though they hide a write or have no gradient."""
    table: dict[Any, Any] = {torch.ops.aten.copy.default: _copy}
    table |= {one.target: grouped_mm for one in graph.nodes if _is_grouped_mm(one)}
    norm = torch.ops.aten.instance_norm.default
    calls = [one for one in graph.nodes if one.target is norm]
    norms = [name_arguments(norm, one.args, one.kwargs) for one in calls]
    if any(one["running_mean"] is not None and one["use_input_stats"] for one in norms):
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
    """A batch norm with a channel for each sample's; running statistics are their averages."""
    num_samples, num_channels = input.shape[:2]
    wide = input.reshape(1, num_samples * num_channels, *input.shape[2:])
    mean, var, scale, shift = (
        None if one is None else one.repeat(num_samples)
        for one in (running_mean, running_var, weight, bias)
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
    """Whether it is the op that transformers exports experts with that are not in bfloat16.

    Unlike ours, it can be differentiated only where there are data.
    """
    return is_overload(node.target) and op_schema(node.target).name == _GROUPED_MM


def _copy(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """What was written into a tensor; torch's own op for it has no gradient."""
    return src.to(self.device, self.dtype).expand(self.shape)


def _is_unfunctional(node: fx.Node) -> bool:
    if node.op != "call_function" or not (is_overload(node.target) or is_higher_order(node.target)):
        return False
    if is_higher_order(node.target) or _is_grouped_mm(node):
        return True
    schema = op_schema(node.target)
    return bool(schema.is_mutable) or schema.name in _SECRET_WRITERS


@contextmanager
def _detached_regions(graph: fx.Graph) -> Iterator[None]:
    """Say of what was computed under no_grad() that it has no gradient.

    The region itself is lost when the program is made functional.
    """
    regions = [node for node in graph.nodes if _disables_gradients(node)]
    items = [one for node in regions for one in node.users if one.target is operator.getitem]
    detached = [_detach_after(graph, one) for one in items if _is_tensor(one)]
    try:
        yield
    finally:
        for node in detached:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)


def _without_gradient_regions(program: ExportedProgram) -> ExportedProgram:
    """The program with what runs under no_grad() inlined and detached, and without detach_().

    These are all that most models have, and torch's own way to be rid of them traces the program
    once more, which takes longer than everything else that is done for a forward pass.
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
        self._copies: dict[fx.Node, Any] = {}  # a node; of a region, its results

    def copy(self, node: fx.Node, owner: fx.GraphModule) -> None:
        """Copy a node of the program; in place of a region, all of its nodes."""
        region = _simple_region(node, owner)
        if region is not None:
            self._inline(node, region)
        elif node.target is operator.getitem and isinstance(self._copies[node.args[0]], tuple):  # type: ignore[index]
            self._take_result(node)
        else:
            self._copies[node] = self._copy_node(node, node.name)

    def _copy_node(self, node: fx.Node, name: str) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._copies.__getitem__)
        target = node.target
        if target is torch.ops.aten.detach_.default and len(node.all_input_nodes[0].users) == 1:
            target = torch.ops.aten.detach.default
        made = self.graph.create_node(node.op, target, args, kwargs, name, node.type)
        # Inputs have the names of the model's arguments, which fx changes if they are a builtin's.
        made.name = name
        made.meta = copy(node.meta)
        return made

    def _inline(self, node: fx.Node, region: fx.GraphModule) -> None:
        given = iter(node.args[2:])
        for inner in region.graph.nodes:
            if inner.op == "placeholder":
                self._copies[inner] = self._copies[next(given)]  # type: ignore[index]
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
    inner = [one for one in region.graph.nodes if one.op not in ("placeholder", "output")]
    is_simple = all(one.op == "call_function" and not is_higher_order(one.target) for one in inner)
    return region if is_simple and all(isinstance(one, fx.Node) for one in node.args[2:]) else None


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


def read_program(program: ExportedProgram) -> Flow:
    """The flow of a functional program: getitem nodes are seen through, checks are dropped."""
    return _Reader(program).read()


@final
class _Reader:
    def __init__(self, program: ExportedProgram) -> None:
        self._program = program
        self._read: dict[fx.Node, Any] = {}
        self._inputs: list[tuple[Value, Role]] = []
        self._steps: list[Any] = []

    def read(self) -> Flow:
        specs = {one.arg.name: one for one in self._program.graph_signature.input_specs}
        outputs: list[tuple[Any, Role]] = []
        for node in self._program.graph.nodes:
            if node.op == "placeholder":
                self._read_placeholder(node, specs[node.name])
            elif node.op == "call_function":
                self._read_call(node)
            elif node.op == "get_attr":
                attribute = operator.attrgetter(str(node.target))(self._program.graph_module)
                self._read[node] = Attribute(str(node.target), attribute)
            elif node.op == "output":
                outputs = self._read_outputs(node)
        flow = Flow(inputs=self._inputs, steps=self._steps, outputs=outputs)
        for value, _ in flow.inputs:
            flow.sizes.learn(value.example)
        return flow

    def _read_placeholder(self, node: fx.Node, spec: Any) -> None:
        value = _make_value(node.name, node.meta.get("val"), OpenSizes())
        self._read[node] = value
        self._inputs.append((value, Role(_INPUT_KINDS[spec.kind], spec.target or node.name)))

    def _read_outputs(self, node: fx.Node) -> list[tuple[Any, Role]]:
        found = map_nest(node.args[0], self._value_of)
        roles = _output_roles(self._program.graph_signature)
        return list(zip(found, roles, strict=True))

    def _read_call(self, node: fx.Node) -> None:
        if node.target is operator.getitem and not isinstance(self._value_of(node.args[0]), Value):
            self._read[node] = self._value_of(node.args[0])[node.args[1]]
            return
        if is_overload(node.target) and op_schema(node.target).name in _DROPPED:
            return
        same = self._unchanged(node)
        if same is not None:
            self._read[node] = same
            return
        result = read_result(node.name, node.meta.get("val"))
        self._read[node] = result
        op = lower_op(node.target)
        arguments = name_arguments(op, node.args, node.kwargs)
        self._steps.append(
            Step(
                op=op,
                arguments=map_nest(arguments, self._value_of),
                outputs=[one for one in _leaves(result) if isinstance(one, Value)],
                result=result,
                origin=origin_of(node),
            )
        )

    def _unchanged(self, node: fx.Node) -> Value | None:
        """The argument that a conversion returns as it is: already of the dtype and device."""
        if node.target not in _CONVERSIONS or not isinstance(node.args[0], fx.Node):
            return None
        before, after = node.args[0].meta["val"], node.meta["val"]
        is_plain = len(node.args) == 2 and not node.kwargs
        if not is_plain or before.dtype != after.dtype or before.device != after.device:
            return None
        value = self._read[node.args[0]]
        return value if isinstance(value, Value) else None

    def _value_of(self, item: Any) -> Any:
        return self._read[item] if isinstance(item, fx.Node) else item


def _output_roles(signature: ExportGraphSignature) -> list[Role]:
    roles: list[Role] = []
    for index, spec in enumerate(signature.output_specs):
        if spec.kind is OutputKind.USER_OUTPUT:
            num_before = sum(one.kind == "output" for one in roles)
            roles.append(Role("output", str(num_before)))
        else:
            kind = "input mutation" if spec.kind is OutputKind.USER_INPUT_MUTATION else "mutation"
            roles.append(Role(kind, str(spec.target or index)))
    return roles


def origin_of(node: fx.Node) -> Origin:
    """The module calls and the line of the user's program that made a node."""
    stack = node.meta.get("nn_module_stack") or {}
    calls = tuple((str(key), str(name)) for key, (name, _) in stack.items())
    return Origin(
        node=node.name,
        op=str(node.target),
        module=calls[-1][1] if calls else "",
        line=user_line(node.meta.get("stack_trace") or ""),
        calls=calls,
        meta={key: node.meta[key] for key in _KEPT_META if key in node.meta},
    )


def lower_op(op: Any) -> Any:
    """The op that stands for another in ranks' programs: reshape for view.

    Kernels may return other strides than those that the program was traced with.
    """
    return torch.ops.aten.reshape.default if op is torch.ops.aten.view.default else op


def name_arguments(op: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by the schema's names, defaults filled in; by position where there is no schema."""
    if not is_overload(op):
        return {**{str(i): one for i, one in enumerate(args)}, **kwargs}
    named = {}
    for index, one in enumerate(op_schema(op).arguments):
        if index < len(args):
            named[one.name] = args[index]
        elif one.name in kwargs:
            named[one.name] = kwargs[one.name]
        elif one.has_default_value():
            named[one.name] = one.default_value
    return named


def read_result(name: str, val: Any, sizes: OpenSizes | None = None) -> Any:
    """Values for what a node returned when it was traced."""
    if isinstance(val, (list, tuple)):
        return [read_result(f"{name}_{i}", one, sizes) for i, one in enumerate(val)]
    return None if val is None else _make_value(name, val, sizes or OpenSizes())


def _make_value(name: str, val: Any, sizes: OpenSizes) -> Value:
    if isinstance(val, torch.Tensor):
        shape = tuple(sizes.of(expression_of(size)) for size in val.shape)
        return Value(name, shape=shape, dtype=val.dtype, example=val)
    return Value(name, scalar=sizes.of(expression_of(val)), example=val)


def _leaves(nest: Any) -> list[Any]:
    if isinstance(nest, (list, tuple)):
        return [leaf for one in nest for leaf in _leaves(one)]
    return [nest]
