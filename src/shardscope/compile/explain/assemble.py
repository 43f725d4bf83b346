"""An explanation, made of what the compiler told."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from shardscope._torch.compile_times import Durations
from shardscope.comm.lines import user_source
from shardscope.compile.explain.frames import Frame, FrameLog, function_name
from shardscope.compile.explain.graphs import RawGraph, RawOp
from shardscope.compile.explain.guards import clean_guard, is_users
from shardscope.compile.explain.sites import Sites, first_line
from shardscope.compile.explain.stages import measure_stages
from shardscope.record import (
    CompiledGraph,
    Explanation,
    FrameGuards,
    GraphCollective,
    GraphEnd,
    GraphOp,
    Recompile,
    SkippedFrame,
    compress_ranks,
    replace_surrogates,
)

__all__ = ["assemble", "is_whole"]

_GENERATOR = "Attempt to trace generator"
_LIMIT = "it was recompiled too often, each time for different guards"


def assemble(
    log: FrameLog, *, rank: int, target: str, failure: str, before: Durations, after: Durations
) -> Explanation:
    """The record of what was compiled while `log` was written."""
    sites = Sites()
    site_of = {
        id(frame): sites.add(frame, frame.stop)
        for frame in log.frames
        if frame.stop is not None and not is_whole(frame)
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


def is_whole(frame: Frame) -> bool:
    """Whether only the first of several attempts to trace it stopped."""
    return bool(frame.graphs) and not any(graph.is_broken for graph in frame.graphs)


def _name(frame: Frame, target: str) -> str:
    """A function's name; torch puts one of its own around modules that are its own."""
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
                fingerprint=_hash(f"{one.op} {one.result} {one.within}" for one in raw.ops),
                ops=tuple(_make_op(one) for one in raw.ops),
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
        for one in graph.ops:
            if one.group is not None:
                yield GraphCollective(
                    graph=index,
                    op=one.op,
                    result=one.result,
                    group=compress_ranks(sorted(one.group)),
                    source=user_source(one.stack_trace),
                )


def _make_guards(frames: Sequence[Frame], target: str) -> Iterator[FrameGuards]:
    for frame in frames:
        if frame.end is not None and frame.end.is_compiled:
            texts = dict.fromkeys(clean_guard(one) for one in frame.end.guards if is_users(one))
            yield FrameGuards(
                compile_id=frame.end.compile_id,
                function=_name(frame, target),
                guards=tuple(replace_surrogates(one) for one in texts if one),
            )
