"""Guards in words: what a guard is about, and what must hold for the compiled graph to be used."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple


class GuardKind(StrEnum):
    """What a guard compares; those that fail most often first."""

    TENSOR = "tensor"
    SIZE = "size"
    VALUE = "value"
    OBJECT = "object"
    TYPE = "type"
    KEY = "key"
    STATE = "torch's state"
    OTHER = "other"


class GuardFact(NamedTuple):
    """A guard in words; `subject` is an expression, or empty if the guard has none."""

    kind: GuardKind
    subject: str
    condition: str


_CHECK_TENSOR = re.compile(
    r"check_tensor\((?P<subject>.+?), (?P<cls>[\w.]+), DispatchKeySet\([^)]*\), "
    r"torch\.(?P<dtype>\w+), device=(?P<device>[^,]+), requires_grad=(?P<grad>True|False), "
    r"size=(?P<size>\[[^\]]*\]), stride=(?P<stride>\[[^\]]*\])\)"
)
_ENTRY = re.compile(r"\._(?:modules|parameters|buffers)\['(?P<key>\w+)'\]")
_CLASS = r"<class '(?P<cls>[^']+)'>"
_PATTERNS: tuple[tuple[GuardKind, re.Pattern[str], str], ...] = tuple(
    (kind, re.compile(pattern), text)
    for kind, pattern, text in (
        (GuardKind.TYPE, rf"___check_type_id\((?P<subject>.+)\), type={_CLASS}", "is a {cls}"),
        (
            GuardKind.OBJECT,
            rf"___check_obj_id\((?P<subject>.+)\), type={_CLASS}",
            "is the same {cls} as when compiled",
        ),
        (GuardKind.TYPE, r"___check_type_id\((?P<subject>.+?)\)", "has the same type"),
        (GuardKind.OBJECT, r"___check_obj_id\((?P<subject>.+?)\)", "is the same object"),
        (
            GuardKind.KEY,
            r"not ___dict_contains\((?P<key>[^,]+), (?P<subject>.+)\)",
            "has no key {key}",
        ),
        (
            GuardKind.KEY,
            r"___dict_contains\((?P<key>[^,]+), (?P<subject>.+)\)",
            "has the key {key}",
        ),
        (
            GuardKind.STATE,
            r"(?P<subject>)___check_global_state\(\).*",
            "grad mode, autocast, default dtype, determinism and threads are as when compiled",
        ),
        (
            GuardKind.STATE,
            r"(?P<subject>)___check_torch_function_mode_stack\(\).*",
            "the same torch function modes are active",
        ),
        (
            GuardKind.STATE,
            r"(?P<subject>)utils_device\.CURRENT_DEVICE == (?P<value>.+)",
            "the default device is {value}",
        ),
        (
            GuardKind.STATE,
            r"(?P<subject>)torch\._functorch\.aot_autograd\.utils\.top_saved_tensors_hooks ids == "
            r"(?P<value>.+)",
            "hooks on saved tensors: {value}",
        ),
        (
            GuardKind.TENSOR,
            r"check_no_aliasing\((?P<subject>.+)\)",
            "are different tensors that share no memory",
        ),
        (GuardKind.SIZE, r"len\((?P<subject>.+)\) == (?P<value>\d+)", "has {value} items"),
        (
            GuardKind.SIZE,
            r"(?P<value>-?\d+ <=?) (?P<subject>.+\.(?:size|stride)\(\)\[\d+\])",
            "{value} this size",
        ),
        (
            GuardKind.SIZE,
            r"(?P<subject>.+\.(?:size|stride)\(\)\[\d+\]) (?P<value>[=!<>]=? .+)",
            "{value}",
        ),
        (GuardKind.VALUE, r"(?P<subject>[^=<>!]+) == (?P<value>.+)", "equals {value}"),
        (GuardKind.VALUE, r"(?P<subject>[^=<>!]+) is not (?P<value>\w+)", "is not {value}"),
        (GuardKind.VALUE, r"(?P<subject>[^=<>!]+) is (?P<value>\w+)", "is {value}"),
    )
)


def describe_guard(guard: str) -> GuardFact:
    """Describe a guard as recorded; one of an unknown form is its own condition.

    Args:
        guard: The guard, as in `FrameGuards.guards`.

    Examples:
        >>> describe_guard("mode == 'train'")
        GuardFact(kind=<GuardKind.VALUE: 'value'>, subject='mode', condition="equals 'train'")
    """
    if match := _CHECK_TENSOR.fullmatch(guard):
        return GuardFact(GuardKind.TENSOR, _name(match["subject"]), _describe_tensor(match))
    for kind, pattern, text in _PATTERNS:
        if match := pattern.fullmatch(guard):
            return GuardFact(kind, _name(match["subject"]), text.format_map(match.groupdict()))
    return GuardFact(GuardKind.OTHER, "", guard)


def _name(expression: str) -> str:
    """`self.layers[0].up.weight` of `self._modules['layers']._modules['0']._modules['up']…`."""
    return _ENTRY.sub(
        lambda match: f"[{match['key']}]" if match["key"].isdecimal() else f".{match['key']}",
        expression.strip(),
    )


def _describe_tensor(match: re.Match[str]) -> str:
    """`float32[4, 32], strides [32, 1], requires no gradient`."""
    device = "" if match["device"] in ("None", "-1") else f", on device {match['device']}"
    cls = "" if match["cls"] == "Tensor" else f"{match['cls']} of "
    gradient = "requires a gradient" if match["grad"] == "True" else "requires no gradient"
    sizes = match["size"].replace("None", "?")
    strides = match["stride"].replace("None", "?")
    return f"{cls}{match['dtype']}{sizes}, strides {strides}{device}, {gradient}"
