"""What dynamo remembers of functions, set aside for a while and put back as it was.

Its caches hang on code objects. A function that it knows gets a copy of its code for as long as the
context lasts, and its own again afterwards, with all that hangs on it; what dynamo learns of other
functions in between is forgotten.
"""

from __future__ import annotations

import copy
import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import config, convert_frame, pgo, trace_rules, utils

__all__ = ["fresh_caches", "is_compiler_off", "quiet_compiler"]

_COMPILER = r"torch\.(_dynamo|_subclasses|_guards|_functorch|fx)\b"
_COUNTERS = ("FRAME_COUNTER", "FRAME_COMPILE_COUNTER")
_SHAPES = ("_CODE_STATE", "_INIT_CODE_STATE", "_LOGGED_DYNAMIC_ALLOWLIST")


@contextmanager
def fresh_caches() -> Iterator[None]:
    """As if nothing had been compiled before; afterwards, as if nothing had been in between."""
    with convert_frame.compile_lock:
        known = _known_codes()
        kept = _keep_numbers()
        with _exchanged(known), torch.compiler.set_stance("default"), quiet_compiler():
            try:
                yield
            finally:
                _forget_all_but(known)
                _put_back(kept)


def is_compiler_off() -> bool:
    """Whether torch.compile is told to do nothing."""
    return bool(config.disable)


def _known_codes() -> dict[int, CodeType]:
    codes = (reference() for reference in convert_frame.input_codes.seen)
    return {id(code): code for code in codes if code is not None}


@contextmanager
def _exchanged(known: dict[int, CodeType]) -> Iterator[None]:
    # What dynamo never compiles, because of the file that it is in, has nothing to set aside.
    codes = {key: code for key, code in known.items() if not trace_rules.check(code)}
    holders = gc.get_referrers(*codes.values()) if codes else []
    functions = [one for one in holders if isinstance(one, FunctionType)]
    originals = [(one, one.__code__) for one in functions if id(one.__code__) in codes]
    copies = {id(code): _copy_code(code) for _, code in originals}
    try:
        for function, code in originals:
            function.__code__ = copies[id(code)]
        yield
    finally:
        for function, code in originals:
            function.__code__ = code


def _copy_code(code: CodeType) -> CodeType:
    """Another object, so nothing hangs on it or on the functions defined in it."""
    consts = tuple(_copy_code(one) if isinstance(one, CodeType) else one for one in code.co_consts)
    return code.replace(co_consts=consts)


def _forget_all_but(known: dict[int, CodeType]) -> None:
    for tracker in (convert_frame.input_codes, convert_frame.output_codes):
        for reference in tracker.seen:
            code = reference()
            if code is not None and id(code) not in known:
                reset_code(code)
    _drop_unknown(convert_frame.input_codes, known)


def _drop_unknown(tracker: Any, known: dict[int, CodeType]) -> None:
    tracker.seen[:] = [one for one in tracker.seen if id(one()) in known]
    tracker.seen_ids.intersection_update(known)


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
