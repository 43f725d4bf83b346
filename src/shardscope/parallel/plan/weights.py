"""How each parameter and buffer lies: what the plan's rules say of it, under all its names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import final

from shardscope.errors import PlanError
from shardscope.parallel.placements import Partial, Placement, Replicate, Shard
from shardscope.parallel.plan.axes import Axes
from shardscope.parallel.plan.blocks import cut_in_blocks
from shardscope.parallel.plan.book import Book, Rule, weight_style
from shardscope.parallel.plan.kinds import Cut, Shapes, Way, find_cut, parameter_dim
from shardscope.parallel.plan.outline import ModuleOutline, Outline
from shardscope.parallel.plan.spelling import say
from shardscope.parallel.plan.styles import Colwise, CutStyle, Rowwise, Sequence, WeightStyle

__all__ = ["Decision", "Weights", "is_passed_over", "module_cut", "own_shapes", "say_no_module"]


@final
@dataclass(frozen=True, eq=False)
class Decision:
    """What one rule says of one name of a tensor, along one axis; no dim: it lies whole."""

    name: str
    rule: Rule
    style: WeightStyle
    dim: int | None
    is_exception: bool = False  # another rule would have spoken, had this one not

    @property
    def said(self) -> str:
        return f"{self.rule.pattern!r}: {self.rule.entry.meaning}"


@final
class Weights:
    """Decides how tensors lie, by the rules of a book."""

    def __init__(self, book: Book, outline: Outline, axes: Axes) -> None:
        self._book, self._outline, self._axes = book, outline, axes
        self.decisions: list[Decision] = []  # all of them, for what they came from
        self.placements: dict[str, tuple[Placement, ...]] = {}  # by every name; of cut ones
        for name, tensor in outline.tensors.items():
            placed = self._place((name, *tensor.aliases), tensor.shape)
            if any(isinstance(one, Shard) for one in placed):
                self.placements.update(dict.fromkeys((name, *tensor.aliases), placed))

    def _place(self, names: tuple[str, ...], shape: tuple[int, ...]) -> tuple[Placement, ...]:
        by_axis = [self._decide_all(names, axis) for axis in range(len(self._axes.names))]
        self.decisions += [one for decisions in by_axis for one in decisions]
        for axis, decisions in enumerate(by_axis):
            self._check_tied(decisions, axis)
        dims = [decisions[0].dim if decisions else None for decisions in by_axis]
        placed: list[Placement] = []
        for axis, (dim, decisions) in enumerate(zip(dims, by_axis, strict=True)):
            if dim is None:
                placed.append(Replicate())
            else:
                placed.append(self._cut(decisions, axis, shape[dim], dims))
        return tuple(placed)

    def _decide_all(self, names: tuple[str, ...], axis: int) -> list[Decision]:
        """Of each name of the tensor that a rule speaks of."""
        decided = (next(self._decide(name, axis), None) for name in names)
        return [one for one in decided if one is not None]

    def _decide(self, name: str, axis: int) -> Iterator[Decision]:
        speaking = [
            (rule, is_module, style)
            for rule, is_module in self._book.find_for_tensor(name)
            if (style := weight_style(rule.said.get(axis, ()))) is not None
            and self._is_meant(rule, name, style, is_module=is_module)
        ]
        for position, (rule, is_module, style) in enumerate(speaking):
            dim = self._dim(rule, name, style, is_module=is_module)
            yield Decision(name, rule, style, dim, is_exception=position + 1 < len(speaking))

    def _is_meant(self, rule: Rule, name: str, style: WeightStyle, *, is_module: bool) -> bool:
        """Whether what the rule says can be about this tensor at all."""
        if is_module and isinstance(style, Shard):
            # Placements for a module are for what it learns: its buffers are cut by name.
            return self._outline.tensor(name).is_parameter
        if is_module:
            return not is_passed_over(rule, name.rpartition(".")[0], self._outline)
        if rule.is_sweeping:
            return self._outline.tensor(name).is_parameter and not isinstance(style, Sequence)
        return True

    def _dim(self, rule: Rule, name: str, style: WeightStyle, *, is_module: bool) -> int | None:
        module, _, own = name.rpartition(".")
        if isinstance(style, Shard):
            return self._raw_dim(rule, name, style, is_module=is_module)
        if isinstance(style, Sequence) and not is_module:
            raise PlanError(say_no_module(rule, name))
        if not isinstance(style, (Colwise, Rowwise)):
            return None
        if is_module:
            return module_cut(rule, module, style, self._outline).dims.get(own)
        # A sum left in addends is what cutting the tensor gives anyway; transformers says so.
        if style.input is not None or not isinstance(style.output, (Partial, type(None))):
            raise PlanError(
                f"{rule.place} places inputs or outputs, but {name!r} is a tensor, not a module. "
                "Name its module, or leave input and output out."
            )
        outline = self._outline.modules.get(module)
        return parameter_dim(_way(style), own, outline, own_shapes(self._outline, module, own))

    def _raw_dim(self, rule: Rule, name: str, style: Shard, *, is_module: bool) -> int | None:
        num_dims = len(self._outline.tensor(name).shape)
        if -num_dims <= style.dim < num_dims:
            return style.dim % num_dims
        if rule.is_sweeping:
            return None
        remedy = "Name the tensors that have that dim" if is_module else "Give a dim that it has"
        raise PlanError(
            f"{rule.place} shards dim {style.dim}, but {name!r} has {_count_dims(num_dims)}. "
            f"{remedy}."
        )

    def _check_tied(self, decisions: list[Decision], axis: int) -> None:
        for other in decisions[1:]:
            if other.dim != decisions[0].dim:
                self._refuse_tied(decisions[0], other, axis, _say_dims(decisions[0], other))

    def _refuse_tied(self, one: Decision, other: Decision, axis: int, ways: str) -> None:
        raise PlanError(
            f"{one.name!r} and {other.name!r} are one tensor, but along "
            f"{self._axes.names[axis]} the plan wants it {ways} ({one.said}; {other.said}). "
            "Give it one layout: Rowwise() shards an embedding as Colwise() shards a linear "
            "layer."
        )

    def _cut(
        self, decisions: list[Decision], axis: int, size: int, dims: list[int | None]
    ) -> Shard:
        cuts = [self._cut_for(one, axis, size, dims) for one in decisions]
        for cut, decision in zip(cuts, decisions, strict=True):
            if cut != cuts[0]:
                ways = f"as {say(cuts[0])} and as {say(cut)}"
                self._refuse_tied(decisions[0], decision, axis, ways)
        return cuts[0]

    def _cut_for(self, one: Decision, axis: int, size: int, dims: list[int | None]) -> Shard:
        dim = dims[axis]
        assert dim is not None
        assert isinstance(one.style, (Colwise, Rowwise, Shard))
        earlier = [position for position in range(axis + 1) if dims[position] == dim]
        over = " × ".join(self._axes.say(position) for position in earlier)
        ranks = prod(self._axes.sizes[position] for position in earlier)
        cut = cut_in_blocks(one.style, dim, size, over=over, ranks=ranks, what=one.name)
        if not cut.is_plain and dims.count(dim) > 1:
            both = " and ".join(
                name for name, its in zip(self._axes.names, dims, strict=True) if its == dim
            )
            raise PlanError(
                f"{one.rule.place} shards dim {dim} of {one.name!r} in parts, but {both} both "
                "shard that dim. Shard another dim along the other axis."
            )
        return cut


def say_no_module(rule: Rule, name: str) -> str:
    """That a tensor was named where only a module makes sense."""
    return (
        f"{rule.place} is for modules, but {name!r} is a tensor. Name its module, or give the "
        "tensor a placement, such as Shard(0)."
    )


def is_passed_over(rule: Rule, name: str, outline: Outline) -> bool:
    """Whether a wildcard met the module by the way: it has no parameters to cut."""
    module = outline.modules.get(name)
    return rule.is_sweeping and (module is None or not module.parameters)


def module_cut(rule: Rule, name: str, style: CutStyle, outline: Outline) -> Cut:
    """What the style means for the module of that name."""
    module = outline.modules.get(name, ModuleOutline())
    cut = find_cut(_way(style), module, own_shapes(outline, name))
    if cut is None:
        kind = module.type_name.rpartition(".")[2] or "a module"
        tensors = ", ".join((*module.parameters, *module.buffers)) or "no tensors"
        is_met = rule.entry.is_pattern
        out = f"except the module with {name!r}: Replicated()" if is_met else "remove the entry"
        raise PlanError(
            f"{rule.place} has no meaning for {name!r}, {kind} with {tensors}. Name the tensors "
            f"and give them placements, such as Shard(0), or {out}."
        )
    return cut


def own_shapes(outline: Outline, module: str, *names: str) -> Shapes:
    """The shapes of a module's own tensors, and of others that it is said to have."""
    found = outline.modules.get(module, ModuleOutline())
    under = f"{module}." if module else ""
    own = dict.fromkeys((*found.parameters, *found.buffers, *names))
    return {name: outline.tensor(under + name).shape for name in own}


def _way(style: CutStyle) -> Way:
    return "column" if isinstance(style, Colwise) else "row"


def _say_dims(one: Decision, other: Decision) -> str:
    ways = [
        "replicated" if dim is None else f"sharded along dim {dim}" for dim in (one.dim, other.dim)
    ]
    return f"{ways[0]} and {ways[1]}"


def _count_dims(number: int) -> str:
    return f"{number} dim" if number == 1 else f"{number} dims"
