"""Checks the arguments of `parity` and of functions that take the same ones.

`caller` is the function that the user called, as errors name it: `parity()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.export import ExportedProgram
from torch.nn.parameter import is_lazy

from shardscope.errors import ParityError
from shardscope.parallel.equivalence import Training, TrainStep, as_model, named_tensors


def list_batches(
    inputs: object, batches: Sequence[object] | None, steps: int, caller: str
) -> list[object]:
    """The batch of each training step."""
    listed = [inputs] * steps if batches is None else list(batches)
    if not listed:
        raise ParityError(
            f"{caller} got no training step to compare: "
            + (f"steps is {steps}." if batches is None else "batches is empty.")
            + " Compare at least one; the optimizer's state shows from the second on."
        )
    return listed


def make_training(
    train_step: TrainStep | None,
    parallel_train_step: TrainStep | None,
    optimizer: Callable[[nn.Module], Any] | None,
    step: object,
    caller: str,
) -> Training | None:
    """How the model is trained; None if one step of forward and backward is compared."""
    if train_step is None:
        if parallel_train_step is not None:
            raise ParityError(
                f"{caller} got parallel_train_step= without train_step=, the training step of the "
                "single device. Pass both."
            )
        return None
    if step is not None:
        raise ParityError(
            f"{caller} got train_step= and a loss or a step, but a training step computes its own "
            "loss. Pass only train_step=."
        )
    return Training(train_step, parallel_train_step or train_step, optimizer)


def keep_unsharded(model: nn.Module, _: object) -> nn.Module:
    """The `parallelize` of training steps that issue all collectives themselves: no change."""
    return model


def checked_axes(mesh: object, caller: str) -> dict[str, int]:
    """Names and sizes of the mesh axes."""
    if not isinstance(mesh, Mapping) or not mesh:
        raise ParityError(
            f"{caller} got mesh={mesh!r:.80}, which has no axis. Pass axis names and sizes, for "
            'example {"tp": 4}.'
        )
    return {str(name): int(size) for name, size in mesh.items()}


def checked_batch_axes(
    batch_axes: str | Sequence[str], axes: Mapping[str, int], caller: str
) -> tuple[str, ...]:
    """The mesh axes along which the batch is sharded."""
    names = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
    for name in names:
        if name not in axes:
            raise ParityError(
                f"{caller} got batch_axes {name!r}, but the mesh has the axes {', '.join(axes)}. "
                "Choose one of those."
            )
    return names


def checked_model(model: object, caller: str) -> nn.Module:
    """The model as a module, with values and as it was before sharding."""
    if not isinstance(model, nn.Module | ExportedProgram):
        raise ParityError(
            f"{caller} got {type(model).__name__}, not a module or an exported program. Pass the "
            "original model, as it runs on a single device."
        )
    original = as_model(model)
    for name, tensor in (*original.named_parameters(), *original.named_buffers()):
        if is_lazy(tensor):
            raise ParityError(
                f"{caller} got a model whose {name} has no shape yet (a lazy module). Call the "
                "model once to initialize it."
            )
        if tensor.is_meta:
            raise ParityError(
                f"{caller} got a model whose {name} is on the meta device, so it has no values to "
                "compare. Build the model on the CPU; with fewer layers if it is large."
            )
        if isinstance(tensor, DTensor):
            raise ParityError(
                f"{caller} got a model whose {name} is a DTensor, so it is sharded already. Pass "
                "the original model, and the function that shards it as parallelize=."
            )
    return original


def checked_inputs(inputs: object, caller: str) -> object:
    """The inputs, which have values."""
    for place, tensor in named_tensors(inputs):
        if tensor.is_meta:
            raise ParityError(
                f"{caller} got inputs{place} on the meta device, so there are no values to "
                "compare. Pass inputs with data."
            )
    return inputs


def device_type(model: nn.Module) -> str:
    """The type of the device that the parameters are on; the CPU if there are several."""
    types = {tensor.device.type for tensor in model.parameters()} - {"cpu"}
    return types.pop() if len(types) == 1 else "cpu"
