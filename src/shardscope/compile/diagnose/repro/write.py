"""Writes a failing subgraph as a script that needs nothing but torch."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch

from shardscope.attribution.call_sites import user_line
from shardscope.compile.diagnose.accuracy.check_result import CheckResult
from shardscope.compile.diagnose.repro.literals import comment, wrap_call
from shardscope.compile.diagnose.repro.print_graph import Program, print_program
from shardscope.compile.diagnose.repro.print_values import print_inputs
from shardscope.compile.diagnose.repro.script import Case, assemble
from shardscope.compile.diagnose.repro.user_code import Definitions, print_compilation
from shardscope.compile.diagnose.repro.variant import (
    Change,
    InputExpression,
    Variant,
    simplify,
    uses_rng,
)
from shardscope.compile.diagnose.subgraph.op_names import name_op
from shardscope.compile.diagnose.subgraph.subgraph import Compiler, Subgraph
from shardscope.compile.diagnose.worker import harness
from shardscope.compile.diagnose.worker.sandbox import FIRST_LINE, SAVED_NAME, SCRIPT_NAME
from shardscope.record import Stage

_WIDTH = 98
_MAX_OPS_NAMED = 5
_CHANGES: dict[Change, Any] = {
    Change.DOUBLE: harness.in_double,
    Change.NO_GRADIENTS: harness.without_gradient,
    Change.CONTIGUOUS: harness.make_contiguous,
    Change.ONES: harness.as_ones,
}


def write_repro(
    subgraph: Subgraph,
    compiler: Compiler,
    outcome: CheckResult,
    *,
    folder: Path,
    passing: Subgraph | Variant | None = None,
    title: str = "",
    notes: Sequence[str] = (),
    stage: Stage | None = None,
    still_fails: Callable[[tuple[Any, ...]], bool] | None = None,
    limit_s: float = 60.0,
    settings: Sequence[str] = (),
) -> Path:
    """Write `folder/repro.py`, and a file beside it for large inputs.

    `still_fails` tells whether the subgraph fails in the same way with other inputs; if it is
    given, simpler inputs are tried. `limit_s` is how long the script waits for a hang, `settings`
    are lines that apply the user's torch settings. Raises `NotPrintable` for values that cannot be
    written as source.
    """
    recipes = simplify(subgraph, still_fails) if still_fails is not None else {}
    if compiler.backend == "inductor" and uses_rng(subgraph):
        # Inductor draws other random numbers than eager execution, which is not an error.
        compiler = replace(compiler, config={**compiler.config, "fallback_random": True})
    writer = _Writer(compiler, recipes)
    failing = writer.write_failing(subgraph)
    variant = _as_variant(passing, compiler)
    passing_case = writer.write_passing(subgraph, variant) if variant is not None else None
    header = print_header(
        _name_ops(subgraph),
        compiler,
        outcome,
        stage,
        title,
        variant,
        [*notes, *writer.notes],
    )
    text = assemble(
        list(header),
        definitions=writer.definitions,
        failing=failing,
        passing=passing_case,
        outcome=outcome,
        has_saved=bool(writer.saved),
        limit_s=limit_s,
        settings=settings,
    )
    return save_script(text, writer.saved, folder)


def save_script(text: str, saved: dict[str, torch.Tensor], folder: Path) -> Path:
    """Write a script, and the file of tensors that it loads, if there are any."""
    compile(text, SCRIPT_NAME, "exec")
    folder.mkdir(parents=True, exist_ok=True)
    if saved:
        torch.save(saved, folder / SAVED_NAME)
    else:
        (folder / SAVED_NAME).unlink(missing_ok=True)
    path = folder / SCRIPT_NAME
    path.write_text(text, encoding="utf-8")
    return path


def _as_variant(passing: Subgraph | Variant | None, compiler: Compiler) -> Variant | None:
    if isinstance(passing, Subgraph):
        return Variant(passing, compiler, Change.PROGRAM, str(Change.PROGRAM))
    return passing


@final
class _Writer:
    """Writes the cases of one script, which share definitions and a file."""

    def __init__(self, compiler: Compiler, recipes: dict[int, InputExpression]) -> None:
        self.definitions = Definitions()
        self.saved: dict[str, torch.Tensor] = {}
        self.notes: list[str] = []
        self._compiler = compiler
        self._recipes = recipes

    def write_failing(self, subgraph: Subgraph) -> Case:
        lines = self._write_compilation(self._compiler, "compile_f", subgraph)
        lines += self._write_program(subgraph, "f", "make_inputs", self._recipes)
        return Case("f", "compile_f", "make_inputs", subgraph.with_gradients, lines)

    def write_passing(self, subgraph: Subgraph, variant: Variant) -> Case:
        """The passing case: defines what differs from the failing case, and reuses its other
        names.
        """
        with_gradients = variant.subgraph.with_gradients
        if variant.change is Change.PROGRAM:
            lines = self._write_program(variant.subgraph, "passing_f", "make_passing_inputs", {})
            return Case("passing_f", "compile_f", "make_passing_inputs", with_gradients, lines)
        if variant.change is Change.EAGER:
            lines = self._write_compilation(variant.compiler, "compile_passing_f", subgraph)
            return Case("f", "compile_passing_f", "make_inputs", with_gradients, lines)
        change = _CHANGES[variant.change]
        lines = [
            "def make_passing_inputs():",
            f"    return tuple({change.__name__}(one) for one in make_inputs())",
            *("", ""),
        ]
        return Case("f", "compile_f", "make_passing_inputs", with_gradients, lines, [change])

    def _write_compilation(self, compiler: Compiler, name: str, subgraph: Subgraph) -> list[str]:
        compilation = print_compilation(
            compiler, name, self.definitions, has_open_sizes=subgraph.has_open_sizes
        )
        self.saved |= compilation.saved
        self.notes += compilation.notes
        return [*compilation.lines, "", ""]

    def _write_program(
        self, subgraph: Subgraph, name: str, make_name: str, recipes: dict[int, InputExpression]
    ) -> list[str]:
        program = print_program(subgraph.graph, name, self.definitions)
        self.notes += program.notes
        inputs = print_inputs(
            [*subgraph.inputs, *program.constants],
            program.parameters,
            self.definitions,
            prefix="passing_" if name != "f" else "",
            recipes={index: recipe.text for index, recipe in recipes.items()},
        )
        self.saved |= inputs.saved
        return [*program.lines, *_print_input_maker(make_name, inputs.lines, program)]


def _print_input_maker(name: str, lines: list[str], program: Program) -> list[str]:
    body = [f"    {line}" for line in lines]
    parts = program.parameters
    returned = f"    return ({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    if len(returned) > _WIDTH:
        returned = "\n".join(wrap_call("return ", parts, "", indent="    "))
    return [f"def {name}():", *body, returned, "", ""]


def print_header(
    ops: str,
    compiler: Compiler,
    outcome: CheckResult,
    stage: Stage | None,
    title: str,
    variant: Variant | None,
    notes: Sequence[str],
) -> Iterator[str]:
    """Comments that describe what a script shows and how to run it."""
    # The first two lines contain no user text: Python looks for an encoding there.
    yield FIRST_LINE
    yield "#"
    yield from _wrap("", title or f"{outcome.condition} with {compiler.name}")
    yield from _wrap("Verdict: ", f"{outcome.condition} in {outcome.phase}. {outcome.fact}")
    yield from _wrap("Error: ", outcome.error.split("\n")[0])
    yield from _wrap("Stage: ", str(stage or ""))
    yield from _wrap("Ops: ", ops)
    yield from _wrap("Compiler: ", f"{compiler.name}, torch {torch.__version__}")
    yield "#"
    yield "# python repro.py            exit code 1: the bug shows, 0: it does not,"
    yield "#                            2: the script itself is broken."
    if variant is not None:
        yield from _wrap("python repro.py --passing  ", f"{variant.difference}: exit code 0.")
    for note in notes:
        yield from _wrap("Note: ", note)


def _name_ops(subgraph: Subgraph) -> str:
    """The first few ops with the user's source lines."""
    nodes = [node for node in subgraph.graph.graph.nodes if node.op.startswith("call")]
    by_line: dict[str, list[str]] = {}
    for node in nodes[:_MAX_OPS_NAMED]:
        line = comment(user_line(node.meta.get("stack_trace") or ""), width=80)
        by_line.setdefault(line, []).append(name_op(node))
    shown = [f"{', '.join(ops)}{f' ({line})' if line else ''}" for line, ops in by_line.items()]
    more = len(nodes) - _MAX_OPS_NAMED
    return "; ".join([*shown, *([f"and {more} more"] if more > 0 else [])])


def _wrap(label: str, text: str) -> list[str]:
    """A labelled text as comment lines; empty for an empty text."""
    plain = comment(text, width=600)
    if not plain:
        return []
    return textwrap.wrap(
        plain,
        _WIDTH,
        initial_indent=f"# {label}",
        subsequent_indent="#     ",
        break_long_words=False,
    )
