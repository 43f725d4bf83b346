"""Modules that another process could not import: what they define travels by value."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import Any, final

import cloudpickle

__all__ = ["ByValue", "is_importable", "is_installed"]

# cloudpickle among them: to send it by value, it would have to send what it sends it with.
_EVERYWHERE = {"builtins", "cloudpickle", "shardscope", "torch", *sys.stdlib_module_names}
_INSTALLATION_FOLDERS = {"site-packages", "dist-packages"}  # the second one is Debian's

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
    """Whether the module belongs to an installed package, in whatever folder that is."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if not file:
        return False
    if _INSTALLATION_FOLDERS.intersection(Path(file).parts):
        return True
    # Where it is imported from: `pip install --target` makes a folder of any name.
    package = name.partition(".")[0]
    depth = name.count(".") + (Path(file).stem == "__init__")
    parents = Path(file).absolute().parents
    return depth < len(parents) and package in _installed_names(str(parents[depth]))


@functools.cache
def _installed_names(folder: str) -> frozenset[str]:
    """The modules and packages that distributions in this folder list among their files."""
    files = [file for one in distributions(path=[folder]) for file in one.files or ()]
    return frozenset(file.parts[0].partition(".")[0] for file in files if file.suffix != ".pth")


def _find_spec(name: str, path: Any) -> Any:
    # importlib.util.find_spec would answer from sys.modules.
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, path) if find is not None else None
        if spec is not None:
            return spec
    return None
