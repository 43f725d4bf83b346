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
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import CodeType
from typing import Any, final

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
from shardscope.attribution.call_sites import TORCH_FOLDER, Stack
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
        self._memberships: dict[str, Membership] = {}
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
        return self._memberships.get(torch_name)

    def start_world(self) -> None:
        """Forget torch's names, which a new world reuses; equal groups keep their records."""
        self._memberships = {}
        self._names = set()

    def register(self, group: dist.ProcessGroup) -> Membership:
        """This rank's membership of `group`, which is added if it is new."""
        with self._lock:
            membership = self.find(group.group_name)
            if membership is None:
                membership = Membership(self._describe(group), own_rank=group.rank())
                self._records.setdefault(membership.record.name, membership.record)
                self._memberships[group.group_name] = membership
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


@final
class Payload:
    """Sizes, dtype and peer of a collective on this rank, without references to tensors."""

    __slots__ = (
        "_dtype",
        "_output_bytes",
        "_peer",
        "_reduce_op",
        "_splits",
        "group",
        "input_bytes",
        "kind",
        "num_tensors",
        "op",
    )

    def __init__(
        self,
        event: CollectiveEvent,
        *,
        group: Membership,
        reduction: Any = None,
    ) -> None:
        """`reduction` is the reduce op that the Python caller passed, if known.

        Keeping a reference to a boxed process group or reduce op slows every later collective, and
        reading the name of a boxed reduce op is slow, so neither is kept and the latter is avoided.
        """
        layout, args = event.layout, event.args
        self.op = event.op
        self.kind = layout.kind
        self.group = group
        inputs: Any = () if layout.inputs is None else args[layout.inputs]
        outputs = event.out if layout.outputs is None else args[layout.outputs]
        num_args = len(args)
        reduce_op, peer, splits = layout.reduce_op, layout.peer, layout.input_splits
        self._reduce_op = None
        if reduce_op is not None and reduce_op < num_args:
            boxed = args[reduce_op]
            is_name = isinstance(boxed, str)
            self._reduce_op = boxed if is_name else reduction or reduce_op_name(boxed)
        self._peer = None if peer is None or peer >= num_args else args[peer]
        self._splits: Sequence[int] | None = None if splits is None else args[splits]
        if layout.kind is _K.ALL_TO_ALL and isinstance(inputs, list):
            self._splits = [num_bytes(tensor) for tensor in inputs]
        self.num_tensors, self.input_bytes, self._dtype = _sizes(inputs)
        if layout.factor is not None:
            self._multiply(inputs, args[layout.factor], _at(args, layout.dtype))
        self._output_bytes = None
        if outputs is None and splits is not None:
            self._output_bytes = _received(inputs, _at(args, layout.output_splits))
        elif layout.outputs is not None and layout.outputs == layout.inputs:
            self._output_bytes = self.input_bytes
        elif outputs is not None:
            num_outputs, self._output_bytes, dtype = _sizes(outputs)
            if not self.num_tensors:
                self.num_tensors, self._dtype = num_outputs, dtype

    def _multiply(self, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None) -> None:
        """Set the input size to that of the matrix product `a @ b`, which is communicated."""
        self._dtype = dtype or a.dtype
        self.input_bytes = a.numel() // a.shape[-1] * b.shape[-1] * self._dtype.itemsize

    @property
    def dtype(self) -> str:
        """The dtype's name, without `torch.`"""
        return "" if self._dtype is None else str(self._dtype).removeprefix("torch.")

    @property
    def reduce_op(self) -> str | None:
        """`sum`, `avg`, …"""
        return reduce_op_name(self._reduce_op)

    @property
    def output_bytes(self) -> int:
        """Size of the output on this rank; computed if the op allocates its output."""
        if self._output_bytes is not None:
            return self._output_bytes
        if self.kind is _K.ALL_GATHER:
            return self.input_bytes * self.group.num_ranks
        if self.kind is _K.REDUCE_SCATTER:
            return self.input_bytes // self.group.num_ranks
        return 0 if self.kind is _K.SEND else self.input_bytes

    @property
    def wire_bytes(self) -> int:
        """What this rank sends with a ring algorithm."""
        if self.kind is _K.ALL_TO_ALL and self._splits:
            own_share = self._splits[self.group.own_rank] / max(1, sum(self._splits))
            return round(self.input_bytes * (1 - own_share))
        return wire_bytes(self.kind, self.input_bytes, self.output_bytes, self.group.num_ranks)

    @property
    def global_peer(self) -> int | None:
        """The global rank of the root, sender or receiver."""
        return None if self._peer is None else self.group.global_rank(self._peer)


def _at(args: Sequence[Any], position: int | None) -> Any:
    return None if position is None or position >= len(args) else args[position]


def _received(rows: torch.Tensor, splits: Sequence[int] | None) -> int | None:
    """Bytes received by an all-to-all with uneven splits; None if the splits are even."""
    return sum(splits) * math.prod(rows.shape[1:]) * rows.element_size() if splits else None


def _sizes(value: Any) -> tuple[int, int, torch.dtype | None]:
    """The number of tensors, their bytes, and the dtype of the first."""
    if isinstance(value, torch.Tensor):
        return 1, num_bytes(value), value.dtype
    tensors = tensors_in(value)
    if not tensors:
        return 0, 0, None
    return len(tensors), sum(num_bytes(tensor) for tensor in tensors), tensors[0].dtype


_FSDP = {Role.FSDP_UNSHARD: "unshard", Role.FSDP_REDUCE: "reduce"}
_FSDP1 = {Role.FSDP1_UNSHARD: "unshard", Role.FSDP1_REDUCE: "reduce"}


def drop_torch_references(stack: Stack, find: Callable[[Sequence[nn.Module]], int]) -> None:
    """Replace torch's objects in `stack.frame_locals`, which reference parameters, by plain facts.

    `find` returns the index of the module that contains all of the given modules.
    """
    for role, (first, *_) in stack.frame_locals.items():
        if role in _FSDP:
            stack.frame_locals[role] = (find(param_group_modules(first)), param_group_size(first))
        elif role is Role.FSDP_GRADIENT:
            stack.frame_locals[role] = (find([param_locations(first)[0][0]]),)
        elif role in _FSDP1:
            stack.frame_locals[role] = (find([flat_handle_module(first)]), flat_handle_size(first))
        elif role is Role.IMPLICIT:
            stack.frame_locals[role] = (first.op,)


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
        before=describe_placements(before.placements),
        after=describe_placements(after.placements),
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
