"""The values that a program is called with, as the lines that make them anew for each call."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn

from shardscope._torch.compiling import list_marks
from shardscope.compile.diagnose.repro.inlining import Definitions
from shardscope.compile.diagnose.repro.layout import wrap_numbers
from shardscope.compile.diagnose.repro.literals import spell_value
from shardscope.compile.diagnose.repro.spelling import NotPrintable, module_of
from shardscope.compile.diagnose.repro.tensors import (
    MOST_ELEMENTS,
    check_plain,
    span_of,
    spell_tensor,
    spell_view,
)

__all__ = ["SEED_LINE", "Inputs", "find_groups", "print_inputs"]

SEED_LINE = "torch.manual_seed(0)"
_COLLECTIONS = (OrderedDict, deque)
_MOST_IN_ALL = 512  # numbers written into a script


@final
@dataclass
class Inputs:
    """The body of the function that makes the inputs, and the tensors that go into a file."""

    lines: list[str] = field(default_factory=list)
    saved: dict[str, torch.Tensor] = field(default_factory=dict)


def print_inputs(
    values: Sequence[Any],
    names: Sequence[str],
    definitions: Definitions,
    *,
    prefix: str = "",
    recipes: Mapping[int, str] | None = None,
) -> Inputs:
    """Lines for values with these names; `recipes` are expressions for some, by position."""
    writer = _Writer(values, definitions, prefix, recipes or {})
    for position, (value, name) in enumerate(zip(values, names, strict=True)):
        writer.write(position, value, name)
    return writer.inputs


def find_groups(values: Sequence[Any]) -> dict[int, list[torch.Tensor]]:
    """Different tensors that share memory, by its address."""
    groups: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
    for one in values:
        if isinstance(one, torch.Tensor) and _has_memory(one):
            groups[one.untyped_storage().data_ptr()][id(one)] = one
    return {key: list(group.values()) for key, group in groups.items() if len(group) > 1}


def _has_memory(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and tensor.device.type != "meta"
    return is_plain and tensor.numel() > 0


@final
class _Writer:
    def __init__(
        self,
        values: Sequence[Any],
        definitions: Definitions,
        prefix: str,
        recipes: Mapping[int, str],
    ) -> None:
        self.inputs = Inputs()
        self._definitions = definitions
        self._prefix = prefix
        self._recipes = recipes
        self._seen: dict[int, str] = {}
        self._groups = find_groups(values)
        self._bases: dict[int, tuple[str, int]] = {}  # name and first element, by address
        self._left = _MOST_IN_ALL
        if any("rand" in recipe for recipe in recipes.values()):
            self.inputs.lines.append(SEED_LINE)

    def write(self, position: int, value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor | nn.Module) and id(value) in self._seen:
            self._assign(name, self._seen[id(value)])
            return
        self._seen[id(value)] = name
        if isinstance(value, torch.Tensor):
            check_plain(value, f"input {position}")
            self._assign(name, self._as_input(self._spell_tensor(position, value, name), value))
            self._mark(value, name)
        elif isinstance(value, nn.Module):
            self._write_module(value, name)
        else:
            text = self._spell(value, position, name)
            self._definitions.import_for_literal(text)
            self._assign(name, text)

    def _mark(self, tensor: torch.Tensor, name: str) -> None:
        """Leave those sizes open that the user has marked."""
        for function, dim in list_marks(tensor):
            self._definitions.add_import(module_of(function))
            self._add(f"{function}({name}, {dim})")

    def _spell(self, value: Any, position: int, name: str) -> str:
        """A container with what is in it written before it; anything else as a literal."""
        if not _has_no_literal(value):
            return _spell_plain(value, position)
        parts = [self._write_part(one, name, position) for one in _list_inner(value)]
        if isinstance(value, dict):
            keys = [_spell_plain(key, position) for key in value]
            items = (f"{key}: {part}" for key, part in zip(keys, parts, strict=True))
            text = f"{{{', '.join(items)}}}"
        elif type(value) is tuple:
            text = f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
        else:
            text = f"[{', '.join(parts)}]"
        if type(value) not in _COLLECTIONS:
            return text
        self._definitions.add_import("collections")
        ending = f", maxlen={value.maxlen}" if isinstance(value, deque) and value.maxlen else ""
        return f"collections.{type(value).__name__}({text}{ending})"

    def _write_part(self, value: Any, name: str, position: int) -> str:
        """What is in a container: tensors and modules have a line of their own."""
        if not isinstance(value, torch.Tensor | nn.Module):
            return self._spell(value, position, name)
        own = self._definitions.names.give(f"{name}_part")
        self.write(position, value, own)
        return own

    def _assign(self, name: str, text: str) -> None:
        self._add(f"{name} = {text}")

    def _add(self, line: str) -> None:
        self.inputs.lines += wrap_numbers(line)

    def _spell_tensor(self, position: int, tensor: torch.Tensor, name: str) -> str:
        if position in self._recipes:
            return self._recipes[position]
        if group := self._group_of(tensor):
            return self._spell_shared(tensor, group, name)
        text = spell_tensor(tensor) if self._left > 0 else None
        if text is None:
            return self._save(name, _shrink_storage(tensor))
        self._left -= min(tensor.numel(), text.count(",") + 1)
        return text

    def _group_of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if not _has_memory(tensor):
            return []
        return self._groups.get(tensor.untyped_storage().data_ptr(), [])

    def _spell_shared(self, tensor: torch.Tensor, group: list[torch.Tensor], name: str) -> str:
        """A view of the memory that several inputs share."""
        address = tensor.untyped_storage().data_ptr()
        if address not in self._bases:
            self._bases[address] = self._write_base(group)
        base, start = self._bases[address]
        if not base:  # torch.save keeps what tensors share
            return self._save(name, tensor.detach())
        return f"{base}{spell_view(tensor, start)}"

    def _write_base(self, group: list[torch.Tensor]) -> tuple[str, int]:
        start = min(int(one.storage_offset()) for one in group)
        end = max(int(one.storage_offset()) + span_of(one) for one in group)
        dtypes = {one.dtype for one in group}
        if end - start > 4 * MOST_ELEMENTS or len(dtypes) > 1:
            return "", 0
        flat = group[0].detach().as_strided((end - start,), (1,), start)
        text = spell_tensor(flat)
        if text is None:
            return "", 0
        name = self._definitions.names.give("memory")
        self._assign(name, text)
        return name, start

    def _save(self, name: str, tensor: torch.Tensor) -> str:
        if not self.inputs.saved:  # once for all, so that they still share memory
            self.inputs.lines.insert(0, "saved = load_saved()")
        self.inputs.saved[f"{self._prefix}{name}"] = tensor.detach()
        return f'saved["{self._prefix}{name}"]'

    def _as_input(self, text: str, tensor: torch.Tensor) -> str:
        """With gradients asked for, of a leaf or of what is none."""
        if isinstance(tensor, nn.Parameter):
            ending = "" if tensor.requires_grad else ", requires_grad=False"
            return f"torch.nn.Parameter({text}{ending})"
        if not tensor.requires_grad:
            return text
        return f"{text}.requires_grad_(){'' if tensor.is_leaf else '.clone()'}"

    def _write_module(self, module: nn.Module, name: str) -> None:
        """A module of torch's, from its own account of itself, with its parameters and buffers."""
        text = _spell_module(module, name)
        self._assign(name, text if module.training else f"{text}.eval()")
        state: dict[str, torch.Tensor] = module.state_dict()
        if state:
            parts = [
                f'"{key}": {self._spell_tensor(-1, value, f"{name}.{key}")}'
                for key, value in state.items()
            ]
            self._add(f"{name}.load_state_dict({{{', '.join(parts)}}})")


def _spell_module(module: nn.Module, name: str) -> str:
    kind = type(module)
    text = f"torch.nn.{kind.__name__}({module.extra_repr()})"
    if getattr(nn, kind.__name__, None) is not kind:
        raise NotPrintable(f"{name} is a {kind.__qualname__}, which is not torch's.")
    try:
        twin = eval(text, {"torch": torch})
    except Exception:  # noqa: BLE001 - what a module says of itself need not be source
        raise NotPrintable(f"{name} does not say how it was made: {text}") from None
    theirs = {key: one.shape for key, one in twin.state_dict().items()}
    if theirs != {key: one.shape for key, one in module.state_dict().items()}:
        raise NotPrintable(f"{name} does not say how it was made: {text}")
    return text


def _has_no_literal(value: Any) -> bool:
    """Whether it is a container that holds a tensor or module, or is of Python's `collections`."""
    return type(value) in _COLLECTIONS or any(
        isinstance(one, torch.Tensor | nn.Module) or _has_no_literal(one)
        for one in _list_inner(value)
    )


def _list_inner(value: Any) -> Iterator[Any]:
    if type(value) in (list, tuple, deque):
        yield from value
    elif type(value) in (dict, OrderedDict):
        yield from value.values()


def _spell_plain(value: Any, position: int) -> str:
    if isinstance(value, torch.SymInt):
        value = int(value)
    try:
        return spell_value(value)
    except NotPrintable as error:
        raise NotPrintable(f"input {position} cannot be written down: {error}") from None


def _shrink_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides that holds no more memory than it shows."""
    plain = tensor.detach()
    if not plain.numel():
        return plain.clone()
    flat = plain.as_strided((span_of(plain),), (1,), plain.storage_offset()).clone()
    return flat.as_strided(plain.shape, plain.stride())
