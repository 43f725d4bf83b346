"""The programs of ranks, made on request, and as modules to call or train.

`RankPrograms` lowers, exports and differentiates a partitioned graph for any rank. `RankModule` and
`TrainingModule` hold one rank's shards under the model's names and run its program as generated
Python code.
"""

from shardscope.parallel.runtime.rank_programs import RankPrograms, is_without_data

__all__ = ["RankPrograms", "is_without_data"]
