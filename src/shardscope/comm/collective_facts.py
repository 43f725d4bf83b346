"""What is recorded of a collective: its process group, its bytes, and its cause.

Groups have names that are readable and equal on every rank, such as `tp[0-7]`. Bytes are those of
the inputs, of the outputs, and of what a ring algorithm sends; a view counts with its own size: a
32-byte slice of a 4 MiB storage is 32 bytes. The cause (FSDP's all-gather, an implicit
redistribution, a call of the user, …) determines the owner where FSDP issued the collective.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import CodeType
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardscope._torch.collectives.events import CollectiveEvent
from shardscope._torch.collectives.schema import num_bytes, reduce_op_name, tensors_in
from shardscope._torch.frames import Role
from shardscope._torch.fsdp import (
    flat_handle_module,
    flat_handle_size,
    param_group_modules,
    param_group_size,
    param_locations,
)
from shardscope._torch.mesh import (
    describe_placements,
    earlier_twins,
    group_axes,
    group_backend,
    group_label,
)
from shardscope.attribution.call_paths import Locals
from shardscope.attribution.call_sites import TORCH_FOLDER, Stack
from shardscope.attribution.module_calls import common_module
from shardscope.attribution.module_names import ModuleNames
from shardscope.record import (
    Call,
    Cause,
    CollectiveKind,
    Compiled,
    FullyShard,
    Group,
    Phase,
    Redistribute,
    SpmdCall,
    compress_ranks,
    format_ranks,
    rank_at,
)
from shardscope.record.base import wire_bytes


@final
class Membership:
    """A group and this rank's rank in it. Stays valid after the run destroys the group."""

    __slots__ = ("num_ranks", "own_rank", "record")

    def __init__(self, record: Group, *, own_rank: int) -> None:
        self.record = record
        self.num_ranks = record.num_ranks
        self.own_rank = own_rank

    def global_rank(self, rank: int) -> int:
        """The global rank of a rank of the group."""
        return rank_at(self.record.ranks, rank)


@final
class GroupRegistry:
    """The groups used so far, and the number of collectives issued in each."""

    def __init__(self, meshes: Iterable[DeviceMesh] = ()) -> None:
        self._axes: dict[str, str] = {}
        self.memberships: dict[str, Membership] = {}  # by torch's name, of this world
        self._names: set[str] = set()
        self._records: dict[str, Group] = {}
        self._orders: Counter[str] = Counter()
        self._lock = threading.Lock()
        for mesh in meshes:
            self.add_mesh(mesh)

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups, in the order of first use."""
        return tuple(self._records.values())

    def find(self, torch_name: str) -> Membership | None:
        """This rank's membership of the group with torch's name, if it is registered."""
        return self.memberships.get(torch_name)

    def start_world(self) -> None:
        """Forget torch's names, which a new world reuses; equal groups keep their records."""
        self.memberships = {}
        self._names = set()

    def register(self, group: dist.ProcessGroup) -> Membership:
        """This rank's membership of `group`, which is added if it is new."""
        with self._lock:
            membership = self.find(group.group_name)
            if membership is None:
                membership = Membership(self._describe(group), own_rank=group.rank())
                self._records.setdefault(membership.record.name, membership.record)
                self.memberships[group.group_name] = membership
            return membership

    def add_mesh(self, mesh: DeviceMesh) -> None:
        """Use the axis names of a mesh for its groups."""
        self._axes = {**group_axes(mesh), **self._axes}

    def next_order(self, group: Group) -> int:
        """The position of the next collective among those of `group`."""
        order = self._orders[group.name]
        self._orders[group.name] += 1
        return order

    def _describe(self, group: dist.ProcessGroup) -> Group:
        spans = compress_ranks(dist.get_process_group_ranks(group))
        return Group(
            name=self._unique_name(f"{self._label(group)}[{format_ranks(spans)}]", group),
            torch_name=group.group_name,
            ranks=spans,
            num_ranks=group.size(),
            axis=self._axis(group),
            backend=group_backend(group),
        )

    def _axis(self, group: dist.ProcessGroup) -> str | None:
        return self._axes.get(group.group_name) or group_label(group)

    def _label(self, group: dist.ProcessGroup) -> str:
        covers_world = group.size() == dist.get_world_size()
        return self._axis(group) or ("world" if covers_world else "group")

    def _unique_name(self, name: str, group: dist.ProcessGroup) -> str:
        """The name, with a number if groups of the same ranks were created before.

        Numbers follow the order of creation: the order of first use may differ between ranks.
        """
        label = self._label(group)
        count = 1 + sum(self._label(twin) == label for twin in earlier_twins(group))
        while (candidate := name if count == 1 else f"{name}#{count}") in self._names:
            count += 1
        self._names.add(candidate)
        return candidate


_K = CollectiveKind


class Payload(NamedTuple):
    """What a collective transfers on this rank, but for its sizes; without references to tensors.

    Keeping a reference to a boxed process group or reduce op slows every later collective, so
    neither is kept.
    """

    op: str
    kind: CollectiveKind
    group: Membership
    num_tensors: int
    torch_dtype: torch.dtype | None  # of the first tensor
    reduce_op: str | None  # `sum`, `avg`, …
    peer: int | None  # the rank in the group of the root, sender or receiver

    @property
    def dtype(self) -> str:
        """The dtype's name, without `torch.`"""
        return "" if self.torch_dtype is None else str(self.torch_dtype).removeprefix("torch.")

    @property
    def global_peer(self) -> int | None:
        """The global rank of the root, sender or receiver."""
        return None if self.peer is None else self.group.global_rank(self.peer)

    def compute_bytes(self, sizes: Sizes) -> tuple[int, int, int]:
        """Bytes of input and output, and what this rank sends with a ring algorithm."""
        input_bytes, output_bytes, own_split, all_splits = sizes
        num_ranks = self.group.num_ranks
        if output_bytes is None:
            output_bytes = input_bytes
            if self.kind is _K.ALL_GATHER:
                output_bytes = input_bytes * num_ranks
            elif self.kind is _K.REDUCE_SCATTER:
                output_bytes = input_bytes // num_ranks
            elif self.kind is _K.SEND:
                output_bytes = 0
        if self.kind is _K.ALL_TO_ALL and all_splits:
            sent = round(input_bytes * (1 - own_split / all_splits))
        else:
            sent = wire_bytes(self.kind, input_bytes, output_bytes, num_ranks)
        return input_bytes, output_bytes, sent


Sizes = tuple[int, int | None, int, int]
"""Sizes of a collective on this rank, as its arguments have them: bytes of input, and of output
(None if the op allocates it); of an all-to-all with splits, the rank's own split and their sum."""


def read_payload(event: CollectiveEvent, group: Membership, stack: Stack) -> tuple[Payload, Sizes]:
    """What a collective is about to transfer."""
    layout, args = event.layout, event.args
    num_tensors, dtype, sizes = read_tensors(event, group)
    reduce_op = None
    if layout.reduce_op is not None and layout.reduce_op < len(args):
        reduce_op = _read_reduction(args[layout.reduce_op], stack)
    peer = _at(args, layout.peer)
    # Without a call of Python code.
    fields = event.op, layout.kind, group, num_tensors, dtype, reduce_op, peer
    return tuple.__new__(Payload, fields), sizes


def repeats_payload(event: CollectiveEvent, payload: Payload, *, is_reducers: bool) -> Sizes | None:
    """The sizes of a collective that transfers the same but for them; None if it does not.

    `is_reducers` means that DDP's reducer issued it, which has one reduction for all its buckets:
    it is boxed, and reading it would be slow.
    """
    op, _, group, num_tensors, dtype, reduce_op, peer = payload
    layout, args = event.layout, event.args
    num_tensors_here, dtype_here, sizes = read_tensors(event, group)
    if num_tensors_here != num_tensors or dtype_here is not dtype or event.op != op:
        return None
    if layout.reduce_op is not None and not is_reducers:
        reduction = _at(args, layout.reduce_op)
        if reduce_op_name(reduction) != reduce_op:
            return None
    return None if layout.peer is not None and _at(args, layout.peer) != peer else sizes


def read_tensors(
    event: CollectiveEvent, group: Membership
) -> tuple[int, torch.dtype | None, Sizes]:
    """The number of tensors that a collective sends or receives, their dtype and sizes."""
    layout, args = event.layout, event.args
    inputs: Any = () if layout.inputs is None else args[layout.inputs]
    num_tensors, input_bytes, dtype = _read_sizes(inputs)
    if layout.outputs is not None and layout.outputs == layout.inputs:
        return num_tensors, dtype, (input_bytes, input_bytes, 0, 0)
    output_bytes: int | None = None
    outputs = event.out if layout.outputs is None else args[layout.outputs]
    if outputs is not None:
        num_outputs, output_bytes, output_dtype = _read_sizes(outputs)
        if not num_tensors:
            num_tensors, dtype = num_outputs, output_dtype
    if layout.kind is _K.ALL_TO_ALL:
        sizes = _read_splits(event, group, input_bytes, output_bytes)
        return num_tensors, dtype, sizes
    if layout.factor is not None:
        input_bytes, dtype = _multiply(inputs, args[layout.factor], _at(args, layout.dtype))
    return num_tensors, dtype, (input_bytes, output_bytes, 0, 0)


def _read_splits(
    event: CollectiveEvent, group: Membership, input_bytes: int, output_bytes: int | None
) -> Sizes:
    layout, args = event.layout, event.args
    inputs: Any = () if layout.inputs is None else args[layout.inputs]
    splits = _at(args, layout.input_splits)
    if isinstance(inputs, list):
        splits = [num_bytes(tensor) for tensor in inputs]
    if output_bytes is None and layout.output_splits is not None:
        output_bytes = _received(inputs, _at(args, layout.output_splits))
    own_split, all_splits = (splits[group.own_rank], sum(splits)) if splits else (0, 0)
    return input_bytes, output_bytes, own_split, all_splits


def _read_reduction(value: Any, stack: Stack) -> str | None:
    """The name of a reduce op. Reading that of a boxed one is slow: its Python caller has it."""
    if isinstance(value, torch.ScriptObject) and stack.reducing is not None:
        value = stack.reducing.f_locals["op"]
    return reduce_op_name(value)


def _multiply(
    a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None
) -> tuple[int, torch.dtype]:
    """The size and dtype of the matrix product `a @ b`, which is communicated."""
    dtype = dtype or a.dtype
    return a.numel() // a.shape[-1] * b.shape[-1] * dtype.itemsize, dtype


def _at(args: Sequence[Any], position: int | None) -> Any:
    return None if position is None or position >= len(args) else args[position]


def _received(rows: torch.Tensor, splits: Sequence[int] | None) -> int | None:
    """Bytes received by an all-to-all with uneven splits; None if the splits are even."""
    return sum(splits) * math.prod(rows.shape[1:]) * rows.element_size() if splits else None


def _read_sizes(value: Any) -> tuple[int, int, torch.dtype | None]:
    """The number of tensors, their bytes, and the dtype of the first."""
    if type(value) is list and len(value) == 1:
        value = value[0]
    if isinstance(value, torch.Tensor):
        try:
            return 1, value.nbytes, value.dtype
        except RuntimeError:  # it is sparse
            return 1, num_bytes(value), value.dtype
    tensors = tensors_in(value)
    if not tensors:
        return 0, 0, None
    return len(tensors), sum(num_bytes(tensor) for tensor in tensors), tensors[0].dtype


_FSDP = {Role.FSDP_UNSHARD: "unshard", Role.FSDP_REDUCE: "reduce"}
_FSDP1 = {Role.FSDP1_UNSHARD: "unshard", Role.FSDP1_REDUCE: "reduce"}
_SHARDED = {*_FSDP, *_FSDP1, Role.FSDP_GRADIENT}
_REDISTRIBUTE, _IMPLICIT = Role.REDISTRIBUTE, Role.IMPLICIT


@final
class CauseReader:
    """Reads plain facts from the locals of torch's frames, which reference parameters.

    What belongs to a group or handle of FSDP is read once: it does not change. `running` returns
    the index of the running module, which decides between the names of a shared module.
    """

    def __init__(self, names: ModuleNames, running: Callable[[], int]) -> None:
        self._names = names
        self._running = running
        self._sharded: dict[int, tuple[weakref.ref[Any], tuple[int, ...]]] = {}  # by id
        # By the id of a placement: it, and its name as that of a mesh with one axis.
        self._placements: dict[int, tuple[Any, tuple[str]]] = {}

    def read(self, stack: Stack) -> None:
        """Replace torch's objects in `stack.frame_locals` by what they hold without tensors."""
        if stack.has_facts:  # of several collectives with this stack, this is not the first
            return
        stack.has_facts = True
        frame_locals = stack.frame_locals
        for role, values in frame_locals.items():
            if role is _REDISTRIBUTE:
                frame_locals[role] = values[0].placements, values[1].placements
            elif role is _IMPLICIT:
                frame_locals[role] = (values[0].op,)
            elif role in _SHARDED:
                frame_locals[role] = self._read_sharded(role, values[0])

    def name_facts(self, stack: Stack) -> tuple[tuple[Any, ...], ...]:
        """What `read` has left in the stack, with the names of placements, to be compared."""
        return tuple(
            [
                (self._name(values[0]), self._name(values[1])) if role is _REDISTRIBUTE else values
                for role, values in stack.frame_locals.items()
            ]
        )

    def has_facts(
        self, roles: tuple[Role, ...], values: Locals, facts: tuple[tuple[Any, ...], ...]
    ) -> bool:
        """Whether these locals of frames with these roles have the same facts."""
        for role, own, known in zip(roles, values, facts, strict=True):
            if role is _REDISTRIBUTE:
                if self._name(own[0].placements) != known[0]:
                    return False
                if self._name(own[1].placements) != known[1]:
                    return False
            elif role is _IMPLICIT:
                if own[0].op is not known[0]:
                    return False
            elif self._read_sharded(role, own[0]) != known:
                return False
        return True

    def _read_sharded(self, role: Role, sharded: Any) -> tuple[int, ...]:
        """The module, and the number of parameters unless it is only one."""
        key = id(sharded)
        reference, facts = self._sharded.get(key, (None, ()))
        if reference is not None and reference() is sharded:
            return facts
        modules: Sequence[nn.Module]
        sizes: tuple[int, ...]
        if role in _FSDP:
            modules, sizes = param_group_modules(sharded), (param_group_size(sharded),)
        elif role is Role.FSDP_GRADIENT:
            modules, sizes = [param_locations(sharded)[0][0]], ()
        else:
            modules, sizes = [flat_handle_module(sharded)], (flat_handle_size(sharded),)
        facts = (self._find(modules), *sizes)
        if all(id(module) in self._names.unique_index for module in modules):
            known = self._sharded
            known[key] = weakref.ref(sharded, lambda _: known.pop(key, None)), facts
        return facts

    def _find(self, modules: Sequence[nn.Module]) -> int:
        """The index of the module that FSDP was applied to; of several, their common module."""
        if len(modules) > 1:
            indices = [self._names.find(module, self._running()) for module in modules]
            return self._names.index(common_module([self._names.names[index] for index in indices]))
        index = self._names.unique_index.get(id(modules[0]))
        return self._names.find(modules[0], self._running()) if index is None else index

    def _name(self, placements: tuple[Any, ...]) -> tuple[str, ...]:
        """`Shard(0)`, `Replicate`, `Partial(sum)`: one for each axis."""
        if len(placements) == 1:
            (placement,) = placements
            known = self._placements.get(id(placement))
            if known is not None and known[0] is placement:
                return known[1]
        names = describe_placements(placements)
        for placement, name in zip(placements, names, strict=True):
            if len(self._placements) >= _MAX_PLACEMENTS:
                self._placements.clear()
            self._placements[id(placement)] = placement, (name,)
        return names


_MAX_PLACEMENTS = 1000  # that are kept: a program may create new ones in every step


def find_cause(
    payload: Payload, stack: Stack, node: str | None, phase: Phase
) -> tuple[Cause | None, int | None]:
    """The cause, and the index of the owner if FSDP determines it.

    `node` is the name of the autograd node being executed.
    """
    kind = payload.kind
    if Role.REDISTRIBUTE in stack.frame_locals:
        # Also within FSDP, which reduces gradients over its own axes after DTensor did over others.
        (owner,) = stack.frame_locals.get(Role.FSDP_GRADIENT, (None,))
        return _redistribution(stack, node), owner
    for role, values in stack.frame_locals.items():
        action = _FSDP.get(role) or _FSDP1.get(role)
        if action is not None:
            owner, num_parameters = values
            return FullyShard(action=_action(kind, action), num_parameters=num_parameters), owner
    if Role.SPMD_CALL in stack.frame_locals:
        return _read_spmd_call(stack, payload.group.record.axis), None
    if stack.graph is not None:
        # Not the function's name: every GraphModule has `forward`, and Inductor's is always
        # `call`.
        return Compiled(graph="backward" if phase is Phase.BACKWARD else "forward"), None
    if stack.api is not None:
        return Call(api=_api_name(stack.api)), None
    if stack.is_bare:  # C++ in backward without a bucket: DDP reduces the bitmap of used parameters
        return Call(api="torch.nn.parallel.DistributedDataParallel"), None
    return Call(api=f"torch.ops.{payload.op}"), None


def _read_spmd_call(stack: Stack, axis: str | None) -> SpmdCall:
    function, before, after = stack.frame_locals[Role.SPMD_CALL]
    (forward,) = stack.frame_locals.get(Role.SPMD_BACKWARD, (None,))
    return SpmdCall(function=function, axis=axis, before=before, after=after, backward_of=forward)


def _action(kind: CollectiveKind, action: str) -> str:
    """The action for a kind: HSDP all-reduces gradients over replicas after reduce-scatter."""
    return "all_reduce" if kind is CollectiveKind.ALL_REDUCE else action


def _redistribution(stack: Stack, node: str | None) -> Redistribute:
    before, after = stack.frame_locals[Role.REDISTRIBUTE]
    return Redistribute(
        before=describe_placements(before),
        after=describe_placements(after),
        asked_by=_asked_by(stack, node),
        is_implicit=Role.IMPLICIT in stack.frame_locals,
    )


def _asked_by(stack: Stack, node: str | None) -> str:
    if Role.FSDP_GRADIENT in stack.frame_locals:
        return "parameter gradient"
    if Role.IMPLICIT in stack.frame_locals:
        (op,) = stack.frame_locals[Role.IMPLICIT]
        return str(op)
    if stack.asked_by is not None:
        qualified = stack.asked_by.co_qualname
        return qualified if qualified.startswith("DTensor.") else qualified.split(".")[0]
    if node is not None:
        return node
    return "DTensor" if stack.api is None else _api_name(stack.api)


def _api_name(code: CodeType) -> str:
    """The public name of a function, such as `torch.distributed.all_reduce`."""
    if not code.co_filename.startswith(TORCH_FOLDER):  # our replacement of a torch function
        return f"torch.distributed.{code.co_qualname}"
    path = code.co_filename.removeprefix(TORCH_FOLDER).removesuffix(".py")
    module = ".".join(["torch", *path.split(os.sep)]).removesuffix(".__init__")
    return f"{module.removesuffix('.distributed_c10d')}.{code.co_qualname}"
