"""Per-process state of torch and Python, kept separately for each threaded rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, final

import torch
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from shardscope._torch.dtensor import dtensor_random, op_handlers
from shardscope._torch.private import find_name, is_missing
from shardscope._torch.random_state import read_random_state, write_random_state

eval_frame = find_name(
    "torch._C._dynamo.eval_frame",
    "keep dynamo's frame override separate for each threaded rank",
)
_config_module = find_name(
    "torch.utils._config_module",
    "check whether a compiler setting is per thread or per process",
)
_python_dispatch = find_name(
    "torch.utils._python_dispatch",
    "keep the flag of active dispatch modes separate for each threaded rank",
)

# State of torch.distributed: its groups, their names, tags and counter.
_C10D_STATE = (
    "_pg_map",
    "_pg_names",
    "_pg_group_ranks",
    "_pg_backend_config",
    "_group_count",
    "_tags_to_pg",
    "_pg_to_tag",
    "_default_pg_init_method",
)


# State of torch.utils: whether any dispatch mode is active, on any thread.
_MODE_STATE = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


def _is_replicating() -> bool:
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def _set_replicating(is_on: bool) -> None:
    DTensor._op_dispatcher._allow_implicit_replication = is_on


# Process-wide settings that contexts of torch change: (getter, setter).
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (_is_replicating, _set_replicating),
)


# State of dynamo: whether a compiled module is running, on any thread.
_DYNAMO, _RUNNING_STATE = "torch._dynamo.eval_frame", "_in_optimized_module"
# Before torch 2.13, also whether frames inside a compiled module are skipped.
_OVERRIDE, _OVERRIDES = "set_eval_frame_override", "_EvalFrameOverride"

# Compiler settings. Before torch 2.13 a patch by one thread holds for all threads.
_CONFIGS = ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config")
_IS_EACH_THREADS = is_missing(_config_module) or hasattr(_config_module, "ContextVar")


@final
class RankState:
    """A rank's copy of per-process state, installed while the rank runs."""

    def __init__(self) -> None:
        self._own = _fresh_state()
        self._outside: dict[str, Any] = {}

    def enter(self) -> None:
        """Save the current state and install the rank's."""
        self._outside = _read_state()
        _write_state(self._own)

    def leave(self) -> None:
        """Save the rank's state and restore that of `enter`."""
        self._own = _read_state()
        _write_state(self._outside)


def _read_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        name: getattr(distributed_c10d, name)
        for name in _C10D_STATE
        if hasattr(distributed_c10d, name)
    }
    state["modes"] = {
        name: getattr(_python_dispatch, name)
        for name in _MODE_STATE
        if hasattr(_python_dispatch, name)
    }
    state["world"] = dict(vars(distributed_c10d._world))
    state["tracker"] = dtensor_random._rng_tracker
    state["handlers"] = dict(op_handlers())
    state["random"] = read_random_state()
    state["switches"] = [read() for read, _ in _SWITCHES]
    if _DYNAMO in sys.modules:
        state["running"] = getattr(sys.modules[_DYNAMO], _RUNNING_STATE, None)
        state["override"] = _read_override()
    state["configs"] = {name: _read_config(name) for name in _CONFIGS if name in sys.modules}
    return state


def _write_state(state: dict[str, Any]) -> None:
    for name in _C10D_STATE:
        if name in state:
            setattr(distributed_c10d, name, state[name])
    for name, is_active in state["modes"].items():
        setattr(_python_dispatch, name, is_active)
    world = vars(distributed_c10d._world)
    world.clear()
    world.update(state["world"])
    dtensor_random._rng_tracker = state["tracker"]
    if op_handlers() != state["handlers"]:  # contexts such as loss_parallel() set some
        op_handlers().clear()
        op_handlers().update(state["handlers"])
    write_random_state(state["random"])
    for (read, write), value in zip(_SWITCHES, state["switches"], strict=True):
        if read() != value:
            write(value)
    if state.get("running") is not None:
        setattr(sys.modules[_DYNAMO], _RUNNING_STATE, state["running"])
    if state.get("override") is not None:
        getattr(eval_frame, _OVERRIDE)(state["override"])
    for name, settings in state["configs"].items():
        _write_config(name, settings)


def _read_override() -> Any:
    """Dynamo's frame override, which torch returns only when it is set; None if it has none."""
    if not hasattr(eval_frame, _OVERRIDE):
        return None
    set_override = getattr(eval_frame, _OVERRIDE)
    now = set_override(getattr(eval_frame, _OVERRIDES).NONE)
    set_override(now)
    return now


def _read_config(name: str) -> dict[str, Any]:
    return {} if _IS_EACH_THREADS else sys.modules[name].get_config_copy()


def _write_config(name: str, settings: dict[str, Any]) -> None:
    module = sys.modules[name]
    now = _read_config(name)
    for key, value in settings.items():
        if now[key] is not value and now[key] != value:
            setattr(module, key, value)


def _fresh_state() -> dict[str, Any]:
    """The state of a process in which torch.distributed was never used."""
    state = _read_state()
    for name in _C10D_STATE:
        if isinstance(state.get(name), dict):
            state[name] = {}
    state |= {"_group_count": 0, "_default_pg_init_method": None}
    state["world"] = dict(vars(type(distributed_c10d._world)()))
    state["tracker"] = None
    state["running"] = False if "running" in state else None
    state["modes"] = dict.fromkeys(state["modes"], False)
    return {name: value for name, value in state.items() if name not in _C10D_STATE or _has(name)}


def _has(name: str) -> bool:
    return hasattr(distributed_c10d, name)
