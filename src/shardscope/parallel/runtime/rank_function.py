"""A rank's program as a Python function, and what surrounds a call of it.

`write_function` generates the source of an FX graph, with torch functions that are fast to call.
`Inputs` flattens and checks the arguments of a call, `State` reads parameters and buffers from the
module, and `Results` writes mutated ones back and restores the structure of the output.
"""

from __future__ import annotations

import itertools
import linecache
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import sympy
import torch
from torch import Tensor, dtype, fx, nn
from torch.export import ExportedProgram
from torch.fx.node import Target
from torch.nn import functional

from shardscope._torch.dispatch import is_overload, op_schema
from shardscope._torch.export import expression_of, range_of
from shardscope._torch.modules import StateLocation, register_tensor
from shardscope._torch.tree import flatten_as, pytree_flatten, pytree_unflatten
from shardscope.errors import ParallelError
from shardscope.parallel.ir.graph import ShardingGraph, SymbolicSizes, Value, symbols_in
from shardscope.parallel.ir.shard_spec import MeshCoordinate
from shardscope.plan.placements import Size

_SAME_NAME = """
    abs add.Tensor addmm all.dim amax any.dim argmax baddbmm bitwise_and.Tensor bitwise_not
    bitwise_or.Tensor bmm cat clamp clamp_min clone cos cumsum div.Tensor embedding eq.Scalar
    eq.Tensor erf exp flip ge.Scalar ge.Tensor gt.Scalar gt.Tensor index_select layer_norm le.Scalar
    le.Tensor log logical_and logical_not logical_or logsumexp.default lt.Scalar lt.Tensor matmul
    masked_fill.Scalar masked_fill.Tensor maximum mean.dim minimum mm mul.Tensor native_layer_norm
    ne.Scalar ne.Tensor neg permute pow.Tensor_Scalar reciprocal relu reshape rms_norm rsqrt
    rsub.Scalar select.int sigmoid sin softmax.int sqrt squeeze.dim stack sub.Tensor sum
    sum.dim_IntList t tanh transpose.int tril triu unsqueeze var.dim where.self
"""
_METHODS = "contiguous expand masked_fill_.Scalar repeat to.dtype type_as view"


def _find_calls() -> dict[str, Callable[..., object]]:
    calls: dict[str, Callable[..., object]] = {}
    for owner, names in ((torch, _SAME_NAME), (Tensor, _METHODS)):
        for name in names.split():
            packet, _, overload = name.partition(".")
            calls[f"{packet}.{overload or 'default'}"] = getattr(owner, packet)
    return calls | {
        "gelu.default": functional.gelu,
        "linear.default": functional.linear,
        "scaled_dot_product_attention.default": functional.scaled_dot_product_attention,
        "silu.default": functional.silu,
    }


PYTHON_CALLS: Mapping[str, Callable[..., object]] = _find_calls()
"""By the name of an overload of ATen's."""


def python_call(op: Target) -> Callable[..., object]:
    """The function to call for `op`: itself, or an equivalent one with less overhead."""
    if not is_overload(op):
        assert callable(op)
        return op
    schema = op_schema(op)
    namespace, _, name = schema.name.partition("::")
    if namespace != "aten":
        return op
    return PYTHON_CALLS.get(f"{name}.{schema.overload_name or 'default'}", op)


_numbers = itertools.count()


@final
@dataclass(frozen=True, eq=False)
class RankFunction:
    """`run(state, inputs)` returns the graph's results in order.

    `state` has the graph's inputs that are state, then `attributes`, the tensor attributes of the
    graph module.
    """

    run: Callable[[Sequence[object], Sequence[object]], Sequence[Any]]
    attributes: Mapping[str, Tensor]
    source: str


def write_function(graph_module: fx.GraphModule, *, is_input: Sequence[bool]) -> RankFunction:
    """The function of a graph; `is_input`: whether each placeholder is an input, not state."""
    return _FunctionWriter(graph_module, is_input).write()


@final
class _FunctionWriter:
    """Writes the source of a graph's function, and collects the objects that it refers to."""

    def __init__(self, graph_module: fx.GraphModule, is_input: Sequence[bool]) -> None:
        self._graph_module = graph_module
        self._nodes = list(graph_module.graph.nodes)
        self._is_input = is_input
        self._used_names = {node.name for node in self._nodes} | {"state", "inputs"}
        self._bound: dict[str, object] = {}
        self._names: dict[int, str] = {}  # by id of the bound object
        attribute_nodes = [node for node in self._nodes if node.op == "get_attr"]
        attribute_values = {str(node.target): self._attribute(node) for node in attribute_nodes}
        self._tensors = {
            name: value for name, value in attribute_values.items() if isinstance(value, Tensor)
        }
        self._attributes = {str(node.target): str(node.name) for node in attribute_nodes}

    def write(self) -> RankFunction:
        freed = last_uses(self._graph_module.graph)
        lines = self._head()
        for node in self._nodes:
            if node.op == "call_function":
                lines.append(f"{node.name} = {self._call(node)}")
            elif node.op == "output":
                lines.append(f"return {self._format_argument(node.args[0])}")
                break
            unused = [value.name for value in freed.get(node, ()) if value.op == "call_function"]
            if unused:
                lines.append(f"del {', '.join(unused)}")
        source = "def run(state, inputs):\n" + "".join(f"    {line}\n" for line in lines)
        return RankFunction(_define(source, self._bound), self._tensors, source)

    def _head(self) -> list[str]:
        placeholders = [node.name for node in self._nodes if node.op == "placeholder"]
        roles = list(zip(placeholders, self._is_input, strict=True))
        state = [name for name, is_input in roles if not is_input]
        state += [self._attributes[name] for name in self._tensors]
        inputs = [name for name, is_input in roles if is_input]
        unpacked = [("state", state), ("inputs", inputs)]
        return [f"{', '.join(names)}, = {source}" for source, names in unpacked if names]

    def _call(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            return f"{self._format_argument(node.args[0])}[{self._format_argument(node.args[1])}]"
        function = self._bind(python_call(node.target), str(node.target))
        arguments = [self._format_argument(argument) for argument in node.args]
        arguments += [
            f"{name}={self._format_argument(argument)}" for name, argument in node.kwargs.items()
        ]
        return f"{function}({', '.join(arguments)})"

    def _format_argument(self, item: object) -> str:
        """The source of an argument; an object without a literal is bound to a name."""
        match item:
            case fx.Node():
                return self._format_node(item)
            case tuple():
                return f"({''.join(self._format_argument(part) + ', ' for part in item)})"
            case list():
                return f"[{', '.join(self._format_argument(part) for part in item)}]"
            case slice():
                parts = (item.start, item.stop, item.step)
                return f"slice({', '.join(self._format_argument(part) for part in parts)})"
            case dict():
                pairs = (
                    f"{self._format_argument(key)}: {self._format_argument(part)}"
                    for key, part in item.items()
                )
                return f"{{{', '.join(pairs)}}}"
        has_literal = item is None or type(item) in (bool, int, str)
        if has_literal or (type(item) is float and math.isfinite(item)):
            return repr(item)
        return self._bind(item, "constant")

    def _format_node(self, node: fx.Node) -> str:
        if node.op != "get_attr":
            return node.name
        if str(node.target) in self._tensors:
            return self._attributes[str(node.target)]
        return self._bind(self._attribute(node), str(node.target))

    def _attribute(self, node: fx.Node) -> object:
        return operator.attrgetter(str(node.target))(self._graph_module)

    def _bind(self, value: object, label: str) -> str:
        if id(value) not in self._names:
            identifier = "".join(char if char.isalnum() else "_" for char in label)
            name = f"_{identifier}"
            while name in self._used_names:
                name += "_"
            self._used_names.add(name)
            self._names[id(value)] = name
            self._bound[name] = value
        return self._names[id(value)]


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """By node, the nodes whose values no later node uses."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last[node] = node
        last.update(dict.fromkeys(node.all_input_nodes, node))
    freed: dict[fx.Node, list[fx.Node]] = {}
    for value, user in last.items():
        freed.setdefault(user, []).append(value)
    return freed


def _define(source: str, bound: Mapping[str, object]) -> Callable[..., Any]:
    name = f"<rank program {next(_numbers)}>"
    # Tracebacks look up source lines there.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict[str, Any] = dict(bound)
    exec(compile(source, name, "exec"), scope)
    run: Callable[..., Any] = scope["run"]
    return run


@final
@dataclass(frozen=True)
class _DynamicSize:
    """A dynamic size: `factor` times a symbol, within bounds."""

    symbol: str
    factor: int
    minimum: int
    maximum: int | None


@final
@dataclass(frozen=True)
class _ExpectedInput:
    """An input that the program expects: a tensor's shape and dtype, or a constant value."""

    name: str
    shape: tuple[int | None, ...] = ()  # None for dynamic sizes
    dynamic_sizes: tuple[tuple[int, _DynamicSize], ...] = ()
    dtype: dtype | None = None
    value: object = None
    is_symbolic: bool = False


@final
class Inputs:
    """Flattens the arguments of a call, and raises for those that the program does not support."""

    def __init__(
        self, source: ExportedProgram, graph: ShardingGraph, coordinate: MeshCoordinate
    ) -> None:
        values = [(value, role.name) for value, role in graph.inputs if role.kind == "input"]
        self._expected = [
            _expected_input(value, name, coordinate, graph.sizes) for value, name in values
        ]
        signature = source.module_call_graph[0].signature
        assert signature is not None, "export notes how a program is called"
        self._tree = signature.in_spec
        args, kwargs = pytree_unflatten(list(range(len(values))), self._tree)
        self._is_plain = not kwargs and args == tuple(range(len(values)))
        self._is_expected = _write_check(self._expected if self._is_plain else [])
        names = list(signature.forward_arg_names or ())
        self._positional = (names + [f"argument {i}" for i in range(len(args))])[: len(args)]
        self._keywords = list(kwargs)

    def __deepcopy__(self, memo: object) -> Inputs:
        """Immutable, so that copies of a module share it."""
        return self

    def flatten_call(
        self, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> Sequence[object]:
        """The leaves of the arguments, checked, in the program's order."""
        # Most calls end here.
        if not kwargs and len(args) == len(self._expected) and self._is_expected(*args):
            return args
        is_plain = self._is_plain and not kwargs and len(args) == len(self._expected)
        leaves = args if is_plain else self._flatten(args, kwargs)
        for value, expected in zip(leaves, self._expected, strict=True):
            if expected.dtype is None:
                _check_value(value, expected)
            elif not isinstance(value, Tensor) or value.dtype is not expected.dtype:
                kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise ParallelError(
                    f"{expected.name} is {kind}, and the program was exported with "
                    f"{expected.dtype}. Convert it, or export the program again."
                )
            elif expected.dynamic_sizes or value.shape != expected.shape:
                _check_shape(value, expected)
        if len(self._expected) > 1:
            self._check_symbols(leaves)
        return leaves

    def _flatten(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Sequence[object]:
        remaining = dict(kwargs)
        positional = list(args)
        for name in self._positional[len(args) :]:
            if name in remaining:
                positional.append(remaining.pop(name))
        if len(positional) != len(self._positional) or set(remaining) != set(self._keywords):
            raise self._call_error(args, kwargs)
        nest = (tuple(positional), {name: remaining[name] for name in self._keywords})
        call_leaves, tree = pytree_flatten(nest)
        leaves = call_leaves if tree == self._tree else flatten_as(nest, self._tree)
        if leaves is None:
            raise ParallelError(
                f"the inputs are nested differently than in the export ({tree}, not "
                f"{self._tree}). Call it as the model was exported."
            )
        return leaves

    def _check_symbols(self, leaves: Sequence[object]) -> None:
        """Raise if inputs differ in a dynamic size that they share."""
        lengths: dict[str, tuple[int, str]] = {}
        for tensor, expected in zip(leaves, self._expected, strict=True):
            if not isinstance(tensor, Tensor):
                continue
            for dim, size in expected.dynamic_sizes:
                length = tensor.shape[dim] // size.factor
                length_before, name = lengths.setdefault(size.symbol, (length, expected.name))
                if length_before != length:
                    raise ParallelError(
                        f"{expected.name} has {tensor.shape[dim]} along dim {dim}, which does not "
                        f"match the sizes of {name}: the program was exported with one size for "
                        "both. Give matching inputs."
                    )

    def _call_error(self, args: Sequence[object], kwargs: Mapping[str, object]) -> ParallelError:
        signature = ", ".join([*self._positional, *(f"{name}=" for name in self._keywords)])
        call = ", ".join(["…"] * len(args) + [f"{name}=" for name in kwargs])
        return ParallelError(
            f"the program takes ({signature}) and was given ({call}). Call it as the model was "
            "exported; with a loss, its inputs come first and then the targets."
        )


def _write_check(expected: Sequence[_ExpectedInput]) -> Callable[..., bool]:
    """A function that returns whether all arguments are the expected tensors, as one expression.

    It is part of each call, and a loop would take as long as a small op. With dynamic sizes or
    inputs that are no tensors it returns False, and the inputs are checked singly.
    """
    if not expected or any(
        expected_input.dynamic_sizes or expected_input.dtype is None for expected_input in expected
    ):
        return lambda *_: False
    names = [f"x{i}" for i in range(len(expected))]
    terms = [
        f"type({x}) is Tensor and {x}.shape == {x}_shape and {x}.dtype is {x}_dtype" for x in names
    ]
    scope: dict[str, object] = {"Tensor": Tensor}
    for x, expected_input in zip(names, expected, strict=True):
        scope |= {f"{x}_shape": expected_input.shape, f"{x}_dtype": expected_input.dtype}
    check: Callable[..., bool] = eval(f"lambda {', '.join(names)}: {' and '.join(terms)}", scope)
    return check


def _expected_input(
    value: Value, name: str, coordinate: MeshCoordinate, sizes: SymbolicSizes
) -> _ExpectedInput:
    if not value.is_tensor:
        is_symbolic = isinstance(value.scalar, sympy.Expr) and bool(symbols_in(value.scalar))
        return _ExpectedInput(name, value=value.example, is_symbolic=is_symbolic)
    shape = value.spec.local_shape(coordinate)
    return _ExpectedInput(
        name,
        shape=tuple(None if symbols_in(size) else int(size) for size in shape),
        dynamic_sizes=tuple(
            (dim, _dynamic_size(size, sizes)) for dim, size in enumerate(shape) if symbols_in(size)
        ),
        dtype=value.dtype,
    )


def _dynamic_size(size: Size, sizes: SymbolicSizes) -> _DynamicSize:
    """The size as a multiple of its symbol; other expressions become symbols of their own."""
    symbols = list(symbols_in(size))
    factor = sympy.cancel(size / symbols[0]) if len(symbols) == 1 else None
    if factor is None or not factor.is_Integer or symbols[0] not in sizes.known:
        return _DynamicSize(symbol=str(size), factor=1, minimum=0, maximum=None)
    value_range = sizes.ranges.get(symbols[0]) or range_of(sizes.known[symbols[0]])
    maximum = int(value_range.upper) if expression_of(value_range.upper).is_Integer else None
    return _DynamicSize(str(symbols[0]), int(factor), int(value_range.lower), maximum)


def _check_shape(tensor: Tensor, expected: _ExpectedInput) -> None:
    shape = tensor.shape
    is_right = len(shape) == len(expected.shape) and all(
        expected_size is None or expected_size == size
        for expected_size, size in zip(expected.shape, shape, strict=True)
    )
    if not is_right or not all(_fits(shape[dim], size) for dim, size in expected.dynamic_sizes):
        dynamic_sizes = dict(expected.dynamic_sizes)
        sizes = ", ".join(
            str(size_or_none) if size_or_none is not None else _describe(dynamic_sizes[dim])
            for dim, size_or_none in enumerate(expected.shape)
        )
        raise ParallelError(
            f"{expected.name} is {list(shape)} and the program of this rank takes [{sizes}]. Give "
            "this rank's shard, or export with dynamic_shapes where sizes may differ."
        )


def _fits(size: int, dynamic: _DynamicSize) -> bool:
    length, rest = divmod(size, dynamic.factor)
    is_enough = length >= dynamic.minimum
    return not rest and is_enough and (dynamic.maximum is None or length <= dynamic.maximum)


def _describe(size: _DynamicSize) -> str:
    upper = "…" if size.maximum is None else size.maximum * size.factor
    multiples = f", multiples of {size.factor}" if size.factor > 1 else ""
    return f"{size.minimum * size.factor}–{upper}{multiples}"


def _check_value(value: object, expected: _ExpectedInput) -> None:
    if expected.is_symbolic:
        return
    if type(value) is not type(expected.value) or value != expected.value:
        raise ParallelError(
            f"{expected.name} is {value!r}, and the program was exported with {expected.value!r}, "
            "which is a constant in it. Export it again with the new value."
        )


@final
class Results:
    """Copies mutated buffers and inputs back, and unflattens the outputs."""

    def __init__(self, source: ExportedProgram, graph: ShardingGraph) -> None:
        roles = [role for _, role in graph.outputs]
        state = [role.name for _, role in graph.inputs if role.kind != "input"]
        inputs = [role.name for _, role in graph.inputs if role.kind == "input"]
        self._outputs = [i for i, role in enumerate(roles) if role.kind == "output"]
        self._to_state = [
            (i, state.index(role.name)) for i, role in enumerate(roles) if role.kind == "mutation"
        ]
        self._to_inputs = [
            (i, inputs.index(role.name))
            for i, role in enumerate(roles)
            if role.kind == "input mutation"
        ]
        self._changes = bool(self._to_state or self._to_inputs)
        self._tree = source.module_call_graph[0].signature.out_spec
        shape = pytree_unflatten(list(range(len(self._outputs))), self._tree)
        self._is_single = shape == 0 and type(shape) is int
        self._is_plain = type(shape) is tuple and shape == tuple(range(len(self._outputs)))

    def __deepcopy__(self, memo: object) -> Results:
        """Immutable, so that copies of a module share it."""
        return self

    def unflatten_results(
        self, results: Sequence[object], state: Sequence[Any], inputs: Sequence[Any]
    ) -> object:
        """The model's output, after writing back mutated buffers and inputs."""
        if self._changes:
            self.write_back(results, state, inputs)
        if self._is_single:
            return results[self._outputs[0]]
        outputs = [results[i] for i in self._outputs]
        return tuple(outputs) if self._is_plain else pytree_unflatten(outputs, self._tree)

    def write_back(
        self, results: Sequence[object], state: Sequence[Any], inputs: Sequence[Any]
    ) -> None:
        """Copy the new values of buffers and inputs into them."""
        for index, position in self._to_state:
            state[position].copy_(results[index])
        for index, position in self._to_inputs:
            inputs[position].copy_(results[index])


@final
class State:
    """Reads tensors from the module on each call, since `to()` and loading may replace them."""

    def __init__(
        self, root: nn.Module, saved: Mapping[str, object], unsaved: Mapping[str, object]
    ) -> None:
        self._locations: dict[str, StateLocation] = {}
        for name, value in {**unsaved, **saved}.items():
            if isinstance(value, Tensor):
                self._locations[name] = register_tensor(root, name, value, is_saved=name in saved)
            else:
                self._locations[name] = ({name: value}, name)
        self._order: list[StateLocation] = []

    def set_order(self, names: Sequence[str]) -> None:
        """Set the order in which the program takes the tensors."""
        self._order = [self._locations[name] for name in names]

    def values(self) -> list[Any]:
        """The current tensors, in the program's order."""
        return [table[key] for table, key in self._order]
