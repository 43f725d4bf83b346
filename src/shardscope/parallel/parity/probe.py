"""Records what modules, or the ops in a module, take and return while a step runs.

All ranks must run the same modules and ops in the same order: a DTensor is recorded as a full
tensor, which its ranks gather together.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, final

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.dispatch import (
    OpOverload,
    TorchDispatchMode,
    is_overload,
    name_arguments,
    op_packet,
    op_schema,
)
from shardscope._torch.dtensor import quiet_collectives
from shardscope._torch.storage import is_transformed
from shardscope._torch.training_hooks import TrainingListener, unwatched, watch_training
from shardscope.attribution.call_sites import read_stack
from shardscope.parallel.equivalence import (
    Declared,
    OriginalNames,
    Probe,
    ProbedStep,
    named_tensors,
    read_declared,
)
from shardscope.parallel.parity.backward_probe import BackwardProbe
from shardscope.record import Phase, Source

_SEPARATOR = "\0"  # in no name
OUTSIDE = "\0"
"""In place of the name of a module: the code of a training step that is in no module."""
_MAX_COMMUNICATED = 2**22  # elements of results of collectives that are kept
_MAX_NODES = 10_000  # nodes of autograd's graph between two module calls
# Ops that only move data; on shards, programs call more or fewer of them.
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_DATA_MOVEMENT = _ALLOCATIONS | {
    *("_to_copy", "_unsafe_view", "alias", "as_strided", "chunk", "clone", "contiguous", "copy_"),
    *("detach", "expand", "lift_fresh", "permute", "reshape", "select", "slice", "split"),
    *("squeeze", "t", "transpose", "unbind", "unsqueeze", "view"),
}


_BeforeCall = Callable[[nn.Module, tuple[object, ...], dict[str, object]], None]
_AfterCall = Callable[[nn.Module, tuple[object, ...], object], None]


class Role(StrEnum):
    """Whether a tensor is an input or an output of a module or op.

    Or, of an op, its output after a collective has reduced or gathered it.
    """

    INPUT = "input"
    OUTPUT = "output"
    COMMUNICATED = "communicated"


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
class ModuleProbe(TrainingListener):
    """Records the full tensors that modules take and return, and their gradients.

    With `is_local` it records what the rank has of them, and gradients of inputs as hooks before
    the module leave these; `declared` has the type along each mesh axis that a placement or an
    annotation gives them.

    `callers` maps a module to the module that called it, `origins` a point to the points it is
    computed from, without a point in between, and `first_points` a point to the first point
    with the same tensor. What collectives of a threaded rank return is recorded with their lines.
    """

    def __init__(
        self,
        masked: tuple[str, torch.Tensor] | None = None,
        *,
        is_local: bool = False,
        is_trained_only: bool = False,
    ) -> None:
        """Multiply gradients of the outputs of the `masked` module by a tensor, if one is set.

        With `is_trained_only`, calls without gradients are left out, as in an evaluation.
        """
        self._masked = masked
        self._is_trained_only = is_trained_only
        self._is_left_out = False  # the running call
        self._is_local = is_local
        self._copy = copy_local if is_local else copy_full
        self.declared: dict[str, Declared] = {}
        self.snapshots: dict[str, torch.Tensor] = {}
        self.types: dict[str, str] = {}
        self.callers: dict[str, str | None] = {}
        self.origins: dict[ProbePoint, set[ProbePoint]] = {}
        self.first_points: dict[ProbePoint, ProbePoint] = {}
        self.sources: dict[str, Source] = {}  # of collectives; modules have no source line
        self.numbers: dict[str, dict[str, float]] = {}  # unused: modules have no recorded arguments
        self._num_calls: dict[str, int] = {}
        self._is_updated = False  # an optimizer has stepped
        self._num_collectives = 0
        self._communicated: dict[str, int] = {}  # elements of the results of collectives
        self._running: list[str] = []
        self._passed: list[dict[str, torch.Tensor]] = []  # to running modules, before their hooks
        self._points: dict[int, list[ProbePoint]] = {}  # the points of a tensor, by its id
        self._producers: dict[Node, list[ProbePoint]] = {}  # by the autograd node of a tensor
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
                handles.append(
                    module.register_forward_pre_hook(
                        self._before_hooks, with_kwargs=True, prepend=True
                    )
                )
                handles.append(module.register_forward_pre_hook(before_call, with_kwargs=True))
                handles.append(module.register_forward_hook(after_call))
        try:
            with watch_training(self):
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._alive.clear()
            self._passed.clear()
            self._points.clear()
            self._producers.clear()

    def after_collective(
        self, kind: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        """Record what a collective has computed, and its line."""
        source = read_stack(sys._getframe(1)).source
        size = sum(tensor.numel() for tensor in outputs)
        if source is None or not outputs or size > _MAX_COMMUNICATED:
            return
        phase = Phase.BACKWARD if is_in_backward() else Phase.FORWARD
        point = ProbePoint(phase, Role.COMMUNICATED, kind, self._num_collectives, "")
        self._num_collectives += 1
        self.sources[point.encode()] = source
        flat = [tensor.detach().flatten() for tensor in outputs if tensor.is_floating_point()]
        if flat:
            self.snapshots[point.encode()] = torch.cat(flat)
            self._forget_oldest(point.encode(), size)

    def _forget_oldest(self, name: str, size: int) -> None:
        """Forget the oldest results of collectives if there are too many elements."""
        self._communicated[name] = size
        while sum(self._communicated.values()) > _MAX_COMMUNICATED:
            oldest = next(iter(self._communicated))
            del self._communicated[oldest], self.snapshots[oldest], self.sources[oldest]

    def after_optimizer(self, _: object) -> None:
        """Stop to record evaluations: what is wrong in them may follow from wrong updates."""
        self._is_updated = True

    def _before_hooks(
        self, _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        if not is_in_backward():
            self._passed.append(dict(named_tensors([*args, kwargs] if kwargs else list(args))))

    def _make_hooks(self, name: str) -> tuple[_BeforeCall, _AfterCall]:
        def before_call(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            if is_in_backward():  # a checkpointed module is called again
                return
            passed = self._passed.pop()
            # A wrapper and the module it wraps have one name; only the wrapper is recorded.
            is_wrapped = bool(self._running) and self._running[-1] == name
            if not self._running:  # a checkpoint inside may disable gradients, too
                self._is_left_out = self._is_trained_only and not torch.is_grad_enabled()
            self._running.append(name)
            if is_wrapped or self._is_left_out:
                return
            self.callers.setdefault(name, self._running[-2] if len(self._running) > 1 else None)
            call = self._num_calls.get(name, 0)
            for path, tensor in named_tensors([*args, kwargs] if kwargs else list(args)):
                point = ProbePoint(Phase.FORWARD, Role.INPUT, name, call, path)
                self._record(point, tensor, passed.get(path))

        def after_call(_: nn.Module, __: tuple[object, ...], output: object) -> None:
            if is_in_backward():
                return
            self._running.pop()
            if self._is_left_out or (self._running and self._running[-1] == name):
                return
            call = self._num_calls.get(name, 0)
            self._num_calls[name] = call + 1
            for path, tensor in named_tensors(output):
                self._record(ProbePoint(Phase.FORWARD, Role.OUTPUT, name, call, path), tensor)
                if self._masked is not None and name == self._masked[0] and tensor.requires_grad:
                    tensor.register_hook(self._masked[1].mul)  # type: ignore[no-untyped-call]

        return before_call, after_call

    def _record(
        self, point: ProbePoint, tensor: torch.Tensor, passed: torch.Tensor | None = None
    ) -> None:
        """Record a tensor and its gradient.

        If hooks of the module turned the tensor that it was `passed` into this one, record the
        gradient of that tensor: their backward may reduce it.
        """
        if (self._is_updated and not torch.is_grad_enabled()) or is_transformed(tensor):
            return
        points = self._points.setdefault(id(tensor), [])
        known = (
            self.snapshots[points[-1].encode()] if points and type(tensor) is torch.Tensor else None
        )
        is_same = known is not None and torch.equal(known, tensor.detach())
        self.snapshots[point.encode()] = (
            known if is_same and known is not None else self._copy(tensor)
        )
        self.declared[point.encode()] = read_declared(tensor)
        self.origins[point] = {points[0]} if points else self._find_origins(tensor)
        points.append(point)
        self.first_points[point] = points[0]
        if tensor.grad_fn is not None:
            self._producers[tensor.grad_fn] = points
        if len(points) == 1:
            self._alive.append(tensor)
            is_passed = passed is not None and passed.requires_grad and not self._is_local
            source = passed if passed is not None and is_passed else tensor
            if source.requires_grad:
                source.register_hook(self._make_gradient_hook(points))  # type: ignore[no-untyped-call]

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

    def _make_gradient_hook(self, points: list[ProbePoint]) -> Callable[[torch.Tensor], None]:
        def record(gradient: torch.Tensor) -> None:
            copy, declared = self._copy(gradient), read_declared(gradient)
            for point in points:
                name = point._replace(phase=Phase.BACKWARD).encode()
                self.snapshots[name], self.declared[name] = copy, declared

        return record


def copy_full(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor; of a DTensor the full tensor, which all its ranks must request."""
    with torch.no_grad(), quiet_collectives(), unwatched():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        full = full.detach()
        if hasattr(full, "wait"):
            full = full.wait()
        return full.clone()


def copy_local(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of what this rank has of a tensor: of a DTensor its local tensor."""
    with torch.no_grad(), unwatched():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local = local.detach()
        return (local.wait() if hasattr(local, "wait") else local).clone()


@final
class OpProbe(TrainingListener):
    """Records the full tensors that ops take and return in the code of one module, or `OUTSIDE`.

    Ops of the modules that it calls are left out, and those of optimizers. `consumers` maps the
    number of an op to the ops that take its result. What a collective makes of the result of an op
    is recorded when it is next read, with the line of the collective.
    """

    def __init__(self, module: str) -> None:
        self.snapshots: dict[str, torch.Tensor] = {}
        self.declared: dict[str, Declared] = {}  # unused: full tensors are recorded
        self.sources: dict[str, Source] = {}
        self.numbers: dict[str, dict[str, float]] = {}
        self.consumers: dict[int, set[int]] = {}
        self.num_calls = 0
        self._module = module
        self._num_ops = 0
        self._num_in_optimizer = 0
        self._running: list[str] = []
        self._producers: dict[int | None, frozenset[int]] = {}  # ops, by the address of a storage
        self._unwritten: set[int | None] = set()  # addresses of storage without values yet
        # By the address of a storage that a collective has written: the point of the op whose
        # result it took, and its line.
        self._communicated: dict[int | None, tuple[ProbePoint, Source | None]] = {}
        self._points: dict[int, ProbePoint] = {}  # of ops, by their number
        # Keeps storages alive, so that an address is not reused.
        self._alive: list[torch.UntypedStorage] = []

    @contextmanager
    def attached(self, model: nn.Module, names: OriginalNames) -> Iterator[None]:
        """Record until the context ends."""
        handles = []
        known: set[int] = set()
        for name, module in names.modules(model):
            is_known = name in names.module_names or self._module == OUTSIDE
            if is_known and id(module) not in known:
                known.add(id(module))
                handles.append(module.register_forward_pre_hook(self._make_pre_hook(name)))
                handles.append(module.register_forward_hook(self._after_call, always_call=True))
        try:
            with watch_training(self), _OpMode(self):
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._alive.clear()
            self._producers.clear()
            self._unwritten.clear()
            self._communicated.clear()

    def before_optimizer(self, _: object) -> None:
        """An optimizer is about to step."""
        self._num_in_optimizer += 1

    def after_optimizer(self, _: object) -> None:
        """An optimizer has stepped."""
        self._num_in_optimizer -= 1

    def after_collective(
        self, kind: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        """Note which op computed what a collective has reduced or gathered."""
        if not self._is_watched():
            return
        producers = frozenset().union(
            *(self._producers.get(_address(tensor), frozenset()) for tensor in inputs)
        )
        source = read_stack(sys._getframe(1)).source
        for tensor in outputs if len(producers) == 1 else ():
            address = _address(tensor)
            if address is not None:
                self._producers[address] = producers
                self._alive.append(tensor.untyped_storage())
                self._communicated[address] = self._points[min(producers)], source
                self._unwritten.discard(address)

    def _make_pre_hook(self, name: str) -> Callable[..., None]:
        def enter(*_: object) -> None:
            is_wrapped = bool(self._running) and self._running[-1] == name
            self._running.append(name)
            is_call = name == self._module and not is_wrapped and not is_in_backward()
            self.num_calls += is_call

        return enter

    def _after_call(self, *_: object) -> None:
        self._running.pop()

    def _is_watched(self) -> bool:
        """Whether the code that runs is that of the module."""
        running = self._running[-1] if self._running else OUTSIDE
        is_there = running == self._module and not self._num_in_optimizer
        return is_there and not is_in_backward()

    def run(
        self, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """Run an op, and record it if it is called in the module's own code."""
        if not self._is_watched() or not is_overload(func):
            return func(*args, **kwargs)
        arguments = dict(named_tensors([*args, kwargs] if kwargs else list(args)))
        producers = frozenset().union(
            *(self._producers.get(_address(tensor), ()) for tensor in arguments.values())
        )
        self._record_communicated(arguments.values())
        if _is_data_movement(func):
            result = func(*args, **kwargs)
            self._remember(result, producers)
            if op_packet(func).__name__ in _ALLOCATIONS:
                self._unwritten.update(_address(tensor) for _, tensor in named_tensors(result))
                self._unwritten.discard(None)
            elif op_schema(func).is_mutable:
                self._unwritten.difference_update(map(_address, arguments.values()))
            return result
        point = ProbePoint(Phase.FORWARD, Role.INPUT, str(func), self._num_ops, "")
        self._points[self._num_ops] = point
        self._num_ops += 1
        source = read_stack(sys._getframe(2)).source
        named = name_arguments(func, args, kwargs)
        self.numbers[point.encode()] = {
            name: math.nan if value is None else value
            for name, value in named.items()
            if isinstance(value, float | None)
        }
        written = {
            path: tensor
            for path, tensor in arguments.items()
            if _address(tensor) not in self._unwritten
        }
        self._record(point, written, source)  # before the op can change them
        self._unwritten.difference_update(map(_address, arguments.values()))
        result = func(*args, **kwargs)
        self._record(point._replace(role=Role.OUTPUT), dict(named_tensors(result)), source)
        for producer in producers:
            self.consumers.setdefault(producer, set()).add(point.call)
        self._remember(result, frozenset({point.call}))
        return result

    def _record_communicated(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record what collectives have written into tensors that are about to be read."""
        for tensor in tensors:
            point, source = self._communicated.pop(_address(tensor), (None, None))
            if point is not None and tensor.is_floating_point():
                self._record(point._replace(role=Role.COMMUNICATED), {"": tensor}, source)

    def _record(
        self, point: ProbePoint, tensors: Mapping[str, torch.Tensor], source: Source | None
    ) -> None:
        for path, tensor in tensors.items():
            name = point._replace(path=path).encode()
            self.snapshots[name] = copy_full(tensor)
            if source is not None:
                self.sources[name] = source

    def _remember(self, result: object, producers: frozenset[int]) -> None:
        for _, tensor in named_tensors(result):
            address = _address(tensor)
            if address is not None:
                self._producers[address] = producers
                self._alive.append(tensor.untyped_storage())


@final
class _OpMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True  # torch would refuse to run them

    def __init__(self, probe: OpProbe) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._probe = probe

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        return self._probe.run(func, args, kwargs or {})


def _address(tensor: torch.Tensor) -> int | None:
    if type(tensor) is not torch.Tensor and type(tensor) is not nn.Parameter:
        return None  # a subclass has no storage of its own
    return tensor.untyped_storage().data_ptr()


def _is_data_movement(func: OpOverload) -> bool:
    return "c10d" in func.namespace or op_packet(func).__name__ in _DATA_MOVEMENT


@final
@dataclass(frozen=True)
class ProbeSpec:
    """What a rank records, in a form that can be sent to another process.

    Every module; with `ops_in`, every op in the code of that module, or `OUTSIDE` of all; or,
    with `is_backward`, what each backward pass adds to the gradients. `renamed` maps a rank to
    the original's names of its modules that have other names. With `is_local`, DTensors are not
    gathered: every tensor of the result is what the rank has of it. With `is_trained_only`, calls
    of modules without gradients are left out.
    """

    ops_in: str | None = None
    renamed: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    step: int = 0
    is_backward: bool = False
    is_local: bool = False
    is_trained_only: bool = False

    def make_probe(self) -> ProbedStep:
        """A probe that records it, in its step."""
        probe: Probe = (
            ModuleProbe(is_local=self.is_local, is_trained_only=self.is_trained_only)
            if self.ops_in is None
            else OpProbe(self.ops_in)
        )
        return ProbedStep(BackwardProbe() if self.is_backward else probe, self.step)
