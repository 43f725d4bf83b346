"""The styles of a plan: which dim of a weight is sharded, and placements of inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, final

from shardscope.errors import PlanError
from shardscope.parallel.plan.placement_syntax import describe_placement, read_placement
from shardscope.plan.placements import Placement, Shard

Parts: TypeAlias = int | tuple[int, ...] | None


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Colwise:
    """Shard a module's weight by its output: output features, channels, embedding columns.

    The first input is replicated and the output is sharded in its last dim (a convolution's in its
    channels), unless `input` and `output` are given. `fused` means that the weight consists of
    several weights, of one size (3) or of given sizes ((4096, 1024, 1024)), each of which is
    sharded. `heads` is the number of attention heads of the weight, or of each of its parts: heads
    are not split, and a number that does not divide is an error.

    Examples:
        >>> plan = {"layers.*.attention.wq": Colwise(heads=32)}
    """

    input: Placement | None = None
    output: Placement | None = None
    fused: Parts = None
    heads: Parts = None

    def __post_init__(self) -> None:
        _normalize(self)

    def __repr__(self) -> str:
        return _format_style(self)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Rowwise:
    """Shard a module's weight by its input: input features, channels, vocabulary.

    The first input is sharded in its last dim (an embedding's is replicated) and the output is
    replicated, unless `input` and `output` are given. `fused` and `heads` are as for `Colwise`.

    Examples:
        >>> plan = {"layers.*.attention.wo": Rowwise()}
    """

    input: Placement | None = None
    output: Placement | None = None
    fused: Parts = None
    heads: Parts = None

    def __post_init__(self) -> None:
        _normalize(self)

    def __repr__(self) -> str:
        return _format_style(self)


@final
@dataclass(frozen=True, repr=False)
class Sequence:
    """Replicate a module's parameters; its first input and its output are sharded in `dim`."""

    dim: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise PlanError(
                f"Sequence's dim is {self.dim!r}, which is not a number. Give the dim of the "
                "sequence, such as Sequence(1)."
            )

    def __repr__(self) -> str:
        return _format_style(self)


@final
@dataclass(frozen=True)
class Replicated:
    """Replicate a module's parameters, also if a pattern of the plan would shard them."""


@final
@dataclass(frozen=True, init=False, repr=False)
class ModuleInput:
    """Placements of a module's inputs, by position and keyword; None leaves one unchanged."""

    positional: tuple[Placement | None, ...]
    keyword: tuple[tuple[str, Placement], ...]

    def __init__(self, *positional: Any, **keyword: Any) -> None:
        _set(self, "positional", _read_placements(positional, "ModuleInput's input"))
        placements = {
            name: read_placement(value, f"ModuleInput's {name}")
            for name, value in keyword.items()
            if value is not None
        }
        _set(self, "keyword", tuple(sorted(placements.items())))
        if not placements and not any(self.positional):
            raise PlanError(
                "ModuleInput() has no placements. Give some, such as ModuleInput(Replicate(), "
                "mask=Replicate())."
            )

    def __repr__(self) -> str:
        named = [f"{name}={describe_placement(value)}" for name, value in self.keyword]
        return f"ModuleInput({', '.join([*map(describe_placement, self.positional), *named])})"


@final
@dataclass(frozen=True, init=False, repr=False)
class ModuleOutput:
    """Placements of a module's outputs, by position; None leaves an output unchanged."""

    outputs: tuple[Placement | None, ...]

    def __init__(self, *outputs: Any) -> None:
        _set(self, "outputs", _read_placements(outputs, "ModuleOutput's output"))
        if not any(self.outputs):
            raise PlanError(
                "ModuleOutput() has no placements. Give some, such as ModuleOutput(Replicate())."
            )

    def __repr__(self) -> str:
        return f"ModuleOutput({', '.join(map(describe_placement, self.outputs))})"


ShardingStyle = Colwise | Rowwise
WeightStyle = Colwise | Rowwise | Sequence | Replicated | Shard
"""Those that decide how a module's parameters lie; a bare Shard lays out all of them."""

Style = WeightStyle | ModuleInput | ModuleOutput


def _set(style: Any, name: str, value: object) -> None:
    object.__setattr__(style, name, value)  # frozen dataclasses


def _normalize(style: ShardingStyle) -> None:
    kind = type(style).__name__
    for name in ("input", "output"):
        if (value := getattr(style, name)) is not None:
            _set(style, name, read_placement(value, f"{kind}'s {name}"))
    for name in ("fused", "heads"):
        _set(style, name, _read_parts(getattr(style, name), f"{kind}'s {name}"))


def _read_parts(value: Any, location: str) -> Parts:
    if value is None:
        return None
    parts = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    if not parts or any(isinstance(part, bool) or not isinstance(part, int) for part in parts):
        raise PlanError(f"{location} is {value!r}. Give a number, or one number for each part.")
    if any(part < 1 for part in parts):
        raise PlanError(f"{location} is {value!r}. Give numbers above zero.")
    return parts[0] if len(parts) == 1 else parts


def _read_placements(values: Iterable[Any], location: str) -> tuple[Placement | None, ...]:
    return tuple(
        None if value is None else read_placement(value, f"{location} {position}")
        for position, value in enumerate(values)
    )


def _format_style(style: Any) -> str:
    """The style as Python code, without defaults."""
    options = [
        f"{option.name}={_format_value(getattr(style, option.name))}"
        for option in fields(style)
        if getattr(style, option.name) != option.default
    ]
    return f"{type(style).__name__}({', '.join(options)})"


def _format_value(value: Any) -> str:
    return repr(value) if isinstance(value, (int, tuple)) else describe_placement(value)
