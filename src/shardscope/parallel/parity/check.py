"""`parity(model, mesh, …)`: does the parallel version compute what the single device does?

The original runs on a single device, all ranks of the parallel version in this process, and
outputs, gradients and changed buffers are compared. What differs is explained and traced back to
the module it began in.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.tensor import DTensor
from torch.export import ExportedProgram
from torch.nn.parameter import is_lazy

from shardscope.comm.run import describe_run
from shardscope.errors import ParityError
from shardscope.parallel.parity.examine import Version, examine
from shardscope.parallel.parity.findings import find_problems, list_findings, make_parity
from shardscope.parallel.parity.outcome import named_tensors
from shardscope.parallel.parity.processes import Processes
from shardscope.parallel.parity.ranks import Eager, Parallelize
from shardscope.parallel.parity.single import as_model
from shardscope.parallel.parity.task import Task
from shardscope.parallel.parity.transformed import Transformed
from shardscope.record import Gap, RankSpan, Recording

__all__ = ["parity"]

# The process group, DTensor's caches and the default dtype are one for all threads.
_lock = threading.RLock()


def parity(
    model: nn.Module | ExportedProgram,
    mesh: Mapping[str, int],
    plan: Any = None,
    *,
    inputs: Any,
    parallelize: Parallelize | None = None,
    loss: Callable[[Any], Any] | None = None,
    step: Callable[[nn.Module, Any], Any] | None = None,
    batch_axes: str | Sequence[str] = (),
    batch_dim: int = 0,
    precision: torch.dtype | None = None,
    seed: int = 0,
    processes: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> Recording:
    """Compare a parallel version with the original, tensor by tensor.

    >>> show(parity(model, {"tp": 4}, parallelize=parallelize, inputs=(tokens,)))

    `parallelize(model, device_mesh)` shards a copy on each rank of a mesh such as `{"tp": 4}`, in
    any way: parallelize_module, fully_shard, both, by hand. Without it, `plan` says how shardscope
    shards the exported program. The step calls the model with `inputs` (a mapping is keywords, a
    tuple arguments), and its backward begins at `loss(output)`, or at a loss of our own; or it is
    `step(model, inputs)`. Each rank has the whole batch, or along `batch_axes` its share of it.

    A tensor is held to the noise of the single device itself, measured in double precision; to
    compute in a lower `precision` may be allowed. The model, its gradients, buffers and random
    numbers are left as they were. All ranks run in this process, or, with `processes`, each in one
    of its own, on a gloo group. `report` is told what is being done, for those who wait.
    """
    axes = _checked_axes(mesh)
    original = _checked_model(model)
    task = Task(_checked_inputs(inputs), loss, step, seed=seed)
    version: Transformed | Eager
    if parallelize is None:
        version = _transform(model, original, axes, plan, task, is_sent=processes)
    else:
        cut = _checked_batch_axes(batch_axes, axes)
        device = _device_type(original)
        version = Eager(original, axes, parallelize, task, cut, batch_dim, device=device)
    if not processes:
        return _check(version, version, precision=precision, report=report)
    with Processes(version).closing() as ranks:
        return _check(version, ranks, precision=precision, report=report)


def _check(
    version: Transformed | Eager,
    ranks: Version,
    *,
    precision: torch.dtype | None,
    report: Callable[[str], None],
) -> Recording:
    """The recording of a version, whose ranks run in this process or in others."""
    gaps: dict[tuple[str, str], None] = {}
    # A compiled graph would hide the modules; it is the model that is compared.
    with _lock, torch.compiler.set_stance("force_eager"):
        examined = examine(
            ranks, precision=precision, report=lambda *gap: gaps.setdefault(gap), tell=report
        )
    if isinstance(version, Transformed):
        problems = version.find_problem(examined)
    else:
        problems = find_problems(examined, version.axes)
    is_in_processes = ranks is not version
    parity = make_parity(examined, version.axes, problems, is_in_processes=is_in_processes)
    size = math.prod(version.axes.values())
    run = describe_run(0, size, parity.axes, instrument="parity")
    return Recording(
        run=replace(run, ranks=(RankSpan(0, size),), is_simulated=not is_in_processes),
        parity=(parity,),
        findings=tuple(list_findings(parity, problems)),
        gaps=tuple(Gap(place=place, fact=fact) for place, fact in gaps),
    )


def _transform(
    model: nn.Module | ExportedProgram,
    original: nn.Module,
    axes: Mapping[str, int],
    plan: Any,
    task: Task,
    *,
    is_sent: bool,
) -> Transformed:
    """Our own transform, as a version whose ranks can be run."""
    if plan is None:
        raise ParityError(
            "parity() got neither a plan nor a function to parallelize with. Give it "
            "parallelize=fn, which shards a model on a mesh, or a plan for the exported program."
        )
    if task.step is not None:
        raise ParityError(
            "parity() got a plan and step=, but a program is cut with its loss. Give loss=, "
            "which takes what the model returns."
        )
    if is_sent and isinstance(model, ExportedProgram):
        raise ParityError(
            "parity() got an exported program, which cannot be sent to other processes. Give the "
            "model that it was exported from, or let the ranks run in this process."
        )
    if isinstance(model, ExportedProgram):  # which has no loss
        task = dataclasses.replace(task, has_backward=False)
    return Transformed(original, axes, plan, task, model)


def _checked_axes(mesh: Any) -> dict[str, int]:
    if not isinstance(mesh, Mapping) or not mesh:
        raise ParityError(
            f"parity() got mesh={mesh!r:.80}, which names no axis. Give axis names and sizes, for "
            'example {"tp": 4}: its ranks run in this process.'
        )
    return {str(name): int(size) for name, size in mesh.items()}


def _checked_batch_axes(given: str | Sequence[str], axes: Mapping[str, int]) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given)
    for name in names:
        if name not in axes:
            raise ParityError(
                f"parity() is to cut the batch along {name!r}, but the mesh has the axes "
                f"{', '.join(axes)}. Name one of those."
            )
    return names


def _checked_model(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module | ExportedProgram):
        raise ParityError(
            f"parity() got {type(model).__name__} where it wants a module or an exported program. "
            "Give it the original, as it runs on a single device."
        )
    original = as_model(model)
    for name, tensor in (*original.named_parameters(), *original.named_buffers()):
        if is_lazy(tensor):
            raise ParityError(
                f"parity() got a model whose {name} has no shape yet. Call the model once, and "
                "it gets one."
            )
        if tensor.is_meta:
            raise ParityError(
                f"parity() got a model whose {name} is on meta, and numbers are what it compares. "
                "Build the model with data, smaller if it is large: fewer layers are enough."
            )
        if isinstance(tensor, DTensor):
            raise ParityError(
                f"parity() got a model whose {name} is a DTensor, so it is sharded already. Give "
                "it the original, and the function that shards it as parallelize."
            )
    return original


def _checked_inputs(inputs: Any) -> Any:
    for place, tensor in named_tensors(inputs):
        if tensor.is_meta:
            raise ParityError(
                f"parity() got inputs{place} on meta, and numbers are what it compares. Give "
                "inputs with data."
            )
    return inputs


def _device_type(model: nn.Module) -> str:
    types = {tensor.device.type for tensor in model.parameters()} - {"cpu"}
    return types.pop() if len(types) == 1 else "cpu"
