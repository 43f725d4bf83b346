"""Whether an op on DTensors gives what the plain op gives: computed, on all ranks of a small mesh.

Random ops and ops that leave memory as they find it are compared by shape and dtype alone.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardscope._torch.dispatch import TORCHS_OWN, without_modes
from shardscope._torch.local_ranks import all_ranks, split_ranks
from shardscope._torch.meshes import describe_placements
from shardscope._torch.propagation import Place, forget_decisions
from shardscope._torch.random_state import preserved_random_state
from shardscope.shard.dispatch import describe
from shardscope.shard.outputs import tensors_in
from shardscope.shard.pieces import is_cut, is_cuttable
from shardscope.shard.reference import Reference, fill
from shardscope.shard.shrink import MAX_ELEMENTS, shrink, total_size
from shardscope.shard.signature import Pattern, Signature
from shardscope.shard.small_mesh import SmallMesh, SmallMeshes

__all__ = ["Answer", "Checker", "Numbers"]

_MAX_REASON = 160  # characters of what was raised
Layout = tuple[tuple[str, ...] | None, ...]  # where each result lies, in words


class Answer(Enum):
    """What comparing the numbers said."""

    RIGHT = "right"
    WRONG = "wrong"
    UNKNOWN = "unknown"


class Numbers(NamedTuple):
    """The answer, and in words what was different or why it is not known."""

    answer: Answer
    detail: str = ""


@final
class Checker:
    """Computes calls on a small mesh, all of whose ranks this process plays; each once."""

    def __init__(self, meshes: SmallMeshes, *, device: torch.device) -> None:
        self._meshes = meshes
        self._device = device
        self._known: dict[tuple[Pattern, Layout], Numbers] = {}
        self._last: tuple[Signature, Reference | str] | None = None
        self._smaller: dict[Signature, list[Signature]] = {}

    def check(self, call: Signature, outputs: list[Place | None]) -> Numbers:
        """Compare on tensors as small as may be; DTensor must lay results out as in `outputs`."""
        if not all(is_cuttable(one) for _, spec in call.tensors() for one in spec.placements or ()):
            return Numbers(Answer.UNKNOWN, "its placements are of a kind that cannot be set up")
        mesh = self._meshes.find(call)
        if mesh is None:
            return Numbers(Answer.UNKNOWN, "its mesh cannot run in one process")
        layout = tuple(map(_describe, outputs))
        key = (call.pattern(mesh.num_ranks), layout)
        if key not in self._known:
            self._known[key] = self._check_smallest(call, mesh, layout)
        return self._known[key]

    def _check_smallest(self, call: Signature, mesh: SmallMesh, outputs: Layout) -> Numbers:
        found = Numbers(Answer.UNKNOWN, "its tensors are too large to compute it")
        placements = [spec.placements for _, spec in call.tensors()]
        for smaller in self._shrink(call.plain(), mesh):
            if total_size(smaller) > MAX_ELEMENTS:
                break
            every = []
            for plain in _precisions(smaller):
                every.append(
                    self._compute(_place(plain, placements, mesh.mesh), plain, mesh, outputs)
                )
                if every[-1].answer is not Answer.UNKNOWN:
                    return every[-1]
            # In double precision no library of kernels hides what is the matter.
            found = every[0]
        return found

    def _shrink(self, plain: Signature, mesh: SmallMesh) -> list[Signature]:
        if plain not in self._smaller:
            with without_modes():
                every = list(shrink(plain, num_ranks=max(2, mesh.num_ranks)))
            # The smallest that can be had, the next, and the call as it is.
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
            with without_modes():
                try:
                    reference = Reference(plain, self._device)
                except Exception as error:  # noqa: BLE001 - it may want values we cannot guess
                    reference = f"the plain op raises {_first_sentence(error)}"
            self._last = (plain, reference)
        return self._last[1]


def _compare(call: Signature, reference: Reference, mesh: SmallMesh, outputs: Layout) -> Numbers:
    with without_modes():
        wholes = reference.make_inputs()
    with all_ranks(mesh.ranks):
        forget_decisions()
        inputs = [
            mesh.distribute(whole, spec.placements)
            for whole, (_, spec) in zip(wholes, call.tensors(), strict=True)
        ]
        args, kwargs = fill(call, inputs)
        results = list(tensors_in(call.op(*args, **kwargs)))
        if tuple(_describe(_placements(one)) for one in results) != outputs:
            return Numbers(Answer.UNKNOWN, "DTensor treats smaller tensors differently")
        pieces = [_pieces(one) for one in (*results, *reference.written(inputs))]
    with without_modes():
        difference = reference.find_difference(pieces, mesh.cut)
    return Numbers(Answer.WRONG if difference else Answer.RIGHT, difference)


def _first_sentence(error: Exception) -> str:
    return describe(error).split(". ")[0][:_MAX_REASON]


def _precisions(call: Signature) -> list[Signature]:
    """First in double precision, in which a small difference is none of rounding.

    Not for custom ops, whose kernels may know no dtype but the model's.
    """
    wide = call.widen() if call.op.namespace in TORCHS_OWN else call
    return [wide] if wide == call else [wide, call]


def _place(call: Signature, placements: list[Place | None], mesh: DeviceMesh) -> Signature:
    given = iter(placements)
    return call.change(lambda _, spec: spec._replace(placements=next(given), mesh=mesh))


def _placements(tensor: torch.Tensor) -> Place | None:
    return tuple(tensor.placements) if isinstance(tensor, DTensor) else None


def _describe(place: Place | None) -> tuple[str, ...] | None:
    return None if place is None else describe_placements(place)


def _pieces(tensor: torch.Tensor) -> tuple[Place, dict[int, torch.Tensor]]:
    """What each rank holds, after parts of sums and the like have been put together."""
    if not isinstance(tensor, DTensor):
        return (), split_ranks(tensor)
    if not all(is_cut(one) for one in tensor.placements):
        return (), split_ranks(tensor.full_tensor())
    return tuple(tensor.placements), split_ranks(tensor)
