"""Modules that another process could not import: what they define travels by value."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, final

import cloudpickle

__all__ = ["ByValue", "is_importable", "is_installed"]

_EVERYWHERE = {"builtins", "shardscope", "torch", *sys.stdlib_module_names}

# Which modules go by value is a setting of cloudpickle's, and so of the whole process.
_one_at_a_time = threading.Lock()


@final
class ByValue:
    """While it lasts, cloudpickle sends by value what is in modules that have been considered.

    But for those that whoever reads it finds by itself, as `is_found` says of their names.
    """

    def __init__(self, is_found: Callable[[str], bool]) -> None:
        self._is_found = is_found
        self._seen: set[str] = set()
        self._chosen: list[ModuleType] = []

    def __enter__(self) -> ByValue:
        _one_at_a_time.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        for module in self._chosen:
            cloudpickle.unregister_pickle_by_value(module)
        _one_at_a_time.release()

    def consider(self, name: object) -> None:
        """Look once at the module of this name."""
        if not isinstance(name, str) or name in self._seen:
            return
        if name.partition(".")[0] in _EVERYWHERE:
            return
        self._seen.add(name)
        module = sys.modules.get(name)
        is_settled = name == "__main__" or name in cloudpickle.list_registry_pickle_by_value()
        if module is not None and not is_settled and not self._is_found(name):
            cloudpickle.register_pickle_by_value(module)
            self._chosen.append(module)


def is_importable(name: str) -> bool:
    """Whether an import would find the file that this process has under the name."""
    parent, _, _ = name.rpartition(".")
    if parent and not is_importable(parent):
        return False
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    spec = _find_spec(name, path)
    # A folder without code is a package wherever it is found: no promise that others find it.
    if spec is None or (not parent and spec.origin is None and spec.loader is None):
        return False
    here = getattr(sys.modules.get(name), "__file__", None)
    return here is None or spec.origin is None or spec.origin == here


def is_installed(name: str) -> bool:
    """Whether anybody who has the same packages has it too."""
    return "site-packages" in (getattr(sys.modules.get(name), "__file__", None) or "")


def _find_spec(name: str, path: Any) -> Any:
    # importlib.util.find_spec would answer from sys.modules.
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, path) if find is not None else None
        if spec is not None:
            return spec
    return None
