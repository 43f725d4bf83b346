"""Whether an op on DTensors computes what the op on full tensors does, on all ranks of a
small mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing import make_tensor

from shardscope._torch.cuda.kernel_choices import has_cpu_kernel
from shardscope._torch.dispatch import TORCHS_OWN, disable_dispatch_modes, op_packet
from shardscope._torch.dtensor import MeshPlacements, all_ranks, forget_decisions, split_ranks
from shardscope._torch.mesh import describe_placements
from shardscope._torch.random_state import preserved_random_state, seed_torch
from shardscope.attribution.tensors import tensors_in
from shardscope.numerics import (
    RandomRounding,
    find_floor,
    has_same_nonfinite,
    is_inexact,
    to_fp64_on_cpu,
)
from shardscope.shard.coverage.dispatch import describe
from shardscope.shard.coverage.op_calls import Arguments, Pattern, Signature, TensorSpec
from shardscope.shard.coverage.small_mesh import (
    SmallMesh,
    SmallMeshes,
    can_be_sharded,
    is_replicate_or_shard,
)

_SEED = 20
_NUM_PERTURBED_RUNS = 3

RankShards = tuple[MeshPlacements, Mapping[int, torch.Tensor]]
"""The placements of a result, and its shard by rank."""
ShardFunction = Callable[[torch.Tensor, MeshPlacements, int], torch.Tensor]
"""Returns a rank's shard of a full tensor with given placements."""


@final
class Reference:
    """Inputs and results of a call on full tensors. Raises what the op raises."""

    def __init__(self, call: Signature, device: torch.device) -> None:
        self._call = call
        self._device = device
        self._limit = _smallest_size(call)
        self._ignored = call.constant("ignore_index")
        self._inputs = [self._make(spec, seed) for seed, (_, spec) in enumerate(call.tensors())]
        self.results, after = self._run(_SEED)
        self._written = [
            index
            for index, (old, new) in enumerate(zip(self._inputs, after, strict=True))
            if not _is_same(old, new)
        ]
        self.results += [after[index] for index in self._written]
        # `empty` and its kind are uninitialized; results that differ by the seed are random.
        second_results = [] if self._is_unset else self._run(_SEED + 1)[0]
        self.is_arbitrary = self._is_unset or not all(map(_is_same, self.results, second_results))

    @property
    def _is_unset(self) -> bool:
        return "empty" in op_packet(self._call.op).__name__

    def make_inputs(self) -> list[torch.Tensor]:
        """Copies of the inputs, which the caller may change."""
        return [_copy(tensor) for tensor in self._inputs]

    def written(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs that the op writes to."""
        return [inputs[index] for index in self._written]

    def find_difference(self, results: Sequence[RankShards], shard: ShardFunction) -> str:
        """Describe the first rank's shard that differs from the reference; empty if none does."""
        if len(results) != len(self.results):
            return f"it returns {len(results)} tensors, not {len(self.results)}"
        for index, (placements, shards) in enumerate(results):
            for rank, local in shards.items():
                expected = shard(self.results[index], placements, rank)
                fact = self._find_kind_difference(local, expected)
                if not fact and not self._is_right(local, expected):
                    samples = [shard(run[index], placements, rank) for run in self._perturbed_runs]
                    fact = _find_value_difference(local, expected, samples)
                if fact:
                    return f"result {index} {fact} on rank {rank}{self._condition()}"
        return ""

    def _condition(self) -> str:
        """The condition under which the values were made, if a model's own may differ."""
        return "" if self._ignored is None else f", where targets are {self._ignored} and ignored"

    @staticmethod
    def _find_kind_difference(actual: torch.Tensor, expected: torch.Tensor) -> str:
        if actual.shape != expected.shape:
            return f"has the shape {list(actual.shape)}, not {list(expected.shape)},"
        if actual.dtype != expected.dtype:
            return f"is of {actual.dtype}, not {expected.dtype},"
        return ""

    def _is_right(self, actual: torch.Tensor, expected: torch.Tensor) -> bool:
        return self.is_arbitrary or not expected.numel() or torch.equal(actual, expected)

    @cached_property
    def _perturbed_runs(self) -> list[list[torch.Tensor]]:
        """The results of the call with perturbed rounding, of a few runs; none if one fails."""
        runs = []
        for seed in range(_NUM_PERTURBED_RUNS):
            try:
                with RandomRounding(seed):
                    results, after = self._run(_SEED)
            except Exception:  # noqa: BLE001 - the op may not support perturbed inputs
                return []
            runs.append([*results, *(after[index] for index in self._written)])
        return runs

    def _run(self, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        seed_torch(seed)
        inputs = self.make_inputs()
        args, kwargs = fill(self._call, inputs)
        return list(tensors_in(self._call.op(*args, **kwargs))), inputs

    def _make(self, spec: TensorSpec, seed: int) -> torch.Tensor:
        seed_torch(seed)
        steps = zip(spec.shape, spec.stride, strict=True)
        own = [size if step else min(size, 1) for size, step in steps]
        order = sorted(range(len(own)), key=lambda dim: -spec.stride[dim])
        dense = self._draw([own[dim] for dim in order], spec.dtype)
        return dense.permute([order.index(dim) for dim in range(len(own))]).expand(spec.shape)

    def _draw(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        if dtype is torch.bool or not (dtype.is_floating_point or dtype.is_complex):
            if dtype is torch.bool:
                return torch.rand(shape, device=self._device) < 0.5
            # Perhaps indices: small enough for any tensor of the call.
            indices = make_tensor(shape, dtype=dtype, device=self._device, low=0, high=self._limit)
            return indices if self._ignored is None else _set_ignored(indices, self._ignored)
        # Positive and not small: roots and logarithms stay finite, and no two sums are equal.
        drawn = make_tensor(shape, dtype=dtype, device=self._device, low=0.1, high=1.0)
        return drawn * _ramp(shape, self._device).to(dtype)


def fill(call: Signature, tensors: Sequence[torch.Tensor]) -> Arguments:
    """Arguments for the call, with these tensors in the order of `call.tensors()`."""
    remaining = iter(tensors)
    return call.arguments(lambda _: next(remaining))


def _find_value_difference(
    actual: torch.Tensor, expected: torch.Tensor, samples: Sequence[torch.Tensor]
) -> str:
    """Describe how far a shard is from the expected one; empty if rounding explains it.

    `samples` are the same shard of runs with perturbed rounding.
    """
    if not is_inexact(expected):
        return "is another"
    value, target = to_fp64_on_cpu(actual), to_fp64_on_cpu(expected)
    perturbed = [(to_fp64_on_cpu(sample), None) for sample in samples]
    floor = find_floor(target, None, perturbed, expected.dtype)
    if has_same_nonfinite(value, target) and floor.covers(value, target):
        return ""
    return f"differs by up to {(actual - expected).abs().nan_to_num(0).max().item():.2g}"


def _ramp(shape: list[int], device: torch.device) -> torch.Tensor:
    """Values from 0.5 to 1 along every dim, so that shards, also large ones, clearly differ."""
    ramp = torch.ones(shape, device=device, dtype=torch.float64)
    for dim, size in enumerate(shape):
        steps = torch.linspace(-0.5, 0, size, device=device, dtype=torch.float64)
        ramp += steps.reshape([-1 if index == dim else 1 for index in range(len(shape))]) / len(
            shape
        )
    return ramp


def _set_ignored(targets: torch.Tensor, ignored: int) -> torch.Tensor:
    """Set targets to `ignored`: more in the first shard than in the last, for any sharded dim."""
    if targets.dim() and targets.dtype is torch.long:
        targets[tuple(slice((size + 2) // 3) for size in targets.shape)] = ignored
    return targets


def _smallest_size(call: Signature) -> int:
    sizes = [size for _, spec in call.tensors() for size in spec.shape if size > 1]
    return min(sizes, default=2)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides: whether a view is possible depends on them."""
    copy = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor) if 0 not in tensor.stride() else tensor.clone().expand(tensor.shape)


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first.nan_to_num(), second.nan_to_num())


MAX_ELEMENTS = 2**24
_DIVISORS = (512, 256, 128, 64, 32, 16, 8, 4, 2)
_THRESHOLDS = (4, 16, 64)  # times the divisor: smaller sizes stay as they are


def shrink(call: Signature, *, num_ranks: int) -> Iterator[Signature]:
    """Versions of the call with smaller sizes, from the smallest up to the call itself."""
    seen: set[Signature] = set()
    for divisor in _DIVISORS:
        for threshold in _THRESHOLDS:
            smaller = _divide(call, divisor, divisor * threshold, num_ranks)
            if smaller not in seen and smaller != call and _is_valid(smaller):
                yield smaller
            seen.add(smaller)
    yield call


def _divide(call: Signature, divisor: int, threshold: int, num_ranks: int) -> Signature:
    def change(size: int) -> int:
        if size < threshold or size % divisor:
            return size
        less = size // divisor
        # Sizes that divide evenly by the ranks must still do so, and others must not.
        return less if bool(less % num_ranks) == bool(size % num_ranks) else size

    return call.change_sizes(change)


def _is_valid(call: Signature) -> bool:
    args, kwargs = call.arguments(_make_meta)
    try:
        call.op(*args, **kwargs)
    except Exception:  # noqa: BLE001 - the op may raise anything
        return False
    return True


def _make_meta(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")


def total_size(call: Signature) -> int:
    """The number of elements of all tensors of the call."""
    return sum(math.prod(spec.shape) for _, spec in call.tensors())


_NO_KERNEL = "it has no kernel for the CPU, on which values are compared"
_MAX_REASON = 160  # characters of what was raised
Layout = tuple[tuple[str, ...] | None, ...]  # the placements of each result, as text


class Answer(Enum):
    """The result of comparing values."""

    RIGHT = "right"
    WRONG = "wrong"
    UNKNOWN = "unknown"


class Numbers(NamedTuple):
    """Whether values agree, and how they differ or why that is not known."""

    answer: Answer
    detail: str = ""


@final
class Checker:
    """Computes each call once on a small mesh whose ranks this process simulates, with data."""

    def __init__(
        self, meshes: SmallMeshes, *, device: torch.device, stands_for_cuda: bool = False
    ) -> None:
        self._meshes = meshes
        self._device = device
        self._stands_for_cuda = stands_for_cuda
        self._known: dict[tuple[Pattern, Layout], Numbers] = {}
        self._last: tuple[Signature, Reference | str] | None = None
        self._smaller: dict[Signature, list[Signature]] = {}

    def check(
        self, call: Signature, outputs: list[MeshPlacements | None], ops: Iterable[Any] = ()
    ) -> Numbers:
        """Compare on tensors as small as possible; results must have the placements `outputs`.

        `ops` are those that DTensor ran for the call, on a device that may be simulated.
        """
        if self._stands_for_cuda and not all(map(has_cpu_kernel, ops)):
            return Numbers(Answer.UNKNOWN, _NO_KERNEL)
        if not all(
            can_be_sharded(placement)
            for _, spec in call.tensors()
            for placement in spec.placements or ()
        ):
            return Numbers(Answer.UNKNOWN, "its placements are of a kind that cannot be set up")
        mesh = self._meshes.find(call)
        call = call.on_device(self._device)
        if mesh is None:
            return Numbers(Answer.UNKNOWN, "its mesh cannot run in one process")
        layout = tuple(map(_describe, outputs))
        key = (call.pattern(mesh.num_ranks), layout)
        if key not in self._known:
            self._known[key] = self._check_smallest(call, mesh, layout)
        return self._known[key]

    def _check_smallest(self, call: Signature, mesh: SmallMesh, outputs: Layout) -> Numbers:
        result = Numbers(Answer.UNKNOWN, "its tensors are too large to compute it")
        placements = [spec.placements for _, spec in call.tensors()]
        for smaller in self._shrink(call.plain(), mesh):
            if total_size(smaller) > MAX_ELEMENTS:
                break
            results = []
            for plain in _precisions(smaller):
                results.append(
                    self._compute(
                        _with_placements(plain, placements, mesh.mesh), plain, mesh, outputs
                    )
                )
                if results[-1].answer is not Answer.UNKNOWN:
                    return results[-1]
            # The error in double precision: no kernel library hides its cause.
            result = results[0]
        return result

    def _shrink(self, plain: Signature, mesh: SmallMesh) -> list[Signature]:
        if plain not in self._smaller:
            with disable_dispatch_modes():
                every = list(shrink(plain, num_ranks=max(2, mesh.num_ranks)))
            # The smallest version, the next, and the call as it is.
            self._smaller[plain] = [*every[:2], *every[2:][-1:]]
        return self._smaller[plain]

    def _compute(
        self, call: Signature, plain: Signature, mesh: SmallMesh, outputs: Layout
    ) -> Numbers:
        with preserved_random_state():
            reference = self._refer(plain)
            if isinstance(reference, str):
                return Numbers(Answer.UNKNOWN, reference)
            try:
                return _compare(call, reference, mesh, outputs)
            except Exception as error:  # noqa: BLE001 - data may make an op raise that did not
                return Numbers(Answer.UNKNOWN, _first_sentence(error))

    def _refer(self, plain: Signature) -> Reference | str:
        if self._last is None or self._last[0] != plain:
            reference: Reference | str
            with disable_dispatch_modes():
                try:
                    reference = Reference(plain, self._device)
                except Exception as error:  # noqa: BLE001 - it may want values we cannot guess
                    reference = f"the plain op raises {_first_sentence(error)}"
            self._last = (plain, reference)
        return self._last[1]


def _compare(call: Signature, reference: Reference, mesh: SmallMesh, outputs: Layout) -> Numbers:
    with disable_dispatch_modes():
        full_tensors = reference.make_inputs()
    with all_ranks(mesh.ranks):
        forget_decisions()
        inputs = [
            mesh.distribute(full, spec.placements)
            for full, (_, spec) in zip(full_tensors, call.tensors(), strict=True)
        ]
        args, kwargs = fill(call, inputs)
        results = list(tensors_in(call.op(*args, **kwargs)))
        if tuple(_describe(_placements(tensor)) for tensor in results) != outputs:
            return Numbers(Answer.UNKNOWN, "DTensor treats smaller tensors differently")
        shards = [_rank_shards(tensor) for tensor in (*results, *reference.written(inputs))]
    with disable_dispatch_modes():
        difference = reference.find_difference(shards, mesh.shard)
    return Numbers(Answer.WRONG if difference else Answer.RIGHT, difference)


def _first_sentence(error: Exception) -> str:
    return describe(error).split(". ")[0][:_MAX_REASON]


def _precisions(call: Signature) -> list[Signature]:
    """The call in double precision, where small differences are not rounding, then as it is.

    Not for custom ops, whose kernels may support no dtype but the model's.
    """
    wide = call.to_fp64() if call.op.namespace in TORCHS_OWN else call
    return [wide] if wide == call else [wide, call]


def _with_placements(
    call: Signature, placements: list[MeshPlacements | None], mesh: DeviceMesh
) -> Signature:
    remaining = iter(placements)
    return call.change(lambda _, spec: spec._replace(placements=next(remaining), mesh=mesh))


def _placements(tensor: torch.Tensor) -> MeshPlacements | None:
    return tuple(tensor.placements) if isinstance(tensor, DTensor) else None


def _describe(placements: MeshPlacements | None) -> tuple[str, ...] | None:
    return None if placements is None else describe_placements(placements)


def _rank_shards(tensor: torch.Tensor) -> tuple[MeshPlacements, dict[int, torch.Tensor]]:
    """Each rank's shard with its placements; partial results are reduced first."""
    if not isinstance(tensor, DTensor):
        return (), split_ranks(tensor)
    if not all(is_replicate_or_shard(placement) for placement in tensor.placements):
        return (), split_ranks(tensor.full_tensor())
    return tuple(tensor.placements), split_ranks(tensor)
