"""The rules of an audited plan: the entries of the plan, described as the user wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from shardscope.errors import AuditError, PlanError
from shardscope.plan import Entry, Plan, read_entry
from shardscope.plan.placements import Placement, Shard, describe_placement, is_placement
from shardscope.plan.styles import (
    Colwise,
    Rowwise,
    WeightStyle,
    is_torch_style,
    weight_dim,
    weight_style,
)


@final
@dataclass(frozen=True, kw_only=True)
class PlanRule:
    """An entry of a plan: what it demands of the parameters that its pattern matches.

    It has either a placement for each mesh axis in order, or styles by axis (None: any axis).
    """

    pattern: str
    meaning: str
    placements: tuple[Placement, ...] = ()
    styles: tuple[tuple[str | None, WeightStyle], ...] = ()
    is_torch_style: bool = False  # a ParallelStyle, which registers hooks on the module

    @property
    def shards_weights(self) -> bool:
        """Whether it shards a weight by column or by row."""
        return any(isinstance(style, (Colwise, Rowwise)) for _, style in self.styles)

    def shard_dim(self, module: nn.Module | None, tensor: str, num_dims: int) -> int | None:
        """The first dim of a module's tensor that the rule shards, or None if that is unknown."""
        styles = (*self.placements, *(style for _, style in self.styles))
        dims = (style_dim(style, module, tensor, num_dims) for style in styles)
        return next((dim for dim in dims if dim is not None), None)


def style_dim(
    style: WeightStyle | Placement, module: nn.Module | None, tensor: str, num_dims: int
) -> int | None:
    """The dim of a module's tensor that a style or placement shards, or None if unknown."""
    if isinstance(style, Shard):
        return style.dim % max(1, num_dims)
    if isinstance(style, (Colwise, Rowwise)) and module is not None:
        return weight_dim(style.way, type(module), tensor)
    return None


def read_plan(plan: Plan | Mapping[str, Any]) -> list[PlanRule]:
    """The rules of a plan, in its order."""
    if isinstance(plan, Plan):
        return [_make_rule(entry, entry.meaning) for entry in plan.entries]
    if not isinstance(plan, Mapping):
        raise AuditError(
            f"The plan is {type(plan).__name__}, not a mapping. Give patterns of module names "
            "with their styles, such as {'layers.*.up': ColwiseParallel()}."
        )
    return [_read_rule(pattern, value) for pattern, value in plan.items()]


def _read_rule(pattern: str, value: object) -> PlanRule:
    is_torch = is_torch_style(value)
    try:  # a bare placement is that along the only axis
        entry = read_entry(pattern, [value] if is_placement(value) else value)
    except PlanError as error:
        if not is_torch and not isinstance(value, str):
            raise AuditError(str(error)) from error
        # An audit also accepts styles that parallelize cannot apply: your own, transformers'.
        entry = Entry(pattern, by_axis=((None, tuple(_guess_style(value))),))
    if isinstance(value, str):
        meaning = value
    elif is_torch:
        meaning = value.__name__ if isinstance(value, type) else type(value).__name__
    else:
        meaning = entry.meaning
    return _make_rule(entry, meaning, is_torch_style=is_torch)


def _make_rule(entry: Entry, meaning: str, *, is_torch_style: bool = False) -> PlanRule:
    if entry.in_order:
        meaning = ", ".join(describe_placement(p).removesuffix("()") for p in entry.in_order)
    styles = ((axis, weight_style(styles)) for axis, styles in entry.by_axis)
    return PlanRule(
        pattern=entry.pattern,
        meaning=meaning,
        placements=entry.in_order,
        styles=tuple((axis, style) for axis, style in styles if style is not None),
        is_torch_style=is_torch_style,
    )


def _guess_style(value: object) -> Iterator[WeightStyle]:
    """How an unknown style shards a weight, from its base class or its name (`my_colwise`)."""
    style_class = value if isinstance(value, type) else type(value)
    name = value.lower() if isinstance(value, str) else ""
    if issubclass(style_class, ColwiseParallel) or "col" in name:
        yield Colwise()
    elif issubclass(style_class, RowwiseParallel) or "row" in name:
        yield Rowwise()
