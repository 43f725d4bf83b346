"""Tensor-parallel plans in the form that transformers gives its models and configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardscope.errors import PlanError
from shardscope.parallel.plan.style_names import MEANINGLESS
from shardscope.record.patterns import matches_deeply

__all__ = ["read_transformers"]

# What leaves weights whole; there no pattern ever stands against another, so none is an exception.
_WHOLE = MEANINGLESS | {"replicate"}


def read_transformers(source: Any, *, prefix: str | None) -> dict[str, Any]:
    """The entries that cut something, under the names that the model's modules have."""
    plan = dict(source) if isinstance(source, Mapping) else _plan_of(source)
    if not plan:
        raise PlanError(
            f"{type(source).__name__} brings no tensor-parallel plan along (tp_plan, _tp_plan, or "
            "its config's base_model_tp_plan). Write one, such as {'layers.*.wq': Colwise()}."
        )
    under = f"{prefix}." if prefix else ""
    return {f"{under}{key}": style for key, style in plan.items() if not _is_whole(style)}


def _is_whole(style: Any) -> bool:
    return isinstance(style, str) and style.strip().lower() in _WHOLE


def _plan_of(source: Any) -> dict[str, Any]:
    own = _mapping(source, "tp_plan") or _mapping(source, "_tp_plan")
    config = getattr(source, "config", source)  # a config brings its plan itself
    base = _mapping(config, "base_model_tp_plan")
    names = _names(source)
    if names is None:
        return {**base, **own}
    prefix = getattr(source, "base_model_prefix", "") or ""
    whole = {_placed(key, prefix, names): style for key, style in {**base, **own}.items()}
    # A plan serves all sizes of a family: what this model has no modules for is not meant for it.
    return {key: style for key, style in whole.items() if _has(key, names)}


def _placed(key: str, prefix: str, names: list[str]) -> str:
    """The key as the model's modules are named: as it is, or under its base model."""
    below = f"{prefix}.{key}"
    return below if prefix and not _has(key, names) and _has(below, names) else key


def _has(key: str, names: list[str]) -> bool:
    return any(matches_deeply(key, name) for name in names)


def _names(source: Any) -> list[str] | None:
    """Of the modules and parameters, if it is a model."""
    if not hasattr(source, "named_modules") or not hasattr(source, "named_parameters"):
        return None
    return [
        *(name for name, _ in source.named_modules(remove_duplicate=False)),
        *(name for name, _ in source.named_parameters(remove_duplicate=False)),
    ]


def _mapping(source: Any, name: str) -> dict[str, Any]:
    value = getattr(source, name, None)
    return dict(value) if isinstance(value, Mapping) else {}
