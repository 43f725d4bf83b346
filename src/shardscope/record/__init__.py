"""WHAT WE KNOW: frozen records and their codec; of ours imports errors alone, and no torch."""

from __future__ import annotations

from shardscope.record.codec import encode, encode_pieces, load, save
from shardscope.record.encoding import replace_surrogates
from shardscope.record.merge import merge, merge_files
from shardscope.record.output import check_output, write_file
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
    Axis,
    BucketReduce,
    Call,
    Cause,
    Collective,
    CollectiveKind,
    Compiled,
    Finding,
    FullyShard,
    Gap,
    Group,
    Module,
    Parameter,
    Phase,
    Recording,
    Redistribute,
    RunInfo,
    Severity,
    Source,
)
from shardscope.record.replay import read_stream
from shardscope.record.stream import StreamWriter

__all__ = [
    "FORMAT",
    "SCHEMA",
    "Axis",
    "BucketReduce",
    "Call",
    "Cause",
    "Collective",
    "CollectiveKind",
    "Compiled",
    "Finding",
    "FullyShard",
    "Gap",
    "Group",
    "Module",
    "Parameter",
    "Phase",
    "RankSpan",
    "Recording",
    "Redistribute",
    "RunInfo",
    "Severity",
    "Source",
    "StreamWriter",
    "check_output",
    "compress_ranks",
    "count_ranks",
    "encode",
    "encode_pieces",
    "expand_ranks",
    "format_ranks",
    "load",
    "merge",
    "merge_files",
    "rank_at",
    "read_stream",
    "replace_surrogates",
    "save",
    "write_file",
]
