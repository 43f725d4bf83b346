"""What dynamo remembers of functions, set aside for a while and put back as it was.

Its caches hang on code objects. A function that it knows gets a copy of its code for as long as the
context lasts, and its own again afterwards, with all that hangs on it; what dynamo learns of other
functions in between is forgotten.
"""

from __future__ import annotations

import copy
import gc
import logging
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any, final

import torch
from torch import fx

from shardscope._torch.compile_events import FrameEnd, Stop, watch_compiles
from shardscope._torch.private import find_name

__all__ = ["fresh_caches", "is_compiler_off", "quiet_compiler"]

_debug_get_cache_entry_list = find_name(
    "torch._C._dynamo.eval_frame._debug_get_cache_entry_list",
    "recognise functions that were compiled",
)
reset_code = find_name(
    "torch._C._dynamo.eval_frame.reset_code", "discard what was compiled for an explanation"
)
config = find_name("torch._dynamo.config", "check whether torch.compile is disabled")
convert_frame = find_name("torch._dynamo.convert_frame", "save and restore dynamo's caches")
pgo = find_name("torch._dynamo.pgo", "save and restore dynamo's knowledge of dynamic shapes")
trace_rules = find_name("torch._dynamo.trace_rules", "recognise files that dynamo never compiles")
utils = find_name("torch._dynamo.utils", "restore dynamo's counters")

_STDLIB = sysconfig.get_path("stdlib") + os.sep
_COMPILER = r"torch\.(_dynamo|_subclasses|_guards|_functorch|fx)\b"
# Globals that dynamo does not take away: of imports, and of traces that it began anew.
_LEFT = ("__import_", "__builtins_dict__")
_COUNTERS = ("FRAME_COUNTER", "FRAME_COMPILE_COUNTER")
_SHAPES = ("_CODE_STATE", "_INIT_CODE_STATE", "_LOGGED_DYNAMIC_ALLOWLIST")


@contextmanager
def fresh_caches() -> Iterator[None]:
    """As if nothing had been compiled before; afterwards, as if nothing had been in between."""
    # The lock is not held meanwhile: threads of the autograd engine may want to compile.
    with convert_frame.compile_lock:
        known = {id(tracker): _codes_of(tracker) for tracker in _trackers()}
        inputs = known[id(convert_frame.input_codes)]
        kept = _keep_numbers()
    scopes = _Scopes()
    with (
        _exchanged(inputs),
        torch.compiler.set_stance("default"),
        quiet_compiler(),
        watch_compiles(scopes),
    ):
        try:
            yield
        finally:
            with convert_frame.compile_lock:
                for tracker in _trackers():
                    _forget_all_but(tracker, known[id(tracker)])
                _put_back(kept)
                scopes.clean()


@final
class _Scopes:
    """Globals of functions that were compiled: dynamo leaves names of its own in them."""

    has_guards = False

    def __init__(self) -> None:
        self._scopes: dict[int, tuple[dict[str, Any], set[str]]] = {}

    def begin_frame(self, code: CodeType, caller: FrameType | None, scope: dict[str, Any]) -> None:
        if id(scope) not in self._scopes:
            self._scopes[id(scope)] = (scope, set(scope))

    def clean(self) -> None:
        for scope, names in self._scopes.values():
            for name in [one for one in scope if one not in names and one.startswith(_LEFT)]:
                del scope[name]

    def end_frame(self, end: FrameEnd) -> None:
        pass

    def see_stop(self, stop: Stop) -> None:
        pass

    def see_recompile(self, reasons: Sequence[str], values: Mapping[str, Any]) -> None:
        pass

    def see_graph(self, graph: fx.GraphModule, compile_id: str) -> None:
        pass

    def fail(self, error: Exception) -> None:
        raise error


def is_compiler_off() -> bool:
    """Whether torch.compile is told to do nothing."""
    return bool(config.disable)


def _trackers() -> tuple[Any, Any]:
    """What dynamo compiled, and the code that it made of it."""
    return convert_frame.input_codes, convert_frame.output_codes


def _codes_of(tracker: Any) -> dict[int, CodeType]:
    codes = (reference() for reference in tracker.seen)
    return {id(code): code for code in codes if code is not None}


@contextmanager
def _exchanged(known: dict[int, CodeType]) -> Iterator[None]:
    codes = [code for code in known.values() if _has_something(code)]
    originals = [(function, function.__code__) for function in _functions_of(codes)]
    copies = {id(code): _copy_code(code) for _, code in originals}
    try:
        for function, code in originals:
            function.__code__ = copies[id(code)]
        yield
    finally:
        for function, code in originals:
            function.__code__ = code


def _has_something(code: CodeType) -> bool:
    """Whether dynamo may do something else for it than for code that it never saw."""
    if _debug_get_cache_entry_list(code):
        return True
    # It may have been given up; not what dynamo never compiles, because of the file it is in.
    is_pythons = code.co_filename.startswith(_STDLIB) and "site-packages" not in code.co_filename
    return not is_pythons and not trace_rules.check(code)


def _functions_of(codes: Sequence[CodeType]) -> Iterator[FunctionType]:
    """Functions that run the codes: most by their names, others by a search of the whole heap."""
    files = {code.co_filename for code in codes}
    homes = {getattr(one, "__file__", None): one for one in list(sys.modules.values())}
    homes = {file: module for file, module in homes.items() if file in files}
    searched: list[CodeType] = []
    for code in codes:
        named = _find_by_name(homes.get(code.co_filename), code)
        if named is None:
            searched.append(code)
        else:
            yield named
    holders = gc.get_referrers(*searched) if searched else []
    yield from (one for one in holders if isinstance(one, FunctionType))


def _find_by_name(module: Any, code: CodeType) -> FunctionType | None:
    found = module
    for part in code.co_qualname.split("."):
        found = getattr(found, part, None)
    is_it = isinstance(found, FunctionType) and found.__code__ is code
    return found if is_it else None


def _copy_code(code: CodeType) -> CodeType:
    """Another object, so nothing hangs on it or on the functions defined in it."""
    consts = tuple(_copy_code(one) if isinstance(one, CodeType) else one for one in code.co_consts)
    return code.replace(co_consts=consts)


def _forget_all_but(tracker: Any, known: dict[int, CodeType]) -> None:
    for reference in tracker.seen:
        code = reference()
        if code is not None and id(code) not in known:
            reset_code(code)
            _clean_up_after(code)
    tracker.seen[:] = [one for one in tracker.seen if id(one()) in known]
    tracker.seen_ids.intersection_update(known)


def _clean_up_after(code: CodeType) -> None:
    """Take away the globals that dynamo made for its code, now and not when that is collected."""
    hooks = utils.CleanupManager.instance.get(code) or ()
    for hook in hooks:
        hook()
    if hooks:
        utils.CleanupManager.instance[code] = []


def _keep_numbers() -> dict[str, Any]:
    """What dynamo counts, and what it knows of shapes that changed; a fresh start of the latter."""
    kept: dict[str, Any] = {name: copy.copy(getattr(convert_frame, name)) for name in _COUNTERS}
    kept["shapes"] = {name: getattr(pgo, name) for name in _SHAPES if hasattr(pgo, name)}
    kept["counters"] = {key: copy.copy(value) for key, value in utils.counters.items()}
    kept["times"] = {key: len(value) for key, value in utils.compilation_time_metrics.items()}
    kept["warned"] = set(utils.warn_once_cache)
    pgo.reset_code_state()
    return kept


def _put_back(kept: dict[str, Any]) -> None:
    for name in _COUNTERS:
        setattr(convert_frame, name, kept[name])
    for name, value in kept["shapes"].items():
        setattr(pgo, name, value)
    utils.counters.clear()
    utils.counters.update(kept["counters"])
    utils.warn_once_cache.intersection_update(kept["warned"])
    times = utils.compilation_time_metrics
    for name in list(times):
        if name in kept["times"]:
            del times[name][kept["times"][name] :]
        else:
            del times[name]


@contextmanager
def quiet_compiler() -> Iterator[None]:
    """Without dynamo's warnings of breaks and recompilations, which are what we report."""
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    if logger.getEffectiveLevel() >= logging.WARNING:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=_COMPILER)
            yield
    finally:
        logger.setLevel(level)
