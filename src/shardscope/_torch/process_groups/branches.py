"""Which way a program goes when it asks whether a tensor without data is true.

A program checks its numbers: `assert (x >= 0).all()`, `if not valid.all(): raise ValueError(…)`.
Nothing is known about the numbers, but the program is meant to run, so it goes the way that does
not raise.
"""

from __future__ import annotations

import dis
import functools
import sys
from types import CodeType, FrameType

_RAISES = ("RAISE_VARARGS", "LOAD_ASSERTION_ERROR")
_NO_OPS = ("TO_BOOL", "CACHE", "NOT_TAKEN", "EXTENDED_ARG", "COPY", "NOP")
# Between the program's line and the op that reads the value.
_SKIPPED = (
    "shardscope",
    "torch._compile",
    "torch._dynamo",
    "torch._ops",
    "torch.overrides",
    "torch.utils._device",
    "torch.utils._python_dispatch",
)


def find_branch_without_error() -> bool | None:
    """The truth value for which the running line does not raise; None if both or neither do."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_SKIPPED):
        frame = frame.f_back
    return None if frame is None else _read_branch(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=256)
def _read_branch(code: CodeType, offset: int) -> bool | None:
    instructions = list(dis.get_instructions(code))
    positions = {instruction.offset: index for index, instruction in enumerate(instructions)}
    index = positions.get(offset)
    if index is None:
        return None
    is_negated = False
    while instructions[index].opname in (*_NO_OPS, "UNARY_NOT"):
        is_negated ^= instructions[index].opname == "UNARY_NOT"
        index += 1
    jump = instructions[index]
    if "JUMP" not in jump.opname or "_IF_" not in jump.opname or "NONE" in jump.opname:
        return None
    jumps_if_true = "IF_TRUE" in jump.opname
    raises_after_jump = _raises(instructions[positions[jump.argval] :])
    if raises_after_jump == _raises(instructions[index + 1 :]):
        return None
    return (jumps_if_true != raises_after_jump) != is_negated


def _raises(instructions: list[dis.Instruction]) -> bool:
    """Whether the instructions raise before they branch or return."""
    for instruction in instructions:
        if instruction.opname in _RAISES:
            return True
        if "JUMP" in instruction.opname or "RETURN_VALUE" in instruction.opname:
            return False
    return False
