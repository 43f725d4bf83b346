"""Compares a parallel program with the model that it was made from, in this process.

`verify_ranks` compares the exported program with the model itself, and then all ranks, run in
lockstep, with the exported program. The first comparison is needed because torch.export drops
custom backward functions, hooks on tensors and nested no_grad() regions, which a comparison of the
ranks with the exported program would not find. `find_first_divergence` locates a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from shardscope._torch.dispatch import TorchDispatchMode
from shardscope._torch.random_state import preserved_random_state, seed_torch
from shardscope._torch.tree import pytree_flatten, pytree_unflatten
from shardscope.errors import ParallelError
from shardscope.numerics import fp64_mode, perturb_ulp, perturb_ulp_, to_fp64
from shardscope.parallel.equivalence import (
    MeanRngMode,
    Runs,
    StepResult,
    compare,
    named_buffers,
    named_parameters,
)
from shardscope.parallel.ir.graph import OpNode, Origin, ShardingGraph, Value, explained
from shardscope.parallel.ir.mesh import Mesh
from shardscope.parallel.ir.shard_spec import ShardSpec, unshard_tensor
from shardscope.parallel.passes import RankProgram, WithLoss
from shardscope.parallel.passes.backward import differentiate, trained_parameters
from shardscope.parallel.passes.capture import expand_objects
from shardscope.parallel.passes.exported import CallArguments
from shardscope.parallel.runtime import RankPrograms, is_without_data
from shardscope.parallel.verify.lockstep import (
    join_results,
    ranks_by_group,
    run_in_lockstep,
    shard_values,
)
from shardscope.record import FINE, TensorKind, TensorVerdict

RunSingle = Callable[[Sequence[object]], StepResult]
"""Runs the single-device program on its arguments."""


@final
@dataclass(frozen=True, eq=False)
class Trial:
    """The programs to compare: the single device's and each rank's, with the same arguments.

    `gradients` names the parameters whose gradients come after the graph's outputs.
    """

    graph: ShardingGraph
    mesh: Mesh
    single: Callable[..., Sequence[object]]
    ranks: Mapping[int, fx.GraphModule]
    gradients: tuple[str, ...] = ()
    names: tuple[str | None, ...] | None = None  # of the outputs; those without one are left out

    @property
    def result_specs(self) -> list[ShardSpec | None]:
        """The placements of each result; None for a result that is not a tensor."""
        outputs = [item for item, _ in self.graph.outputs]
        by_name = {role.name: value.spec for value, role in self.graph.inputs}
        return [
            *(
                item.spec if isinstance(item, Value) and item.is_tensor else None
                for item in outputs
            ),
            *(by_name[name] for name in self.gradients),
        ]

    def run_single(self, values: Sequence[object]) -> StepResult:
        """The results of the single-device program, by name."""
        return self.outcome(self.single(*values))

    def outcome(self, results: Sequence[object]) -> StepResult:
        """The results of a run, by name."""
        outputs, buffers = [], {}
        names = None if self.names is None else iter(self.names)
        for item, (_, role) in zip(results, self.graph.outputs, strict=False):
            if role.kind == "output":
                name = f"[{role.name}]" if names is None else next(names)
                if isinstance(item, Tensor) and name is not None:
                    outputs.append((name, item))
            elif isinstance(item, Tensor):
                buffers[role.name] = item
        gradient_values = results[len(self.graph.outputs) :]
        pairs = zip(self.gradients, gradient_values, strict=True)
        gradients = {name: value for name, value in pairs if isinstance(value, Tensor)}
        return StepResult(outputs, gradients, buffers, frozenset(buffers))


def make_trial(
    programs: RankPrograms, names: Sequence[str | None] | None = None, *, is_run: bool = True
) -> Trial:
    """The programs to compare; without ranks if they are not to be run.

    `names` are names for the program's outputs; outputs whose name is None are not compared.
    """
    output_names = None if names is None else tuple(names)
    ranks = programs.ranks if is_run else []
    single = fx.Interpreter(programs.single_device).run
    if not programs.is_training:
        graphs = {rank: programs.runnable_forward(rank).as_module() for rank in ranks}
        return Trial(programs.graph, programs.mesh, single, graphs, names=output_names)
    return Trial(
        programs.graph,
        programs.mesh,
        differentiate(programs.graph, single),
        {rank: programs.runnable_joint(rank) for rank in ranks},
        tuple(trained_parameters(programs.graph)),
        output_names,
    )


def verify_ranks(
    programs: RankPrograms,
    example: CallArguments,
    values: Sequence[object],
    original: Callable[[], nn.Module] | None,
) -> list[TensorVerdict]:
    """Compare the exported program with the model itself, then all ranks with the program.

    `example` are the model's inputs, `values` the program's arguments; `original` returns a copy of
    the model. The first comparison needs the model and data. Raises ParallelError if it fails.
    """
    trial = make_trial(programs)
    tensors = [*pytree_flatten(example)[0], *programs.source.state_dict.values()]
    if original is not None and not any(is_without_data(tensor) for tensor in tensors):
        with preserved_random_state():
            check_export_fidelity(
                original,
                programs.graph,
                example,
                trial.gradients,
                lambda: run_captured(trial, values),
            )
    return compare_ranks_with_single(trial, values)


def flatten_arguments(programs: RankPrograms, example: CallArguments) -> list[object]:
    """The arguments of the program, state and inputs, with generated data for fake tensors."""
    graph, source = programs.graph, programs.source
    inputs = pytree_flatten(example)[0]
    num_wanted = sum(role.kind == "input" for _, role in graph.inputs)
    if len(inputs) != num_wanted:
        raise ParallelError(
            f"the program takes {num_wanted} inputs, and {len(inputs)} were given. Give those "
            "that it was exported with: the model's, then the targets of the loss."
        )
    leaves = iter(inputs)
    state = {**source.constants, **source.state_dict}
    values = [
        next(leaves) if role.kind == "input" else state[role.name] for _, role in graph.inputs
    ]
    generator = torch.Generator().manual_seed(0)
    return [
        _generate_data(value, generator) if is_without_data(value) else value for value in values
    ]


def compare_ranks_with_single(trial: Trial, values: Sequence[object]) -> list[TensorVerdict]:
    """Compare each output, gradient and changed buffer; `values` are the program's arguments."""
    with preserved_random_state(), torch.no_grad():
        runs = run_single_device(trial.run_single, values)
        ranks = run_ranks(trial, values)
    return compare(
        runs.reference,
        runs.fp64,
        ranks,
        perturbed_runs=runs.perturbed_runs,
        sizes=trial.mesh.sizes,
    )


def run_captured(trial: Trial, values: Sequence[object]) -> StepResult:
    """Run the exported program, before it is partitioned."""
    with torch.no_grad():
        return _run_original(trial.run_single, values)


def run_single_device(run: RunSingle, values: Sequence[object]) -> Runs:
    """The single device's runs that noise floors are measured with.

    `run` gets a copy of the program's arguments `values`: as they are, and changed by one unit in
    the last place, both also in double precision.
    """
    reference = _run_original(run, values)
    fp64 = _run_fp64(run, values)
    perturbed = perturb_ulp(values)
    return Runs(reference, fp64, ((_run(run, perturbed), _run_fp64(run, perturbed)),))


def _run_original(run: RunSingle, values: Sequence[object]) -> StepResult:
    with explained(
        "torch.export's program of the model fails on these inputs, before it is partitioned",
        "Check that torch.export.export(model, args).module()(*args) works, or pass verify=False.",
    ):
        return _run(run, values)


def _run_fp64(run: RunSingle, values: Sequence[object]) -> StepResult | None:
    """Run the single-device program in double precision; None if a kernel does not support it."""
    try:
        return _run(run, values, is_fp64=True)
    except Exception:  # noqa: BLE001 - whatever it is, the run in the model's own dtype goes on
        return None


def _run(run: RunSingle, values: Sequence[object], *, is_fp64: bool = False) -> StepResult:
    seed_torch(0)
    arguments = [_copy(value, is_fp64) for value in values]
    with fp64_mode(torch.get_default_dtype()) if is_fp64 else nullcontext():
        return run(arguments)


def run_ranks(trial: Trial, values: Sequence[object], *, seed: int = 0) -> list[StepResult]:
    """Run all ranks; the results of each, with shards joined to full tensors."""
    mesh = trial.mesh
    seed_torch(seed)
    arguments = shard_values(trial.graph, mesh, values)
    results = run_in_lockstep(trial.ranks, arguments, ranks_by_group(mesh))
    full_results = join_results(results, trial.result_specs, mesh)
    return [
        trial.outcome(full_results[mesh.rank_at(coordinate)]) for coordinate in mesh.coordinates
    ]


def _copy(value: object, is_fp64: bool) -> object:
    if not isinstance(value, Tensor):
        return value
    return to_fp64(value.detach()) if is_fp64 else value.detach().clone()


def find_first_divergence(programs: RankPrograms, values: Sequence[object]) -> Origin | None:
    """The origin of the first op of the forward pass whose result differs; None if none does.

    `values` are the program's arguments. Every value is compared as results are: within the noise
    of the single device, measured for that value.
    """
    graph, mesh, single = programs.graph, programs.mesh, programs.single_device
    with preserved_random_state(), torch.no_grad():
        runs = run_single_device(lambda arguments: _run_every_node(single, arguments), values)
        runs_by_value = _split_by_value(runs)
        ranks = {rank: programs.runnable_forward(rank) for rank in programs.ranks}
        actual = _observe_ranks(ranks, shard_values(graph, mesh, values), ranks_by_group(mesh))
        for op_node in graph.op_nodes:
            for value in op_node.outputs if isinstance(op_node, OpNode) else ():
                is_compared = value.name in runs_by_value and value in actual
                if is_compared and not _agrees(
                    runs_by_value[value.name], actual[value], value, mesh
                ):
                    return op_node.origin
    return None


def _run_every_node(graph: fx.GraphModule, values: Sequence[object]) -> StepResult:
    """Every tensor that the program computes, by the name of its value, as an output."""
    interpreter = fx.Interpreter(graph, garbage_collect_values=False)
    interpreter.run(*values)
    outputs: list[tuple[str, Tensor]] = []
    for node, result in interpreter.env.items():
        items = result if isinstance(result, list | tuple) else ()
        named = [(node.name, result), *((f"{node.name}_{i}", item) for i, item in enumerate(items))]
        outputs += [(name, item) for name, item in named if isinstance(item, Tensor)]
    return StepResult(outputs, {}, {})


def _split_by_value(runs: Runs) -> dict[str, Runs]:
    """By the name of a value, the runs with that value as their only result."""
    all_results = [
        runs.reference,
        runs.fp64,
        *(result for pair in runs.perturbed_runs for result in pair),
    ]
    tensors = [None if result is None else dict(result.outputs) for result in all_results]

    def choose(name: str) -> Runs:
        reference, fp64, *perturbed = (
            StepResult([(name, named[name])] if named and name in named else [], {}, {})
            for named in tensors
        )
        return Runs(reference, fp64, tuple(zip(perturbed[::2], perturbed[1::2], strict=True)))

    return {name: choose(name) for name, _ in runs.reference.outputs}


def _observe_ranks(
    ranks: Mapping[int, RankProgram],
    shards: Mapping[int, Sequence[object]],
    groups: Mapping[str, Sequence[int]],
) -> dict[Value, dict[int, Tensor]]:
    """The shard that each rank has of every value of the graph."""
    value_of_node = {
        rank: {node: value for value, node in program.nodes.items() if isinstance(node, fx.Node)}
        for rank, program in ranks.items()
    }
    results: dict[Value, dict[int, Tensor]] = {}

    def observe(rank: int, node: fx.Node, result: object) -> None:
        value = value_of_node[rank].get(node)
        if value is not None and value.origin is None and isinstance(result, Tensor):
            results.setdefault(value, {})[rank] = result

    graphs = {rank: program.as_module() for rank, program in ranks.items()}
    seed_torch(0)
    run_in_lockstep(graphs, shards, groups, observe=observe)
    return results


def _agrees(runs: Runs, actual: Mapping[int, Tensor], value: Value, mesh: Mesh) -> bool:
    """Whether the shards of a value make up what the single device computes."""
    shards = {
        coordinate.coordinates: actual[mesh.rank_at(coordinate)] for coordinate in mesh.coordinates
    }
    try:
        full = unshard_tensor(shards, placements=value.placements, sizes=mesh.sizes)
    except (ValueError, RuntimeError):  # replicas differ, or shards do not fit
        return False
    candidate = StepResult([(value.name, full)], {}, {})
    verdicts = compare(runs.reference, runs.fp64, candidate, perturbed_runs=runs.perturbed_runs)
    return all(verdict.agreement in FINE for verdict in verdicts)


_MAX_RANKS = 64
_MAX_BYTES = 8 * 2**30  # of all ranks' state and the single device's, in double precision too
_MAX_GENERATED_BYTES = 256 * 2**20


def unverifiable_reason(program: ExportedProgram, mesh: Mesh, example: CallArguments | None) -> str:
    """Why all ranks cannot be run in this process; "" if they can."""
    if example is None:
        return "the program was saved without example inputs; call verify(*inputs)"
    if mesh.num_ranks > _MAX_RANKS:
        return (
            f"{mesh.num_ranks} ranks are too many for one process; verify the same plan on a mesh "
            f"of at most {_MAX_RANKS}"
        )
    state = {id(item): item for item in (*program.state_dict.values(), *program.constants.values())}
    leaves = [*state.values(), *pytree_flatten(example)[0]]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    is_generated = any(is_without_data(tensor) for tensor in tensors)
    if is_generated and num_bytes > _MAX_GENERATED_BYTES:
        return (
            f"its {num_bytes / 2**30:.1f} GiB of tensors have no data; verify the same plan on a "
            "smaller configuration of the model"
        )
    if (3 + mesh.num_ranks) * num_bytes > _MAX_BYTES:
        return (
            f"{mesh.num_ranks} ranks of {num_bytes / 2**30:.1f} GiB do not fit in one process; "
            "verify the same plan on a smaller configuration of the model"
        )
    return ""


def _generate_data(tensor: Tensor, generator: torch.Generator) -> Tensor:
    shape, dtype = tuple(int(size) for size in tensor.shape), tensor.dtype
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        sampled = torch.randn(shape, generator=generator, dtype=wide)
        scaled: Tensor = sampled / max(1, *shape[-1:]) ** 0.5
        return scaled.to(dtype).requires_grad_(tensor.requires_grad)
    return torch.zeros(shape, dtype=dtype)


def check_export_fidelity(
    original: Callable[[], nn.Module],
    graph: ShardingGraph,
    example: CallArguments,
    trained: Sequence[str],
    captured: Callable[[], StepResult],
) -> None:
    """Compare the model with the result of `captured`, with random ops replaced by their means.

    `original` returns a copy of the model. `trained` names the parameters whose gradients are
    compared; none for inference. Raises ParallelError if they differ.
    """
    with MeanRngMode(), _PassDropoutGradient():  # type: ignore[no-untyped-call]
        expected = _run_model(original, graph, example, trained)
        perturbed = _run_model(original, graph, example, trained, is_perturbed=True)
        actual = captured()
    verdicts = compare(expected, None, actual, perturbed_runs=[(perturbed, None)])
    wrong = [verdict for verdict in verdicts if verdict.agreement not in FINE]
    if not wrong:
        return
    first_wrong = wrong[0]
    what = {
        TensorKind.GRADIENT: f"the gradient of {first_wrong.name}",
        TensorKind.BUFFER: f"what {first_wrong.name} is after the call",
    }.get(first_wrong.kind, f"output {first_wrong.name}")
    raise ParallelError(
        f"torch.export's program differs from the model itself in {what} "
        f"({str(first_wrong.agreement).replace('_', ' ')}), before it is partitioned. "
        "torch.export does "
        "not keep custom backward functions, hooks on tensors, in-place writes under no_grad(), or "
        "such regions inside others. Write what is affected without them."
    )


def _run_model(
    original: Callable[[], nn.Module],
    graph: ShardingGraph,
    example: CallArguments,
    trained: Sequence[str],
    *,
    is_perturbed: bool = False,
) -> StepResult:
    model = original()
    leaves, tree = pytree_flatten(example)
    inputs = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs = pytree_unflatten(inputs, tree)
    if is_perturbed:
        args, kwargs = perturb_ulp_(model, (args, kwargs))
    old_buffers = {name: buffer.detach().clone() for name, buffer in named_buffers(model)}
    seed_torch(0)
    with _errors_of_the_model(model), torch.enable_grad() if trained else torch.no_grad():
        results = pytree_flatten(expand_objects(model(*args, **kwargs))[0])[0]
        if trained:
            results[0].backward()
    names = [role.name for _, role in graph.outputs if role.kind == "output"]
    outputs = [
        (f"[{name}]", result.detach())
        for name, result in zip(names, results, strict=True)
        if isinstance(result, Tensor)
    ]
    gradients = {
        _program_name(name, model): parameter.grad for name, parameter in named_parameters(model)
    }
    buffers = {_program_name(name, model): buffer.detach() for name, buffer in named_buffers(model)}
    changed = {
        _program_name(name, model)
        for name, buffer in named_buffers(model)
        if not torch.equal(torch.nan_to_num(old_buffers[name]), torch.nan_to_num(buffer.detach()))
    }
    written = {role.name for _, role in graph.outputs if role.kind == "input mutation"}
    input_names = [role.name for _, role in graph.inputs if role.kind == "input"]
    for name, value in zip(input_names, pytree_flatten((args, kwargs))[0], strict=True):
        if name in written:
            buffers[name] = value.detach()
            changed.add(name)
    trained_gradients = {
        name: grad for name in trained if (grad := gradients.get(name)) is not None
    }
    return StepResult(outputs, trained_gradients, buffers, frozenset(changed))


@final
class _PassDropoutGradient(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes the backward of a dropout that keeps everything the identity.

    It would scale gradients by 1 / (1 - p), which dropout as bernoulli and a product does not: a
    functional program has the latter where the model has the former.
    """

    supports_higher_order_operators = True  # torch raises for them otherwise

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func is torch.ops.aten.native_dropout_backward.default:
            gradient = args[0]
            assert isinstance(gradient, Tensor)
            return gradient.clone()
        return func(*args, **(kwargs or {}))


def _errors_of_the_model(model: nn.Module) -> AbstractContextManager[None]:
    has_loss = isinstance(model, WithLoss)
    name = type(model.model if has_loss else model).__name__
    call = "loss(model(*args, **kwargs), *targets).backward()" if has_loss else "model(*args)"
    return explained(
        f"{name} itself fails in eager mode on these inputs",
        f"Make {call} work, or pass verify=False to skip the comparison.",
    )


def _program_name(name: str, root: nn.Module) -> str:
    """The name in the program: without the prefix of WithLoss, which contains the model."""
    return name.removeprefix("model.") if isinstance(root, WithLoss) else name
