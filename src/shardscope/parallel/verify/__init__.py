"""Verifies a partitioned program: all ranks, run in this process, against the single device.

`verify.py` decides what to run and compares the results; `lockstep.py` runs the ranks, collective
by collective.
"""

from shardscope.parallel.verify.lockstep import join_results, shard_values
from shardscope.parallel.verify.verify import (
    Trial,
    find_first_divergence,
    flatten_arguments,
    make_trial,
    run_ranks,
    unverifiable_reason,
    verify_ranks,
)

__all__ = [
    "Trial",
    "find_first_divergence",
    "flatten_arguments",
    "join_results",
    "make_trial",
    "run_ranks",
    "shard_values",
    "unverifiable_reason",
    "verify_ranks",
]
