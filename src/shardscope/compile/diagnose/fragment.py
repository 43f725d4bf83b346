"""A piece of a program with the values that it is called with: what the search compiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from torch import fx

__all__ = ["Fragment"]


@final
@dataclass(frozen=True)
class Fragment:
    """A graph, and one value for each of its placeholders, in their order.

    The graph's output is a flat tuple of nodes and constants. Nodes keep what dynamo knows of them
    in `meta` (`stack_trace`, `nn_module_stack`). Tensors among `inputs` ask for gradients where
    those that the program passed did, and are leaves where those were (see `leaves`); whoever runs
    a fragment copies them first.
    """

    graph: fx.GraphModule
    inputs: tuple[Any, ...]
    with_gradients: bool  # whether they are recorded when it runs, and compared where there are any
    has_open_sizes: bool = False  # whether dynamo gave sizes as symbols, and not as numbers
