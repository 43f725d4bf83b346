"""Writes input values and tensors as source that creates them."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn

from shardscope._torch.dynamo import list_marks
from shardscope.compile.diagnose.repro.literals import format_value, wrap_numbers
from shardscope.compile.diagnose.repro.user_code import Definitions
from shardscope.compile.diagnose.subgraph.op_names import NotPrintable, module_to_import

MAX_ELEMENTS = 64
"""More numbers than this nobody reads: they go into a file."""

_DEFAULTS = (torch.float32, torch.int64, torch.bool)  # dtypes that torch.tensor infers from numbers
_DIGITS = range(1, 18)  # every double is exact with 17


def check_plain(tensor: torch.Tensor, name: str) -> None:
    """Refuse tensors that are not dense tensors with plain numbers."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise NotPrintable(f"{name} is a {type(tensor).__qualname__}, not a plain tensor.")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise NotPrintable(f"{name} is a tensor of layout {tensor.layout}, not a dense one.")


def format_tensor(tensor: torch.Tensor) -> str | None:
    """An expression that creates an equal tensor with equal strides; None if it is too long."""
    plain = tensor.detach()
    if plain.device.type == "meta":
        return _format_filled("torch.empty", plain, ())
    text = _format_uniform(plain) if plain.is_contiguous() else None
    if text is not None:
        return text
    if plain.numel() > MAX_ELEMENTS:
        return None
    if plain.is_contiguous():
        return _format_elements(plain)
    strides = plain.stride()
    order = sorted(range(plain.dim()), key=lambda dim: -strides[dim])
    permuted = plain.permute(order)
    if permuted.is_contiguous():
        back = [order.index(dim) for dim in range(plain.dim())]
        return f"{_format_elements(permuted)}.permute({', '.join(map(str, back))})"
    span = span_of(plain)
    if span > 4 * MAX_ELEMENTS:
        return None
    start = int(plain.storage_offset())
    flat = plain.as_strided((span,), (1,), start)
    return f"{_format_elements(flat)}{format_view(plain, start)}"


def format_view(tensor: torch.Tensor, start: int) -> str:
    """The call that creates the tensor from a flat one whose first element is at offset `start`."""
    size, stride = tuple(tensor.shape), tensor.stride()
    return f".as_strided({size}, {stride}, {tensor.storage_offset() - start})"


def span_of(tensor: torch.Tensor) -> int:
    """The number of elements from the first to the last of a tensor in memory, inclusive."""
    if not tensor.numel():
        return 0
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in strides)


def _format_uniform(tensor: torch.Tensor) -> str | None:
    """An empty tensor, a constant one or a range as an expression; None for all others."""
    if not tensor.numel():
        return _format_filled("torch.empty", tensor, ())
    if tensor.numel() == 1 or tensor.is_complex():
        return None
    # 8-bit floats cannot be compared, and a zero may be negative.
    numbers = tensor.to(torch.float64) if tensor.is_floating_point() else tensor
    first = numbers.flatten()[0].item()
    if first == 0 and tensor.is_floating_point() and bool(numbers.signbit().any()):
        return None
    if bool((numbers == first).all()):
        return _format_full(tensor, first)
    is_counting = tensor.dim() == 1 and not tensor.is_floating_point() and first == 0
    if is_counting and tensor.dtype is not torch.bool:
        counted = torch.arange(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        if torch.equal(tensor, counted):
            return f"torch.arange({tensor.numel()}{_format_kind(tensor, (torch.int64,))})"
    return None


def _format_full(tensor: torch.Tensor, value: Any) -> str:
    if value == 0 and tensor.dtype is not torch.bool:
        return _format_filled("torch.zeros", tensor, ())
    if value == 1 and tensor.dtype is not torch.bool:
        return _format_filled("torch.ones", tensor, ())
    (text,) = _format_floats(tensor.flatten()[:1]) if tensor.is_floating_point() else (str(value),)
    return _format_filled("torch.full", tensor, (text,))


def _format_filled(function: str, tensor: torch.Tensor, parts: tuple[str, ...]) -> str:
    defaults = () if parts else (torch.float32,)
    inner = ", ".join([format_value(tuple(tensor.shape)), *parts])
    return f"{function}({inner}{_format_kind(tensor, defaults)})"


def _format_elements(tensor: torch.Tensor) -> str:
    """All elements, as nested lists."""
    flat = tensor.resolve_conj().resolve_neg().flatten()
    if tensor.is_complex():
        texts = [format_value(number) for number in flat.to(torch.complex128).tolist()]
        defaults: tuple[torch.dtype, ...] = ()
    elif tensor.is_floating_point():
        texts, defaults = _format_floats(flat), (torch.float32,)
    else:
        texts, defaults = [str(number) for number in flat.tolist()], _DEFAULTS
    return f"torch.tensor({_nest(texts, tuple(tensor.shape))}{_format_kind(tensor, defaults)})"


def _format_floats(flat: torch.Tensor) -> list[str]:
    """Each number with the fewest digits that reproduce it in its precision."""
    exact = flat.cpu().to(torch.float64)
    texts = ["torch.nan" if math.isnan(number) else "" for number in exact.tolist()]
    for digits in _DIGITS:
        missing = [index for index, text in enumerate(texts) if not text]
        if not missing:
            break
        tried = [_format_float(float(exact[index]), digits) for index in missing]
        numbers = torch.tensor(
            [float(text.replace("torch.", "")) for text in tried], dtype=torch.float64
        )
        back = numbers.to(flat.dtype).to(torch.float64)
        for index, text, number in zip(missing, tried, back.tolist(), strict=True):
            if number == float(exact[index]):
                texts[index] = text
    return texts


def _format_float(value: float, digits: int) -> str:
    if math.isinf(value):
        return "torch.inf" if value > 0 else "-torch.inf"
    text = f"{value:.{digits}g}"
    return text if "." in text or "e" in text else f"{text}.0"


def _nest(texts: list[str], shape: tuple[int, ...]) -> str:
    """Texts as nested lists of a shape."""
    if not shape:
        return texts[0]
    size = len(texts) // shape[0] if shape[0] else 0
    rows = (_nest(texts[row * size : (row + 1) * size], shape[1:]) for row in range(shape[0]))
    return f"[{', '.join(rows)}]"


def _format_kind(tensor: torch.Tensor, defaults: tuple[torch.dtype, ...]) -> str:
    """The arguments for dtype and device, unless they are torch's defaults."""
    kind = "" if tensor.dtype in defaults else f", dtype={tensor.dtype}"
    return (
        kind
        if tensor.device.type == "cpu"
        else f"{kind}, device={format_value(str(tensor.device))}"
    )


SEED_LINE = "torch.manual_seed(0)"
_COLLECTIONS = (OrderedDict, deque)
_MAX_TOTAL = 512  # numbers written into a script


@final
@dataclass
class Inputs:
    """The body of the function that creates the inputs, and the tensors that go into a file."""

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
    """Lines that create values with these names;

    `recipes` are expressions for some, by position.
    """
    writer = _Writer(values, definitions, prefix, recipes or {})
    for position, (value, name) in enumerate(zip(values, names, strict=True)):
        writer.write(position, value, name)
    return writer.inputs


def find_groups(values: Sequence[Any]) -> dict[int, list[torch.Tensor]]:
    """Different tensors that share a storage, by its address."""
    groups: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
    for value in values:
        if isinstance(value, torch.Tensor) and _has_memory(value):
            groups[value.untyped_storage().data_ptr()][id(value)] = value
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
        self._names_by_id: dict[int, str] = {}
        self._groups = find_groups(values)
        self._bases: dict[int, tuple[str, int]] = {}  # name and first element, by address
        self._left = _MAX_TOTAL
        if any("rand" in recipe for recipe in recipes.values()):
            self.inputs.lines.append(SEED_LINE)

    def write(self, position: int, value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor | nn.Module) and id(value) in self._names_by_id:
            self._assign(name, self._names_by_id[id(value)])
            return
        self._names_by_id[id(value)] = name
        if isinstance(value, torch.Tensor):
            check_plain(value, f"input {position}")
            self._assign(name, self._as_input(self._format_tensor(position, value, name), value))
            self._mark(value, name)
        elif isinstance(value, nn.Module):
            self._write_module(value, name)
        else:
            text = self._format(value, position, name)
            self._definitions.import_for_literal(text)
            self._assign(name, text)

    def _mark(self, tensor: torch.Tensor, name: str) -> None:
        """Mark the dims as dynamic that the user has marked."""
        for function, dim in list_marks(tensor):
            self._definitions.add_import(module_to_import(function))
            self._add(f"{function}({name}, {dim})")

    def _format(self, value: Any, position: int, name: str) -> str:
        """A container as an expression, with its tensors written before it; others as literals."""
        if not _has_no_literal(value):
            return _format_plain(value, position)
        parts = [self._write_part(item, name, position) for item in _list_inner(value)]
        if isinstance(value, dict):
            keys = [_format_plain(key, position) for key in value]
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
        """An item of a container: tensors and modules get their own line."""
        if not isinstance(value, torch.Tensor | nn.Module):
            return self._format(value, position, name)
        own = self._definitions.names.give(f"{name}_part")
        self.write(position, value, own)
        return own

    def _assign(self, name: str, text: str) -> None:
        self._add(f"{name} = {text}")

    def _add(self, line: str) -> None:
        self.inputs.lines += wrap_numbers(line)

    def _format_tensor(self, position: int, tensor: torch.Tensor, name: str) -> str:
        if position in self._recipes:
            return self._recipes[position]
        if group := self._group_of(tensor):
            return self._format_shared(tensor, group, name)
        text = format_tensor(tensor) if self._left > 0 else None
        if text is None:
            return self._save(name, _shrink_storage(tensor))
        self._left -= min(tensor.numel(), text.count(",") + 1)
        return text

    def _group_of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if not _has_memory(tensor):
            return []
        return self._groups.get(tensor.untyped_storage().data_ptr(), [])

    def _format_shared(self, tensor: torch.Tensor, group: list[torch.Tensor], name: str) -> str:
        """A view of the storage that several inputs share."""
        address = tensor.untyped_storage().data_ptr()
        if address not in self._bases:
            self._bases[address] = self._write_base(group)
        base, start = self._bases[address]
        if not base:  # torch.save preserves sharing
            return self._save(name, tensor.detach())
        return f"{base}{format_view(tensor, start)}"

    def _write_base(self, group: list[torch.Tensor]) -> tuple[str, int]:
        start = min(int(tensor.storage_offset()) for tensor in group)
        end = max(int(tensor.storage_offset()) + span_of(tensor) for tensor in group)
        dtypes = {tensor.dtype for tensor in group}
        if end - start > 4 * MAX_ELEMENTS or len(dtypes) > 1:
            return "", 0
        flat = group[0].detach().as_strided((end - start,), (1,), start)
        text = format_tensor(flat)
        if text is None:
            return "", 0
        name = self._definitions.names.give("memory")
        self._assign(name, text)
        return name, start

    def _save(self, name: str, tensor: torch.Tensor) -> str:
        if not self.inputs.saved:  # loaded only once, so that tensors still share memory
            self.inputs.lines.insert(0, "saved = load_saved()")
        self.inputs.saved[f"{self._prefix}{name}"] = tensor.detach()
        return f'saved["{self._prefix}{name}"]'

    def _as_input(self, text: str, tensor: torch.Tensor) -> str:
        """The expression with `requires_grad`, as a leaf or a non-leaf tensor."""
        if isinstance(tensor, nn.Parameter):
            ending = "" if tensor.requires_grad else ", requires_grad=False"
            return f"torch.nn.Parameter({text}{ending})"
        if not tensor.requires_grad:
            return text
        return f"{text}.requires_grad_(){'' if tensor.is_leaf else '.clone()'}"

    def _write_module(self, module: nn.Module, name: str) -> None:
        """Write a torch.nn module from its `extra_repr`, with its parameters and buffers."""
        text = _format_module(module, name)
        self._assign(name, text if module.training else f"{text}.eval()")
        state: dict[str, torch.Tensor] = module.state_dict()
        if state:
            parts = [
                f'"{key}": {self._format_tensor(-1, value, f"{name}.{key}")}'
                for key, value in state.items()
            ]
            self._add(f"{name}.load_state_dict({{{', '.join(parts)}}})")


def _format_module(module: nn.Module, name: str) -> str:
    kind = type(module)
    text = f"torch.nn.{kind.__name__}({module.extra_repr()})"
    if getattr(nn, kind.__name__, None) is not kind:
        raise NotPrintable(f"{name} is a {kind.__qualname__}, which is not torch's.")
    try:
        twin = eval(text, {"torch": torch})
    except Exception:  # noqa: BLE001 - `extra_repr` need not be valid source
        raise NotPrintable(f"{name} has no repr that recreates it: {text}") from None
    expected_shapes = {key: tensor.shape for key, tensor in twin.state_dict().items()}
    if expected_shapes != {key: tensor.shape for key, tensor in module.state_dict().items()}:
        raise NotPrintable(f"{name} has no repr that recreates it: {text}")
    return text


def _has_no_literal(value: Any) -> bool:
    """Whether it is a container with a tensor or module in it, or one of Python's `collections`."""
    return type(value) in _COLLECTIONS or any(
        isinstance(item, torch.Tensor | nn.Module) or _has_no_literal(item)
        for item in _list_inner(value)
    )


def _list_inner(value: Any) -> Iterator[Any]:
    if type(value) in (list, tuple, deque):
        yield from value
    elif type(value) in (dict, OrderedDict):
        yield from value.values()


def _format_plain(value: Any, position: int) -> str:
    if isinstance(value, torch.SymInt):
        value = int(value)
    try:
        return format_value(value)
    except NotPrintable as error:
        raise NotPrintable(f"input {position} cannot be written as code: {error}") from None


def _shrink_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with equal strides whose storage has no unused elements at its ends."""
    plain = tensor.detach()
    if not plain.numel():
        return plain.clone()
    flat = plain.as_strided((span_of(plain),), (1,), plain.storage_offset()).clone()
    return flat.as_strided(plain.shape, plain.stride())
