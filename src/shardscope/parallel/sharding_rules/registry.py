"""The registry: for each op, its sharding rule, its lowering and its decomposition.

Modules of this package register them with decorators when they are imported; `find_rule`,
`find_lowering` and `find_decomposition` import all of them first.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from torch import fx

from shardscope._torch.dispatch import OpOverload
from shardscope.parallel.ir.graph import Strategy
from shardscope.parallel.sharding_rules.context import LoweringContext, OpCall

Rule = Callable[[OpCall], Iterable[Strategy]]
"""Lists an op's strategies, without "everything replicated", which every op has."""

Lowering = Callable[[LoweringContext], fx.Node | tuple[fx.Node, ...]]
"""Writes an op into one rank's program where the same op on local tensors is not correct, and
returns the node of its result, or of each of its results.
"""

Decomposition = Callable[..., object]
"""Computes an op by other ops; called with the op's arguments."""

RULES: dict[OpOverload, Rule] = {}
LOWERINGS: dict[OpOverload, Lowering] = {}
DECOMPOSITIONS: dict[OpOverload, Decomposition] = {}

_rules_by_predicate: list[tuple[Callable[[OpOverload], bool], Rule]] = []

_DecompositionT = TypeVar("_DecompositionT", bound=Decomposition)


def rule(*ops: OpOverload | None) -> Callable[[Rule], Rule]:
    """Register the function as the sharding rule of each op. Ops that this torch does not have are
    given as None.
    """

    def register(function: Rule) -> Rule:
        for op in filter(None, ops):
            assert op not in RULES, f"{op} has two rules"
            RULES[op] = function
        return function

    return register


def rule_where(predicate: Callable[[OpOverload], bool]) -> Callable[[Rule], Rule]:
    """Register the function as the sharding rule of all ops that satisfy the predicate and have no
    rule of their own.
    """

    def register(function: Rule) -> Rule:
        _rules_by_predicate.append((predicate, function))
        return function

    return register


def lowering(*ops: OpOverload | None) -> Callable[[Lowering], Lowering]:
    """Register the function as the lowering of each op; it is not called where everything is
    replicated.
    """

    def register(function: Lowering) -> Lowering:
        for op in filter(None, ops):  # ops that this torch has
            assert op not in LOWERINGS, f"{op} has two lowerings"
            LOWERINGS[op] = function
        return function

    return register


def decomposition(*ops: OpOverload | None) -> Callable[[_DecompositionT], _DecompositionT]:
    """Register the function as the decomposition of each op: called as the op is, on tensors.

    It is traced and replaces the op where the op itself would need gathered inputs. It raises
    NotImplementedError for arguments with which decomposing the op does not help.
    """

    def register(function: _DecompositionT) -> _DecompositionT:
        for op in filter(None, ops):
            assert op not in DECOMPOSITIONS, f"{op} has two decompositions"
            DECOMPOSITIONS[op] = function
        return function

    return register


@cache
def load_rules() -> None:
    """Import every module of this package; each registers its rules on import."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f"{package}.{module.name}")


def find_rule(op: OpOverload) -> Rule | None:
    """The sharding rule of an op, or None: then it runs on replicated tensors only."""
    load_rules()
    matching_rules = (rule for predicate, rule in _rules_by_predicate if predicate(op))
    return RULES.get(op) or next(matching_rules, None)


def find_lowering(op: OpOverload) -> Lowering | None:
    """The lowering of an op; None if the same op on local tensors is correct."""
    load_rules()
    return LOWERINGS.get(op)


def find_decomposition(op: OpOverload) -> Decomposition | None:
    """The decomposition of an op that this package registers, or None."""
    load_rules()
    return DECOMPOSITIONS.get(op)
