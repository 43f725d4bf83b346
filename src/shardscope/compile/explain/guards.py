"""Readable guards: what had changed when a function was recompiled."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MAX_VALUE = 60  # characters of a value that are shown
_ADDRESS = re.compile(r"(?:, | at )?\b(?:0x[0-9a-f]{4,}|\d{9,})\b")
_LOCAL = re.compile(r"L\[\s*['\"](\w+)['\"]\s*\]")
_BUILTINS = re.compile(r"__builtins_dict___\d+")
_OTHER_BACKEND = "BACKEND_MATCH"
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (
            r"tensor '(.+)' size mismatch at index (\d+)\. expected (\S+), actual (\S+)",
            "tensor {0}: size {1} is {3}, was {2}",
        ),
        (
            r"tensor '(.+)' stride mismatch at index (\d+)\. expected (\S+), actual (\S+)",
            "tensor {0}: stride {1} is {3}, was {2}",
        ),
        (
            r"tensor '(.+)' rank mismatch\. expected (\d+), actual (\d+)",
            "tensor {0}: has {2} dims, had {1}",
        ),
        (
            r"tensor '(.+)' dtype mismatch\. expected (\w+), actual (\w+)",
            "tensor {0}: dtype is {2}, was {1}",
        ),
        (
            r"tensor '(.+)' requires_grad mismatch\. expected requires_grad=0",
            "tensor {0}: requires a gradient, did not before",
        ),
        (
            r"tensor '(.+)' requires_grad mismatch\. expected requires_grad=1",
            "tensor {0}: requires no gradient, did before",
        ),
        (
            r"tensor '(.+)' dispatch key set mismatch\..*",
            "tensor {0}: has a different type or device than before",
        ),
        (
            r"tensor '(.+)' [Tt]ensor device index mismatch\. .*?expected (\S+), actual (\S+)",
            "tensor {0}: is on device {2}, was on {1}",
        ),
        (
            r"expected type of '(.+)' to be a tensor type, ' but found <class '(.+)'>",
            "{0}: is of type {1}, was a tensor",
        ),
        (
            r"expected type of '(.+)' to be <class 'torch\.Tensor'>, but found <class '(.+)'>",
            "{0}: is of type {1}, was a tensor",
        ),
        (
            r"expected type of '(.+)' to be <class '(.+)'>, but found <class '(.+)'>",
            "{0}: is of type {2}, was {1}",
        ),
        (r"GLOBAL_STATE changed: (.+?) *", "{0} was changed outside the function"),
        (r"Duplicate tensors? found.*", "two arguments are the same tensor, or share memory"),
        (r"not ___dict_contains\((.+), (.+)\)", "{1}: has the key {0}, had not before"),
        (r"___dict_contains\((.+), (.+)\)", "{1}: has no key {0}, had one before"),
        (r"(\d+) <= (.+)\.size\(\)\[(\d+)\].*", "tensor {1}: size {2} is below {0}, was not"),
        (r"(\w+) is (\w+)", "{0} and {1} were the same object, and are not now"),
    )
)
_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64"} | {
    "Int": "int32",
    "BFloat16": "bfloat16",
    "Bool": "bool",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
}


@dataclass(frozen=True, slots=True)
class RawGuard:
    """A guard that failed."""

    text: str
    description: str


def read_failed_guard(reasons: Sequence[str], values: Mapping[str, Any]) -> RawGuard | None:
    """The failed guard of the latest compilation; None if there is none for this backend."""
    own = [reason for reason in reasons if _OTHER_BACKEND not in reason]
    if not own:
        return None
    text = _strip(own[0])
    return RawGuard(clean_guard(text), _describe(text, values))


def clean_guard(text: str) -> str:
    """A guard without addresses, which differ between runs."""
    text = _BUILTINS.sub("__builtins__", _LOCAL.sub(r"\1", text))
    return _ADDRESS.sub("", text).strip()


def is_users(text: str) -> bool:
    """Whether a guard is on a value of the user, not on torch's own state."""
    return "G['__import_torch" not in text and "'_dynamo_" not in text


def _strip(reason: str) -> str:
    """The guard without the id of its compilation and the line that torch appends."""
    text = re.sub(r"^\[?\d+/\d+(?:_\d+)?\]?: ", "", reason.partition("\nUser stack trace")[0])
    return re.split(r"\s{2,}# ", text, maxsplit=1)[0].strip()


def _describe(text: str, values: Mapping[str, Any]) -> str:
    text = _LOCAL.sub(r"\1", text)
    by_value = _compare_values(text, values)
    if by_value:
        return by_value
    for pattern, words in _PATTERNS:
        match = pattern.fullmatch(text)
        if match:
            return words.format(*(_DTYPES.get(group, group) for group in match.groups()))
    return f"no longer true: {clean_guard(text)}"


def _compare_values(text: str, values: Mapping[str, Any]) -> str:
    """`n is 3, was 2`, for guards on simple values, types and lengths."""
    typed = re.fullmatch(r"___check_type_id\((.+), \d+\), type=<class '(.+)'>.*", text)
    if typed:
        return f"{typed[1]}: is of type {_type_now(typed[1], values)}, was {typed[2]}"
    same = re.fullmatch(r"___check_obj_id\((.+), \d+\),.*", text)
    if same:
        return f"{same[1]}: is a different object"
    equal = re.fullmatch(r"(?P<what>.+?) (?:==|is) (?P<was>.+)", text)
    if equal is None or not _is_literal(equal["was"]):
        return ""
    now = _look_up(equal["what"], values)
    change = f"is {now}" if now else "has changed"
    return f"{equal['what']} {change}, was {equal['was']}"


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return False
    return True


def _type_now(source: str, values: Mapping[str, Any]) -> str:
    try:
        return type(_resolve(ast.parse(source, mode="eval").body, values)).__name__
    except _UNRESOLVED:
        return "another"


def _look_up(source: str, values: Mapping[str, Any]) -> str:
    """The value of an expression such as `self.scale` or `len(xs)`, as text if it is short."""
    try:
        value = _resolve(ast.parse(source, mode="eval").body, values)
    except _UNRESOLVED:
        return ""
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return repr(value) if is_plain and len(repr(value)) <= _MAX_VALUE else ""


_UNRESOLVED = (SyntaxError, LookupError, AttributeError, TypeError, ValueError)


def _resolve(node: ast.expr, values: Mapping[str, Any]) -> Any:
    """Evaluate names, attributes, items and len(); no other code of the user is called."""
    match node:
        case ast.Name(id=name):
            return values[name]
        case ast.Attribute(value=owner, attr=name):
            return getattr(_resolve(owner, values), name)
        case ast.Subscript(value=owner, slice=ast.Constant(value=key)):
            return _resolve(owner, values)[key]
        case ast.Call(func=ast.Name(id="len"), args=[owner]):
            return len(_resolve(owner, values))
    raise ValueError(f"{type(node).__name__} cannot be looked up")
