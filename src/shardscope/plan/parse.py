"""Parses one entry of a plan: a name or pattern with styles or placements, by axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeGuard, final

from shardscope.errors import PlanError
from shardscope.plan.placements import (
    Partial,
    Placement,
    Replicate,
    Shard,
    describe_placement,
    format_placement,
    is_placement,
    read_placement,
    read_placement_text,
)
from shardscope.plan.styles import (
    Colwise,
    ModuleInput,
    ModuleOutput,
    Replicated,
    Rowwise,
    Sequence,
    Style,
    Styles,
    is_torch_style,
    read_torch_style,
)
from shardscope.record.patterns import is_pattern

_STYLES_BY_NAME: dict[str, Style] = {
    "colwise": Colwise(),
    "rowwise": Rowwise(),
    "sequence": Sequence(),
    "replicate": Replicated(),
    # Names in transformers. Those that state an input's present placement (rowwise_rep,
    # rowwise_split_input) lose nothing: here it is known from the program.
    "colwise_rep": Colwise(output=Replicate()),
    "colwise_gather_output": Colwise(output=Replicate()),
    "embedding_colwise": Colwise(output=Replicate()),
    "embedding_rowwise": Rowwise(),
    "gather": ModuleOutput(Replicate()),
    "local_colwise": Colwise(),
    "local_packed_colwise": Colwise(fused=2),
    "local_packed_rowwise": Rowwise(fused=2, output=Partial()),
    "local_rowwise": Rowwise(output=Partial()),
    "moe_tp_experts": ModuleOutput(Replicate()),
    "packed_colwise": Colwise(fused=2),
    "packed_rowwise": Rowwise(fused=2),
    "replicated": Replicated(),
    "rowwise_rep": Rowwise(),
    "rowwise_split_input": Rowwise(),
    "sequence_parallel": Sequence(),
}

NO_EFFECT_STYLES = frozenset(
    {"isolated", "local", "mla_kv_a_proj", "replicated_with_grad_allreduce"}
)
"""Style names of transformers that shard no weight. They mark local tensors and sum gradients,
which `parallelize` does without being asked."""

# They dispatch tokens to experts by code that a single-device program does not have.
_EXPERT_PARALLEL = frozenset(
    {"ep_router", "grouped_gemm", "megamoe_experts", "megamoe_router", "moe_identity_expert"}
)


def style_by_name(name: str, location: str) -> Style:
    """The style with this name, which the plan has at `location`."""
    key = name.strip().lower()
    if key in _STYLES_BY_NAME:
        return _STYLES_BY_NAME[key]
    if key in NO_EFFECT_STYLES:
        raise PlanError(
            f"{location} gives {name!r}, with which transformers keeps the weights replicated: "
            "here it has no effect. Remove it, or read the plan with Plan.from_transformers."
        )
    if key in _EXPERT_PARALLEL:
        raise PlanError(
            f"{location} gives {name!r}, for which transformers has its own code that routes "
            "tokens to experts. Give the placement of the experts' weights instead, such as "
            "'shard(0)' for their first dim."
        )
    raise PlanError(f"{location} gives {name!r}, which is not a style. {_suggest(key)}")


def _suggest(key: str) -> str:
    suggestions = get_close_matches(key, _STYLES_BY_NAME, n=1)
    if suggestions:
        return f"Did you mean {suggestions[0]!r}?"
    return "Give 'colwise', 'rowwise', 'sequence', 'replicate', or a placement such as 'shard(0)'."


TomlValue = str | int | list["TomlValue"] | dict[str, "TomlValue"]
"""A value in a plan file."""

_NONE = "none"  # no constraint on a value; TOML has no null
_SHARDING_KEYS = {"input", "output", "fused", "heads"}


def read_style_table(table: Mapping[str, Any], location: str) -> Style:
    """The style that a table with the key `style` describes."""
    name, options = table["style"], {key: value for key, value in table.items() if key != "style"}
    if not isinstance(name, str):
        raise PlanError(f"{location} gives style = {name!r}. Give its name, such as 'colwise'.")
    if name == "input":
        return _read_input(
            _check_keys(options, {"positional", "keyword"}, name, location), location
        )
    if name == "output":
        outputs = _check_keys(options, {"outputs"}, name, location).get("outputs", ())
        return ModuleOutput(*_read_constraints(outputs, location))
    style = style_by_name(name, location)
    if isinstance(style, Sequence):
        return Sequence(**_check_keys(options, {"dim"}, name, location))
    if isinstance(style, (Colwise, Rowwise)):
        defaults = {key: value for key, value in vars(style).items() if value is not None}
        return type(style)(**{**defaults, **_check_keys(options, _SHARDING_KEYS, name, location)})
    _check_keys(options, set(), name, location)
    return style


def style_table(style: Style) -> TomlValue:
    """The style as a table that `read_style_table` reads, or its name if that is enough."""
    if isinstance(style, Shard):
        return format_placement(style)
    if isinstance(style, ModuleInput):
        keyword: dict[str, TomlValue] = {
            name: format_placement(placement) for name, placement in style.keyword
        }
        positional = [_format_constraint(placement) for placement in style.positional]
        placements: dict[str, TomlValue] = {"positional": positional, "keyword": keyword}
        return {"style": "input", **{name: part for name, part in placements.items() if part}}
    if isinstance(style, ModuleOutput):
        return {
            "style": "output",
            "outputs": [_format_constraint(placement) for placement in style.outputs],
        }
    if isinstance(style, Sequence):
        return "sequence" if style == Sequence() else {"style": "sequence", "dim": style.dim}
    if isinstance(style, Replicated):
        return "replicate"
    name = type(style).__name__.lower()
    options = {key: _to_toml(value) for key, value in vars(style).items() if value is not None}
    return {"style": name, **options} if options else name


def _check_keys(
    options: Mapping[str, Any], allowed: set[str], name: str, location: str
) -> Mapping[str, Any]:
    unknown = sorted(set(options) - allowed)
    if unknown:
        takes = f"takes {', '.join(sorted(allowed))}" if allowed else "takes nothing"
        raise PlanError(f"{location} gives {unknown[0]!r} to the style {name!r}, which {takes}.")
    return options


def _read_input(options: Mapping[str, Any], location: str) -> ModuleInput:
    keyword = options.get("keyword", {})
    if not isinstance(keyword, Mapping):
        raise PlanError(
            f"{location} gives keyword = {keyword!r}. Give a table of placements by argument, such "
            "as { mask = 'replicate' }."
        )
    names = dict(zip(keyword, _read_constraints(keyword.values(), location), strict=True))
    return ModuleInput(*_read_constraints(options.get("positional", ()), location), **names)


def _read_constraints(values: object, location: str) -> list[Placement | None]:
    row = [values] if isinstance(values, str) else values
    if not isinstance(row, Iterable):
        raise PlanError(f"{location} gives {values!r} instead of a list of placements.")
    return [
        None
        if value is None or value == _NONE
        else read_placement(value, f"{location}'s placement")
        for value in row
    ]


def _format_constraint(placement: Placement | None) -> TomlValue:
    return _NONE if placement is None else format_placement(placement)


def _to_toml(value: int | tuple[int, ...] | Placement) -> TomlValue:
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, int) else format_placement(value)


_STYLE_CLASSES = (Colwise, Rowwise, Sequence, Replicated, ModuleInput, ModuleOutput)


@final
@dataclass(frozen=True, repr=False)
class Entry:
    """A pattern with styles by axis (None: the default axis), or with `in_order`, a placement for
    each axis in the mesh's order.
    """

    pattern: str
    by_axis: tuple[tuple[str | None, Styles], ...] = ()
    in_order: tuple[Placement, ...] = ()

    @property
    def is_pattern(self) -> bool:
        """Whether it may match several names."""
        return is_pattern(self.pattern)

    def __repr__(self) -> str:
        return f"{self.pattern!r}: {self.meaning}"

    @property
    def meaning(self) -> str:
        """The styles or placements as Python code."""
        if self.in_order:
            return f"[{', '.join(map(describe_placement, self.in_order))}]"
        if self.by_axis[0][0] is None:
            return _format_styles(self.by_axis[0][1])
        parts = [f"{axis!r}: {_format_styles(styles)}" for axis, styles in self.by_axis]
        return f"{{{', '.join(parts)}}}"


def read_entry(pattern: object, value: object) -> Entry:
    """Parse the entry that the user wrote as `pattern: value`."""
    if not isinstance(pattern, str):
        raise PlanError(
            f"The plan has the key {pattern!r}, which is {type(pattern).__name__}. Keys are names "
            "or patterns of modules and tensors, such as 'layers.*.wq'."
        )
    location = f"The plan's entry {pattern!r}"
    if isinstance(value, Mapping) and "style" not in value:
        return Entry(pattern, by_axis=_read_axes(value, location))
    if _is_row(value) and value and all(_is_placement_text_or_object(item) for item in value):
        return Entry(
            pattern, in_order=tuple(_read_tensor_placement(item, location) for item in value)
        )
    return Entry(pattern, by_axis=((None, _read_styles(value, location)),))


def _read_axes(value: Mapping[object, object], location: str) -> tuple[tuple[str, Styles], ...]:
    if not value:
        raise PlanError(f"{location} is empty. Give placements, such as {{'tp': Shard(0)}}.")
    by_axis: list[tuple[str, Styles]] = []
    for axis, styles in value.items():
        if not isinstance(axis, str):
            raise PlanError(
                f"{location} names the axis {axis!r}, which is {type(axis).__name__}. Axes of a "
                "mesh have names, such as 'tp'."
            )
        if isinstance(styles, Mapping) and "style" not in styles:
            raise PlanError(
                f"{location} gives a table for the axis {axis!r}. Give a style or a placement; in "
                f'TOML, write a name that has dots in quotes: "layers.0.wq".'
            )
        by_axis.append((axis, _read_styles(styles, location)))
    return tuple(by_axis)


def _read_styles(value: object, location: str) -> Styles:
    values = list(value) if _is_row(value) else [value]
    styles = tuple(style for item in values for style in _read_style(item, location))
    if not styles:
        raise PlanError(f"{location} has no style. Give one, such as Colwise(), or remove it.")
    for kinds, what in (
        ((Colwise, Rowwise, Sequence, Replicated, Shard), "layouts of the parameters"),
        ((ModuleInput,), "placements for the inputs"),
        ((ModuleOutput,), "placements for the outputs"),
    ):
        same = [style for style in styles if isinstance(style, kinds)]
        if len(same) > 1:
            raise PlanError(
                f"{location} gives {len(same)} {what} for one axis: {_format_styles(tuple(same))}. "
                "Keep one, or give one per axis: {'dp': …, 'tp': …}."
            )
    return styles


def _read_style(value: object, location: str) -> Styles:
    if isinstance(value, type) and value in _STYLE_CLASSES:
        return (value(),)
    if isinstance(value, _STYLE_CLASSES):
        return (value,)
    if is_torch_style(value):
        return read_torch_style(value, location)
    if isinstance(value, Mapping):
        return (read_style_table(value, location),)
    if _is_placement_text_or_object(value):
        placement = _read_tensor_placement(value, location)
        return (placement if isinstance(placement, Shard) else Replicated(),)
    if isinstance(value, str):
        return (style_by_name(value, location),)
    raise PlanError(
        f"{location} gives {type(value).__name__}, which is neither a style nor a placement. Give "
        "one of them, such as Colwise() or Shard(0), or {axis: one of them}."
    )


def _read_tensor_placement(value: object, location: str) -> Placement:
    """A placement of a parameter or buffer, which cannot be partial."""
    placement = read_placement(value, f"{location}'s placement")
    if isinstance(placement, Partial):
        raise PlanError(
            f"{location} gives {describe_placement(placement)}, but a parameter cannot be partial. "
            "Give Shard(dim) or Replicate()."
        )
    return placement


def _is_placement_text_or_object(value: object) -> bool:
    if isinstance(value, str):
        return read_placement_text(value) is not None
    return is_placement(value)


def _is_row(value: object) -> TypeGuard[list[object] | tuple[object, ...]]:
    return isinstance(value, (list, tuple))


def _format_styles(styles: Styles) -> str:
    texts = [
        describe_placement(style) if isinstance(style, Shard) else repr(style) for style in styles
    ]
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
