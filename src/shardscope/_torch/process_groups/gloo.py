"""Process groups between the processes of this machine, whatever the program asks for.

The program calls `init_process_group` itself, with NCCL and the address of another host, or torch
does so inside `init_device_mesh`. It gets gloo, and meets the other ranks through a file.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from shardscope._torch.cuda.runtime import replace_attribute
from shardscope._torch.process_groups.launched import OnJoin, split_group

_LOOPBACK = "lo"
# Groups are kept alive until the process exits. If the last reference to one is dropped by an
# object that holds the GIL, such as DDP's reducer, its destructor waits for gloo's thread, which
# may wait for the GIL: finished work holds the function modes that were active when it was issued.
_GROUPS: list[Any] = []


@contextmanager
def joined_by_gloo(
    rank: int, size: int, *, num_per_node: int, folder: str, on_join: OnJoin
) -> Iterator[None]:
    """Let every process group of this process be one of gloo, until the context ends.

    Args:
        rank: The rank as which the process joins, unless the program names another.
        size: The number of ranks.
        num_per_node: How many of them belong to a node. A program that joins with fewer ranks than
            `size` meets those of its node only.
        folder: Where the files are by which the ranks meet.
        on_join: Called with the rank and size of the default group when the program makes it.
    """
    if os.path.exists(f"/sys/class/net/{_LOOPBACK}"):  # the host's name may have no address
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    numbers = count()

    def rendezvous(
        url: str, requested_rank: int = -1, requested_size: int = -1, **_: Any
    ) -> Iterator[Any]:
        group_rank = rank if requested_rank < 0 else requested_rank
        group_size = size if requested_size < 0 else requested_size
        on_join(group_rank, group_size)
        node = rank // num_per_node if group_size < size else 0
        file = os.path.join(folder, f"{group_size}-{node}-{next(numbers)}")
        yield dist.FileStore(file, group_size), group_rank, group_size

    with ExitStack() as stack:
        replace_attribute(stack, distributed_c10d, "rendezvous", rendezvous)
        # Without NCCL, torch warns that it does not know its timeout.
        timeout = distributed_c10d.default_pg_timeout
        replace_attribute(stack, distributed_c10d, "default_pg_nccl_timeout", timeout)
        make = _with_gloo(distributed_c10d._new_process_group_helper)
        replace_attribute(stack, distributed_c10d, "_new_process_group_helper", make)
        for module in (dist, distributed_c10d):
            replace_attribute(stack, module, "barrier", _without_devices(distributed_c10d.barrier))
            gather = _of_any_shape(distributed_c10d.all_gather_into_tensor)
            replace_attribute(stack, module, "all_gather_into_tensor", gather)
        for module in (dist, distributed_c10d, device_mesh):
            replace_attribute(stack, module, "split_group", split_group)
        yield


def _with_gloo(make: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(inspect.unwrap(make))

    @functools.wraps(make)
    def make_with_gloo(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        if call.arguments["backend"] not in ("fake", "mpi"):
            call.arguments["backend"] = distributed_c10d.Backend("gloo")
            options = {"backend_options", "pg_options"} & call.arguments.keys()  # those of NCCL
            call.arguments.update(dict.fromkeys((*options, "device_id")))
        made = make(*call.args, **call.kwargs)
        _GROUPS.append(made)
        return made

    return make_with_gloo


def _of_any_shape(gather: Callable[..., Any]) -> Callable[..., Any]:
    """A gather that accepts an output of any shape with as many elements, which gloo refuses."""

    @functools.wraps(gather)
    def gather_flat(
        output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if output_tensor.is_contiguous() and output_tensor.shape[1:] != input_tensor.shape[1:]:
            output_tensor = output_tensor.view(-1)
            input_tensor = input_tensor.contiguous().view(-1)
        return gather(output_tensor, input_tensor, *args, **kwargs)

    return gather_flat


def _without_devices(barrier: Callable[..., Any]) -> Callable[..., Any]:
    """A barrier that accepts the GPU to run on, which gloo refuses."""

    @functools.wraps(barrier)
    def wait(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group, async_op)

    return wait
