"""Tensors as source text: short where they can be, exact always."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardscope.compile.diagnose.repro.literals import spell_value
from shardscope.compile.diagnose.repro.spelling import NotPrintable

__all__ = ["MOST_ELEMENTS", "check_plain", "span_of", "spell_tensor", "spell_view"]

MOST_ELEMENTS = 64
"""More numbers than this nobody reads: they go into a file."""

_DEFAULTS = (torch.float32, torch.int64, torch.bool)  # what torch.tensor makes of numbers
_DIGITS = range(1, 18)  # any double is exact in 17


def check_plain(tensor: torch.Tensor, name: str) -> None:
    """Refuse what is more than numbers in a storage."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise NotPrintable(f"{name} is a {type(tensor).__qualname__}, not a plain tensor.")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise NotPrintable(f"{name} is a tensor of layout {tensor.layout}, not a dense one.")


def spell_tensor(tensor: torch.Tensor) -> str | None:
    """An expression that makes an equal tensor, with the same strides; None if it is too long."""
    plain = tensor.detach()
    if plain.device.type == "meta":
        return _spell_filled("torch.empty", plain, ())
    text = _spell_uniform(plain) if plain.is_contiguous() else None
    if text is not None:
        return text
    if plain.numel() > MOST_ELEMENTS:
        return None
    if plain.is_contiguous():
        return _spell_elements(plain)
    strides = plain.stride()
    order = sorted(range(plain.dim()), key=lambda dim: -strides[dim])
    permuted = plain.permute(order)
    if permuted.is_contiguous():
        back = [order.index(dim) for dim in range(plain.dim())]
        return f"{_spell_elements(permuted)}.permute({', '.join(map(str, back))})"
    span = span_of(plain)
    if span > 4 * MOST_ELEMENTS:
        return None
    start = int(plain.storage_offset())
    flat = plain.as_strided((span,), (1,), start)
    return f"{_spell_elements(flat)}{spell_view(plain, start)}"


def spell_view(tensor: torch.Tensor, start: int) -> str:
    """The call that makes a tensor of a flat one whose first element is at `start`."""
    size, stride = tuple(tensor.shape), tensor.stride()
    return f".as_strided({size}, {stride}, {tensor.storage_offset() - start})"


def span_of(tensor: torch.Tensor) -> int:
    """How many elements lie between the first and the last of a tensor, with both."""
    if not tensor.numel():
        return 0
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in strides)


def _spell_uniform(tensor: torch.Tensor) -> str | None:
    """A tensor of nothing, of one number over and over, or of numbers that count up."""
    if not tensor.numel():
        return _spell_filled("torch.empty", tensor, ())
    if tensor.numel() == 1 or tensor.is_complex():
        return None
    # Numbers of eight bits cannot be compared, and a zero may have a sign.
    numbers = tensor.to(torch.float64) if tensor.is_floating_point() else tensor
    first = numbers.flatten()[0].item()
    if first == 0 and tensor.is_floating_point() and bool(numbers.signbit().any()):
        return None
    if bool((numbers == first).all()):
        return _spell_full(tensor, first)
    is_counting = tensor.dim() == 1 and not tensor.is_floating_point() and first == 0
    if is_counting and tensor.dtype is not torch.bool:
        counted = torch.arange(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        if torch.equal(tensor, counted):
            return f"torch.arange({tensor.numel()}{_spell_kind(tensor, (torch.int64,))})"
    return None


def _spell_full(tensor: torch.Tensor, value: Any) -> str:
    if value == 0 and tensor.dtype is not torch.bool:
        return _spell_filled("torch.zeros", tensor, ())
    if value == 1 and tensor.dtype is not torch.bool:
        return _spell_filled("torch.ones", tensor, ())
    (text,) = _spell_floats(tensor.flatten()[:1]) if tensor.is_floating_point() else (str(value),)
    return _spell_filled("torch.full", tensor, (text,))


def _spell_filled(function: str, tensor: torch.Tensor, parts: tuple[str, ...]) -> str:
    defaults = () if parts else (torch.float32,)
    inner = ", ".join([spell_value(tuple(tensor.shape)), *parts])
    return f"{function}({inner}{_spell_kind(tensor, defaults)})"


def _spell_elements(tensor: torch.Tensor) -> str:
    """All elements, as nested lists."""
    flat = tensor.resolve_conj().resolve_neg().flatten()
    if tensor.is_complex():
        texts = [spell_value(one) for one in flat.to(torch.complex128).tolist()]
        defaults: tuple[torch.dtype, ...] = ()
    elif tensor.is_floating_point():
        texts, defaults = _spell_floats(flat), (torch.float32,)
    else:
        texts, defaults = [str(one) for one in flat.tolist()], _DEFAULTS
    return f"torch.tensor({_nest(texts, tuple(tensor.shape))}{_spell_kind(tensor, defaults)})"


def _spell_floats(flat: torch.Tensor) -> list[str]:
    """Each number with as few digits as give it back, in its own precision."""
    exact = flat.cpu().to(torch.float64)
    texts = ["torch.nan" if math.isnan(one) else "" for one in exact.tolist()]
    for digits in _DIGITS:
        wanted = [index for index, text in enumerate(texts) if not text]
        if not wanted:
            break
        tried = [_spell_float(float(exact[index]), digits) for index in wanted]
        numbers = torch.tensor(
            [float(one.replace("torch.", "")) for one in tried], dtype=torch.float64
        )
        back = numbers.to(flat.dtype).to(torch.float64)
        for index, text, number in zip(wanted, tried, back.tolist(), strict=True):
            if number == float(exact[index]):
                texts[index] = text
    return texts


def _spell_float(value: float, digits: int) -> str:
    if math.isinf(value):
        return "torch.inf" if value > 0 else "-torch.inf"
    text = f"{value:.{digits}g}"
    return text if "." in text or "e" in text else f"{text}.0"


def _nest(texts: list[str], shape: tuple[int, ...]) -> str:
    """Texts in the brackets of a shape."""
    if not shape:
        return texts[0]
    size = len(texts) // shape[0] if shape[0] else 0
    rows = (_nest(texts[row * size : (row + 1) * size], shape[1:]) for row in range(shape[0]))
    return f"[{', '.join(rows)}]"


def _spell_kind(tensor: torch.Tensor, defaults: tuple[torch.dtype, ...]) -> str:
    """The arguments for dtype and device, where they are not what torch takes by itself."""
    kind = "" if tensor.dtype in defaults else f", dtype={tensor.dtype}"
    return (
        kind if tensor.device.type == "cpu" else f"{kind}, device={spell_value(str(tensor.device))}"
    )
