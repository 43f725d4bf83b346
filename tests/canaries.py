"""Canaries for private names that shims use at run time: attributes and late imports.

A canary has a probe that uses the name as the shim does, and a purpose for the error message.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import functorch.compile
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.common import AotAutograd
from torch._higher_order_ops.wrap import TagActivationCheckpoint
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _symmetric_memory, fsdp
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining import schedules as pipeline_schedules
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, default_collate

from shardscope import simulate
from shardscope._torch.cuda import autocast as cuda_autocast
from shardscope._torch.cuda.simulated import simulated_cuda
from shardscope._torch.decompositions import inductor_table
from shardscope._torch.dtensor import watch_decisions
from shardscope._torch.dynamo import (
    compile_and_keep_guards,
    read_durations,
    watch_compiles,
    watched_compiles,
)
from shardscope._torch.dynamo_caches import fresh_caches
from shardscope._torch.graph import switched_back
from shardscope._torch.storage import scale_all

__all__ = [
    "CANARIES",
    "Canary",
    "Probe",
    "autocast_policies_are_complete",
    "boxed_code_empties_its_list",
    "custom_op",
    "decisions_are_reported",
    "fsdp1_chooses_a_cuda_device",
    "guards_are_returned",
    "in_mesh",
    "levels_are_closed",
    "list_compiled_backwards",
    "local_tensor_mode_runs_all_ranks",
    "observe_compiles",
]

Probe = Callable[[], object]


@dataclass(frozen=True)
class Canary:
    """What a private name is needed for, and a probe that uses it as the shims do.

    `probe` returns a true value if the name works. Versions of torch before `since`, and from
    `until` on, do not have the name, and the shims work without it.
    """

    purpose: str
    probe: Probe
    since: tuple[int, int] = (2, 11)
    until: tuple[int, int] = (99, 0)


@contextmanager
def make_sharded_model() -> Iterator[Any]:
    with simulate(mesh={"dp": 2}) as world:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        yield fully_shard(model, mesh=world.mesh)


def in_sharded_model(look: Callable[[Any], object]) -> Probe:
    def probe() -> object:
        with make_sharded_model() as model:
            return look(model)

    return probe


def in_mesh(look: Callable[[Any], object]) -> Probe:
    def probe() -> object:
        with simulate(mesh={"dp": 2, "tp": 2}) as world:
            return look(world.mesh)

    return probe


def fsdp1_module(look: Callable[[Any], object]) -> Probe:
    def probe() -> object:
        with simulate(mesh={"dp": 2}):
            return look(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))

    return probe


def ddp_buckets_are_readable() -> bool:
    with simulate(mesh={"dp": 2}):
        model = DistributedDataParallel(nn.Linear(4, 4))
        (bucket,) = model.reducer._get_zeros_like_grad_buckets()
        bucket_ids = {id(parameter) for parameter in bucket.parameters()}
        return (
            bucket_ids == {id(parameter) for parameter in model.parameters()}
            and bucket.buffer().numel() == 20
            and bucket.index() == 0
        )


def ddp_says_when_its_buckets_are_final() -> bool:
    """DDP rebuilds its buckets once, before the second forward."""
    with simulate(mesh={"dp": 2}):
        model = DistributedDataParallel(nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        is_final_at_first = model._has_rebuilt_buckets
        model(torch.ones(2, 4)).sum().backward()
        return not is_final_at_first and model._has_rebuilt_buckets


def ddp_calls(owner: Any, name: str, check: Callable[[Any], bool] = lambda result: True) -> Probe:
    """A probe whether DDP calls `owner.name` when it is created, gets a hook, or runs."""

    def probe() -> bool:
        function = getattr(owner, name)
        results = []

        def call(*args: Any, **kwargs: Any) -> Any:
            results.append(function(*args, **kwargs))
            return results[-1]

        with simulate(mesh={"dp": 2}):
            setattr(owner, name, call)
            try:
                model = DistributedDataParallel(nn.Linear(4, 4), static_graph=True)
                model.register_comm_hook(None, allreduce_hook)
                for _ in range(3):
                    model(torch.ones(1, 4)).sum().backward()
            finally:
                setattr(owner, name, function)
        return bool(results) and any(map(check, results))

    return probe


def ddp_lists_its_hooks() -> bool:
    with simulate(mesh={"dp": 2}):
        model = DistributedDataParallel(nn.Linear(4, 4))
        before = list(model._comm_hooks)
        model.register_comm_hook(None, allreduce_hook)
        return not before and len(model._comm_hooks) == 1


def fetchers_are_replaceable() -> bool:
    batches: Any = iter(DataLoader([1, 2], batch_size=2))  # type: ignore[arg-type]
    fetcher = batches._dataset_fetcher
    fetch, collate = fetcher.fetch, fetcher.collate_fn
    seen = []
    fetcher.fetch = lambda indices: seen.append(indices) or fetch(indices)
    fetcher.collate_fn = lambda samples: seen.append(samples) or collate(samples)
    next(batches)
    return seen == [[0, 1], [1, 2]] and fetcher.auto_collation


def node_of_an_op() -> Any:
    return (torch.ones(1, requires_grad=True) * 2).grad_fn


def functional_op() -> Any:
    return torch.ops._c10d_functional.all_reduce.default


def resolve(name: str) -> object:
    """The object at a dotted name; raises if a part of it does not exist."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: object = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(name)


def param_group(model: Any) -> Any:
    state = model._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return state._fsdp_param_group if groups is None else groups[0]


def fsdp2_keeps_annotations() -> bool:
    import spmd_types as spmd

    with simulate({"dp": 2, "tp": 2}) as world:
        axes = {name: world.mesh.get_group(name) for name in ("dp", "tp")}
        model = nn.Linear(4, 4, bias=False)
        spmd.assert_type(model.weight, {axes["dp"]: spmd.R, axes["tp"]: spmd.I})
        dims = fsdp.DataParallelMeshDims(shard="dp")  # type: ignore[attr-defined]
        fsdp.fully_shard(model, mesh=world.mesh, dp_mesh_dims=dims)  # type: ignore[call-arg]
        (param,) = param_group(model).fsdp_params
        types = param._spmd_init_local_type
        return param.is_spmd_types and types[spmd.MeshAxis.of(axes["tp"])] is spmd.I


@functools.cache
def custom_op() -> Any:
    def same(x: torch.Tensor) -> torch.Tensor:
        return x

    return torch.library.custom_op(
        "shardscope_canary::same", same, mutates_args=(), schema="(Tensor x) -> Tensor"
    )


def pipeline_schedule() -> Any:
    return pipeline_schedules._PipelineSchedule


def fake_mode() -> Any:
    return torch._subclasses.fake_tensor.FakeTensorMode()


def stage_has_shapes(**shapes: Any) -> bool:
    example = torch.empty(1, 4, device="meta")
    shapes = {"input_args": example, "output_args": example, **shapes}
    with simulate(mesh={"pp": 2}) as world:
        group = world.mesh.get_group()
        stage = PipelineStage(nn.Linear(4, 4), 0, 2, torch.device("cpu"), group=group, **shapes)
        return bool(stage._user_meta.is_complete_for_forward())


def local_tensor_mode_runs_all_ranks() -> bool:
    with simulate(mesh={"tp": 2}) as world, LocalTensorMode(frozenset({0, 1})):
        local_tensors = {0: torch.ones(2), 1: torch.full((2,), 2.0)}
        placed = DTensor.from_local(
            LocalTensor(local_tensors), world.mesh, [Partial()], run_check=False
        ).redistribute(placements=[Replicate()])
        local: Any = placed.to_local()
        local = local.wait() if hasattr(local, "wait") else local
        return all(bool((tensor == 3).all()) for tensor in local._local_tensors.values())


def decisions_are_reported() -> bool:
    decisions: list[Any] = []

    class DecisionLog:
        def decided(self, decision: Any) -> None:
            decisions.append(decision)

        def tried(self, num_tried: int) -> None:
            decisions.append(num_tried)

        def failed(self, op: Any, num_tried: int) -> None:
            decisions.append(op)

        def moved(self) -> None:
            decisions[-1].is_moved = True

    with simulate(mesh={"tp": 2}) as world, watch_decisions(DecisionLog()):
        torch.mm(
            distribute_tensor(torch.ones(4, 4), world.mesh, [Shard(0)]),
            distribute_tensor(torch.ones(4, 4), world.mesh, [Shard(0)]),
        )
    return [str(decision.op) for decision in decisions] == ["aten.mm.default"] and bool(
        decisions[0].moves and decisions[0].is_moved
    )


def implicit_replication_is_a_switch() -> bool:
    return DTensor._op_dispatcher._allow_implicit_replication is False


def boxed_code_empties_its_list() -> bool:
    gm = torch.fx.symbolic_trace(nn.ReLU())
    gm.graph.set_codegen(torch.fx.graph._BoxedCodeGen())
    gm.recompile()
    inputs = [torch.ones(1)]
    return bool(gm.forward(inputs) == 1) and inputs == []


@cache
def observe_compiles() -> dict[str, Any]:
    """The events of compiling a function with a graph break, and one that dynamo gives up on."""
    observed: dict[str, Any] = {"compiled": False, "skip": False, "graph": False, "stop": False}
    observed["backend"] = False

    class CompileLog:
        has_guards = True

        def begin_frame(self, code: Any, caller: Any, scope: Any) -> None:
            pass

        def end_frame(self, end: Any) -> None:
            observed["compiled"] |= end.is_compiled and bool(end.guards)
            observed["skip"] |= end.stop is not None
            observed["backend"] |= end.backend is run_eagerly

        def see_stop(self, stop: Any) -> None:
            observed["stop"] |= "print" in stop.message and stop.stack[-1].function == "break_graph"

        def see_recompile(self, reasons: Any, values: Any) -> None:
            pass

        def see_graph(self, graph: Any, compile_id: str) -> None:
            observed["graph"] |= graph.compile_subgraph_reason.graph_break
            observed["compile_id"] = compile_id

        def fail(self, error: Exception) -> None:
            raise error

    def break_graph(x: Any) -> Any:
        x = x + 1
        print(end="")
        return x * 2

    def break_graph_in_loop(x: Any) -> Any:
        for _ in range(2):
            x = break_graph(x)
        return x

    def run_eagerly(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return graph.forward

    with fresh_caches(), watch_compiles(CompileLog()):
        for function in (break_graph, break_graph_in_loop):
            torch.compile(function, backend=run_eagerly)(torch.ones(2))
        observed["times"] = read_durations()["tracing"][1] > 0
    return observed


def subclass_is_created_on_device(name: str) -> Probe:
    def probe() -> bool:
        make = getattr(torch.Tensor, name)
        if name == "_make_subclass":
            return type(make(nn.Parameter, torch.ones(2))) is nn.Parameter
        tensor = make(DTensor, (2,), dtype=torch.float32, device=torch.device("cpu", 1))
        return bool(torch._C.TensorBase.device.__get__(tensor) == torch.device("cpu", 1))

    return probe


def half_on_cuda() -> torch.Tensor:
    return torch.ones(4, device="cuda", dtype=torch.float16, requires_grad=True)


def cuda_takes(op: str, run: Callable[[], torch.Tensor]) -> Probe:
    """Whether a result on a simulated CUDA device, and its gradients, come from an op of CUDA."""

    def probe() -> bool:
        with simulate({"dp": 1}, device="cuda"):
            result = run()
            result.backward(torch.ones_like(result))
        return op in type(result.grad_fn).__name__

    return probe


def autocast_policies_are_complete() -> bool:
    """Whether every op that torch.autocast("cuda") casts has exactly one policy in our tables."""
    names = {name.partition(".")[0] for name in cuda_autocast._list_ops("AutocastCUDA")}
    policies = (
        cuda_autocast.FP32,
        cuda_autocast.FP32_SET_OPT_DTYPE,
        cuda_autocast.FP32_APPEND_DTYPE,
        cuda_autocast.PROMOTE,
        cuda_autocast.BANNED,
        cuda_autocast.LOWER_PRECISION_FP,
    )
    listed = set().union(*policies)
    return (
        len(listed) == sum(map(len, policies))
        and names <= listed
        and listed - names <= {"_cudnn_rnn", "linalg_matrix_sqrth", "rms_norm"}
    )


def names_a_function(module: Any, name: str) -> Probe:
    """Whether a module still has a function of that name, which the simulated GPU replaces."""
    return lambda: callable(getattr(module, name))


def fsdp1_chooses_a_cuda_device() -> bool:
    with simulate(mesh={"dp": 2}, device="cuda"):
        model = FullyShardedDataParallel(nn.Linear(4, 4, device="cuda"))
        return model.compute_device == torch.device("cuda", 0)


def tensors_of_numbers_are_lifted_from_the_host() -> bool:
    with simulated_cuda():  # also where there is a GPU
        is_set = torch._C._only_lift_cpu_tensors()
    return is_set and not torch._C._only_lift_cpu_tensors()


def device_context_is_traced() -> bool:
    """Whether dynamo traces factory functions inside a device context."""
    graphs: list[object] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with simulated_cuda(), FakeTensorMode(), torch.device("cuda"):
        ones = torch.compile(lambda x: x + torch.ones(2), backend=backend)(torch.randn(2))
    return len(graphs) == 1 and ones.device.type == "cuda"


def trunc_normal_draws_with(name: str) -> bool:
    draw, calls = getattr(nn.init, name), []
    setattr(nn.init, name, lambda tensor, *args, **kwargs: calls.append(tensor))
    try:
        nn.init.trunc_normal_(torch.ones(2))
    finally:
        setattr(nn.init, name, draw)
    return len(calls) == 1


def lazy_layers_infer_parameters() -> bool:
    """Whether the first call of a lazy layer infers its parameters by this method of its class."""
    calls: list[tuple[int, ...]] = []

    class Layer(nn.LazyLinear):
        def _infer_parameters(self, module: Any, args: Any, kwargs: Any = None) -> Any:
            result = super()._infer_parameters(module, args, kwargs)  # type: ignore[no-untyped-call]
            calls.append(tuple(self.weight.shape))
            return result

    Layer(2)(torch.ones(1, 3))
    return calls == [(2, 3)]


def scalers_step_with(name: str) -> bool:
    """Whether a gradient scaler calls its method `name` to run the optimizer's step."""
    calls: list[object] = []
    scaler = torch.amp.GradScaler("cpu")
    setattr(scaler, name, lambda optimizer, state: calls.extend(state["found_inf_per_device"]))
    weight = nn.Parameter(torch.ones(2))
    scaler.scale(weight.sum()).backward()
    scaler.step(torch.optim.SGD([weight]))
    return len(calls) == 1


def ops_are_estimated_by_speeds() -> bool:
    """Whether Inductor's time estimates call two functions of their module for device speeds."""
    estimates = import_module("torch.utils._runtime_estimation")
    source = inspect.getsource(estimates)
    has_bandwidth = any(f" get_{kind}_dram_gbps(" in source for kind in ("gpu", "device"))
    return has_bandwidth and " get_device_tflops(" in source


def ops_are_timed_by_name() -> bool:
    """Whether the pass that overlaps collectives looks up its time estimates in its module.

    Only where torch has no setting that replaces times by estimates.
    """
    from torch._inductor import config

    if hasattr(config.aten_distributed_optimizations, "compute_estimator"):
        return True
    source = inspect.getsource(import_module("torch._inductor.fx_passes.overlap_scheduling"))
    return all(
        f"{name}(n" in source
        for name in ("benchmark_node_with_cache_key", "estimate_runtime_analytical")
    )


def encoders_make_nested_tensors() -> bool:
    return "torch._nested_tensor_from_mask(" in inspect.getsource(nn.TransformerEncoder.forward)


def inductor_compiles_with_the_default() -> bool:
    """Whether the first default of `compile_fx` is the function that compiles inner graphs."""
    compile_fx = import_module("torch._inductor.compile_fx")
    parameters = list(inspect.signature(compile_fx.compile_fx).parameters.values())
    defaults = [parameter for parameter in parameters if parameter.default is not parameter.empty]
    passes = inspect.signature(compile_fx._recursive_post_grad_passes)
    return defaults[0].name == "inner_compile" and bool(passes.bind(None, is_inference=True))


def list_compiled_backwards() -> list[bool]:
    """For each compilation of a function and its gradient, whether it is a backward."""
    are_backwards: list[bool] = []
    with fresh_caches(), watched_compiles(are_backwards.append, lambda: None):
        compiled = torch.compile(lambda x: x.sin(), backend="aot_eager")
        compiled(torch.ones(2, requires_grad=True)).sum().backward()
    return are_backwards


def guards_are_returned() -> bool:
    guards: list[Any] = []
    with fresh_caches():
        backend = torch._dynamo.lookup_backend("eager")
        compile_and_keep_guards(lambda x: x.sin(), backend, guards)(torch.ones(2))
    return bool(guards)


def levels_are_closed() -> bool:
    functorch = torch._C._functorch
    with suppress(ZeroDivisionError), switched_back():
        functorch._grad_increment_nesting()
        functorch._vmap_increment_nesting(3, "error")
        functorch._jvp_increment_nesting()
        torch._C._enter_dual_level()
        raise ZeroDivisionError
    torch._C._enter_dual_level()  # fails if a level is open
    torch._C._exit_dual_level(0)
    return functorch.get_dynamic_layer_stack_depth() == 0


def is_marked_by(function: str, attribute: str) -> bool:
    tensor = torch.ones(2, 2)
    resolve(function)(tensor, 0)
    return set(getattr(tensor, attribute)) == {0}


CANARIES: dict[str, Canary] = {
    **{
        f".{name}": Canary("cast ops as autocast does on CUDA", autocast_policies_are_complete)
        for name in sorted(cuda_autocast.FP32 | cuda_autocast.LOWER_PRECISION_FP)
        if name.startswith("_")
    },
    "._get_accelerator": Canary(
        "let programs find a CUDA device that is not there",
        lambda: torch._C._get_accelerator().type in ("cpu", "cuda"),
    ),
    "._get_compute_device": Canary(
        "let FSDP1 select a simulated CUDA device",
        fsdp1_chooses_a_cuda_device,
    ),
    "._get_device_state": Canary(
        "let DTensor draw random numbers on a CUDA device that is not there",
        lambda: (
            "_get_device_state"
            in inspect.getsource(
                import_module("torch.distributed.tensor._random").OffsetBasedRNGTracker
            )
        ),
    ),
    **{
        name: Canary(
            "let compiled code make tensors of numbers on a CUDA device that is not there",
            tensors_of_numbers_are_lifted_from_the_host,
        )
        for name in ("torch._C._only_lift_cpu_tensors", "torch._C._set_only_lift_cpu_tensors")
    },
    **{
        name: Canary(
            "keep compiled code in a device context one graph on a CUDA device that is not there",
            device_context_is_traced,
        )
        for name in ("torch.utils._device", "._device_constructors")
    },
    "._lazy_init": Canary(
        "say which call needs a GPU that is not there", lambda: callable(torch.cuda._lazy_init)
    ),
    "._sleep": Canary("wait for nothing", names_a_function(torch.cuda, "_sleep")),
    **{
        f".{name}": Canary(
            "refuse records of a GPU that is not there", names_a_function(torch.cuda.memory, name)
        )
        for name in (
            "_dump_snapshot",
            "_record_memory_history",
            "_save_memory_usage",
            "_save_segment_usage",
            "_set_allocator_settings",
            "_snapshot",
        )
    },
    **{
        f".{name}": Canary(
            "refuse kernels that are compiled for a GPU that is not there",
            names_a_function(torch.cuda.jiterator, name),
        )
        for name in ("_create_jit_fn", "_create_multi_output_jit_fn")
    },
    "._apply": Canary(
        "make a model's tensors on a device, those that FSDP2 offloads on the CPU",
        lambda: nn.Linear(1, 1)._apply(lambda tensor: tensor.to("meta")).weight.is_meta,
    ),
    "torch._functorch.aot_autograd.make_boxed_func": Canary(
        "run Inductor's graphs without code generation",
        lambda: resolve("torch._functorch.aot_autograd.make_boxed_func")(abs)([-1]) == 1,  # type: ignore[operator]
    ),
    "torch._inductor.compile_fx": Canary(
        "run Inductor's graphs without code generation", inductor_compiles_with_the_default
    ),
    "torch._inductor.compile_fx._recursive_post_grad_passes": Canary(
        "run Inductor's passes over graphs", inductor_compiles_with_the_default
    ),
    "._fake_device": Canary(
        "give tensors without data a CUDA device",
        lambda: (
            {"device", "fake_device", "_fake_device"}
            & {*inspect.signature(torch._subclasses.FakeTensor.__new__).parameters}
        ),
    ),
    "._make_subclass": Canary(
        "show C++ a device of the host", subclass_is_created_on_device("_make_subclass")
    ),
    "._make_wrapper_subclass": Canary(
        "show C++ a device of the host", subclass_is_created_on_device("_make_wrapper_subclass")
    ),
    "._DISPATCH_META_HANDLERS": Canary(
        "show C++ a device of the host",
        lambda: (
            torch.ops.prim.device.default in torch._subclasses.fake_tensor._DISPATCH_META_HANDLERS
        ),
    ),
    "torch.nn.modules.lazy.LazyModuleMixin._infer_parameters": Canary(
        "give lazy layers parameters without data", lazy_layers_infer_parameters
    ),
    "._infer_parameters": Canary(
        "give lazy layers parameters without data", lazy_layers_infer_parameters
    ),
    "torch.amp.GradScaler._maybe_opt_step": Canary(
        "let gradient scalers step without data", lambda: scalers_step_with("_maybe_opt_step")
    ),
    "._nested_tensor_from_mask": Canary(
        "refuse nested tensors where tensors have no data", encoders_make_nested_tensors
    ),
    "torch.utils._runtime_estimation": Canary(
        "overlap compiled collectives with ops that nothing can time", ops_are_estimated_by_speeds
    ),
    "torch._inductor.fx_passes.overlap_scheduling": Canary(
        "overlap compiled collectives with ops that nothing can time", ops_are_timed_by_name
    ),
    "torch.nn.init._no_grad_trunc_normal_": Canary(
        "initialize models without data",
        lambda: trunc_normal_draws_with("_no_grad_trunc_normal_"),
    ),
    "._boxed_call": Canary(
        "tell AOT autograd that a function takes one list",
        lambda: functorch.compile.make_boxed_func(abs)._boxed_call,
    ),
    "._qualified_op_name": Canary(
        "name ops given without an overload",
        lambda: torch.ops.aten.relu._qualified_op_name == "aten::relu",
    ),
    "._version": Canary(
        "tell ops that write into a tensor",
        lambda: torch.zeros(1).add_(1)._version == 1,
    ),
    **{
        f"torch.{name}": Canary(
            "call a backend as torch.compile does",
            lambda name=name, args=args: inspect.signature(getattr(torch, name)).bind(*args),
        )
        for name, args in (
            ("_TorchCompileInductorWrapper", (None, None, None)),
            ("_TorchCompileAOTInductorWrapper", (None, None, None)),
            ("_TorchCompileWrapper", ("eager", None, None, None)),
        )
    },
    "._wrapped_bw_compiler": Canary(
        "know that the backward of a graph is compiled when it is first run",
        lambda: "_wrapped_bw_compiler" in inspect.getsource(AotAutograd),
    ),
    "._can_decompose": Canary(
        "tell composite ops",
        lambda: (
            torch.ops.aten.linear.default._can_decompose()
            and not torch.ops.aten.mm.default._can_decompose()
        ),
    ),
    "._local_tensors": Canary("compare the numbers of all ranks", local_tensor_mode_runs_all_ranks),
    "torch.distributed.tensor.DTensor._op_dispatcher": Canary(
        "observe which inputs DTensor redistributes",
        decisions_are_reported,
    ),
    "torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers": Canary(
        "judge ops as loss_parallel() runs them",
        lambda: isinstance(DTensor._op_dispatcher._custom_op_handlers, dict),
    ),
    "._allow_implicit_replication": Canary(
        "let constants of decompositions meet DTensors",
        implicit_replication_is_a_switch,
    ),
    "._sequence_nr": Canary(
        "find the module that made a node, in backward",
        lambda: isinstance(node_of_an_op()._sequence_nr(), int),
    ),
    "._handle": Canary(
        "find the parameters that FSDP1 manages",
        fsdp1_module(lambda model: model._handle.flat_param.numel() > 0),
    ),
    "._flat_param": Canary(
        "know FSDP1's flat parameter by its name",
        fsdp1_module(
            lambda model: "_flat_param" in model.module.__dict__ | model.module._parameters
        ),
    ),
    "._shapes": Canary(
        "tell the shapes of what FSDP1 flattened",
        fsdp1_module(lambda model: model._handle.flat_param._shapes[0] == (4, 4)),
    ),
    "._shard_param_infos": Canary(
        "tell how much of each parameter is in FSDP1's shard",
        fsdp1_module(
            lambda model: model._handle.flat_param._shard_param_infos[0].numel_in_shard == 10
        ),
    ),
    "._sharding_strategy": Canary(
        "name FSDP1's strategy",
        fsdp1_module(lambda model: model._handle._sharding_strategy.name == "FULL_SHARD"),
    ),
    "._numels": Canary(
        "share out the memory of a flat parameter that FSDP1 has gathered",
        fsdp1_module(lambda model: len(model._handle.flat_param._numels) == 2),
    ),
    "._sharded_size": Canary(
        "tell the shard of a flat parameter of FSDP1's from all of it",
        fsdp1_module(lambda model: model._handle.flat_param._sharded_size.numel() > 0),
    ),
    "._shared_param_infos": Canary(
        "know which parameters FSDP1 holds once for several",
        fsdp1_module(lambda model: model._handle.flat_param._shared_param_infos == ()),
    ),
    "._param_extensions": Canary(
        "know whether FSDP1 lies on top of tensor parallelism",
        fsdp1_module(lambda model: model._handle.flat_param._param_extensions[0] is None),
    ),
    "._use_orig_params": Canary(
        "know whether FSDP1 hides the user's parameters",
        fsdp1_module(lambda model: model._handle._use_orig_params is False),
    ),
    "._forward_hooks": Canary(
        "read the tensor-parallel style of a module off its hooks",
        lambda: nn.Linear(1, 1)._forward_hooks == {},
    ),
    "._forward_pre_hooks": Canary(
        "read the tensor-parallel style of a module off its hooks",
        lambda: nn.Linear(1, 1)._forward_pre_hooks == {},
    ),
    "._non_persistent_buffers_set": Canary(
        "tell buffers that are saved from those that are not",
        lambda: nn.Linear(1, 1)._non_persistent_buffers_set == set(),
    ),
    "torch.distributed.tensor.DTensor._op_dispatcher._allow_implicit_replication": Canary(
        "know whether the user lets plain tensors meet DTensors",
        lambda: DTensor._op_dispatcher._allow_implicit_replication is False,
    ),
    "._get_zeros_like_grad_buckets": Canary(
        "tell which parameters a DDP bucket holds", ddp_buckets_are_readable
    ),
    "._has_rebuilt_buckets": Canary(
        "read the buckets of DDP only until they are final", ddp_says_when_its_buckets_are_final
    ),
    "._verify_params_across_processes": Canary(
        "let DDP compare shapes without data", ddp_calls(dist, "_verify_params_across_processes")
    ),
    "._rebuild_buckets": Canary(
        "let DDP rebuild its buckets without data",
        ddp_calls(dist.Reducer, "_rebuild_buckets", lambda is_rebuilt: is_rebuilt is True),
    ),
    "._set_static_graph": Canary(
        "let DDP find unused parameters without data",
        ddp_calls(dist.Reducer, "_set_static_graph"),
    ),
    "._build_params_for_reducer": Canary(
        "refuse sparse gradients where tensors have no data",
        ddp_calls(
            DistributedDataParallel,
            "_build_params_for_reducer",
            lambda result: len(result[0]) == 2 and result[1] == [False, False],
        ),
    ),
    "torch.Tensor._make_subclass": Canary(
        "compute what DDP counts where tensors have no data",
        subclass_is_created_on_device("_make_subclass"),
    ),
    "._checkpoint_context_fn": Canary(
        "print the policy of a checkpoint",
        lambda: (
            "_checkpoint_context_fn"
            in inspect.getsource(inspect.getmodule(TagActivationCheckpoint))
        ),
    ),
    "._overloadpacket": Canary(
        "count ops under the names that CommDebugMode gives them",
        lambda: functional_op()._overloadpacket is torch.ops._c10d_functional.all_reduce,
    ),
    "._get_fsdp_state": Canary(
        "find the parameter groups of a model under FSDP2",
        in_sharded_model(lambda model: isinstance(model, FSDPModule) and model._get_fsdp_state()),
    ),
    "._fsdp_param_groups": Canary(
        "list the sharded parameters and meshes of FSDP2",
        in_sharded_model(lambda model: param_group(model).fsdp_params),
    ),
    "._fsdp_param_group": Canary(
        "list the sharded parameters and meshes of FSDP2 in torch before 2.13",
        in_sharded_model(lambda model: param_group(model).mesh_info.mesh),
    ),
    "._module_info": Canary(
        "name FSDP2's sharded parameters while they are gathered",
        in_sharded_model(
            lambda model: (
                param_group(model).fsdp_params[0]._module_info.param_name == "weight"
                and param_group(model).fsdp_params[0]._module_info.module is model[0]
                and isinstance(param_group(model).fsdp_params[0].sharded_param, DTensor)
            )
        ),
    ),
    "._group_name_to_workspace_tensor": Canary(
        "forget the workspaces of symmetric memory that a simulated world made",
        lambda: isinstance(_symmetric_memory._group_name_to_workspace_tensor, dict),
    ),
    "._orig_param_uid": Canary(
        "find a parameter that several FSDP2 groups manage",
        in_sharded_model(lambda model: param_group(model).fsdp_params[0]._orig_param_uid >= 0),
        since=(2, 13),
    ),
    "._all_reduce_hook": Canary(
        "say that an FSDP2 group has a hook at its all-reduce",
        in_sharded_model(lambda model: param_group(model)._all_reduce_hook is None),
    ),
    "._spmd_init_local_type": Canary(
        "read the spmd_types annotations of parameters under FSDP2",
        fsdp2_keeps_annotations,
        since=(2, 14),
    ),
    "._state_ctx": Canary(
        "find the outermost module of FSDP2",
        in_sharded_model(lambda model: model._get_fsdp_state()._state_ctx.all_states is not None),
    ),
    "._is_root": Canary(
        "find the outermost module of FSDP2",
        in_sharded_model(lambda model: hasattr(model._get_fsdp_state(), "_is_root")),
    ),
    "._fully_sharded_module": Canary(
        "tell which module an FSDP1 collective belongs to",
        fsdp1_module(lambda model: model._handle._fully_sharded_module is model.module),
    ),
    "._param_infos": Canary(
        "tell how many parameters FSDP1 gathers together",
        fsdp1_module(lambda model: len(model._handle.flat_param._param_infos) == 2),
    ),
    "._indices": Canary(
        "count the bytes of a sparse tensor",
        lambda: torch.eye(2).to_sparse()._indices().shape == (2, 2),
    ),
    "._values": Canary(
        "count the bytes of a sparse tensor",
        lambda: torch.eye(2).to_sparse()._values().shape == (2,),
    ),
    "torch.distributed.distributed_c10d._new_process_group_helper": Canary(
        "simulate groups of any backend",
        lambda: (
            {"backend", "backend_options"}
            <= set(
                inspect.signature(
                    torch.distributed.distributed_c10d._new_process_group_helper
                ).parameters
            )
        ),
    ),
    "._new_process_group_helper": Canary(
        "return the backend that a launched program asked for",
        lambda: torch.distributed.distributed_c10d._new_process_group_helper,
    ),
    "._store_based_barrier": Canary(
        "let a launched program join its group without the other ranks",
        lambda: callable(torch.distributed.distributed_c10d._store_based_barrier),
    ),
    "._stage": Canary(
        "find the model of a pipeline with a single stage on this rank",
        lambda: (
            "self._stage = stage"
            in inspect.getsource(pipeline_schedules.PipelineScheduleSingle.__init__)
        ),
    ),
    "._stages": Canary(
        "find the models of a pipeline with several stages on this rank",
        lambda: (
            "self._stages = stages"
            in inspect.getsource(pipeline_schedules.PipelineScheduleMulti.__init__)
        ),
    ),
    "._cdata": Canary(
        "tell storages without data apart",
        lambda: len({tensor.untyped_storage()._cdata for tensor in torch.eye(2).split(1)}) == 1,
    ),
    "._flatten": Canary(
        "flatten meshes while tensors have no data",
        lambda: hasattr(DeviceMesh, "_flatten"),
    ),
    "._unflatten": Canary(
        "unflatten meshes while tensors have no data",
        lambda: hasattr(DeviceMesh, "_unflatten"),
    ),
    "._rank_map": Canary(
        "make meshes while tensors have no data",
        lambda: "_rank_map" in inspect.signature(DeviceMesh.__init__).parameters,
    ),
    "._buffers": Canary(
        "give simulated models buffers",
        lambda: list(nn.BatchNorm1d(1)._buffers),
    ),
    "._allgather_base": Canary(
        "see FSDP's all-gathers at little cost",
        lambda: "_allgather_base" in vars(dist.ProcessGroup),
    ),
    "._reduce_scatter_base": Canary(
        "see FSDP's reduce-scatters at little cost",
        lambda: "_reduce_scatter_base" in vars(dist.ProcessGroup),
    ),
    "._broadcast_coalesced": Canary(
        "see DDP's buffers in inference mode",
        lambda: callable(dist._broadcast_coalesced),
    ),
    "._mode_key": Canary(
        "tell torch's own dispatch modes from users'",
        lambda: fake_mode()._mode_key is torch._C._TorchDispatchModeKey.FAKE,
    ),
    "._destroy": Canary(
        "give torch its own ops back as they were",
        lambda: torch.library.Library._destroy,
    ),
    "._op": Canary(
        "see functional and symmetric-memory collectives",
        lambda: (
            callable(functional_op()._op) and callable(torch.ops._c10d_functional.all_reduce._op)
        ),
    ),
    "._schema": Canary(
        "read collectives whose arguments are given by name",
        lambda: (
            [a.name for a in functional_op()._schema.arguments]
            == ["input", "reduce_op", "group_name"]
        ),
    ),
    "._get_root_mesh": Canary(
        "name the axes of a mesh that was sliced",
        in_mesh(lambda mesh: mesh["tp"]._get_root_mesh() == mesh),
    ),
    "._flatten_mapping": Canary(
        "name the axis that two axes were flattened into",
        in_mesh(lambda mesh: (mesh._flatten("both"), mesh._flatten_mapping["both"])),
    ),
    "._flatten_rank_map": Canary(
        "compare large meshes in constant time",
        in_mesh(lambda mesh: tuple(mesh._flatten_rank_map) == (0, 1, 2, 3)),
    ),
    "._local_tensor": Canary(
        "tell what a rank holds of a DTensor",
        in_mesh(
            lambda mesh: (
                distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)])._local_tensor.shape == (2,)
            )
        ),
    ),
    "._call_impl": Canary(
        "call a module as nn.Module.__call__ does",
        lambda: nn.Module._call_impl,
    ),
    "._compiled_call_impl": Canary(
        "call a module that was compiled in place",
        lambda: nn.Linear(1, 1)._compiled_call_impl is None,
    ),
    "._torchdynamo_orig_callable": Canary(
        "compile a function anew that is compiled already",
        lambda: torch.compile(resolve)._torchdynamo_orig_callable is resolve,
    ),
    "._torchdynamo_disable": Canary(
        "tell torch.compiler.disable from torch.compile",
        lambda: torch.compiler.disable(lambda: 1)._torchdynamo_disable is True,
    ),
    "._orig_mod": Canary(
        "remove the torch.compile wrapper from module names",
        lambda: "_orig_mod" in torch.compile(nn.Linear(1, 1))._modules,
    ),
    "._checkpoint_wrapped_module": Canary(
        "remove the checkpoint wrapper from module names",
        lambda: "_checkpoint_wrapped_module" in checkpoint_wrapper(nn.Linear(1, 1))._modules,
    ),
    "._fsdp_wrapped_module": Canary(
        "give modules under FSDP1 clean names",
        fsdp1_module(lambda model: "_fsdp_wrapped_module" in model._modules),
    ),
    "._modules": Canary(
        "walk the module tree, shared modules in each of their places",
        in_sharded_model(
            lambda model: len(model._modules) == 2 and model._get_fsdp_state()._modules[0] is model
        ),
    ),
    "._parameters": Canary(
        "list a module's own parameters, tied ones too",
        lambda: list(nn.Linear(1, 1)._parameters) == ["weight", "bias"],
    ),
    "._warmup_forward_vote": Canary(
        "let a pipeline stage start in a simulated world",
        lambda: inspect.signature(PipelineStage._warmup_forward_vote).bind(None, True),
        since=(2, 13),
        until=(2, 15),
    ),
    "._warmup_backward_result": Canary(
        "let a pipeline stage start in a simulated world",
        lambda: PipelineStage._warmup_backward_result,
        since=(2, 13),
        until=(2, 15),
    ),
    "._warmup_p2p": Canary(
        "let a pipeline prepare in a simulated world as on real ranks",
        lambda: list(inspect.signature(pipeline_schedule()._warmup_p2p).parameters)[1] == "stages",
        since=(2, 13),
        until=(2, 15),
    ),
    "._initialize_pipeline_distributed_state": Canary(
        "let a pipeline prepare in a simulated world as on real ranks",
        lambda: (
            list(
                inspect.signature(
                    pipeline_schedule()._initialize_pipeline_distributed_state
                ).parameters
            )[1]
            == "stages"
        ),
        since=(2, 15),
    ),
    "torch.distributed.pipelining.schedules._PipelineSchedule": Canary(
        "let a pipeline prepare in a simulated world as on real ranks",
        lambda: issubclass(Schedule1F1B, pipeline_schedule()),
    ),
    "._shape_inference": Canary(
        "say that a simulated stage has nobody to ask for shapes",
        lambda: PipelineStage._shape_inference,
        until=(2, 13),
    ),
    "._recv_meta": Canary(
        "say that a simulated stage has nobody to ask for shapes",
        lambda: (
            list(inspect.signature(PipelineStage._recv_meta).parameters) == ["self", "src_stage"]
        ),
        since=(2, 13),
    ),
    "._user_meta": Canary(
        "know whether a pipeline stage was told its shapes",
        lambda: stage_has_shapes() and not stage_has_shapes(input_args=None),
        since=(2, 13),
    ),
    "._in_optimized_module": Canary(
        "know for each rank that is a thread whether a compiled module is running",
        lambda: import_module("torch._dynamo.eval_frame")._in_optimized_module is False,
    ),
    **{
        f".{name}": Canary(
            "keep the flag of active dispatch modes separate for each threaded rank",
            lambda name=name: hasattr(torch.utils._python_dispatch, name),
        )
        for name in (
            "_is_in_torch_dispatch_mode",
            "_is_in_non_infra_torch_dispatch_mode",
            "_is_in_any_mode_without_ignore_compile_internals",
        )
    },
    "._plugins": Canary(
        "forget a backend when its ranks have ended",
        lambda: isinstance(dist.Backend._plugins, dict),
    ),
    **{
        f".{name}": Canary(
            "give each rank that is a thread its own list of groups",
            lambda name=name: hasattr(torch.distributed.distributed_c10d, name),
        )
        for name in (
            "_pg_map",
            "_pg_names",
            "_pg_group_ranks",
            "_pg_backend_config",
            "_group_count",
            "_tags_to_pg",
            "_pg_to_tag",
            "_default_pg_init_method",
        )
    },
    "torch._C._dispatch_has_kernel_for_dispatch_key": Canary(
        "answer coalesced ops on fake tensors only where torch does not",
        lambda: torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "CPU"),
    ),
    "._gen_transform_infos": Canary(
        "start worlds of different ranks one after another",
        lambda: torch.distributed.tensor._redistribute._gen_transform_infos.cache_clear,
    ),
    "._backward_hooks": Canary(
        "let hooks of a parameter see its gradient",
        lambda: hasattr(nn.Parameter(torch.ones(1)), "_backward_hooks"),
    ),
    "._post_accumulate_grad_hooks": Canary(
        "let hooks of a parameter see its gradient",
        lambda: hasattr(nn.Parameter(torch.ones(1)), "_post_accumulate_grad_hooks"),
    ),
    "._fused_rms_norm": Canary(
        "take the ops that CUDA would take",
        lambda: torch.ops.aten._fused_rms_norm.default,
    ),
    **{
        name: Canary("take the ops that CUDA would take", cuda_takes(op, run))
        for name, op, run in (
            (
                "._cudnn_rnn_backward",
                "CudnnRnn",
                lambda: nn.GRU(4, 4, device="cuda")(torch.ones(2, 2, 4, device="cuda"))[1],
            ),
            (
                "._thnn_fused_gru_cell_backward",
                "ThnnFusedGruCell",
                lambda: nn.GRUCell(4, 4, device="cuda")(torch.ones(2, 4, device="cuda")),
            ),
            (
                "._softmax",
                "Softmax",
                lambda: half_on_cuda().softmax(0, torch.float32),
            ),
            (
                "._log_softmax",
                "LogSoftmax",
                lambda: half_on_cuda().log_softmax(0, torch.float32),
            ),
        )
    },
    "._scaled_dot_product_attention_math": Canary(
        "take the ops that CUDA would take",
        lambda: torch.ops.aten._scaled_dot_product_attention_math.default,
    ),
    "._scaled_dot_product_cudnn_attention": Canary(
        "take the ops that CUDA would take",
        lambda: torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    ),
    "._scaled_dot_product_efficient_attention": Canary(
        "take the ops that CUDA would take",
        lambda: torch.ops.aten._scaled_dot_product_efficient_attention.default,
    ),
    "._scaled_dot_product_flash_attention": Canary(
        "take the ops that CUDA would take",
        lambda: torch.ops.aten._scaled_dot_product_flash_attention.default,
    ),
    "._scaled_dot_product_flash_attention_for_cpu": Canary(
        "count the FLOPs of attention on the CPU",
        lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    ),
    "._scaled_dot_product_flash_attention_for_cpu_backward": Canary(
        "count the FLOPs of attention's backward on the CPU",
        lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    ),
    "torch._inductor.config": Canary(
        "change Inductor's settings for a trial",
        lambda: import_module("torch._inductor.config").patch(
            fallback_random=True, comprehensive_padding=False, fx_graph_cache=False
        ),
    ),
    "torch._inductor.graph.GraphLowering": Canary(
        "name the kernel that is to blame",
        lambda: hasattr(import_module("torch._inductor.graph").GraphLowering, "save_output_code"),
    ),
    "torch._inductor.virtualized.V": Canary(
        "name the op whose lowering is to blame",
        lambda: import_module("torch._inductor.virtualized").V.get_current_node,
    ),
    **{
        name: Canary("define a custom op in another process", probe)
        for name, probe in {
            "._abstract_fn": lambda: hasattr(custom_op(), "_abstract_fn"),
            "._backend_fns": lambda: list(custom_op()._backend_fns) == [None],
            "._backward_fn": lambda: hasattr(custom_op(), "_backward_fn"),
            "._init_fn": lambda: custom_op()._init_fn(1) == 1,
            "._opoverload": lambda: custom_op()._opoverload._schema.arguments,
            "._qualname": lambda: custom_op()._qualname == "shardscope_canary::same",
            "._setup_context_fn": lambda: hasattr(custom_op(), "_setup_context_fn"),
        }.items()
    },
    "._rng_tracker": Canary(
        "restore DTensor's random state after a world",
        lambda: hasattr(torch.distributed.tensor._random, "_rng_tracker"),
    ),
    "._propagate_tensor_meta_non_cached": Canary(
        "recognise DTensor's shape propagation, which allocates no memory",
        lambda: (
            torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached
        ),
    ),
    "torch._foreach_mul_": Canary(
        "scale all gradients of a step at once",
        lambda: scale_all([tensor := torch.ones(1)], torch.tensor(2.0)) or bool(tensor == 2),
    ),
    "torch._C._jit_set_autocast_mode": Canary(
        "keep TorchScript from casting what was cast before",
        lambda: isinstance(
            torch._C._jit_set_autocast_mode(torch._C._jit_set_autocast_mode(False)), bool
        ),
    ),
    "torch._inductor.cpu_vec_isa.supported_vec_isa_list": Canary(
        "try all vector instructions at once, which inductor tries in turn",
        lambda: all(
            str(isa) for isa in import_module("torch._inductor.cpu_vec_isa").supported_vec_isa_list
        ),
    ),
    "torch._inductor.cpu_vec_isa.x86_isa_checker": Canary(
        "try only vector instructions that the processor says it has",
        lambda: isinstance(import_module("torch._inductor.cpu_vec_isa").x86_isa_checker(), list),
    ),
    "torch._inductor.decomposition.select_decomp_table": Canary(
        "take ops apart as Inductor does",
        lambda: len(inductor_table()) > 100,
    ),
    "torch._inductor.lowering": Canary(
        "let Inductor's decompositions find what they look for",
        lambda: import_module("torch._inductor.lowering").lowerings,
    ),
    "torch.distributed.distributed_c10d._store_based_barrier": Canary(
        "let ranks that take turns not wait for each other's store",
        lambda: (
            "_store_based_barrier"
            in dist.distributed_c10d.init_process_group.__wrapped__.__code__.co_names
            or "_store_based_barrier" in dist.distributed_c10d._new_group_with_tag.__code__.co_names
        ),
    ),
    "._foreach_supported_types": Canary(
        "clip gradients on lists of tensors, as on CUDA",
        lambda: torch.Tensor in torch.utils._foreach_utils._foreach_supported_types,
    ),
    "torch.optim.optimizer._foreach_supported_types": Canary(
        "run optimizers on lists of tensors, as on CUDA",
        lambda: torch.Tensor in import_module("torch.optim.optimizer")._foreach_supported_types,
    ),
    "torch.optim.optimizer._get_foreach_kernels_supported_devices": Canary(
        "run optimizers on lists of tensors, as on CUDA",
        lambda: (
            "cuda"
            in import_module("torch.optim.optimizer")._get_foreach_kernels_supported_devices()
        ),
    ),
    "._compile": Canary(
        "tell errors of the compiler from errors of what it compiled",
        lambda: torch._dynamo.convert_frame._compile.__code__.co_name == "_compile",
    ),
    **{
        f".{attribute}": Canary(
            "write marks of dynamic sizes into a repro",
            functools.partial(is_marked_by, function, attribute),
        )
        for function, attribute in {
            "torch._dynamo.mark_dynamic": "_dynamo_dynamic_indices",
            "torch._dynamo.maybe_mark_dynamic": "_dynamo_weak_dynamic_indices",
            "torch._dynamo.decorators.mark_unbacked": "_dynamo_unbacked_indices",
        }.items()
    },
    **{
        f".{name}": Canary(
            "know which values leave a level of vmap or grad",
            functools.partial(hasattr, import_module(module), name),
        )
        for name, module in {
            "_unwrap_for_grad": "torch._C._functorch",
            "_unwrap_batched": "torch._functorch.vmap",
            "_remove_batch_dim": "torch._C._functorch",
        }.items()
    },
    **{
        name: Canary("close levels that a graph leaves open", levels_are_closed)
        for name in (
            "torch._C._exit_dual_level",
            "._grad_decrement_nesting",
            "._jvp_decrement_nesting",
            "._vmap_decrement_nesting",
        )
    },
    "._torchdynamo_orig_backend": Canary(
        "know the backend that a frame is compiled for",
        lambda: observe_compiles()["backend"],
    ),
    **{
        f".{name}": Canary(
            "keep our backends out of the list that torch offers",
            functools.partial(hasattr, import_module("torch._dynamo.backends.registry"), name),
        )
        for name in ("_BACKENDS", "_COMPILER_FNS", "_discover_entrypoint_backends")
    },
    "._comm_hooks": Canary("know whether DDP has a hook", ddp_lists_its_hooks),
    "._dataset": Canary(
        "name what a data loader draws from",
        lambda: iter(DataLoader([1]))._dataset == [1],  # type: ignore[attr-defined, arg-type]
    ),
    "._collate_fn": Canary(
        "know whether a batch was collated by torch",
        lambda: iter(DataLoader([1]))._collate_fn is default_collate,  # type: ignore[attr-defined, arg-type]
    ),
    "._auto_collation": Canary(
        "know whether samples are collated",
        lambda: iter(DataLoader([1]))._auto_collation,  # type: ignore[attr-defined, arg-type]
    ),
    "._dataset_fetcher": Canary("record how a loader makes a batch", fetchers_are_replaceable),
    **{
        f".{op}": Canary(purpose, functools.partial(getattr, torch.ops.aten, op))
        for op, purpose in {
            "_foreach_copy_": "know that a list of tensors is overwritten",
            "_foreach_zero_": "know that a list of tensors is overwritten",
            "_unique": "name the function whose result has a size of its own",
            "_unique2": "name the function whose result has a size of its own",
        }.items()
    },
}
