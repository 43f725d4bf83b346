"""Runs the single device and all ranks several times, with other weights and inputs each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import nn

from shardscope._torch.random_state import preserved_random_state
from shardscope.attribution.tensors import map_tensors
from shardscope.errors import CollectiveError, RankError
from shardscope.parallel.equivalence import (
    MARKED,
    Mesh,
    ProbedStep,
    RandomNumbers,
    Runs,
    StepResult,
    TracedWeights,
    Variant,
    copy_model,
    draws_numbers,
    named_parameters,
    run_all,
    run_fp64,
    tie_names,
)
from shardscope.parallel.parity.probe import ModuleProbe, ProbeSpec
from shardscope.parallel.parity.versions import EagerVersion

Report = Callable[[str, str], None]
"""Takes gaps: the place, and the fact."""

_NOISE = 0.25  # of the typical magnitude of a tensor
_LEAST = 0.02  # the change of weights that are all zero


@final
@dataclass(frozen=True, eq=False)
class Sample:
    """The single device's runs and each rank's result, for one set of weights and inputs."""

    runs: Runs
    ranks: list[StepResult]
    mesh: Mesh
    probe: ModuleProbe  # the single device's


@final
@dataclass(frozen=True)
class _RunOptions:
    """How the runs of a sample are made: in double precision, without random numbers."""

    rng: RandomNumbers
    is_fp64: bool = True
    is_trained_only: bool = True  # calls of modules without gradients are left out


def take_samples(
    version: EagerVersion, count: int, *, report: Report, report_progress: Callable[[str], None]
) -> tuple[list[Sample], bool]:
    """The samples, and whether they were computed in double precision.

    The first has the weights and inputs as they are. Random numbers are replaced by their mean if
    the step draws some. A sample with changed weights that fails is left out, and reported.
    """
    rng = RandomNumbers(is_replaced=draws_numbers(version.model, version.task))
    report_progress("tracing the weights")
    renamed = _trace_weights(version, report)
    options = _RunOptions(rng)
    report_progress("running the original and all ranks")
    try:
        first = _take_sample(version, renamed, options)
    except Exception as error:  # noqa: BLE001 - a kernel may know no double precision
        report(
            "double precision",
            f"the model does not run in it ({type(error).__name__}: {error!s:.160}), so types were "
            "inferred in its own precision",
        )
        options = replace(options, is_fp64=False)
        first = _take_sample(version, renamed, options)
    if not first.runs.reference.snapshots:  # the step computes no gradients at all
        options = replace(options, is_trained_only=False)
        first = _take_sample(version, renamed, options)
    samples = [first]
    for index in range(1, count):
        report_progress(f"running with other weights and inputs ({index} of {count - 1})")
        try:
            samples.append(_take_sample(_perturb(version, index), renamed, options))
        except Exception as error:  # noqa: BLE001 - the weights as they are have run
            cause = error.__cause__ or error
            fact = f"a run failed ({type(cause).__name__}: {cause!s:.160}), and decides nothing"
            report("other weights and inputs", fact)
    return samples, options.is_fp64


def _trace_weights(version: EagerVersion, report: Report) -> dict[int, dict[str, str]]:
    """For each rank, the original's names of its modules that have other names."""
    named = dict(named_parameters(version.model))
    once = {name: named[name].detach() for name in set(tie_names(named).values())}
    original = {name: once[first] for name, first in tie_names(named).items()}
    try:
        marked = [steps[0] for steps in version.run(MARKED)]
    except (RankError, CollectiveError) as error:
        report("weights", f"not traced, as sharding other weights failed ({error!s:.200})")
        return {}
    traced = TracedWeights(original, marked, tuple(version.axes.values()))
    return {rank: traced.rename_modules(rank) for rank in range(len(marked))}


def _take_sample(
    version: EagerVersion, renamed: Mapping[int, Mapping[str, str]], options: _RunOptions
) -> Sample:
    probes: list[ModuleProbe] = []

    def make_probe() -> ProbedStep:
        probes.append(ModuleProbe(is_trained_only=options.is_trained_only))
        return ProbedStep(probes[-1])

    run = run_fp64 if options.is_fp64 else run_all
    runs = run(version.model, version.task, rng=options.rng, probe=make_probe)
    ranks = version.run(
        Variant(options.is_fp64, rng=options.rng),
        ProbeSpec(renamed=renamed, is_local=True, is_trained_only=options.is_trained_only),
    )
    names = list(version.axes)
    batch_axes = tuple(names.index(axis) for axis in version.batch_axes)
    mesh = Mesh(tuple(version.axes.values()), batch_axes, version.batch_dim)
    return Sample(runs[0], [steps[0] for steps in ranks], mesh, probes[0])


def _perturb(version: EagerVersion, index: int) -> EagerVersion:
    """The same version with other values in weights and inputs.

    Integers stay as they are: they may be indices, lengths or masks.
    """
    model = copy_model(version.model)
    generator = torch.Generator().manual_seed(version.task.seed + index)
    with torch.no_grad(), preserved_random_state():
        for tensor in _list_weights(model):
            tensor.copy_(_add_noise(tensor, generator, least=_LEAST))
    task = version.task

    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = _add_noise(tensor.detach(), generator)
        return changed.requires_grad_(tensor.requires_grad)

    inputs = map_tensors(task.inputs, change)
    return replace(version, model=model, task=task.with_inputs(inputs))


def _list_weights(model: nn.Module) -> Iterator[torch.Tensor]:
    """The parameters, each once. Buffers follow from the architecture, such as frequencies."""
    yield from {id(parameter): parameter for _, parameter in named_parameters(model)}.values()


def _add_noise(
    tensor: torch.Tensor, generator: torch.Generator, *, least: float = 0.0
) -> torch.Tensor:
    """The tensor with normal noise of a fraction of its typical magnitude; integers unchanged."""
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex) or not tensor.numel():
        return tensor.clone()
    wide = tensor.detach().cpu().to(torch.complex128 if tensor.dtype.is_complex else torch.float64)
    finite = torch.where(torch.isfinite(wide), wide, 0.0)
    scale = max(_NOISE * float(finite.abs().square().mean().sqrt()), least)
    noise = torch.randn(wide.shape, generator=generator, dtype=torch.float64)
    return (wide + scale * noise).to(tensor.dtype).to(tensor.device)
