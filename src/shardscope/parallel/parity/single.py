"""The single device: the original as it is, in double precision, and with other last places."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from shardscope._torch.random_state import preserved_random_state, seed_generators
from shardscope.errors import ParityError, ShardscopeError
from shardscope.numerics.draws import Watching
from shardscope.numerics.widen import widen_tensor
from shardscope.parallel.parity.cases import Runs
from shardscope.parallel.parity.execute import Probe, execute, named_parameters
from shardscope.parallel.parity.outcome import Outcome, tie_names
from shardscope.parallel.parity.task import Task
from shardscope.parallel.parity.variants import AS_IT_IS, EXACT, Jitter, Variant

__all__ = [
    "as_model",
    "copy_model",
    "draws_numbers",
    "run_all",
    "run_exact",
    "run_single",
    "run_task",
]

Report = Callable[[str, str], None]
MakeProbe = Callable[[], Probe | None]


def run_single(
    model: nn.Module | ExportedProgram,
    inputs: Any,
    loss: Callable[[Any], Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Outcome:
    """Run a copy of the original forwards and backwards; nothing of it is changed.

    A mapping of inputs is taken for keywords, a tuple or list for arguments. `dtype` may be
    torch.float64, for the exact result.
    """
    variant = EXACT if dtype is torch.float64 else AS_IT_IS
    return run_task(as_model(model), Task(inputs, loss, seed=seed), variant)


def run_task(
    model: nn.Module, task: Task, variant: Variant = AS_IT_IS, *, probe: Probe | None = None
) -> Outcome:
    """The same for any task, in any variant."""
    own = copy_model(model)
    with preserved_random_state(), variant.applied(own, task) as applied:
        seed_generators(task.seed)
        return execute(own, applied, probe=probe)


def run_all(
    model: nn.Module,
    task: Task,
    *,
    is_steady: bool = False,
    precision: torch.dtype | None = None,
    report: Report = lambda *_: None,
    probe: MakeProbe = lambda: None,
) -> Runs:
    """All runs of the single device; what cannot be had in double precision is reported."""

    def run(*, is_exact: bool = False, jitter: Jitter = Jitter.NONE) -> Outcome:
        return run_task(model, task, Variant(is_exact, jitter, is_steady), probe=probe())

    reference = _run_first(run, "without random numbers " if is_steady else "")
    reference.parameters.update(_read_parameters(model))
    try:
        rounded = run(jitter=Jitter.OWN)
    except Exception as error:  # noqa: BLE001 - weights may be views that cannot be written
        fact = f"the weights cannot be perturbed to measure it ({_say(error)})"
        report("rounding noise", fact)
        rounded = reference
    try:
        exact, other = run(is_exact=True), run(is_exact=True, jitter=Jitter.OWN)
    except Exception as error:  # noqa: BLE001 - a kernel may know no double precision
        report(
            "double precision",
            f"the original does not run in it ({_say(error)}), so the noise is estimated from runs "
            "with weights changed by one unit in the last place",
        )
        return Runs(reference, None, ((rounded, None),), precision)
    return Runs(reference, exact, ((rounded, other),), precision)


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error!s:.160}"


def _run_first(run: Callable[[], Outcome], how: str) -> Outcome:
    try:
        return run()
    except ShardscopeError:
        raise
    except Exception as error:
        raise ParityError(
            f"a copy of the original model fails {how}on a single device ({_say(error)}). Check "
            "that copy.deepcopy(model) runs with these inputs and this loss or step."
        ) from error


def run_exact(
    model: nn.Module, task: Task, *, is_steady: bool = False, probe: MakeProbe = lambda: None
) -> Runs:
    """The runs that a parallel version in double precision is compared with."""
    exact = run_task(model, task, Variant(True, Jitter.NONE, is_steady), probe=probe())
    exact.parameters.update(_read_parameters(model, widen_tensor))
    other = run_task(model, task, Variant(True, Jitter.DOUBLE, is_steady), probe=probe())
    return Runs(exact, None, ((other, None),))


def _read_parameters(
    model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
) -> dict[str, torch.Tensor]:
    """The parameters without their gradients; tied ones are one tensor."""
    named = dict(named_parameters(model))
    once = {name: change(named[name].detach()) for name in set(tie_names(named).values())}
    return {name: once[first] for name, first in tie_names(named).items()}


def draws_numbers(model: nn.Module, task: Task) -> bool:
    """Whether a step draws random numbers."""
    own = copy_model(model)
    watching = Watching()
    with preserved_random_state(), watching:
        execute(own, task)
    return watching.has_drawn


def as_model(model: nn.Module | ExportedProgram) -> nn.Module:
    """A module to call; it shares its tensors with the program."""
    return model.module() if isinstance(model, ExportedProgram) else model


def copy_model(model: nn.Module) -> nn.Module:
    """A copy without gradients, tied as the original is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # graphs of torch's own making deprecate themselves
            own = copy.deepcopy(model)
    except Exception as error:
        raise ParityError(
            f"the model cannot be copied with copy.deepcopy ({_say(error)}), and each rank needs a "
            "copy. Remove attributes that cannot be copied, such as open files or results of "
            "earlier calls."
        ) from error
    own.zero_grad(set_to_none=True)
    return own
