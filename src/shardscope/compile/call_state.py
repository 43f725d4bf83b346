"""What a call can read and change: its arguments, what its code names, and what those hold.

`walk_call` finds it, `everything_kept` puts it back after a call, and `describe_values` tells what
it is, so that two calls can be compared by what they changed.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from shardscope._torch.kept_tensors import KeptTensors
from shardscope._torch.modules import own_parts
from shardscope.errors import CompileError

__all__ = [
    "describe_values",
    "everything_kept",
    "random_state_kept",
    "state_of_code_kept",
    "walk_call",
    "walk_values",
]

Named = tuple[str, Any]
_MAX_VALUES = 50_000  # that are looked at, of one call
_MAX_KEYS = 20  # of a dict or set, in words
_PLAIN = (
    *(bool, int, float, complex, str, bytes, NoneType, Enum),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")
_GENERATORS = (random.Random, torch.Generator)
_NOT_THE_USERS = {"torch", "functorch", "numpy", "triton", "shardscope", *sys.stdlib_module_names}
_PRIVATE = ("_dynamo", "_torchdynamo", "_is_torch_compile", "__")
_TORCHS_OWN = {name for name in dir(nn.Module()) if name.startswith("_")}


def walk_call(
    fn: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> Iterator[Named]:
    """All that a call can reach, each by a name: `layer.weight`, `argument 0['x']`, `COUNTS`."""
    arguments = [*((str(place), value) for place, value in enumerate(args)), *kwargs.items()]
    roots = [("", fn), *((f"argument {name}", value) for name, value in arguments)]
    return _walk(roots)


def walk_values(name: str, value: Any) -> Iterator[Named]:
    """A value and all that it holds; what is held twice is named twice."""
    return _walk([(name, value)], is_data=True)


def _walk(roots: Iterable[Named], *, is_data: bool = False) -> Iterator[Named]:
    """Breadth first, so that names are short. Containers and objects are met once."""
    coming = deque(roots)
    seen: dict[int, Any] = {}
    while coming and len(seen) < _MAX_VALUES:
        name, value = coming.popleft()
        if isinstance(value, _PLAIN):
            yield name, value
            continue
        is_new = id(value) not in seen
        seen[id(value)] = value  # alive, so that no other object gets its number
        if is_new or isinstance(value, Tensor) or is_data:
            yield name, value
        if is_new:
            coming.extend((_join(name, part), held) for part, held in _list_parts(value, is_data))


def _join(name: str, part: str) -> str:
    """Parts begin with a dot or a bracket; those that do not are known by their own name."""
    is_part = not part or part[0] in ".["
    return f"{name}{part}".removeprefix(".") if is_part else part


def _list_parts(value: Any, is_data: bool) -> Iterator[Named]:
    if isinstance(value, Tensor):
        yield from _list_attributes(value)
    elif isinstance(value, nn.Module):
        yield from _list_module(value)
        yield from _list_code(type(value))
    elif isinstance(value, Mapping):
        yield from ((_spell_key(*item), held) for item, held in enumerate_items(value))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{name}", held) for name, held in zip(value._fields, value, strict=False))
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{place}]", held) for place, held in enumerate(value))
    elif isinstance(value, MethodType | functools.partial | FunctionType | type):
        if not is_data:
            yield from _list_code(value)
    elif _has_attributes(value):
        yield from _list_attributes(value)
        if not is_data:
            yield from _list_code(type(value))


def enumerate_items(value: Mapping[Any, Any]) -> Iterator[tuple[tuple[int, Any], Any]]:
    """The items of a mapping: place and key, and value."""
    return (((place, key), held) for place, (key, held) in enumerate(value.items()))


def _spell_key(place: int, key: Any) -> str:
    return f"[{key!r:.60}]" if isinstance(key, _PLAIN) else f"[key {place}]"


def _list_module(module: nn.Module) -> Iterator[Named]:
    yield from ((f".{name}", part) for name, part in own_parts(module))
    for name, value in _list_attributes(module):
        if name.removeprefix(".") not in _TORCHS_OWN:
            yield name, value


def _list_attributes(value: Any) -> Iterator[Named]:
    held = dict(vars(value)) if hasattr(value, "__dict__") else {}
    held |= {name: getattr(value, name) for name in _list_slots(value)}
    is_users = _is_users(type(value).__module__)
    for name, one in held.items():
        if not name.startswith(_PRIVATE if is_users else "_"):
            yield f".{name}", one


def _list_slots(value: Any) -> list[str]:
    """The slots of an object of the user's that are filled."""
    found = []
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ()) if _is_users(cls.__module__) else ()
        found += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in found if not name.startswith("__") and hasattr(value, name)]


def _has_attributes(value: Any) -> bool:
    """Whether it is an object whose attributes are somebody's state."""
    if isinstance(value, (ModuleType, type, *_GENERATORS)) or hasattr(type(value), "__next__"):
        return False
    return hasattr(value, "__dict__") or bool(_list_slots(value))


def _list_code(value: Any) -> Iterator[Named]:
    """What code names: closures, globals, defaults, and the attributes of classes."""
    if isinstance(value, MethodType):
        yield "", value.__self__
        yield "", value.__func__
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield from ((f"[{place}]", held) for place, held in enumerate(value.args))
        yield from ((f".{name}", held) for name, held in value.keywords.items())
    elif isinstance(value, FunctionType):
        if _is_users_function(value):
            yield from _list_function(value)
    elif isinstance(value, type) and _is_users(value.__module__):
        yield from _list_class(value)


def _list_class(cls: type) -> Iterator[Named]:
    for base in cls.__mro__:
        if not _is_users(base.__module__):
            continue
        for name, held in vars(base).items():
            if isinstance(held, FunctionType):
                yield "", held
            elif not name.startswith("__") and not hasattr(held, "__get__"):
                yield f"{base.__name__}.{name}", held


def _list_function(function: FunctionType) -> Iterator[Named]:
    for name, cell in _list_cells(function):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # not filled yet
            continue
    attributes = _names_in(function.__code__, *_ATTRIBUTES)
    for name in _names_in(function.__code__, *_GLOBALS):
        held = function.__globals__.get(name)
        if isinstance(held, ModuleType):
            if _is_users(held.__name__):
                named = (one for one in attributes if one in vars(held))
                yield from ((f"{name}.{one}", vars(held)[one]) for one in named)
        elif name in function.__globals__:
            yield name, held
    title = function.__name__
    for place, held in enumerate(function.__defaults__ or ()):
        yield f"{title} default {place}", held
    for name, held in (*(function.__kwdefaults__ or {}).items(), *vars(function).items()):
        if not name.startswith(_PRIVATE):
            yield f"{title}.{name}", held


def _list_cells(function: FunctionType) -> Iterator[tuple[str, Any]]:
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def _names_in(code: CodeType, *operations: str) -> list[str]:
    """Names that code, or functions defined in it, does one of these operations with."""
    names = [str(one.argval) for one in dis.get_instructions(code) if one.opname in operations]
    for one in code.co_consts:
        if isinstance(one, CodeType):
            names += _names_in(one, *operations)
    return list(dict.fromkeys(names))


def _is_users_function(function: FunctionType) -> bool:
    """Whether the user wrote it; one that wraps another says that it is from where that is."""
    return _is_users(function.__globals__.get("__name__"))


@functools.cache
def _is_users(module: object) -> bool:
    """Whether a module is neither Python's, nor torch's, nor of an installed package."""
    if not isinstance(module, str) or module.partition(".")[0] in _NOT_THE_USERS:
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not {"site-packages", "dist-packages"} & {*Path(file).parts}


# ── What was changed, put back ───────────────────────────────────────────────────────────────


@contextmanager
def everything_kept(
    fn: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Put back whatever a call changes: all that it can reach, random numbers, modes."""
    values = (value for _, value in walk_call(fn, args, kwargs))
    with random_state_kept(), _modes_kept(), _values_kept(values):
        yield


@contextmanager
def state_of_code_kept(fn: Callable[..., Any]) -> Iterator[None]:
    """Put back what a call changes of globals, classes and closures, and not of `fn` itself."""
    code = type(fn) if isinstance(fn, nn.Module) else fn
    with _values_kept(value for _, value in _walk([("", code)])):
        yield


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Let those who draw random numbers afterwards draw as if nothing had been drawn."""
    python, cpu = random.getstate(), torch.get_rng_state()
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = torch.cuda.get_rng_state_all() if is_used else []
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)


@contextmanager
def _modes_kept() -> Iterator[None]:
    has_gradients, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_grad_enabled(has_gradients)
        torch.set_default_dtype(dtype)


@contextmanager
def _values_kept(values: Iterable[Any]) -> Iterator[None]:
    kept = _KeptValues()
    for value in values:
        kept.keep(value)
    try:
        yield
    finally:
        kept.put_back()


@final
class _KeptValues:
    """Remembers what values hold, and puts it back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self._tensors = KeptTensors()

    def keep(self, value: Any) -> None:
        """Remember what a value holds, and not what those things hold."""
        if isinstance(value, Tensor):
            self._keep_tensor(value)
        elif isinstance(value, (MethodType, functools.partial, ModuleType, *_PLAIN)):
            pass
        elif isinstance(value, FunctionType):
            self._keep_function(value)
        elif isinstance(value, type):
            self._keep_class(value)
        elif isinstance(value, dict | list | set | deque | bytearray):
            self._keep_container(value)
        elif isinstance(value, _GENERATORS):
            self._keep_generator(value)
        elif _is_array(value):
            self._keep_array(value)
        if not isinstance(value, (type, ModuleType, *_PLAIN)):
            self._keep_attributes(value)

    def put_back(self) -> None:
        """Make everything as it was remembered."""
        for undo in reversed(self._undo):
            undo()
        self._tensors.put_back()

    def _keep_tensor(self, tensor: Tensor) -> None:
        if is_lazy(tensor):
            raise CompileError(
                "The model has parameters that get their shape when it is first called. Call it "
                "once before."
            )
        self._tensors.keep(tensor)
        if not tensor.is_leaf:
            return
        gradient = tensor.grad
        if gradient is not None:
            self._tensors.keep(gradient)

        def undo() -> None:
            if tensor.is_leaf and tensor.grad is not gradient:  # one written to in place is none
                tensor.grad = gradient

        self._undo.append(undo)

    def _keep_container(self, container: Any) -> None:
        is_dict = isinstance(container, dict)
        held = list(container.items()) if is_dict else list(container)
        kind = next(one for one in _CONTAINERS if isinstance(container, one))

        def undo() -> None:
            now = list(container.items()) if is_dict else list(container)
            if not _is_identical(now, held):
                kind.clear(container)
                fill = kind.update if hasattr(kind, "update") else kind.extend
                fill(container, held)

        self._undo.append(undo)

    def _keep_attributes(self, value: Any) -> None:
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict):
            attributes = {}
        self._keep_container(attributes)
        for name in _list_slots(value):
            self._undo.append(functools.partial(_set_slot, value, name, getattr(value, name)))
        if isinstance(value, nn.Module | Optimizer):  # whose own containers have no names
            for held in attributes.values():
                if isinstance(held, dict | list | set):
                    self._keep_container(held)

    def _keep_function(self, function: FunctionType) -> None:
        for _, cell in _list_cells(function):
            try:
                held = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            self._undo.append(functools.partial(setattr, cell, "cell_contents", held))
        if _is_users_function(function):
            scope, code = function.__globals__, function.__code__
            self._keep_names(scope, _names_in(code, "STORE_GLOBAL", "DELETE_GLOBAL"))
            for name in _names_in(code, *_GLOBALS):
                if isinstance(scope.get(name), ModuleType) and _is_users(scope[name].__name__):
                    self._keep_names(vars(scope[name]), _names_in(code, "STORE_ATTR"))

    def _keep_names(self, scope: dict[str, Any], names: Iterable[str]) -> None:
        """Remember what names of a module mean."""
        for name in names:
            if name in scope:
                self._undo.append(functools.partial(scope.__setitem__, name, scope[name]))
            else:
                self._undo.append(functools.partial(scope.pop, name, None))

    def _keep_class(self, cls: type) -> None:
        if not _is_users(cls.__module__):
            return
        held = {name: one for name, one in vars(cls).items() if not name.startswith("__")}

        def undo() -> None:
            now = {name: one for name, one in vars(cls).items() if not name.startswith("__")}
            for name in now.keys() - held.keys():
                delattr(cls, name)
            for name, one in held.items():
                if now.get(name) is not one:
                    setattr(cls, name, one)

        self._undo.append(undo)

    def _keep_generator(self, generator: Any) -> None:
        if isinstance(generator, torch.Generator):
            self._undo.append(functools.partial(generator.set_state, generator.get_state()))
        else:
            self._undo.append(functools.partial(generator.setstate, generator.getstate()))

    def _keep_array(self, array: Any) -> None:
        held = array.copy()

        def undo() -> None:
            if array.flags.writeable and array.tobytes() != held.tobytes():
                array[...] = held

        self._undo.append(undo)


def _set_slot(value: Any, name: str, held: Any) -> None:
    if getattr(value, name, None) is not held:
        object.__setattr__(value, name, held)


_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque, bytearray)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_identical(now: list[Any], before: list[Any]) -> bool:
    """Whether two lists hold the same objects; of pairs, both."""
    if len(now) != len(before):
        return False
    for one, other in zip(now, before, strict=True):
        if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 2:
            if one[0] is not other[0] or one[1] is not other[1]:
                return False
        elif one is not other:
            return False
    return True


# ── Values in a form that can be compared ────────────────────────────────────────────────────


def describe_values(named: Iterable[Named]) -> dict[str, Any]:
    """Tensors and plain values as they are now; of containers what is seen from outside."""
    return {name: _describe(value) for name, value in named if not _is_code(value)}


def _is_code(value: Any) -> bool:
    return isinstance(value, FunctionType | MethodType | ModuleType | type | functools.partial)


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, _PLAIN):
        return value
    if _is_array(value):
        return _describe_array(value)
    kind = type(value).__name__
    if isinstance(value, Mapping):
        return f"{kind} with the keys {_list_some(value)}"
    if isinstance(value, set | frozenset):
        return f"{kind} of {_list_some(sorted(map(_spell, value)))}"
    if isinstance(value, list | tuple | deque | bytearray):
        return f"{kind} of {len(value)}"
    return kind


def _describe_array(array: Any) -> Any:
    try:
        return torch.from_numpy(array.copy())
    except (TypeError, ValueError):  # of a dtype that torch has not, or not in its byte order
        return f"{array.dtype} {array.tolist()!r:.200}"


def _list_some(values: Any) -> str:
    spelt = [_spell(one) for one in values]
    more = ", …" if len(spelt) > _MAX_KEYS else ""
    return f"{len(spelt)}: {', '.join(spelt[:_MAX_KEYS])}{more}" if spelt else "none"


def _spell(value: Any) -> str:
    return f"{value!r:.60}" if isinstance(value, (*_PLAIN, tuple)) else type(value).__name__
