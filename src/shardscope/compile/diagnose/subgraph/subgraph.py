"""A graph with the values it is called with, and the backend that compiles it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from torch import fx


@final
@dataclass(frozen=True)
class Subgraph:
    """A graph, and one value for each of its placeholders, in order.

    The graph's output is a flat tuple of nodes and constants. Nodes have dynamo's metadata in
    `meta` (`stack_trace`, `nn_module_stack`). Tensors among `inputs` require grad and are leaves as
    in the program's call; code that runs a subgraph copies them first.
    """

    graph: fx.GraphModule
    inputs: tuple[Any, ...]
    with_gradients: bool  # record gradients when it runs, and compare them if there are any
    has_open_sizes: bool = False  # dynamo captured symbolic sizes instead of numbers


@final
@dataclass(frozen=True)
class Compiler:
    """A backend by name or as a callable, and the other arguments of torch.compile."""

    backend: str | Callable[..., Any]
    options: Mapping[str, Any] | None = None
    mode: str | None = None
    dynamic: bool | None = None
    config: Mapping[str, Any] = field(default_factory=dict)  # Inductor's, patched while it runs

    @property
    def name(self) -> str:
        """The name of the backend in reports."""
        if isinstance(self.backend, str):
            return self.backend
        return getattr(self.backend, "__name__", type(self.backend).__name__)
