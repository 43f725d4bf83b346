"""Names the modules of a problem: the innermost common one, or a list with layers as patterns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardscope.record.layer_names import fold_layers
from shardscope.record.patterns import matches_name

_MAX_NAMED = 3  # modules that are listed without folding layers into a pattern


def find_common_module(modules: Sequence[str]) -> str | None:
    """The innermost module that contains all of these; None if that is the model itself."""
    common = modules[0].split(".")
    for module in modules[1:]:
        parts = module.split(".")
        while parts[: len(common)] != common:
            common.pop()
    return ".".join(common) or (modules[0] if len(modules) == 1 else None)


def list_modules(modules: Sequence[str], parameters: Iterable[str]) -> str:
    """The names as text; modules that differ in all layers are shown as one pattern.

    `parameters` are the names of all parameters, from which the layers are known.
    """
    owners = {name.rpartition(".")[0] for name in parameters}
    locations: dict[str, None] = {}
    for module in modules:
        pattern = fold_layers(module)
        matching = {owner for owner in owners if matches_name(pattern, owner)}
        is_folded = len(modules) > _MAX_NAMED and matching <= set(modules)
        locations.setdefault(pattern if is_folded else module)
    return ", ".join(locations)
