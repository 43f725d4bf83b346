"""Records what every module takes and returns, and their gradients, while a step runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.propagation import quiet_collectives
from shardscope.parallel.parity.names import OriginalNames
from shardscope.parallel.parity.outcome import named_tensors
from shardscope.record import Phase, Source

__all__ = ["ModuleProbe", "Role", "Spot", "copy_full"]

_SEPARATOR = "\0"  # in no name
_MAX_NODES = 10_000  # of autograd's graph, between two module calls


class Role(StrEnum):
    """Whether a module, or an op, takes a tensor or returns it."""

    INPUT = "input"
    OUTPUT = "output"


class Spot(NamedTuple):
    """A tensor that a module took or returned in one of its calls, or the gradient of it."""

    phase: Phase
    role: Role
    module: str
    call: int
    path: str

    def encode(self) -> str:
        """As a name."""
        return _SEPARATOR.join(map(str, self))

    @staticmethod
    def decode(name: str) -> Spot:
        """The spot behind a name."""
        phase, role, module, call, path = name.split(_SEPARATOR)
        return Spot(Phase(phase), Role(role), module, int(call), path)


@final
class ModuleProbe:
    """Records full tensors; on ranks, all of which must run the same modules in one order.

    `callers` has the module that called a module, `origins` the spots that an input or output was
    computed from, with no other spot in between, `same` the first spot of a tensor that has many.
    """

    def __init__(self, masked: tuple[str, torch.Tensor] | None = None) -> None:
        """Record; gradients of the outputs of a `masked` module are multiplied by a tensor."""
        self._masked = masked
        self.seen: dict[str, torch.Tensor] = {}
        self.types: dict[str, str] = {}
        self.callers: dict[str, str | None] = {}
        self.origins: dict[Spot, set[Spot]] = {}
        self.same: dict[Spot, Spot] = {}
        self.sources: dict[str, Source] = {}  # modules have no line
        self.numbers: dict[str, dict[str, float]] = {}  # nor arguments that matter
        self._num_calls: dict[str, int] = {}
        self._running: list[str] = []
        self._spots: dict[int, list[Spot]] = {}  # of a tensor, by its identity
        self._makers: dict[Any, list[Spot]] = {}  # of a tensor, by its node in autograd's graph
        self._alive: list[torch.Tensor] = []  # so that an identity is one tensor's alone

    @contextmanager
    def watching(self, model: nn.Module, names: OriginalNames) -> Iterator[None]:
        """Record until the context ends."""
        handles = []
        known: set[int] = set()
        for name, module in names.modules(model):
            if id(module) not in known:
                known.add(id(module))
                self.types.setdefault(name, type(module).__name__)
                take, give = self._make_hooks(name)
                handles.append(module.register_forward_pre_hook(take, with_kwargs=True))
                handles.append(module.register_forward_hook(give))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._alive.clear()
            self._spots.clear()
            self._makers.clear()

    def _make_hooks(self, name: str) -> tuple[Any, Any]:
        def take(_: nn.Module, args: Any, kwargs: Any) -> None:
            if is_in_backward():  # a checkpointed module is called once more
                return
            # Of a wrapper and what it wraps, which have one name, the wrapper is recorded.
            is_wrapped = bool(self._running) and self._running[-1] == name
            self._running.append(name)
            if is_wrapped:
                return
            self.callers.setdefault(name, self._running[-2] if len(self._running) > 1 else None)
            call = self._num_calls.get(name, 0)
            for path, tensor in named_tensors([*args, kwargs] if kwargs else list(args)):
                self._record(Spot(Phase.FORWARD, Role.INPUT, name, call, path), tensor)

        def give(_: nn.Module, __: Any, output: Any) -> None:
            if is_in_backward():
                return
            self._running.pop()
            if self._running and self._running[-1] == name:
                return
            call = self._num_calls.get(name, 0)
            self._num_calls[name] = call + 1
            for path, tensor in named_tensors(output):
                self._record(Spot(Phase.FORWARD, Role.OUTPUT, name, call, path), tensor)
                if self._masked is not None and name == self._masked[0] and tensor.requires_grad:
                    tensor.register_hook(self._masked[1].mul)  # type: ignore[no-untyped-call]

        return take, give

    def _record(self, spot: Spot, tensor: torch.Tensor) -> None:
        spots = self._spots.setdefault(id(tensor), [])
        known = self.seen[spots[-1].encode()] if spots and type(tensor) is torch.Tensor else None
        is_same = known is not None and torch.equal(known, tensor.detach())
        self.seen[spot.encode()] = known if is_same and known is not None else copy_full(tensor)
        self.origins[spot] = {spots[0]} if spots else self._find_origins(tensor)
        spots.append(spot)
        self.same[spot] = spots[0]
        if tensor.grad_fn is not None:
            self._makers[tensor.grad_fn] = spots
        if len(spots) == 1:
            self._alive.append(tensor)
            if tensor.requires_grad:
                tensor.register_hook(self._make_gradient_hook(spots))  # type: ignore[no-untyped-call]

    def _find_origins(self, tensor: torch.Tensor) -> set[Spot]:
        """Those that autograd's graph leads to."""
        found: set[Spot] = set()
        known = {tensor.grad_fn}
        coming = [tensor.grad_fn]
        while coming and len(known) < _MAX_NODES:
            node = coming.pop()
            if node in self._makers:
                found.add(self._makers[node][0])
            elif node is not None:
                new = [other for other, _ in node.next_functions if other not in known]
                known.update(new)
                coming.extend(new)
        return found

    def _make_gradient_hook(self, spots: list[Spot]) -> Any:
        def record(gradient: torch.Tensor) -> None:
            copy = copy_full(gradient)
            for spot in spots:
                self.seen[spot._replace(phase=Phase.BACKWARD).encode()] = copy

        return record


def copy_full(tensor: Any) -> torch.Tensor:
    """A copy, the full tensor of a DTensor; its ranks call this together."""
    with torch.no_grad(), quiet_collectives():
        is_distributed = isinstance(tensor, DTensor)
        full: Any = tensor.detach()
        full = full.full_tensor() if is_distributed else full
        if hasattr(full, "wait"):
            full = full.wait()
        copy: torch.Tensor = full.clone()
        return copy
