"""The function under examination, with what it is called with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, final

import torch
from torch import nn

from shardscope._torch.compile_caches import fresh_caches
from shardscope._torch.uncompiled_functions import has_compile_wrapper, uncompiled
from shardscope.compile.call_state import everything_kept, walk_call
from shardscope.compile.diagnose.capture import Captured, capture
from shardscope.compile.diagnose.isolation.payload import pack
from shardscope.compile.diagnose.judging.reference import say_error
from shardscope.compile.diagnose.repro.whole import Call
from shardscope.compile.explain.explain import name_of, one_at_a_time
from shardscope.errors import CompileError

__all__ = ["Subject"]


@final
class Subject:
    """A function and one call of it; running it changes nothing of the user's."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        name: str,
        seed: int,
    ) -> None:
        self._fn = uncompiled(fn)
        self._args = args
        self._kwargs = kwargs
        self._seed = seed
        self.name = name or _name(self._fn)
        self.compiled_parts = _list_compiled(fn, args, kwargs)
        """Names of functions and modules to which the user has applied torch.compile."""

    def capture(self, *, dynamic: bool | None) -> Captured:
        """The graphs that dynamo makes of it."""
        with self._kept():
            return capture(self._fn, self._args, self._kwargs, dynamic=dynamic)

    @cached_property
    def packed(self) -> Sequence[bytes] | None:
        """The function and its arguments for another process; None if they cannot go there."""
        try:
            return pack((self._fn, self._args, dict(self._kwargs))).copy().pieces
        except Exception:  # noqa: BLE001 - locks, groups, generators, whatever a closure holds
            return None

    @property
    def call(self) -> Call:
        """What is called, and with what."""
        return Call(self._fn, self._args, self._kwargs)

    def find_own_error(self) -> Exception | None:
        """What the function raises without a compiler; None if it returns."""
        with self._kept(), torch.compiler.set_stance("force_eager"):
            try:
                self._fn(*self._args, **self._kwargs)
            except Exception as error:  # noqa: BLE001 - of whatever kind
                return error
        return None

    def fails_itself(self, error: Exception) -> CompileError:
        """What to raise for a function that fails in the same way without a compiler."""
        return CompileError(
            f"{self.name} fails in eager mode, too ({say_error(error)}). Fix that first."
        )

    @contextmanager
    def _kept(self) -> Iterator[None]:
        with one_at_a_time, fresh_caches(), everything_kept(self._fn, self._args, self._kwargs):
            torch.manual_seed(self._seed)
            yield


def _list_compiled(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str, ...]:
    reachable = (value for _, value in walk_call(fn, args, kwargs) if callable(value))
    wrapped = [uncompiled(value) for value in reachable if has_compile_wrapper(value)]
    # The wrapper of a module also contains a compiled function of torch's own.
    names = [
        name_of(value)
        for value in wrapped
        if isinstance(value, nn.Module) or not value.__module__.startswith("torch.")
    ]
    return tuple(dict.fromkeys(names))


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", "") or type(fn).__name__
