"""WHAT WE KNOW: frozen records and their codec; of ours imports errors alone, and no torch."""

from __future__ import annotations

from shardscope.record.codec import encode, encode_pieces, load, save
from shardscope.record.coverage import Coverage, Level, Move, OpCoverage, Sharding, Verdict
from shardscope.record.diagnosis import Condition, Deviation, Diagnosis, Stage, SuspectOp
from shardscope.record.encoding import replace_surrogates
from shardscope.record.inert import make_inert
from shardscope.record.kinds import CollectiveKind
from shardscope.record.memory import MemoryKind, MemoryProfile, MemorySample, MemoryUse
from shardscope.record.merge import merge, merge_files
from shardscope.record.output import check_output, write_file
from shardscope.record.parallel import (
    Fallback,
    FallbackKind,
    Inserted,
    Parallelization,
    Placed,
    PlacedKind,
    RankMemory,
)
from shardscope.record.parity import (
    FINE,
    Agreement,
    Divergence,
    Parity,
    Suspect,
    TensorKind,
    TensorVerdict,
)
from shardscope.record.ranks import (
    RankSpan,
    compress_ranks,
    count_ranks,
    expand_ranks,
    format_ranks,
    rank_at,
)
from shardscope.record.recording import (
    FORMAT,
    SCHEMA,
    BucketReduce,
    Call,
    Cause,
    Collective,
    Compiled,
    Finding,
    FullyShard,
    Gap,
    Group,
    Mark,
    MarkKind,
    Module,
    Parameter,
    Recording,
    Redistribute,
    RunInfo,
    Severity,
)
from shardscope.record.replay import read_stream
from shardscope.record.slices import Slice, TensorLayout
from shardscope.record.source import Axis, Phase, Source
from shardscope.record.spans import PhaseTotal, Span, SpanBegin, sum_spans
from shardscope.record.stream import StreamWriter

__all__ = [
    "FINE",
    "FORMAT",
    "SCHEMA",
    "Agreement",
    "Axis",
    "BucketReduce",
    "Call",
    "Cause",
    "Collective",
    "CollectiveKind",
    "Compiled",
    "Condition",
    "Coverage",
    "Deviation",
    "Diagnosis",
    "Divergence",
    "Fallback",
    "FallbackKind",
    "Finding",
    "FullyShard",
    "Gap",
    "Group",
    "Inserted",
    "Level",
    "Mark",
    "MarkKind",
    "MemoryKind",
    "MemoryProfile",
    "MemorySample",
    "MemoryUse",
    "Module",
    "Move",
    "OpCoverage",
    "Parallelization",
    "Parameter",
    "Parity",
    "Phase",
    "PhaseTotal",
    "Placed",
    "PlacedKind",
    "RankMemory",
    "RankSpan",
    "Recording",
    "Redistribute",
    "RunInfo",
    "Severity",
    "Sharding",
    "Slice",
    "Source",
    "Span",
    "SpanBegin",
    "Stage",
    "StreamWriter",
    "Suspect",
    "SuspectOp",
    "TensorKind",
    "TensorLayout",
    "TensorVerdict",
    "Verdict",
    "check_output",
    "compress_ranks",
    "count_ranks",
    "encode",
    "encode_pieces",
    "expand_ranks",
    "format_ranks",
    "load",
    "make_inert",
    "merge",
    "merge_files",
    "rank_at",
    "read_stream",
    "replace_surrogates",
    "save",
    "sum_spans",
    "write_file",
]
