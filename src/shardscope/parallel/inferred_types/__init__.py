"""`infer_types`: how every tensor is distributed along each mesh axis, inferred from its values.

`samples.py` runs the single device and all ranks (`parity`'s versions) with several sets of weights
and inputs. `candidates.py` finds which types the values of one tensor admit, and `inference.py` the
types that hold in all runs. `api.py` makes the record.
"""

from shardscope.parallel.inferred_types.api import infer_types

__all__ = ["infer_types"]
