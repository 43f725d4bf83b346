"""Lookup of private torch names, so that a name that moved disables one feature only.

A module of this package that uses a private name at import time looks it up here. If this torch
does not have the name, the lookup returns a stand-in, and the module can still be imported. Using
the stand-in raises a TorchVersionError with one sentence, which recorders turn into a gap.

Attributes of torch's objects are not looked up here. Where one is missing, `explain_moved_names`
turns the AttributeError into the same sentence.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from types import CodeType, TracebackType
from typing import Any, NoReturn, ParamSpec, TypeVar, final

import torch

from shardscope.errors import ShardscopeError, TorchVersionError
from shardscope.version import TESTED_TORCH, __version__

_P = ParamSpec("_P")
_R = TypeVar("_R")

# What the messages of an AttributeError and an ImportError say is missing.
_NO_ATTRIBUTE = re.compile(r"(?:module '(?P<module>[\w.]+)' )?has no attribute '(?P<name>\w+)'")
_NO_IMPORT = re.compile(r"cannot import name '(?P<name>\w+)' from '(?P<module>[\w.]+)'")
_NO_MODULE = re.compile(r"No module named '(?P<name>[\w.]+)'")
_PRIVATE = re.compile(r"(?:^|\.)_(?!_)")

_needs: dict[tuple[str, str], str] = {}  # by looking-up module and name
_missing: dict[str, str] = {}  # error sentences, by name


def find_name(name: str, need: str) -> Any:
    """The object at a dotted name; `need` completes the sentence "which shardscope needs to …"."""
    _needs[_calling_shim(), name] = need
    try:
        return _resolve(name)
    except (ImportError, AttributeError, RuntimeError):
        return _MissingName(_note_missing(name, need))


def find_class(name: str, need: str) -> Any:
    """The class at a dotted name; if torch lacks it, a class without instances."""
    value = find_name(name, need)
    return type(name.rpartition(".")[2], (), {}) if is_missing(value) else value


def find_exception(name: str, need: str) -> type[Exception]:
    """The exception at a dotted name; if torch lacks it, one that is never raised."""
    value = find_name(name, need)
    if is_missing(value):
        return type(name.rpartition(".")[2], (Exception,), {})
    exception: type[Exception] = value
    return exception


def find_code(
    name: str, need: str, *, inner: str = "", variables: Sequence[str] = ()
) -> CodeType | None:
    """The code of a function, or of the function `inner` that it defines; None if torch lacks it.

    If the name is that of a module, any of its functions may define `inner`. Code that does not
    have all of the local `variables` is treated as missing.
    """
    value = find_name(name, need)
    if is_missing(value):
        return None
    functions = vars(value).values() if inspect.ismodule(value) else (value,)
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
    local_names = {*codes[0].co_varnames, *codes[0].co_cellvars, *codes[0].co_freevars}
    for variable in variables:
        if variable not in local_names:
            _note_missing(f"local variable {variable!r} in {inner or name}", need)
            return None
    return codes[0]


def all_needs() -> dict[tuple[str, str], str]:
    """The needs of all lookups so far, by (module of this package, name)."""
    return {(shim.rpartition(".")[2], name): need for (shim, name), need in _needs.items()}


def is_missing(value: object) -> bool:
    """Whether `value` is the stand-in for a name that this torch does not have."""
    return type(value) is _MissingName


def missing_names() -> list[str]:
    """A sentence for each name that was looked up so far and is missing."""
    return list(_missing.values())


def require(*names: object) -> None:
    """Raise TorchVersionError if one of these is the stand-in for a missing name."""
    for name in names:
        if isinstance(name, _MissingName):
            raise TorchVersionError(name.__dict__["sentence"])


def describe_moved_name(error: BaseException | None) -> str | None:
    """A sentence if torch lacks a private attribute of its objects, and a shim failed for it.

    For an error of shardscope's, its cause decides. Errors of the user's code give None.
    """
    if isinstance(error, ShardscopeError):
        cause = error.__cause__
        is_explained = cause is None or isinstance(error, TorchVersionError)
        return None if is_explained else describe_moved_name(cause)
    if not isinstance(error, AttributeError | ImportError):
        return None
    shim, name = _failing_shim(error.__traceback__), _read_missing_name(str(error))
    if shim is None or not _PRIVATE.search(name):
        return None
    return _missing_sentence(name, f"use {shim}")


@contextmanager
def moved_names_explained() -> Iterator[None]:
    """Raise errors that `describe_moved_name` recognises as TorchVersionError."""
    try:
        yield
    except (AttributeError, ImportError, ShardscopeError) as error:
        sentence = describe_moved_name(error)
        if sentence is None:
            raise
        raise TorchVersionError(sentence) from error


def explain_moved_names(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function of the public API with `moved_names_explained`."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with moved_names_explained():
            return function(*args, **kwargs)

    return call


@contextmanager
def without_if_moved(context: AbstractContextManager[object]) -> Iterator[None]:
    """Enter `context`, an optional detail; if torch lacks a name for it, note a gap instead."""
    with ExitStack() as stack:
        try:
            with moved_names_explained():
                stack.enter_context(context)
        except TorchVersionError as error:
            _missing[str(error)] = str(error)
        yield


def _failing_shim(traceback: TracebackType | None) -> str | None:
    """The module of this package whose line failed to find a name; None if another's failed."""
    shim = None
    while traceback is not None:
        frame = traceback.tb_frame
        module = frame.f_globals.get("__name__", "")
        if module.startswith(f"{__package__}."):
            shim = module
        elif frame.f_code.co_name != "__getattr__" and not module.startswith("importlib"):
            shim = None
        traceback = traceback.tb_next
    return shim


def _read_missing_name(message: str) -> str:
    for pattern in (_NO_ATTRIBUTE, _NO_IMPORT, _NO_MODULE):
        if match := pattern.search(message):
            return ".".join(filter(None, (match.groupdict().get("module"), match["name"])))
    return ""


_has_warned = False


def warn_if_untested() -> None:
    """Warn once per process if this torch is newer than the newest tested one."""
    global _has_warned
    if _has_warned or _release(torch.__version__) <= _release(TESTED_TORCH[-1]):
        return
    _has_warned = True
    # Attribute the warning to the user's line.
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
    _missing[name] = _missing_sentence(name, need)
    return _missing[name]


def _missing_sentence(name: str, need: str) -> str:
    return (
        f"torch {torch.__version__} has no {name}, which shardscope {__version__} needs to {need}. "
        f"Use a torch that it was tested with ({_tested()}), or a newer shardscope."
    )


def _calling_shim() -> str:
    frame = sys._getframe(1)
    while frame.f_globals["__name__"] == __name__ and frame.f_back is not None:
        frame = frame.f_back
    name: str = frame.f_globals["__name__"]
    return name


@final
class _MissingName:
    """The stand-in for a name that this torch does not have; any use raises TorchVersionError."""

    def __init__(self, sentence: str) -> None:
        self.__dict__["sentence"] = sentence

    def _raise(self, *_: Any, **__: Any) -> NoReturn:
        raise TorchVersionError(self.__dict__["sentence"])

    __call__ = __getattr__ = __setattr__ = __delattr__ = _raise
    __enter__ = __exit__ = __iter__ = __len__ = __contains__ = __getitem__ = __setitem__ = _raise
    __instancecheck__ = __subclasscheck__ = __or__ = __ror__ = __bool__ = _raise

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """Subclasses can be defined, but not instantiated."""
        return (type("Missing", (), {"__init__": self._raise}),)
