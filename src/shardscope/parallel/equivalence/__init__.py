"""Compares a step of a parallel model with the same step on a single device, tensor by tensor.

The model as the user wrote it, on a single device, is called the original. A step (`step.py`) runs
on every rank, and on the single device in several variants (`runs.py`): as it is, in double
precision, and with perturbed weights. Each run gives a `StepResult`: outputs, gradients and
changed buffers, and of training steps (`training.py`) also losses and what the optimizer does.
`cases.py` pairs the tensors of all runs and measures the noise floor of each; `compare.py` decides
whether a tensor agrees, as a full tensor or as shards, of which `tensor_shards.py` finds the
layout. `parameters.py` finds out which elements of the original's parameters each rank holds, where
names and shapes do not determine it.

    runs = run_all(model, Task(inputs))
    verdicts = [compare_case(case).verdict for case in make_cases(runs, ranks, sizes)]
"""

from shardscope.parallel.equivalence.cases import (
    OF_A_RANK,
    Case,
    Mesh,
    Runs,
    drop_extra_calls,
    make_cases,
)
from shardscope.parallel.equivalence.compare import (
    TensorComparison,
    compare,
    compare_case,
    describe_dtype,
    name_dtype,
)
from shardscope.parallel.equivalence.declared import Declared, read_declared
from shardscope.parallel.equivalence.model_calls import is_cleared
from shardscope.parallel.equivalence.names import (
    OriginalNames,
    named_buffers,
    named_parameters,
    named_tensors,
    tie_names,
)
from shardscope.parallel.equivalence.parameters import TracedWeights, is_unclear
from shardscope.parallel.equivalence.random_numbers import (
    DRAWN,
    Draws,
    MeanRngMode,
    RandomNumbers,
    find_common_seeds,
)
from shardscope.parallel.equivalence.runs import (
    AS_IT_IS,
    MARKED,
    Variant,
    as_model,
    copy_model,
    draws_numbers,
    run_all,
    run_fp64,
    run_task,
)
from shardscope.parallel.equivalence.step import (
    Probe,
    ProbedStep,
    Task,
    call_model,
    default_loss,
    execute,
    shard_batch,
)
from shardscope.parallel.equivalence.step_result import (
    EVALUATION,
    Region,
    StepResult,
    describe_local,
    find_stages,
    gather_result,
    keep_local,
)
from shardscope.parallel.equivalence.tensor_shards import (
    Layout,
    Order,
    ranks_across,
    ranks_along,
    ranks_by_distance,
    shard_layouts,
)
from shardscope.parallel.equivalence.training import (
    UPDATED,
    Key,
    Table,
    Training,
    TrainingRecorder,
    TrainingValues,
    TrainStep,
)

__all__ = [
    "AS_IT_IS",
    "DRAWN",
    "EVALUATION",
    "MARKED",
    "OF_A_RANK",
    "UPDATED",
    "Case",
    "Declared",
    "Draws",
    "Key",
    "Layout",
    "MeanRngMode",
    "Mesh",
    "Order",
    "OriginalNames",
    "Probe",
    "ProbedStep",
    "RandomNumbers",
    "Region",
    "Runs",
    "StepResult",
    "Table",
    "Task",
    "TensorComparison",
    "TracedWeights",
    "TrainStep",
    "Training",
    "TrainingRecorder",
    "TrainingValues",
    "Variant",
    "as_model",
    "call_model",
    "compare",
    "compare_case",
    "copy_model",
    "default_loss",
    "describe_dtype",
    "describe_local",
    "draws_numbers",
    "drop_extra_calls",
    "execute",
    "find_common_seeds",
    "find_stages",
    "gather_result",
    "is_cleared",
    "is_unclear",
    "keep_local",
    "make_cases",
    "name_dtype",
    "named_buffers",
    "named_parameters",
    "named_tensors",
    "ranks_across",
    "ranks_along",
    "ranks_by_distance",
    "read_declared",
    "run_all",
    "run_fp64",
    "run_task",
    "shard_batch",
    "shard_layouts",
    "tie_names",
]
