"""torch's `explain`, ExplainOutput and ExplainWithBackend, with corrected counts.

torch reports the number of graphs minus one as the number of breaks, so that no graph gives -1 and
recompilations count, and does not count method calls as ops. Here every stop of a trace is a break,
counted each time it occurs, and all ops count, as in `explaining`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from traceback import FrameSummary
from typing import Any, final

from torch import fx

from shardscope._torch.dynamo import (
    Stop,
    compile_and_keep_guards,
    describe_compile_times,
    look_up_backend,
    watch_compiles,
)
from shardscope._torch.dynamo_caches import fresh_caches
from shardscope.compile.explain.assemble import is_traced_without_break
from shardscope.compile.explain.break_sites import Sites
from shardscope.compile.explain.explain import compile_lock, run_as_it_is
from shardscope.compile.explain.frames import Frame, FrameLog, list_targets
from shardscope.compile.preserved_state import preserved_call_state


@final
@dataclass(frozen=True)
class BreakReason:
    """Why a trace stopped before there was a graph, with the attributes of torch's reasons."""

    reason: str
    user_stack: list[FrameSummary]
    graph_break: bool = True


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
        return "".join(self._lines())

    def _lines(self) -> Iterator[str]:
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
        yield from (f"    {item}\n" for item in group)


def explain(f: Callable[..., Any], *extra_args: Any, **extra_kwargs: Any) -> Any:
    """Return a function that compiles `f`, calls it once and counts graphs, breaks and ops.

    Unlike `torch._dynamo.explain`, it restores caches, buffers, gradients, arguments and random
    state, and counts breaks that happened instead of graphs minus one.

    Args:
        f: A function or module.
        *extra_args: Deprecated, as in torch: arguments to call `f` with at once.
        **extra_kwargs: Deprecated, as in torch: keyword arguments to call `f` with at once.

    Examples:
        >>> output = explain(model)(tokens)
        >>> output.graph_count, output.graph_break_count, output.op_count
    """
    if not extra_args and not extra_kwargs:
        return lambda *args, **kwargs: _explain_call(f, args, kwargs)
    warnings.warn(
        "explain(f, *args, **kwargs) is deprecated, use explain(f)(*args, **kwargs) instead.",
        FutureWarning,
        stacklevel=2,
    )
    return _explain_call(f, extra_args, extra_kwargs)


def _explain_call(f: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> ExplainOutput:
    graphs: list[fx.GraphModule] = []
    guards: list[Any] = []

    def keep(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return run_as_it_is(graph, inputs)

    log = FrameLog()
    with compile_lock, preserved_call_state(f, args, kwargs), fresh_caches(), watch_compiles(log):
        compile_and_keep_guards(f, keep, guards)(*args, **kwargs)
        times = describe_compile_times()
    reasons = _list_reasons(frame for frame in log.frames if _is_for(frame, keep))
    ops = [list_targets(graph) for graph in graphs]
    return ExplainOutput(
        graphs=graphs,
        graph_count=len(graphs),
        graph_break_count=len(reasons),
        break_reasons=reasons,
        op_count=sum(map(len, ops)),
        ops_per_graph=ops,
        out_guards=guards,
        compile_times=times,
    )


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
        self._is_inductor = backend == "inductor"
        self._log = FrameLog()
        observation = ExitStack()
        observation.enter_context(watch_compiles(self._log))
        self._stop_observing = weakref.finalize(self, observation.close)

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any], **kwargs: Any) -> Any:
        self.graphs.append(gm)
        self.op_count += len(list_targets(gm))
        return self.backend(gm, example_inputs, **self._translate(kwargs))

    def _translate(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments for the backend: inductor takes `options=` under another name."""
        if self._is_inductor and "options" in kwargs:
            kwargs = {**kwargs, "config_patches": kwargs["options"]}
            del kwargs["options"]
        return kwargs

    @property
    def break_reasons(self) -> list[Any]:
        """Why traces stopped so far."""
        return _list_reasons(frame for frame in self._log.frames if _is_for(frame, self))

    def output(self) -> ExplainOutput:
        """The counts so far."""
        reasons = self.break_reasons
        return ExplainOutput(self.graphs, len(self.graphs), len(reasons), reasons, self.op_count)


def _is_for(frame: Frame, backend: object) -> bool:
    return frame.end is not None and frame.end.backend is backend


def _list_reasons(frames: Iterable[Frame]) -> list[Any]:
    """Why traces stopped: torch's reason, or a `BreakReason` if there was no graph."""
    sites, reasons = Sites(), list[Any]()
    for frame in frames:
        if frame.stop is None or is_traced_without_break(frame):
            continue
        num_events = sites.num_events
        sites.add(frame, frame.stop)
        if sites.num_events > num_events:
            own = [reason for reason in frame.reasons if reason is not None and reason.graph_break]
            reasons.append(own[-1] if own else _make_reason(frame.stop))
    return reasons


def _make_reason(stop: Stop) -> BreakReason:
    stack = [FrameSummary(line.file, line.line, line.function) for line in stop.stack]
    return BreakReason(stop.message, stack)
