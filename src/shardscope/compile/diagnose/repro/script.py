"""Assembles the text of a repro script from its parts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from shardscope.compile.diagnose.accuracy.check_result import CheckResult
from shardscope.compile.diagnose.repro.literals import exchange_names
from shardscope.compile.diagnose.repro.user_code import Definitions
from shardscope.compile.diagnose.worker import harness
from shardscope.compile.diagnose.worker.sandbox import SAVED_NAME
from shardscope.numerics.standalone import check, comparison_source
from shardscope.record import Condition

EXIT_PASSES, EXIT_FAILS = 0, 1
PASSING = "--passing"
"""The argument that has a script run the variant that does not fail."""

_OPTIONAL = ("copy", "glob", "pathlib", "pickle", "re", "signal", "subprocess", "time")
_STDLIB = ("atexit", "os", "shutil", "sys", "tempfile", "traceback")

_TOP = """\
# Nothing that an earlier run left behind may answer for this one.
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
