"""Which fault, where: read from the options of a fault backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, get_args

from torch import fx

from shardscope._torch.decompositions import is_composite
from shardscope._torch.dispatch import op_schema
from shardscope._torch.op_names import all_op_names, overloads_of
from shardscope.compile.backends.graphs import user_line
from shardscope.compile.backends.options import Option, one_of, read_options
from shardscope.compile.backends.spelling import name_of_dispatched, name_of_node, names_meant
from shardscope.errors import BackendError

__all__ = [
    "Direction",
    "FaultPlan",
    "InjectedFault",
    "Kind",
    "Stage",
    "overloads",
    "read_plan",
]

Kind = Literal["compile_error", "runtime_error", "accuracy_error", "nan", "hang", "crash"]
Stage = Literal["graph", "decomposed", "partitioned"]
Direction = Literal["both", "forward", "backward"]


class InjectedFault(RuntimeError):  # noqa: N818 - it is no error of ours
    """Raised by a fault backend."""


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """One fault. `op` is what the user wrote, `names` are what that means."""

    kind: Kind
    op: str
    names: frozenset[str]
    stage: Stage = "graph"
    nth: int | None = None
    direction: Direction = "both"
    also: frozenset[str] = frozenset()
    by: float = 1.0
    times: float = 1.0

    def goes(self, direction: Direction) -> bool:
        """Whether the fault is in that direction too."""
        return self.direction in ("both", direction)

    def error(self, place: str = "") -> InjectedFault:
        """What is raised, at compile time or at run time."""
        kind = self.kind.replace("_", " ")
        where = f" ({place})" if place else ""
        return InjectedFault(f"Injected {kind} at op {self.op!r}, stage {self.stage}{where}.")

    def find(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """The nodes that the fault is at: none if what it also needs is not there."""
        named = [(node, name_of_node(node)) for node in nodes]
        if self.also and not any(name in self.also for _, name in named):
            return []
        found = [node for node, name in named if name in self.names]
        return found if self.nth is None else found[self.nth - 1 : self.nth]

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
    "stage": one_of(*get_args(Stage), default="graph"),
    "nth": Option(
        "which occurrence in a graph, counted from 1; all by default",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value > 0,
    ),
    "direction": one_of(*get_args(Direction), default="both"),
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
    known = {**_OPTIONS, **(_AMOUNTS if kind == "accuracy_error" else {})}
    chosen = read_options(f"fault_{kind}", options, mode, known)
    op, also = chosen.pop("op"), chosen.pop("also")
    plan = FaultPlan(
        kind=kind,
        op=op if isinstance(op, str) else getattr(op, "__name__", str(op)),
        names=names_meant(op),
        also=frozenset() if also is None else names_meant(also),
        **chosen,
    )
    _refuse_what_cannot_be(plan)
    return plan


def _refuse_what_cannot_be(plan: FaultPlan) -> None:
    if plan.stage == "graph" and plan.kind == "compile_error" and plan.direction == "backward":
        raise BackendError(
            "A compile error in backward cannot be at stage 'graph': dynamo captures only the "
            "forward. Use stage 'decomposed' or 'partitioned'."
        )
    if plan.stage != "graph":
        for names in filter(None, (plan.names, plan.also)):
            _refuse_composite(plan, names)


def _refuse_composite(plan: FaultPlan, names: frozenset[str]) -> None:
    # Variants that write into a tensor given do not count: functionalization leaves none.
    reached = [op for op in overloads(names) if not op_schema(op).is_mutable]
    if all(is_composite(op) for op in reached):
        raise BackendError(
            f"Op {min(names)!r} never reaches stage {plan.stage!r}: it is decomposed into other "
            "ops before (linear into addmm or mm, matmul into mm or bmm). Name one of those, "
            "or take stage 'graph'."
        )


def overloads(names: frozenset[str]) -> list[Any]:
    """Every overload of the dispatcher's that one of `names` means."""
    found = (name for name in all_op_names() if name_of_dispatched(name) in names)
    return [overload for name in sorted(found) for overload in overloads_of(name)]
