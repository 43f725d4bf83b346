"""`python -m shardscope`: the command line."""

from __future__ import annotations

from shardscope.cli import main

main(prog_name="shardscope")
