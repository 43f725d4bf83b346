"""Runs a model on the single device: as it is, in double precision, perturbed, without RNG."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, final

import torch
from torch import nn
from torch.export import ExportedProgram

from shardscope._torch.dispatch import TorchDispatchMode, is_overload, name_arguments, op_packet
from shardscope._torch.snapshot import preserved_random_state, seed_generators
from shardscope._torch.tree import map_leaves
from shardscope.errors import ParityError, ShardscopeError
from shardscope.numerics import (
    RngUseMode,
    convert_inputs_to_fp64,
    convert_model_to_fp64,
    fp64_mode,
    is_random,
    main_dtype,
    perturb_ulp_,
    to_fp64,
)
from shardscope.parallel.equivalence.cases import Runs
from shardscope.parallel.equivalence.names import named_parameters, tie_names
from shardscope.parallel.equivalence.parameters import mark_weights
from shardscope.parallel.equivalence.step import ProbedStep, StepResult, Task, execute


@final
class MeanRngMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces random numbers by the mean of their distribution, and dropout by the identity."""

    supports_higher_order_operators = True  # torch would refuse to run them

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if not is_overload(func) or not is_random(func, args, kwargs):
            return func(*args, **kwargs)
        arguments = name_arguments(func, args, kwargs)
        name = op_packet(func).__name__
        if name == "native_dropout":
            return arguments["input"].clone(), torch.ones_like(arguments["input"], dtype=torch.bool)
        if name == "bernoulli" and arguments.get("p") is None:
            return arguments["self"].clone()
        if name == "randperm" and arguments.get("generator") is None:  # its own is seeded: an order
            drawn = func(*args, **kwargs)
            assert isinstance(drawn, torch.Tensor)
            return drawn.copy_(torch.arange(len(drawn)))
        if name in _MEANS:
            drawn = func(*args, **kwargs)  # for its shape, or as the destination
            return map_leaves(lambda value: _fill_with_mean(value, name, arguments), drawn)
        return func(*args, **kwargs)


# The mean of each distribution, from the arguments of its op.
_MEANS: dict[str, Callable[[Mapping[str, Any]], torch.Tensor | float]] = {
    "bernoulli": lambda arguments: arguments["p"],
    "bernoulli_": lambda arguments: arguments["p"],
    "exponential_": lambda arguments: 1 / arguments["lambd"],
    "normal": lambda arguments: arguments["mean"],
    "normal_": lambda arguments: arguments["mean"],
    "normal_functional": lambda arguments: arguments["mean"],
    "rand": lambda _: 0.5,
    "rand_like": lambda _: 0.5,
    "randint": lambda arguments: arguments.get("low") or 0,
    "randint_like": lambda arguments: arguments.get("low") or 0,
    "randn": lambda _: 0.0,
    "randn_like": lambda _: 0.0,
    "uniform": lambda arguments: (arguments["from"] + arguments["to"]) / 2,
    "uniform_": lambda arguments: (arguments["from"] + arguments["to"]) / 2,
}


def _fill_with_mean(drawn: object, name: str, arguments: Mapping[str, Any]) -> object:
    """Overwrite the random numbers that the op `name` drew with the mean of its distribution."""
    mean = _MEANS[name](arguments)
    if not isinstance(drawn, torch.Tensor):
        return drawn
    return drawn.copy_(mean) if isinstance(mean, torch.Tensor) else drawn.fill_(mean)


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
    is_deterministic: bool = False
    is_marked: bool = False

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
            if self.is_deterministic:
                stack.enter_context(MeanRngMode())  # type: ignore[no-untyped-call]
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
        return execute(model_copy, applied, probed=probed)


def run_all(
    model: nn.Module,
    task: Task,
    *,
    is_deterministic: bool = False,
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
        return run_task(
            model, task, Variant(is_fp64, perturbation, is_deterministic), probed=probe()
        )

    reference = _run_first(run, "without random numbers " if is_deterministic else "")
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
    model: nn.Module, task: Task, *, is_deterministic: bool = False, probe: MakeProbe = lambda: None
) -> list[Runs]:
    """The runs of each step, to compare with ranks that compute in double precision."""
    fp64 = run_task(model, task, Variant(True, Perturbation.NONE, is_deterministic), probed=probe())
    _add_parameters(fp64, _read_parameters(model, to_fp64))
    perturbed = run_task(
        model, task, Variant(True, Perturbation.DOUBLE, is_deterministic), probed=probe()
    )
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
