"""Checks that all ranks issue the same collectives in the same order, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from shardscope.errors import ParallelError
from shardscope.parallel.dependence import check_dependence
from shardscope.parallel.flow import Flow
from shardscope.parallel.gradients import Gradients
from shardscope.parallel.layouts import Layout, Seat
from shardscope.parallel.mesh import Mesh
from shardscope.parallel.talk import Said, listen
from shardscope.parallel.uses import find_uses

__all__ = ["check_order", "compare_ranks", "ranks_alike"]

_FEW = 16  # ranks: so many are all listened to


def check_order(flow: Flow, mesh: Mesh, *, gradients: Gradients | None = None) -> None:
    """Raise ParallelError if ranks would wait for each other, or send what does not fit.

    Of many ranks, one is listened to for all that hold pieces of the same shapes: their programs
    differ in nothing but where their pieces begin.
    """
    groups: list[tuple[int, ...]] = [(mesh.rank_at(seat),) for seat in mesh.seats]
    if mesh.num_ranks > _FEW:
        groups = ranks_alike(flow, mesh)
    uses = find_uses(flow)
    said: dict[int, Sequence[Said]] = {}
    for alike in groups:
        heard = listen(flow, mesh.seat_of(alike[0]), gradients=gradients, uses=uses)
        said.update(dict.fromkeys(alike, heard))
    compare_ranks(said, mesh)
    if gradients is not None:
        check_dependence(flow, mesh, gradients, _ends(mesh))


def _ends(mesh: Mesh) -> list[Seat]:
    """All seats of few; of many those at the ends of each axis and one beside them."""
    if mesh.num_ranks <= _FEW:
        return mesh.seats
    kept = [{0, 1, size // 2, size - 1} for size in mesh.sizes]
    return [
        seat
        for seat in mesh.seats
        if sum(at != 0 for at in seat.coordinates) <= 1
        and all(at in some for at, some in zip(seat.coordinates, kept, strict=True))
    ]


def compare_ranks(said: Mapping[int, Sequence[Said]], mesh: Mesh) -> None:
    """Compare each rank with the first of each of its groups: all kinds and axes, and along the
    group's axis what is sent too."""
    done: set[tuple[int, int, int]] = set()
    for rank, mine in said.items():
        seat = mesh.seat_of(rank)
        for axis in range(len(mesh.sizes)):
            peer = mesh.group_ranks(axis, seat)[0]
            pair = (id(mine), id(said[peer]), axis)
            if said[peer] is not mine and pair not in done:
                done.add(pair)
                _compare((peer, said[peer]), (rank, mine), axis, list(mesh.axes))


def ranks_alike(flow: Flow, mesh: Mesh) -> list[tuple[int, ...]]:
    """The ranks by the shapes of what they hold, those that hold the same together."""
    values = [value for value, _ in flow.inputs]
    values += [one for step in flow.steps for one in step.outputs]
    layouts: set[Layout] = {one.layout for one in values if one.is_tensor}
    uneven = [one for one in layouts if not one.is_even(mesh.sizes)]
    found: dict[Any, list[int]] = {}
    for seat in mesh.seats:
        shapes = tuple(one.local_shape(seat) for one in uneven)
        found.setdefault(shapes, []).append(mesh.rank_at(seat))
    return [tuple(ranks) for ranks in found.values()]


def _compare(
    one: tuple[int, Sequence[Said]], other: tuple[int, Sequence[Said]], axis: int, names: list[str]
) -> None:
    for at, (mine, theirs) in enumerate(zip_longest(one[1], other[1])):
        if _key(mine, axis) != _key(theirs, axis):
            where = (mine or theirs).steps[0].origin
            place = f"{where.module or 'the program'}{', ' if where.line else ''}{where.line}"
            raise ParallelError(
                f"ranks {one[0]} and {other[0]} would issue different collectives at position "
                f"{at} ({place}): rank {one[0]} issues {_describe(mine, names)}, rank "
                f"{other[0]} {_describe(theirs, names)}. This is a bug in shardscope; please "
                "report the program."
            )


def _key(said: Said | None, axis: int) -> Any:
    if said is None or said.axis != axis:
        return said and (said.axis, said.kind)
    return said.axis, said.kind, said.shape, said.dtype, said.reduction


def _describe(said: Said | None, names: list[str]) -> str:
    if said is None:
        return "none"
    kind = f"{said.kind}{f' ({said.reduction})' if said.reduction else ''}"
    dtype = str(said.dtype).removeprefix("torch.")
    return f"{kind} of {dtype}{list(said.shape)} along {names[said.axis]}"
