"""The styles of a plan: which dim of a weight is cut, and how its module's values shall lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, final

from shardscope.errors import PlanError
from shardscope.parallel.placements import Placement, Shard
from shardscope.parallel.plan.spelling import read_placement, say

__all__ = [
    "Colwise",
    "CutStyle",
    "ModuleInput",
    "ModuleOutput",
    "Parts",
    "Replicated",
    "Rowwise",
    "Sequence",
    "Style",
    "WeightStyle",
]

Parts: TypeAlias = int | tuple[int, ...] | None


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Colwise:
    """Cut a module's weight by what it puts out: output features, channels, embedding columns.

    Its first input is whole and its output cut in its last dim (a convolution's in its channels),
    unless `input` and `output` say otherwise. `fused` says that the weight is several weights one
    after the other, of one size (3) or of sizes of their own ((4096, 1024, 1024)): each is cut.
    `heads` is how many attention heads the weight, or each of its parts, makes: whole ones are
    cut, and a number that does not divide is an error.
    """

    input: Placement | None = None
    output: Placement | None = None
    fused: Parts = None
    heads: Parts = None

    def __post_init__(self) -> None:
        _settle(self)

    def __repr__(self) -> str:
        return _say_style(self)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Rowwise:
    """Cut a module's weight by what it takes in: input features, channels, vocabulary.

    Its first input is cut in its last dim (an embedding's is whole) and its output whole, unless
    `input` and `output` say otherwise. `fused` and `heads` are as for `Colwise`.
    """

    input: Placement | None = None
    output: Placement | None = None
    fused: Parts = None
    heads: Parts = None

    def __post_init__(self) -> None:
        _settle(self)

    def __repr__(self) -> str:
        return _say_style(self)


@final
@dataclass(frozen=True, repr=False)
class Sequence:
    """Keep a module's parameters whole; its first input and its output are cut in `dim`."""

    dim: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise PlanError(
                f"Sequence's dim is {self.dim!r}, which is not a number. Give the dim of the "
                "sequence, such as Sequence(1)."
            )

    def __repr__(self) -> str:
        return _say_style(self)


@final
@dataclass(frozen=True)
class Replicated:
    """Keep a module's parameters whole, also where a pattern of the plan would cut them."""


@final
@dataclass(frozen=True, init=False, repr=False)
class ModuleInput:
    """How a module's inputs shall lie, by position and by keyword; None leaves one as it comes."""

    positional: tuple[Placement | None, ...]
    keyword: tuple[tuple[str, Placement], ...]

    def __init__(self, *positional: Any, **keyword: Any) -> None:
        _set(self, "positional", _read_all(positional, "ModuleInput's input"))
        read = {
            name: read_placement(value, f"ModuleInput's {name}")
            for name, value in keyword.items()
            if value is not None
        }
        _set(self, "keyword", tuple(sorted(read.items())))
        if not read and not any(self.positional):
            raise PlanError(
                "ModuleInput() has no placements. Give some, such as ModuleInput(Replicate(), "
                "mask=Replicate())."
            )

    def __repr__(self) -> str:
        named = [f"{name}={say(value)}" for name, value in self.keyword]
        return f"ModuleInput({', '.join([*map(say, self.positional), *named])})"


@final
@dataclass(frozen=True, init=False, repr=False)
class ModuleOutput:
    """How a module's outputs shall lie, one after the other; None leaves one as it comes."""

    outputs: tuple[Placement | None, ...]

    def __init__(self, *outputs: Any) -> None:
        _set(self, "outputs", _read_all(outputs, "ModuleOutput's output"))
        if not any(self.outputs):
            raise PlanError(
                "ModuleOutput() has no placements. Give some, such as ModuleOutput(Replicate())."
            )

    def __repr__(self) -> str:
        return f"ModuleOutput({', '.join(map(say, self.outputs))})"


CutStyle = Colwise | Rowwise
WeightStyle = Colwise | Rowwise | Sequence | Replicated | Shard
"""Those that decide how a module's parameters lie; a bare Shard lays out all of them."""

Style = WeightStyle | ModuleInput | ModuleOutput


def _set(style: Any, name: str, value: object) -> None:
    object.__setattr__(style, name, value)  # frozen once it is made


def _settle(style: CutStyle) -> None:
    kind = type(style).__name__
    for name in ("input", "output"):
        if (value := getattr(style, name)) is not None:
            _set(style, name, read_placement(value, f"{kind}'s {name}"))
    for name in ("fused", "heads"):
        _set(style, name, _read_parts(getattr(style, name), f"{kind}'s {name}"))


def _read_parts(value: Any, place: str) -> Parts:
    if value is None:
        return None
    parts = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    if not parts or any(isinstance(one, bool) or not isinstance(one, int) for one in parts):
        raise PlanError(f"{place} is {value!r}. Give a number, or one number for each part.")
    if any(one < 1 for one in parts):
        raise PlanError(f"{place} is {value!r}. Give numbers above zero.")
    return parts[0] if len(parts) == 1 else parts


def _read_all(values: Iterable[Any], place: str) -> tuple[Placement | None, ...]:
    return tuple(
        None if value is None else read_placement(value, f"{place} {position}")
        for position, value in enumerate(values)
    )


def _say_style(style: Any) -> str:
    """The style as Python code makes it, without what is left at its default."""
    said = [
        f"{one.name}={_say_value(getattr(style, one.name))}"
        for one in fields(style)
        if getattr(style, one.name) != one.default
    ]
    return f"{type(style).__name__}({', '.join(said)})"


def _say_value(value: Any) -> str:
    return repr(value) if isinstance(value, (int, tuple)) else say(value)
