"""Writes an entire function as a script, if no single op causes the failure.

The function is written as source if possible, and pickled otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from shardscope.compile.diagnose.accuracy import NUMBERS, CheckResult
from shardscope.compile.diagnose.repro.print_values import print_inputs
from shardscope.compile.diagnose.repro.user_code import (
    Compilation,
    Definitions,
    pickle_into,
    print_compilation,
)
from shardscope.compile.diagnose.repro.write import STATE, Case, assemble, print_header, save_script
from shardscope.compile.diagnose.subgraph import Compiler
from shardscope.compile.diagnose.subgraph.op_names import NotPrintable
from shardscope.record import Stage


@final
@dataclass(frozen=True)
class FunctionCall:
    """A function with its arguments."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def has_gradients(self) -> bool:
        """Whether an argument requires grad."""
        values = (*self.args, *self.kwargs.values())
        return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def write_entire_function(
    call: FunctionCall,
    compiler: Compiler,
    outcome: CheckResult,
    *,
    folder: Path,
    title: str,
    stage: Stage | None,
    limit_s: float,
    settings: Sequence[str] = (),
) -> Path:
    """Write `folder/repro.py`, and a file beside it for values that are not written as source."""
    definitions = Definitions()
    compilation = print_compilation(
        compiler, "compile_f", definitions, has_symbolic_sizes=False, is_full_graph=False
    )
    try:
        lines = _print_source(call, definitions, compilation)
    except NotPrintable as error:
        compilation.notes.append(f"The function is pickled in the file of inputs, because {error}")
        lines = _print_pickled(call, compilation)
    lines = [*compilation.lines, "", "", *lines]
    pasted = STATE if outcome.condition in NUMBERS else []
    case = Case("f", "compile_f", "make_inputs", call.has_gradients, lines, pasted)
    text = assemble(
        list(print_header("", compiler, outcome, stage, title, None, compilation.notes)),
        definitions=definitions,
        failing=case,
        passing=None,
        outcome=outcome,
        has_saved=bool(compilation.saved),
        limit_s=limit_s,
        settings=settings,
    )
    return save_script(text, compilation.saved, folder)


def _print_source(
    call: FunctionCall, definitions: Definitions, compilation: Compilation
) -> list[str]:
    function = definitions.refer(call.function)
    positional = [f"x{position}" for position in range(len(call.args))]
    names = [*positional, *call.kwargs]
    inputs = print_inputs([*call.args, *call.kwargs.values()], names, definitions)
    compilation.saved |= inputs.saved
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


def _print_pickled(call: FunctionCall, compilation: Compilation) -> list[str]:
    program = (call.function, tuple(call.args), dict(call.kwargs))
    text = pickle_into(program, "program", compilation)
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
