"""Calls that communicate without an op or a process group of torch, found by their names.

What they send is not known: a trace reports each as a gap with the line of the program.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from shardscope._torch.private import find_name, is_missing

_c10d = find_name("torch._C._distributed_c10d", "notice one-sided transfers of symmetric memory")

_HANDLE = ("barrier", "get_buffer", "get_remote_tensor", "put_signal", "wait_signal")
_COLLECTIVES = ("all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter")
# By package: the class or module within it, and the functions that communicate.
_PACKAGES: dict[str, tuple[str, Sequence[str]]] = {
    "torch.cuda.nccl": ("", _COLLECTIVES),
    "torchcomms": (
        "TorchComm",
        (
            *_COLLECTIVES,
            "all_gather_single",
            "all_gather_v",
            "all_to_all",
            "all_to_all_single",
            "all_to_all_v_single",
            "barrier",
            "batch_op_create",
            "gather",
            "new_window",
            "recv",
            "reduce_scatter_single",
            "reduce_scatter_v",
            "scatter",
            "send",
        ),
    ),
    "deep_ep": (
        "Buffer",
        ("combine", "dispatch", "low_latency_combine", "low_latency_dispatch"),
    ),
    "nvshmem.core": (
        "",
        (
            "alltoall",
            "barrier",
            "barrier_all",
            "broadcast",
            "collective_on_buffer",
            "fcollect",
            "get",
            "put",
            "put_signal",
            "reduce",
            "reducescatter",
            "signal_wait",
        ),
    ),
}


def find_unobserved_calls() -> Iterator[tuple[str, Any, Sequence[str]]]:
    """Each class or module with such calls that is loaded: its name, itself, and their names."""
    handle = None if is_missing(_c10d) else getattr(_c10d, "_SymmetricMemory", None)
    if handle is not None:  # torch's class, or what stands in for it in a simulated world
        yield "symm_mem", handle, _HANDLE
    for package, (owner, names) in _PACKAGES.items():
        module = sys.modules.get(package)
        holder = getattr(module, owner, None) if owner else module
        if holder is not None:
            yield f"{package}.{owner}".rstrip("."), holder, names
