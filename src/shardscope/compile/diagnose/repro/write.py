"""Writes a failing subgraph as a script that needs nothing but torch."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import torch

from shardscope.attribution.call_sites import user_line
from shardscope.compile.diagnose.accuracy import CheckResult
from shardscope.compile.diagnose.repro.literals import comment, exchange_names, wrap_call
from shardscope.compile.diagnose.repro.print_graph import Program, print_program
from shardscope.compile.diagnose.repro.print_values import print_inputs
from shardscope.compile.diagnose.repro.user_code import Definitions, print_compilation
from shardscope.compile.diagnose.repro.variant import (
    Change,
    InputExpression,
    Variant,
    simplify,
    uses_rng,
)
from shardscope.compile.diagnose.subgraph import Compiler, Subgraph
from shardscope.compile.diagnose.subgraph.op_names import name_op
from shardscope.compile.diagnose.worker import FIRST_LINE, SAVED_NAME, SCRIPT_NAME, harness
from shardscope.numerics import check, comparison_source
from shardscope.record import Condition, Stage

EXIT_PASSES, EXIT_FAILS = 0, 1
PASSING = "--passing"
"""The argument that has a script run the variant that does not fail."""

_OPTIONAL = ("copy", "glob", "pathlib", "pickle", "re", "signal", "subprocess", "time")
_STDLIB = ("atexit", "os", "shutil", "sys", "tempfile", "traceback")

_TOP = """\
# Use no caches of earlier runs.
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
"""

_LOAD = f"""\
def load_saved():
    return torch.load(pathlib.Path(__file__).with_name("{SAVED_NAME}"), weights_only=True)
"""

_END = """\
if __name__ == "__main__":
    try:
        code = main()
    except Exception:  # not the bug: the script is broken
        traceback.print_exc()
        code = 2
    sys.exit(code)
"""

_RUN = [
    harness.run,
    harness.list_parts,
    harness.find_leaf,
    harness.wait_for_device,
    harness.draw_cotangent,
]
_NUMBERS = [
    *_RUN,
    harness.in_double,
    harness.Widened,
    harness.run_exactly,
    check,
    harness.find_difference,
    harness.find_wrong_numbers,
]
STATE = [harness.copy_if_possible, harness.list_variables, harness.find_wrong_state]
"""What a script of a whole function needs to compare globals and class attributes."""
_ERRORS = [*_RUN, harness.plain_words, harness.same_error, harness.find_error]
_CHILD = [*_RUN, harness.SessionClock, harness.run_child]
_HARNESS: dict[Condition, list[Any]] = {
    Condition.NONDETERMINISTIC: [*_RUN, check, harness.find_unrest],
    Condition.COMPILE_ERROR: _ERRORS,
    Condition.RUNTIME_ERROR: _ERRORS,
    Condition.MISSING_ERROR: [*_RUN, harness.find_missing_error],
    Condition.DIFFERENT_ERROR: [*_RUN, harness.find_missing_error],
    Condition.CRASH: [*_CHILD, harness.find_crash],
    Condition.HANG: [*_CHILD, harness.find_hang],
}


@final
@dataclass
class Case:
    """What a script runs: a function, how it is compiled, and what creates its inputs."""

    function: str
    compile: str
    make_inputs: str
    with_gradients: bool
    lines: list[str] = field(default_factory=list)  # that define them
    pasted: list[Any] = field(default_factory=list)  # harness functions for this case only

    def format_arguments(self) -> str:
        """The arguments for the functions of the harness."""
        return f"{self.function}, {self.compile}, {self.make_inputs}, {self.with_gradients}"


def assemble(
    header: Sequence[str],
    *,
    definitions: Definitions,
    failing: Case,
    passing: Case | None,
    outcome: CheckResult,
    has_saved: bool,
    limit_s: float,
    settings: Sequence[str] = (),
) -> str:
    """The text of the script. `settings` are lines that apply the user's torch settings."""
    pasted = _list_pasted(outcome.condition, failing, passing)
    sources = [_read(function) for function in pasted]
    replacements = definitions.names.replacements()
    own = [
        *([_LOAD, ""] if has_saved else []),
        *failing.lines,
        *(passing.lines if passing is not None else []),
        *(part for source in sources for part in (source, "")),
        *_print_main(outcome, failing, passing, limit_s),
        "",
        "",
        _END,
    ]
    imports = _list_imports(definitions, own, replacements)
    body = [*definitions.lines, *(exchange_names(part, replacements) for part in own)]
    settings_lines = [*settings, "", ""] if settings else []
    lines = [
        *header,
        "",
        "from __future__ import annotations",
        "",
        *imports,
        *settings_lines,
        *body,
    ]
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines))


def _read(pasted: Any) -> str:
    """The source of a pasted function, without comments for linters."""
    source = comparison_source() if pasted is check else inspect.getsource(pasted)
    plain = re.sub(r"  # type: ignore\S*| noqa: \S+(?: -)?|  # noqa: \S+$", "", source, flags=re.M)
    return plain.removeprefix("@final\n")


def failure_line(outcome: CheckResult) -> str:
    """The beginning of the line that a script prints when it fails."""
    return f"FAILS: {outcome.condition}"


def _list_pasted(condition: Condition, failing: Case, passing: Case | None) -> list[Any]:
    cases = [failing] if passing is None else [failing, passing]
    extra = [function for case in cases for function in case.pasted]
    return list(dict.fromkeys([*_HARNESS.get(condition, _NUMBERS), *extra]))


def _list_imports(
    definitions: Definitions, own: Sequence[str], replacements: Mapping[str, str]
) -> list[str]:
    """Imports before the environment is set, and torch after it."""
    text = "\n".join(own)
    named = {module for module in _OPTIONAL if f"{module}." in text}
    if any(name.startswith("builtins.") for name in replacements.values()):
        named.add("builtins")
    early = {f"import {_format_import(module, replacements)}" for module in (*_STDLIB, *named)}
    late = definitions.imports - early - {"import torch"}
    return [
        *sorted(early),
        f"from typing import {_format_import('Any', replacements)}",
        "",
        exchange_names(_TOP, replacements),
        "import torch",
        *sorted(late),
        "",
        "",
    ]


def _format_import(name: str, replacements: Mapping[str, str]) -> str:
    return f"{name} as {replacements[name]}" if name in replacements else name


def _print_main(
    outcome: CheckResult, failing: Case, passing: Case | None, limit_s: float
) -> Iterator[str]:
    """The function that runs one of the cases and prints the result."""
    yield "def main() -> int:"
    yield f"    function, compile_it, make, with_gradients = {failing.format_arguments()}"
    if passing is not None:
        yield f'    if "{PASSING}" in sys.argv:'
        yield f"        function, compile_it, make, with_gradients = {passing.format_arguments()}"
    yield "    compiled = compile_it(function)"
    has_state = harness.find_wrong_state in failing.pasted
    yield from (f"    {line}" for line in _print_search(outcome, limit_s, has_state))
    yield f'    print(f"{failure_line(outcome)}: {{fact}}" if fact else "passes", flush=True)'
    yield "    return 1 if fact else 0"


def _print_search(outcome: CheckResult, limit_s: float, has_state: bool) -> Iterator[str]:
    everything = "function, compiled, make, with_gradients"
    match outcome.condition:
        case Condition.CRASH | Condition.HANG:
            yield 'if "--child" in sys.argv:'
            yield '    print("The child begins.", flush=True)'
            yield "    run(compiled, make(), with_gradients)"
            yield "    return 0"
            yield f"fact = find_{outcome.condition}({limit_s:g})"
        case Condition.COMPILE_ERROR | Condition.RUNTIME_ERROR:
            yield f"expected = {_split_signature(outcome.signature)!r}"
            yield f"fact = find_error({everything}, expected)"
        case Condition.MISSING_ERROR | Condition.DIFFERENT_ERROR:
            yield f"fact = find_missing_error({everything})"
        case Condition.NONDETERMINISTIC:
            yield f"fact = find_unrest({everything})"
        case _:
            state = f" or find_wrong_state({everything})" if has_state else ""
            yield f"fact = find_wrong_numbers({everything}){state}"


def _split_signature(signature: str) -> tuple[str, str]:
    """The error type without its module, which differs in a script, and the message."""
    kind, _, line = signature.partition(": ")
    return kind.rpartition(".")[2], line


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
            compiler, name, self.definitions, has_symbolic_sizes=subgraph.has_symbolic_sizes
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
