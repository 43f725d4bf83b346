"""torch's own ExplainOutput and ExplainWithBackend: its names, and what it means by them.

torch calls one less than the number of graphs the number of breaks, and counts function calls alone
as ops. People who compare with older numbers want the same; who wants true ones uses `explaining`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

from torch import fx

from shardscope._torch.backend_names import look_up_backend

__all__ = ["ExplainOutput", "ExplainWithBackend"]


@dataclass(repr=False)
class ExplainOutput:
    """The result of `torch._dynamo.explain`; `str()` formats it as torch does."""

    graphs: list[fx.GraphModule]
    graph_count: int
    graph_break_count: int
    break_reasons: list[Any]
    op_count: int
    ops_per_graph: list[list[Any]] | None = None
    out_guards: list[Any] | None = None
    compile_times: str | None = None

    def __repr__(self) -> str:
        counts = f"{self.graph_count} graphs, {self.graph_break_count} graph breaks"
        return f"ExplainOutput({counts}, {self.op_count} ops)"

    def __str__(self) -> str:
        return "".join(self._pieces())

    def _pieces(self) -> Iterator[str]:
        yield f"Graph Count: {self.graph_count}\n"
        yield f"Graph Break Count: {self.graph_break_count}\n"
        yield f"Op Count: {self.op_count}\n"
        yield "Break Reasons:\n"
        for number, why in enumerate(self.break_reasons, start=1):
            yield f"  Break Reason {number}:\n    Reason: {why.reason}\n    User Stack:\n"
            yield from (f"      {line}\n" for line in why.user_stack)
        yield from _list_groups("Ops per Graph", "Ops", self.ops_per_graph)
        if self.out_guards is not None:
            yield "Out Guards:\n"
            for number, guard in enumerate(self.out_guards, start=1):
                yield f"  Guard {number}:\n    {guard}"
        if self.compile_times is not None:
            yield f"Compile Times: {self.compile_times}\n"


def _list_groups(title: str, name: str, groups: list[list[Any]] | None) -> Iterator[str]:
    if groups is None:
        return
    yield f"{title}:\n"
    for number, group in enumerate(groups, start=1):
        yield f"  {name} {number}:\n"
        yield from (f"    {one}\n" for one in group)


@final
class ExplainWithBackend:
    """A backend that counts graphs and ops on the way to another backend.

    Examples:
        >>> explained = ExplainWithBackend("inductor")
        >>> torch.compile(fn, backend=explained)(x)
        >>> print(explained.output())
    """

    def __init__(self, backend: str | Callable[..., Any]) -> None:
        self.backend = look_up_backend(backend)
        self.graphs: list[fx.GraphModule] = []
        self.op_count = 0
        self.break_reasons: list[Any] = []
        self._is_inductor = backend == "inductor"

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any], **kwargs: Any) -> Any:
        self.graphs.append(gm)
        self.op_count += sum(node.op == "call_function" for node in gm.graph.nodes)
        why = getattr(gm, "compile_subgraph_reason", None)
        if why is not None and why.graph_break:
            self.break_reasons.append(why)
        return self.backend(gm, example_inputs, **self._translate(kwargs))

    def _translate(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """torch.compile(options=…) for backends; inductor has a name of its own for them."""
        if self._is_inductor and "options" in kwargs:
            kwargs = {**kwargs, "config_patches": kwargs["options"]}
            del kwargs["options"]
        return kwargs

    def output(self) -> ExplainOutput:
        """What was counted so far, in torch's way."""
        num_graphs = len(self.graphs)
        return ExplainOutput(
            self.graphs, num_graphs, num_graphs - 1, self.break_reasons, self.op_count
        )
