"""Saves dynamo's caches, runs something with empty ones, and restores them.

Dynamo attaches its caches to code objects. A function that it has compiled gets a copy of its code
until the context ends, and then its own code again, with the caches attached to it. What dynamo
compiled for other functions in between is discarded.
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

from shardscope._torch.dynamo import FrameEnd, Stop, watch_compiles
from shardscope._torch.logs import failed_ops_unlogged
from shardscope._torch.private import find_name

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
# Prefixes of globals that dynamo does not remove: of imports, and of traces that it restarted.
_LEFTOVER_PREFIXES = ("__import_", "__builtins_dict__")
_COUNTERS = ("FRAME_COUNTER", "FRAME_COMPILE_COUNTER")
_SHAPES = ("_CODE_STATE", "_INIT_CODE_STATE", "_LOGGED_DYNAMIC_ALLOWLIST")


@contextmanager
def fresh_caches() -> Iterator[None]:
    """Run with empty caches of dynamo; restore the former caches and counters afterwards."""
    # The lock is not held during the context: threads of the autograd engine may compile.
    with convert_frame.compile_lock:
        known_codes = {id(tracker): _codes_of(tracker) for tracker in _trackers()}
        inputs = known_codes[id(convert_frame.input_codes)]
        saved = _save_counters()
    scopes = _Scopes()
    with (
        _replaced_codes(inputs),
        torch.compiler.set_stance("default"),
        quiet_compiler(),
        watch_compiles(scopes),
    ):
        try:
            yield
        finally:
            with convert_frame.compile_lock:
                for tracker in _trackers():
                    _forget_all_but(tracker, known_codes[id(tracker)])
                _restore_counters(saved)
                scopes.clean()


@final
class _Scopes:
    """Removes the names that dynamo added to the globals of functions that it compiled."""

    has_guards = False

    def __init__(self) -> None:
        self._scopes: dict[int, tuple[dict[str, Any], set[str]]] = {}

    def begin_frame(self, code: CodeType, caller: FrameType | None, scope: dict[str, Any]) -> None:
        if id(scope) not in self._scopes:
            self._scopes[id(scope)] = (scope, set(scope))

    def clean(self) -> None:
        for scope, names in self._scopes.values():
            for name in [
                key for key in scope if key not in names and key.startswith(_LEFTOVER_PREFIXES)
            ]:
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
    """Whether torch.compile is disabled by dynamo's configuration."""
    return bool(config.disable)


def _trackers() -> tuple[Any, Any]:
    """Dynamo's lists of the code objects that it compiled and of those that it generated."""
    return convert_frame.input_codes, convert_frame.output_codes


def _codes_of(tracker: Any) -> dict[int, CodeType]:
    codes = (reference() for reference in tracker.seen)
    return {id(code): code for code in codes if code is not None}


@contextmanager
def _replaced_codes(known_codes: dict[int, CodeType]) -> Iterator[None]:
    codes = [code for code in known_codes.values() if _has_dynamo_state(code)]
    originals = [(function, function.__code__) for function in _functions_of(codes)]
    copies = {id(code): _copy_code(code) for _, code in originals}
    try:
        for function, code in originals:
            function.__code__ = copies[id(code)]
        yield
    finally:
        for function, code in originals:
            function.__code__ = code


def _has_dynamo_state(code: CodeType) -> bool:
    """Whether dynamo may treat `code` differently from code that it has never seen."""
    if _debug_get_cache_entry_list(code):
        return True
    # Dynamo may have given up on it, unless it never compiles code of that file.
    is_pythons = code.co_filename.startswith(_STDLIB) and "site-packages" not in code.co_filename
    return not is_pythons and not trace_rules.check(code)


def _functions_of(codes: Sequence[CodeType]) -> Iterator[FunctionType]:
    """Functions with these code objects, found by qualified name or else by searching the heap."""
    files = {code.co_filename for code in codes}
    modules = {getattr(module, "__file__", None): module for module in list(sys.modules.values())}
    modules = {file: module for file, module in modules.items() if file in files}
    searched: list[CodeType] = []
    for code in codes:
        function = _find_by_name(modules.get(code.co_filename), code)
        if function is None:
            searched.append(code)
        else:
            yield function
    holders = gc.get_referrers(*searched) if searched else []
    yield from (holder for holder in holders if isinstance(holder, FunctionType))


def _find_by_name(module: Any, code: CodeType) -> FunctionType | None:
    value = module
    for part in code.co_qualname.split("."):
        value = getattr(value, part, None)
    is_function = isinstance(value, FunctionType) and value.__code__ is code
    return value if is_function else None


def _copy_code(code: CodeType) -> CodeType:
    """A copy without caches attached to it or to the functions defined in it."""
    consts = tuple(
        _copy_code(const) if isinstance(const, CodeType) else const for const in code.co_consts
    )
    return code.replace(co_consts=consts)


def _forget_all_but(tracker: Any, known_codes: dict[int, CodeType]) -> None:
    for reference in tracker.seen:
        code = reference()
        if code is not None and id(code) not in known_codes:
            reset_code(code)
            _clean_up_after(code)
    tracker.seen[:] = [reference for reference in tracker.seen if id(reference()) in known_codes]
    tracker.seen_ids.intersection_update(known_codes)


def _clean_up_after(code: CodeType) -> None:
    """Remove the globals that dynamo made for `code` now, not when it is garbage-collected."""
    hooks = utils.CleanupManager.instance.get(code) or ()
    for hook in hooks:
        hook()
    if hooks:
        utils.CleanupManager.instance[code] = []


def _save_counters() -> dict[str, Any]:
    """Save dynamo's counters and its record of dynamic shapes, and reset the latter."""
    saved: dict[str, Any] = {name: copy.copy(getattr(convert_frame, name)) for name in _COUNTERS}
    saved["shapes"] = {name: getattr(pgo, name) for name in _SHAPES if hasattr(pgo, name)}
    saved["counters"] = {key: copy.copy(value) for key, value in utils.counters.items()}
    saved["times"] = {key: len(value) for key, value in utils.compilation_time_metrics.items()}
    saved["warned"] = set(utils.warn_once_cache)
    pgo.reset_code_state()
    return saved


def _restore_counters(saved: dict[str, Any]) -> None:
    for name in _COUNTERS:
        setattr(convert_frame, name, saved[name])
    for name, value in saved["shapes"].items():
        setattr(pgo, name, value)
    utils.counters.clear()
    utils.counters.update(saved["counters"])
    utils.warn_once_cache.intersection_update(saved["warned"])
    times = utils.compilation_time_metrics
    for name in list(times):
        if name in saved["times"]:
            del times[name][saved["times"][name] :]
        else:
            del times[name]


@contextmanager
def quiet_compiler() -> Iterator[None]:
    """Suppress what torch logs of breaks, recompilations and failing ops: the caller reports it."""
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    if logger.getEffectiveLevel() >= logging.WARNING:
        logger.setLevel(logging.ERROR)
    try:
        with failed_ops_unlogged(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=_COMPILER)
            yield
    finally:
        logger.setLevel(level)
