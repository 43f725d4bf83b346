"""Backends that compile correctly except for a fault in one op, to test tools like `diagnose`.

The options of a backend are read into a `FaultPlan`. The fault is injected into dynamo's graph, the
op's decomposition, or the graphs that AOT autograd has partitioned (the plan's `stage`).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import isfinite
from operator import getitem
from typing import Any, Literal, NoReturn, final, get_args

import torch
from torch import fx

from shardscope._torch.aot import Compiled, partition_for_inductor
from shardscope._torch.autograd import is_in_backward
from shardscope._torch.decompositions import is_composite, table_in_force
from shardscope._torch.dispatch import all_op_names, has_fake_tensors, op_schema, overloads_of
from shardscope._torch.storage import count_writes
from shardscope._torch.tree import pytree_flatten, pytree_leaves, pytree_unflatten
from shardscope.compile.backends.aot import compile_as_inductor_would
from shardscope.compile.backends.graph_backends import (
    copy_graph,
    graphs_in,
    has_non_leaf,
    run_boxed,
    user_line,
    values_of,
)
from shardscope.compile.backends.op_names import name_of_dispatched, name_of_node, names_meant
from shardscope.compile.backends.options import Option, choice_of, read_options
from shardscope.errors import BackendError

Kind = Literal["compile_error", "runtime_error", "accuracy_error", "nan", "hang", "crash"]
Stage = Literal["graph", "decomposed", "partitioned"]
Direction = Literal["both", "forward", "backward"]


class InjectedFault(RuntimeError):  # noqa: N818 - not an error of this package
    """Raised by a fault backend."""


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """A fault. `op` is what the user wrote, `names` are the names of that op."""

    kind: Kind
    op: str
    names: frozenset[str]
    stage: Stage = "graph"
    nth: int | None = None
    direction: Direction = "both"
    also: frozenset[str] = frozenset()
    by: float = 1.0
    times: float = 1.0

    def applies_to(self, direction: Direction) -> bool:
        """Whether the fault is in forward or backward, as `direction` names it."""
        return self.direction in ("both", direction)

    def error(self, location: str = "") -> InjectedFault:
        """The exception to raise, at compile time or at run time."""
        kind = self.kind.replace("_", " ")
        where = f" ({location})" if location else ""
        return InjectedFault(f"Injected {kind} at op {self.op!r}, stage {self.stage}{where}.")

    def find(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """The nodes that get the fault: none if the op named by `also` is missing."""
        named = [(node, name_of_node(node)) for node in nodes]
        if self.also and not any(name in self.also for _, name in named):
            return []
        matches = [node for node, name in named if name in self.names]
        return matches if self.nth is None else matches[self.nth - 1 : self.nth]

    def raise_if_compiling(self, nodes: Iterable[fx.Node]) -> None:
        """Raise at the first of `nodes`, if the fault is a compile error."""
        for node in nodes if self.kind == "compile_error" else ():
            raise self.error(user_line(node) or node.name)


_OPTIONS = {
    "op": Option(
        "an op in any spelling: 'relu', 'F.relu', 'nn.ReLU', 'x.relu()', 'aten.relu', torch.relu",
        lambda value: value is not None,
        is_required=True,
    ),
    "stage": choice_of(*get_args(Stage), default="graph"),
    "nth": Option(
        "which occurrence in a graph, counted from 1; all by default",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value > 0,
    ),
    "direction": choice_of(*get_args(Direction), default="both"),
    "also": Option("an op that must be in the same graph too", lambda value: value is not None),
}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


_AMOUNTS = {
    "by": Option("a number to add to the result, by default 1", _is_number, 1.0),
    "times": Option("a number to multiply the result with before", _is_number, 1.0),
}


def read_plan(kind: Kind, options: Mapping[str, Any] | None, mode: str | None) -> FaultPlan:
    """The fault that the options describe; BackendError if they describe none."""
    accepted = {**_OPTIONS, **(_AMOUNTS if kind == "accuracy_error" else {})}
    chosen = read_options(f"fault_{kind}", options, mode, accepted)
    op, also = chosen.pop("op"), chosen.pop("also")
    plan = FaultPlan(
        kind=kind,
        op=op if isinstance(op, str) else getattr(op, "__name__", str(op)),
        names=names_meant(op),
        also=frozenset() if also is None else names_meant(also),
        **chosen,
    )
    _refuse_impossible(plan)
    return plan


def _refuse_impossible(plan: FaultPlan) -> None:
    if plan.stage == "graph" and plan.kind == "compile_error" and plan.direction == "backward":
        raise BackendError(
            "A compile error in backward cannot be at stage 'graph': dynamo captures only the "
            "forward. Use stage 'decomposed' or 'partitioned'."
        )
    for names in filter(None, (plan.names, plan.also)) if plan.stage != "graph" else ():
        # Without in-place and out= variants, which functionalization removes.
        reached = [op for op in overloads(names) if not op_schema(op).is_mutable]
        if all(is_composite(op) for op in reached):
            raise BackendError(
                f"Op {min(names)!r} never reaches stage {plan.stage!r}: it is decomposed into "
                "other ops before (linear into addmm or mm, matmul into mm or bmm). Name one of "
                "those, or take stage 'graph'."
            )


def overloads(names: frozenset[str]) -> list[Any]:
    """All overloads of the ops with these names."""
    op_names = (name for name in all_op_names() if name_of_dispatched(name) in names)
    return [overload for name in sorted(op_names) for overload in overloads_of(name)]


FAILING = ("runtime_error", "hang", "crash")
FaultOp = tuple[Any, tuple[Any, ...]]


def list_fault_ops(plan: FaultPlan, dtype: torch.dtype) -> list[FaultOp]:
    """Ops with arguments, to apply to a result in order; they keep its dtype."""
    aten = torch.ops.aten
    if plan.kind in FAILING:
        return [(_fail_op(), (plan.kind, str(plan.error())))]
    is_inexact = dtype.is_floating_point or dtype.is_complex
    if plan.kind == "nan":
        # Integers have no NaN: they stay correct.
        return [(aten.mul.Scalar, (float("nan"),))] if is_inexact else []
    if dtype == torch.bool:
        return [(aten.logical_not.default, ())]
    by, times = plan.by, plan.times
    if not is_inexact:
        # A fraction would be truncated, and the result stay correct.
        by, times = round(by) or (1 if plan.by > 0 else -1 if plan.by < 0 else 0), round(times)
    scaled: list[FaultOp] = [] if times == 1 else [(aten.mul.Scalar, (times,))]
    return [*scaled, *([] if by == 0 else [(aten.add.Scalar, (by,))])]


def inject_fault(tensor: torch.Tensor, plan: FaultPlan) -> torch.Tensor:
    """`tensor` with the fault applied."""
    for op, args in list_fault_ops(plan, tensor.dtype):
        tensor = op(tensor, *args)
    return tensor


def choose_result(values: list[Any]) -> int | None:
    """The index of the result that gets the fault: the first float tensor, else the first tensor.

    Integer results such as indices stay correct: wrong ones would make other ops fail.
    """
    tensors = [index for index, value in enumerate(values) if isinstance(value, torch.Tensor)]
    inexact = [
        index
        for index in tensors
        if values[index].dtype.is_floating_point or values[index].dtype.is_complex
    ]
    return next(iter(inexact or tensors), None)


def fail_now(kind: str, message: str) -> NoReturn:
    """Raise, never return, or end the process with a segmentation fault."""
    if kind == "runtime_error":
        raise InjectedFault(message)
    if kind == "crash":
        ctypes.string_at(0)
    while True:
        time.sleep(0.1)  # short, so that Ctrl-C works on every platform


@cache
def _fail_op() -> Any:
    """`fail_now` as an op: traced, it returns a tensor like its input; run, it fails."""
    fail = torch.library.custom_op("shardscope::fail", _fail, mutates_args=())
    fail.register_fake(lambda tensor, kind, message: torch.empty_like(tensor))
    fail.register_autograd(lambda ctx, gradient: (gradient, None, None))
    return torch.ops.shardscope.fail.default


def _fail(tensor: torch.Tensor, kind: str, message: str) -> torch.Tensor:
    fail_now(kind, message)


def compile_captured(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, plan: FaultPlan
) -> Compiled:
    """Dynamo's graph with the fault injected."""
    copy = copy_graph(gm)
    nodes = [node for graph in graphs_in(copy) for node in graph.graph.nodes if _can_inject(node)]
    faulty_nodes = plan.find(nodes)
    plan.raise_if_compiling(faulty_nodes)
    for node in faulty_nodes:
        faulty = _Faulty(_call_of(node), plan, name=node.name)
        with node.graph.inserting_before(node):
            new = node.graph.call_function(faulty, node.args, node.kwargs)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        node.graph.erase_node(node)
    for graph in graphs_in(copy):
        graph.recompile()
    return copy.forward


def _can_inject(node: fx.Node) -> bool:
    """Whether a node returns a tensor; arithmetic on sizes does not."""
    values = values_of(node)
    return values is None or any(isinstance(value, torch.Tensor) for value in values)


def _call_of(node: fx.Node) -> Callable[..., Any]:
    if node.op == "call_method":
        return lambda tensor, *args, **kwargs: getattr(tensor, str(node.target))(*args, **kwargs)
    if node.op == "call_module":
        assert node.graph.owning_module is not None
        return node.graph.owning_module.get_submodule(str(node.target))
    assert callable(node.target)
    return node.target


@final
class _Faulty:
    """An op with a fault in its result or in the gradient of its result."""

    def __init__(self, call: Callable[..., Any], plan: FaultPlan, *, name: str) -> None:
        # FX uses these names in the code that it generates.
        self.__name__ = self.__qualname__ = f"faulty_{name}"
        self._call = call
        self._plan = plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = filter(torch.is_tensor, pytree_leaves((args, kwargs)))
        versions = {id(value): count_writes(value) for value in inputs}
        values, structure = pytree_flatten(self._call(*args, **kwargs))
        index = choose_result(values)
        if index is not None:
            value = values[index]
            is_written = versions.get(id(value), count_writes(value)) != count_writes(value)
            values[index] = self._inject_into_result(value, is_written=is_written)
        return pytree_unflatten(values, structure)

    def _inject_into_result(self, value: torch.Tensor, *, is_written: bool) -> torch.Tensor:
        if self._plan.applies_to("forward"):
            faulty = self._inject_fault(value)
            if is_written:
                # In place, so that aliases see it too; through .data, so that autograd does not.
                value.data.copy_(faulty.detach())
            else:
                value = faulty
        if (
            self._plan.applies_to("backward")
            and value.requires_grad
            and not has_fake_tensors(value)
        ):
            value.register_hook(self._inject_fault)  # type: ignore[no-untyped-call]
        return value

    def _inject_fault(self, value: torch.Tensor) -> torch.Tensor:
        if self._plan.kind in FAILING and not has_fake_tensors(value):
            fail_now(self._plan.kind, str(self._plan.error()))
        return inject_fault(value, self._plan)


def compile_decomposed(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, plan: FaultPlan
) -> Compiled:
    """Compile as Inductor would if the decomposition of the op were wrong."""
    if plan.also and not _reaches(gm, example_inputs, plan.also):
        return compile_as_inductor_would(gm, example_inputs)
    wrong = _WrongDecomposition(plan)
    table = {**table_in_force(), **wrong.entries()}
    return compile_as_inductor_would(gm, example_inputs, table=table)


@final
class _WrongDecomposition:
    """Decompositions with a fault: the original one, or the op itself, followed by the fault."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self._num_seen = 0
        self._is_within = False

    def entries(self) -> dict[Any, Callable[..., Any]]:
        """A decomposition for each overload of the plan's op."""
        original = table_in_force()
        return {op: partial(self._run, op, original.get(op)) for op in overloads(self._plan.names)}

    def _run(self, op: Any, original: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
        # Inside the op and the fault, use the original: otherwise this would recurse forever.
        if self._is_within or not self._is_chosen():
            return NotImplemented if original is None else original(*args, **kwargs)
        if self._plan.kind == "compile_error":
            raise self._plan.error(str(op))
        self._is_within = True
        try:
            return self._inject_fault(op(*args, **kwargs))
        finally:
            self._is_within = False

    def _is_chosen(self) -> bool:
        if not self._plan.applies_to("backward" if is_in_backward() else "forward"):
            return False
        self._num_seen += 1
        return self._plan.nth in (None, self._num_seen)

    def _inject_fault(self, result: Any) -> Any:
        values, structure = pytree_flatten(result)
        index = choose_result(values)
        if index is not None:
            values[index] = inject_fault(values[index], self._plan)
        return pytree_unflatten(values, structure)


def _reaches(gm: fx.GraphModule, example_inputs: Sequence[Any], names: frozenset[str]) -> bool:
    """Whether tracing the graph reaches an op with one of these names."""
    reached: list[Any] = []
    original = table_in_force()

    def note(op: Any, *args: Any, **kwargs: Any) -> Any:
        reached.append(op)
        return original[op](*args, **kwargs) if op in original else NotImplemented

    table = {**original, **{op: partial(note, op) for op in overloads(names)}}
    compile_as_inductor_would(gm, example_inputs, table=table)
    return bool(reached)


def compile_partitioned(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, plan: FaultPlan
) -> Compiled:
    """Inject the fault after the graph was partitioned into forward and backward."""
    faulty: list[fx.GraphModule] = []

    def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        parts = partition_for_inductor(joint, inputs, **kwargs)
        for part, direction in zip(parts, _DIRECTIONS, strict=True):
            _inject_into_graph(part, plan, direction)
            faulty.append(part)
        return parts

    def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        # A graph for inference was not partitioned.
        if not faulty:
            _inject_into_graph(graph, plan, "forward")
        return run_boxed(graph, inputs)

    return compile_as_inductor_would(gm, example_inputs, forward=compile_graph, partition=partition)


_DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


def _inject_into_graph(gm: fx.GraphModule, plan: FaultPlan, direction: Direction) -> None:
    if not plan.applies_to(direction):
        return
    faulty_nodes = plan.find(node for graph in graphs_in(gm) for node in graph.graph.nodes)
    plan.raise_if_compiling(faulty_nodes)
    for node in faulty_nodes:
        target = _find_faulty_result(node)
        if target is not None:
            _append(target, plan)
    for graph in graphs_in(gm):
        graph.recompile()


def _find_faulty_result(node: fx.Node) -> fx.Node | None:
    """The node of the result that gets the fault: `node` or a getitem of it; None if unused."""
    values = values_of(node) or []
    getitems = [user for user in node.users if user.target is getitem]
    getitems.sort(key=lambda user: str(user.args[1]))
    if not getitems:
        return node if choose_result(values) is not None else None
    index = choose_result([user.meta.get("val") for user in getitems])
    return None if index is None else getitems[index]


def _append(node: fx.Node, plan: FaultPlan) -> None:
    """Apply the fault to the result of `node`, for all its users."""
    (value,) = values_of(node) or [None]
    assert isinstance(value, torch.Tensor)
    users: Iterable[fx.Node] = list(node.users)
    last = node
    for op, args in list_fault_ops(plan, value.dtype):
        with node.graph.inserting_after(last):
            new = node.graph.call_function(op, (last, *args))
        new.meta = dict(node.meta)
        last = new
    for user in users:
        user.replace_input_with(node, last)


Options = Mapping[str, Any] | None

_STAGES = {
    "graph": compile_captured,
    "decomposed": compile_decomposed,
    "partitioned": compile_partitioned,
}


def _make_backend(kind: Kind, effect: str) -> Callable[..., Compiled]:
    """The backend `fault_<kind>`, whose docstring begins with its effect."""

    def compile_with_fault(
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: Options = None,
        mode: str | None = None,
    ) -> Compiled:
        plan = read_plan(kind, options, mode)
        return _STAGES[plan.stage](gm, example_inputs, plan=plan)

    compile_with_fault.__name__ = compile_with_fault.__qualname__ = f"fault_{kind}"
    compile_with_fault.__doc__ = f"""{effect}

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; unknown options raise BackendError.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> options = {{"op": "relu"}}
        >>> torch.compile(model, backend="shardscope_fault_{kind}", options=options)(x)
    """
    return compile_with_fault


fault_compile_error = _make_backend(
    "compile_error", "Raise InjectedFault when a graph with the op is compiled."
)
fault_runtime_error = _make_backend(
    "runtime_error", "Raise InjectedFault when compiled code runs the op."
)
fault_accuracy_error = _make_backend(
    "accuracy_error", "Change the op's result: by 1, or by the options `by` and `times`."
)
fault_nan = _make_backend("nan", "Make the op's result NaN if it is floating point.")
fault_hang = _make_backend("hang", "Never return from the op until interrupted.")
fault_crash = _make_backend("crash", "End the process at the op with a segmentation fault.")


def fault_non_leaf(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """Raise InjectedFault when a graph is compiled for an input that is not an autograd leaf.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; unknown options raise BackendError.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> torch.compile(model, backend="shardscope_fault_non_leaf")(x)
    """
    read_options("fault_non_leaf", options, mode, {})
    if has_non_leaf(gm, example_inputs):
        raise InjectedFault("Injected compile error: an input is not a leaf of autograd's graph.")
    return gm.forward
