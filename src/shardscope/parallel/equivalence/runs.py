"""Runs a model on the single device: as it is, in double precision, perturbed, without RNG."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import final

import torch
from torch import nn
from torch.export import ExportedProgram

from shardscope._torch.random_state import preserved_random_state, seed_generators
from shardscope.errors import ParityError, ShardscopeError
from shardscope.numerics import (
    RngUseMode,
    convert_inputs_to_fp64,
    convert_model_to_fp64,
    fp64_mode,
    main_dtype,
    perturb_ulp_,
    to_fp64,
)
from shardscope.parallel.equivalence.cases import Runs
from shardscope.parallel.equivalence.names import named_parameters, tie_names
from shardscope.parallel.equivalence.parameters import mark_weights
from shardscope.parallel.equivalence.random_numbers import DRAWN, RandomNumbers
from shardscope.parallel.equivalence.step import ProbedStep, Task, execute
from shardscope.parallel.equivalence.step_result import StepResult


class Perturbation(Enum):
    """Whether weights change by one unit in the last place: of their own dtype or of float64."""

    NONE = "none"
    OWN = "own"
    DOUBLE = "double"


@final
@dataclass(frozen=True)
class Variant:
    """How a run differs from the original: double precision, perturbed weights, no random numbers.

    With `is_marked` no step runs: weights are marks, and the model is only sharded.
    """

    is_fp64: bool = False
    perturbation: Perturbation = Perturbation.NONE
    rng: RandomNumbers = DRAWN
    is_marked: bool = False

    @property
    def is_observed(self) -> bool:
        """Whether the run is that of the program as it is, whose random numbers are noted."""
        return self == AS_IT_IS

    @contextmanager
    def applied(self, model: nn.Module, task: Task) -> Iterator[Task]:
        """Change the model before it is sharded, and the computation until the context ends."""
        narrow, inputs = main_dtype(model), task.inputs
        if self.perturbation is Perturbation.OWN:
            inputs = perturb_ulp_(model, inputs)
        with ExitStack() as stack:
            if self.is_fp64:
                convert_model_to_fp64(model)
                inputs = convert_inputs_to_fp64(inputs)
                stack.enter_context(fp64_mode(narrow))
            if self.is_marked:
                mark_weights(model)
            if self.perturbation is Perturbation.DOUBLE:
                inputs = perturb_ulp_(model, inputs)
            stack.enter_context(self.rng.replacing())
            yield task.with_inputs(inputs)

    def convert(self, value: object) -> object:
        """A constant of the program, in double precision if the variant computes in it."""
        return to_fp64(value) if self.is_fp64 and isinstance(value, torch.Tensor) else value

    def adapt(self, model: nn.Module) -> None:
        """Convert the sharded model to double precision if sharding has not kept it."""
        if self.is_fp64 and main_dtype(model) is not torch.float64:
            convert_model_to_fp64(model)


AS_IT_IS = Variant()
MARKED = Variant(is_fp64=True, is_marked=True)


Report = Callable[[str, str], None]
MakeProbe = Callable[[], ProbedStep | None]


def run_task(
    model: nn.Module, task: Task, variant: Variant = AS_IT_IS, *, probed: ProbedStep | None = None
) -> list[StepResult]:
    """Run any task on a copy of the model, in any variant; the result of each step."""
    model_copy = copy_model(model)
    with preserved_random_state(), variant.applied(model_copy, task) as applied:
        seed_generators(task.seed)
        has_observer = variant.is_observed and probed is None
        return execute(model_copy, applied, probed=probed, has_observer=has_observer)


def run_all(
    model: nn.Module,
    task: Task,
    *,
    rng: RandomNumbers = DRAWN,
    precision: torch.dtype | None = None,
    report: Report = lambda *_: None,
    probe: MakeProbe = lambda: None,
) -> list[Runs]:
    """All runs of the single device, of each step; `probe` makes a probe for each run.

    `report` is called with a place and a fact for each run that fails, such as that in double
    precision; the noise is then estimated from the others.
    """

    def run(
        *, is_fp64: bool = False, perturbation: Perturbation = Perturbation.NONE
    ) -> list[StepResult]:
        return run_task(model, task, Variant(is_fp64, perturbation, rng), probed=probe())

    reference = _run_first(run, "without random numbers " if rng.is_replaced else "")
    _add_parameters(reference, _read_parameters(model))
    try:
        rounded = run(perturbation=Perturbation.OWN)
    except Exception as error:  # noqa: BLE001 - weights may be views that cannot be written
        fact = f"the weights cannot be perturbed to measure it ({_format_error(error)})"
        report("rounding noise", fact)
        rounded = reference
    try:
        fp64, perturbed_fp64 = run(is_fp64=True), run(is_fp64=True, perturbation=Perturbation.OWN)
    except Exception as error:  # noqa: BLE001 - a kernel may know no double precision
        report(
            "double precision",
            f"the original does not run in it ({_format_error(error)}), so the noise is estimated "
            "from runs with weights changed by one unit in the last place",
        )
        return [
            Runs(single, None, ((single_rounded, None),), precision)
            for single, single_rounded in zip(reference, rounded, strict=True)
        ]
    steps = zip(reference, fp64, rounded, perturbed_fp64, strict=True)
    return [
        Runs(single, exact, ((single_rounded, perturbed),), precision)
        for single, exact, single_rounded, perturbed in steps
    ]


def _add_parameters(steps: Sequence[StepResult], parameters: dict[str, torch.Tensor]) -> None:
    """Note the parameters before the run in the results of its steps."""
    for result in steps:
        result.parameters.update(parameters)


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error!s:.160}"


def _run_first(run: Callable[[], list[StepResult]], how: str) -> list[StepResult]:
    try:
        return run()
    except ShardscopeError:
        raise
    except Exception as error:
        raise ParityError(
            f"a copy of the original model fails {how}on a single device ({_format_error(error)}). "
            "Check that copy.deepcopy(model) runs with these inputs and this loss or step."
        ) from error


def run_fp64(
    model: nn.Module, task: Task, *, rng: RandomNumbers = DRAWN, probe: MakeProbe = lambda: None
) -> list[Runs]:
    """The runs of each step, to compare with ranks that compute in double precision."""
    fp64 = run_task(model, task, Variant(True, Perturbation.NONE, rng), probed=probe())
    _add_parameters(fp64, _read_parameters(model, to_fp64))
    perturbed = run_task(model, task, Variant(True, Perturbation.DOUBLE, rng), probed=probe())
    return [
        Runs(exact, None, ((moved, None),)) for exact, moved in zip(fp64, perturbed, strict=True)
    ]


def _read_parameters(
    model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
) -> dict[str, torch.Tensor]:
    """The parameters, detached; the names of a tied parameter share one tensor."""
    named = dict(named_parameters(model))
    once = {name: change(named[name].detach()) for name in set(tie_names(named).values())}
    return {name: once[first] for name, first in tie_names(named).items()}


def draws_numbers(model: nn.Module, task: Task) -> bool:
    """Whether a step draws random numbers."""
    model_copy = copy_model(model)
    attached = RngUseMode()
    with preserved_random_state(), attached:
        execute(model_copy, task)
    return attached.has_drawn


def as_model(model: nn.Module | ExportedProgram) -> nn.Module:
    """The model, or a callable module that shares its tensors with an exported program."""
    return model.module() if isinstance(model, ExportedProgram) else model


def copy_model(model: nn.Module) -> nn.Module:
    """A copy of the model without gradients; tied parameters stay tied."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # graph modules made by torch use deprecated attributes
            model_copy = copy.deepcopy(model)
    except Exception as error:
        raise ParityError(
            f"the model cannot be copied with copy.deepcopy ({_format_error(error)}), and each "
            "rank needs a copy. Remove attributes that cannot be copied, such as open files or "
            "results of earlier calls."
        ) from error
    model_copy.zero_grad(set_to_none=True)
    return model_copy
