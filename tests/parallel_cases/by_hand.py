"""The ranks of a parallel program, run and joined without any of its own machinery.

Each rank is a thread that calls its module as a user would; where it talks to others, threads
meet. Verification runs graphs in lockstep instead, so that a fault of one is not one of the other.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from parallel_cases.case import Case, Given, copied
from shardscope.parallel.program import ParallelProgram
from shardscope.plan.placements import Replicate, Shard

__all__ = [
    "Spoken",
    "check_case",
    "check_forward",
    "check_training",
    "local_inputs",
    "on_ranks",
    "own_piece",
    "same_sequence",
]

Spoken = list[tuple[Any, ...]]
"""What a rank sent: kind, group, shape and dtype of each collective, in order."""


_KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


@final
class _Meeting:
    """Where the ranks of one group exchange what they hold."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = list(ranks)
        self._held: dict[int, Any] = {}
        self.barrier = threading.Barrier(len(ranks), timeout=30)

    def exchange(self, rank: int, thing: Any) -> tuple[int, list[Any]]:
        self._held[rank] = thing
        self.barrier.wait()
        everyones = [self._held[one] for one in self._ranks]
        self.barrier.wait()
        return self._ranks.index(rank), everyones


@final
class _Talk(TorchDispatchMode):
    """Collectives of one rank's thread."""

    supports_higher_order_operators = True

    def __init__(self, rank: int, meetings: dict[str, _Meeting]) -> None:
        super().__init__()
        self._rank = rank
        self._meetings = meetings
        self.spoken: Spoken = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") != "_c10d_functional":
            return func(*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        kind, value, group = func.__name__.split(".")[0], args[0], args[-1]
        self.spoken.append((kind, group, tuple(value.shape), value.dtype, str(args[1:-1])))
        assert value.is_contiguous() or kind == "all_reduce", (
            f"{kind} of a tensor that is not contiguous"
        )
        mine, values = self._meetings[group].exchange(self._rank, value.clone())
        return _answer(kind, mine, values, args)


def _answer(kind: str, mine: int, values: list[Tensor], args: Any) -> Tensor:
    if kind == "all_gather_into_tensor":
        return torch.cat(values)
    if kind == "all_to_all_single":
        sizes = args[2]
        return torch.cat([one.split(sizes)[mine] for one in values])
    reduce = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[args[1]]
    total = reduce(torch.stack(values), 0).to(values[0].dtype)
    if kind == "reduce_scatter_tensor":
        return total.view(len(values), -1, *total.shape[1:])[mine].clone()
    assert kind == "all_reduce"
    return total


def on_ranks(
    program: ParallelProgram, call: Callable[[int], Any]
) -> tuple[dict[int, Any], dict[int, Spoken]]:
    """What the call returns on each rank, and what each rank sent."""
    mesh = program.mesh
    meetings = {
        mesh.group_name(axis, coordinate): _Meeting(mesh.group_ranks(axis, coordinate))
        for coordinate in mesh.coordinates
        for axis in range(len(mesh.sizes))
    }
    talks = {
        mesh.rank_at(coordinate): _Talk(mesh.rank_at(coordinate), meetings)
        for coordinate in mesh.coordinates
    }
    results: dict[int, Any] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.no_grad(), talks[rank]:
                results[rank] = call(rank)
        except BaseException as error:  # noqa: BLE001  # a thread's error is the test's
            failures.append(error)
            for meeting in meetings.values():
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in talks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(failures, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
        raise error
    return results, {rank: talk.spoken for rank, talk in talks.items()}


def check_case(case: Case, program: ParallelProgram, *, given: Given | None = None) -> None:
    """All that the program gives on all ranks is what the model itself gives."""
    given = given or case.given()
    check = check_training if program.is_training else check_forward
    check(case, program, given)


def check_forward(case: Case, program: ParallelProgram, given: Given) -> None:
    """Outputs, buffers and changed inputs of the modules that a user would call."""
    model, mine = case.model(), copied(given)
    with torch.no_grad():
        wanted = model(*mine[0], **mine[1])
    # Copies: a module keeps what an earlier run left in its buffers.
    modules = {rank: copy.deepcopy(program.module(rank)) for rank in _ranks(program)}
    buffers = {rank: dict(one.named_buffers()) for rank, one in modules.items()}
    inputs = {rank: local_inputs(program, given, rank) for rank in modules}
    results, spoken = on_ranks(program, lambda r: modules[r](*inputs[r][0], **inputs[r][1]))
    same_sequence(spoken)
    as_listed(program, spoken)
    leaves, tree = tree_flatten(wanted)
    pieces = {rank: tree_flatten(one) for rank, one in results.items()}
    assert all(found == tree for _, found in pieces.values()), "another nest of outputs"
    placed = [item for item, role in program.graph.outputs if role.kind == "output"]
    for at, (one, value) in enumerate(zip(leaves, placed, strict=True)):
        found = {rank: pieces[rank][0][at] for rank in pieces}
        _check_leaf(program, f"output {at}", one, found, value, case.tolerance)
    for name, one in model.named_buffers():
        found = {rank: buffers[rank].get(name) for rank in buffers}
        if found[_ranks(program)[0]] is not None:  # export drops what the program does not use
            value = _input_value(program, name)
            _check_leaf(program, f"buffer {name}", one, found, value, case.tolerance)
    given_values = [value for value, role in program.graph.inputs if role.kind == "input"]
    for at, (one, value) in enumerate(zip(tree_flatten(mine)[0], given_values, strict=True)):
        found = {rank: tree_flatten(inputs[rank])[0][at] for rank in inputs}
        _check_leaf(program, f"input {at} afterwards", one, found, value, case.tolerance)


def check_training(case: Case, program: ParallelProgram, given: Given) -> None:
    """Loss, outputs, new buffers and every parameter's gradient of the joint graphs."""
    model, mine = case.model(training=True), copied(given)
    wanted = model(*mine[0], **mine[1])
    tree_flatten(wanted)[0][0].backward()
    joints = {rank: program.joint(rank) for rank in _ranks(program)}
    values = {rank: _joint_inputs(program, given, rank) for rank in joints}
    results, spoken = on_ranks(program, lambda r: joints[r].graph_module(*values[r]))
    same_sequence(spoken)
    as_listed(program, spoken)
    outputs = iter(tree_flatten(wanted)[0])
    buffers = dict(model.named_buffers())
    for at, (value, role) in enumerate(program.graph.outputs):
        found = {rank: one[at] for rank, one in results.items()}
        if role.kind != "input mutation":
            one = next(outputs) if role.kind == "output" else buffers[role.name]
            _check_leaf(program, f"{role.kind} {role.name}", one, found, value, case.tolerance)
    names = joints[_ranks(program)[0]].parameters
    gradients = {
        rank: dict(zip(names, one[len(program.graph.outputs) :], strict=True))
        for rank, one in results.items()
    }
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        # A weight with several names has a gradient for each of its uses.
        tied = [other for other in names if parameters[other] is parameter]
        if tied:
            found = {r: sum(by_name[one] for one in tied) for r, by_name in gradients.items()}
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            value = _input_value(program, tied[0])
            _check_leaf(program, f"gradient of {name}", wanted, found, value, case.tolerance)
        else:
            assert parameter.grad is None, f"no gradient of {name}"


def same_sequence(spoken: dict[int, Spoken]) -> None:
    """Every rank issues the same kinds along the same axes; in a group, with the same shapes."""
    along = [[(kind, group.split(":")[0]) for kind, group, *_ in one] for one in spoken.values()]
    assert all(one == along[0] for one in along), "ranks talk differently"
    in_group: dict[str, Spoken] = {}
    for one in spoken.values():
        for group in {group for _, group, *_ in one}:
            said = [what for what in one if what[1] == group]
            assert in_group.setdefault(group, said) == said, f"ranks of {group} talk differently"


def as_listed(program: ParallelProgram, spoken: dict[int, Spoken]) -> None:
    """What the program lists as its collectives is what its ranks say."""
    listed = [(str(one.kind), one.axis) for one in program.collectives]
    said = [(_KINDS[kind], group.split(":")[0]) for kind, group, *_ in spoken[_ranks(program)[0]]]
    assert listed == said, "other collectives than the program lists"


def _ranks(program: ParallelProgram) -> list[int]:
    return [program.mesh.rank_at(coordinate) for coordinate in program.mesh.coordinates]


def _input_value(program: ParallelProgram, name: str) -> Any:
    return next(value for value, role in program.graph.inputs if role.name == name)


def local_inputs(program: ParallelProgram, given: Given, rank: int) -> Given:
    leaves, tree = tree_flatten(copied(given))
    values = [value for value, role in program.graph.inputs if role.kind == "input"]
    cut = [own_piece(one, value, program, rank) for one, value in zip(leaves, values, strict=True)]
    local: Given = tree_unflatten(cut, tree)
    return local


def _joint_inputs(program: ParallelProgram, given: Given, rank: int) -> list[Any]:
    exported = program.exported(rank)
    state = {**exported.constants, **exported.state_dict}
    leaves = iter(tree_flatten(local_inputs(program, given, rank))[0])
    return [
        next(leaves) if role.kind == "input" else copy.deepcopy(state[role.name])
        for _, role in program.graph.inputs
    ]


def _check_leaf(
    program: ParallelProgram,
    what: str,
    wanted: Any,
    found: dict[int, Any],
    value: Any,
    suggestions: float,
) -> None:
    if not isinstance(wanted, Tensor):
        assert all(one == wanted for one in found.values()), f"{what}: {found}, not {wanted}"
        return
    for rank, whole in _join(found, value, program).items():
        assert whole.shape == wanted.shape, f"{what} on rank {rank}: {whole.shape}"
        assert whole.dtype == wanted.dtype, f"{what} on rank {rank}: {whole.dtype}"
        if wanted.is_floating_point() or wanted.is_complex():
            scale = (
                max(float(wanted.detach().abs().nan_to_num(posinf=0).max()), 1e-3)
                if wanted.numel()
                else 1
            )
            torch.testing.assert_close(
                whole,
                wanted.detach(),
                rtol=0,
                atol=suggestions * scale,
                equal_nan=True,
                msg=lambda text, r=rank: f"{what} on rank {r}: {text}",
            )
        else:
            assert torch.equal(whole, wanted), f"{what} on rank {rank}"


# Cutting and joining, written once more, with nothing but indices.


def _indices(size: int, shard: Shard, num_ranks: int, rank: int) -> list[int]:
    """Which indices of a dim a rank holds."""
    outer = int(shard.outer)
    blocks = list(shard.segments) or [size // outer] * outer
    held, start = [], 0
    for block in blocks:
        step = -(-block // num_ranks)
        held += [start + i for i in range(block)][rank * step : (rank + 1) * step]
        start += block
    return held


def _held(shape: Sequence[int], value: Any, program: ParallelProgram, rank: int) -> list[list[int]]:
    """By dim, the indices that a rank holds of a whole tensor."""
    coordinate = program.mesh.coordinate_of(rank)
    held = [list(range(size)) for size in shape]
    for axis, placement in enumerate(value.placements):
        if isinstance(placement, Shard):
            size, at = program.mesh.sizes[axis], coordinate.coordinates[axis]
            now = held[placement.dim]
            kept = _indices(len(now), placement, size, at)
            held[placement.dim] = [now[i] for i in kept]
        else:
            assert placement == Replicate(), f"{value.name} is handed over as {placement}"
    return held


def own_piece(whole: Any, value: Any, program: ParallelProgram, rank: int) -> Any:
    if not isinstance(whole, Tensor):
        return whole
    for dim, held in enumerate(_held(whole.shape, value, program, rank)):
        whole = whole.index_select(dim, torch.tensor(held, dtype=torch.long))
    return whole


def _join(found: dict[int, Tensor], value: Any, program: ParallelProgram) -> dict[int, Tensor]:
    """What each rank holds, with what it lacks taken from the ranks that cut it with it."""
    shards = [
        axis for axis, one in enumerate(getattr(value, "placements", [])) if one != Replicate()
    ]
    if not shards:
        return found
    wholes = {}
    for rank in found:
        mine = program.mesh.coordinate_of(rank).coordinates
        peers = [
            other
            for other in found
            if all(
                axis in shards or mine[axis] == at
                for axis, at in enumerate(program.mesh.coordinate_of(other).coordinates)
            )
        ]
        shape = list(found[rank].shape)
        for axis in shards:
            dim = value.placements[axis].dim
            line = {
                program.mesh.coordinate_of(other).coordinates: found[other].shape[dim]
                for other in peers
            }
            shape[dim] = _whole_size(value, program, dim, line)
        whole = found[rank].new_full(shape, 0)
        for other in peers:
            held = _held(shape, value, program, other)
            grid = torch.meshgrid(
                *(torch.tensor(one, dtype=torch.long) for one in held), indexing="ij"
            )
            whole[grid] = found[other]
        wholes[rank] = whole
    return wholes


def _whole_size(value: Any, program: ParallelProgram, dim: int, sizes: dict[Any, int]) -> int:
    """The sum of the pieces of those ranks that differ in what cuts this dim."""
    axes = [
        i for i, one in enumerate(value.placements) if isinstance(one, Shard) and one.dim == dim
    ]
    seen = {tuple(at[axis] for axis in axes): size for at, size in sizes.items()}
    return sum(seen.values())
