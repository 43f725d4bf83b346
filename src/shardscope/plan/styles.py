"""The styles of a plan, ours and torch's, and how they shard modules by class.

A style says which dim of a weight is sharded, and how inputs and outputs are placed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import takewhile
from typing import Any, ClassVar, Literal, TypeAlias, final

from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from shardscope.errors import PlanError
from shardscope.plan.placements import (
    Placement,
    Replicate,
    Shard,
    describe_placement,
    read_placement,
)

Parts: TypeAlias = int | tuple[int, ...] | None
"""How many equal parts a weight has, or the sizes of its parts; None: it is not divided."""

Way = Literal["column", "row"]
"""A weight is sharded by column (its output features) or by row (its input features)."""


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

    way: ClassVar[Way] = "column"
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

    way: ClassVar[Way] = "row"
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
"""Styles that decide the placement of a module's parameters; a bare Shard is for all of them."""

Style = WeightStyle | ModuleInput | ModuleOutput
Styles: TypeAlias = tuple[Style, ...]
"""The styles of a module along one axis: at most one WeightStyle, ModuleInput and ModuleOutput."""


def weight_style(styles: Styles) -> WeightStyle | None:
    """The style that places the parameters, if there is one."""
    return next(
        (style for style in styles if not isinstance(style, (ModuleInput, ModuleOutput))), None
    )


def _set(style: object, name: str, value: object) -> None:
    object.__setattr__(style, name, value)  # frozen dataclasses


def _normalize(style: ShardingStyle) -> None:
    kind = type(style).__name__
    for name in ("input", "output"):
        if (value := getattr(style, name)) is not None:
            _set(style, name, read_placement(value, f"{kind}'s {name}"))
    for name in ("fused", "heads"):
        _set(style, name, _read_parts(getattr(style, name), f"{kind}'s {name}"))


def _read_parts(value: object, location: str) -> Parts:
    if value is None:
        return None
    parts = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    if not parts or any(isinstance(part, bool) or not isinstance(part, int) for part in parts):
        raise PlanError(f"{location} is {value!r}. Give a number, or one number for each part.")
    if any(part < 1 for part in parts):
        raise PlanError(f"{location} is {value!r}. Give numbers above zero.")
    return parts[0] if len(parts) == 1 else parts


def _read_placements(values: Iterable[object], location: str) -> tuple[Placement | None, ...]:
    return tuple(
        None if value is None else read_placement(value, f"{location} {position}")
        for position, value in enumerate(values)
    )


def _format_style(style: Colwise | Rowwise | Sequence) -> str:
    """The style as Python code, without defaults."""
    options = [
        f"{option.name}={_format_value(getattr(style, option.name))}"
        for option in fields(style)
        if getattr(style, option.name) != option.default
    ]
    return f"{type(style).__name__}({', '.join(options)})"


def _format_value(value: Any) -> str:
    return repr(value) if isinstance(value, (int, tuple)) else describe_placement(value)


# PyTorch's styles also state the present placement of a value (`input_layouts`): the program tells.

_KNOWN_STYLES = (
    "ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput, PrepareModuleOutput "
    "and PrepareModuleInputOutput"
)


def is_torch_style(value: object) -> bool:
    """Whether it is a parallel style of PyTorch, or such a class."""
    return issubclass(value if isinstance(value, type) else type(value), ParallelStyle)


def read_torch_style(value: object, location: str) -> tuple[Style, ...]:
    """Our style, or two, for a style of PyTorch."""
    style = _instantiate(value, location)
    if isinstance(style, ColwiseParallel):
        desired, output = (
            _placement_of(style, "desired_input_layouts"),
            _placement_of(style, "output_layouts"),
        )
        return (Colwise(input=_unless(desired, Replicate()), output=_unless(output, Shard(-1))),)
    if isinstance(style, RowwiseParallel):
        # Torch sets the desired input when it applies the style, by the module, and so do we.
        return (Rowwise(output=_unless(_placement_of(style, "output_layouts"), Replicate())),)
    if isinstance(style, SequenceParallel):
        return (_read_sequence(style, location),)
    if isinstance(style, PrepareModuleInputOutput):
        prepare_input, prepare_output = style.prepare_module_input, style.prepare_module_output
        return (*_read_torch_input(prepare_input), *_read_torch_output(prepare_output))
    if isinstance(style, PrepareModuleInput):
        return _read_torch_input(style)
    if isinstance(style, PrepareModuleOutput):
        return _read_torch_output(style)
    raise PlanError(
        f"{location} gives {type(style).__name__}, which shardscope cannot interpret. Give one of "
        f"{_KNOWN_STYLES} (or a subclass), or one of ours, such as Colwise()."
    )


def _instantiate(value: object, location: str) -> object:
    """The style as an object, also if the plan has its class."""
    if not isinstance(value, type):
        return value
    try:
        return value()
    except (TypeError, AssertionError, ValueError) as error:
        raise PlanError(
            f"{location} gives the class {value.__name__}, which cannot be created without "
            f"arguments ({error}). Give an object of it."
        ) from error


def _placement_of(style: ParallelStyle, name: str) -> Placement | None:
    """The placement in this attribute, where torch may keep it in a tuple of one."""
    value = getattr(style, name)
    while isinstance(value, (tuple, list)) and len(value) == 1:
        value = value[0]
    return None if value is None else read_placement(value, f"{type(style).__name__}'s {name}")


def _unless(placement: Placement | None, default: Placement) -> Placement | None:
    return None if placement == default else placement


def _read_sequence(style: SequenceParallel, location: str) -> Sequence:
    spec = _placement_of(style, "sequence_sharding")
    if not isinstance(spec, Shard):
        raise PlanError(f"{location} gives {style}, which has no dim. Give SequenceParallel().")
    return Sequence(spec.dim)


def _read_torch_input(style: PrepareModuleInput) -> tuple[Style, ...]:
    # Torch does not change inputs whose present layout is None.
    present, desired = style.input_layouts or (), style.desired_input_layouts or ()
    positional = [
        target if source is not None else None
        for source, target in zip(present, desired, strict=True)
    ]
    keyword = {
        name: spec
        for name, spec in style.desired_input_kwarg_layouts.items()
        if style.input_kwarg_layouts.get(name) is not None
    }
    is_empty = all(placement is None for placement in (*positional, *keyword.values()))
    return () if is_empty else (ModuleInput(*positional, **keyword),)


def _read_torch_output(style: PrepareModuleOutput) -> tuple[Style, ...]:
    present, desired = style.output_layouts, style.desired_output_layouts
    outputs = [
        target if source is not None else None
        for source, target in zip(present, desired, strict=True)
    ]
    return () if all(placement is None for placement in outputs) else (ModuleOutput(*outputs),)


@final
@dataclass(frozen=True)
class ModuleSharding:
    """How a style shards a kind of module: the dim of each tensor, and its input and output."""

    dims: Mapping[str, int] = field(default_factory=dict)  # other tensors stay replicated
    input: Placement | None = None
    output: Placement | None = None


ClassShardings = Mapping[Way, ModuleSharding]
"""How the modules of a class are sharded by column and by row, if they can be."""

_REPLICATE, _SHARD_LAST = Replicate(), Shard(-1)

LINEAR: ClassShardings = {
    "column": ModuleSharding({"weight": 0, "bias": 0}, _REPLICATE, _SHARD_LAST),
    "row": ModuleSharding({"weight": 1}, _SHARD_LAST, _REPLICATE),
}
TRANSPOSED_LINEAR: ClassShardings = {
    "column": ModuleSharding({"weight": 1, "bias": 0}, _REPLICATE, _SHARD_LAST),
    "row": ModuleSharding({"weight": 0}, _SHARD_LAST, _REPLICATE),
}
_EMBEDDING: ClassShardings = {
    "column": ModuleSharding({"weight": 1}, _REPLICATE, _SHARD_LAST),
    "row": ModuleSharding({"weight": 0}, _REPLICATE, _REPLICATE),
}
_BILINEAR: ClassShardings = {
    "column": ModuleSharding({"weight": 0, "bias": 0}, _REPLICATE, _SHARD_LAST)
}

# By the name of a class or of a base class. Torch's convolutions also take images without a
# batch, so their channels are counted from the back.
_CONV = re.compile(r"\w*Conv(Transpose)?([123])d")
_SHARDINGS_BY_CLASS = (
    (re.compile(r"transformers\.pytorch_utils\.Conv1D"), TRANSPOSED_LINEAR),
    (re.compile(r"(?:.*\.)?\w*Embedding(?:Bag)?"), _EMBEDDING),
    (re.compile(r"(?:.*\.)?\w*Bilinear"), _BILINEAR),
    (re.compile(r"(?:.*\.)?\w*Linear"), LINEAR),
)


def class_names(module_class: type) -> tuple[str, ...]:
    """The dotted names of a module's class and of its bases, without nn.Module and its own."""
    bases = takewhile(lambda base: base is not nn.Module, module_class.__mro__[1:])
    return tuple(f"{base.__module__}.{base.__qualname__}" for base in (module_class, *bases))


def torch_first(names: Iterable[str]) -> list[str]:
    """Names of a class and its bases, torch's own first: `PatchEmbedding(nn.Linear)` is linear."""
    return sorted(names, key=lambda name: not name.startswith("torch.nn."))


def weight_dim(way: Way, module_class: type, tensor: str) -> int | None:
    """The dim of a module's weight or bias that is sharded, or None if the class is not known."""
    shardings = map(find_class_shardings, torch_first(class_names(module_class)))
    known = next((sharding for sharding in shardings if sharding is not None), {})
    return known[way].dims.get(tensor) if way in known else None


def find_class_shardings(name: str) -> ClassShardings | None:
    """How modules of the class with this dotted name are sharded, or None if it is not known."""
    if match := _CONV.fullmatch(name.rpartition(".")[2]):
        return _conv_shardings(int(match[2]), is_transposed=match[1] is not None)
    return next(
        (shardings for pattern, shardings in _SHARDINGS_BY_CLASS if pattern.fullmatch(name)), None
    )


def _conv_shardings(num_dims: int, *, is_transposed: bool) -> ClassShardings:
    out_dim, in_dim = (1, 0) if is_transposed else (0, 1)
    channels = Shard(-1 - num_dims)
    return {
        "column": ModuleSharding({"weight": out_dim, "bias": 0}, _REPLICATE, channels),
        "row": ModuleSharding({"weight": in_dim}, channels, _REPLICATE),
    }
