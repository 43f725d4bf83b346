"""Proves a parallel program: all its ranks in this process, against the single device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, fx

from shardscope._torch.random_state import preserved_random_state
from shardscope.numerics.widen import jitter, widen_tensor, widened
from shardscope.parallel.blame import explained
from shardscope.parallel.flow import Flow, Value
from shardscope.parallel.layouts import Layout, Seat
from shardscope.parallel.lockstep import run_in_lockstep
from shardscope.parallel.mesh import Mesh
from shardscope.parallel.parity.compare import compare
from shardscope.parallel.parity.outcome import Outcome
from shardscope.parallel.placements import Replicate, Shard
from shardscope.parallel.rules.dealing import Coordinates, join, piece_of
from shardscope.record import TensorVerdict

__all__ = [
    "Trial",
    "deal_values",
    "groups_of",
    "join_results",
    "prove",
    "run_captured",
    "run_ranks",
]


@final
@dataclass(frozen=True, eq=False)
class Trial:
    """What to run: one program for the single device, one for each rank, alike in what they take.

    `gradients` names the parameters whose gradients come after the flow's outputs.
    """

    flow: Flow
    mesh: Mesh
    single: Callable[..., Sequence[Any]]
    ranks: Mapping[int, fx.GraphModule]
    gradients: tuple[str, ...] = ()
    names: tuple[str | None, ...] | None = None  # of the outputs; those without one are left out

    def outcome(self, results: Sequence[Any]) -> Outcome:
        """What a run returned, by name."""
        outputs, buffers = [], {}
        names = None if self.names is None else iter(self.names)
        for item, (_, role) in zip(results, self.flow.outputs, strict=False):
            if role.kind == "output":
                name = f"[{role.name}]" if names is None else next(names)
                if isinstance(item, Tensor) and name is not None:
                    outputs.append((name, item))
            elif isinstance(item, Tensor):
                buffers[role.name] = item
        found = results[len(self.flow.outputs) :]
        gradients = dict(zip(self.gradients, found, strict=True))
        return Outcome(outputs, gradients, buffers, frozenset(buffers))


def prove(trial: Trial, values: Sequence[Any]) -> list[TensorVerdict]:
    """Compare each output, gradient and changed buffer; `values` are what the program takes."""
    with preserved_random_state(), torch.no_grad():
        reference = _run_original(trial, values)
        exact = _run_exact(trial, values)
        others = jitter(values)
        jittered = [(_run_single(trial, others), _run_exact(trial, others))]
        ranks = run_ranks(trial, values)
    return compare(reference, exact, ranks, jittered=jittered, sizes=trial.mesh.sizes)


def run_captured(trial: Trial, values: Sequence[Any]) -> Outcome:
    """What the program computes that is not cut."""
    with torch.no_grad():
        return _run_original(trial, values)


def _run_original(trial: Trial, values: Sequence[Any]) -> Outcome:
    with explained(
        "torch.export's program of the model fails on these inputs, before it is partitioned",
        "Check that torch.export.export(model, args).module()(*args) works, or pass verify=False.",
    ):
        return _run_single(trial, values)


def _run_exact(trial: Trial, values: Sequence[Any]) -> Outcome | None:
    """In double precision; None where a kernel does not know it."""
    try:
        return _run_single(trial, values, is_exact=True)
    except Exception:  # noqa: BLE001 - whatever it is, the run in the model's own dtype goes on
        return None


def _run_single(trial: Trial, values: Sequence[Any], *, is_exact: bool = False) -> Outcome:
    torch.manual_seed(0)
    given = [_copy(one, is_exact) for one in values]
    with widened(torch.get_default_dtype()) if is_exact else nullcontext():
        return trial.outcome(trial.single(*given))


def run_ranks(trial: Trial, values: Sequence[Any], *, seed: int = 0) -> list[Outcome]:
    """What each rank gave, with tensors made whole."""
    mesh = trial.mesh
    torch.manual_seed(seed)
    given = deal_values(trial.flow, mesh, values)
    results = run_in_lockstep(trial.ranks, given, groups_of(mesh))
    wholes = join_results(trial, results)
    return [trial.outcome(wholes[mesh.rank_at(seat)]) for seat in mesh.seats]


def deal_values(flow: Flow, mesh: Mesh, values: Sequence[Any]) -> dict[int, list[Any]]:
    """What each rank's program takes."""
    return {
        mesh.rank_at(seat): [
            _piece(one, value.layout, seat)
            for one, (value, _) in zip(values, flow.inputs, strict=True)
        ]
        for seat in mesh.seats
    }


def _copy(value: Any, is_exact: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    return widen_tensor(value.detach()) if is_exact else value.detach().clone()


def _piece(value: Any, layout: Layout, seat: Seat) -> Any:
    if not isinstance(value, Tensor):
        return value
    return piece_of(value.detach(), layout=layout, seat=seat).clone()


def groups_of(mesh: Mesh) -> dict[str, Sequence[int]]:
    """The ranks of every group, by the name that programs give it."""
    return {
        mesh.group_name(axis, seat): mesh.group_ranks(axis, seat)
        for seat in mesh.seats
        for axis in range(len(mesh.sizes))
    }


def join_results(trial: Trial, results: Mapping[int, Sequence[Any]]) -> dict[int, list[Any]]:
    """Each rank's results, made whole with the pieces of its peers."""
    layouts = list(_result_layouts(trial))
    joined: dict[int, list[Any]] = {rank: [] for rank in results}
    for index, layout in enumerate(layouts):
        column = {rank: found[index] for rank, found in results.items()}
        whole = column if layout is None else _make_whole(column, layout, trial.mesh)
        for rank, one in whole.items():
            joined[rank].append(one)
    return joined


def _result_layouts(trial: Trial) -> Iterator[Layout | None]:
    for item, _ in trial.flow.outputs:
        is_tensor = isinstance(item, Value) and item.is_tensor
        yield item.layout if is_tensor else None
    by_name = {role.name: value.layout for value, role in trial.flow.inputs}
    yield from (by_name[name] for name in trial.gradients)


def _make_whole(pieces: dict[int, Any], layout: Layout, mesh: Mesh) -> dict[int, Any]:
    for axis in reversed(range(len(mesh.sizes))):
        placement = layout.placements[axis]
        if isinstance(placement, Replicate):
            continue
        assert isinstance(placement, Shard), "a program hands out no addends"
        done: dict[int, Any] = {}
        for seat in mesh.seats:
            if mesh.rank_at(seat) not in done:
                peers = mesh.group_ranks(axis, seat)
                parts: dict[Coordinates, Tensor] = {
                    (i,): pieces[rank] for i, rank in enumerate(peers)
                }
                whole = join(parts, placements=[placement], sizes=[len(peers)])
                done.update(dict.fromkeys(peers, whole))
        pieces = done
    return pieces
