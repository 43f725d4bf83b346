"""Reads files in another process: paths as JSON on standard input, reports on standard output."""

from __future__ import annotations

import gc
import sys

import msgspec

from shardscope.hang.readers.registry import read_path


def main() -> None:
    """Read all files that standard input names."""
    gc.disable()  # hundreds of thousands of small records, none of which is in a cycle
    paths = msgspec.json.decode(sys.stdin.buffer.read(), type=list[str])
    reports = [report for path in paths for report in read_path(path)]
    sys.stdout.buffer.write(msgspec.msgpack.encode(reports))


if __name__ == "__main__":
    main()
