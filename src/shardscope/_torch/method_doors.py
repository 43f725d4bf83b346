"""Doors at the methods of a process group, where Python asks for collectives.

Those that a training step calls most show the call themselves, the others lead it by the door of
the kernel, which reads all calls alike and costs more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from shardscope._torch.calls import OPS, UNREAD
from shardscope._torch.dispatch import has_modes
from shardscope._torch.issuing import AUDIENCE, INSIDE, Issued, issue
from shardscope._torch.kernel_doors import go_past, lead_by
from shardscope._torch.uncompiled import keep_uncompiled

__all__ = ["method_doors"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)

# Of a method: the op that it calls, and whether the options, given last, say how to reduce.
_SHOWN = {
    "allreduce": ("allreduce_", True),
    "_allgather_base": ("_allgather_base_", False),
    "all_gather_single": ("_allgather_base_", False),
    "_reduce_scatter_base": ("_reduce_scatter_base_", True),
    "reduce_scatter_single": ("_reduce_scatter_base_", True),
}
_LED = (
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "gather_into_tensor",
    "gather_single",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


@contextmanager
def method_doors() -> Iterator[None]:
    """Show the collectives that Python asks a process group for, and DDP for its buffers."""
    with ExitStack() as stack:
        for name, (op, reduces) in _SHOWN.items():
            _replace(stack, dist.ProcessGroup, name, _showing(op, reduces=reduces))
        for name in _LED:
            _replace(stack, dist.ProcessGroup, name, _leading)
        _replace(stack, dist, "_broadcast_coalesced", _leading)
        # One-sided: what ranks put into a window passes no door.
        _replace(stack, dist.ProcessGroup, "new_window", _telling)
        yield


def _replace(
    stack: ExitStack, owner: Any, name: str, make_door: Callable[[Any], Callable[..., Any]]
) -> None:
    kept = vars(owner).get(name)  # not what getattr gives: put back, that would not bind
    if kept is not None:  # this torch has it
        stack.callback(setattr, owner, name, kept)
        setattr(owner, name, make_door(getattr(owner, name)))


def _telling(method: Callable[..., Any]) -> Callable[..., Any]:
    def door(*args: Any, **kwargs: Any) -> Any:
        return issue(Issued("c10d.new_window", UNREAD, args), method, args, kwargs)

    return door


def _leading(method: Callable[..., Any]) -> Callable[..., Any]:
    def door(*args: Any, **kwargs: Any) -> Any:
        with lead_by():
            return method(*args, **kwargs)

    keep_uncompiled(door.__code__)
    return door


def _showing(op: str, *, reduces: bool) -> Callable[[Any], Callable[..., Any]]:
    layout, name = OPS["c10d"][op], f"c10d.{op}"
    num_tensors = max(layout.inputs or 0, layout.outputs or 0) + 1

    def make_door(method: Callable[..., Any]) -> Callable[..., Any]:
        lead = _leading(method)

        def call(*args: Any) -> Any:
            with go_past():
                return method(*args)

        def door(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            _, amenders = AUDIENCE.current
            # Who amends expects what the op gives, not what the method does; and a call that is
            # not written as torch's own Python writes it is read where all are alike.
            is_usual = not kwargs and len(args) == num_tensors + 1 and _is_plain(args[0])
            if INSIDE.depth or amenders or not is_usual:
                return lead(group, *args, **kwargs)
            *tensors, options = args
            reduction = (options.reduceOp,) if reduces else ()
            issued = Issued(name, layout, (*tensors, group, *reduction))
            return issue(issued, call, (group, *args), {})

        for function in (call, door):
            keep_uncompiled(function.__code__)
        return door

    return make_door


def _is_plain(value: Any) -> bool:
    """Whether it is tensors with data, which no mode and no subclass has a say in."""
    first = value[0] if type(value) is list and value else value
    return type(first) in _PLAIN and not first.is_meta and not has_modes()
