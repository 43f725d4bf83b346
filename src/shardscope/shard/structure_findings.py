"""Findings about how a model was put together: FSDP groups, and the order of wrappers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from shardscope._torch.checkpointing import is_checkpoint_wrapper
from shardscope._torch.modules import (
    every_module,
    is_compile_wrapper,
    is_compiled,
    named_places,
    unwrap,
    wrapped_by,
)
from shardscope.record import Finding, MarkKind, Module, Severity
from shardscope.record.words import format_bytes
from shardscope.shard.sayings import RIGHT_ORDER, fold_indices, fold_names
from shardscope.shard.tensors import Holdings

__all__ = [
    "find_outside_groups",
    "find_root_not_sharded",
    "find_wrong_order",
]


def find_root_not_sharded(held: Holdings) -> Iterator[Finding]:
    """FSDP somewhere within the model, and not on the model itself."""
    kinds = (FSDPModule, FullyShardedDataParallel)
    if not held.groups or any(isinstance(one, kinds) for one in _wrapped(held.model)):
        return
    names = [module.name for module in held.modules if _is_under_fsdp(module)]
    yield Finding(
        rule="root-not-sharded",
        severity=Severity.WARNING,
        subject=type(unwrap(held.model)).__name__,
        fact=f"{len(names)} of its modules are under FSDP ({names[0]}, …) and the model itself "
        "is not, so each is its own FSDP root: nothing is prefetched, and parameters "
        "outside them stay unsharded",
        remedy="Call fully_shard(model) last, after its parts.",
    )


def _is_under_fsdp(module: Module) -> bool:
    return any(mark.kind in (MarkKind.FULLY_SHARD, MarkKind.FSDP1) for mark in module.marks)


def _wrapped(module: nn.Module) -> Iterator[nn.Module]:
    """A module, and what it wraps, down to the user's own."""
    while True:
        yield module
        inner = wrapped_by(module)
        if inner is None:
            return
        module = inner


def find_outside_groups(held: Holdings) -> Iterator[Finding]:
    """Trained parameters that no FSDP group manages, where there are groups."""
    if not held.groups:
        return
    outside = [
        one
        for one in held.tensors
        if one.record.is_trainable and not one.record.is_buffer and one.record.fsdp_group is None
    ]
    for name, same in fold_names(outside):
        yield Finding(
            rule="outside-groups",
            severity=Severity.WARNING,
            subject=name,
            fact=f"no FSDP group manages it ({format_bytes(same[0].local_bytes)} on every "
            "rank): its gradient is not reduced",
            remedy="Call fully_shard on a module that holds it, or, if FSDP ignores it on "
            "purpose, reduce its gradient yourself.",
        )


def find_wrong_order(held: Holdings) -> Iterator[Finding]:
    """Wrappers that lie outside of what they should lie within; layers that are alike once."""
    tops = {id(module) for group in held.groups for module in group.modules}
    wrong: dict[tuple[str, str], list[str]] = {}
    for _, module in named_places(held.model, keep_wrappers=True):
        fact = None
        if is_checkpoint_wrapper(module):
            fact = _checkpoint_fact(module, tops)
        elif is_compiled(module):
            fact = _compile_fact(module, tops)
        if fact is not None:
            name = held.name_of(module) or type(unwrap(module)).__name__
            wrong.setdefault((fold_indices(name), fact), []).append(name)
    for (pattern, fact), names in wrong.items():
        yield Finding(
            rule="wrong-order",
            severity=Severity.WARNING,
            subject=names[0] if len(names) == 1 else f"{pattern} (×{len(names)})",
            fact=fact,
            remedy=RIGHT_ORDER,
        )


def _checkpoint_fact(wrapper: nn.Module, tops: set[int]) -> str | None:
    inner = list(_wrapped(wrapper))[1:]
    if id(wrapper) not in tops and any(id(one) in tops for one in inner):
        return "checkpointing wraps FSDP, whose hooks then run again during recomputation"
    if any(is_compile_wrapper(one) for one in inner):
        return "checkpointing wraps torch.compile, whose graph it cannot see into"
    return None


def _compile_fact(module: nn.Module, tops: set[int]) -> str | None:
    within = [one for one in every_module(module) if one is not module]
    num_groups = sum(id(one) in tops for one in within)
    if num_groups == 0:
        return None
    modules = "an FSDP module" if num_groups == 1 else f"{num_groups} FSDP modules"
    return f"torch.compile wraps {modules}: their hooks break its graph at each call"
