"""Which FSDP group manages which parameters."""

from __future__ import annotations

from collections.abc import Sequence

from shardscope.record import MarkKind, Module

__all__ = ["names_by_group"]

_FSDP = (MarkKind.FULLY_SHARD, MarkKind.FSDP1)


def names_by_group(modules: Sequence[Module]) -> dict[str, list[str]]:
    """By `name[Class]` of the module that FSDP was applied to, its parameters' full names.

    A tied parameter is named once.
    """
    managed: dict[str, list[str]] = {}
    for module in modules:
        for parameter in module.parameters:
            name = f"{module.name}.{parameter.name}".lstrip(".")
            is_again = parameter.alias_group not in (None, name)
            if parameter.fsdp_group is not None and not is_again:
                managed.setdefault(parameter.fsdp_group, []).append(name)
    return {
        f"{module.name}[{module.type}]": managed.get(module.name, [])
        for module in modules
        if any(mark.kind in _FSDP for mark in module.marks)
    }
