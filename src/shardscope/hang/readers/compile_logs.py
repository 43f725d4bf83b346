"""Reads structured logs of torch.compile (TORCH_TRACE), which tlparse reads too.

Each line has metadata as JSON; lines that begin with a tab are the payload of the line before.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Struct

from shardscope.hang.evidence import CompileEvent, FileFormat, FileReport, RankEvidence

_LINE = re.compile(rb"^V\d{4} \d\d:\d\d:\d\d\.\d+ \d+ \S+\] (?P<json>\{.*\})$")
_NAME = re.compile(r"dedicated_log_torch_trace_(?:rank_(?P<rank>\d{1,7})_)?")
_MAX_COMPILATIONS = 20_000
_MAX_PAYLOAD_LINES = 20_000
_SCHEDULE = "inductor_collective_schedule"
_CACHES = {
    "fx_graph_cache_hit": True,
    "fx_graph_cache_miss": False,
    "aotautograd_cache_hit": True,
    "aotautograd_cache_miss": False,
}
_ARTIFACTS = (b'"artifact"', b'"dynamo_start"', b'"chromium_event"', b'"compilation_metrics"')


class _Artifact(Struct):
    name: str = ""


class _Frame(Struct):
    line: int = 0
    name: str = ""


class _Start(Struct):
    stack: list[_Frame] = []


class _Metadata(Struct):
    """The metadata of a line that is used here."""

    artifact: _Artifact | None = None
    dynamo_start: _Start | None = None
    chromium_event: msgspec.Raw | None = None
    compilation_metrics: msgspec.Raw | None = None
    rank: int | None = None
    frame_id: int | None = None
    frame_compile_id: int | None = None
    attempt: int = 0
    compiled_autograd_id: int | None = None
    has_payload: str | None = None


class _TraceEvent(Struct):
    name: str = ""
    ph: str = ""


class _Compilation(Struct):
    function: str = ""
    collectives: tuple[str, ...] | None = None
    is_cached: bool | None = None
    open_events: list[str] = []
    is_done: bool = False


_METADATA = msgspec.json.Decoder(_Metadata, strict=False)
_TRACE_EVENT = msgspec.json.Decoder(_TraceEvent)
_TEXTS = msgspec.json.Decoder(list[str | None])


def is_compile_log(data: bytes) -> bool:
    """Whether a file begins as a structured log of torch.compile."""
    return any(_LINE.match(line) for line in data[:20_000].split(b"\n")[:20])


def read_compile_log(data: bytes, path: str) -> FileReport:
    """The compilations of the rank that wrote the log."""
    compilations: dict[str, _Compilation] = {}
    name = _NAME.search(path.rpartition("/")[2])
    rank = int(name["rank"]) if name is not None and name["rank"] else None
    lines = data.split(b"\n")
    for index, line in enumerate(lines):
        if not line.startswith(b"V") or not any(key in line for key in _ARTIFACTS):
            continue
        match = _LINE.match(line)
        if match is None:
            continue
        try:
            metadata = _METADATA.decode(match["json"])
        except (msgspec.MsgspecError, RecursionError, ValueError):
            continue
        rank = metadata.rank if rank is None else rank
        identity = _name_compilation(metadata)
        if identity and len(compilations) < _MAX_COMPILATIONS:
            compilation = compilations.setdefault(identity, _Compilation())
            _read_line(compilation, metadata, lines, index)
    return FileReport(
        path=path,
        format=FileFormat.TORCH_TRACE,
        ranks=(
            RankEvidence(
                path=path,
                format=FileFormat.TORCH_TRACE,
                rank=rank,
                compilations=tuple(
                    CompileEvent(
                        identity,
                        compilation.function,
                        compilation.collectives,
                        compilation.is_cached,
                        bool(compilation.open_events) and not compilation.is_done,
                    )
                    for identity, compilation in compilations.items()
                ),
            ),
        ),
    )


def _name_compilation(metadata: _Metadata) -> str:
    """The compile id as torch writes it, without the attempt: `0/1`, `!0/0/0`."""
    if metadata.frame_id is None or metadata.frame_compile_id is None:
        return ""
    prefix = "" if metadata.compiled_autograd_id is None else f"!{metadata.compiled_autograd_id}/"
    return f"{prefix}{metadata.frame_id}/{metadata.frame_compile_id}"


def _read_line(
    compilation: _Compilation, metadata: _Metadata, lines: list[bytes], index: int
) -> None:
    if metadata.dynamo_start is not None and metadata.dynamo_start.stack:
        compilation.function = metadata.dynamo_start.stack[-1].name
    elif metadata.compilation_metrics is not None:
        compilation.is_done = True
    elif metadata.artifact is not None:
        if metadata.artifact.name == _SCHEDULE:
            compilation.collectives = _read_schedule(_join_payload(lines, index))
        elif metadata.artifact.name in _CACHES:
            compilation.is_cached = _CACHES[metadata.artifact.name]
    elif metadata.chromium_event is not None:
        try:
            event = _TRACE_EVENT.decode(_join_payload(lines, index))
        except (msgspec.MsgspecError, RecursionError, ValueError):
            return
        if event.ph == "B":
            compilation.open_events.append(event.name)
        elif event.ph == "E" and event.name in compilation.open_events:
            compilation.open_events.remove(event.name)


def _join_payload(lines: list[bytes], index: int) -> bytes:
    end = index + 1
    while end < len(lines) and lines[end].startswith(b"\t") and end - index < _MAX_PAYLOAD_LINES:
        end += 1
    return b"\n".join(line[1:] for line in lines[index + 1 : end])


def _read_schedule(payload: bytes) -> tuple[str, ...] | None:
    """The collectives of a graph in order, without the waits for them."""
    try:
        names = _TEXTS.decode(payload)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
    return tuple(
        name.removeprefix("torch.ops.")
        for name in names
        if name is not None and "wait_tensor" not in name
    )
