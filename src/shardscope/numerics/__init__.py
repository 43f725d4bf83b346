"""Decides whether two results are numerically equal; every other package asks this one.

There are no fixed tolerances. The allowed error of a result is a multiple of the error that
rounding explains in it, which is measured: by a run in double precision, and by runs with perturbed
rounding, weights or inputs (`precision.py`). `noise.py` makes limits of these runs: a `NoiseFloor`
for a tensor (parity, coverage, verification of partitioned programs), or `Bounds` for each element.
`compare.py` compares all values of a compiled function with eager execution within such bounds.
`standalone.py` is the same comparison in a few lines of torch, which diagnose pastes into repro
scripts.

    floor = find_floor(to_fp64_on_cpu(reference), None, (), reference.dtype)
    floor.covers(value, reference)
"""

from shardscope.numerics.compare import (
    Values,
    ValueVerdict,
    compare,
    compare_value,
    find_distance,
    is_changed,
)
from shardscope.numerics.noise import (
    Distance,
    NoiseFloor,
    epsilon,
    find_floor,
    find_own_floor,
    find_rms,
    find_worst,
    has_same_nonfinite,
    is_finite,
    is_inexact,
    measure,
    to_fp64_on_cpu,
    unravel,
)
from shardscope.numerics.precision import (
    RandomRounding,
    RngUseMode,
    convert_inputs_to_fp64,
    convert_model_to_fp64,
    fp64_mode,
    is_random,
    main_dtype,
    perturb_ulp,
    perturb_ulp_,
    to_fp64,
)
from shardscope.numerics.standalone import check, comparison_source

__all__ = [
    "Distance",
    "NoiseFloor",
    "RandomRounding",
    "RngUseMode",
    "ValueVerdict",
    "Values",
    "check",
    "compare",
    "compare_value",
    "comparison_source",
    "convert_inputs_to_fp64",
    "convert_model_to_fp64",
    "epsilon",
    "find_distance",
    "find_floor",
    "find_own_floor",
    "find_rms",
    "find_worst",
    "fp64_mode",
    "has_same_nonfinite",
    "is_changed",
    "is_finite",
    "is_inexact",
    "is_random",
    "main_dtype",
    "measure",
    "perturb_ulp",
    "perturb_ulp_",
    "to_fp64",
    "to_fp64_on_cpu",
    "unravel",
]
