"""From a single-device program, a mesh and a plan to a program for each rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

from torch import Tensor, nn
from torch.export import ExportedProgram

from shardscope._torch.modules import is_compile_wrapper, unwrap
from shardscope._torch.private import explain_moved_names
from shardscope.errors import ParallelError
from shardscope.parallel.blame import explained
from shardscope.parallel.boundaries import Borders, find_borders
from shardscope.parallel.capture import Capture, WithLoss, export_model, export_with_loss
from shardscope.parallel.flow import Flow, Role, Value
from shardscope.parallel.heads import check_heads
from shardscope.parallel.layouts import Seat
from shardscope.parallel.mesh import Mesh, read_mesh
from shardscope.parallel.order import check_order
from shardscope.parallel.parity.single import copy_model
from shardscope.parallel.placements import Placement, Replicate
from shardscope.parallel.plan.outlines import outline_of_program
from shardscope.parallel.plan.plan import Plan
from shardscope.parallel.plan.resolve import resolve
from shardscope.parallel.plan.resolved import Pin, Resolved
from shardscope.parallel.program import ParallelProgram
from shardscope.parallel.propagate import Fallback, Wishes, propagate_axis
from shardscope.parallel.source import make_functional, read_program
from shardscope.parallel.symbols import find_cuts

__all__ = ["check_program", "cut_by_plan", "cut_program", "parallelize", "place"]

_Key = TypeVar("_Key")
_one_at_a_time = threading.RLock()
_NO_WISHES = Wishes(inputs={}, entering={}, leaving={}, outputs=lambda _: None)


@explain_moved_names
def parallelize(
    program: ExportedProgram | nn.Module,
    mesh: Any,
    plan: Any,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., Tensor] | None = None,
    targets: Sequence[Any] = (),
    inputs: Mapping[str | int, Any] | None = None,
    outputs: Mapping[str | int, Any] | None = None,
    dynamic_shapes: Any = None,
    training: bool = False,
    strict: bool = False,
    verify: bool = True,
) -> ParallelProgram:
    """Partition an exported program, or a model with example inputs, for each rank of a mesh.

    Tensors that the plan does not mention stay replicated. The original is not changed.

    Args:
        program: A `torch.export` program, or a model that is exported on `args` and `kwargs`.
        mesh: A `DeviceMesh`, or axis names and sizes: `"dp=2,tp=4"` or `{"dp": 2, "tp": 4}`.
        plan: A `Plan`, a mapping of module names or patterns to styles, or the path of a TOML file.
        args: Example arguments of the model.
        kwargs: Example keyword arguments of the model.
        loss: A function `loss(output, *targets)`; the program is then ready for training.
        targets: Example targets of the loss.
        inputs: Placements of inputs, by path or position; others are replicated.
        outputs: Placements of outputs, by path or position.
        dynamic_shapes: `dynamic_shapes` of torch.export.
        training: The exported program returns a loss and is to be trained.
        strict: Raise an error if an op cannot run on shards.
        verify: Run all ranks in this process and compare them with the original.

    Examples:
        >>> plan = {"layers.*.up": Colwise(), "layers.*.down": Rowwise()}
        >>> program = parallelize(model, "tp=4", plan, args=(tokens,))
        >>> program.collectives
    """
    axes = read_mesh(mesh)
    chosen = Plan.of(plan).with_values(inputs=inputs, outputs=outputs)
    if isinstance(program, nn.Module) and is_compile_wrapper(program):
        program = unwrap(program)  # its modules have the names that plans are written for
    given = _check_arguments(program, args, kwargs or {}, loss, targets, dynamic_shapes)
    # Torch traces one program at a time.
    with _one_at_a_time, explained(f"{type(program).__name__} cannot be parallelized"):
        captured, original = _capture(program, given, loss, dynamic_shapes)
        is_training = training or loss is not None
        made = _cut(captured, axes, chosen, is_training=is_training)
        made.original = original
        if strict and made.fallbacks:
            raise _refuse(made.fallbacks, axes)
        if verify:
            made.verify()
    return made


def cut_by_plan(
    program: ExportedProgram, mesh: Any, plan: Any, *, is_training: bool = False
) -> ParallelProgram:
    """The program cut as a plan says."""
    return _cut(Capture(program), read_mesh(mesh), Plan.of(plan), is_training=is_training)


def _cut(capture: Capture, mesh: Mesh, plan: Plan, *, is_training: bool) -> ParallelProgram:
    outline = outline_of_program(capture.program)
    resolved = resolve(plan, outline, mesh.axes)
    # A cache of keys and values is the model's own state: each rank keeps its shard of it, unless
    # the plan names that output.
    cached = [path for i, path in enumerate(outline.outputs or ()) if i in capture.cached]
    as_computed: dict[str, Pin] = dict.fromkeys(cached, (None,) * len(mesh.axes))
    resolved = replace(resolved, outputs={**as_computed, **resolved.outputs})
    return cut_program(capture.program, mesh, resolved, is_training=is_training)


def cut_program(
    program: ExportedProgram, mesh: Mesh, resolved: Resolved, *, is_training: bool = False
) -> ParallelProgram:
    """The program cut as a plan that was made definite says, be it nowhere."""
    outline = outline_of_program(program)
    source = make_functional(program)
    flow = read_program(source)
    names = {value.alias: path for path, value in (outline.inputs or {}).items()}
    flow.name_values(names, list(outline.outputs or ()))
    names_of = {home: (home, *one.aliases) for home, one in outline.tensors.items()}
    aliases = {name: names_of[home] for name, home in outline.homes.items()}
    fallbacks = place(flow, mesh, resolved, aliases=aliases, is_training=is_training)
    made = ParallelProgram(
        source=source,
        flow=flow,
        mesh=mesh,
        plan=resolved,
        fallbacks=fallbacks,
        is_training=is_training,
    )
    check_order(flow, mesh, gradients=made.gradients)
    return made


def place(
    flow: Flow,
    mesh: Mesh,
    resolved: Resolved,
    *,
    aliases: Mapping[str, Sequence[str]] | None = None,
    is_training: bool = False,
) -> list[Fallback]:
    """Give every value its placements, and put in the moves, one axis after the other."""
    borders = find_borders(flow, resolved, aliases)
    check_heads(flow, borders, mesh)
    given = _place_inputs(flow, resolved)
    pins = [*borders.leaving.items(), *given.items()]
    pins += [(value, pin) for (_, value), pin in borders.entering.items()]
    flow.cut_sizes(find_cuts([(value.shape, pin) for value, pin in pins], mesh.sizes))
    first = Seat(mesh.sizes, (0,) * len(mesh.sizes))
    fallbacks = []
    for axis, num_ranks in enumerate(mesh.sizes):
        # A single rank has everything: its pieces are the whole.
        is_alone = num_ranks == 1
        wishes = _NO_WISHES if is_alone else _wishes(flow, resolved, borders, given, axis)
        fallbacks += propagate_axis(
            flow, axis=axis, seat=first, wishes=wishes, is_training=is_training
        )
    return fallbacks


def check_program(program: Any) -> None:
    """Refuse what torch.export did not make, with what to do about it."""
    if isinstance(program, ExportedProgram):
        return
    remedy = "Export it first: torch.export.export(model, example_inputs)."
    if not isinstance(program, nn.Module):
        remedy = "Give what torch.export.export(model, example_inputs) returns."
    raise ParallelError(f"{type(program).__name__} is not an exported program. {remedy}")


@final
@dataclass(frozen=True)
class _Given:
    """What a model is called with, and its loss after the output."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: tuple[Any, ...]


def _check_arguments(
    program: Any, args: Any, kwargs: Any, loss: Any, targets: Any, dynamic_shapes: Any
) -> _Given:
    given = _Given(_as_tuple(args), dict(kwargs), _as_tuple(targets))
    is_program = isinstance(program, ExportedProgram)
    if is_program and (given.args or kwargs or loss is not None or dynamic_shapes is not None):
        raise ParallelError(
            "args, kwargs, loss and dynamic_shapes are for a model that is still to be "
            "exported. Give the model, or export it with its loss and pass training=True."
        )
    if given.targets and loss is None:
        raise ParallelError(
            "targets are what a loss takes after the model's output, and there is no loss. Give "
            "loss=, called as loss(output, *targets)."
        )
    if loss is not None and not callable(loss):
        raise ParallelError(
            f"loss is {type(loss).__name__}, not a function. Give one that is called as "
            "loss(output, *targets) and returns one number."
        )
    if not is_program and not isinstance(program, nn.Module):
        raise ParallelError(
            f"{type(program).__name__} is neither an exported program nor a model. Give what "
            "torch.export.export(model, args) returns, or the model and args."
        )
    if not is_program and not (given.args or given.kwargs):
        raise ParallelError(
            f"{type(program).__name__} is a model, and there is nothing to export it with. Give "
            "example inputs: parallelize(model, mesh, plan, args=(x,))."
        )
    return given


def _as_tuple(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, (tuple, list)) else (values,)


def _capture(
    program: Any, given: _Given, loss: Any, dynamic_shapes: Any
) -> tuple[Capture, Callable[[], nn.Module]]:
    """The program, and how to get a copy of what it was captured from."""
    if isinstance(program, ExportedProgram):
        return Capture(program), lambda: copy_model(program.module())
    args, kwargs = given.args, given.kwargs
    if loss is None:
        return export_model(program, args, kwargs, dynamic_shapes), lambda: copy_model(program)
    targets = given.targets
    captured = export_with_loss(program, loss, args, kwargs, targets, dynamic_shapes)
    return Capture(captured), lambda: WithLoss(copy_model(program), loss, args, kwargs, targets)


def _place_inputs(flow: Flow, resolved: Resolved) -> dict[Value, tuple[Placement, ...]]:
    """How the program's inputs, parameters, buffers and constants lie."""
    placed = {}
    for value, role in flow.inputs:
        table = resolved.inputs if role.kind == "input" else resolved.tensors
        if role.name in table:
            placed[value] = table[role.name]
    return placed


def _wishes(
    flow: Flow,
    resolved: Resolved,
    borders: Borders,
    given: Mapping[Value, tuple[Placement, ...]],
    axis: int,
) -> Wishes:
    is_data_axis = any(
        pin[axis] != Replicate()
        for value, pin in given.items()
        if any(one is value and role.kind == "input" for one, role in flow.inputs)
    )

    def wish_for_output(role: Role) -> Placement | None:
        if role.kind == "mutation":
            return resolved.tensors.get(role.name, _whole(resolved))[axis]
        if role.kind == "input mutation":
            return resolved.inputs.get(role.name, _whole(resolved))[axis]
        if role.name in resolved.outputs:
            return resolved.outputs[role.name][axis]
        return None if is_data_axis else Replicate()

    return Wishes(
        inputs={value: pin[axis] for value, pin in given.items()},
        entering=_along(borders.entering, axis),
        leaving=_along(borders.leaving, axis),
        outputs=wish_for_output,
        left=borders.left,
        is_data_axis=is_data_axis,
    )


def _along(pins: Mapping[_Key, Pin], axis: int) -> dict[_Key, Placement]:
    placed = {key: pin[axis] for key, pin in pins.items()}
    return {key: one for key, one in placed.items() if one is not None}


def _whole(resolved: Resolved) -> tuple[Placement, ...]:
    return (Replicate(),) * len(resolved.axes)


def _refuse(fallbacks: list[Fallback], mesh: Mesh) -> ParallelError:
    first = fallbacks[0]
    axis = list(mesh.axes)[first.axis]
    lies = ", ".join(str(one) for one in first.placements)
    more = f", and {len(fallbacks) - 1} more" if len(fallbacks) > 1 else ""
    return ParallelError(
        f"strict: {first.origin.op} ({first.origin.node}, in {first.origin.module or 'the program'}"
        f", {first.origin.line}) cannot run on {lies} along {axis}{more}. Change the plan so that "
        "its inputs are replicated there, or drop strict=True to have them gathered."
    )
