"""Probes of the private names that shims look up when they are imported.

A name may still exist and behave differently, take other arguments, or no longer define the
function whose frames are searched for. So each probe uses the name as the shim does. The shim
states what the name is needed for.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from canaries import (
    Probe,
    autocast_policies_are_complete,
    boxed_code_empties_its_list,
    custom_op,
    decisions_are_reported,
    fsdp1_chooses_a_cuda_device,
    guards_are_returned,
    in_mesh,
    levels_are_closed,
    list_compiled_backwards,
    local_tensor_mode_runs_all_ranks,
    observe_compiles,
)
from shardscope import simulate, trace
from shardscope._torch import (
    aot,
    autograd,
    checking_modes,
    ddp,
    dispatch,
    dynamo,
    frames,
    fsdp,
    inductor,
    modules,
    training_hooks,
    tree,
)
from shardscope._torch import aot as aot_backends
from shardscope._torch import aot as subgraph_calls
from shardscope._torch import dispatch as operators
from shardscope._torch import dtensor as propagation
from shardscope._torch import dtensor as trial_runs
from shardscope._torch import export as programs
from shardscope._torch import fake as fake_shim
from shardscope._torch import frames as running
from shardscope._torch import graph as graph_nodes
from shardscope._torch import graph as graph_switches
from shardscope._torch import skip_dynamo as skip_dynamo_shim
from shardscope._torch.collectives import functional, hooks, objects, schema
from shardscope._torch.cuda import workspaces
from shardscope._torch.cuda.simulated import simulated_cuda
from shardscope._torch.data_loading import watched_batches
from shardscope._torch.process_groups import simulated as simulated_group
from shardscope._torch.process_groups import simulated_tensors
from shardscope._torch.storage import plain_tensors

__all__ = ["PROBES"]

C: Any = torch._C
KEY = C.DispatchKey.ADInplaceOrView


def keys_can_be_combined() -> bool:
    keys, cpu = C.DispatchKeySet(KEY), C.DispatchKeySet(C.DispatchKey.CPU)
    both = keys | cpu
    return both.has(KEY) and not (both - keys).has(KEY) and (both & keys).has(KEY)


def key_can_be_excluded() -> bool:
    with hooks.bypass_hook_key():
        is_out = C._dispatch_tls_is_dispatch_key_excluded(KEY)
    return is_out and not C._dispatch_tls_is_dispatch_key_excluded(KEY)


def key_can_be_forced() -> bool:
    with hooks.bypass_hook_key(), hooks.force_hook_key():
        return not C._dispatch_tls_is_dispatch_key_excluded(KEY)


def keys_after_the_hook_key_are_lower() -> bool:
    rest = C._dispatch_keyset_full_after(KEY)
    return not rest.has(KEY) and not rest.has(C.DispatchKey.AutogradCPU)


def backward_has_graph_task_and_node() -> bool:
    states = []

    def read_state(gradient: torch.Tensor) -> None:
        states.append((autograd.is_in_backward(), autograd.current_node().name()))

    y = torch.ones(1, requires_grad=True) * 2
    y.register_hook(read_state)
    y.sum().backward()
    return (
        states == [(True, "MulBackward0")]
        and not autograd.is_in_backward()
        and autograd.current_node() is None
    )


def nodes_are_numbered() -> bool:
    number = autograd.next_sequence_number()
    node = (torch.ones(1, requires_grad=True) * 2).grad_fn
    return autograd.node_number(node) == number and autograd.next_sequence_number() == number + 1


def work_has_a_future_and_can_be_boxed() -> bool:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result([1])
    work = C._distributed_c10d._create_work_from_future(future)
    return work.wait() is True and work.get_future().wait() == [1] and work.boxed() is not None


def group_is_resolved_by_name() -> bool:
    with simulate(mesh={"dp": 2}) as world:
        group = world.mesh.get_group()
        return schema.process_group(group.group_name) is group


def count_compiled(function: Callable[..., Any]) -> int:
    count = 0

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        nonlocal count
        count += 1
        return gm

    torch.compile(function, backend=backend)(torch.ones(2))
    return count


def marked_code_is_not_compiled() -> bool:
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def marked(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    skip_dynamo_shim.skip_dynamo(marked.__code__)
    return count_compiled(plain) == 1 and count_compiled(marked) == 0


def skipped_code_is_not_compiled() -> bool:
    def skipped(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    import_module("torch._dynamo.eval_frame").skip_code(skipped.__code__)
    return count_compiled(skipped) == 0


def failed_guards_are_described_and_torch_functions_restored() -> bool:
    """Whether a function is recompiled for a fake tensor that differs in its device's index."""
    double = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)
    with simulate(mesh={"dp": 2}, device="cuda"):
        devices = [double(torch.ones(2, device=name)).device.type for name in ("cpu", "cuda")]
        with torch.device("meta"):
            is_meta = torch.ones(2).is_meta
    described = resolve("torch._dynamo.guards.GuardDebugInfo")(False, ["a reason"], 0)
    return (
        devices == ["cpu", "cuda"]
        and is_meta
        and (described.result, described.verbose_code_parts) == (False, ["a reason"])
    )


def synchronized_batch_norm_gathers_and_reduces() -> bool:
    with simulate(mesh={"dp": 2}, device="cuda"):
        x = torch.ones(2, 3, 4, device="cuda", requires_grad=True)
        with trace() as t:
            nn.SyncBatchNorm(3, device="cuda")(x).sum().backward()
    kinds = [str(collective.kind) for collective in t.recording.collectives]
    return kinds == ["all_gather", "all_reduce"]


def factories_take_the_index_of_a_device() -> bool:
    factories = {make.__name__ for make in resolve("torch.utils._device._device_constructors")()}
    with simulated_cuda(), FakeTensorMode():  # also where there is a GPU
        device = torch.zeros(2, device=1).device
    return {"zeros", "tensor", "arange"} <= factories and device == torch.device("cuda", 1)


def attention_order_follows_sdpa_kernel() -> bool:
    before = torch._C._get_sdp_priority_order()
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends, set_priority=True):
        order = torch._C._get_sdp_priority_order()
    numbers = [int(backend) for backend in backends]
    return order[:2] == numbers != before[:2] == torch._C._get_sdp_priority_order()[:2]


def compiled_code_is_listed_until_it_is_reset() -> bool:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 2

    eval_frame = C._dynamo.eval_frame
    count_compiled(function)
    before = len(eval_frame._debug_get_cache_entry_list(function.__code__))
    eval_frame.reset_code(function.__code__)
    return before == 1 and not eval_frame._debug_get_cache_entry_list(function.__code__)


def compiled_call_is_on_the_stack() -> bool:
    results = []

    @torch.compiler.disable
    def look() -> None:
        results.append(running.is_compiled_running(sys._getframe()))

    def function(x: torch.Tensor) -> torch.Tensor:
        look()
        return x + 3

    look()
    count_compiled(function)
    return results == [False, True]


class OpLog(dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def dispatch_modes_are_listed() -> bool:
    with OpLog() as mode:
        return (
            dispatch.has_modes()
            and C._get_dispatch_stack_at(0) is mode
            and dispatch.is_user_mode_active()
        )


def a_mode_sees_ops_unless_modes_are_off() -> bool:
    x = torch.ones(1)
    with OpLog() as mode:
        with dispatch.disable_dispatch_modes():
            x + 1
        before = list(mode.ops)
        x + 1
    return before == [] and mode.ops == ["aten.add.Tensor"]


def a_mode_can_stay_active_on_a_thread() -> bool:
    mode = OpLog()

    def compute() -> None:
        dispatch.push_dispatch_mode(mode)
        torch.ones(1) + 1

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    return mode.ops[-1:] == ["aten.add.Tensor"] and not dispatch.has_modes()


def saved_tensors_hooks_can_be_disabled() -> bool:
    C._autograd._saved_tensors_hooks_disable("not now")
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            torch.ones(1, requires_grad=True).sin()
    except RuntimeError as error:
        return "not now" in str(error)
    finally:
        C._autograd._saved_tensors_hooks_enable()
    return False


@cache
def targets_in_a_graph() -> tuple[object, ...]:
    """The targets of calls that dynamo writes for the contexts that a program enters."""
    targets: list[object] = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        targets.extend(node.target for node in gm.graph.nodes if node.op == "call_function")
        return gm

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            y = x @ x
        with torch.inference_mode(), torch.autograd.forward_ad._set_fwd_grad_enabled(False):
            z = x * 2
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            w = x.sin()
        with torch.autograd.graph.disable_saved_tensors_hooks("not now"):
            return w.cos(), y + 1, z + 1

    torch.compile(function, backend=keep)(torch.ones(2, 2))
    return tuple(targets)


def is_in_graphs(*targets: object) -> Probe:
    return lambda: all(target in targets_in_a_graph() for target in targets)


def device_is_exchanged_and_restored() -> bool:
    """Whether `torch.cuda.device` calls the functions that dynamo writes for it."""
    enter = torch.cuda.device.__enter__.__code__.co_names
    leave = torch.cuda.device.__exit__.__code__.co_names
    return "_exchange_device" in enter and "_maybe_exchange_device" in leave


def version_can_be_set() -> bool:
    tensor = torch.zeros(1).add_(1)
    C._autograd._unsafe_set_version_counter((tensor,), (0,))
    return tensor._version == 0


def fake_tensors_raise_without_data() -> bool:
    def fails_with(kind: type[Exception], read: Callable[[torch.Tensor], object]) -> bool:
        with fake_shim.FakeTensorMode():
            try:
                read(torch.ones(2))
            except kind:
                return True
        return False

    value, shape, unsupported = fake_shim.NO_DATA
    return (
        fails_with(value, lambda x: x.sum().item())
        and fails_with(shape, lambda x: x.nonzero())
        and issubclass(unsupported, RuntimeError)
    )


def fake_tensors_are_recognised() -> bool:
    mode = fake_shim.FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fake = torch.ones(2) + torch.ones(2)
    real = torch.ones(2)
    return (
        fake_shim.is_fake(fake)
        and fake_shim.is_fake(mode.from_tensor(real))
        and not fake_shim.is_fake(real)
        and dispatch.detect_fake_mode((fake,)) is mode
        and dispatch.detect_fake_mode((real,)) is None
    )


def graph_of(function: Callable[..., Any]) -> fx.GraphModule:
    return fx.symbolic_trace(function)


def graphs_are_compiled_ahead() -> bool:
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return aot_backends.as_boxed(gm)

    x = torch.ones(2, requires_grad=True)
    compiled = aot_backends.compile_ahead(
        graph_of(lambda x: (x.sin(),)), [x], forward=keep, keeps_mutations=True, table={}
    )
    (result,) = compiled(x)
    result.sum().backward()
    return len(graphs) == 2 and x.grad is not None


def subgraph_stays_a_single_call() -> bool:
    call = subgraph_calls.call_as_subgraph(graph_of(lambda x: (x.sin(),)), [torch.ones(2)])
    return bool(torch.equal(call([torch.ones(2)])[0], torch.ones(2).sin()))


def op_kinds_are_recognised() -> bool:
    cond, add = torch.ops.higher_order.cond, torch.ops.aten.add
    return (
        operators.name_operator(cond) == ("higher_order", "cond")
        and operators.name_operator(add) == ("aten", "add")
        and operators.name_operator(add.Tensor) == ("aten", "add", "Tensor")
        and not operators.is_operator(abs)
    )


def ops_are_checked() -> bool:
    with checking_modes.check_schemas():
        schemas = torch.ones(1) + 1
    with checking_modes.check_fakes(lambda op: False):
        checked = torch.ones(1) + 1
    return bool(schemas == checked)


def replicated_modules_are_recognised() -> bool:
    with simulate(mesh={"dp": 2}):
        return ddp.is_replicated(replicate(nn.Linear(4, 4))) and not ddp.is_replicated(nn.ReLU())


def rank_outside_a_group_gets_a_warning() -> bool:
    with warnings.catch_warnings(record=True) as caught, simulate(mesh={"dp": 2}):
        warnings.simplefilter("always")
        objects.warn_not_in_group("canary")
    return len(caught) == 1


def shape_propagation_is_recognised() -> bool:
    propagation_log, states = trial_runs.ShapePropagationTracker(), []

    class StateMode(dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented
            states.append(propagation_log.is_on())
            return func(*args, **(kwargs or {}))

    with simulate(mesh={"tp": 2}) as world:
        x = DTensor.from_local(torch.ones(3, 5), world.mesh, [Shard(0)], run_check=False)
        propagation.forget_decisions(thoroughly=True)
        with propagation_log.watching(), StateMode():
            x.sin()
    return True in states and False in states


def arguments_are(op: str, *names: str) -> Probe:
    def probe() -> bool:
        arguments = [argument.name for argument in resolve(op)._schema.arguments]
        return tuple(arguments[: len(names)]) == names

    return probe


def resolve(name: str) -> Any:
    value: Any = torch
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


def takes(name: str, *args: Any, **kwargs: Any) -> Probe:
    """A probe whether a function accepts these arguments."""
    return lambda: inspect.signature(resolve(name)).bind(*args, **kwargs)


def caches_can_be_cleared() -> bool:
    with simulate(mesh={"tp": 2}):
        propagation.forget_decisions()
        propagation.forget_decisions(thoroughly=True)
    return True


def nested_values_are_flattened() -> bool:
    leaves, spec = tree.pytree_flatten({"a": 1, "b": (2,)})
    paths = [leaf for _, leaf in tree.leaves_with_path({"a": 1, "b": (2,)})]
    return (
        leaves == [1, 2]
        and tree.pytree_unflatten(leaves, spec) == {"a": 1, "b": (2,)}
        and paths == [1, 2]
        and tree.flatten_as({"b": 2, "a": 1}, tree.pytree_flatten({"a": 1, "b": 2})[1]) == [1, 2]
    )


def leaves_are_mapped() -> bool:
    pytree = torch.utils._pytree
    return pytree.tree_leaves(((1, [2]), {"a": 3})) == [1, 2, 3] and pytree.tree_map(
        lambda leaf: leaf + 1, ((1,), {"a": 2})
    ) == ((2,), {"a": 3})


def symbolic_sizes_are_divided() -> bool:
    sizes = {"input": {0: torch.export.Dim("rows", min=2, max=64)}}
    program = torch.export.export(nn.ReLU(), (torch.ones(8, 2),), dynamic_shapes=sizes)
    (placeholder,) = (node for node in program.graph.nodes if node.op == "placeholder")
    value = placeholder.meta["val"]
    part = programs.divide_size(value.shape[0], 2)
    with programs.traced(programs.fake_mode_of([value]), has_open_sizes=True):
        doubled = value * 2
    return programs.hint_of(part) == 4 and doubled.shape == value.shape


def roles_exist(*roles: frames.Role) -> Probe:
    return lambda: set(roles) <= set(frames.find_roles().values())


def flat_parameter_is_recognised() -> bool:
    with simulate(mesh={"dp": 2}):
        model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
        (parameter,) = model.parameters()
        return isinstance(parameter, fsdp.FlatParameter)


def device_is_read_from_the_base_class() -> bool:
    tensor = torch.ones(2)
    read, set_data = torch._C.TensorBase.device.__get__, torch._C.TensorBase.data.__set__
    set_data(tensor, torch.zeros(3))
    return bool(read(tensor) == torch.device("cpu")) and tensor.shape == (3,)


def batches_are_watched() -> bool:
    """Whether every batch of a data loader passes through our function."""
    drawn = []

    def take(draw: Callable[[], Any]) -> Any:
        drawn.append(draw())
        return drawn[-1]

    with watched_batches(take):
        batches = list(torch.utils.data.DataLoader(torch.arange(4), batch_size=2))
    return len(drawn) >= 2 and batches[0] is drawn[0]


def clipping_is_watched() -> bool:
    """Whether both halves of clipping report themselves, by names that were taken before."""
    halves = torch.nn.utils.get_total_norm, torch.nn.utils.clip_grads_with_norm_
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    events: list[str] = []

    class Listener:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: events.append(name)

    with training_hooks.watch_training(Listener()):
        norm = halves[0]([parameter.grad])
        halves[1]([parameter], 1.0, norm)
    return events == ["before_clipping", "before_clipping", "clip"]


def transformed_tensors_are_unwrapped() -> bool:
    """Whether the tensor inside one of `torch.func.grad` has the storage of the argument."""
    weight = torch.ones(2)
    storages: list[int] = []

    def loss(inner: torch.Tensor) -> torch.Tensor:
        storages.extend(plain.untyped_storage().data_ptr() for plain in plain_tensors(inner))
        return inner.sum()

    torch.func.grad(loss)(weight)
    return storages == [weight.untyped_storage().data_ptr()]


PROBES: dict[str, Probe] = {
    "torch._C._functorch.is_functorch_wrapped_tensor": transformed_tensors_are_unwrapped,
    "torch._C._functorch.get_unwrapped": transformed_tensors_are_unwrapped,
    "torch.nn.modules._functions.SyncBatchNorm": synchronized_batch_norm_gathers_and_reduces,
    "torch.utils._device._device_constructors": factories_take_the_index_of_a_device,
    "torch._dynamo.guards.GuardManagerWrapper": (
        failed_guards_are_described_and_torch_functions_restored
    ),
    "torch._dynamo.guards.GuardDebugInfo": failed_guards_are_described_and_torch_functions_restored,
    "torch._C.DisableTorchFunction": failed_guards_are_described_and_torch_functions_restored,
    "torch._C._get_sdp_priority_order": attention_order_follows_sdpa_kernel,
    "torch._C._dispatch_has_computed_kernel_for_dispatch_key": lambda: (
        torch._C._dispatch_has_computed_kernel_for_dispatch_key("aten::linear", "CPU")
        and not torch._C._dispatch_has_computed_kernel_for_dispatch_key(
            "aten::_scaled_dot_product_cudnn_attention", "CPU"
        )
    ),
    "torch._C._dispatch_get_registrations_for_dispatch_key": autocast_policies_are_complete,
    "torch._C._functorch": levels_are_closed,
    "torch._dynamo.optimize": guards_are_returned,
    "torch._dynamo.utils.compile_times": lambda: (
        "repr" in inspect.signature(dynamo._compile_times).parameters
    ),
    **{
        f"torch._dynamo.callback.{name}": lambda: list_compiled_backwards() == [False, True]
        for name in ("CallbackTrigger", "callback_handler")
    },
    "torch.distributed.fsdp._init_utils": fsdp1_chooses_a_cuda_device,
    "torch.distributed.fsdp._flat_param.FlatParameter": flat_parameter_is_recognised,
    "torch._C.TensorBase": device_is_read_from_the_base_class,
    "torch.ops.aten._to_copy.default": lambda: torch.equal(
        operators.COPY(torch.ones(2)), torch.ones(2)
    ),
    "torch.nested._internal.nested_tensor": lambda: all(
        name in inspect.getsource(torch.nested) and hasattr(simulated_tensors._nested_tensor, name)
        for name in simulated_tensors._JAGGED
    ),
    "torch.jit._builtins._get_builtin_table": lambda: (
        import_module("torch.jit._builtins")._get_builtin_table()[id(torch.zeros)] == "aten::zeros"
    ),
    # collectives/hooks.py: kernel hooks
    "torch._C.DispatchKey.ADInplaceOrView": lambda: KEY.name == "ADInplaceOrView",
    "torch._C.DispatchKey.Meta": keys_can_be_combined,
    "torch._C.DispatchKey.Python": keys_can_be_combined,
    "torch._C.DispatchKeySet": keys_can_be_combined,
    "torch._C._dispatch_tls_set_dispatch_key_excluded": key_can_be_excluded,
    "torch._C._ForceDispatchKeyGuard": key_can_be_forced,
    "torch._C._dispatch_keyset_full_after": keys_after_the_hook_key_are_lower,
    "torch._C._dispatch_tls_is_dispatch_key_excluded": key_can_be_excluded,
    "torch._C._dispatch_tls_is_dispatch_key_included": lambda: (
        C._dispatch_tls_is_dispatch_key_included(KEY)
    ),
    "torch._C._dispatch_tls_local_exclude_set": key_can_be_forced,
    "torch._C._dispatch_tls_local_include_set": key_can_be_forced,
    # collectives/events.py, dispatch.py, collectives/schema.py, collectives/hooks.py
    "torch._C._TorchDispatchModeKey.FUNCTIONAL": lambda: (
        C._get_dispatch_mode(C._TorchDispatchModeKey.FUNCTIONAL) is None
    ),
    "torch._C._TorchDispatchModeKey.PROXY": lambda: (
        C._get_dispatch_mode(C._TorchDispatchModeKey.PROXY) is None
    ),
    "torch._C._get_dispatch_mode": lambda: (
        C._get_dispatch_mode(C._TorchDispatchModeKey.PROXY) is None
    ),
    "torch._C._get_dispatch_stack_at": dispatch_modes_are_listed,
    "torch._C._len_torch_dispatch_stack": dispatch_modes_are_listed,
    "torch._guards.CompileContext.try_get": lambda: torch._guards.CompileContext.try_get() is None,
    "torch._guards.TracingContext.try_get": lambda: torch._guards.TracingContext.try_get() is None,
    "torch._guards.detect_fake_mode": fake_tensors_are_recognised,
    "torch.utils._python_dispatch.TorchDispatchMode": a_mode_sees_ops_unless_modes_are_off,
    "torch.utils._python_dispatch._disable_current_modes": a_mode_sees_ops_unless_modes_are_off,
    "torch.utils._python_dispatch._push_mode": a_mode_can_stay_active_on_a_thread,
    "torch._ops.HigherOrderOperator": op_kinds_are_recognised,
    "torch._ops.OpOverload": op_kinds_are_recognised,
    "torch._ops.OpOverloadPacket": op_kinds_are_recognised,
    "torch.ops.aten._local_scalar_dense.default": lambda: dispatch.READ_VALUE(torch.tensor(3)) == 3,
    "torch._C._dispatch_get_all_op_names": lambda: "aten::relu" in C._dispatch_get_all_op_names(),
    "torch._C._dispatch_dump": lambda: operators.registered_at("aten", "relu"),
    "torch.distributed.distributed_c10d._resolve_process_group": group_is_resolved_by_name,
    "torch.distributed._symmetric_memory": lambda: schema.unread_ops("symm_mem"),
    "torch._C._distributed_c10d": lambda: callable(
        torch._C._distributed_c10d._SymmetricMemory.get_buffer
    ),
    "torch.jit._builtins._register_builtin": takes(
        "torch.jit._builtins._register_builtin", abs, "aten::abs"
    ),
    # autograd.py, snapshot.py, frames.py
    "torch.autograd._get_sequence_nr": nodes_are_numbered,
    "torch._C._current_autograd_node": backward_has_graph_task_and_node,
    "torch._C._current_graph_task_id": backward_has_graph_task_and_node,
    "torch._C._autograd._unsafe_set_version_counter": version_can_be_set,
    "torch.autograd.graph._engine_run_backward": roles_exist(frames.Role.ENGINE),
    "torch.optim.Optimizer.profile_hook_step": roles_exist(frames.Role.OPTIMIZER),
    "torch.utils.checkpoint": frames.recompute_code,
    "torch.utils.checkpoint.CheckpointFunction.backward": frames.reentrant_code,
    "torch.distributed.tensor._redistribute.redistribute_local_tensor": roles_exist(
        frames.Role.REDISTRIBUTE
    ),
    "torch.distributed.tensor._dispatch.OpDispatcher.redistribute_local_args": roles_exist(
        frames.Role.IMPLICIT
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.unshard": (
        roles_exist(frames.Role.FSDP_UNSHARD)
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.post_backward": (
        roles_exist(frames.Role.FSDP_REDUCE)
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._get_grad_inner_tensor": (
        roles_exist(frames.Role.FSDP_GRADIENT)
    ),
    "torch.distributed.fsdp._runtime_utils._unshard": roles_exist(frames.Role.FSDP1_UNSHARD),
    "torch.distributed.fsdp._runtime_utils._reduce_grad": roles_exist(frames.Role.FSDP1_REDUCE),
    "torch.distributed.fsdp._runtime_utils._reduce_grad_no_shard": roles_exist(
        frames.Role.FSDP1_REDUCE
    ),
    "torch._dynamo.eval_frame._TorchDynamoContext.__call__": compiled_call_is_on_the_stack,
    # skip_dynamo.py, module_calls.py, modules.py, autograd.py, ddp.py
    "torch._C._dynamo.eval_frame._FrameAction.SKIP": marked_code_is_not_compiled,
    "torch._C._dynamo.eval_frame._FrameExecStrategy": marked_code_is_not_compiled,
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": marked_code_is_not_compiled,
    "torch._dynamo": lambda: "torch._dynamo" in sys.modules,
    "torch._dynamo.eval_frame.skip_code": skipped_code_is_not_compiled,
    "torch._dynamo.OptimizedModule": lambda: (
        modules.is_compile_wrapper(torch.compile(nn.Linear(1, 1)))
        and modules.unwrap(torch.compile(relu := nn.ReLU())) is relu
    ),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": lambda: (
        modules.unwrap(checkpoint_wrapper(relu := nn.ReLU())) is relu
    ),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": lambda: (
        autograd.is_checkpoint_wrapper(checkpoint_wrapper(nn.ReLU()))
    ),
    "torch.distributed._composable.contract._get_registry": lambda: (
        autograd.is_checkpointed(checkpoint(nn.Linear(1, 1)))
        and not autograd.is_checkpointed(nn.Linear(1, 1))
    ),
    "torch.distributed._composable.replicate.DDP": replicated_modules_are_recognised,
    # mesh.py, collectives/objects.py, process_groups/, dtensor.py
    "torch.distributed.distributed_c10d._world": in_mesh(
        lambda mesh: (
            next(iter(dist.distributed_c10d._world.pg_group_ranks))
            is dist.distributed_c10d._world.default_pg
        )
    ),
    "torch.distributed.distributed_c10d._canonicalize_group_rank": in_mesh(
        lambda mesh: objects.to_group_rank(dist.group.WORLD, None, 1) == 1
    ),
    "torch.distributed.distributed_c10d._check_not_self_rank": in_mesh(
        lambda mesh: objects.refuse_self(dist.group.WORLD, 1, "destination") is None
    ),
    "torch.distributed.distributed_c10d._warn_not_in_group": rank_outside_a_group_gets_a_warning,
    "torch.testing._internal.distributed.fake_pg": lambda: "fake" in dist.Backend.backend_list,
    "torch._C._distributed_c10d.FakeWork": lambda: simulated_group.ReceivedFrom(1).is_completed(),
    "torch._C._distributed_c10d._create_work_from_future": work_has_a_future_and_can_be_boxed,
    "torch._C._distributed_c10d._set_thread_isolation_mode": lambda: (
        C._distributed_c10d._set_thread_isolation_mode(False) is None
    ),
    "torch._C._dynamo.eval_frame": lambda: (
        # torch 2.11 alone has it
        not hasattr(C._dynamo.eval_frame, "set_eval_frame_override")
        or hasattr(C._dynamo.eval_frame, "_EvalFrameOverride")
    ),
    "torch.utils._config_module": lambda: (
        hasattr(torch.utils._config_module, "ContextVar")
        or torch._dynamo.config.get_config_copy()["disable"] is False
    ),
    "torch.utils._python_dispatch": lambda: hasattr(
        torch.utils._python_dispatch, "_is_in_torch_dispatch_mode"
    ),
    "torch.distributed._local_tensor.LocalTensor": local_tensor_mode_runs_all_ranks,
    "torch.distributed._local_tensor.LocalTensorMode": local_tensor_mode_runs_all_ranks,
    # fake.py, dtensor.py, cuda/, dispatch.py
    "torch._subclasses.fake_tensor": fake_tensors_are_recognised,
    "torch._subclasses.fake_tensor.FakeTensor": fake_tensors_are_recognised,
    "torch._subclasses.fake_tensor.FakeTensorMode": fake_tensors_are_recognised,
    "torch._subclasses.fake_tensor.DataDependentOutputException": fake_tensors_raise_without_data,
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": fake_tensors_raise_without_data,
    "torch._subclasses.fake_tensor.UnsupportedFakeTensorException": (
        fake_tensors_raise_without_data
    ),
    "torch.distributed.tensor._random": lambda: hasattr(
        torch.distributed.tensor._random, "_rng_tracker"
    ),
    "torch.distributed.tensor._redistribute": caches_can_be_cleared,
    "torch.distributed.tensor._dispatch.OpDispatcher": decisions_are_reported,
    "torch.distributed.tensor._dtensor_spec.DTensorSpec": decisions_are_reported,
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": in_mesh(
        lambda mesh: propagation.local_part((4, 6), mesh, (Shard(0), Shard(1))) == (2, 3)
    ),
    "torch.distributed.tensor.debug._clear_fast_path_sharding_prop_cache": caches_can_be_cleared,
    "torch.distributed.tensor.debug._clear_sharding_prop_cache": caches_can_be_cleared,
    "torch.distributed.tensor._sharding_prop.ShardingPropagator": shape_propagation_is_recognised,
    "torch.utils._foreach_utils": lambda: isinstance(
        torch.utils._foreach_utils._foreach_supported_types, list
    ),
    **{
        f"torch.ops.aten._scaled_dot_product_{kind}_attention_backward.default": arguments_are(
            f"torch.ops.aten._scaled_dot_product_{kind}_attention_backward.default",
            first,
            "query",
            "key",
        )
        for kind, first in (
            ("cudnn", "grad_out"),
            ("efficient", "grad_out_"),
            ("flash", "grad_out"),
        )
    },
    "torch.ops.aten._scaled_dot_product_flash_attention": arguments_are(
        "torch.ops.aten._scaled_dot_product_flash_attention.default", "query", "key", "value"
    ),
    "torch.ops.aten._scaled_dot_product_flash_attention_backward": lambda: (
        workspaces.workspace_bytes(torch.ops.aten.relu.default, ()) == 0
    ),
    # collectives/functional.py
    "torch.distributed._functional_collectives": lambda: C._dispatch_has_kernel_for_dispatch_key(
        "_c10d_functional::all_reduce", "Meta"
    ),
    "torch.ops._c10d_functional.all_reduce.default": arguments_are(
        "torch.ops._c10d_functional.all_reduce.default", "input", "reduce_op", "group_name"
    ),
    "torch.ops._c10d_functional.all_gather_into_tensor.default": arguments_are(
        "torch.ops._c10d_functional.all_gather_into_tensor.default",
        "input",
        "group_size",
        "group_name",
    ),
    "torch.ops._c10d_functional.reduce_scatter_tensor.default": arguments_are(
        "torch.ops._c10d_functional.reduce_scatter_tensor.default",
        "input",
        "reduce_op",
        "group_size",
        "group_name",
    ),
    "torch.ops._c10d_functional.all_to_all_single.default": arguments_are(
        "torch.ops._c10d_functional.all_to_all_single.default",
        "input",
        "output_split_sizes",
        "input_split_sizes",
        "group_name",
    ),
    "torch.ops._c10d_functional.wait_tensor.default": lambda: functional.WAIT(torch.ones(1)) == 1,
    # graph.py
    "torch._C._set_grad_enabled": is_in_graphs(graph_nodes.SET_GRAD_ENABLED),
    "torch.amp.autocast_mode._enter_autocast": is_in_graphs(graph_nodes.ENTER_AUTOCAST),
    "torch.amp.autocast_mode._exit_autocast": is_in_graphs(graph_nodes.EXIT_AUTOCAST),
    "torch.autograd.grad_mode._enter_inference_mode": is_in_graphs(graph_nodes.ENTER_INFERENCE),
    "torch.autograd.grad_mode._exit_inference_mode": is_in_graphs(graph_nodes.EXIT_INFERENCE),
    "torch._C._set_fwd_grad_enabled": lambda: (
        C._set_fwd_grad_enabled in graph_switches.SETTERS and C._set_fwd_grad_enabled(True) is None
    ),
    "torch.nn.attention._sdpa_kernel": is_in_graphs(torch.nn.attention._sdpa_kernel),
    "torch._C._autograd._saved_tensors_hooks_disable": saved_tensors_hooks_can_be_disabled,
    "torch._C._autograd._saved_tensors_hooks_enable": saved_tensors_hooks_can_be_disabled,
    "torch.cuda._exchange_device": device_is_exchanged_and_restored,
    "torch.cuda._maybe_exchange_device": device_is_exchanged_and_restored,
    # dynamo.py, dynamo_caches.py
    "torch._dynamo.convert_frame": lambda: observe_compiles()["compiled"],
    "torch._dynamo.exc.Unsupported": lambda: observe_compiles()["skip"],
    "torch._dynamo.exc.UserError": lambda: issubclass(torch._dynamo.exc.UserError, Exception),
    "torch._dynamo.output_graph.OutputGraph": lambda: observe_compiles()["graph"],
    "torch._dynamo.symbolic_convert.InstructionTranslatorBase": lambda: observe_compiles()["stop"],
    "torch._dynamo.utils.compilation_time_metrics": lambda: observe_compiles()["times"],
    "torch._guards.CompileContext": lambda: observe_compiles()["compile_id"] not in ("", "None"),
    "torch._C._dynamo.eval_frame._debug_get_cache_entry_list": (
        compiled_code_is_listed_until_it_is_reset
    ),
    "torch._C._dynamo.eval_frame.reset_code": compiled_code_is_listed_until_it_is_reset,
    "torch._dynamo.config": lambda: torch._dynamo.config.disable is False,
    "torch._dynamo.pgo": lambda: all(
        hasattr(torch._dynamo.pgo, name) for name in ("_CODE_STATE", "reset_code_state")
    ),
    "torch._dynamo.trace_rules": lambda: torch._dynamo.trace_rules.check(torch.compile.__code__),
    "torch._dynamo.utils": lambda: (
        isinstance(torch._dynamo.utils.counters, dict)
        and isinstance(torch._dynamo.utils.warn_once_cache, set)
        and torch._dynamo.utils.CleanupManager.instance is not None
        # Compiled code calls it since 2.15.
        and (torch.__version__ < "2.15" or callable(torch._dynamo.utils.get_current_stream))
    ),
    "torch._dynamo.exc.get_gbid_documentation_link": lambda: (
        "gb0170" in torch._dynamo.exc.get_gbid_documentation_link("Data-dependent branching")
    ),
    "torch._dynamo.lookup_backend": lambda: torch._dynamo.lookup_backend("eager"),
    # aot.py, inductor.py, dynamo.py, checking_modes.py, dispatch.py
    "torch._functorch.aot_autograd.aot_function": lambda: (
        len(aot.trace_graphs(lambda x: [x.sin()], torch.ones(2, requires_grad=True))) == 2
    ),
    "torch._dynamo.backends.common.aot_autograd": graphs_are_compiled_ahead,
    "torch._dynamo.exc.TorchDynamoException": lambda: (
        dynamo.is_compiling(aot_backends.graph_run_error("it failed"))
        and not dynamo.is_compiling(ValueError())
    ),
    "torch._functorch.config": lambda: (
        aot_backends.crossref_setting() in ("off", "all", "custom_ops")
        and torch._functorch.config.patch(
            unlift_effect_tokens=True,
            enable_autograd_cache=False,
            enable_remote_autograd_cache=False,
        )
    ),
    "torch._functorch.aot_autograd": lambda: all(
        hasattr(torch._functorch.aot_autograd, name)
        for name in ("create_aot_state", "aot_stage1_graph_capture", "aot_stage2_compile")
    ),
    "torch.fx.graph._BoxedCodeGen": boxed_code_empties_its_list,
    "torch._inductor.compiler_bisector.CompilerBisector": lambda: (
        list(
            inspect.signature(
                import_module(
                    "torch._inductor.compiler_bisector"
                ).CompilerBisector.disable_subsystem
            ).parameters
        )
        == ["backend", "subsystem", "debug_info"]
    ),
    "torch._higher_order_ops.invoke_subgraph.invoke_subgraph_infer": (subgraph_stays_a_single_call),
    "torch._inductor.runtime.cache_dir_utils.default_cache_dir": lambda: (
        inductor.header_folder().is_absolute()
    ),
    "torch._subclasses.CrossRefFakeMode": ops_are_checked,
    "torch._subclasses.schema_check_mode.SchemaCheckMode": ops_are_checked,
    "torch._library.custom_ops.CustomOpDef": lambda: dispatch.is_custom_op(custom_op()),
    "torch._library.custom_ops.OPDEFS": lambda: (
        custom_op() and dispatch.describe_custom_op("shardscope_canary::same")
    ),
    # data_loading.py, training_hooks.py
    "torch.nn.utils.clip_grad._get_total_norm": clipping_is_watched,
    "torch.utils.data.dataloader._BaseDataLoaderIter": batches_are_watched,
    "torch.nn.utils.clip_grad._clip_grads_with_norm_": clipping_is_watched,
    # export.py, dtensor.py
    "torch._dispatch.python.enable_python_dispatcher": symbolic_sizes_are_divided,
    "torch._dynamo.source.ConstantSource": symbolic_sizes_are_divided,
    "torch.fx._pytree.tree_flatten_spec": nested_values_are_flattened,
    "torch.utils._pytree.tree_flatten": nested_values_are_flattened,
    "torch.utils._pytree.tree_leaves": leaves_are_mapped,
    "torch.utils._pytree.tree_leaves_with_path": nested_values_are_flattened,
    "torch.utils._pytree.tree_map": leaves_are_mapped,
    "torch.utils._pytree.tree_unflatten": nested_values_are_flattened,
}
