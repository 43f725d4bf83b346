"""A parallel plan as the user wrote it, matched with the modules and parameters that it names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import nn
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from shardscope._torch.mesh import describe_placements
from shardscope.errors import AuditError
from shardscope.record.patterns import is_pattern, matches_name

Plan = Mapping[str, Any]
"""A pattern (`layers.*.attn.wq`) to a style, a style's class or name, or placements."""

# The dim of a weight that a style shards, by the kind of module.
_SHARD_DIMS = {
    ("column", nn.Linear): 0,
    ("row", nn.Linear): 1,
    ("column", nn.Embedding): 1,
    ("row", nn.Embedding): 0,
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An entry of a plan. `way` is how it shards a weight: by "column", "row" or not at all."""

    pattern: str
    meaning: str
    way: str | None = None
    is_style: bool = False  # a ParallelStyle, which registers hooks on the module
    placements: tuple[Placement, ...] = ()

    @property
    def is_pattern(self) -> bool:
        """Whether it may match several names."""
        return is_pattern(self.pattern)

    def matches(self, name: str) -> bool:
        """Whether the pattern matches the name of a module or parameter."""
        return matches_name(self.pattern, name)

    def shard_dim(self, module: nn.Module, num_dims: int) -> int | None:
        """The dim of `module`'s weight that the rule shards, or None if that is not known."""
        for placement in self.placements:
            if isinstance(placement, Shard):
                return placement.dim % num_dims if num_dims else placement.dim
        for (way, kind), dim in _SHARD_DIMS.items():
            if way == self.way and isinstance(module, kind):
                return dim
        return None


@final
class RuleRegistry:
    """Finds the rule for a name quickly: plans that name every layer have thousands of rules."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._exact: dict[str, Rule] = {}
        for rule in rules:
            if not rule.is_pattern:
                self._exact.setdefault(rule.pattern, rule)
        self._patterns = [rule for rule in rules if rule.is_pattern]

    def find(self, names: Iterable[str]) -> Rule | None:
        """The rule of the first name that has one, or None."""
        for name in names:
            rule = self._exact.get(name)
            if rule is None:
                rule = next(
                    (pattern_rule for pattern_rule in self._patterns if pattern_rule.matches(name)),
                    None,
                )
            if rule is not None:
                return rule
        return None


def read_plan(plan: Plan) -> list[Rule]:
    """The rules of a plan, in its order."""
    if not isinstance(plan, Mapping):
        raise AuditError(
            f"The plan is {type(plan).__name__}, not a mapping. Give patterns of module names "
            "with their styles, such as {'layers.*.up': ColwiseParallel()}."
        )
    return [_read_rule(str(pattern), value) for pattern, value in plan.items()]


def _read_rule(pattern: str, value: Any) -> Rule:
    if isinstance(value, str):
        return Rule(pattern=pattern, meaning=value, way=_way_in(value))
    style = value if isinstance(value, type) else type(value)
    if issubclass(style, ParallelStyle):
        return Rule(pattern=pattern, meaning=style.__name__, way=_way_of(style), is_style=True)
    placements = _placements_in(value)
    if placements is None:
        raise AuditError(
            f"The plan's rule {pattern!r} gives {type(value).__name__}, which is neither a "
            "parallel style nor placements. Give one of them, such as ColwiseParallel() or "
            "[Shard(0)]."
        )
    meaning = ", ".join(describe_placements(placements))
    return Rule(pattern=pattern, meaning=meaning, placements=tuple(placements))


def _way_of(style: type) -> str | None:
    if issubclass(style, ColwiseParallel):
        return "column"
    return "row" if issubclass(style, RowwiseParallel) else None


def _way_in(name: str) -> str | None:
    """How a style named as in transformers (colwise, rowwise, colwise_rep) shards a weight."""
    ways = {"col": "column", "row": "row"}
    return next((way for part, way in ways.items() if part in name.lower()), None)


def _placements_in(value: Any) -> Sequence[Placement] | None:
    values = value if isinstance(value, Iterable) else [value]
    placements = list(values)
    return (
        placements
        if placements and all(isinstance(placement, Placement) for placement in placements)
        else None
    )
