"""Eager runs of a fragment, each made once: unchanged, in double precision, and perturbed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.judging.copies import copy_inputs
from shardscope.compile.diagnose.judging.runs import Announce, Result, name_inputs, run, say_nothing
from shardscope.compile.diagnose.outcome import message_of
from shardscope.errors import CompileError
from shardscope.numerics.case import plain
from shardscope.numerics.draws import Watching
from shardscope.numerics.rounding import RandomRounding
from shardscope.numerics.verdict import is_same
from shardscope.numerics.widen import widen_tensor, widened

__all__ = ["FragmentRuns", "fails_itself", "say_error"]

Call = Callable[[Sequence[Any]], Any]


@final
class FragmentRuns:
    """The eager runs of a fragment; `run` calls its compiled form on the same inputs."""

    def __init__(
        self,
        fragment: Fragment,
        *,
        seed: int = 0,
        pulls_back: bool = True,
        max_others: int | None = None,
    ) -> None:
        self.fragment = fragment
        self._seed = seed
        self._pulls_back = pulls_back  # gradients too
        self._max_others = (
            max_others  # runs with other roundings; as many as are asked for, if None
        )
        self._others: list[Result] = []
        self._again: list[Result] = []
        self._is_roundable = True
        self._changed: set[str] | None = None  # inputs that eager execution changes

    @cached_property
    def eager(self) -> Result:
        """The result of eager execution."""
        try:
            return self.run(self._run_graph)
        except Exception:  # noqa: BLE001 - not every result is differentiable
            self._pulls_back = False
        try:
            return self.run(self._run_graph)
        except Exception as error:
            raise fails_itself(error) from error

    @cached_property
    def exact(self) -> Result | None:
        """The result in double precision; None where an op does not support it."""
        _ = self.eager  # determines which inputs are changed in place
        try:
            return self.run(self._run_graph, widened(self._dtype), change=widen_tensor)
        except Exception:  # noqa: BLE001 - then it is compared with eager execution only
            return None

    @cached_property
    def has_draws(self) -> bool:
        """Whether the fragment draws random numbers."""
        watching = Watching()
        self.run(self._run_graph, watching)
        return watching.has_drawn

    def run_others(self, count: int) -> Sequence[Result]:
        """Up to `count` results with perturbed rounding; fewer if such a run fails."""
        count = count if self._max_others is None else min(count, self._max_others)
        while len(self._others) < count and self._is_roundable:
            rounding = RandomRounding(self._seed + len(self._others) + 1)
            try:
                self._others.append(self.run(self._run_graph, rounding))
            except Exception:  # noqa: BLE001 - perturbed numbers may make the program fail
                self._is_roundable = False
        return self._others[:count]

    def run_again(self, count: int) -> Sequence[Result]:
        """`count` further results of eager execution."""
        while len(self._again) < count:
            self._again.append(self.run(self._run_graph))
        return self._again[:count]

    def run(
        self,
        call: Call,
        context: AbstractContextManager[Any] | None = None,
        *,
        change: Callable[[Tensor], Tensor] | None = None,
        announce: Announce = say_nothing,
    ) -> Result:
        """Run `call` on copies of the fragment's inputs."""
        given = self.fragment.inputs
        inputs = copy_inputs(given) if change is None else copy_inputs(given, change)
        with context or nullcontext():
            result = run(
                call,
                inputs,
                seed=self._seed,
                with_gradients=self.fragment.with_gradients,
                pulls_back=self._pulls_back,
                announce=announce,
            )
        return Result({**result.values, **self._find_changed(inputs)}, result.gradients)

    def _find_changed(self, inputs: Sequence[Any]) -> dict[str, Tensor]:
        """Inputs that a run changed in place, and those that eager execution changes."""
        before, after = name_inputs(self.fragment.inputs), name_inputs(inputs)
        is_first = self._changed is None
        changed = {name for name, one in after.items() if _is_changed(one, before[name])}
        if is_first:
            self._changed = changed
        watched = changed | (self._changed or set())
        return {_say_changed(name): after[name].detach() for name in after if name in watched}

    def unchanged(self, result: Result) -> dict[str, Tensor]:
        """The original values of inputs that only `result`, and not eager execution, changed."""
        before = name_inputs(self.fragment.inputs)
        return {
            _say_changed(name): one.detach()
            for name, one in before.items()
            if _say_changed(name) in result.values and name not in (self._changed or set())
        }

    @property
    def _dtype(self) -> torch.dtype:
        floats = [
            one.dtype
            for one in self.fragment.inputs
            if isinstance(one, Tensor) and one.is_floating_point()
        ]
        return max(set(floats), key=floats.count, default=torch.get_default_dtype())

    def _run_graph(self, inputs: Sequence[Any]) -> Any:
        return self.fragment.graph(*inputs)


def _is_changed(after: Tensor, before: Tensor) -> bool:
    if after.dtype != before.dtype or after.is_meta:
        return False
    return not is_same(plain(after), plain(before))


def _say_changed(name: str) -> str:
    return f"{name}, changed in place"


def fails_itself(error: BaseException) -> CompileError:
    """The error to raise for a function that fails in eager execution."""
    return CompileError(
        f"the function itself fails in eager mode ({say_error(error)}). Fix that first."
    )


def say_error(error: BaseException, *, limit: int = 300) -> str:
    """The type of an error and the first line of its message."""
    text = message_of(error).strip()
    first = text.splitlines()[0] if text else ""
    return f"{type(error).__name__}: {first[:limit]}" if first else type(error).__name__
