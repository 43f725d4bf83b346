"""Translates PyTorch's parallel styles, given as objects or classes, to ours.

PyTorch's also state the present placement of a value (`input_layouts`), which is known here.
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
from shardscope.parallel.plan.placement_syntax import read_placement
from shardscope.parallel.plan.styles import (
    Colwise,
    ModuleInput,
    ModuleOutput,
    Rowwise,
    Sequence,
    Style,
)
from shardscope.plan.placements import Placement, Replicate, Shard

_KNOWN_STYLES = (
    "ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput, PrepareModuleOutput "
    "and PrepareModuleInputOutput"
)


def is_torch_style(value: Any) -> bool:
    """Whether it is a parallel style of PyTorch, or such a class."""
    return issubclass(value if isinstance(value, type) else type(value), ParallelStyle)


def read_torch_style(value: Any, location: str) -> tuple[Style, ...]:
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
        return (*_read_input(prepare_input), *_read_output(prepare_output))
    if isinstance(style, PrepareModuleInput):
        return _read_input(style)
    if isinstance(style, PrepareModuleOutput):
        return _read_output(style)
    raise PlanError(
        f"{location} gives {type(style).__name__}, which shardscope cannot interpret. Give one of "
        f"{_KNOWN_STYLES} (or a subclass), or one of ours, such as Colwise()."
    )


def _instantiate(value: Any, location: str) -> Any:
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


def _placement_of(style: Any, name: str) -> Placement | None:
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


def _read_input(style: PrepareModuleInput) -> tuple[Style, ...]:
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


def _read_output(style: PrepareModuleOutput) -> tuple[Style, ...]:
    present, desired = style.output_layouts, style.desired_output_layouts
    outputs = [
        target if source is not None else None
        for source, target in zip(present, desired, strict=True)
    ]
    return () if all(placement is None for placement in outputs) else (ModuleOutput(*outputs),)
