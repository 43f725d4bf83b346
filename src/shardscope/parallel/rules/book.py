"""The book of rules: for each op, its strategies, how to spell it locally, how to take it apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.local import Local

__all__ = [
    "DECOMPOSITIONS",
    "RULES",
    "SPELLERS",
    "Rule",
    "Speller",
    "decomposition",
    "rule",
    "speller",
]

Rule = Callable[[Call], Iterable[Strategy]]
"""All strategies but "everything replicated", which is always there."""

Speller = Callable[[Local], Any]
"""Writes the op for one rank where the same op on local tensors is not enough."""

RULES: dict[Any, Rule] = {}
SPELLERS: dict[Any, Speller] = {}
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}

_F = TypeVar("_F", bound=Callable[..., Any])


def rule(*ops: Any) -> Callable[[Rule], Rule]:
    """Enter the function as the rule of each op."""

    def enter(function: Rule) -> Rule:
        for op in filter(None, ops):  # what this torch has
            assert op not in RULES, f"{op} has two rules"
            RULES[op] = function
        return function

    return enter


def speller(*ops: Any) -> Callable[[Speller], Speller]:
    """Enter the function as what spells each op locally; not asked where all is replicated."""

    def enter(function: Speller) -> Speller:
        for op in filter(None, ops):  # what this torch has
            assert op not in SPELLERS, f"{op} has two spellers"
            SPELLERS[op] = function
        return function

    return enter


def decomposition(*ops: Any) -> Callable[[_F], _F]:
    """Enter the function as what the op is made of: called as the op is, on tensors.

    It is traced and takes the op's place where the op itself would have to be gathered. It raises
    NotImplementedError where it has nothing better to offer.
    """

    def enter(function: _F) -> _F:
        for op in filter(None, ops):  # what this torch has
            assert op not in DECOMPOSITIONS, f"{op} has two decompositions"
            DECOMPOSITIONS[op] = function
        return function

    return enter
