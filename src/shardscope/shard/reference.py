"""What the plain op gives on made-up inputs, to hold the same op on DTensors to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch.testing import make_tensor

from shardscope._torch.dispatch import op_packet
from shardscope._torch.propagation import Place
from shardscope.shard.outputs import tensors_in
from shardscope.shard.signature import Arguments, Signature, TensorSpec

__all__ = ["Reference", "fill"]

_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float64: 1e-8}
_DEFAULT_TOLERANCE = 1e-3
_SEED = 20

Held = tuple[Place, Mapping[int, torch.Tensor]]  # where a result lies, and each rank's piece
Cut = Callable[[torch.Tensor, Place, int], torch.Tensor]


@final
class Reference:
    """Inputs and results of one call. Raises what the op raises."""

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
        # `empty` and its kind hold whatever was there; what differs by the seed is drawn at random.
        again = [] if self._is_unset else self._run(_SEED + 1)[0]
        self.is_arbitrary = self._is_unset or not all(map(_is_same, self.results, again))

    @property
    def _is_unset(self) -> bool:
        return "empty" in op_packet(self._call.op).__name__

    def make_inputs(self) -> list[torch.Tensor]:
        """The inputs as they were, to be changed by whoever asks."""
        return [_copy(tensor) for tensor in self._inputs]

    def written(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of the inputs that the op writes into."""
        return [inputs[index] for index in self._written]

    def find_difference(self, results: Sequence[Held], cut: Cut) -> str:
        """What is not as it should be, on whichever rank; nothing if all is.

        `cut` says what a rank should hold of a result that lies on the mesh in some way.
        """
        if len(results) != len(self.results):
            return f"it returns {len(results)} tensors, not {len(self.results)}"
        for index, ((place, pieces), expected) in enumerate(
            zip(results, self.results, strict=True)
        ):
            for rank, piece in pieces.items():
                fact = self._compare(piece, cut(expected, place, rank))
                if fact:
                    return f"result {index} {fact} on rank {rank}{self._condition()}"
        return ""

    def _condition(self) -> str:
        """What the numbers were made to be that a model's own need not be."""
        return "" if self._ignored is None else f", where targets are {self._ignored} and ignored"

    def _compare(self, piece: torch.Tensor, expected: torch.Tensor) -> str:
        if piece.shape != expected.shape:
            return f"has the shape {list(piece.shape)}, not {list(expected.shape)},"
        if piece.dtype != expected.dtype:
            return f"is of {piece.dtype}, not {expected.dtype},"
        if self.is_arbitrary or not expected.numel() or torch.equal(piece, expected):
            return ""
        if not expected.is_floating_point() and not expected.is_complex():
            return "is another"
        tolerance = _TOLERANCE.get(expected.dtype, _DEFAULT_TOLERANCE)
        scale = expected.nan_to_num(0, 0, 0).abs().max().item()
        allowed = tolerance * (1 + scale)
        if torch.isclose(piece, expected, rtol=tolerance, atol=allowed, equal_nan=True).all():
            return ""
        return f"differs by up to {(piece - expected).abs().nan_to_num(0).max().item():.2g}"

    def _run(self, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        torch.manual_seed(seed)
        inputs = self.make_inputs()
        args, kwargs = fill(self._call, inputs)
        return list(tensors_in(self._call.op(*args, **kwargs))), inputs

    def _make(self, spec: TensorSpec, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
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
            return indices if self._ignored is None else _ignore_some(indices, self._ignored)
        # Positive and not small: roots and logarithms stay finite, and no two sums are alike.
        drawn = make_tensor(shape, dtype=dtype, device=self._device, low=0.1, high=1.0)
        return drawn * _ramp(shape, self._device).to(dtype)


def fill(call: Signature, tensors: Sequence[torch.Tensor]) -> Arguments:
    """Arguments for the call, with these tensors in their places."""
    given = iter(tensors)
    return call.arguments(lambda _: next(given))


def _ramp(shape: list[int], device: torch.device) -> torch.Tensor:
    """From a half to one along every dim: shards differ by more than chance, also large ones."""
    ramp = torch.ones(shape, device=device, dtype=torch.float64)
    for dim, size in enumerate(shape):
        steps = torch.linspace(-0.5, 0, size, device=device, dtype=torch.float64)
        ramp += steps.reshape([-1 if one == dim else 1 for one in range(len(shape))]) / len(shape)
    return ramp


def _ignore_some(targets: torch.Tensor, ignored: int) -> torch.Tensor:
    """More of the first shard's than of the last's, whichever dim is sharded."""
    if targets.dim() and targets.dtype is torch.long:
        targets[tuple(slice((size + 2) // 3) for size in targets.shape)] = ignored
    return targets


def _smallest_size(call: Signature) -> int:
    sizes = [size for _, spec in call.tensors() for size in spec.shape if size > 1]
    return min(sizes, default=2)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """With the strides it has: a view is possible of some and not of others."""
    copy = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor) if 0 not in tensor.stride() else tensor.clone().expand(tensor.shape)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
