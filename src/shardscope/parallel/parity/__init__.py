"""`parity`: whether a parallel version of a model computes what the model on a single device does.

`api.py` makes a version of the model (`versions.py`), sharded by the user's function or partitioned
by a plan, whose ranks run in threads or, with `processes.py`, in processes.
`pipeline.py` runs and compares both versions (package `equivalence`), and revises verdicts with
more runs (`recheck.py`). Where something differs, it runs both again with probes (`probe.py`) to
find the first module (`locate.py`) and op (`first_op.py`) that differ. `causes.py` and
`origin_causes.py` infer why from the values; `ties.py` explains tied parameters that are no longer
tied. `problems.py` groups differences by cause, and `api.py` makes the record.
"""

from shardscope.parallel.parity.api import parity

__all__ = ["parity"]
