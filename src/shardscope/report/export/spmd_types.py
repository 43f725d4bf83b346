"""Inferred types as a Python module that asserts them with the package spmd_types.

The module has a table of types, and a function that adds hooks to a model's modules. Types that
spmd_types cannot express are left out: those that the values do not decide, means, and the
placements of DTensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardscope.record import AxisTypes, InferredTypes, Recording, TensorRole, TensorTypes

_LOCAL = ("R", "I", "V", "P")
_HEAD = '''\
"""Assertions of the SPMD types that `shardscope types` inferred on {mesh}.

    with spmd_types.set_current_mesh(mesh), spmd_types.checker.typecheck():
        add_assertions(model)
        model(batch)
"""

import dataclasses
import re

import spmd_types as spmd
from spmd_types import I, P, PartitionSpec, R, S, V

WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\\.")
LAYER = re.compile(r"(?<![^.])[0-9]+(?![^.])")

# Name of a module or parameter (* is the number of a layer), what it is, and where in the inputs or
# outputs: the types along the mesh axes, and the axes of dims that several axes shard.
TYPES = {{
'''
_TAIL = '''\
}


def add_assertions(model):
    """Assert the types of parameters and buffers now, and of inputs and outputs at each call.

    Returns the handles of the hooks.
    """
    for kind, tensors in (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
    ):
        for name, tensor in tensors:
            check(name, kind, "", tensor)
    handles = []
    for name, module in model.named_modules():
        before, after = make_hooks(name)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    return handles


def make_hooks(name):
    """Hooks that assert the types of what a module takes, and of what it returns."""

    def before(module, args, kwargs):
        for path, tensor in list_tensors([*args, kwargs] if kwargs else list(args)):
            check(name, "input", path, tensor)

    def after(module, args, output):
        for path, tensor in list_tensors(output):
            check(name, "output", path, tensor)

    return before, after


def check(name, kind, path, tensor):
    """Assert the types of a tensor, if it has any; a DTensor has placements."""
    name = WRAPPERS.sub("", name)
    for key in (name, LAYER.sub("*", name)):
        if (key, kind, path) in TYPES and not hasattr(tensor, "placements"):
            axes, dims = TYPES[key, kind, path]
            spec = PartitionSpec(*dims) if dims else None
            spmd.assert_type(tensor, axes, partition_spec=spec)
            return


def list_tensors(value, path=""):
    """The tensors in nested containers, with what leads to each."""
    if hasattr(value, "register_hook"):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from list_tensors(item, f"{path}[{key!r}]")
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name in value._fields:
            yield from list_tensors(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from list_tensors(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from list_tensors(getattr(value, field.name), f"{path}.{field.name}")
'''


def render_spmd_types(recording: Recording) -> Iterator[bytes]:
    """Render the module for the first mesh of a recording."""
    types = recording.types[0]
    mesh = ", ".join(f"{axis.name}={axis.size}" for axis in types.axes)
    yield _HEAD.format(mesh=mesh).encode()
    for line in _list_entries(types):
        yield f"    {line},\n".encode()
    yield _TAIL.encode()


def _list_entries(types: InferredTypes) -> Iterator[str]:
    """Entries of the table: one for all layers with the same types, or one for each."""
    entries: dict[tuple[TensorTypes, str], str] = {}
    by_shape: dict[tuple[str, str, str], set[str]] = {}
    for tensor in types.tensors:
        entry = _write_types(tensor, types)
        if entry:
            entries[tensor, entry] = entry
            by_shape.setdefault(_key(tensor, is_folded=True), set()).add(entry)
    written: set[tuple[str, str, str]] = set()
    for (tensor, _), entry in entries.items():
        is_folded = len(by_shape[_key(tensor, is_folded=True)]) == 1
        key = _key(tensor, is_folded=is_folded)
        if key not in written:
            written.add(key)
            yield f"{key!r}: {entry}"


def _key(tensor: TensorTypes, *, is_folded: bool) -> tuple[str, str, str]:
    label = tensor.describe(is_folded=is_folded)
    name = label[: len(label) - len(tensor.path)] if tensor.path else label
    return "" if name == "·" else name, str(tensor.role), tensor.path


def _write_types(tensor: TensorTypes, types: InferredTypes) -> str:
    """The types along the axes, and the PartitionSpec's entries: `{"tp": S(0)}, ()`."""
    if tensor.call is not None or any(axis.declared for axis in tensor.axes):
        return ""
    local = {axis.axis: _find_type(tensor, axis, types) for axis in tensor.axes}
    known = {name: kind for name, kind in local.items() if kind}
    if not known:
        return ""
    is_ordered = tensor.order in ("", "strided")
    sharding: dict[int, list[str]] = {}
    for name, kind in known.items():
        if kind.startswith("S("):
            sharding.setdefault(int(kind[2:-1]), []).append(name)
            known[name] = kind if is_ordered else "V"
    if not is_ordered or all(len(names) == 1 for names in sharding.values()):
        return f"({_write_dict(known)}, ())"
    # Several axes shard a dim: the first is the outermost, unless chunks are strided.
    for names in sharding.values():
        if tensor.order == "strided":
            names.reverse()
    plain = {name: "V" if kind.startswith("S(") else kind for name, kind in known.items()}
    entries = [sharding.get(dim) for dim in range(len(tensor.shape))]
    return f"({_write_dict(plain)}, ({_write_entries(entries)}))"


def _write_dict(types: dict[str, str]) -> str:
    return "{" + ", ".join(f"{name!r}: {kind}" for name, kind in types.items()) + "}"


def _write_entries(entries: Sequence[list[str] | None]) -> str:
    return "".join(
        "None, " if names is None else f"{tuple(names) if len(names) > 1 else names[0]!r}, "
        for names in entries
    )


def _find_type(tensor: TensorTypes, axis: AxisTypes, types: InferredTypes) -> str:
    """The type in spmd_types along an axis; empty if it has none."""
    if axis.forward != "R":
        return axis.forward if axis.forward in _LOCAL or axis.forward.startswith("S(") else ""
    if tensor.role is TensorRole.PARAMETER:
        # Its gradient is recorded after it was reduced. It was partial before that if each rank
        # computed it from a shard.
        return "R" if _is_module_sharded(tensor.module, axis.axis, types) else "I"
    return "I" if axis.gradient == "R" else "R"


def _is_module_sharded(module: str, axis: str, types: InferredTypes) -> bool:
    return any(
        candidate.name == module
        and candidate.role is TensorRole.OUTPUT
        and any(
            a.axis == axis and (a.forward == "V" or a.forward[0] == "S") for a in candidate.axes
        )
        for candidate in types.tensors
    )
