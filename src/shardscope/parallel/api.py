"""`parallelize`: from a single-device program, a mesh and a plan to a program for each rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn
from torch.export import ExportedProgram

from shardscope._torch.modules import is_compile_wrapper, unwrap
from shardscope._torch.private import explain_moved_names
from shardscope.errors import ParallelError
from shardscope.parallel.equivalence import copy_model
from shardscope.parallel.ir.graph import explained
from shardscope.parallel.ir.mesh import Mesh, read_mesh
from shardscope.parallel.partition import partition_capture
from shardscope.parallel.passes import Capture, Fallback, WithLoss, export_model, export_with_loss
from shardscope.parallel.program import ParallelProgram
from shardscope.plan import Plan

_export_lock = threading.RLock()


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
    full_plan = Plan.of(plan).with_values(inputs=inputs, outputs=outputs)
    if isinstance(program, nn.Module) and is_compile_wrapper(program):
        program = unwrap(program)  # its modules have the names that plans are written for
    examples = _check_arguments(program, args, kwargs or {}, loss, targets, dynamic_shapes)
    # Torch traces one program at a time.
    with _export_lock, explained(f"{type(program).__name__} cannot be parallelized"):
        captured, original = _capture(program, examples, loss, dynamic_shapes)
        is_training = training or loss is not None
        parallel_program = partition_capture(captured, axes, full_plan, is_training=is_training)
        parallel_program.original = original
        if strict and parallel_program.fallbacks:
            raise _strict_error(parallel_program.fallbacks, axes)
        if verify:
            parallel_program.verify()
    return parallel_program


def check_program(program: object) -> None:
    """Raise ParallelError unless it is an exported program."""
    if isinstance(program, ExportedProgram):
        return
    remedy = "Export it first: torch.export.export(model, example_inputs)."
    if not isinstance(program, nn.Module):
        remedy = "Give what torch.export.export(model, example_inputs) returns."
    raise ParallelError(f"{type(program).__name__} is not an exported program. {remedy}")


@final
@dataclass(frozen=True)
class _ExampleInputs:
    """Example arguments of a model, and of its loss after the output."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: tuple[Any, ...]


def _check_arguments(
    program: object,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss: object,
    targets: Sequence[Any],
    dynamic_shapes: object,
) -> _ExampleInputs:
    examples = _ExampleInputs(_as_tuple(args), dict(kwargs), _as_tuple(targets))
    is_program = isinstance(program, ExportedProgram)
    if is_program and (examples.args or kwargs or loss is not None or dynamic_shapes is not None):
        raise ParallelError(
            "args, kwargs, loss and dynamic_shapes are for a model that is still to be "
            "exported. Give the model, or export it with its loss and pass training=True."
        )
    if examples.targets and loss is None:
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
    if not is_program and not (examples.args or examples.kwargs):
        raise ParallelError(
            f"{type(program).__name__} is a model, and there is nothing to export it with. Give "
            "example inputs: parallelize(model, mesh, plan, args=(x,))."
        )
    return examples


def _as_tuple(values: object) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, (tuple, list)) else (values,)


def _capture(
    program: ExportedProgram | nn.Module,
    examples: _ExampleInputs,
    loss: Callable[..., Tensor] | None,
    dynamic_shapes: object,
) -> tuple[Capture, Callable[[], nn.Module]]:
    """The exported program, and a function that returns a copy of the model it comes from."""
    if isinstance(program, ExportedProgram):
        return Capture(program), lambda: copy_model(program.module())
    args, kwargs = examples.args, examples.kwargs
    if loss is None:
        return export_model(program, args, kwargs, dynamic_shapes), lambda: copy_model(program)
    targets = examples.targets
    captured = export_with_loss(program, loss, args, kwargs, targets, dynamic_shapes)
    return Capture(captured), lambda: WithLoss(copy_model(program), loss, args, kwargs, targets)


def _strict_error(fallbacks: list[Fallback], mesh: Mesh) -> ParallelError:
    first = fallbacks[0]
    axis = list(mesh.axes)[first.axis]
    placements = ", ".join(str(placement) for placement in first.placements)
    more = f", and {len(fallbacks) - 1} more" if len(fallbacks) > 1 else ""
    return ParallelError(
        f"strict: {first.origin.op} ({first.origin.node}, in {first.origin.module or 'the program'}"
        f", {first.origin.line}) cannot run on {placements} along {axis}{more}. Change the plan "
        "so that "
        "its inputs are replicated there, or drop strict=True to have them gathered."
    )
