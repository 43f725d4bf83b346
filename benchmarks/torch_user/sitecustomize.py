"""Counts Inductor's compilations in whatever process is started: torch's minifier starts many."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Callable
from typing import Any

_WATCHED = "torch._inductor.compile_fx"


class _Finder:
    """Finds one module as everybody does, and wraps a function of it once it is loaded."""

    @staticmethod
    def find_spec(name: str, path: Any, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == _WATCHED else None
        if spec is None or spec.loader is None:
            return None
        load: Callable[[Any], None] = spec.loader.exec_module

        def load_and_wrap(module: Any) -> None:
            load(module)
            module._compile_fx_inner = _counted(module._compile_fx_inner)

        spec.loader.exec_module = load_and_wrap  # type: ignore[method-assign]
        return spec


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    import functools

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        from torch_user_backend import count

        count()
        return function(*args, **kwargs)

    return call


if os.environ.get("TORCH_USER_COUNTS_INDUCTOR"):
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
