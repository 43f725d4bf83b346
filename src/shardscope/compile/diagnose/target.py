"""The function under test with its arguments, and the graphs that dynamo captures of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import fx, nn

from shardscope._torch.dynamo import has_compile_wrapper, unwrap_compiled
from shardscope._torch.dynamo_caches import fresh_caches
from shardscope._torch.random_state import seed_torch
from shardscope.compile.call_state import walk_call
from shardscope.compile.diagnose.accuracy import format_error
from shardscope.compile.diagnose.repro import FunctionCall
from shardscope.compile.diagnose.subgraph import Subgraph, is_non_leaf, make_non_leaf
from shardscope.compile.diagnose.worker import pack
from shardscope.compile.explain.explain import compile_lock, name_of
from shardscope.compile.preserved_state import preserved_call_state
from shardscope.errors import CompileError


@final
@dataclass(frozen=True)
class CapturedGraphs:
    """Graphs in the order in which they were first called;

    `error` is the exception that ended the run.
    """

    subgraphs: tuple[Subgraph, ...]
    error: Exception | None = None


def capture(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    dynamic: bool | None = None,
) -> CapturedGraphs:
    """Call a function once, compiled by a backend that runs graphs unchanged and records them.

    The caller preserves all state that the function may change.
    """
    recorder = _GraphRecorder()
    compiled = torch.compile(fn, backend=recorder.take, dynamic=dynamic)
    try:
        compiled(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - any error; its origin is found later
        return CapturedGraphs(tuple(recorder.subgraphs), error)
    return CapturedGraphs(tuple(recorder.subgraphs))


@final
class _GraphRecorder:
    def __init__(self) -> None:
        self.subgraphs: list[Subgraph] = []

    def take(self, graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        """A backend: returns the graph itself, and records it in the first call.

        It calls `forward`, because calling a GraphModule prints the errors of its ops.
        """
        is_recorded = False

        def run(*values: Any) -> Any:
            nonlocal is_recorded
            if is_recorded:
                return graph.forward(*values)
            is_recorded = True
            inputs, module = copy_values(values), _copy_graph_module(graph)
            has_symbolic_sizes = any(map(_is_symbolic, graph.graph.find_nodes(op="placeholder")))
            subgraph = Subgraph(module, inputs, torch.is_grad_enabled(), has_symbolic_sizes)
            self.subgraphs.append(subgraph)
            return graph.forward(*values)

        return run


def _copy_graph_module(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of the module that owns its tensors: dynamo drops parameters with their optimizer."""
    module = fx.GraphModule(graph, graph.graph)
    module.meta.update(graph.meta)
    return module


def _is_symbolic(placeholder: fx.Node) -> bool:
    """Whether an input is a symbolic number or has a symbolic size."""
    example = placeholder.meta.get("example_value")
    if isinstance(example, torch.Tensor) and example.layout is torch.strided:
        return any(isinstance(size, torch.SymInt) for size in example.shape)
    return isinstance(example, torch.SymInt | torch.SymFloat)


def copy_values(values: Sequence[Any]) -> tuple[Any, ...]:
    """Copies of values as they are now, which share memory where the originals do."""
    leaves = copy.deepcopy([_detach(value) for value in values], {})
    return tuple(
        make_non_leaf(leaf) if isinstance(value, torch.Tensor) and is_non_leaf(value) else leaf
        for value, leaf in zip(values, leaves, strict=True)
    )


def _detach(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


@final
class TargetFunction:
    """A function and the arguments of one call; running it changes none of the user's state."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        name: str,
        seed: int,
    ) -> None:
        self._fn = unwrap_compiled(fn)
        self._args = args
        self._kwargs = kwargs
        self._seed = seed
        self.name = name or _name(self._fn)
        self.compiled_parts = _list_compiled(fn, args, kwargs)
        """Names of functions and modules to which the user has applied torch.compile."""

    def capture(self, *, dynamic: bool | None) -> CapturedGraphs:
        """The graphs that dynamo captures of it."""
        with self._preserved_state():
            return capture(self._fn, self._args, self._kwargs, dynamic=dynamic)

    @cached_property
    def packed(self) -> Sequence[bytes] | None:
        """The function and its arguments as bytes for another process;

        None if they cannot be pickled.
        """
        try:
            return pack((self._fn, self._args, dict(self._kwargs))).copy().buffers
        except Exception:  # noqa: BLE001 - locks, groups, generators and other objects in a closure
            return None

    @property
    def call(self) -> FunctionCall:
        """The function with its arguments."""
        return FunctionCall(self._fn, self._args, self._kwargs)

    def find_own_error(self) -> Exception | None:
        """The error that the function raises in eager execution; None if it returns."""
        with self._preserved_state(), torch.compiler.set_stance("force_eager"):
            try:
                self._fn(*self._args, **self._kwargs)
            except Exception as error:  # noqa: BLE001 - any error
                return error
        return None

    def make_eager_failure(self, error: Exception) -> CompileError:
        """The error to raise for a function that fails in the same way in eager execution."""
        return CompileError(
            f"{self.name} fails in eager mode, too ({format_error(error)}). Fix that first."
        )

    @contextmanager
    def _preserved_state(self) -> Iterator[None]:
        with compile_lock, fresh_caches(), preserved_call_state(self._fn, self._args, self._kwargs):
            seed_torch(self._seed)
            yield


def _list_compiled(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str, ...]:
    reachable = (value for _, value in walk_call(fn, args, kwargs) if callable(value))
    wrapped = [unwrap_compiled(value) for value in reachable if has_compile_wrapper(value)]
    # The wrapper of a module also contains a compiled function of torch.
    names = [
        name_of(value)
        for value in wrapped
        if isinstance(value, nn.Module) or not value.__module__.startswith("torch.")
    ]
    return tuple(dict.fromkeys(names))


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", "") or type(fn).__name__
