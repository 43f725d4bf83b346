"""Ops as torch dispatches them: overloads, names, schemas, dispatch modes, private aten ops."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, final

import torch

from shardscope._torch.graph import is_packet
from shardscope._torch.private import find_class, find_exception, find_name

detect_fake_mode = find_name(
    "torch._guards.detect_fake_mode",
    "distinguish shape propagation from ops that are run, and worlds without data",
)
DataDependentOutputException = find_exception(
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "locate code that reads the value of a tensor without data",
)
if TYPE_CHECKING:
    from torch._ops import OpOverload as _OpOverload
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes

    OpOverload: TypeAlias = _OpOverload[..., Any]
else:
    OpOverload = _OpOverload = find_name("torch._ops.OpOverload", "recognise ops")
    _disable_current_modes = find_name(
        "torch.utils._python_dispatch._disable_current_modes",
        "keep its own tensor work out of users' dispatch modes",
    )
    TorchDispatchMode = find_name(
        "torch.utils._python_dispatch.TorchDispatchMode", "observe the ops of a step"
    )

COPY = find_name("torch.ops.aten._to_copy.default", "keep values known when tensors are moved")
"""The op behind `tensor.to(…)`, if that changes something."""
READ_VALUE = find_name(
    "torch.ops.aten._local_scalar_dense.default",
    "handle code that reads the value of a tensor without data",
)
"""The op behind `.item()`."""

TORCHS_OWN = ("aten", "prims", "inductor_prims", "prim")
"""Namespaces of ops that come with torch."""

push_dispatch_mode = find_name(
    "torch.utils._python_dispatch._push_mode",
    "make tensors without data on the threads of a launched program",
)
"""Activate a mode on this thread until the thread ends; unlike `with`, it leaves no state on it."""
disable_dispatch_modes = _disable_current_modes
"""A context in which no dispatch mode sees the ops that this package runs itself."""


_num_modes = find_name(
    "torch._C._len_torch_dispatch_stack",
    "let selective checkpointing decide whether an op is run",
)
_mode_at = find_name(
    "torch._C._get_dispatch_stack_at", "let selective checkpointing decide whether an op is run"
)
_HigherOrder = find_name("torch._ops.HigherOrderOperator", "recognise ops that take functions")


NEEDED_OF_MODES = (detect_fake_mode, _num_modes, _mode_at)
"""Private names that are required to decide whether an op is issued or only traced."""


def has_modes() -> bool:
    """Whether any dispatch mode is active on this thread."""
    return bool(_num_modes())


def is_user_mode_active() -> bool:
    """Whether the innermost dispatch mode is not one of torch's, and so decides if an op is issued.

    Selective checkpointing may return a saved result instead of issuing the op. A mode that does
    issue the op dispatches it a second time, below itself.
    """
    num_modes = _num_modes()
    if not num_modes:
        return False
    innermost = _mode_at(num_modes - 1)
    return getattr(innermost, "_mode_key", None) is None


def is_higher_order(op: Any) -> bool:
    """Whether `op` takes functions: such ops have no packet and are no collectives."""
    return isinstance(op, _HigherOrder)


def is_overload(op: object) -> TypeGuard[OpOverload]:
    """Whether `op` is one overload of an op, as `aten.add.Tensor` is."""
    return isinstance(op, _OpOverload)


def op_packet(op: Any) -> Any:
    """The packet that `op` is an overload of: `aten.add` of `aten.add.Tensor`."""
    return op._overloadpacket


def op_schema(op: Any) -> Any:
    """The schema of `op`: its arguments with their names and types, and what it returns."""
    return op._schema


def name_arguments(op: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of the op's schema, in its order, with defaults.

    Without a schema, as for functions and higher-order ops, arguments are named by position.
    """
    if not is_overload(op):
        return {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    named = {}
    for index, argument in enumerate(op_schema(op).arguments):
        if index < len(args):
            named[argument.name] = args[index]
        elif argument.name in kwargs:
            named[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            named[argument.name] = argument.default_value
    return named


def has_fake_tensors(args: Any) -> bool:
    """Whether an op with these arguments computes shapes only: on fake tensors or in their mode."""
    return detect_fake_mode(args) is not None


_all_op_names = find_name("torch._C._dispatch_get_all_op_names", "check whether an op exists")


def all_op_names() -> set[str]:
    """The names of all registered ops, as `aten::relu`, without overloads.

    Ops of libraries that are loaded later appear once they are loaded.
    """
    return {name.split(".")[0] for name in _all_op_names()}


def dispatcher_name(op: Any) -> str | None:
    """`aten::relu` for an op with or without an overload; None for anything that is not an op."""
    if is_overload(op):
        return str(op._schema.name)
    if is_packet(op):
        return str(op._qualified_op_name)
    if is_higher_order(op):
        return f"{op.namespace}::{op.name()}"
    return None


def overloads_of(name: str) -> Iterator[OpOverload]:
    """The overloads of the op with this name in the dispatcher, such as `aten::relu`."""
    namespace, _, op = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), op)
    for overload in packet.overloads():
        yield getattr(packet, overload)


_dump = find_name("torch._C._dispatch_dump", "import the module that registered an op in a worker")
_TORCHS = ("aten", "prim", "prims")
_NAMESPACES = (type(torch.ops), type(torch.ops.aten))
_REGISTERED = re.compile(r"^debug: registered at (.+):\d+", re.MULTILINE)


def is_operator(value: object) -> bool:
    """Whether `value` is an op of `torch.ops`: an overload, a packet or a higher-order op."""
    return is_overload(value) or is_packet(value) or is_higher_order(value)


def name_operator(operator: Any) -> tuple[str, ...]:
    """The attribute names from `torch.ops` to the op: `("aten", "add", "Tensor")`."""
    if is_higher_order(operator):
        return ("higher_order", operator.name())
    if is_packet(operator):
        return tuple(str(operator).split("."))
    namespace, _, rest = operator.name().partition("::")
    name, _, overload = rest.partition(".")
    return (namespace, name, overload or "default")


def format_operator(value: Any) -> str:
    """The Python expression of an op of torch's or of a namespace, `torch.ops.aten`; else empty."""
    if isinstance(value, _NAMESPACES):
        return str(value.__name__)
    if not is_overload(value) and not is_packet(value):
        return ""
    names = name_operator(value)
    return ".".join(["torch.ops", *names]) if names[0] in _TORCHS else ""


def find_operator(names: tuple[str, ...], *, module: str = "") -> Any:
    """The op with these attribute names below `torch.ops`, or None.

    `module`, which defines the op, is imported first.
    """
    if module:
        importlib.import_module(module)
    operator: Any = torch.ops
    for name in names:
        operator = getattr(operator, name, None)
    return operator


def registered_at(namespace: str, name: str) -> str:
    """The Python or C++ file that registered an op; empty if torch does not know it."""
    match = _REGISTERED.search(_dump(f"{namespace}::{name}"))
    return match[1] if match else ""


PRIVATE_ATEN_OPS = (
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "embedding_bag",
    "embedding_bag_forward_only",
    "fused_rms_norm",
    "grouped_mm",
    "log_softmax",
    "native_batch_norm_legit",
    "native_batch_norm_legit.no_stats",
    "native_batch_norm_legit_functional",
    "native_batch_norm_legit_no_training",
    "reshape_alias",
    "safe_softmax",
    "scaled_dot_product_cudnn_attention",
    "scaled_dot_product_efficient_attention",
    "scaled_dot_product_flash_attention",
    "scaled_dot_product_flash_attention_for_cpu",
    "softmax",
    "to_copy",
    "unsafe_view",
    "upsample_bicubic2d_aa",
    "upsample_bicubic2d_aa.vec",
    "upsample_bilinear2d_aa",
    "upsample_bilinear2d_aa.vec",
    "upsample_nearest_exact1d",
    "upsample_nearest_exact1d.vec",
    "upsample_nearest_exact2d",
    "upsample_nearest_exact2d.vec",
    "upsample_nearest_exact3d",
    "upsample_nearest_exact3d.vec",
)


def private_aten_op(name: str) -> OpOverload | None:
    """The aten op whose name is `name` after an underscore; None if this torch does not have it.

    `softmax` is `aten._softmax.default`; `native_batch_norm_legit.no_stats` names an overload.
    """
    assert name in PRIVATE_ATEN_OPS, (
        f"list {name} among the inner ops, so that its canary watches it"
    )
    packet, _, overload = name.partition(".")
    op: OpOverload | None = getattr(
        getattr(torch.ops.aten, f"_{packet}", None), overload or "default", None
    )
    return op


_FLOP_NEED = "count the FLOPs of attention on the CPU"
_FLASH = "torch.ops.aten._scaled_dot_product_flash_attention"

FLOP_ALIASES = {
    "_scaled_dot_product_flash_attention_for_cpu": find_name(_FLASH, _FLOP_NEED),
    "_scaled_dot_product_flash_attention_for_cpu_backward": find_name(
        f"{_FLASH}_backward", _FLOP_NEED
    ),
}
"""By op name, the equivalent op for which torch has a FLOP formula."""


OPDEFS = find_name("torch._library.custom_ops.OPDEFS", "send a custom op to another process")
CustomOpDef = find_class(
    "torch._library.custom_ops.CustomOpDef", "send a custom op to another process"
)

Function = Callable[..., Any]


@final
@dataclass(frozen=True)
class CustomOp:
    """The functions and settings that a custom op was defined with."""

    name: str
    schema: str
    mutated: tuple[str, ...]
    tags: tuple[torch.Tag, ...]
    function: Function
    kernels: Mapping[str | None, Function]  # by device type; None stands for all
    fake: Function | None
    backward: Function | None
    setup_context: Function | None


def is_custom_op(value: object) -> bool:
    """Whether `value` is an op definition that `custom_op` returned."""
    return isinstance(value, CustomOpDef)


def describe_custom_op(op: Any) -> CustomOp | None:
    """The parts of a custom op, given its definition or name; None for other ops."""
    op = OPDEFS.get(op) if isinstance(op, str) else op
    if op is None:
        return None
    arguments = op._opoverload._schema.arguments
    written = (arg.name for arg in arguments if arg.alias_info and arg.alias_info.is_write)
    return CustomOp(
        name=op._qualname,
        schema=op._schema,
        mutated=tuple(written),
        tags=tuple(tag for tag in op._opoverload.tags if tag != torch.Tag.pt2_compliant_tag),
        function=op._init_fn,
        kernels={device: _user_function(kernel, op) for device, kernel in op._backend_fns.items()},
        fake=op._abstract_fn,
        backward=op._backward_fn,
        setup_context=op._setup_context_fn,
    )


def register_custom_op(op: CustomOp) -> Any:
    """Define the op, or return the existing definition with its name."""
    existing = OPDEFS.get(op.name)
    if existing is not None:
        return existing
    devices = [device for device in op.kernels if device is not None]
    definition = torch.library.custom_op(
        op.name,
        op.function,
        mutates_args=op.mutated,
        device_types=None if None in op.kernels else devices,
        schema=op.schema,
        tags=op.tags,
    )
    for device, kernel in op.kernels.items():
        definition.register_kernel(device, kernel)
    if op.fake is not None:
        definition.register_fake(op.fake)
    if op.backward is not None:
        definition.register_autograd(op.backward, setup_context=op.setup_context)
    _DEFINITIONS.append(definition)
    return definition


_DEFINITIONS: list[Any] = []  # torch unregisters an op when its definition is garbage-collected


def _user_function(kernel: Function, op: Any) -> Function:
    """The user's kernel, which torch wraps in a function that may choose another kernel."""
    wrapped = inspect.unwrap(kernel)
    cells: dict[str, Any] = dict(
        zip(wrapped.__code__.co_freevars, wrapped.__closure__ or (), strict=True)
    )
    function: Function = cells["fn"].cell_contents if "fn" in cells else op._init_fn
    return function
