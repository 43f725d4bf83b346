"""Private names of torch's, looked up so that a name that torch moved costs one feature.

A shim that needs a private name while it is imported asks for it here. Where this torch does not
have the name, the shim gets a stand-in and can be imported all the same; whatever uses the stand-in
raises a TorchVersionError, which is one sentence, and who watches a run turns it into a gap.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from types import CodeType
from typing import Any, NoReturn, final

import torch

from shardscope.errors import TorchVersionError
from shardscope.version import TESTED_TORCH, __version__

__all__ = [
    "all_needs",
    "find_class",
    "find_code",
    "find_exception",
    "find_name",
    "is_missing",
    "missing_names",
    "require",
    "warn_if_untested",
]

_needs: dict[tuple[str, str], str] = {}  # by shim and name
_missing: dict[str, str] = {}  # by name, the sentence


def find_name(name: str, need: str) -> Any:
    """The object at a dotted name; `need` completes "which shardscope needs to …"."""
    _needs[_calling_shim(), name] = need
    try:
        return _resolve(name)
    except (ImportError, AttributeError, RuntimeError):
        return _MissingName(_note_missing(name, need))


def find_class(name: str, need: str) -> Any:
    """The class at a dotted name; where torch has it not, one that nothing is an instance of."""
    found = find_name(name, need)
    return type(name.rpartition(".")[2], (), {}) if is_missing(found) else found


def find_exception(name: str, need: str) -> type[Exception]:
    """The exception at a dotted name; where torch has it not, one that nobody raises."""
    found = find_name(name, need)
    if is_missing(found):
        return type(name.rpartition(".")[2], (Exception,), {})
    exception: type[Exception] = found
    return exception


def find_code(
    name: str, need: str, *, inner: str = "", variables: Sequence[str] = ()
) -> CodeType | None:
    """The code of a function, or of the function `inner` that it defines; None if there is none.

    If the name is that of a module, any of its functions may be the one that defines `inner`. Code
    without these local variables is not the one that is looked for.
    """
    found = find_name(name, need)
    if is_missing(found):
        return None
    functions = vars(found).values() if inspect.ismodule(found) else (found,)
    unwrapped = (inspect.unwrap(function) for function in functions if inspect.isroutine(function))
    codes = [function.__code__ for function in unwrapped if inspect.isfunction(function)]
    if inner:
        codes = [
            constant
            for code in codes
            for constant in code.co_consts
            if isinstance(constant, CodeType) and constant.co_name == inner
        ]
    if not codes:
        _note_missing(f"{name}.{inner}" if inner else name, need)
        return None
    known = {*codes[0].co_varnames, *codes[0].co_cellvars, *codes[0].co_freevars}
    for variable in variables:
        if variable not in known:
            _note_missing(f"local variable {variable!r} in {inner or name}", need)
            return None
    return codes[0]


def all_needs() -> dict[tuple[str, str], str]:
    """What each name is needed for that a shim, named first, has looked up so far."""
    return {(shim.rpartition(".")[2], name): need for (shim, name), need in _needs.items()}


def is_missing(value: object) -> bool:
    """Whether `value` stands for a name that this torch does not have."""
    return type(value) is _MissingName


def missing_names() -> list[str]:
    """A sentence for each name that a shim has looked for in vain so far."""
    return list(_missing.values())


def require(*names: object) -> None:
    """Raise TorchVersionError if one of these stands for a name that this torch does not have."""
    for name in names:
        if isinstance(name, _MissingName):
            raise TorchVersionError(name.__dict__["sentence"])


_has_warned = False


def warn_if_untested() -> None:
    """Warn, once in a process, that this torch is newer than those that we were tested with."""
    global _has_warned
    if _has_warned or _release(torch.__version__) <= _release(TESTED_TORCH[-1]):
        return
    _has_warned = True
    # Of the user's line, not ours.
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    try:
        warnings.warn(
            f"shardscope {__version__} was tested with torch {_tested()}, and this is torch "
            f"{torch.__version__}: what it cannot see there is recorded as a gap.",
            stacklevel=level,
        )
    except UserWarning:  # warnings are errors here, and we must not end a run
        return


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "shardscope"


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def _tested() -> str:
    return f"{', '.join(TESTED_TORCH[:-1])} and {TESTED_TORCH[-1]}"


def _resolve(name: str) -> Any:
    parent, _, last = name.rpartition(".")
    if not parent:
        return import_module(name)
    try:
        module = import_module(parent)
    except ModuleNotFoundError:  # it is a class, or there is no such module
        return getattr(_resolve(parent), last)
    try:
        return getattr(module, last)
    except AttributeError:
        return import_module(name)


def _note_missing(name: str, need: str) -> str:
    sentence = (
        f"torch {torch.__version__} has no {name}, which shardscope {__version__} needs to {need}. "
        f"Use a torch that it was tested with ({_tested()}), or a newer shardscope."
    )
    _missing[name] = sentence
    return sentence


def _calling_shim() -> str:
    frame = sys._getframe(1)
    while frame.f_globals["__name__"] == __name__ and frame.f_back is not None:
        frame = frame.f_back
    name: str = frame.f_globals["__name__"]
    return name


@final
class _MissingName:
    """Stands for a name that this torch does not have, and says so wherever it is used."""

    def __init__(self, sentence: str) -> None:
        self.__dict__["sentence"] = sentence

    def _raise(self, *_: Any, **__: Any) -> NoReturn:
        raise TorchVersionError(self.__dict__["sentence"])

    __call__ = __getattr__ = __setattr__ = __delattr__ = _raise
    __enter__ = __exit__ = __iter__ = __len__ = __contains__ = __getitem__ = __setitem__ = _raise
    __instancecheck__ = __subclasscheck__ = __or__ = __ror__ = __bool__ = _raise

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """A subclass can be defined, and not be made."""
        return (type("Missing", (), {"__init__": self._raise}),)
