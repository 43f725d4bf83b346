"""The options of a fault backend, read into a `FaultPlan`, and its effect on an op's result."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import isfinite
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import fx

from shardscope._torch.decompositions import is_composite
from shardscope._torch.dispatch import all_op_names, op_schema, overloads_of
from shardscope.compile.backends.graph_backends import user_line
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


_OP = Option(
    "an op in any spelling: 'relu', 'F.relu', 'nn.ReLU', 'x.relu()', 'aten.relu', torch.relu",
    lambda value: value is not None,
    is_required=True,
)
_OPTIONS = {
    "op": _OP,
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
    if plan.stage != "graph":
        for names in filter(None, (plan.names, plan.also)):
            _refuse_composite(plan, names)


def _refuse_composite(plan: FaultPlan, names: frozenset[str]) -> None:
    # Without in-place and out= variants, which functionalization removes.
    reached = [op for op in overloads(names) if not op_schema(op).is_mutable]
    if all(is_composite(op) for op in reached):
        raise BackendError(
            f"Op {min(names)!r} never reaches stage {plan.stage!r}: it is decomposed into other "
            "ops before (linear into addmm or mm, matmul into mm or bmm). Name one of those, "
            "or take stage 'graph'."
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
