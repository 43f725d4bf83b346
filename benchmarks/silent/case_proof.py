"""Proves the cases: gloo processes against a single device, in float64, in both variants.

    PYTHONPATH=src:. python -m benchmarks.silent.case_proof             # all cases
    PYTHONPATH=src:. python -m benchmarks.silent.case_proof cp_ norm    # names that contain these

Nothing of shardscope is used. After all steps the numbers that the steps return, the last
gradients, the updated parameters and the buffers of every rank are compared with the single
device's. A buggy variant has to differ by more than `LEAST`, a corrected one by less than `MOST`,
relative to the largest element. Parameters may have wrappers' prefixes; those that are plain
tensors are gathered along the mesh axis that fits. Where ranks name parameters differently, as
experts that are numbered from zero, a case defines `full_name(name, mesh)`.
"""

from __future__ import annotations

import inspect
import itertools
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmarks.silent.case import Case, list_cases, load_case
from benchmarks.silent.correct_steps import plain_name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map

LEAST, MOST = 1e-6, 1e-9
_TIMEOUT = timedelta(seconds=60)
_KINDS = ("numbers", "gradients", "parameters", "buffers")
Named = dict[str, Tensor]


@dataclass
class Result:
    """What a run computes: the numbers of its steps, and its tensors at the end, by kind."""

    numbers: Named = field(default_factory=dict)
    gradients: Named = field(default_factory=dict)
    parameters: Named = field(default_factory=dict)
    buffers: Named = field(default_factory=dict)


@dataclass(frozen=True)
class Deviation:
    """The largest relative error of each kind over all ranks, or the failure of the program."""

    errors: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""

    @property
    def largest(self) -> float:
        """The largest error of all kinds."""
        return max(self.errors.values(), default=math.nan)

    def is_right(self, *, is_buggy: bool) -> bool:
        """Whether the variant differs, or does not, as it should."""
        return not self.failure and (self.largest > LEAST if is_buggy else self.largest < MOST)


def prove(names: Sequence[str]) -> int:
    """Prove both variants of each case and print a table; 1 if any is not as it should be."""
    num_wrong = 0
    width = max(map(len, names), default=0)
    print(f"{'case':{width}}  variant    {'  '.join(f'{kind:>10}' for kind in _KINDS)}")
    deviations = {is_buggy: measure(names, is_buggy=is_buggy) for is_buggy in (True, False)}
    for name, is_buggy in itertools.product(names, (True, False)):
        deviation = deviations[is_buggy][name]
        is_right = deviation.is_right(is_buggy=is_buggy)
        num_wrong += not is_right
        cells = [f"{deviation.errors.get(kind, math.nan):10.1e}" for kind in _KINDS]
        text = deviation.failure or "  ".join(cells)
        variant = "buggy" if is_buggy else "corrected"
        print(f"{name:{width}}  {variant:9}  {text}{'' if is_right else '  <- wrong'}", flush=True)
    print(f"{len(names)} cases, {num_wrong} variants that are not as they should be")
    return int(num_wrong > 0)


def measure(names: Sequence[str], *, is_buggy: bool) -> dict[str, Deviation]:
    """How far one variant of each case is from the single device."""
    by_size: dict[int, list[str]] = {}
    for name in names:
        case: Case = load_case(name, is_buggy=is_buggy).CASE
        by_size.setdefault(math.prod(case.mesh.values()), []).append(name)
    deviations: dict[str, Deviation] = {}
    for size, group in by_size.items():
        remaining = group
        while remaining:
            results = _run_processes(size, remaining, is_buggy)
            deviations |= results
            if len(results) < len(remaining) and not any(r.failure for r in results.values()):
                name = remaining[len(results)]
                deviations[name] = Deviation(failure="the processes ended")
            remaining = [name for name in remaining if name not in deviations]
    return deviations


def _run_processes(size: int, names: Sequence[str], is_buggy: bool) -> dict[str, Deviation]:
    """Run cases on `size` processes, until a case fails."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _run_rank,
            (size, folder, list(names), is_buggy),
            nprocs=size,
            join=False,
            start_method="fork",
        )
        while not context.join(grace_period=5):
            pass
        path = os.path.join(folder, "deviations")
        return torch.load(path, weights_only=False) if os.path.exists(path) else {}


def _run_rank(rank: int, size: int, folder: str, names: Sequence[str], is_buggy: bool) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    deviations: dict[str, Deviation] = {}
    store = dist.FileStore(os.path.join(folder, "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    for name in names:
        try:
            deviation = Deviation(_compare(load_case(name, is_buggy=is_buggy)))
        except Exception as error:  # noqa: BLE001 - a failure is a result
            deviation = Deviation(failure=f"{type(error).__name__}: {error!s:.300}")
        all_deviations: list[Any] = [None] * size
        dist.all_gather_object(all_deviations, deviation)
        deviations[name] = _merge(all_deviations)
        if rank == 0:
            torch.save(deviations, os.path.join(folder, "deviations"))
        if deviations[name].failure:
            break  # messages may be left between the ranks
    dist.barrier()
    os._exit(0)


def _merge(deviations: Sequence[Deviation]) -> Deviation:
    """The deviation of all ranks together."""
    failure = next((deviation.failure for deviation in deviations if deviation.failure), "")
    kinds = {kind: None for deviation in deviations for kind in deviation.errors}
    return Deviation({k: max(d.errors.get(k, 0.0) for d in deviations) for k in kinds}, failure)


def _compare(program: ModuleType) -> dict[str, float]:
    """The largest error of each kind on this rank."""
    case: Case = program.CASE
    mesh = init_device_mesh("cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))
    single, local = run_single(program), run_rank(program, mesh)
    errors: dict[str, float] = {}
    for kind in _KINDS:
        expected: Named = getattr(single, kind)
        actual: Named = getattr(local, kind)
        names_by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names_by_rank, sorted(actual))
        is_known = set().union(*names_by_rank) == set(expected)
        worst = 0.0 if is_known else math.inf  # a tensor that no rank has, or only ranks have
        for name in sorted(actual.keys() & expected.keys()):
            worst = max(worst, _measure_error(actual[name], expected[name], mesh))
        if expected or actual:
            errors[kind] = worst
    return errors


def _measure_error(value: Tensor, expected: Tensor, mesh: DeviceMesh) -> float:
    """The relative error of a tensor in the layout that fits best; infinite if none does."""
    scale = expected.abs().max().clamp(min=1e-30) if expected.numel() else torch.tensor(1.0)
    errors = [
        float((candidate - expected).abs().max() / scale) if expected.numel() else 0.0
        for candidate in _gather(value, expected, mesh)
        if candidate.shape == expected.shape
    ]
    finite = [error if math.isfinite(error) else math.inf for error in errors]
    return min(finite, default=math.inf)


def _gather(value: Tensor, expected: Tensor, mesh: DeviceMesh) -> Iterator[Tensor]:
    """The full tensors that the parts of ranks make up, for each mesh axis that may shard it."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if value.shape == expected.shape or value.ndim != expected.ndim:
        yield value
        return
    dims = [d for d in range(value.ndim) if value.shape[d] != expected.shape[d]]
    names = [name for name in mesh.mesh_dim_names or () if mesh[name].size() > 1]
    for count in range(1, len(names) + 1):
        for axes in itertools.combinations(names, count):
            parts = math.prod(mesh[axis].size() for axis in axes)
            if len(dims) > 1 or expected.shape[dims[0]] != parts * value.shape[dims[0]]:
                continue
            full = value
            for axis in reversed(axes):
                shards: list[Any] = [None] * mesh[axis].size()
                dist.all_gather_object(shards, full, group=mesh.get_group(axis))
                full = torch.cat(shards, dims[0])
            yield full


def run_single(program: ModuleType) -> Result:
    """Run the steps of the single device."""
    model, batch = _make(program)
    optimizer = program.optimizer(model)
    numbers: Named = {}
    for index in range(program.CASE.num_steps):
        with _default_dtype(torch.float64):
            returned = _call(program.train_step, model, batch, optimizer, None)
        numbers |= _name_numbers(returned, index)
    return _collect(model, numbers, lambda name: name)


def run_rank(program: ModuleType, mesh: DeviceMesh) -> Result:
    """Run the steps of this rank."""
    model, batch = _make(program)
    optimizer = None
    parallelize = getattr(program, "parallelize", None)
    if parallelize is not None:
        returned = parallelize(model, mesh)
        if isinstance(returned, tuple):
            model, optimizer = returned
        elif isinstance(returned, nn.Module):
            model = returned
    optimizer = optimizer or program.optimizer(model)
    batch = _shard(batch, program.CASE, mesh)
    step = getattr(program, "parallel_train_step", program.train_step)
    numbers: Named = {}
    for index in range(program.CASE.num_steps):
        with _default_dtype(torch.float64):
            numbers |= _name_numbers(_call(step, model, batch, optimizer, mesh), index)
    full_name = getattr(program, "full_name", lambda name, _: plain_name(name))
    return _collect(model, numbers, lambda name: full_name(name, mesh))


def _make(program: ModuleType) -> tuple[nn.Module, Any]:
    """The model and the batch in double precision, always with the same values."""
    torch.manual_seed(7)
    model = program.model()
    batch = program.batch(model)
    double = tree_map(
        lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, batch
    )
    return model.double(), double


class _default_dtype:  # noqa: N801 - a context manager
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self._before)


def _call(step: Any, model: nn.Module, batch: Any, optimizer: Any, mesh: DeviceMesh | None) -> Any:
    """Call a training step, with the mesh if it takes one."""
    takes_mesh = len(inspect.signature(step).parameters) > 3
    return step(model, batch, optimizer, *([mesh] if takes_mesh else []))


def _name_numbers(returned: Any, index: int) -> Named:
    """The numbers that a step returns, named by step and place."""
    leaves = [leaf for leaf in tree_flatten(returned)[0] if leaf is not None]
    tensors = [
        leaf.detach().full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in leaves
    ]
    return {
        f"{index}.{place}": torch.as_tensor(tensor, dtype=torch.float64).detach()
        for place, tensor in enumerate(tensors)
    }


def _collect(model: nn.Module, numbers: Named, full_name: Any) -> Result:
    parameters = {full_name(name): p for name, p in model.named_parameters()}
    gradients = {n: p.grad.detach() for n, p in parameters.items() if p.grad is not None}
    buffers = {full_name(name): tensor.detach() for name, tensor in model.named_buffers()}
    return Result(numbers, gradients, {n: p.detach() for n, p in parameters.items()}, buffers)


def _shard(batch: Any, case: Case, mesh: DeviceMesh) -> Any:
    """This rank's part of the batch along the case's batch axes."""
    number, index = 1, 0
    for axis in case.batch_axes:
        number *= case.mesh[axis]
        index = index * case.mesh[axis] + mesh.get_local_rank(axis)

    def shard(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim <= case.batch_dim:
            return value
        return value.tensor_split(number, case.batch_dim)[index]

    return tree_map(shard, batch)


if __name__ == "__main__":
    patterns = sys.argv[1:]
    chosen = [n for n in list_cases() if not patterns or any(p in n for p in patterns)]
    sys.exit(prove(chosen))
