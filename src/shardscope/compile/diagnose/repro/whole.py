"""A whole function as a script, where no op of it is to blame: dynamo fails, or what it makes does.

Written as source where that can be done, pickled where it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.outcome import NUMBERS, Outcome
from shardscope.compile.diagnose.repro.backend import (
    Compilation,
    pickle_into,
    print_compilation,
)
from shardscope.compile.diagnose.repro.inlining import Definitions
from shardscope.compile.diagnose.repro.inputs import print_inputs
from shardscope.compile.diagnose.repro.script import STATE, Case, assemble
from shardscope.compile.diagnose.repro.spelling import NotPrintable
from shardscope.compile.diagnose.repro.write import print_header, save_script
from shardscope.record import Stage

__all__ = ["Call", "write_whole"]


@final
@dataclass(frozen=True)
class Call:
    """A function, and what it is called with."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def has_gradients(self) -> bool:
        """Whether an argument asks for one."""
        values = (*self.args, *self.kwargs.values())
        return any(isinstance(one, torch.Tensor) and one.requires_grad for one in values)


def write_whole(
    call: Call,
    compiler: Compiler,
    outcome: Outcome,
    *,
    folder: Path,
    title: str,
    stage: Stage | None,
    limit_s: float,
    settings: Sequence[str] = (),
) -> Path:
    """Write `folder/repro.py`, and a file beside it for what is not written as source."""
    definitions = Definitions()
    made = print_compilation(
        compiler, "compile_f", definitions, has_open_sizes=False, is_one_graph=False
    )
    try:
        lines = _print_source(call, definitions, made)
    except NotPrintable as error:
        made.notes.append(f"The function is pickled in the file of inputs, because {error}")
        lines = _print_pickled(call, made)
    lines = [*made.lines, "", "", *lines]
    pasted = STATE if outcome.condition in NUMBERS else []
    case = Case("f", "compile_f", "make_inputs", call.has_gradients, lines, pasted)
    text = assemble(
        list(print_header("", compiler, outcome, stage, title, None, made.notes)),
        definitions=definitions,
        failing=case,
        passing=None,
        outcome=outcome,
        has_saved=bool(made.saved),
        limit_s=limit_s,
        settings=settings,
    )
    return save_script(text, made.saved, folder)


def _print_source(call: Call, definitions: Definitions, made: Compilation) -> list[str]:
    function = definitions.refer(call.function)
    positional = [f"x{place}" for place in range(len(call.args))]
    names = [*positional, *call.kwargs]
    inputs = print_inputs([*call.args, *call.kwargs.values()], names, definitions)
    made.saved |= inputs.saved
    passed = ", ".join([*positional, *(f"{name}={name}" for name in call.kwargs)])
    return [
        f"def f({', '.join(names)}):",
        f"    return ({function}({passed}),)",
        *("", ""),
        "def make_inputs():",
        *(f"    {line}" for line in inputs.lines),
        f"    return ({', '.join(names)}{',' if len(names) == 1 else ''})",
        *("", ""),
    ]


def _print_pickled(call: Call, made: Compilation) -> list[str]:
    program = (call.function, tuple(call.args), dict(call.kwargs))
    text = pickle_into(program, "program", made)
    return [
        "def load_program():",
        f"    return {text}",
        *("", ""),
        "def f(program):",
        "    function, args, kwargs = program",
        "    return (function(*args, **kwargs),)",
        *("", ""),
        "def make_inputs():",
        "    return (load_program(),)",
        *("", ""),
    ]
