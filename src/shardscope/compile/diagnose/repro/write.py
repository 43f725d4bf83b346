"""A failing fragment, written down as a script that anybody can run."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch

from shardscope.comm.lines import user_line
from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.folder import FIRST_LINE, SAVED_NAME, SCRIPT_NAME
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.outcome import Outcome
from shardscope.compile.diagnose.repro import harness
from shardscope.compile.diagnose.repro.backend import print_compilation
from shardscope.compile.diagnose.repro.draws import has_draws
from shardscope.compile.diagnose.repro.inlining import Definitions
from shardscope.compile.diagnose.repro.inputs import print_inputs
from shardscope.compile.diagnose.repro.layout import lay_out_call
from shardscope.compile.diagnose.repro.names import comment
from shardscope.compile.diagnose.repro.program import Program, print_program
from shardscope.compile.diagnose.repro.script import Case, assemble
from shardscope.compile.diagnose.repro.simplify import Recipe, simplify
from shardscope.compile.diagnose.repro.spelling import name_op
from shardscope.compile.diagnose.repro.variant import Change, Variant
from shardscope.record import Stage

__all__ = ["print_header", "save_script", "write_repro"]

_WIDTH = 98
_MOST_OPS_NAMED = 5
_CHANGES: dict[Change, Any] = {
    Change.DOUBLE: harness.in_double,
    Change.NO_GRADIENTS: harness.without_gradient,
    Change.CONTIGUOUS: harness.make_contiguous,
    Change.ONES: harness.as_ones,
}


def write_repro(
    fragment: Fragment,
    compiler: Compiler,
    outcome: Outcome,
    *,
    folder: Path,
    passing: Fragment | Variant | None = None,
    title: str = "",
    notes: Sequence[str] = (),
    stage: Stage | None = None,
    still_fails: Callable[[tuple[Any, ...]], bool] | None = None,
    limit_s: float = 60.0,
    settings: Sequence[str] = (),
) -> Path:
    """Write `folder/repro.py`, and a file with inputs beside it where they are big.

    `still_fails` says whether the fragment fails in the same way with other inputs: nicer ones are
    tried then. `limit_s` is how long a program that hangs is waited for, `settings` lines that set
    torch up as the user has. What cannot be written as source raises `NotPrintable`.
    """
    recipes = simplify(fragment, still_fails) if still_fails is not None else {}
    if compiler.backend == "inductor" and has_draws(fragment):
        # It draws other numbers than eager execution does, and that is no fault.
        compiler = replace(compiler, config={**compiler.config, "fallback_random": True})
    writer = _Writer(compiler, recipes)
    failing = writer.write_failing(fragment)
    variant = _as_variant(passing, compiler)
    other = writer.write_passing(fragment, variant) if variant is not None else None
    header = print_header(
        _name_ops(fragment),
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
        passing=other,
        outcome=outcome,
        has_saved=bool(writer.saved),
        limit_s=limit_s,
        settings=settings,
    )
    return save_script(text, writer.saved, folder)


def save_script(text: str, saved: dict[str, torch.Tensor], folder: Path) -> Path:
    """Write a script, and beside it the file that it reads, if it does."""
    compile(text, SCRIPT_NAME, "exec")
    folder.mkdir(parents=True, exist_ok=True)
    if saved:
        torch.save(saved, folder / SAVED_NAME)
    else:
        (folder / SAVED_NAME).unlink(missing_ok=True)
    path = folder / SCRIPT_NAME
    path.write_text(text, encoding="utf-8")
    return path


def _as_variant(passing: Fragment | Variant | None, compiler: Compiler) -> Variant | None:
    if isinstance(passing, Fragment):
        return Variant(passing, compiler, Change.PROGRAM, str(Change.PROGRAM))
    return passing


@final
class _Writer:
    """Writes the cases of one script, which share definitions and a file."""

    def __init__(self, compiler: Compiler, recipes: dict[int, Recipe]) -> None:
        self.definitions = Definitions()
        self.saved: dict[str, torch.Tensor] = {}
        self.notes: list[str] = []
        self._compiler = compiler
        self._recipes = recipes

    def write_failing(self, fragment: Fragment) -> Case:
        lines = self._write_compilation(self._compiler, "compile_f", fragment)
        lines += self._write_program(fragment, "f", "make_inputs", self._recipes)
        return Case("f", "compile_f", "make_inputs", fragment.with_gradients, lines)

    def write_passing(self, fragment: Fragment, variant: Variant) -> Case:
        """What differs from the case that fails, and its names for the rest."""
        with_gradients = variant.fragment.with_gradients
        if variant.change is Change.PROGRAM:
            lines = self._write_program(variant.fragment, "passing_f", "make_passing_inputs", {})
            return Case("passing_f", "compile_f", "make_passing_inputs", with_gradients, lines)
        if variant.change is Change.EAGER:
            lines = self._write_compilation(variant.compiler, "compile_passing_f", fragment)
            return Case("f", "compile_passing_f", "make_inputs", with_gradients, lines)
        change = _CHANGES[variant.change]
        lines = [
            "def make_passing_inputs():",
            f"    return tuple({change.__name__}(one) for one in make_inputs())",
            *("", ""),
        ]
        return Case("f", "compile_f", "make_passing_inputs", with_gradients, lines, [change])

    def _write_compilation(self, compiler: Compiler, name: str, fragment: Fragment) -> list[str]:
        made = print_compilation(
            compiler, name, self.definitions, has_open_sizes=fragment.has_open_sizes
        )
        self.saved |= made.saved
        self.notes += made.notes
        return [*made.lines, "", ""]

    def _write_program(
        self, fragment: Fragment, name: str, make_name: str, recipes: dict[int, Recipe]
    ) -> list[str]:
        program = print_program(fragment.graph, name, self.definitions)
        self.notes += program.notes
        made = print_inputs(
            [*fragment.inputs, *program.constants],
            program.parameters,
            self.definitions,
            prefix="passing_" if name != "f" else "",
            recipes={index: one.text for index, one in recipes.items()},
        )
        self.saved |= made.saved
        return [*program.lines, *_print_maker(make_name, made.lines, program)]


def _print_maker(name: str, lines: list[str], program: Program) -> list[str]:
    body = [f"    {line}" for line in lines]
    parts = program.parameters
    returned = f"    return ({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    if len(returned) > _WIDTH:
        returned = "\n".join(lay_out_call("return ", parts, "", indent="    "))
    return [f"def {name}():", *body, returned, "", ""]


def print_header(
    ops: str,
    compiler: Compiler,
    outcome: Outcome,
    stage: Stage | None,
    title: str,
    variant: Variant | None,
    notes: Sequence[str],
) -> Iterator[str]:
    """What a script shows and how to run it, as comments."""
    # The first two lines are ours alone: Python looks for an encoding there.
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


def _name_ops(fragment: Fragment) -> str:
    """The ops and the user's lines, the first few."""
    nodes = [node for node in fragment.graph.graph.nodes if node.op.startswith("call")]
    by_line: dict[str, list[str]] = {}
    for node in nodes[:_MOST_OPS_NAMED]:
        line = comment(user_line(node.meta.get("stack_trace") or ""), width=80)
        by_line.setdefault(line, []).append(name_op(node))
    shown = [f"{', '.join(ops)}{f' ({line})' if line else ''}" for line, ops in by_line.items()]
    more = len(nodes) - _MOST_OPS_NAMED
    return "; ".join([*shown, *([f"and {more} more"] if more > 0 else [])])


def _wrap(label: str, text: str) -> list[str]:
    """A labelled text as comments; nothing for an empty one."""
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
