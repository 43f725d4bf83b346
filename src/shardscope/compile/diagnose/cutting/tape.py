"""One eager run of a fragment, written down: what each step read, wrote and made, and where.

Ops write to memory in ways that no schema or counter tells (batch norm's statistics, `.data`,
custom ops), so bytes are compared too: what a step can reach is copied before it and looked at
after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import fx

from shardscope._torch.storages import count_writes
from shardscope.compile.diagnose.cutting.eager_run import EagerRun
from shardscope.compile.diagnose.cutting.values import (
    copy_tensor,
    has_memory,
    map_tensors,
    tensors_in,
)
from shardscope.compile.diagnose.fragment import Fragment

__all__ = ["Seen", "Shape", "Step", "Tape", "Want"]

_NOWHERE = -1  # where tensors are whose memory cannot be looked at


@final
@dataclass(frozen=True, slots=True)
class Shape:
    """How a tensor lies in its memory."""

    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Shape:
        """The shape of a tensor that has memory."""
        return Shape(
            tensor.dtype,
            tensor.device,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    @torch.no_grad()
    def fill(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor of this shape, in that memory if its values can be there as they are."""
        tensor = torch.empty(0, dtype=self.dtype, device=self.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.is_conj else tensor
        return -tensor if self.is_neg else tensor


@final
@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """A tensor at one moment: in which memory, and how often that was written to."""

    storage: int
    version: int
    requires_grad: bool
    shape: Shape | torch.Tensor  # the tensor itself, if its memory cannot be looked at


@final
@dataclass(frozen=True, slots=True)
class Step:
    """One call, or several that only make sense together."""

    nodes: tuple[fx.Node, ...]
    reads: dict[fx.Node, Any]  # what others gave it: values with `Seen` for tensors
    writes: frozenset[int]  # the storages that it changed


@final
@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """One tensor of what a node made, as it was when some step was about to run."""

    step: int
    node: fx.Node
    place: int  # among the tensors of the node's value
    seen: Seen


@final
class Tape:
    """What happened, and what every value was at every moment.

    Values are held up to `max_bytes`; beyond that they are computed again when they are asked for.
    """

    def __init__(self, fragment: Fragment, *, seed: int, max_bytes: int) -> None:
        self._fragment = fragment
        self._seed = seed
        self._num_bytes_left = max_bytes
        self._numbers: dict[int, int] = {}  # of storages, by address
        self._versions: dict[int, int] = {_NOWHERE: 0}
        self._latest: dict[int, torch.UntypedStorage] = {}
        self._older: dict[tuple[int, int], torch.UntypedStorage] = {}  # what was written over
        self.steps: list[Step] = []
        self.made: dict[fx.Node, Any] = {}  # values with `Seen` for tensors
        self._record()

    @property
    def is_held(self) -> bool:
        """Whether nothing has to be computed again."""
        return self._num_bytes_left >= 0

    @property
    def written(self) -> frozenset[int]:
        """The storages that any step changed."""
        return frozenset(number for step in self.steps for number in step.writes)

    def copy_values(self, wants: Collection[Want]) -> dict[Want, torch.Tensor]:
        """What was there at that moment, without gradients, each in memory of its own."""
        if self.is_held:
            return {want: self._restore(want.seen) for want in wants}
        copies: dict[Want, torch.Tensor] = {}
        by_step: dict[int, list[Want]] = {}
        for want in wants:
            by_step.setdefault(want.step, []).append(want)
        with EagerRun(self._fragment, seed=self._seed) as run:
            for index in range(max(by_step, default=-1) + 1):
                for want in by_step.get(index, ()):
                    tensors = list(tensors_in(run.values[want.node]))
                    copies[want] = copy_tensor(tensors[want.place])
                run.execute(run.steps[index])
                run.forget()
        return copies

    def _restore(self, seen: Seen) -> torch.Tensor:
        if isinstance(seen.shape, torch.Tensor):
            return copy_tensor(seen.shape)
        held = self._older.get((seen.storage, seen.version), self._latest[seen.storage])
        return copy_tensor(seen.shape.fill(held))

    def _record(self) -> None:
        with EagerRun(self._fragment, seed=self._seed) as run:
            for node, value in run.values.items():
                self.made[node] = map_tensors(value, self._see)
            for nodes in run.steps:
                self._record_step(run, nodes)

    def _record_step(self, run: EagerRun, nodes: tuple[fx.Node, ...]) -> None:
        sources = [node for node in _sources(nodes) if node in run.values]
        reads = {node: map_tensors(run.values[node], self._see) for node in sources}
        reachable = {
            self._number(tensor): tensor
            for node in sources
            for tensor in tensors_in(run.values[node])
        }
        reachable.pop(_NOWHERE, None)
        before = {number: _bytes_of(tensor).clone() for number, tensor in reachable.items()}
        num_writes = {number: count_writes(tensor) for number, tensor in reachable.items()}
        run.execute(nodes)
        writes = [
            number
            for number, tensor in reachable.items()
            if count_writes(tensor) != num_writes[number]
            or not torch.equal(before[number], _bytes_of(tensor))
        ]
        for number in writes:
            self._write(number, before[number])
        for node in _seen_outside(nodes):
            self.made[node] = map_tensors(run.values[node], self._see)
        self.steps.append(Step(nodes, reads, frozenset(writes)))
        run.forget()
        if not self.is_held:
            self._forget(run)

    def _see(self, tensor: torch.Tensor) -> Seen:
        number = self._number(tensor)
        shape = tensor.detach() if number == _NOWHERE else Shape.of(tensor)
        return Seen(number, self._versions[number], tensor.requires_grad, shape)

    def _number(self, tensor: torch.Tensor) -> int:
        if not has_memory(tensor) or tensor.untyped_storage().data_ptr() == 0:
            return _NOWHERE
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault(storage.data_ptr(), len(self._versions))
        if number not in self._versions:
            self._versions[number] = 0
            self._hold(storage.nbytes())
            if self.is_held:
                self._latest[number] = storage
        return number

    def _write(self, number: int, before: torch.Tensor) -> None:
        self._hold(before.nbytes)
        if self.is_held:
            self._older[number, self._versions[number]] = before.untyped_storage()
        self._versions[number] += 1

    def _hold(self, num_bytes: int) -> None:
        self._num_bytes_left -= num_bytes if self.is_held else 0

    def _forget(self, run: EagerRun) -> None:
        """Hold nothing. An address is free for others as soon as no value is there."""
        self._latest.clear()
        self._older.clear()
        tensors = tensors_in(list(run.values.values()))
        used = {one.untyped_storage().data_ptr() for one in tensors if has_memory(one)}
        self._numbers = {key: number for key, number in self._numbers.items() if key in used}


def _sources(nodes: tuple[fx.Node, ...]) -> Iterable[fx.Node]:
    inside = set(nodes)
    found = [one for node in nodes for one in node.all_input_nodes if one not in inside]
    return dict.fromkeys(found)


def _seen_outside(nodes: tuple[fx.Node, ...]) -> Iterable[fx.Node]:
    """Nodes whose values others may look at: inside of vmap they are of another kind."""
    if len(nodes) == 1:
        return nodes
    inside = set(nodes)
    return [node for node in nodes if any(user not in inside for user in node.users)]


@torch.no_grad()
def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())
