"""What a run may change, as it was: weights, buffers, gradients, inputs, random numbers, modes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from shardscope._torch.kept_tensors import KeptTensors
from shardscope._torch.modules import every_module
from shardscope._torch.restoring import Kept, find_changeable, find_named
from shardscope.errors import CompileError

__all__ = ["everything_kept"]

_MAX_DEPTH = 6  # of containers in inputs


@contextmanager
def everything_kept(fn: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[None]:
    """Put back what calling `fn` changes: what it is given, and the models and tensors it names."""
    kept, tensors = Kept(), KeptTensors()
    for value in _all_values(fn, args, kwargs):
        _keep(value, kept, tensors)
    state = _read_state()
    try:
        yield
    finally:
        kept.put_back()
        tensors.put_back()
        _write_state(state)


def _all_values(fn: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[Any]:
    yield from _flatten((args, kwargs), 0)
    yield fn
    named = fn if hasattr(fn, "__code__") or hasattr(fn, "func") else _method_of(fn)
    yield getattr(fn, "__self__", None)
    yield from find_changeable(named)
    for value in find_named(named):
        if isinstance(value, torch.Tensor | dict | list | set):
            yield from _flatten(value, 0)


def _method_of(fn: Any) -> Callable[..., Any]:
    method: Callable[..., Any] = fn.forward if isinstance(fn, nn.Module) else fn.__call__
    return method


def _flatten(value: Any, depth: int) -> Iterator[Any]:
    yield value
    if depth == _MAX_DEPTH:
        return
    held: Iterable[Any] = ()
    if isinstance(value, Mapping):
        held = list(value.values())
    elif isinstance(value, tuple | list):
        held = value
    elif is_dataclass(value) and not isinstance(value, type):
        held = [getattr(value, field.name) for field in fields(value)]
    for one in held:
        yield from _flatten(one, depth + 1)


def _keep(value: Any, kept: Kept, tensors: KeptTensors) -> None:
    if isinstance(value, torch.Tensor):
        _keep_tensors([value], kept, tensors)
    elif isinstance(value, nn.Module):
        kept.keep(value)
        for module in every_module(value):
            _keep_tensors(_tensors_of(module), kept, tensors)
    elif isinstance(value, Optimizer):
        kept.keep(value)
        _keep_tensors(_find_tensors(value.state.values()), kept, tensors)
        _keep_tensors(_find_tensors(value.param_groups), kept, tensors)
    elif isinstance(value, dict | list | set):
        kept.keep_container(value)
    elif _has_attributes(value):
        kept.keep(value)
        _keep_tensors(_find_tensors(vars(value).values()), kept, tensors)


def _has_attributes(value: Any) -> bool:
    """Whether it is an object of the user's; the attributes of functions are nobody's state."""
    is_plain = hasattr(value, "__code__") or isinstance(value, type | ModuleType)
    return hasattr(value, "__dict__") and not is_plain


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from (*module.parameters(recurse=False), *module.buffers(recurse=False))
    yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))


def _find_tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        yield from (one for one in _flatten(value, 0) if isinstance(one, torch.Tensor))


def _keep_tensors(some: Iterable[torch.Tensor], kept: Kept, tensors: KeptTensors) -> None:
    for tensor in some:
        if is_lazy(tensor):
            raise CompileError(
                "The model has parameters that get their shape when it is first called. Call it "
                "once before."
            )
        kept.keep_gradients([tensor])
        tensors.keep(tensor)
        if tensor.is_leaf and tensor.grad is not None:
            tensors.keep(tensor.grad)


def _read_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        "python": random.getstate(),
        "cpu": torch.get_rng_state(),
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def _write_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    torch.set_grad_enabled(state["grad"])
    torch.set_default_dtype(state["dtype"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
