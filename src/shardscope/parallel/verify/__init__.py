"""Verifies a partitioned program: all ranks, run in this process, against the single device.

`verify_ranks` first checks that the exported program computes what the model does (`fidelity`),
then runs the ranks in lockstep, collective by collective (`lockstep`), and compares every result.
`find_first_divergence` locates a difference.
"""

from shardscope.parallel.verify.verify import (
    Trial,
    divergence_error,
    find_first_divergence,
    flatten_arguments,
    join_results,
    make_trial,
    run_captured,
    run_ranks,
    shard_values,
    unverifiable_reason,
    verify_ranks,
)

__all__ = [
    "Trial",
    "divergence_error",
    "find_first_divergence",
    "flatten_arguments",
    "join_results",
    "make_trial",
    "run_captured",
    "run_ranks",
    "shard_values",
    "unverifiable_reason",
    "verify_ranks",
]
