"""Finds the rule, lowering and decomposition of an op, including the rule of all pointwise ops."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import Any

from shardscope.parallel import sharding_rules
from shardscope.parallel.sharding_rules.pointwise import is_pointwise, pointwise_strategies
from shardscope.parallel.sharding_rules.registry import (
    DECOMPOSITIONS,
    LOWERINGS,
    RULES,
    Lowering,
    Rule,
)


@cache
def load_rules() -> None:
    """Import every module of this folder; each registers its rules on import."""
    for module in pkgutil.iter_modules(sharding_rules.__path__):
        import_module(f"{sharding_rules.__name__}.{module.name}")


def find_rule(op: Any) -> Rule | None:
    """The sharding rule of an op, or None: then it runs on replicated tensors only."""
    load_rules()
    rule = RULES.get(op)
    return pointwise_strategies if rule is None and is_pointwise(op) else rule


def find_lowering(op: Any) -> Lowering | None:
    """The lowering of an op; None if the same op on local tensors is correct."""
    load_rules()
    return LOWERINGS.get(op)


def find_decomposition(op: Any) -> Any:
    """The decomposition of an op that this folder registers, or None."""
    load_rules()
    return DECOMPOSITIONS.get(op)
