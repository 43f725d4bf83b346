"""Code that travels by value, with globals that are a module's where they arrive.

The compiler looks names up in the module that a function says it is from, so there has to be one.
"""

from __future__ import annotations

import copyreg
import functools
import io
from types import FunctionType, ModuleType
from typing import Any, final

import cloudpickle
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from shardscope._torch.operators import spell_operator
from shardscope.compile.diagnose.isolation.importable import ByValue, is_installed

__all__ = ["pickle_for_script", "reduce_code"]

# Where they arrive, another program is the main one.
_MAIN, _OTHER_MAIN = "__main__", "__main_elsewhere__"
# Builtins alone, because scripts unpickle it too, and need nothing of ours.
_FIND = """(
    (known := __import__("sys").modules).get(name)
    or known.update({name: __import__("types").ModuleType(name)})
    or known[name]
).__dict__"""
# What `functools.cache` makes says where it is, as a class does, but not how to make it.
_CACHED = type(functools.cache(len))
_CACHE = """__import__("functools").lru_cache(maxsize, typed)(function)"""
_OPERATOR = """(torch := __import__("torch")) and {}"""
_KEPT = ("__package__", "__path__", "__file__")


def pickle_for_script(value: object) -> bytes:
    """With all code that is not installed: the script has cloudpickle, and nothing of ours."""
    file = io.BytesIO()
    with ByValue(is_installed) as by_value:
        _ScriptPickler(file, by_value).dump(value)
    return file.getvalue()


def reduce_code(pickler: cloudpickle.Pickler, value: Any, by_value: ByValue) -> Any:
    """How to make what cloudpickle cannot, as pickle wants it; None leaves it to cloudpickle."""
    if operator := spell_operator(value):
        return eval, (_OPERATOR.format(operator),)
    if isinstance(value, nn.Module) and is_parametrized(value):
        make: Any = copyreg.__newobj__  # type: ignore[attr-defined]  # typeshed lacks it
        return make, (type(value),), vars(value)  # it refuses to be pickled itself
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
    """A function that remembers its results, without them."""
    if value.__module__ not in (_MAIN, *cloudpickle.list_registry_pickle_by_value()):
        return None
    return eval, (_CACHE, {**value.cache_parameters(), "function": value.__wrapped__})


@final
class _NamedGlobals(dict[str, Any]):
    """Pickles as the names of a module, which is made if there is none."""


def _name_globals(pickler: cloudpickle.Pickler, function: FunctionType) -> None:
    """Have the pickler give the function, and all others of its module, such globals."""
    names = function.__globals__
    module = names.get("__name__")
    if isinstance(module, str) and id(names) not in pickler.globals_ref:
        kept = {key: names[key] for key in _KEPT if key in names}
        called = _OTHER_MAIN if module == _MAIN else module
        pickler.globals_ref[id(names)] = _NamedGlobals(kept, __name__=called)


@final
class _ScriptPickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no annotations
    def __init__(self, file: io.BytesIO, by_value: ByValue) -> None:
        super().__init__(file)
        self._by_value = by_value

    def reducer_override(self, value: Any) -> Any:
        reduced = reduce_code(self, value, self._by_value)
        return super().reducer_override(value) if reduced is None else reduced
