"""Every private name of torch's that a shim uses: who needs it, what for, and how to see it."""

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
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed._composable.contract import _get_registry
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from older_torch import IS_OLDER
from shardscope import simulate
from shardscope._torch.backend_names import compile_and_keep_guards
from shardscope._torch.compile_caches import fresh_caches
from shardscope._torch.compile_events import watch_compiles
from shardscope._torch.compile_times import read_durations
from shardscope._torch.compiling import watched_compiles
from shardscope._torch.functional_collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    WAIT,
)
from shardscope._torch.graph_switches import switched_back
from shardscope._torch.propagation import local_part, watch_decisions

__all__ = ["CANARIES", "Canary", "resolve"]

Probe = Callable[[], object]


@dataclass(frozen=True)
class Canary:
    """A private name, the shims that need it, and what they need it for.

    `probe` returns something true if the name is there; without one, the name is looked up. One
    that `is_new` is not in all versions that we support, whose shims do without it.
    """

    shims: str
    purpose: str
    probe: Probe | None = None
    is_new: bool = False


@contextmanager
def sharded_model() -> Iterator[Any]:
    with simulate(mesh={"dp": 2}) as world:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        yield fully_shard(model, mesh=world.mesh)


def in_sharded_model(look: Callable[[Any], object]) -> Probe:
    def probe() -> object:
        with sharded_model() as model:
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
        held = {id(parameter) for parameter in bucket.parameters()}
        return (
            held == {id(parameter) for parameter in model.parameters()}
            and bucket.buffer().numel() == 20
            and bucket.index() == 0
        )


def node_of_an_op() -> Any:
    return (torch.ones(1, requires_grad=True) * 2).grad_fn


def functional_op() -> Any:
    return torch.ops._c10d_functional.all_reduce.default


def resolve(name: str) -> object:
    """The object at a dotted name; raises if a part of it is not there."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def param_group(model: Any) -> Any:
    state = model._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return state._fsdp_param_group if groups is None else groups[0]


@functools.cache
def custom_op() -> Any:
    def same(x: torch.Tensor) -> torch.Tensor:
        return x

    return torch.library.custom_op(
        "shardscope_canary::same", same, mutates_args=(), schema="(Tensor x) -> Tensor"
    )


def fake_mode() -> Any:
    return torch._subclasses.fake_tensor.FakeTensorMode()


def stage_is_told(**shapes: Any) -> bool:
    example = torch.empty(1, 4, device="meta")
    shapes = {"input_args": example, "output_args": example, **shapes}
    with simulate(mesh={"pp": 2}) as world:
        group = world.mesh.get_group()
        stage = PipelineStage(nn.Linear(4, 4), 0, 2, torch.device("cpu"), group=group, **shapes)
        return bool(stage._user_meta.is_complete_for_forward())


def all_ranks_are_played() -> bool:
    with simulate(mesh={"tp": 2}) as world, LocalTensorMode(frozenset({0, 1})):
        pieces = {0: torch.ones(2), 1: torch.full((2,), 2.0)}
        placed = DTensor.from_local(
            LocalTensor(pieces), world.mesh, [Partial()], run_check=False
        ).redistribute(placements=[Replicate()])
        local: Any = placed.to_local()
        local = local.wait() if hasattr(local, "wait") else local
        return all(bool((one == 3).all()) for one in local._local_tensors.values())


def decisions_are_seen() -> bool:
    seen: list[Any] = []

    class Watcher:
        def decided(self, decision: Any) -> None:
            seen.append(decision)

        def tried(self, num_tried: int) -> None:
            seen.append(num_tried)

        def failed(self, op: Any, num_tried: int) -> None:
            seen.append(op)

        def moved(self) -> None:
            seen[-1].is_moved = True

    with simulate(mesh={"tp": 2}) as world, watch_decisions(Watcher()):
        torch.mm(
            distribute_tensor(torch.ones(4, 4), world.mesh, [Shard(0)]),
            distribute_tensor(torch.ones(4, 4), world.mesh, [Shard(0)]),
        )
    return [str(one.op) for one in seen] == ["aten.mm.default"] and bool(
        seen[0].moves and seen[0].is_moved
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
def compile_is_told() -> dict[str, Any]:
    """What one compilation of a function that breaks, and of one that is given up, told."""
    found: dict[str, Any] = {"compiled": False, "skip": False, "graph": False, "stop": False}
    found["backend"] = False

    class Watcher:
        has_guards = True

        def begin_frame(self, code: Any, caller: Any, scope: Any) -> None:
            pass

        def end_frame(self, end: Any) -> None:
            found["compiled"] |= end.is_compiled and bool(end.guards)
            found["skip"] |= end.stop is not None
            found["backend"] |= end.backend is run_as_it_is

        def see_stop(self, stop: Any) -> None:
            found["stop"] |= "print" in stop.message and stop.stack[-1].function == "talk"

        def see_recompile(self, reasons: Any, values: Any) -> None:
            pass

        def see_graph(self, graph: Any, compile_id: str) -> None:
            found["graph"] |= graph.compile_subgraph_reason.graph_break
            found["compile_id"] = compile_id

        def fail(self, error: Exception) -> None:
            raise error

    def talk(x: Any) -> Any:
        x = x + 1
        print(end="")
        return x * 2

    def talk_again(x: Any) -> Any:
        for _ in range(2):
            x = talk(x)
        return x

    def run_as_it_is(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return graph.forward

    with fresh_caches(), watch_compiles(Watcher()):
        for function in (talk, talk_again):
            torch.compile(function, backend=run_as_it_is)(torch.ones(2))
        found["times"] = read_durations()["tracing"][1] > 0
    return found


def lazy_backward_is_announced() -> list[bool]:
    """Of each compilation of a function and its gradient, whether it is a backward's."""
    found: list[bool] = []
    with fresh_caches(), watched_compiles(found.append, lambda: None):
        compiled = torch.compile(lambda x: x.sin(), backend="aot_eager")
        compiled(torch.ones(2, requires_grad=True)).sum().backward()
    return found


def guards_are_given() -> bool:
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
    torch._C._enter_dual_level()  # it refuses a second one
    torch._C._exit_dual_level(0)
    return functorch.get_dynamic_layer_stack_depth() == 0


def is_marked_by(function: str, attribute: str) -> bool:
    tensor = torch.ones(2, 2)
    resolve(function)(tensor, 0)
    return set(getattr(tensor, attribute)) == {0}


CANARIES: dict[str, Canary] = {
    # aot_backends.py, checking_modes.py, op_names.py, pytree_values.py,
    # scripting.py, subgraph_calls.py
    "torch._dynamo.backends.common.aot_autograd": Canary(
        "aot_backends.py", "trace forward and backward for the backends of ours"
    ),
    "torch._dynamo.exc.TorchDynamoException": Canary(
        "aot_backends.py, compiling.py", "raise what torch's eager_noexcept raises"
    ),
    "torch._functorch.config": Canary(
        "aot_backends.py, compiler_parts.py",
        "respect torch's setting of which fakes to check, and its bisector's",
        lambda: (
            torch._functorch.config.fake_tensor_crossref in (False, "all", "custom_ops")
            and hasattr(torch._functorch.config, "unlift_effect_tokens")
        ),
    ),
    "torch.fx.graph._BoxedCodeGen": Canary(
        "aot_backends.py", "free inputs after their last use", boxed_code_empties_its_list
    ),
    "._boxed_call": Canary(
        "aot_backends.py, aot_stages.py",
        "tell AOT autograd that a function takes one list",
        lambda: functorch.compile.make_boxed_func(abs)._boxed_call,
    ),
    "torch._subclasses.CrossRefFakeMode": Canary(
        "checking_modes.py", "hold ops against their fakes"
    ),
    "torch._subclasses.schema_check_mode.SchemaCheckMode": Canary(
        "checking_modes.py", "hold ops to their schemas"
    ),
    "torch._C._dispatch_get_all_op_names": Canary(
        "op_names.py",
        "know whether an op exists",
        lambda: "aten::relu" in torch._C._dispatch_get_all_op_names(),
    ),
    "._qualified_op_name": Canary(
        "op_names.py",
        "name ops given without an overload",
        lambda: torch.ops.aten.relu._qualified_op_name == "aten::relu",
    ),
    "._version": Canary(
        "pytree_values.py, storages.py, kept_tensors.py",
        "tell ops that write into a tensor",
        lambda: torch.zeros(1).add_(1)._version == 1,
    ),
    "torch._C._jit_set_autocast_mode": Canary(
        "scripting.py", "keep TorchScript from casting what was cast before"
    ),
    "torch._higher_order_ops.invoke_subgraph.invoke_subgraph_infer": Canary(
        "subgraph_calls.py", "keep a compiled graph one call where it is traced"
    ),
    # graph_switches.py, storages.py
    "torch._C._set_grad_enabled": Canary(
        "graph_switches.py, graph_nodes.py", "tell calls in graphs that turn something on or off"
    ),
    "torch._C._set_fwd_grad_enabled": Canary(
        "graph_switches.py", "tell calls in graphs that turn something on or off"
    ),
    "torch._C._autograd": Canary(
        "graph_switches.py, kept_tensors.py", "tell calls in graphs that turn something on or off"
    ),
    "torch._C._autograd._saved_tensors_hooks_disable": Canary(
        "graph_switches.py", "tell calls in graphs that turn something on or off"
    ),
    "torch._C._autograd._saved_tensors_hooks_enable": Canary(
        "graph_switches.py", "tell calls in graphs that turn something on or off"
    ),
    "torch.amp.autocast_mode._enter_autocast": Canary(
        "graph_switches.py, graph_nodes.py", "tell calls in graphs that turn something on or off"
    ),
    "torch.amp.autocast_mode._exit_autocast": Canary(
        "graph_switches.py, graph_nodes.py", "tell calls in graphs that turn something on or off"
    ),
    "torch.autograd.grad_mode._enter_inference_mode": Canary(
        "graph_switches.py, graph_nodes.py", "tell calls in graphs that turn something on or off"
    ),
    "torch.autograd.grad_mode._exit_inference_mode": Canary(
        "graph_switches.py, graph_nodes.py", "tell calls in graphs that turn something on or off"
    ),
    "torch.nn.attention._sdpa_kernel": Canary(
        "graph_switches.py", "tell calls in graphs that turn something on or off"
    ),
    "torch.cuda._exchange_device": Canary(
        "graph_switches.py", "tell calls in graphs that turn something on or off"
    ),
    "torch.cuda._maybe_exchange_device": Canary(
        "graph_switches.py", "tell calls in graphs that turn something on or off"
    ),
    # compiling.py
    **{
        f"torch.{name}": Canary("compiling.py", "call a backend as torch.compile does")
        for name in (
            "_TorchCompileInductorWrapper",
            "_TorchCompileAOTInductorWrapper",
            "_TorchCompileWrapper",
        )
    },
    "._wrapped_bw_compiler": Canary(
        "compiling.py",
        "know that the backward of a graph is compiled when it is first run",
        lambda: "_wrapped_bw_compiler" in inspect.getsource(AotAutograd),
    ),
    "._compile": Canary(
        "compiling.py",
        "tell errors of the compiler from errors of what it compiled",
        lambda: torch._dynamo.convert_frame._compile.__code__.co_name == "_compile",
    ),
    **{
        f"torch._dynamo.callback.{name}": Canary(
            "compiling.py",
            "know when torch compiles, so that this time is not counted as running",
            lambda: lazy_backward_is_announced() == [False, True],
        )
        for name in ("CallbackArgs", "CallbackTrigger", "callback_handler")
    },
    **{
        f".{attribute}": Canary(
            "compiling.py",
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
            "graph_switches.py",
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
        f"torch._C.{name}": Canary(
            "graph_switches.py", "close levels that a graph leaves open", levels_are_closed
        )
        for name in (
            "_exit_dual_level",
            "_functorch",
            "_functorch._grad_decrement_nesting",
            "_functorch._jvp_decrement_nesting",
            "_functorch._vmap_decrement_nesting",
        )
    },
    "torch._functorch.aot_autograd.aot_function": Canary(
        "aot.py", "give the graphs that torch's op coverage gives"
    ),
    "torch._inductor.decomposition.select_decomp_table": Canary(
        "decompositions.py", "take ops apart as Inductor does"
    ),
    "torch._inductor.lowering": Canary(
        "decompositions.py", "let Inductor's decompositions find what they look for"
    ),
    "._can_decompose": Canary(
        "decompositions.py",
        "tell composite ops",
        lambda: (
            torch.ops.aten.linear.default._can_decompose()
            and not torch.ops.aten.mm.default._can_decompose()
        ),
    ),
    "torch._subclasses.fake_tensor.DataDependentOutputException": Canary(
        "fakes.py and dispatch.py", "know who asks a tensor without data for its value"
    ),
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": Canary(
        "fakes.py", "run models that look at values on data"
    ),
    "torch._subclasses.fake_tensor.UnsupportedFakeTensorException": Canary(
        "fakes.py", "run models that cannot do without data on data"
    ),
    "torch._subclasses.fake_tensor.FakeTensor": Canary(
        "fakes.py, cuda_choices.py, fake_models.py, kept_tensors.py and restoring.py",
        "tell tensors without data",
    ),
    "torch.distributed._local_tensor.LocalTensor": Canary(
        "local_ranks.py", "compare the numbers of all ranks", all_ranks_are_played
    ),
    "torch.distributed._local_tensor.LocalTensorMode": Canary(
        "local_ranks.py", "compare the numbers of all ranks", all_ranks_are_played
    ),
    "._local_tensors": Canary(
        "local_ranks.py", "compare the numbers of all ranks", all_ranks_are_played
    ),
    "torch.distributed.tensor.DTensor._op_dispatcher": Canary(
        "propagation.py, mixing.py and rank_state.py",
        "see which inputs DTensor moves",
        decisions_are_seen,
    ),
    "torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers": Canary(
        "propagation.py",
        "judge ops as loss_parallel() runs them",
        lambda: isinstance(DTensor._op_dispatcher._custom_op_handlers, dict),
    ),
    "._allow_implicit_replication": Canary(
        "propagation.py",
        "let constants of decompositions meet DTensors",
        implicit_replication_is_a_switch,
    ),
    "torch.distributed.tensor._collective_utils": Canary(
        "propagation.py",
        "keep DTensor from saying what groups of CPUs cannot do",
        lambda: torch.distributed.tensor._collective_utils.logger,
    ),
    "torch.distributed.tensor._dtensor_spec.DTensorSpec": Canary(
        "propagation.py", "see which inputs DTensor moves", decisions_are_seen
    ),
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": Canary(
        "propagation.py",
        "know what a rank holds",
        in_mesh(lambda mesh: local_part((4, 6), mesh, (Shard(0), Shard(1))) == (2, 3)),
    ),
    # autograd.py
    "torch.autograd._get_sequence_nr": Canary(
        "autograd.py", "number the autograd nodes that a module makes in forward"
    ),
    "torch._C._current_autograd_node": Canary(
        "autograd.py", "know the node whose gradient a collective in backward belongs to"
    ),
    "torch._C._current_graph_task_id": Canary("autograd.py", "tell backward from forward"),
    "._sequence_nr": Canary(
        "autograd.py",
        "find the module that made a node, in backward",
        lambda: isinstance(node_of_an_op()._sequence_nr(), int),
    ),
    # fsdp_groups.py
    "._handle": Canary(
        "fsdp_groups.py",
        "find the parameters that FSDP1 manages",
        fsdp1_module(lambda model: model._handle.flat_param.numel() > 0),
    ),
    "._flat_param": Canary(
        "fsdp_groups.py",
        "know FSDP1's flat parameter by its name",
        fsdp1_module(
            lambda model: "_flat_param" in model.module.__dict__ | model.module._parameters
        ),
    ),
    "._shapes": Canary(
        "fsdp_groups.py",
        "tell the shapes of what FSDP1 flattened",
        fsdp1_module(lambda model: model._handle.flat_param._shapes[0] == (4, 4)),
    ),
    "._shard_param_infos": Canary(
        "fsdp_groups.py",
        "tell how much of each parameter is in FSDP1's shard",
        fsdp1_module(
            lambda model: model._handle.flat_param._shard_param_infos[0].numel_in_shard == 10
        ),
    ),
    "._sharding_strategy": Canary(
        "fsdp_groups.py",
        "name FSDP1's strategy",
        fsdp1_module(lambda model: model._handle._sharding_strategy.name == "FULL_SHARD"),
    ),
    "._shared_param_infos": Canary(
        "fsdp_groups.py",
        "know which parameters FSDP1 holds once for several",
        fsdp1_module(lambda model: model._handle.flat_param._shared_param_infos == ()),
    ),
    "._param_extensions": Canary(
        "fsdp_groups.py",
        "know whether FSDP1 lies on top of tensor parallelism",
        fsdp1_module(lambda model: model._handle.flat_param._param_extensions[0] is None),
    ),
    "._use_orig_params": Canary(
        "fsdp_groups.py",
        "know whether FSDP1 hides the user's parameters",
        fsdp1_module(lambda model: model._handle._use_orig_params is False),
    ),
    # checkpointing.py, styles.py, mixing.py
    "torch.distributed._composable.contract._get_registry": Canary(
        "checkpointing.py",
        "know modules that are checkpointed in place",
        lambda: "checkpoint" in (_get_registry(checkpoint(nn.Linear(1, 1))) or {}),
    ),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": Canary(
        "checkpointing.py",
        "know modules that are wrapped to be checkpointed",
        lambda: type(checkpoint_wrapper(nn.Linear(1, 1))).__name__ == "CheckpointWrapper",
    ),
    "._forward_hooks": Canary(
        "styles.py",
        "read the tensor-parallel style of a module off its hooks",
        lambda: nn.Linear(1, 1)._forward_hooks == {},
    ),
    "._forward_pre_hooks": Canary(
        "styles.py",
        "read the tensor-parallel style of a module off its hooks",
        lambda: nn.Linear(1, 1)._forward_pre_hooks == {},
    ),
    "._non_persistent_buffers_set": Canary(
        "modules.py and module_slots.py",
        "tell buffers that are saved from those that are not",
        lambda: nn.Linear(1, 1)._non_persistent_buffers_set == set(),
    ),
    "torch.utils._pytree.tree_leaves_with_path": Canary(
        "pytree_paths.py", "name the values that a program takes and returns"
    ),
    "torch.utils._pytree.tree_unflatten": Canary(
        "pytree_paths.py, programs.py and pytree_values.py",
        "name the values that a program takes and returns",
    ),
    # programs.py and functional_collectives.py
    "torch._dynamo.source.ConstantSource": Canary(
        "programs.py", "name the open sizes of pieces of a program's inputs"
    ),
    "torch._foreach_mul_": Canary("scaling.py", "scale all gradients of a step at once"),
    "torch.fx._pytree.tree_flatten_spec": Canary(
        "programs.py", "take inputs whose keys come in another order"
    ),
    "torch.utils._pytree.tree_flatten": Canary(
        "programs.py and pytree_values.py", "list what a program takes"
    ),
    "torch._dispatch.python.enable_python_dispatcher": Canary(
        "programs.py and pre_dispatch.py", "run ops on sizes that are left open"
    ),
    "torch.ops._c10d_functional": Canary(
        "functional_collectives.py",
        "write collectives into programs",
        lambda: all(
            str(op).startswith("_c10d_functional.")
            for op in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, WAIT)
        ),
    ),
    "torch.distributed._functional_collectives": Canary(
        "functional_collectives.py", "trace collectives without a process group"
    ),
    "torch.utils._pytree.tree_leaves": Canary("mixing.py", "find the tensors an op was given"),
    "torch.utils._pytree.tree_map": Canary("mixing.py", "give an op replicated tensors instead"),
    "torch.distributed.tensor.DTensor._op_dispatcher._allow_implicit_replication": Canary(
        "mixing.py and rank_state.py",
        "know whether the user lets plain tensors meet DTensors",
        lambda: DTensor._op_dispatcher._allow_implicit_replication is False,
    ),
    "torch.distributed._composable.replicate.DDP": Canary(
        "ddp.py, fsdp.py", "know modules that `replicate` was applied to"
    ),
    # calls.py
    "torch.distributed.distributed_c10d._resolve_process_group": Canary(
        "calls.py and graph_targets.py", "find the group that a functional collective names"
    ),
    # ddp.py
    "torch._subclasses.fake_tensor.FakeTensorMode": Canary(
        "ddp.py, fake_models.py, fakes.py, played_group.py, pre_dispatch.py and programs.py",
        "read DDP's buckets without allocating them; try ops without data",
    ),
    "._get_zeros_like_grad_buckets": Canary(
        "ddp.py", "tell which parameters a DDP bucket holds", ddp_buckets_are_readable
    ),
    # dispatch.py
    "torch._guards.detect_fake_mode": Canary(
        "dispatch.py, fakes.py, fake_models.py, pre_dispatch.py and programs.py",
        "tell ops that are only tried out from ops that are issued, and worlds without data",
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": Canary(
        "dispatch.py", "list the ops of a module for compat.CommDebugMode"
    ),
    "torch.utils._python_dispatch._disable_current_modes": Canary(
        "dispatch.py", "keep its own tensor work out of users' dispatch modes"
    ),
    # graph_nodes.py
    "._checkpoint_context_fn": Canary(
        "graph_nodes.py",
        "print the policy of a checkpoint",
        lambda: (
            "_checkpoint_context_fn"
            in inspect.getsource(inspect.getmodule(TagActivationCheckpoint))
        ),
    ),
    "torch._ops": Canary(
        "dispatch.py, graph_nodes.py, op_names.py and functional_collectives.py",
        "recognise ops that take functions",
        lambda: torch._ops.HigherOrderOperator and torch._ops.OpOverloadPacket,
    ),
    "._overloadpacket": Canary(
        "dispatch.py",
        "count ops under the names that CommDebugMode gives them",
        lambda: functional_op()._overloadpacket is torch.ops._c10d_functional.all_reduce,
    ),
    # frames.py and recompute.py
    "torch.autograd.graph._engine_run_backward": Canary(
        "frames.py and recompute.py", "see on the stack that backward is running"
    ),
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator": Canary(
        "frames.py and recompute.py", "tell recompute from backward"
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": Canary(
        "frames.py",
        "tell which module an FSDP2 all-gather or reduce-scatter belongs to",
        lambda: (
            resolve("torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.unshard")
            and resolve(
                "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.post_backward"
            )
        ),
    ),
    "torch.distributed.fsdp._runtime_utils": Canary(
        "frames.py", "tell which module an FSDP1 collective belongs to"
    ),
    "torch.distributed.fsdp._runtime_utils._unshard": Canary(
        "frames.py", "tell which module an FSDP1 all-gather belongs to"
    ),
    "torch.distributed.fsdp._runtime_utils._reduce_grad": Canary(
        "frames.py", "tell which module an FSDP1 reduce-scatter belongs to"
    ),
    "torch.distributed.fsdp._runtime_utils._reduce_grad_no_shard": Canary(
        "frames.py", "tell which module an FSDP1 all-reduce belongs to"
    ),
    "torch.distributed.tensor._redistribute": Canary(
        "propagation.py, frames.py and simulated_group.py",
        "say from which placements to which DTensor moved a tensor",
        lambda: resolve("torch.distributed.tensor._redistribute.redistribute_local_tensor"),
    ),
    "torch.distributed.tensor._dispatch.OpDispatcher": Canary(
        "frames.py and propagation.py",
        "name the op for which DTensor moved a tensor unasked",
        lambda: resolve("torch.distributed.tensor._dispatch.OpDispatcher.redistribute_local_args"),
    ),
    # fsdp.py
    "._get_fsdp_state": Canary(
        "fsdp.py",
        "find the parameter groups of a model under FSDP2",
        in_sharded_model(lambda model: isinstance(model, FSDPModule) and model._get_fsdp_state()),
    ),
    "._fsdp_param_groups": Canary(
        "fsdp.py",
        "list the sharded parameters and meshes of FSDP2",
        in_sharded_model(lambda model: param_group(model).fsdp_params),
    ),
    "._fsdp_param_group": Canary(
        "fsdp.py",
        "list the sharded parameters and meshes of FSDP2 in torch before 2.13",
        in_sharded_model(lambda model: param_group(model).mesh_info.mesh),
    ),
    "._module_info": Canary(
        "fsdp.py, fsdp_groups.py",
        "name FSDP2's sharded parameters while they are gathered",
        in_sharded_model(
            lambda model: (
                param_group(model).fsdp_params[0]._module_info.param_name == "weight"
                and param_group(model).fsdp_params[0]._module_info.module is model[0]
                and isinstance(param_group(model).fsdp_params[0].sharded_param, DTensor)
            )
        ),
    ),
    "._state_ctx": Canary(
        "fsdp.py",
        "find the outermost module of FSDP2",
        in_sharded_model(lambda model: model._get_fsdp_state()._state_ctx.all_states is not None),
    ),
    "._is_root": Canary(
        "fsdp.py",
        "find the outermost module of FSDP2",
        in_sharded_model(lambda model: hasattr(model._get_fsdp_state(), "_is_root")),
    ),
    "._fully_sharded_module": Canary(
        "fsdp.py",
        "tell which module an FSDP1 collective belongs to",
        fsdp1_module(lambda model: model._handle._fully_sharded_module is model.module),
    ),
    "._param_infos": Canary(
        "fsdp.py, fsdp_groups.py",
        "tell how many parameters FSDP1 gathers together",
        fsdp1_module(lambda model: len(model._handle.flat_param._param_infos) == 2),
    ),
    # calls.py
    "._indices": Canary(
        "calls.py",
        "count the bytes of a sparse tensor",
        lambda: torch.eye(2).to_sparse()._indices().shape == (2, 2),
    ),
    "._values": Canary(
        "calls.py",
        "count the bytes of a sparse tensor",
        lambda: torch.eye(2).to_sparse()._values().shape == (2,),
    ),
    # object_calls.py
    "torch.distributed.distributed_c10d._canonicalize_group_rank": Canary(
        "object_calls.py",
        "read the roots of object collectives as torch does",
        in_mesh(
            lambda mesh: (
                torch.distributed.distributed_c10d._canonicalize_group_rank(
                    dist.group.WORLD, None, 1
                )
                == 1
            )
        ),
    ),
    "torch.distributed.distributed_c10d._check_not_self_rank": Canary(
        "object_calls.py",
        "refuse to send objects to oneself",
        in_mesh(
            lambda mesh: (
                torch.distributed.distributed_c10d._check_not_self_rank(
                    dist.group.WORLD, 1, "destination"
                )
                is None
            )
        ),
    ),
    "torch.distributed.distributed_c10d._warn_not_in_group": Canary(
        "object_calls.py", "warn of object collectives in groups of others"
    ),
    "torch.distributed.distributed_c10d._new_process_group_helper": Canary(
        "simulated_group.py and played_group.py",
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
    "._flatten": Canary(
        "simulated_group.py",
        "flatten meshes while tensors have no data",
        lambda: hasattr(DeviceMesh, "_flatten"),
    ),
    "._unflatten": Canary(
        "simulated_group.py",
        "unflatten meshes while tensors have no data",
        lambda: hasattr(DeviceMesh, "_unflatten"),
    ),
    "._rank_map": Canary(
        "simulated_group.py",
        "make meshes while tensors have no data",
        lambda: "_rank_map" in inspect.signature(DeviceMesh.__init__).parameters,
    ),
    "._buffers": Canary(
        "fake_models.py, simulated_group.py, modules.py, model_state.py and module_slots.py",
        "give simulated models buffers",
        lambda: list(nn.BatchNorm1d(1)._buffers),
    ),
    # issuing.py, kernel_doors.py, op_doors.py, method_doors.py
    "torch._C._ExcludeDispatchKeyGuard": Canary(
        "kernel_doors.py", "let collectives that were shown go past the door of their kernel"
    ),
    "torch._C._ForceDispatchKeyGuard": Canary(
        "kernel_doors.py", "lead collectives in modes and in inference mode by that door"
    ),
    "torch._C._dispatch_tls_is_dispatch_key_excluded": Canary(
        "kernel_doors.py",
        "know whether a collective will come by that door",
        lambda: (
            not torch._C._dispatch_tls_is_dispatch_key_excluded(
                torch._C.DispatchKey.ADInplaceOrView
            )
        ),
    ),
    "torch._C._dispatch_tls_is_dispatch_key_included": Canary(
        "kernel_doors.py",
        "know whether a collective will come by that door",
        lambda: torch._C._dispatch_tls_is_dispatch_key_included(
            torch._C.DispatchKey.ADInplaceOrView
        ),
    ),
    "torch._C._dispatch_tls_local_exclude_set": Canary(
        "kernel_doors.py", "lead collectives by that door and nothing else astray"
    ),
    "torch._C._dispatch_tls_local_include_set": Canary(
        "kernel_doors.py", "lead collectives by that door and nothing else astray"
    ),
    "._allgather_base": Canary(
        "method_doors.py",
        "see FSDP's all-gathers at little cost",
        lambda: "_allgather_base" in vars(dist.ProcessGroup),
    ),
    "._reduce_scatter_base": Canary(
        "method_doors.py",
        "see FSDP's reduce-scatters at little cost",
        lambda: "_reduce_scatter_base" in vars(dist.ProcessGroup),
    ),
    "._broadcast_coalesced": Canary(
        "method_doors.py",
        "see DDP's buffers in inference mode",
        lambda: callable(dist._broadcast_coalesced),
    ),
    "torch._C._dispatch_keyset_full_after": Canary(
        "kernel_doors.py", "pass collectives on to torch's own kernels"
    ),
    "torch._C._distributed_c10d.FakeWork": Canary(
        "simulated_group.py",
        "answer collectives on tensors without data",
        lambda: torch._C._distributed_c10d.FakeWork().boxed() is not None,
    ),
    "torch.jit._builtins._register_builtin": Canary(
        "op_doors.py", "let torch.jit.script compile collectives inside a trace"
    ),
    "torch._C._get_dispatch_mode": Canary("issuing.py", "tell tracing a graph from running it"),
    "torch._C._TorchDispatchModeKey": Canary(
        "issuing.py",
        "tell tracing a graph from running it",
        lambda: torch._C._TorchDispatchModeKey.PROXY and torch._C._TorchDispatchModeKey.FUNCTIONAL,
    ),
    "torch._C._get_dispatch_stack_at": Canary(
        "dispatch.py", "leave to selective checkpointing whether an op is issued"
    ),
    "torch._C._len_torch_dispatch_stack": Canary(
        "dispatch.py", "leave to selective checkpointing whether an op is issued"
    ),
    "._mode_key": Canary(
        "dispatch.py",
        "tell torch's own dispatch modes from users'",
        lambda: fake_mode()._mode_key is torch._C._TorchDispatchModeKey.FAKE,
    ),
    "torch._guards.CompileContext": Canary(
        "compile_events.py and issuing.py",
        "tell compiling from running",
        lambda: torch._guards.CompileContext.try_get() is None,
    ),
    "torch._guards.TracingContext": Canary(
        "issuing.py",
        "tell compiling from running",
        lambda: torch._guards.TracingContext.try_get() is None,
    ),
    "torch.distributed._symmetric_memory": Canary(
        "op_doors.py", "see symmetric-memory collectives"
    ),
    "._destroy": Canary(
        "cuda_autocast.py, cuda_choices.py, kernel_doors.py and simulated_group.py",
        "give torch its own ops back as they were",
        lambda: torch.library.Library._destroy,
    ),
    "._op": Canary(
        "op_doors.py",
        "see functional and symmetric-memory collectives",
        lambda: (
            callable(functional_op()._op) and callable(torch.ops._c10d_functional.all_reduce._op)
        ),
    ),
    "._schema": Canary(
        "op_doors.py, simulated_group.py, dispatch.py, decompositions.py, op_names.py and "
        "custom_ops.py",
        "read collectives whose arguments are given by name",
        lambda: (
            [a.name for a in functional_op()._schema.arguments]
            == ["input", "reduce_op", "group_name"]
        ),
    ),
    # meshes.py and rank_maps.py
    "._get_root_mesh": Canary(
        "meshes.py",
        "name the axes of a mesh that was sliced",
        in_mesh(lambda mesh: mesh["tp"]._get_root_mesh() == mesh),
    ),
    "._flatten_mapping": Canary(
        "meshes.py",
        "name the axis that two axes were flattened into",
        in_mesh(lambda mesh: (mesh._flatten("both"), mesh._flatten_mapping["both"])),
    ),
    "._flatten_rank_map": Canary(
        "rank_maps.py",
        "compare large meshes in constant time",
        in_mesh(lambda mesh: tuple(mesh._flatten_rank_map) == (0, 1, 2, 3)),
    ),
    "._local_tensor": Canary(
        "meshes.py",
        "tell what a rank holds of a DTensor",
        in_mesh(
            lambda mesh: (
                distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)])._local_tensor.shape == (2,)
            )
        ),
    ),
    "torch.distributed.distributed_c10d._world": Canary(
        "meshes.py and rank_state.py",
        "tell one world from the next, and groups of the same ranks by the order they were made",
        in_mesh(
            lambda mesh: (
                next(iter(torch.distributed.distributed_c10d._world.pg_group_ranks))
                is torch.distributed.distributed_c10d._world.default_pg
            )
        ),
    ),
    # module_calls.py and uncompiled.py
    "torch._dynamo": Canary("module_calls.py", "load dynamo before nn.Module.__call__ is wrapped"),
    "torch._dynamo.eval_frame.skip_code": Canary(
        "module_calls.py", "keep module calls out of compiled graphs"
    ),
    "._call_impl": Canary(
        "module_calls.py",
        "call a module as nn.Module.__call__ does",
        lambda: nn.Module._call_impl,
    ),
    "._compiled_call_impl": Canary(
        "module_calls.py, modules.py",
        "call a module that was compiled in place",
        lambda: nn.Linear(1, 1)._compiled_call_impl is None,
    ),
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": Canary(
        "uncompiled.py", "keep torch.compile off our own code"
    ),
    "torch._C._dynamo.eval_frame._FrameExecStrategy": Canary(
        "uncompiled.py", "keep torch.compile off our own code"
    ),
    "torch._C._dynamo.eval_frame._FrameAction": Canary(
        "uncompiled.py",
        "keep torch.compile off our own code",
        lambda: torch._C._dynamo.eval_frame._FrameAction.SKIP is not None,
    ),
    # modules.py
    "torch._dynamo.OptimizedModule": Canary("modules.py", "give compiled modules clean names"),
    "._torchdynamo_orig_callable": Canary(
        "uncompiled_functions.py and compile_events.py",
        "compile a function anew that is compiled already",
        lambda: torch.compile(resolve)._torchdynamo_orig_callable is resolve,
    ),
    "._orig_mod": Canary(
        "modules.py and uncompiled_functions.py",
        "give compiled modules clean names",
        lambda: "_orig_mod" in torch.compile(nn.Linear(1, 1))._modules,
    ),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": Canary(
        "modules.py", "give checkpointed modules clean names"
    ),
    "._checkpoint_wrapped_module": Canary(
        "modules.py",
        "give checkpointed modules clean names",
        lambda: "_checkpoint_wrapped_module" in checkpoint_wrapper(nn.Linear(1, 1))._modules,
    ),
    "._fsdp_wrapped_module": Canary(
        "modules.py",
        "give modules under FSDP1 clean names",
        fsdp1_module(lambda model: "_fsdp_wrapped_module" in model._modules),
    ),
    "._modules": Canary(
        "modules.py, fsdp.py and module_slots.py",
        "walk the module tree, shared modules in each of their places",
        in_sharded_model(
            lambda model: len(model._modules) == 2 and model._get_fsdp_state()._modules[0] is model
        ),
    ),
    "._parameters": Canary(
        "fake_models.py, modules.py, simulated_group.py, model_state.py and module_slots.py",
        "list a module's own parameters, tied ones too",
        lambda: list(nn.Linear(1, 1)._parameters) == ["weight", "bias"],
    ),
    # inductor_vectors.py
    "torch._inductor.cpu_vec_isa.supported_vec_isa_list": Canary(
        "inductor_vectors.py", "try all vector instructions at once, which inductor tries in turn"
    ),
    "torch._inductor.cpu_vec_isa.x86_isa_checker": Canary(
        "inductor_vectors.py", "try only vector instructions that the processor says it has"
    ),
    # pipelining.py
    "._warmup_forward_vote": Canary(
        "pipelining.py",
        "let a pipeline stage start in a simulated world",
        lambda: PipelineStage._warmup_forward_vote,
        is_new=True,
    ),
    "._warmup_backward_result": Canary(
        "pipelining.py",
        "let a pipeline stage start in a simulated world",
        lambda: PipelineStage._warmup_backward_result,
        is_new=True,
    ),
    "._recv_meta": Canary(
        "pipelining.py",
        "say that a simulated stage has nobody to ask for shapes",
        lambda: PipelineStage._recv_meta,
        is_new=True,
    ),
    "._user_meta": Canary(
        "pipelining.py",
        "know whether a pipeline stage was told its shapes",
        lambda: stage_is_told() and not stage_is_told(input_args=None),
        is_new=True,
    ),
    # played_group.py
    "torch._C._distributed_c10d._set_thread_isolation_mode": Canary(
        "played_group.py", "let threads have groups of their own, as ranks"
    ),
    "torch.distributed.distributed_c10d._store_based_barrier": Canary(
        "played_group.py", "let ranks that take turns not wait for each other's store"
    ),
    "._in_optimized_module": Canary(
        "rank_state.py",
        "know for each rank that is a thread whether a compiled module is running",
        lambda: import_module("torch._dynamo.eval_frame")._in_optimized_module is False,
    ),
    "torch._C._dynamo.eval_frame": Canary(
        "rank_state.py",
        "know for each rank that is a thread whether frames inside of compiled ones are left alone",
        lambda: not IS_OLDER or torch._C._dynamo.eval_frame.set_eval_frame_override,
    ),
    "torch.utils._config_module": Canary(
        "rank_state.py", "know whether a setting of the compiler is one thread's or the process's"
    ),
    "torch.utils._python_dispatch": Canary(
        "rank_state.py", "know for each rank that is a thread whether a dispatch mode is active"
    ),
    **{
        f".{name}": Canary(
            "rank_state.py",
            "know for each rank that is a thread whether a dispatch mode is active",
            lambda name=name: hasattr(torch.utils._python_dispatch, name),
        )
        for name in (
            "_is_in_torch_dispatch_mode",
            "_is_in_non_infra_torch_dispatch_mode",
            "_is_in_any_mode_without_ignore_compile_internals",
        )
    },
    "._plugins": Canary(
        "played_group.py",
        "forget a backend when its ranks have ended",
        lambda: isinstance(dist.Backend._plugins, dict),
    ),
    **{
        f".{name}": Canary(
            "rank_state.py",
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
    # simulated_group.py
    "torch._C._dispatch_has_kernel_for_dispatch_key": Canary(
        "simulated_group.py",
        "answer coalesced ops on fake tensors only where torch does not",
        lambda: torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "CPU"),
    ),
    "torch._C._distributed_c10d._create_work_from_future": Canary(
        "simulated_group.py and played_group.py", "give DDP a future that holds its bucket"
    ),
    "torch._subclasses.fake_tensor": Canary(
        "simulated_group.py",
        "give models shapes without data",
        lambda: torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True),
    ),
    "torch.distributed.tensor._random": Canary(
        "simulated_group.py, rank_state.py and propagation.py",
        "put DTensor's random state back after a world",
    ),
    "torch.distributed.tensor._random._rng_tracker": Canary(
        "simulated_group.py, rank_state.py and propagation.py",
        "put DTensor's random state back after a world",
        lambda: hasattr(torch.distributed.tensor._random, "_rng_tracker"),
    ),
    "torch.distributed.tensor.debug._clear_sharding_prop_cache": Canary(
        "simulated_group.py and propagation.py",
        "let worlds of other ranks follow one another, and DTensor decide anew",
    ),
    "torch.distributed.tensor.debug._clear_fast_path_sharding_prop_cache": Canary(
        "propagation.py", "let DTensor decide anew"
    ),
    "._gen_transform_infos": Canary(
        "simulated_group.py",
        "let worlds of other ranks follow one another",
        lambda: torch.distributed.tensor._redistribute._gen_transform_infos.cache_clear,
    ),
    "torch.testing._internal.distributed.fake_pg": Canary(
        "simulated_group.py",
        "make a process group of any size",
        lambda: "fake" in dist.Backend.backend_list,
    ),
    "torch._dynamo.eval_frame._TorchDynamoContext": Canary(
        "running.py", "see on the stack that something compiled is running"
    ),
    "._backward_hooks": Canary(
        "fake_models.py",
        "let hooks of a parameter see its gradient",
        lambda: hasattr(nn.Parameter(torch.ones(1)), "_backward_hooks"),
    ),
    "._post_accumulate_grad_hooks": Canary(
        "fake_models.py",
        "let hooks of a parameter see its gradient",
        lambda: hasattr(nn.Parameter(torch.ones(1)), "_post_accumulate_grad_hooks"),
    ),
    # cuda_choices.py, workspaces.py, fake_models.py, trial_runs.py: what memory() needs
    "._fused_rms_norm": Canary(
        "cuda_choices.py",
        "take the ops that CUDA would take",
        lambda: torch.ops.aten._fused_rms_norm.default,
    ),
    "._scaled_dot_product_attention_math": Canary(
        "cuda_choices.py",
        "take the ops that CUDA would take",
        lambda: torch.ops.aten._scaled_dot_product_attention_math.default,
    ),
    "._scaled_dot_product_cudnn_attention": Canary(
        "cuda_choices.py",
        "take the ops that CUDA would take",
        lambda: torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    ),
    "._scaled_dot_product_efficient_attention": Canary(
        "cuda_choices.py",
        "take the ops that CUDA would take",
        lambda: torch.ops.aten._scaled_dot_product_efficient_attention.default,
    ),
    "._scaled_dot_product_flash_attention": Canary(
        "cuda_choices.py and twin_kernels.py",
        "take the ops that CUDA would take",
        lambda: torch.ops.aten._scaled_dot_product_flash_attention.default,
    ),
    "._scaled_dot_product_cudnn_attention_backward": Canary(
        "workspaces.py",
        "count what CUDA's attention allocates",
        lambda: torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default,
    ),
    "._scaled_dot_product_efficient_attention_backward": Canary(
        "workspaces.py",
        "count what CUDA's attention allocates",
        lambda: torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
    ),
    "._scaled_dot_product_flash_attention_backward": Canary(
        "workspaces.py and twin_kernels.py",
        "count what CUDA's attention allocates",
        lambda: torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
    ),
    "._scaled_dot_product_flash_attention_for_cpu": Canary(
        "twin_kernels.py",
        "count the FLOPs of attention on the CPU",
        lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    ),
    "._scaled_dot_product_flash_attention_for_cpu_backward": Canary(
        "twin_kernels.py",
        "count the FLOPs of attention's backward on the CPU",
        lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    ),
    "torch.ops.aten._local_scalar_dense": Canary(
        "dispatch.py", "answer who asks a tensor without data for its value"
    ),
    "torch.optim.optimizer._foreach_supported_types": Canary(
        "cuda_choices.py", "run optimizers on lists of tensors, as on CUDA"
    ),
    "torch.optim.optimizer._get_foreach_kernels_supported_devices": Canary(
        "cuda_choices.py", "run optimizers on lists of tensors, as on CUDA"
    ),
    "torch.utils._foreach_utils": Canary(
        "cuda_choices.py", "clip gradients on lists of tensors, as on CUDA"
    ),
    "torch.utils._foreach_utils._foreach_supported_types": Canary(
        "cuda_choices.py", "clip gradients on lists of tensors, as on CUDA"
    ),
    "torch.distributed.tensor._sharding_prop.ShardingPropagator": Canary(
        "trial_runs.py", "know DTensor's trial runs, which take no memory"
    ),
    "torch.distributed.tensor._sharding_prop.ShardingPropagator"
    "._propagate_tensor_meta_non_cached": Canary(
        "trial_runs.py", "know DTensor's trial runs, which take no memory"
    ),
    "torch.ops._c10d_functional_autograd": Canary(
        "functional_collectives.py", "know collectives in a graph"
    ),
    "torch.ops._dtensor": Canary("functional_collectives.py", "know collectives in a graph"),
    # aot_stages.py, compiler_parts.py: what locate_stage needs
    "torch._functorch.aot_autograd": Canary(
        "aot_stages.py",
        "see and replace what AOT autograd does for a backend",
        lambda: all(
            hasattr(torch._functorch.aot_autograd, name)
            for name in ("create_aot_state", "aot_stage1_graph_capture", "aot_stage2_compile")
        ),
    ),
    "torch._inductor.compiler_bisector.CompilerBisector": Canary(
        "aot_backends.py, compiler_parts.py",
        "switch parts of the compiler off",
        lambda: (
            list(
                inspect.signature(
                    import_module(
                        "torch._inductor.compiler_bisector"
                    ).CompilerBisector.disable_subsystem
                ).parameters
            )
            == ["backend", "subsystem", "debug_info"]
        ),
    ),
    "torch._inductor.config": Canary(
        "compiling.py, compiler_parts.py",
        "change Inductor's settings for a trial",
        lambda: import_module("torch._inductor.config").patch(
            fallback_random=True, comprehensive_padding=False, fx_graph_cache=False
        ),
    ),
    "torch._inductor.graph.GraphLowering": Canary(
        "compiler_parts.py",
        "name the kernel that is to blame",
        lambda: hasattr(import_module("torch._inductor.graph").GraphLowering, "save_output_code"),
    ),
    "torch._inductor.virtualized.V": Canary(
        "compiler_parts.py",
        "name the op whose lowering is to blame",
        lambda: import_module("torch._inductor.virtualized").V.get_current_node,
    ),
    # operators.py, custom_ops.py, inductor_caches.py: what diagnose's workers need
    "torch._ops.HigherOrderOperator": Canary("operators.py", "send a graph to another process"),
    "torch._ops.OpOverload": Canary("operators.py", "send a graph to another process"),
    "torch._ops.OpOverloadPacket": Canary("operators.py", "send a graph to another process"),
    "torch._C._dispatch_dump": Canary(
        "operators.py",
        "tell a worker which module registered an op",
        lambda: "debug: registered at " in torch._C._dispatch_dump("aten::relu"),
    ),
    "torch._library.custom_ops.CustomOpDef": Canary("custom_ops.py", "send a custom op"),
    "torch._library.custom_ops.OPDEFS": Canary("custom_ops.py", "send a custom op"),
    **{
        name: Canary("custom_ops.py", "define a custom op in another process", probe)
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
    "torch._inductor.runtime.cache_dir_utils.default_cache_dir": Canary(
        "inductor_caches.py", "save a worker the compilation of inductor's headers"
    ),
    # compile_events.py, compile_caches.py, compile_times.py, break_ids.py, backend_names.py
    "torch._dynamo.convert_frame": Canary(
        "compile_events.py and compile_caches.py",
        "see what dynamo compiles, and set its caches aside",
        lambda: compile_is_told()["compiled"],
    ),
    "torch._dynamo.exc.Unsupported": Canary(
        "compile_events.py",
        "know functions that dynamo gives up",
        lambda: compile_is_told()["skip"],
    ),
    "torch._dynamo.exc.UserError": Canary(
        "compile_events.py", "know functions that dynamo gives up"
    ),
    "torch._dynamo.output_graph.OutputGraph": Canary(
        "compile_events.py",
        "see graphs on the way to any backend",
        lambda: compile_is_told()["graph"],
    ),
    "torch._dynamo.symbolic_convert.InstructionTranslatorBase": Canary(
        "compile_events.py", "see where graphs break", lambda: compile_is_told()["stop"]
    ),
    "torch._C._dynamo.eval_frame._debug_get_cache_entry_list": Canary(
        "compile_caches.py", "know functions that were compiled"
    ),
    "torch._C._dynamo.eval_frame.reset_code": Canary(
        "compile_caches.py", "forget what was compiled to explain it"
    ),
    "torch._dynamo.config": Canary(
        "compile_caches.py",
        "know that torch.compile is switched off",
        lambda: torch._dynamo.config.disable is False,
    ),
    "torch._dynamo.pgo": Canary(
        "compile_caches.py",
        "set aside what dynamo learnt of shapes",
        lambda: all(
            hasattr(torch._dynamo.pgo, name) for name in ("_CODE_STATE", "reset_code_state")
        ),
    ),
    "torch._dynamo.trace_rules": Canary(
        "compile_caches.py",
        "know files that dynamo never compiles",
        lambda: torch._dynamo.trace_rules.check(torch.compile.__code__),
    ),
    "torch._dynamo.utils": Canary(
        "compile_caches.py",
        "put back what dynamo counts",
        lambda: isinstance(torch._dynamo.utils.counters, dict),
    ),
    "torch._dynamo.exc.get_gbid_documentation_link": Canary(
        "break_ids.py",
        "number breaks as torch's documentation does",
        lambda: (
            "gb0170" in torch._dynamo.exc.get_gbid_documentation_link("Data-dependent branching")
        ),
    ),
    "torch._dynamo.utils.compilation_time_metrics": Canary(
        "compile_times.py", "tell how long compilers take", lambda: compile_is_told()["times"]
    ),
    "torch._dynamo.lookup_backend": Canary(
        "backend_names.py", "find backends by name", lambda: torch._dynamo.lookup_backend("eager")
    ),
    "torch._dynamo.optimize": Canary(
        "backend_names.py",
        "give the guards of what is compiled",
        guards_are_given,
    ),
    "torch._dynamo.utils.compile_times": Canary(
        "backend_names.py",
        "print how long torch compiled",
        lambda: "repr" in inspect.signature(torch._dynamo.utils.compile_times).parameters,
    ),
    "._torchdynamo_orig_backend": Canary(
        "compile_events.py",
        "know the backend that a frame is compiled for",
        lambda: compile_is_told()["backend"],
    ),
    **{
        f".{name}": Canary(
            "autoload.py",
            "keep our backends out of the list that torch offers",
            functools.partial(hasattr, import_module("torch._dynamo.backends.registry"), name),
        )
        for name in ("_BACKENDS", "_COMPILER_FNS", "_discover_entrypoint_backends")
    },
    # kept_tensors.py
    "torch._C._autograd._unsafe_set_version_counter": Canary(
        "kept_tensors.py", "put versions back, so that a graph recorded before is still valid"
    ),
}
