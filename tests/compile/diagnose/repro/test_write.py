"""Scripts show the failure that they were written for, in a fresh process, and nothing else."""

from __future__ import annotations

import collections
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

import repro_backends as backends
from repro_scripts import WRONG, assert_tidy, capture, load
from shardscope.compile.diagnose.accuracy.check_result import CheckResult, make_signature
from shardscope.compile.diagnose.repro import user_code as backend_module
from shardscope.compile.diagnose.repro.entire_function import FunctionCall, write_entire_function
from shardscope.compile.diagnose.repro.print_values import print_inputs
from shardscope.compile.diagnose.repro.user_code import Definitions
from shardscope.compile.diagnose.repro.variant import Change, Variant, find_passing
from shardscope.compile.diagnose.repro.write import write_repro
from shardscope.compile.diagnose.repro_writer import verify
from shardscope.compile.diagnose.subgraph.subgraph import Compiler, Subgraph
from shardscope.compile.diagnose.worker.fork_server import ScriptRun
from shardscope.record import Condition, Stage
from warm_python import run_python

X = torch.tensor([[0.5, -1.0], [2.0, 3.25]])


def relu_of_sine(x):
    return torch.relu(torch.sin(x)) * 2


def sine(x):
    return torch.sin(x) * 2


@pytest.fixture(autouse=True)
def _own_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def subgraph() -> Subgraph:
    return capture(relu_of_sine, X.clone().requires_grad_())


def fail(error: Exception, condition: Condition) -> CheckResult:
    return CheckResult(condition, error=str(error), signature=make_signature(error))


FAILURES: dict[str, tuple[Callable[..., Any], CheckResult]] = {
    "wrong result": (backends.shifted, WRONG),
    "nan": (backends.gives_nan, CheckResult(Condition.NAN)),
    "compile error": (
        backends.fails_to_compile,
        fail(backends.BackendError("no relu for graph 12"), Condition.COMPILE_ERROR),
    ),
    "runtime error": (
        backends.fails_to_run,
        fail(ValueError("cannot run with 7 inputs"), Condition.RUNTIME_ERROR),
    ),
    "crash": (backends.crashes, CheckResult(Condition.CRASH)),
    "hang": (backends.hangs, CheckResult(Condition.HANG)),
}


def run_here(path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of a script, without a process of its own."""
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    torch.compiler.reset()
    with pytest.raises(SystemExit) as end:
        load(path, "__main__")
    assert isinstance(end.value.code, int)
    return end.value.code


def test_a_script_shows_its_failure_in_a_fresh_process(subgraph: Subgraph, tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s "here"'
    path = write_repro(subgraph, Compiler(backends.shifted), WRONG, folder=folder)
    verified = verify(path, outcome=WRONG)
    assert verified is None, verified
    assert [path.name for path in folder.iterdir()] == ["repro.py"]


@pytest.mark.parametrize("name", FAILURES)
def test_a_script_shows_its_failure_and_says_which_it_is(
    name: str,
    subgraph: Subgraph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    backend, outcome = FAILURES[name]
    limit_s = 3 if outcome.condition is Condition.HANG else 60
    path = write_repro(subgraph, Compiler(backend), outcome, folder=tmp_path, limit_s=limit_s)
    assert run_here(path, monkeypatch) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"FAILS: {outcome.condition}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["repro.py"]
    assert_tidy(path.read_text())


BACKENDS: dict[str, Any] = {
    "function with helpers": backends.shifted,
    "closure": backends.make_shifting(0.5),
    "partial": partial(backends.with_amount, amount=0.5),
    "lambda": lambda graph, inputs: lambda *args: tuple(value + 1 for value in graph(*args)),
}


@pytest.mark.parametrize("name", BACKENDS)
def test_backends_of_the_users_are_copied_into_the_script(
    name: str, subgraph: Subgraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_repro(subgraph, Compiler(BACKENDS[name]), WRONG, folder=tmp_path)
    assert not (tmp_path / "repro_inputs.pt").exists()
    assert_tidy(path.read_text())
    assert run_here(path, monkeypatch) == 1


@pytest.mark.parametrize("backend", [backends.Shifting(0.5), backends.uses_another_package])
def test_backends_that_cannot_be_copied_are_pickled_and_the_script_says_so(
    backend: Any, subgraph: Subgraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_repro(subgraph, Compiler(backend), WRONG, folder=tmp_path)
    assert "# Note: The backend is pickled in the file of inputs, because" in path.read_text()
    monkeypatch.setitem(sys.modules, "repro_backends", None)  # as where nobody can import it
    assert run_here(path, monkeypatch) == 1


def test_a_backend_of_torchs_is_imported_by_its_path(subgraph: Subgraph, tmp_path: Path) -> None:
    from torch._dynamo.backends.debugging import aot_eager

    text = write_repro(subgraph, Compiler(aot_eager), WRONG, folder=tmp_path).read_text()
    assert "import torch._dynamo.backends.debugging\n" in text
    assert "backend=torch._dynamo.backends.debugging.aot_eager" in text


def test_a_backend_that_a_package_registered_goes_by_its_name(
    subgraph: Subgraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = EntryPoint("shifted", "repro_backends:shifted", "torch_dynamo_backends")
    monkeypatch.setattr(backend_module, "entry_points", lambda group: [entry])
    text = write_repro(subgraph, Compiler(backends.shifted), WRONG, folder=tmp_path).read_text()
    assert 'backend="shifted"' in text
    assert "def shifted" not in text


@pytest.mark.parametrize(
    ("compiler", "call"),
    [
        (
            Compiler("inductor", options={"max_autotune": True}, config={"cpp.threads": 1}),
            'backend="inductor", options={"max_autotune": True, "cpp.threads": 1}, fullgraph=True',
        ),
        (
            Compiler("inductor", mode="default", dynamic=True, config={"cpp.threads": 1}),
            'torch._inductor.config.patch({"cpp.threads": 1})(compiled)',
        ),
        (
            Compiler("shardscope_fault_nan", options={"op": "torch.relu"}),
            'backend="shardscope_fault_nan", options={"op": "torch.relu"}',
        ),
    ],
)
def test_options_modes_and_configuration_are_handed_to_torch(
    compiler: Compiler, call: str, subgraph: Subgraph, tmp_path: Path
) -> None:
    text = write_repro(subgraph, compiler, WRONG, folder=tmp_path).read_text()
    assert call in " ".join(text.split()).replace("( ", "(").replace(", )", ")")


def test_options_that_have_no_literal_form_are_pickled(subgraph: Subgraph, tmp_path: Path) -> None:
    compiler = Compiler("eager", options={"hook": backends.Shifting(1.0)})
    text = write_repro(subgraph, compiler, WRONG, folder=tmp_path).read_text()
    assert 'options=pickle.loads(bytes(load_saved()["options"].tolist()))' in text
    assert "# Note: The options are pickled" in text


def test_a_script_exits_with_0_where_nothing_is_wrong_and_with_2_on_another_error(
    subgraph: Subgraph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_repro(subgraph, Compiler("eager"), WRONG, folder=tmp_path)
    assert run_here(path, monkeypatch) == 0
    other = fail(ValueError("something else"), Condition.COMPILE_ERROR)
    path = write_repro(subgraph, Compiler(backends.fails_to_compile), other, folder=tmp_path)
    assert run_here(path, monkeypatch) == 2
    assert "no relu for graph" in capsys.readouterr().err


def test_a_nondeterministic_backend_is_detected(
    subgraph: Subgraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = CheckResult(Condition.NONDETERMINISTIC)
    path = write_repro(subgraph, Compiler(backends.is_restless), outcome, folder=tmp_path)
    assert run_here(path, monkeypatch) == 1
    path = write_repro(subgraph, Compiler(backends.shifted), outcome, folder=tmp_path)
    assert run_here(path, monkeypatch) == 0


def make_check(bad: Callable[[Subgraph], bool]) -> tuple[list[Subgraph], Any]:
    subgraphs: list[Subgraph] = []

    def check(subgraph: Subgraph, compiler: Compiler) -> CheckResult:
        subgraphs.append(subgraph)
        return WRONG if bad(subgraph) else CheckResult(Condition.FINE)

    return subgraphs, check


PASSING: dict[Change, tuple[Callable[..., Any], Callable[[Subgraph], bool]]] = {
    Change.DOUBLE: (
        backends.wrong_in_single_precision,
        lambda value: value.inputs[0].dtype is torch.float32,
    ),
    Change.NO_GRADIENTS: (backends.wrong_with_gradients, lambda value: value.with_gradients),
    Change.CONTIGUOUS: (
        backends.wrong_if_transposed,
        lambda value: not value.inputs[0].is_contiguous(),
    ),
    Change.EAGER: (backends.make_shifting(0.5), lambda value: True),
}


@pytest.mark.parametrize("change", PASSING)
def test_the_nearest_variant_that_passes_is_found_and_passes_in_the_script(
    change: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, is_bad = PASSING[change]
    subgraph = capture(relu_of_sine, X.T.requires_grad_())
    transposed = X.T.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    subgraph = Subgraph(subgraph.graph, (transposed,), True)
    subgraphs, check = make_check(is_bad)
    variant = find_passing(subgraph, compiler=Compiler(backend), check_accuracy=check)
    assert variant.change is change
    assert len(subgraphs) <= 3
    path = write_repro(subgraph, Compiler(backend), WRONG, folder=tmp_path, passing=variant)
    assert str(change) in path.read_text()
    assert run_here(path, monkeypatch) == 1
    assert run_here(path, monkeypatch, "--passing") == 0


def test_a_smaller_program_that_passes_is_printed_beside_the_one_that_fails(
    subgraph: Subgraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smaller = capture(sine, X.clone().requires_grad_())
    _, check = make_check(lambda value: True)
    compiler = Compiler(backends.shifted)
    variant = find_passing(
        subgraph, compiler=compiler, check_accuracy=check, smaller=smaller, missing="torch.relu"
    )
    path = write_repro(subgraph, compiler, WRONG, folder=tmp_path, passing=variant)
    assert "python repro.py --passing  without torch.relu: exit code 0." in path.read_text()
    assert run_here(path, monkeypatch) == 1
    assert run_here(path, monkeypatch, "--passing") == 0


def test_a_check_that_fails_counts_as_not_passing(subgraph: Subgraph) -> None:
    def check(subgraph: Subgraph, compiler: Compiler) -> CheckResult:
        raise RuntimeError("no double precision here")

    variant = find_passing(subgraph, compiler=Compiler("inductor"), check_accuracy=check)
    assert (variant.change, variant.compiler.backend) == (Change.EAGER, "eager")


PASSES = (0, "passes\n")


def runner_that_gives(failing: tuple[int | None, str], passing: tuple[int, str]) -> Any:
    return lambda path, arguments: ScriptRun(*(passing if arguments else failing))


@pytest.mark.parametrize(
    ("results", "is_same"),
    [
        ([(1, "FAILS: wrong_result: output 0\n"), PASSES], True),
        ([(1, "FAILS: wrong_result: output 0\n"), (1, "FAILS: …\n")], False),
        ([(1, "Traceback: no line of ours\n"), PASSES], False),
        ([(1, "FAILS: nan: another failure\n"), PASSES], False),
        ([(0, "passes\n"), PASSES], False),
        ([(2, "FAILS: wrong_result: yet broken\n"), PASSES], False),
        ([(None, ""), PASSES], False),
    ],
)
def test_only_the_same_failure_with_a_variant_that_passes_verifies_a_script(
    results: Any, is_same: bool, subgraph: Subgraph, tmp_path: Path
) -> None:
    variant = Variant(subgraph, Compiler("eager"), Change.EAGER, "eager")
    path = write_repro(
        subgraph, Compiler(backends.shifted), WRONG, folder=tmp_path, passing=variant
    )
    verified = verify(path, outcome=WRONG, runner=runner_that_gives(*results))
    unlike = results[0] if results[1] == PASSES else results[1]
    assert verified == (None if is_same else ScriptRun(*unlike))


HOSTILE = 'x"""\n\r\x0c\x85\u2028\u202eimport os; os._exit(3)\n# -*- coding: latin-1 -*-\n\'\ud800'


def test_nothing_in_names_paths_or_messages_becomes_code(
    subgraph: Subgraph, tmp_path: Path
) -> None:
    for node in subgraph.graph.graph.nodes:
        node.meta["stack_trace"] = f'  File "{HOSTILE}.py", line 3, in f\n    {HOSTILE}\n'
    outcome = CheckResult(
        Condition.RUNTIME_ERROR, HOSTILE, error=HOSTILE, signature=f"E: {HOSTILE}"
    )
    path = write_repro(
        subgraph,
        Compiler(backends.shifted),
        outcome,
        folder=tmp_path,
        passing=Variant(subgraph, Compiler("eager"), Change.EAGER, HOSTILE),
        title=HOSTILE,
        notes=[HOSTILE],
        stage=Stage.AOT,
    )
    text = path.read_text(encoding="utf-8")
    code = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    assert not any("os._exit" in line.split("  # ")[0].split("expected =")[0] for line in code)
    assert "coding" not in "".join(text.splitlines()[:2])
    load(path)


def test_the_header_says_what_fails_where_and_how_to_run_it(
    subgraph: Subgraph, tmp_path: Path
) -> None:
    path = write_repro(
        subgraph,
        Compiler("inductor"),
        WRONG,
        folder=tmp_path,
        title="torch.relu is wrong",
        notes=["One of two."],
        stage=Stage.BACKEND,
    )
    head = path.read_text().split("\n\n")[0]
    for part in (
        "# torch.relu is wrong",
        "# Verdict: wrong_result in forward. output 0 is off",
        "# Stage: backend",
        "# Ops: torch.sin, torch.relu, operator.mul (test_write.py:",
        f"torch {torch.__version__}",
        "exit code 1: the bug shows, 0: it does not",
        "# Note: One of two.",
    ):
        assert part in head


def test_a_script_that_needs_no_file_removes_the_one_of_an_earlier_script(tmp_path: Path) -> None:
    big = capture(sine, torch.randn(9, 9))
    write_repro(big, Compiler("inductor"), WRONG, folder=tmp_path)
    assert (tmp_path / "repro_inputs.pt").exists()
    write_repro(capture(sine, X), Compiler("inductor"), WRONG, folder=tmp_path)
    assert not (tmp_path / "repro_inputs.pt").exists()


def make_module(folder: Path, name: str, source: str) -> Any:
    (folder / f"{name}.py").write_text(source)
    return __import__(name)


NAMED = """\
import torch
from {other} import helper as theirs


def helper(n):
    return n + 1


def {name}(x, depth=1):
    return x + 1 if torch.compiler.is_compiling() else x + helper(theirs(depth))
"""


@pytest.mark.parametrize("name", ["f", "run", "print", "sys", "Any", "make_inputs"])
def test_a_function_with_a_name_of_the_scripts_is_copied_with_its_helpers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    other, own = f"other_with_{name}", f"module_with_{name}"
    make_module(tmp_path, other, "def helper(n):\n    return n * 2\n")
    function = getattr(make_module(tmp_path, own, NAMED.format(other=other, name=name)), name)
    path = write_entire_function(
        FunctionCall(function, (torch.ones(2),), {}),
        Compiler("eager"),
        WRONG,
        folder=tmp_path / "found",
        title="",
        stage=None,
        limit_s=60,
    )
    text = path.read_text()
    assert f"def {name}(x, depth=1):" in text
    assert "helper(theirs(depth))" in text
    assert "cloudpickle" not in text
    # In a process of its own: in one, dynamo of torch 2.11 looks names up in the first `__main__`.
    done = run_python(str(path))
    assert done.returncode == 1, done.stderr


def test_arguments_in_containers_are_written_out(tmp_path: Path) -> None:
    shared = torch.arange(3.0)
    args = (
        [shared, {"a": (torch.ones(2), 3)}],
        OrderedDict(b=shared, a=[1]),
        deque([1, 2], maxlen=2),
        torch.ones(2, requires_grad=True) * 2,
    )
    inputs = print_inputs(args, ["x0", "x1", "x2", "x3"], Definitions())
    scope: dict[str, Any] = {"torch": torch, "collections": collections}
    exec("\n".join(inputs.lines), scope)
    x0, x1, x2, x3 = (scope[name] for name in ("x0", "x1", "x2", "x3"))
    assert x0[0] is x1["b"]
    assert x0[0].tolist() == [0.0, 1.0, 2.0]
    assert (x0[1]["a"][0].tolist(), x0[1]["a"][1]) == ([1.0, 1.0], 3)
    assert (type(x1), list(x1)) == (OrderedDict, ["b", "a"])
    assert (list(x2), x2.maxlen) == ([1, 2], 2)
    assert (x3.tolist(), x3.is_leaf, x3.requires_grad) == ([2.0, 2.0], False, True)
