"""Modules that another process cannot import: their definitions are sent by value."""

from __future__ import annotations

import copyreg
import functools
import io
import sys
import threading
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, final

import cloudpickle
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from shardscope._torch.dispatch import format_operator

# cloudpickle is among them: to send it by value, it would have to pickle itself.
_EVERYWHERE = {"builtins", "cloudpickle", "shardscope", "torch", *sys.stdlib_module_names}
_INSTALLATION_FOLDERS = {"site-packages", "dist-packages"}  # the second is Debian's

# Which modules are pickled by value is a setting of cloudpickle for the entire process.
_registry_lock = threading.Lock()


@final
class ByValue:
    """A context in which cloudpickle pickles the definitions of considered modules by value.

    Except for modules that the reader can import, as `can_import` decides by name.
    """

    def __init__(self, can_import: Callable[[str], bool]) -> None:
        self._can_import = can_import
        self._considered: set[str] = set()
        self._chosen: list[ModuleType] = []

    def __enter__(self) -> ByValue:
        _registry_lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        for module in self._chosen:
            cloudpickle.unregister_pickle_by_value(module)
        _registry_lock.release()

    def consider(self, name: object) -> None:
        """Register the module of this name, if it has not been considered before."""
        if not isinstance(name, str) or name in self._considered:
            return
        if name.partition(".")[0] in _EVERYWHERE:
            return
        self._considered.add(name)
        module = sys.modules.get(name)
        is_settled = name == "__main__" or name in cloudpickle.list_registry_pickle_by_value()
        if module is not None and not is_settled and not self._can_import(name):
            cloudpickle.register_pickle_by_value(module)
            self._chosen.append(module)


def is_importable(name: str) -> bool:
    """Whether an import of the name would load the file that this process has loaded."""
    parent, _, _ = name.rpartition(".")
    if parent and not is_importable(parent):
        return False
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    spec = _find_spec(name, path)
    # A folder without code is a namespace package, which another process may not find.
    if spec is None or (not parent and spec.origin is None and spec.loader is None):
        return False
    here = getattr(sys.modules.get(name), "__file__", None)
    return here is None or spec.origin is None or spec.origin == here


def is_installed(name: str) -> bool:
    """Whether the module belongs to an installed package, in any folder."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if not file:
        return False
    if _INSTALLATION_FOLDERS.intersection(Path(file).parts):
        return True
    # The folder it is imported from: `pip install --target` accepts any folder.
    package = name.partition(".")[0]
    depth = name.count(".") + (Path(file).stem == "__init__")
    parents = Path(file).absolute().parents
    return depth < len(parents) and package in _installed_names(str(parents[depth]))


@functools.cache
def _installed_names(folder: str) -> frozenset[str]:
    """The modules and packages that distributions in this folder list among their files."""
    files = [
        file for distribution in distributions(path=[folder]) for file in distribution.files or ()
    ]
    return frozenset(file.parts[0].partition(".")[0] for file in files if file.suffix != ".pth")


def _find_spec(name: str, path: Any) -> Any:
    # importlib.util.find_spec would read sys.modules.
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, path) if find is not None else None
        if spec is not None:
            return spec
    return None


# In the receiving process another program is `__main__`.
_MAIN, _RENAMED_MAIN = "__main__", "__main_elsewhere__"
# Builtins only, because scripts unpickle it too, without this package.
_FIND = """(
    (known := __import__("sys").modules).get(name)
    or known.update({name: __import__("types").ModuleType(name)})
    or known[name]
).__dict__"""
# A function from `functools.cache` has a module and name like a class, but no pickle support.
_CACHED = type(functools.cache(len))
_CACHE = """__import__("functools").lru_cache(maxsize, typed)(function)"""
_OPERATOR = """(torch := __import__("torch")) and {}"""
_MODULE_NAMES = ("__package__", "__path__", "__file__")


def pickle_for_script(value: object) -> bytes:
    """A pickle with all code that is not installed: scripts have cloudpickle, but not this
    package.
    """
    file = io.BytesIO()
    with ByValue(is_installed) as by_value:
        _ScriptPickler(file, by_value).dump(value)
    return file.getvalue()


def reduce_code(pickler: cloudpickle.Pickler, value: Any, by_value: ByValue) -> Any:
    """A pickle reduction for objects that cloudpickle cannot pickle; None for all others."""
    if operator := format_operator(value):
        return eval, (_OPERATOR.format(operator),)
    if isinstance(value, nn.Module) and is_parametrized(value):
        make: Any = copyreg.__newobj__  # type: ignore[attr-defined]  # typeshed lacks it
        return make, (type(value),), vars(value)  # it raises if it is pickled itself
    if isinstance(value, _NamedGlobals):
        return eval, (_FIND, {"name": value["__name__"]}), None, None, iter(value.items())
    if isinstance(value, FunctionType):
        _name_globals(pickler, value)
    if isinstance(value, _CACHED):
        by_value.consider(value.__module__)
        return _reduce_cached(value)
    if isinstance(value, FunctionType | type):
        by_value.consider(value.__module__)
    elif isinstance(value, ModuleType):
        by_value.consider(value.__name__)
    return None


def _reduce_cached(value: Any) -> Any:
    """The reduction of a cached function, without its cached results."""
    if value.__module__ not in (_MAIN, *cloudpickle.list_registry_pickle_by_value()):
        return None
    return eval, (_CACHE, {**value.cache_parameters(), "function": value.__wrapped__})


@final
class _NamedGlobals(dict[str, Any]):
    """Unpickles as the namespace of a module, which is created if it does not exist."""


def _name_globals(pickler: cloudpickle.Pickler, function: FunctionType) -> None:
    """Make the pickler use `_NamedGlobals` for this function and all others of its module."""
    names = function.__globals__
    module = names.get("__name__")
    if isinstance(module, str) and id(names) not in pickler.globals_ref:
        module_globals = {key: names[key] for key in _MODULE_NAMES if key in names}
        module_name = _RENAMED_MAIN if module == _MAIN else module
        pickler.globals_ref[id(names)] = _NamedGlobals(module_globals, __name__=module_name)


@final
class _ScriptPickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no annotations
    def __init__(self, file: io.BytesIO, by_value: ByValue) -> None:
        super().__init__(file)
        self._by_value = by_value

    def reducer_override(self, value: Any) -> Any:
        reduced = reduce_code(self, value, self._by_value)
        return super().reducer_override(value) if reduced is None else reduced
