"""DTensor: the redistributions and output placements that it chooses for an op, ops on plain
tensors and DTensors, all ranks in one process, tensor-parallel styles.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from types import FunctionType, MethodType
from typing import Any, Protocol, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from shardscope._torch.dispatch import TorchDispatchMode, disable_dispatch_modes
from shardscope._torch.mesh import axis_names
from shardscope._torch.private import find_name
from shardscope._torch.tree import pytree_leaves, pytree_map, tensor_leaves

_TENSOR = "torch.distributed.tensor"

dtensor_random = find_name(f"{_TENSOR}._random", "restore DTensor's random state after a world")
OpDispatcher = find_name(
    f"{_TENSOR}._dispatch.OpDispatcher", "observe which inputs DTensor redistributes"
)
DTensorSpec = find_name(
    f"{_TENSOR}._dtensor_spec.DTensorSpec", "observe which inputs DTensor redistributes"
)
compute_local_shape_and_global_offset = find_name(
    f"{_TENSOR}._utils.compute_local_shape_and_global_offset",
    "compute each rank's shard of a tensor",
)
_clear_fast_path_sharding_prop_cache = find_name(
    f"{_TENSOR}.debug._clear_fast_path_sharding_prop_cache",
    "clear DTensor's cache of sharding decisions",
)
_clear_sharding_prop_cache = find_name(
    f"{_TENSOR}.debug._clear_sharding_prop_cache", "clear DTensor's cache of sharding decisions"
)
_LOGS = (f"{_TENSOR}._collective_utils", f"{_TENSOR}._redistribute")


def forget_decisions(*, thoroughly: bool = False) -> None:
    """Clear DTensor's cache of sharding decisions, which ignores some static arguments of ops.

    What it cached for the parts of decomposed ops is kept, unless `thoroughly`.
    """
    (_clear_sharding_prop_cache if thoroughly else _clear_fast_path_sharding_prop_cache)()


MeshPlacements = tuple[Placement, ...]


@dataclass
class Decision:
    """How DTensor will run an op. Arguments are numbered as in the op's schema.

    `moves` maps an argument, or a tensor in a list argument, to its placements before and after.
    `is_moved` is whether the redistributions took place: some ops are run by code that ignores the
    decision. `num_tried` is the number of decisions for parts of the op: above 0 if the op has no
    sharding strategy and DTensor decomposed it.
    """

    op: Any
    moves: dict[tuple[int, ...], tuple[MeshPlacements, MeshPlacements]]
    outputs: list[MeshPlacements | None]
    num_tried: int
    is_moved: bool = False


class DecisionWatcher(Protocol):
    """Called with DTensor's decisions."""

    def decided(self, decision: Decision) -> None:
        """An op is about to be run with this decision."""

    def tried(self, num_tried: int) -> None:
        """A part of a decomposed op is about to be decided; an exception raised here ends that."""

    def failed(self, op: Any, num_tried: int) -> None:
        """DTensor found no placements for an op."""

    def moved(self) -> None:
        """The inputs of the op of the last decision are being redistributed."""


@contextmanager
def watch_decisions(watcher: DecisionWatcher) -> Iterator[None]:
    """Report every op that this thread dispatches on DTensors to `watcher`."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    depth, num_tried, thread = 0, 0, get_ident()

    def wrap_propagate(propagate: Any) -> Any:
        def call(schema: Any) -> Any:
            nonlocal depth, num_tried
            if get_ident() != thread:
                return propagate(schema)
            num_tried = num_tried + 1 if depth else 0
            depth += 1
            try:
                if depth > 1:
                    watcher.tried(num_tried)
                # A fake tensor mode would keep DTensor from caching decisions for parts of an op,
                # and some ops try thousands of placements.
                with disable_dispatch_modes() if depth == 1 else nullcontext():
                    output_sharding = propagate(schema)
            except Exception:
                if depth == 1:
                    watcher.failed(schema.op, num_tried)
                raise
            finally:
                depth -= 1
            if not depth:
                watcher.decided(_read_decision(schema, output_sharding, num_tried))
            return output_sharding

        # DTensor clears the cache through attributes of this callable.
        for name in ("cache_clear", "cache_info"):
            if hasattr(propagate, name):
                setattr(call, name, getattr(propagate, name))
        return call

    move = OpDispatcher.redistribute_local_args

    @functools.wraps(move)  # its code object is searched for on stacks
    def watched_move(*args: Any, **kwargs: Any) -> Any:
        if get_ident() == thread:
            watcher.moved()
        return move(*args, **kwargs)

    names = ("propagate_op_sharding", "propagate_op_sharding_non_cached")
    originals = {name: propagator.__dict__.get(name) for name in names}
    for name in names:
        setattr(propagator, name, wrap_propagate(getattr(propagator, name)))
    OpDispatcher.redistribute_local_args = staticmethod(watched_move)
    try:
        yield
    finally:
        OpDispatcher.redistribute_local_args = staticmethod(move)
        for name, original in originals.items():
            if original is None:
                delattr(propagator, name)
            else:
                setattr(propagator, name, original)


def _read_decision(schema: Any, output_sharding: Any, num_tried: int) -> Decision:
    before = dict(_specs(schema.args_schema))
    target = output_sharding.redistribute_schema if output_sharding.needs_redistribute else None
    after = before if target is None else dict(_specs(target.args_schema))
    moves = {
        path: (spec.placements, after[path].placements)
        for path, spec in before.items()
        if path in after and spec.placements != after[path].placements
    }
    outputs = output_sharding.output_spec
    output_specs = outputs if isinstance(outputs, Sequence) else [outputs]
    return Decision(
        schema.op,
        moves,
        [spec.placements if isinstance(spec, DTensorSpec) else None for spec in output_specs],
        num_tried,
    )


def _specs(values: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    for index, value in enumerate(values):
        if isinstance(value, DTensorSpec):
            yield (*path, index), value
        elif isinstance(value, list | tuple):
            yield from _specs(value, (*path, index))


@contextmanager
def preserved_propagator() -> Iterator[None]:
    """Restore DTensor's schema info of ops, random state and custom handlers on leaving.

    `loss_parallel()` leaves its handlers behind if an exception ends it.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    schema_info, tracker = dict(propagator.op_to_schema_info), dtensor_random._rng_tracker
    handlers = dict(op_handlers())
    forget_decisions(thoroughly=True)
    try:
        yield
    finally:
        forget_decisions(thoroughly=True)
        propagator.op_to_schema_info.clear()
        propagator.op_to_schema_info.update(schema_info)
        dtensor_random._rng_tracker = tracker
        _set_handlers(handlers)


def op_handlers() -> dict[Any, Any]:
    """The custom handlers that run ops instead of DTensor's dispatcher, by op."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


def _set_handlers(handlers: Mapping[Any, Any]) -> None:
    op_handlers().clear()
    op_handlers().update(handlers)


@contextmanager
def added_handlers(handlers: Mapping[Any, Any], note: Callable[[], None]) -> Iterator[None]:
    """Add custom handlers of ops until the context ends; `note` is called when one runs."""

    def with_note(handler: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            note()
            return handler(*args, **kwargs)

        return call

    before = dict(op_handlers())
    op_handlers().update({op: with_note(handler) for op, handler in handlers.items()})
    try:
        yield
    finally:
        _set_handlers(before)


@contextmanager
def implicit_replicas() -> Iterator[None]:
    """Treat plain tensors as replicated in ops with DTensors.

    torch's own context manager turns the switch off on leaving, even if it was on before.
    """
    dispatcher = DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = True
    try:
        yield
    finally:
        dispatcher._allow_implicit_replication = before


@contextmanager
def quiet_collectives() -> Iterator[None]:
    """Silence DTensor's logs about collectives that are unsupported or slow on CPUs."""
    logs = [logging.getLogger(name) for name in _LOGS]
    before = [log.disabled for log in logs]
    for log in logs:
        log.disabled = True
    try:
        yield
    finally:
        for log, is_disabled in zip(logs, before, strict=True):
            log.disabled = is_disabled


def local_part(
    shape: Sequence[int], mesh: DeviceMesh, placements: MeshPlacements
) -> tuple[int, ...]:
    """The shape of this rank's shard of a tensor with these placements on `mesh`."""
    with disable_dispatch_modes(), torch.device("cpu"):  # it computes with tensors
        part, _ = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    return tuple(part)


ShardingPropagator = find_name(
    "torch.distributed.tensor._sharding_prop.ShardingPropagator",
    "recognise DTensor's shape propagation, which allocates no memory",
)


@final
class ShapePropagationTracker:
    """Knows whether an op is run by DTensor's shape propagation."""

    def __init__(self) -> None:
        self._threads: set[int] = set()

    def is_on(self) -> bool:
        """Whether this thread is propagating shapes."""
        return threading.get_ident() in self._threads

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe shape propagation until the context ends."""
        run = ShardingPropagator._propagate_tensor_meta_non_cached

        @functools.wraps(run)
        def run_and_note(*args: Any, **kwargs: Any) -> Any:
            self._threads.add(threading.get_ident())
            try:
                return run(*args, **kwargs)
            finally:
                self._threads.discard(threading.get_ident())

        ShardingPropagator._propagate_tensor_meta_non_cached = run_and_note
        try:
            yield
        finally:
            ShardingPropagator._propagate_tensor_meta_non_cached = run


_REFUSAL = "got mixed torch.Tensor and DTensor"

ReportMixing = Callable[[str, Sequence[torch.Tensor], DTensor], None]
Make = Callable[[torch.Tensor], None]


@contextmanager
def allow_mixing(*, report_mixing: ReportMixing, make: Make) -> Iterator[None]:
    """Treat plain tensors as replicated in ops with DTensors.

    `report_mixing` is called with each such op, its plain tensors and one of its DTensors; `make`
    with each plain tensor that an op creates, so that its origin is known. Compiled code runs
    eagerly: in a dispatch mode, torch.compile would give up on it for good.
    """
    with torch.compiler.set_stance("force_eager"), _Mixing(report_mixing, make):
        yield


@final
class _Mixing(TorchDispatchMode):
    def __init__(self, report_mixing: ReportMixing, make: Make) -> None:
        super().__init__()
        self._report_mixing = report_mixing
        self._make = make

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = tensor_leaves((args, kwargs))
        placed = next((tensor for tensor in tensors if isinstance(tensor, DTensor)), None)
        plain = [tensor for tensor in tensors if _is_plain(tensor)]
        if placed is not None and plain and not _is_allowed():
            return self._run_mixed(func, args, kwargs, plain, placed)
        result = func(*args, **kwargs)
        if placed is None:
            for leaf in pytree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._make(leaf)
        return result

    def _run_mixed(
        self, func: Any, args: Any, kwargs: Any, plain: list[torch.Tensor], placed: DTensor
    ) -> Any:
        # A custom handler, such as those of loss_parallel(), may accept both kinds.
        if func in op_handlers():
            try:
                return func(*args, **kwargs)
            except RuntimeError as error:
                if _REFUSAL not in str(error):
                    raise
        self._report_mixing(str(func), plain, placed)
        args, kwargs = pytree_map(lambda leaf: _replicate(leaf, placed), (args, kwargs))
        return func(*args, **kwargs)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether DTensor rejects it; it treats a tensor with a single element as a number."""
    return not isinstance(tensor, DTensor) and tensor.numel() != 1


def _is_allowed() -> bool:
    """Whether the user has allowed plain tensors in ops with DTensors, as replicated ones."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def _replicate(leaf: Any, like: DTensor) -> Any:
    if not isinstance(leaf, torch.Tensor) or not _is_plain(leaf):
        return leaf
    mesh = like.device_mesh
    return DTensor.from_local(leaf, mesh, [Replicate()] * mesh.ndim, run_check=False)


_NEED = "compare the numbers of all ranks"

LocalTensor = find_name("torch.distributed._local_tensor.LocalTensor", _NEED)
LocalTensorMode = find_name("torch.distributed._local_tensor.LocalTensorMode", _NEED)


@contextmanager
def all_ranks(ranks: frozenset[int]) -> Iterator[None]:
    """Run as all of these ranks at once, on tensors with data, until the context ends."""
    with disable_dispatch_modes(), LocalTensorMode(ranks):
        yield


def join_ranks(local_tensors: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """A `LocalTensor` of the local tensors by rank."""
    joined: torch.Tensor = LocalTensor(dict(local_tensors))
    return joined


def split_ranks(tensor: torch.Tensor) -> dict[int, torch.Tensor]:
    """The local tensors by rank of a `LocalTensor`, or of a DTensor that wraps one."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if hasattr(tensor, "wait"):  # the result of a collective that is not yet complete
        tensor = tensor.wait()
    assert isinstance(tensor, LocalTensor), type(tensor)
    return dict(tensor._local_tensors)


_MAX_DEPTH = 4


def parallel_styles(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """The tensor-parallel styles whose hooks `module` has: names, with the mesh axes of each."""
    styles: dict[str, tuple[str, ...]] = {}
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        for name in _styles_in(hook, _MAX_DEPTH):
            styles[name] = styles.get(name) or _axes_in(hook)
    return styles


def _axes_in(hook: Any) -> tuple[str, ...]:
    """The axes of the mesh in a hook's closure."""
    meshes = (value for value in _closure_values(hook) if isinstance(value, DeviceMesh))
    return next((axis_names(mesh) for mesh in meshes), ())


def _closure_values(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


def _styles_in(value: Any, depth: int) -> Iterator[str]:
    """Names of styles in a hook's closure, or whose methods the hook is."""
    if depth == 0:
        return
    if isinstance(value, ParallelStyle):
        yield type(value).__name__
    elif isinstance(value, partial):
        yield from _styles_in(value.func, depth)
    elif isinstance(value, MethodType):
        yield from _styles_in(value.__self__, depth)
    elif isinstance(value, FunctionType):
        name, _, method = value.__qualname__.rpartition(".")
        style = value.__globals__.get(name) if method else None
        if isinstance(style, type) and issubclass(style, ParallelStyle):
            yield name
            return
        for closure_value in _closure_values(value):
            yield from _styles_in(closure_value, depth - 1)
