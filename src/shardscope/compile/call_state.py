"""The state that a call can read and change: its arguments, and the globals, closures, class
attributes and objects that its code names.

`walk_call` lists that state, and `describe_values` makes snapshots of it, so that two calls can be
compared by what they changed. `preserved_state.py` restores it after a call.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import islice
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, final

import torch
from torch import Tensor, nn

from shardscope._torch.modules import own_parts

Named = tuple[str, Any]
_MAX_OBJECTS = 50_000  # visited by one walk; plain values such as numbers are not counted
_MAX_KEYS = 20  # of a dict or set, in a description
PLAIN_TYPES = (
    *(bool, int, float, complex, str, bytes, NoneType, Enum),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
GLOBAL_OPERATIONS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")
GENERATORS = (random.Random, torch.Generator)
_NOT_THE_USERS = {"torch", "functorch", "numpy", "triton", "shardscope", *sys.stdlib_module_names}
_PRIVATE = ("_dynamo", "_torchdynamo", "_is_torch_compile", "__")
# Set by torch.compile once Lightning has been imported, which replaces it.
_COMPILERS_OWN = frozenset({"_compile_kwargs"})
_TORCHS_OWN = {name for name in dir(nn.Module()) if name.startswith("_")}


@final
class StateWalk:
    """Iterates over (name, value) pairs breadth first, so that names are short.

    Each container and object is visited once; a tensor, and in data any value, has as many names
    as it has positions. After `limit` objects the walk stops, and `is_complete` is False.
    """

    def __init__(
        self, roots: Iterable[Named], *, is_data: bool = False, limit: int | None = None
    ) -> None:
        self._roots = tuple(roots)
        self._is_data = is_data
        self._limit = _MAX_OBJECTS if limit is None else limit
        self.is_complete = True

    def __iter__(self) -> Iterator[Named]:
        queue = deque(self._roots)
        visited: dict[int, Any] = {}  # by id; keeps objects alive, so that no id is reused
        while queue:
            name, value = queue.popleft()
            if isinstance(value, PLAIN_TYPES):
                yield name, value
                continue
            is_new = id(value) not in visited
            if is_new and len(visited) >= self._limit:
                self.is_complete = False
                return
            visited[id(value)] = value
            if is_new or isinstance(value, Tensor) or self._is_data:
                yield name, value
            if is_new:
                parts = _list_parts(value, self._is_data)
                queue.extend((_join(name, part), inner) for part, inner in parts)


def walk_call(fn: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]) -> StateWalk:
    """All values that a call can reach, by names such as `layer.weight`, `argument 0['x']`."""
    arguments = [*((str(index), value) for index, value in enumerate(args)), *kwargs.items()]
    return StateWalk([("", fn), *((f"argument {name}", value) for name, value in arguments)])


def walk_values(name: str, value: Any) -> StateWalk:
    """A value and all that it contains; an object in two positions is listed under both names."""
    return StateWalk([(name, value)], is_data=True)


def list_uncompared(walk: StateWalk) -> list[str]:
    """A note for each part of a call's state that `walk`, once it has run, does not contain."""
    functions = [value for _, value in walk if isinstance(value, FunctionType)]
    notes = []
    if not walk.is_complete:
        notes.append(
            f"Only the first {_MAX_OBJECTS:,} objects that the call can reach or returns were "
            "compared and restored; changes in the others are not seen."
        )
    for function in filter(is_user_function, functions):
        modules = [
            name for name in names_used(function.__code__, "IMPORT_NAME") if is_user_module(name)
        ]
        if modules:
            notes.append(
                f"{function.__name__} imports {', '.join(modules)} while it runs; changes in what "
                "it imports there are not seen."
            )
    return list(dict.fromkeys(notes))


def _join(name: str, part: str) -> str:
    """The name of a part: a suffix with a dot or bracket is appended, others stand alone."""
    is_part = not part or part[0] in ".["
    return f"{name}{part}".removeprefix(".") if is_part else part


def _list_parts(value: Any, is_data: bool) -> Iterator[Named]:
    if isinstance(value, Tensor):
        yield from _list_attributes(value)
    elif isinstance(value, nn.Module):
        yield from _list_module(value)
        yield from _list_code(type(value))
    elif isinstance(value, Mapping):
        yield from ((_format_key(*item), item_value) for item, item_value in enumerate_items(value))
        keys = islice(enumerate(value), _MAX_KEYS, None)  # keys that its description omits
        yield from ((f"[key at {index}]", _format(key)) for index, key in keys)
    elif isinstance(value, set | frozenset):
        if len(value) > _MAX_KEYS:
            yield from ((f"[{_format(element)}]", "an element") for element in value)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from (
            (f".{name}", item_value) for name, item_value in zip(value._fields, value, strict=False)
        )
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{index}]", item_value) for index, item_value in enumerate(value))
    elif isinstance(value, MethodType | functools.partial | FunctionType | type):
        if not is_data:
            yield from _list_code(value)
    elif _has_attributes(value):
        yield from _list_attributes(value)
        if not is_data:
            yield from _list_code(type(value))


def enumerate_items(value: Mapping[Any, Any]) -> Iterator[tuple[tuple[int, Any], Any]]:
    """The items of a mapping, each as ((position, key), value)."""
    return (((index, key), item_value) for index, (key, item_value) in enumerate(value.items()))


def _format_key(index: int, key: Any) -> str:
    return f"[{key!r:.60}]" if isinstance(key, PLAIN_TYPES) else f"[key {index}]"


def _list_module(module: nn.Module) -> Iterator[Named]:
    yield from ((f".{name}", part) for name, part in own_parts(module))
    for name, value in _list_attributes(module):
        if name.removeprefix(".") not in _TORCHS_OWN | _COMPILERS_OWN:
            yield name, value


def _list_attributes(value: Any) -> Iterator[Named]:
    attributes = dict(vars(value)) if hasattr(value, "__dict__") else {}
    attributes |= {name: getattr(value, name) for name in list_slots(value)}
    is_users = is_user_module(type(value).__module__)
    for name, attribute in attributes.items():
        if not name.startswith(_PRIVATE if is_users else "_"):
            yield f".{name}", attribute


def list_slots(value: Any) -> list[str]:
    """The names of the slots, set in this object, of classes in user code."""
    names = []
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ()) if is_user_module(cls.__module__) else ()
        names += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if not name.startswith("__") and hasattr(value, name)]


def _has_attributes(value: Any) -> bool:
    """Whether the attributes of a value are state that a call may change."""
    if isinstance(value, (ModuleType, type, *GENERATORS)) or hasattr(type(value), "__next__"):
        return False
    return hasattr(value, "__dict__") or bool(list_slots(value))


def _list_code(value: Any) -> Iterator[Named]:
    """The values that code names: closures, globals, defaults, and class attributes."""
    if isinstance(value, MethodType):
        yield "", value.__self__
        yield "", value.__func__
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield from ((f"[{index}]", argument) for index, argument in enumerate(value.args))
        yield from ((f".{name}", argument) for name, argument in value.keywords.items())
    elif isinstance(value, FunctionType):
        if is_user_function(value):
            yield from _list_function(value)
        elif hasattr(value, "__wrapped__"):  # by a decorator such as torch.no_grad()
            yield "", value.__wrapped__
    elif isinstance(value, type) and is_user_module(value.__module__):
        yield from _list_class(value)


def _list_class(cls: type) -> Iterator[Named]:
    for base in cls.__mro__:
        if not is_user_module(base.__module__):
            continue
        for name, attribute in vars(base).items():
            if isinstance(attribute, FunctionType):
                yield "", attribute
            elif not name.startswith("__") and not hasattr(attribute, "__get__"):
                yield f"{base.__name__}.{name}", attribute


def _list_function(function: FunctionType) -> Iterator[Named]:
    for name, cell in list_cells(function):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # an empty cell
            continue
    attributes = names_used(function.__code__, *_ATTRIBUTES)
    for name in names_used(function.__code__, *GLOBAL_OPERATIONS):
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            is_users = is_user_module(value.__name__)
            read = attributes if is_users else names_assigned_to(function.__code__, name)
            variables = vars(value)
            yield from (
                (f"{name}.{attribute}", variables[attribute])
                for attribute in read
                if attribute in variables
            )
        elif name in function.__globals__:
            yield name, value
    title = function.__name__
    for index, default in enumerate(function.__defaults__ or ()):
        yield f"{title} default {index}", default
    for name, default in (*(function.__kwdefaults__ or {}).items(), *vars(function).items()):
        if not name.startswith(_PRIVATE):
            yield f"{title}.{name}", default


def list_cells(function: FunctionType) -> Iterator[tuple[str, Any]]:
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def names_used(code: CodeType, *operations: str) -> list[str]:
    """The names used by these bytecode operations in code and in functions defined in it."""
    instructions = dis.get_instructions(code)
    names = [str(step.argval) for step in instructions if step.opname in operations]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names += names_used(constant, *operations)
    return list(dict.fromkeys(names))


def names_assigned_to(code: CodeType, module: str) -> list[str]:
    """The attributes that code assigns, as `module.name = …` or `module.name += …`."""
    steps = list(dis.get_instructions(code))
    names = []
    for load, *rest in zip(steps, steps[1:], steps[2:], strict=False):
        if (load.opname, load.argval) == ("LOAD_GLOBAL", module):
            store = rest[1] if rest[0].opname == "COPY" else rest[0]
            if store.opname == "STORE_ATTR" or rest[0].opname == "COPY":
                names.append(str(store.argval))
    return list(dict.fromkeys(names))


def is_user_function(function: FunctionType) -> bool:
    """Whether a function is user code, by its globals: a wrapper copies its inner `__module__`."""
    return is_user_module(function.__globals__.get("__name__"))


@functools.cache
def is_user_module(module: object) -> bool:
    """Whether a module is user code: not Python's, torch's or an installed package's."""
    if not isinstance(module, str) or module.partition(".")[0] in _NOT_THE_USERS:
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not {"site-packages", "dist-packages"} & {*Path(file).parts}


def describe_values(named: Iterable[Named]) -> dict[str, Any]:
    """Copies of tensors, plain values as they are, and descriptions of containers and objects."""
    return {name: _describe(value) for name, value in named if not _is_code(value)}


def _is_code(value: Any) -> bool:
    return isinstance(value, FunctionType | MethodType | ModuleType | type | functools.partial)


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, PLAIN_TYPES):
        return value
    if is_array(value):
        return _describe_array(value)
    kind = type(value).__name__
    if isinstance(value, Mapping):
        return f"{kind} with the keys {_format_some(value)}"
    if isinstance(value, set | frozenset):
        return f"{kind} of {_format_some(sorted(map(_format, value)))}"
    if isinstance(value, bytearray):
        return torch.tensor(list(value), dtype=torch.uint8)
    if isinstance(value, list | tuple | deque):
        return f"{kind} of {len(value)}"
    # Compilers have their own iterator types, so the kind is not compared.
    return "iterator" if isinstance(value, Iterator) else kind


def is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _describe_array(array: Any) -> Any:
    try:
        return torch.from_numpy(array.copy())
    except (TypeError, ValueError):  # a dtype or byte order that torch does not support
        return f"{array.dtype} {array.tolist()!r:.200}"


def _format_some(values: Any) -> str:
    texts = [_format(value) for value in values]
    more = ", …" if len(texts) > _MAX_KEYS else ""
    return f"{len(texts)}: {', '.join(texts[:_MAX_KEYS])}{more}" if texts else "none"


def _format(value: Any) -> str:
    return f"{value!r:.60}" if isinstance(value, (*PLAIN_TYPES, tuple)) else type(value).__name__
