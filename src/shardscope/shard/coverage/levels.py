"""Op calls decomposed to core ATen or as far as Inductor does, with their FLOPs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.flop_counter import flop_registry

from shardscope._torch.decompositions import (
    core_aten_table,
    functional_variant,
    inductor_table,
    is_composite,
    parts_of,
    with_defaults,
)
from shardscope._torch.dispatch import (
    FLOP_ALIASES,
    TorchDispatchMode,
    is_higher_order,
    op_packet,
    op_schema,
)
from shardscope._torch.dtensor import implicit_replicas
from shardscope._torch.fake import NO_DATA, without_data
from shardscope.attribution.tensors import map_tensors, tensors_in
from shardscope.record import Level
from shardscope.shard.coverage.dispatch import Dispatcher, describe
from shardscope.shard.coverage.op_calls import (
    NON_MODEL_NAMESPACES,
    Capture,
    Signature,
    Use,
    freeze_call,
)


def run_or_replicate(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the op; where DTensor raises, on plain tensors of the global shapes, without data.

    The error is found again, and reported, when the call is judged.
    """
    try:
        return op(*args, **kwargs)
    except NO_DATA:
        raise
    except Exception:
        placed = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, DTensor)]
        if not placed:
            raise
        try:
            result = op(*map_tensors(args, _empty), **map_tensors(kwargs, _empty))
        except Exception:  # noqa: BLE001 - then it is not DTensor's fault
            result = NotImplemented
        if result is NotImplemented:
            raise
    if op_schema(op).is_mutable:
        return args[0]
    mesh = placed[0].device_mesh
    replicated = [Replicate() for _ in range(mesh.ndim)]
    return map_tensors(
        result, lambda tensor: DTensor.from_local(tensor, mesh, replicated, run_check=False)
    )


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    device = tensor.to_local().device
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


Table = Mapping[Any, Callable[..., Any]]
Report = Callable[[str, str], None]
TABLES: dict[Level, Callable[[], Table]] = {
    Level.CORE_ATEN: core_aten_table,
    Level.INDUCTOR: inductor_table,
}


@final
class _DecomposeMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Decomposes the ops that it sees by a table, and counts those that cannot be decomposed."""

    def __init__(self, table: Table) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts: Counter[Signature] = Counter()
        self._table = table

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Decompose the call, or run it."""
        kwargs = kwargs or {}
        if is_higher_order(func) or func.namespace in NON_MODEL_NAMESPACES:
            return func(*args, **kwargs)
        functional = functional_variant(func)
        if functional is None:
            return self._decompose(func, args, kwargs)
        self._decompose(functional, with_defaults(func, functional, args), kwargs)
        return args[0]

    def _decompose(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._table.get(op) or (parts_of(op) if is_composite(op) else None)
        if run is not None:
            with self:
                result = run(*args, **kwargs)
            if result is not NotImplemented:
                return result
        self.parts[_replicate_constants(freeze_call(op, args, kwargs))] += 1
        return run_or_replicate(op, args, kwargs)


def _replicate_constants(call: Signature) -> Signature:
    """The call with its plain tensors, constants of a decomposition, as replicated DTensors."""
    meshes = [spec.mesh for _, spec in call.tensors() if spec.mesh is not None]
    if not meshes:
        return call
    replicated = tuple(Replicate() for _ in meshes[0].shape)
    return call.change(
        lambda _, spec: spec if spec.mesh else spec._replace(placements=replicated, mesh=meshes[0])
    )


def count_parts(
    call: Signature, table: Table, dispatcher: Dispatcher, report: Report = lambda *_: None
) -> Counter[Signature]:
    """The calls that a call decomposes into, with counts; the call itself if that fails."""
    mode = _DecomposeMode(table)
    try:
        args, kwargs = call.arguments(dispatcher.make)
        with implicit_replicas(), mode:
            call.op(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - decompositions do not expect DTensors
        report(str(call.op), f"it could not be decomposed and counts as one op: {describe(error)}")
        return Counter({call: 1})
    return mode.parts


def decompose(captured: Capture, level: Level, dispatcher: Dispatcher, report: Report) -> Capture:
    """The captured calls decomposed to `level`, with where they were called from."""
    table = TABLES[level]()
    result: Capture = {}
    for call, use in captured.items():
        for part, times in count_parts(call, table, dispatcher, report).items():
            result.setdefault(part, Use()).add(use, times)
    return result


@final
class FlopCounter:
    """Counts the FLOPs of each distinct call once; a composite op has those of its parts."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._known: dict[Signature, int | None] = {}

    def count(self, call: Signature) -> int | None:
        """FLOPs of the call, as if nothing were sharded; None where torch has no formula for it."""
        plain = call.plain()
        if plain not in self._known:
            self._known[plain] = self._count(plain)
        return self._known[plain]

    def _count(self, call: Signature) -> int | None:
        packet = op_packet(call.op)
        formula = flop_registry.get(FLOP_ALIASES.get(packet.__name__, packet))
        if formula is not None:
            return self._apply(formula, call)
        if not is_composite(call.op):
            return None
        parts = count_parts(call, {}, self._dispatcher)
        counts = ((self.count(part), times) for part, times in parts.items() if part != call)
        known = [flops * times for flops, times in counts if flops is not None]
        return sum(known) if known else None

    def _apply(self, formula: Any, call: Signature) -> int | None:
        with without_data():
            try:
                args, kwargs = call.arguments(self._dispatcher.make)
                return int(formula(*args, **kwargs, out_val=call.op(*args, **kwargs)))
            except Exception:  # noqa: BLE001 - formulas assert what ops do not ask for
                return None
