"""Records the inputs and outputs of every module, and their gradients, while a step runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.dtensor import quiet_collectives
from shardscope.parallel.equivalence.result import named_tensors
from shardscope.parallel.equivalence.step import OriginalNames
from shardscope.record import Phase, Source

_SEPARATOR = "\0"  # in no name
_MAX_NODES = 10_000  # nodes of autograd's graph between two module calls


class Role(StrEnum):
    """Whether a tensor is an input or an output of a module or op."""

    INPUT = "input"
    OUTPUT = "output"


class ProbePoint(NamedTuple):
    """Identifies an input or output of a module in one of its calls, or its gradient."""

    phase: Phase
    role: Role
    module: str
    call: int
    path: str

    def encode(self) -> str:
        """The point as a string."""
        return _SEPARATOR.join(map(str, self))

    @staticmethod
    def decode(name: str) -> ProbePoint:
        """The point of an encoded string."""
        phase, role, module, call, path = name.split(_SEPARATOR)
        return ProbePoint(Phase(phase), Role(role), module, int(call), path)


@final
class ModuleProbe:
    """Records full tensors; all ranks must run the same modules in the same order.

    `callers` maps a module to the module that called it, `origins` a point to the points it is
    computed from, without a point in between, and `first_points` a point to the first point
    with the same tensor.
    """

    def __init__(self, masked: tuple[str, torch.Tensor] | None = None) -> None:
        """Multiply gradients of the outputs of the `masked` module by a tensor, if one is set."""
        self._masked = masked
        self.snapshots: dict[str, torch.Tensor] = {}
        self.types: dict[str, str] = {}
        self.callers: dict[str, str | None] = {}
        self.origins: dict[ProbePoint, set[ProbePoint]] = {}
        self.first_points: dict[ProbePoint, ProbePoint] = {}
        self.sources: dict[str, Source] = {}  # unused: modules have no source line
        self.numbers: dict[str, dict[str, float]] = {}  # unused: modules have no recorded arguments
        self._num_calls: dict[str, int] = {}
        self._running: list[str] = []
        self._points: dict[int, list[ProbePoint]] = {}  # the points of a tensor, by its id
        self._producers: dict[
            Any, list[ProbePoint]
        ] = {}  # the points of a tensor, by its autograd node
        self._alive: list[torch.Tensor] = []  # keeps tensors alive, so that an id is not reused

    @contextmanager
    def attached(self, model: nn.Module, names: OriginalNames) -> Iterator[None]:
        """Record until the context ends."""
        handles = []
        known: set[int] = set()
        for name, module in names.modules(model):
            if id(module) not in known:
                known.add(id(module))
                self.types.setdefault(name, type(module).__name__)
                before_call, after_call = self._make_hooks(name)
                handles.append(module.register_forward_pre_hook(before_call, with_kwargs=True))
                handles.append(module.register_forward_hook(after_call))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._alive.clear()
            self._points.clear()
            self._producers.clear()

    def _make_hooks(self, name: str) -> tuple[Any, Any]:
        def before_call(_: nn.Module, args: Any, kwargs: Any) -> None:
            if is_in_backward():  # a checkpointed module is called again
                return
            # A wrapper and the module it wraps have one name; only the wrapper is recorded.
            is_wrapped = bool(self._running) and self._running[-1] == name
            self._running.append(name)
            if is_wrapped:
                return
            self.callers.setdefault(name, self._running[-2] if len(self._running) > 1 else None)
            call = self._num_calls.get(name, 0)
            for path, tensor in named_tensors([*args, kwargs] if kwargs else list(args)):
                self._record(ProbePoint(Phase.FORWARD, Role.INPUT, name, call, path), tensor)

        def after_call(_: nn.Module, __: Any, output: Any) -> None:
            if is_in_backward():
                return
            self._running.pop()
            if self._running and self._running[-1] == name:
                return
            call = self._num_calls.get(name, 0)
            self._num_calls[name] = call + 1
            for path, tensor in named_tensors(output):
                self._record(ProbePoint(Phase.FORWARD, Role.OUTPUT, name, call, path), tensor)
                if self._masked is not None and name == self._masked[0] and tensor.requires_grad:
                    tensor.register_hook(self._masked[1].mul)  # type: ignore[no-untyped-call]

        return before_call, after_call

    def _record(self, point: ProbePoint, tensor: torch.Tensor) -> None:
        points = self._points.setdefault(id(tensor), [])
        known = (
            self.snapshots[points[-1].encode()] if points and type(tensor) is torch.Tensor else None
        )
        is_same = known is not None and torch.equal(known, tensor.detach())
        self.snapshots[point.encode()] = (
            known if is_same and known is not None else copy_full(tensor)
        )
        self.origins[point] = {points[0]} if points else self._find_origins(tensor)
        points.append(point)
        self.first_points[point] = points[0]
        if tensor.grad_fn is not None:
            self._producers[tensor.grad_fn] = points
        if len(points) == 1:
            self._alive.append(tensor)
            if tensor.requires_grad:
                tensor.register_hook(self._make_gradient_hook(points))  # type: ignore[no-untyped-call]

    def _find_origins(self, tensor: torch.Tensor) -> set[ProbePoint]:
        """The nearest points in autograd's graph that a tensor is computed from."""
        origins: set[ProbePoint] = set()
        known = {tensor.grad_fn}
        pending = [tensor.grad_fn]
        while pending and len(known) < _MAX_NODES:
            node = pending.pop()
            if node in self._producers:
                origins.add(self._producers[node][0])
            elif node is not None:
                new = [next_node for next_node, _ in node.next_functions if next_node not in known]
                known.update(new)
                pending.extend(new)
        return origins

    def _make_gradient_hook(self, points: list[ProbePoint]) -> Any:
        def record(gradient: torch.Tensor) -> None:
            copy = copy_full(gradient)
            for point in points:
                self.snapshots[point._replace(phase=Phase.BACKWARD).encode()] = copy

        return record


def copy_full(tensor: Any) -> torch.Tensor:
    """A copy of a tensor; of a DTensor the full tensor, which all its ranks must request."""
    with torch.no_grad(), quiet_collectives():
        is_distributed = isinstance(tensor, DTensor)
        full: Any = tensor.detach()
        full = full.full_tensor() if is_distributed else full
        if hasattr(full, "wait"):
            full = full.wait()
        copy: torch.Tensor = full.clone()
        return copy
