"""Assembles an explanation from the compiler's events."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from shardscope._torch.dynamo import Durations
from shardscope.attribution.call_sites import user_source
from shardscope.compile.explain.break_sites import Sites, first_line
from shardscope.compile.explain.frames import Frame, FrameLog, RawGraph, RawOp, function_name
from shardscope.compile.explain.guards import clean_guard, is_users
from shardscope.record import (
    CompiledGraph,
    Explanation,
    FrameGuards,
    GraphCollective,
    GraphEnd,
    GraphOp,
    Recompile,
    SkippedFrame,
    StageTime,
    compress_ranks,
    replace_surrogates,
)

_IN_BACKWARD = "inductor in backward"
# The stages that each stage calls; their time is subtracted.
_CALLS = {
    "frames": ("tracing", "guards", "backend"),
    "backend": ("aot",),
    "aot": ("inductor",),
    "backward": (_IN_BACKWARD,),
}
_NAMES = {"frames": "other"}


def measure_stages(before: Durations, after: Durations) -> tuple[StageTime, ...]:
    """The compiler stages that ran between two readings, with number and time of calls."""
    spent = {name: _subtract(after[name], before[name]) for name in after}
    return tuple(
        StageTime(
            stage=_NAMES.get(name, name),
            num_calls=num_calls,
            total_ns=_measure_own(name, spent),
        )
        for name, (num_calls, _) in spent.items()
        if num_calls and name != _IN_BACKWARD
    )


def _measure_own(name: str, spent: Durations) -> int | None:
    """The time of a stage without the stages that it calls, in nanoseconds; None if unknown.

    It is unknown if a called stage took longer than its caller, because something else, such as
    another kind of backend, called it too.
    """
    called = sum(spent[stage][1] for stage in _CALLS.get(name, ()) if stage in spent)
    if name == "aot" and spent.get("backward", (0, 0.0))[0]:
        called -= spent[_IN_BACKWARD][1]
    own_ns = round((spent[name][1] - called) * 1e9)
    return own_ns if own_ns >= 0 else None


def _subtract(after: tuple[int, float], before: tuple[int, float]) -> tuple[int, float]:
    return after[0] - before[0], after[1] - before[1]


_GENERATOR = "Attempt to trace generator"
_LIMIT = "it was recompiled too often, each time for different guards"


def assemble(
    log: FrameLog, *, rank: int, target: str, failure: str, before: Durations, after: Durations
) -> Explanation:
    """The explanation of what was compiled while `log` was recorded."""
    sites = Sites()
    site_of = {
        id(frame): sites.add(frame, frame.stop)
        for frame in log.frames
        if frame.stop is not None and not is_traced_without_break(frame)
    }
    graphs = tuple(_make_graphs(log.frames, site_of, target))
    raw = [graph for frame in log.frames for graph in frame.graphs]
    return Explanation(
        rank=rank,
        target=target,
        fingerprint=_hash(graph.fingerprint for graph in graphs),
        graphs=graphs,
        break_sites=sites.make_records(),
        recompiles=tuple(_make_recompiles(log.frames, target)),
        skipped_frames=tuple(_make_skips(log.frames, site_of, target)),
        collectives=tuple(_make_collectives(raw)),
        stages=measure_stages(before, after),
        guards=tuple(_make_guards(log.frames, target)) if log.has_guards else (),
        failure=failure,
    )


def is_traced_without_break(frame: Frame) -> bool:
    """Whether the last attempt to trace a frame had no break, though an earlier one stopped."""
    return bool(frame.graphs) and not any(graph.is_broken for graph in frame.graphs)


def _name(frame: Frame, target: str) -> str:
    """The name of a frame's function; `target` for torch's wrapper around a torch module."""
    return target if frame.is_torchs and target else function_name(frame.name)


def _make_graphs(
    frames: Sequence[Frame], site_of: dict[int, int], target: str
) -> Iterator[CompiledGraph]:
    index = 0
    for frame in frames:
        for raw in frame.graphs:
            site = site_of.get(id(frame)) if raw.is_broken else None
            yield CompiledGraph(
                index=index,
                compile_id=raw.compile_id,
                function=_name(frame, target),
                source=first_line(frame),
                num_inputs=raw.num_inputs,
                num_outputs=raw.num_outputs,
                end=_end_of(raw),
                break_site=site,
                is_recompile=frame.is_recompile,
                fingerprint=_hash(f"{op.op} {op.result} {op.within}" for op in raw.ops),
                ops=tuple(_make_op(op) for op in raw.ops),
            )
            index += 1


def _end_of(raw: RawGraph) -> GraphEnd:
    if raw.is_broken:
        return GraphEnd.BREAK
    return GraphEnd.RETURN if "return" in raw.reason else GraphEnd.OTHER


def _make_op(raw: RawOp) -> GraphOp:
    return GraphOp(
        kind=raw.kind,
        op=replace_surrogates(raw.op),
        result=raw.result,
        module=replace_surrogates(raw.module),
        within=raw.within,
        source=user_source(raw.stack_trace),
    )


def _hash(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _make_recompiles(frames: Sequence[Frame], target: str) -> Iterator[Recompile]:
    numbers: Counter[tuple[str, int, str]] = Counter()
    for frame in frames:
        if frame.failed_guard is None or frame.end is None or not frame.is_recompile:
            continue
        key = (frame.file, frame.line, frame.name)
        numbers[key] += 1
        yield Recompile(
            function=_name(frame, target),
            source=first_line(frame),
            number=numbers[key],
            compile_id=frame.end.compile_id,
            guard=replace_surrogates(frame.failed_guard.text),
            description=replace_surrogates(frame.failed_guard.description),
        )


def _make_skips(
    frames: Sequence[Frame], site_of: dict[int, int], target: str
) -> Iterator[SkippedFrame]:
    for frame in frames:
        if frame.end is None or frame.end.stop is None or frame.end.error is not None:
            continue
        yield SkippedFrame(
            function=_name(frame, target),
            source=first_line(frame),
            reason=_why_skipped(frame),
            break_site=site_of.get(id(frame)),
            is_rest=frame.is_resumed,
        )


def _why_skipped(frame: Frame) -> str:
    assert frame.end is not None
    assert frame.end.stop is not None
    kind = frame.end.stop.kind
    if frame.end.is_at_limit:
        return _LIMIT
    if kind == _GENERATOR:
        return "it is a generator, and they are compiled only as part of what calls them"
    if kind == "graph break in loop":
        return "the graph breaks in a loop"
    return "the graph breaks where it cannot be resumed"


def _make_collectives(graphs: Sequence[RawGraph]) -> Iterator[GraphCollective]:
    for index, graph in enumerate(graphs):
        for op in graph.ops:
            if op.group is not None:
                yield GraphCollective(
                    graph=index,
                    op=op.op,
                    result=op.result,
                    group=compress_ranks(sorted(op.group)),
                    source=user_source(op.stack_trace),
                )


def _make_guards(frames: Sequence[Frame], target: str) -> Iterator[FrameGuards]:
    for frame in frames:
        if frame.end is not None and frame.end.is_compiled:
            texts = dict.fromkeys(clean_guard(text) for text in frame.end.guards if is_users(text))
            yield FrameGuards(
                compile_id=frame.end.compile_id,
                function=_name(frame, target),
                guards=tuple(replace_surrogates(text) for text in texts if text),
            )
