"""Reads the files that ranks leave behind, one module for each format.

`registry.py` recognizes a file by its content and calls the reader; `worker.py` does so in another
process, for many files. A reader returns evidence of ranks, and gaps for what it could not read. It
never runs what is in a file. Imports `evidence`, `record` and `errors`.
"""

from __future__ import annotations

from shardscope.hang.readers.registry import read_paths

__all__ = ["read_paths"]
