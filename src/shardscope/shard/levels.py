"""Calls taken apart: into core ATen, or as far as Inductor does; each distinct call once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, final

from torch.distributed.tensor import Replicate

from shardscope._torch.decompositions import (
    core_aten_table,
    functional_variant,
    inductor_table,
    is_composite,
    parts_of,
    with_defaults,
)
from shardscope._torch.dispatch import TorchDispatchMode, is_higher_order
from shardscope._torch.propagation import implicit_replicas
from shardscope.record import Level
from shardscope.shard.capture import NOT_THE_MODELS, Capture, Use
from shardscope.shard.dispatch import Dispatcher, describe
from shardscope.shard.replication import run_somehow
from shardscope.shard.signature import Signature, freeze_call

__all__ = ["TABLES", "count_parts", "take_apart"]

Table = Mapping[Any, Callable[..., Any]]
Report = Callable[[str, str], None]
TABLES: dict[Level, Callable[[], Table]] = {
    Level.CORE_ATEN: core_aten_table,
    Level.INDUCTOR: inductor_table,
}


@final
class _Parts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes apart whatever passes it, as a table says, and counts what cannot be."""

    def __init__(self, table: Table) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts: Counter[Signature] = Counter()
        self._table = table

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Take the call apart, or make it."""
        kwargs = kwargs or {}
        if is_higher_order(func) or func.namespace in NOT_THE_MODELS:
            return func(*args, **kwargs)
        functional = functional_variant(func)
        if functional is None:
            return self._go_on(func, args, kwargs)
        self._go_on(functional, with_defaults(func, functional, args), kwargs)
        return args[0]

    def _go_on(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._table.get(op) or (parts_of(op) if is_composite(op) else None)
        if run is not None:
            with self:
                result = run(*args, **kwargs)
            if result is not NotImplemented:
                return result
        self.parts[_lay_out_whole(freeze_call(op, args, kwargs))] += 1
        return run_somehow(op, args, kwargs)


def _lay_out_whole(call: Signature) -> Signature:
    """Constants that a decomposition makes are whole on every rank: so they count as DTensors."""
    meshes = [spec.mesh for _, spec in call.tensors() if spec.mesh is not None]
    if not meshes:
        return call
    whole = tuple(Replicate() for _ in meshes[0].shape)
    return call.change(
        lambda _, spec: spec if spec.mesh else spec._replace(placements=whole, mesh=meshes[0])
    )


def count_parts(
    call: Signature, table: Table, dispatcher: Dispatcher, report: Report = lambda *_: None
) -> Counter[Signature]:
    """What one call is made of; where its decomposition fails, itself."""
    mode = _Parts(table)
    try:
        args, kwargs = call.arguments(dispatcher.make)
        with implicit_replicas(), mode:
            call.op(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - decompositions do not expect DTensors
        report(str(call.op), f"it could not be decomposed and counts as one op: {describe(error)}")
        return Counter({call: 1})
    return mode.parts


def take_apart(captured: Capture, level: Level, dispatcher: Dispatcher, report: Report) -> Capture:
    """The same calls at another level, with the places they come from."""
    table = TABLES[level]()
    result: Capture = {}
    for call, use in captured.items():
        for part, times in count_parts(call, table, dispatcher, report).items():
            result.setdefault(part, Use()).add(use, times)
    return result
