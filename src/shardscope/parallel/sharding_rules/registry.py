"""The registry: for each op, its sharding rule, its lowering and its decomposition."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from shardscope.parallel.ir.placements import Strategy
from shardscope.parallel.sharding_rules.context import LoweringContext, OpCall

Rule = Callable[[OpCall], Iterable[Strategy]]
"""All strategies but "everything replicated", which is always there."""

Lowering = Callable[[LoweringContext], Any]
"""Writes the op for one rank where the same op on local tensors is not enough."""

RULES: dict[Any, Rule] = {}
LOWERINGS: dict[Any, Lowering] = {}
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}

_F = TypeVar("_F", bound=Callable[..., Any])


def rule(*ops: Any) -> Callable[[Rule], Rule]:
    """Register the function as the sharding rule of each op."""

    def register(function: Rule) -> Rule:
        for op in filter(None, ops):  # ops that this torch has
            assert op not in RULES, f"{op} has two rules"
            RULES[op] = function
        return function

    return register


def lowering(*ops: Any) -> Callable[[Lowering], Lowering]:
    """Register the function as the lowering of each op; not called where everything is
    replicated.
    """

    def register(function: Lowering) -> Lowering:
        for op in filter(None, ops):  # ops that this torch has
            assert op not in LOWERINGS, f"{op} has two spellers"
            LOWERINGS[op] = function
        return function

    return register


def decomposition(*ops: Any) -> Callable[[_F], _F]:
    """Register the function as the decomposition of each op: called as the op is, on tensors.

    It is traced and replaces the op where the op itself would need gathered inputs. It raises
    NotImplementedError where it has nothing better to offer.
    """

    def register(function: _F) -> _F:
        for op in filter(None, ops):  # ops that this torch has
            assert op not in DECOMPOSITIONS, f"{op} has two decompositions"
            DECOMPOSITIONS[op] = function
        return function

    return register
