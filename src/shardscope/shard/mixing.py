"""Plain tensors that meet DTensors while a step runs, each with its line and origin."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch.distributed.tensor import DTensor

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.meshes import axis_names
from shardscope._torch.mixing import allow_mixing
from shardscope._torch.module_calls import watch_module_calls
from shardscope.comm.buckets import BucketBook
from shardscope.comm.calls import ModuleCalls
from shardscope.comm.stack import read_stack
from shardscope.record import Finding, Severity, Source
from shardscope.shard.sayings import fold_indices
from shardscope.shard.tensors import Holdings

__all__ = ["find_mixed_tensors"]


def find_mixed_tensors(
    held: Holdings, step: Callable[[], object]
) -> tuple[list[Finding], Exception | None]:
    """Run `step`, with plain tensors taken for replicated ones, and tell which met DTensors.

    If the step fails, with the error that ended it.
    """
    encounters = _Encounters(held)
    names = held.names
    calls = ModuleCalls(names, BucketBook(names, _ignore), _ignore)
    encounters.running = lambda: names.name(calls.running())
    try:
        with (
            calls.watching(),
            watch_module_calls(calls),
            allow_mixing(meet=encounters.meet, make=encounters.make),
        ):
            step()
    except Exception as error:  # noqa: BLE001 - a program may raise anything
        return encounters.findings, error
    return encounters.findings, None


def _ignore(place: str, fact: str) -> None:
    """Gaps in whose module a collective is are no matter of ours."""


@final
class _Encounters:
    """Remembers where plain tensors came from, and finds each line at which one met a DTensor."""

    def __init__(self, held: Holdings) -> None:
        self.findings: list[Finding] = []
        self.running: Callable[[], str | None] = lambda: None
        self._names = {id(one.tensor): one for one in held.tensors if one.mesh is None}
        # By identity: tensors compare element by element.
        self._origins: dict[int, tuple[weakref.ref[torch.Tensor], Source]] = {}
        self._known: set[tuple[str, Source | None]] = set()

    def make(self, tensor: torch.Tensor) -> None:
        """An op made `tensor` of plain ones."""
        source = read_stack(sys._getframe(1)).source
        if source is not None:
            self._origins[id(tensor)] = weakref.ref(tensor), source

    def meet(self, op: str, plain: Sequence[torch.Tensor], placed: DTensor) -> None:
        """`op` was given plain tensors and `placed`."""
        source = read_stack(sys._getframe(1)).source
        for tensor in plain:
            who = self._describe(tensor)
            # Layers that are alike meet alike, and so does backward what forward has met.
            alike = fold_indices(who)
            key = (alike, None) if is_in_backward() else (alike, source)
            if key not in self._known:
                self._known |= {key, (alike, None)}
                self.findings.append(self._find(op, who, source, placed))

    def _find(self, op: str, who: str, source: Source | None, placed: DTensor) -> Finding:
        mesh = ", ".join(axis_names(placed.device_mesh))
        replicated = ", ".join(["Replicate()"] * placed.device_mesh.ndim)
        module = self.running()
        return Finding(
            rule="mixed-tensors",
            severity=Severity.ERROR,
            subject=module or who,
            fact=f"{op} gets {who} together with a DTensor on ({mesh}), which torch refuses",
            remedy=f"If it is the same on every rank, make it one with distribute_tensor(…, mesh, "
            f"[{replicated}]); otherwise pass the DTensor's to_local().",
            source=source,
        )

    def _describe(self, tensor: torch.Tensor) -> str:
        held = self._names.get(id(tensor))
        if held is not None:
            kind = "buffer" if held.record.is_buffer else "parameter"
            return f"the plain {kind} {held.name}"
        shape = "×".join(map(str, tensor.shape))
        reference, origin = self._origins.get(id(tensor), (None, None))
        is_known = reference is not None and reference() is tensor and origin is not None
        made = f", made at {origin.file}:{origin.line}" if is_known and origin else ""
        return f"a plain tensor of {shape}{made}"
