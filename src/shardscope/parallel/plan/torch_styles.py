"""PyTorch's parallel styles, as objects or classes, read into ours.

Theirs also say how a value lies before (`input_layouts`); ours need not, since the program knows.
"""

from __future__ import annotations

from typing import Any

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
from shardscope.parallel.placements import Placement, Replicate, Shard
from shardscope.parallel.plan.spelling import read_placement
from shardscope.parallel.plan.styles import (
    Colwise,
    ModuleInput,
    ModuleOutput,
    Rowwise,
    Sequence,
    Style,
)

__all__ = ["is_torch_style", "read_torch_style"]

_KNOWN = (
    "ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput, PrepareModuleOutput "
    "and PrepareModuleInputOutput"
)


def is_torch_style(value: Any) -> bool:
    """Whether it is one of PyTorch's styles, or a class of them."""
    return issubclass(value if isinstance(value, type) else type(value), ParallelStyle)


def read_torch_style(value: Any, place: str) -> tuple[Style, ...]:
    """What the style means in ours: one or two of them."""
    style = _made(value, place)
    if isinstance(style, ColwiseParallel):
        wanted, output = _layout(style, "desired_input_layouts"), _layout(style, "output_layouts")
        return (Colwise(input=_unless(wanted, Replicate()), output=_unless(output, Shard(-1))),)
    if isinstance(style, RowwiseParallel):
        # The wanted input is set when torch applies the style, by the module: ours knows it too.
        return (Rowwise(output=_unless(_layout(style, "output_layouts"), Replicate())),)
    if isinstance(style, SequenceParallel):
        return (_read_sequence(style, place),)
    if isinstance(style, PrepareModuleInputOutput):
        given, put_out = style.prepare_module_input, style.prepare_module_output
        return (*_read_input(given), *_read_output(put_out))
    if isinstance(style, PrepareModuleInput):
        return _read_input(style)
    if isinstance(style, PrepareModuleOutput):
        return _read_output(style)
    raise PlanError(
        f"{place} gives {type(style).__name__}, which shardscope cannot interpret. Give one of "
        f"{_KNOWN} (or a subclass), or one of ours, such as Colwise()."
    )


def _made(value: Any, place: str) -> Any:
    """An object of the style, also where its class was given."""
    if not isinstance(value, type):
        return value
    try:
        return value()
    except (TypeError, AssertionError, ValueError) as error:
        raise PlanError(
            f"{place} gives the class {value.__name__}, which cannot be created without "
            f"arguments ({error}). Give an object of it."
        ) from error


def _layout(style: Any, name: str) -> Placement | None:
    """The one layout under that attribute, which torch keeps in a tuple."""
    value = getattr(style, name)
    while isinstance(value, (tuple, list)) and len(value) == 1:
        value = value[0]
    return None if value is None else read_placement(value, f"{type(style).__name__}'s {name}")


def _unless(placement: Placement | None, default: Placement) -> Placement | None:
    return None if placement == default else placement


def _read_sequence(style: SequenceParallel, place: str) -> Sequence:
    layout = _layout(style, "sequence_sharding")
    if not isinstance(layout, Shard):
        raise PlanError(f"{place} gives {style}, which has no dim. Give SequenceParallel().")
    return Sequence(layout.dim)


def _read_input(style: PrepareModuleInput) -> tuple[Style, ...]:
    # Torch passes on as they are the inputs whose present layout is None.
    before, wanted = style.input_layouts or (), style.desired_input_layouts or ()
    positional = [one if now is not None else None for now, one in zip(before, wanted, strict=True)]
    keyword = {
        name: layout
        for name, layout in style.desired_input_kwarg_layouts.items()
        if style.input_kwarg_layouts.get(name) is not None
    }
    is_empty = all(one is None for one in (*positional, *keyword.values()))
    return () if is_empty else (ModuleInput(*positional, **keyword),)


def _read_output(style: PrepareModuleOutput) -> tuple[Style, ...]:
    before, wanted = style.output_layouts, style.desired_output_layouts
    outputs = [one if now is not None else None for now, one in zip(before, wanted, strict=True)]
    return () if all(one is None for one in outputs) else (ModuleOutput(*outputs),)
