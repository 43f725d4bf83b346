"""`infer_types(model, mesh, …)`: how every tensor of a parallel model is distributed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from shardscope._torch.private import explain_moved_names
from shardscope.attribution.program_records import describe_run, find_torch_gaps
from shardscope.errors import ParityError
from shardscope.parallel.equivalence import Task, TrainStep
from shardscope.parallel.inferred_types.findings import find_contradictions
from shardscope.parallel.inferred_types.inference import infer_types as infer_from_samples
from shardscope.parallel.inferred_types.samples import take_samples
from shardscope.parallel.parity.api import ranks_lock
from shardscope.parallel.parity.arguments import (
    checked_axes,
    checked_batch_axes,
    checked_inputs,
    checked_model,
    device_type,
    keep_unsharded,
    list_batches,
    make_training,
)
from shardscope.parallel.parity.versions import EagerVersion, Parallelize
from shardscope.record import (
    UNDECIDED,
    Axis,
    Gap,
    InferredTypes,
    RankSpan,
    Recording,
    TensorTypes,
)

_CALLER = "infer_types()"
_MAX_NAMES = 8


@explain_moved_names
def infer_types(
    model: nn.Module,
    mesh: Mapping[str, int],
    *,
    inputs: Any = None,
    parallelize: Parallelize | None = None,
    loss: Callable[[Any], Any] | None = None,
    step: Callable[[nn.Module, Any], Any] | None = None,
    train_step: TrainStep | None = None,
    parallel_train_step: TrainStep | None = None,
    optimizer: Callable[[nn.Module], Any] | None = None,
    batch_axes: str | Sequence[str] = (),
    batch_dim: int = 0,
    num_runs: int = 3,
    seed: int = 0,
    report: Callable[[str], None] = lambda _: None,
) -> Recording:
    """Infer how every tensor of a parallel model is distributed along each mesh axis.

    The tensors are the inputs and outputs of every module, parameters and buffers, and their
    gradients. All ranks run in this process, and the values that they have are compared with the
    single device's, in several runs with other weights and inputs, as `parity` does. Nothing has to
    be annotated. The recording has the types, findings where a type contradicts the use of the
    tensor, and gaps where values do not decide.

    Args:
        model: The single-device model.
        mesh: Axis names and sizes, such as `{"dp": 2, "tp": 2}`.
        inputs: The inputs of the model: a tuple of arguments, a mapping of keyword arguments, or
            one tensor.
        parallelize: A function `(model, device_mesh)` that shards a copy of the model on each rank.
        loss: A function of the output from which backward starts; by default a nonlinear sum over
            its elements.
        step: A function `(model, inputs)` that runs forward and backward, instead of `loss`.
        train_step: A function `(model, batch, optimizer)` that runs one training step, instead.
        parallel_train_step: The training step of the ranks; by default `train_step`.
        optimizer: A function of the model that makes its optimizer.
        batch_axes: Mesh axes along which each rank gets its shard of the batch.
        batch_dim: The dim of the inputs that is the batch.
        num_runs: How many sets of weights and inputs a type must hold for. The first is the
            model's own.
        seed: Random seed of each rank.
        report: Called with a description of the current activity.

    Examples:
        >>> show(infer_types(model, {"tp": 2}, parallelize=parallelize, inputs=(tokens,)))
    """
    axes = checked_axes(mesh, _CALLER)
    original = checked_model(model, _CALLER)
    training = make_training(train_step, parallel_train_step, optimizer, loss or step, _CALLER)
    if parallelize is None and training is None:
        raise ParityError(
            f"{_CALLER} got no function that shards the model. Pass parallelize=fn, called as "
            "fn(model, device_mesh)."
        )
    if training is not None:
        inputs = list_batches(inputs, None, 1, _CALLER)
    version = EagerVersion(
        original,
        axes,
        parallelize or keep_unsharded,
        Task(checked_inputs(inputs, _CALLER), loss, step, seed=seed, training=training),
        checked_batch_axes(batch_axes, axes, _CALLER),
        batch_dim,
        device=device_type(original),
    )
    return _infer(version, max(1, num_runs), report)


def _infer(version: EagerVersion, num_runs: int, report: Callable[[str], None]) -> Recording:
    gaps: dict[tuple[str, str], None] = {}
    # Run eagerly: the modules inside a compiled graph could not be recorded.
    with ranks_lock, torch.compiler.set_stance("force_eager"):
        samples, is_exact = take_samples(
            version,
            num_runs,
            report=lambda *gap: gaps.setdefault(gap),
            report_progress=report,
        )
        tensors, factor = infer_from_samples(samples, list(version.axes))
    axes = tuple(Axis(name=name, size=size) for name, size in version.axes.items())
    types = InferredTypes(
        axes=axes,
        tensors=tuple(tensors),
        num_runs=len(samples),
        is_exact=is_exact,
        gradient_factor=factor,
    )
    size = math.prod(version.axes.values())
    run = describe_run(0, size, axes, instrument="types")
    return Recording(
        run=replace(run, ranks=(RankSpan(0, size),), is_simulated=True),
        types=(types,),
        findings=tuple(
            find_contradictions(
                types,
                version.batch_axes,
                is_loss_default=version.task.step is None
                and version.task.loss is None
                and version.task.training is None,
            )
        ),
        gaps=(
            *find_torch_gaps(),
            *(Gap(place=place, fact=fact) for place, fact in gaps),
            *_list_undecided(types),
        ),
    )


def _list_undecided(types: InferredTypes) -> Iterator[Gap]:
    """A gap for each axis along which the values of tensors do not decide."""
    for index, axis in enumerate(types.axes):
        if axis.size == 1:
            yield Gap(place=axis.name, fact="no types: the axis has a single rank")
            continue
        names = [
            _describe(tensor)
            for tensor in types.tensors
            if UNDECIDED in (tensor.axes[index].forward, tensor.axes[index].gradient)
        ]
        if names:
            listed = list(dict.fromkeys(names))
            more = f" and {len(listed) - _MAX_NAMES:,} more" if len(listed) > _MAX_NAMES else ""
            fact = (
                f"the values do not decide the types of {len(names):,} tensors or gradients, such "
                f"as zeros: {', '.join(listed[:_MAX_NAMES])}{more}"
            )
            yield Gap(place=axis.name, fact=fact)


def _describe(tensor: TensorTypes) -> str:
    return f"{tensor.describe(is_folded=True)} {tensor.role}"
