"""Which rule an op has: its own, or that of a whole family of ops that torch marks."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import Any

from shardscope.parallel import rules
from shardscope.parallel.rules.book import DECOMPOSITIONS, RULES, SPELLERS, Rule, Speller
from shardscope.parallel.rules.pointwise import is_pointwise, pointwise_strategies

__all__ = ["find_decomposition", "find_rule", "find_speller", "load_rules"]


@cache
def load_rules() -> None:
    """Load every file of this folder: each enters its rules in the book when it is loaded."""
    for module in pkgutil.iter_modules(rules.__path__):
        import_module(f"{rules.__name__}.{module.name}")


def find_rule(op: Any) -> Rule | None:
    """The rule of an op, or None: then it runs on whole tensors only."""
    load_rules()
    own = RULES.get(op)
    return pointwise_strategies if own is None and is_pointwise(op) else own


def find_speller(op: Any) -> Speller | None:
    """What writes the op for one rank; None where the same op on local tensors will do."""
    load_rules()
    return SPELLERS.get(op)


def find_decomposition(op: Any) -> Any:
    """What the op is made of, as far as this folder knows."""
    load_rules()
    return DECOMPOSITIONS.get(op)
