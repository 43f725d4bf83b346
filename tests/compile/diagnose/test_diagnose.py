"""`diagnose` from end to end: what is wrong, which line is to blame, and a script that shows it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import diagnosed_models as models
from home_workers import HomeWorkers, stay_at_home
from shardscope import Diagnosed, diagnose
from shardscope.compile.diagnose.culprit import INTERRUPTED
from shardscope.compile.diagnose.records import make_recording
from shardscope.errors import CompileError, OutputError
from shardscope.record import Condition, Diagnosis, Phase, Stage


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> HomeWorkers:
    """Whoever is asked instead of a process."""
    return stay_at_home(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "found"


def numbers(*size: int, requires_grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*size, generator=generator).requires_grad_(requires_grad)


def fault(kind: str, op: str, **options: Any) -> dict[str, Any]:
    return {"backend": f"shardscope_fault_{kind}", "options": {"op": op, **options}}


def check_found(found: Diagnosed, op: str, line: str) -> None:
    """One op at one line, and a script that shows it."""
    (suspect,) = found.diagnosis.suspects
    assert (suspect.op, suspect.source.line) == (op, models.line_of(line))
    assert Path(suspect.source.file).name == "diagnosed_models.py"
    check_script(found)


def check_script(found: Diagnosed) -> None:
    one = found.diagnosis
    assert (one.is_minimal, one.is_verified) == (True, True), one.notes
    assert one.passing.startswith("the same ")
    assert found.repro is not None
    assert found.repro.name == "repro.py"
    assert "import shardscope" not in found.repro.read_text()
    assert found.diagnosis.script == found.repro.read_text()
    assert not list(found.repro.parent.glob("scratch*"))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_right_compilers_are_fine_with_odd_models(
    workers: HomeWorkers, folder: Path, backend: str
) -> None:
    model = models.Kept()
    kwargs = {"scale": torch.tensor(2.0)}
    found = diagnose(model, torch.arange(6), kwargs=kwargs, backend=backend, folder=folder)
    one = found.diagnosis
    assert (found.condition, one.num_graphs, one.stage, one.suspects) == (
        Condition.FINE,
        1,
        None,
        (),
    )
    assert (one.target, one.backend, found.repro, one.notes) == ("Kept", backend, None, ())
    assert found.recording.findings == ()
    assert not folder.exists()


@pytest.mark.filterwarnings("ignore:.torch.jit")  # torch's own, of optimizers
def test_an_optimizer_that_does_not_outlive_the_call_is_diagnosed(
    workers: HomeWorkers, folder: Path
) -> None:
    given = numbers(4, requires_grad=True)
    found = diagnose(models.optimized, given, backend="aot_eager", folder=folder)
    assert (found.condition, found.diagnosis.notes) == (Condition.FINE, ())
    assert found.diagnosis.num_graphs > 0
    assert torch.equal(given, numbers(4))
    assert given.grad is None


def test_an_argument_that_becomes_the_result_of_something_is_diagnosed(
    workers: HomeWorkers, folder: Path
) -> None:
    weight = numbers(4, requires_grad=True)

    def write(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(weight).relu()

    found = diagnose(write, numbers(4), folder=folder, **fault("nan", "relu"))
    assert found.condition is Condition.NAN


def test_sparse_inputs_are_left_as_they_were(workers: HomeWorkers, folder: Path) -> None:
    given = torch.eye(3).to_sparse()
    found = diagnose(lambda x: x.to_dense().relu(), given, backend="eager", folder=folder)
    assert found.condition is Condition.FINE
    assert torch.equal(given.to_dense(), torch.eye(3))


def test_tensors_without_data_are_compared_by_what_is_known_of_them(
    workers: HomeWorkers, folder: Path
) -> None:
    found = diagnose(models.broken, torch.empty(3, device="meta"), backend="eager", folder=folder)
    assert found.condition is Condition.FINE
    assert "Call the function with tensors that have data" in found.diagnosis.notes[0]


def test_what_turns_modes_on_and_off_is_no_suspect(workers: HomeWorkers, folder: Path) -> None:
    found = diagnose(models.switched, numbers(3, 3), folder=folder, **fault("nan", "relu"))
    check_found(found, "torch.relu", "return torch.vmap(torch.relu)(x @ x)")


CASES = {
    "wrong result": (
        fault("accuracy_error", "relu"),
        (Condition.WRONG_RESULT, Stage.BACKEND, Phase.FORWARD),
    ),
    "nan": (
        fault("nan", "relu", stage="decomposed"),
        (Condition.NAN, Stage.DECOMPOSITION, Phase.FORWARD),
    ),
    "compile error": (
        fault("compile_error", "relu"),
        (Condition.COMPILE_ERROR, Stage.BACKEND, Phase.FORWARD),
    ),
    "runtime error in backward": (
        fault("runtime_error", "relu", direction="backward"),
        (Condition.RUNTIME_ERROR, Stage.BACKEND, Phase.BACKWARD),
    ),
    "wrong gradient": (
        fault("accuracy_error", "where", stage="partitioned", direction="backward"),
        (Condition.WRONG_RESULT, Stage.PARTITION, Phase.BACKWARD),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fault_in_the_second_graph_is_found(
    workers: HomeWorkers, folder: Path, case: str
) -> None:
    settings, expected = CASES[case]
    inputs = numbers(4, 4), numbers(4, 4, requires_grad=True)
    found = diagnose(models.broken, *inputs, folder=folder, **settings)
    one = found.diagnosis
    assert (one.condition, one.stage, one.phase) == expected
    assert (one.graph, one.num_graphs) == (1, 2)
    assert one.suspects[0].source.function == "broken"
    check_found(found, "torch.relu", "x = torch.relu(x)")
    (finding,) = found.recording.findings
    assert finding.rule == f"compiled-{one.condition.replace('_', '-')}"
    assert finding.remedy.startswith("Report it with the repro")
    assert finding.source == one.suspects[0].source


@pytest.mark.parametrize(
    ("also", "op"), [("mul", "operator.mul"), ("tanh", "torch.tanh")], ids=["adjacent", "distant"]
)
def test_two_ops_that_fail_together_are_found(
    workers: HomeWorkers, folder: Path, also: str, op: str
) -> None:
    settings = fault("runtime_error", "relu", also=also)
    found = diagnose(models.deep, numbers(4), folder=folder, **settings)
    assert [one.op for one in found.diagnosis.suspects] == ["torch.relu", op]
    check_script(found)
    assert found.diagnosis.passing in {f"the same without {one}" for one in ("torch.relu", op)}


def by_closure(factor: float) -> Any:
    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        return lambda *given: [one * factor for one in graph(*given)]

    return backend


@pytest.mark.parametrize(
    "backend",
    [by_closure(3.0), lambda graph, _: lambda *x: [y + 1 for y in graph(*x)], models.Adds("sin")],
    ids=["closure", "lambda", "object"],
)
def test_a_backend_that_nobody_registered_is_diagnosed(
    workers: HomeWorkers, folder: Path, backend: Any
) -> None:
    found = diagnose(models.broken, numbers(4), backend=backend, folder=folder)
    assert found.condition is Condition.WRONG_RESULT
    assert found.diagnosis.graph == 0
    check_found(found, "torch.sin", "x = torch.sin(x)")


@pytest.mark.parametrize("has_grad", [True, False])
def test_a_model_that_is_compiled_already_is_diagnosed_as_it_is(
    workers: HomeWorkers, folder: Path, has_grad: bool
) -> None:
    model = torch.compile(models.Kept(), backend="eager")
    with torch.set_grad_enabled(has_grad):
        found = diagnose(model, torch.arange(6), folder=folder, **fault("nan", "relu"))
    assert (found.condition, found.diagnosis.target) == (Condition.NAN, "Kept")
    check_found(found, "torch.relu", "logits = self.head(torch.relu(h))")


def test_what_is_more_accurate_is_not_wrong(workers: HomeWorkers, folder: Path) -> None:
    def narrow(x: torch.Tensor) -> torch.Tensor:
        return (x.exp() - 1).square().log1p()

    given = numbers(500).bfloat16()
    found = diagnose(narrow, given, backend=models.rounds_late, folder=folder)
    assert found.condition is Condition.MORE_ACCURATE
    assert not found.recording.findings


def test_other_random_numbers_are_not_wrong(workers: HomeWorkers, folder: Path) -> None:
    found = diagnose(models.drawn, numbers(64), backend=models.draws_again, folder=folder)
    assert found.condition is Condition.RNG
    assert "only its random numbers differ" in found.diagnosis.fact
    assert not found.recording.findings


def test_what_gives_something_else_each_time_is_a_warning(
    workers: HomeWorkers, folder: Path
) -> None:
    found = diagnose(models.broken, numbers(8), backend=models.rests, folder=folder)
    assert found.condition is Condition.NONDETERMINISTIC
    assert found.recording.findings[0].severity == "warning"
    check_found(found, "torch.sin", "x = torch.sin(x)")


def test_what_dynamo_itself_changes_is_blamed_on_it(workers: HomeWorkers, folder: Path) -> None:
    def two_faced(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if torch.compiler.is_compiling() else x

    found = diagnose(two_faced, numbers(3), backend="eager", folder=folder)
    assert (found.condition, found.diagnosis.stage) == (Condition.WRONG_RESULT, Stage.DYNAMO)
    assert "Each of its graphs alone is correct" in found.diagnosis.notes[0]
    remedy = found.recording.findings[0].remedy
    assert remedy.startswith("Report it with the repro, and keep the function out")
    assert found.diagnosis.is_verified, found.diagnosis.notes


def test_an_error_that_only_a_graph_alone_has_is_no_fault_of_the_compiler(
    workers: HomeWorkers, folder: Path
) -> None:
    def jagged(x: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor([x[:2], x[:3]], layout=torch.jagged) * 2

    found = diagnose(jagged, numbers(8, 2), backend="aot_eager", folder=folder)
    assert found.condition is Condition.FINE, found.diagnosis.fact
    assert "Graph 0 could not be judged alone" in found.diagnosis.notes[0]
    assert "results agree" in found.diagnosis.fact
    assert not folder.exists()


def test_ops_that_torch_has_no_name_for_are_shown_by_the_whole_function(
    workers: HomeWorkers, folder: Path
) -> None:
    def through_numpy(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(numpy.sin(x.numpy()))

    found = diagnose(
        through_numpy, numbers(3), folder=folder, **fault("nan", "sin", stage="decomposed")
    )
    (suspect,) = found.diagnosis.suspects
    assert (found.condition, suspect.op) == (Condition.NAN, "torch._dynamo.utils.wrapped_sin")
    assert found.diagnosis.is_verified, found.diagnosis.notes
    assert found.diagnosis.notes[-1] == "The script contains the whole function."


@pytest.mark.parametrize(
    ("backend", "remedy"),
    [
        ("inductor", "Report it; backend='aot_eager' or 'eager' may help until it is fixed."),
        ("aot_eager", "Report it; backend='eager' may help until it is fixed."),
        ("eager", "Report it."),
    ],
)
def test_no_backend_is_a_remedy_for_itself(backend: str, remedy: str) -> None:
    told = Diagnosis(
        rank=0, target="f", backend=backend, condition=Condition.RUNTIME_ERROR, fact="it fails"
    )
    assert make_recording(told).findings[0].remedy == remedy


def test_what_an_object_of_the_users_holds_is_compared(workers: HomeWorkers, folder: Path) -> None:
    def two_faced(x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(y=x + 1 if torch.compiler.is_compiling() else x)

    found = diagnose(two_faced, numbers(3), backend="eager", folder=folder)
    assert (found.condition, found.diagnosis.stage) == (Condition.WRONG_RESULT, Stage.DYNAMO)
    assert found.diagnosis.fact.startswith("output.y is off by")
    assert found.diagnosis.is_verified, found.diagnosis.notes


def test_what_dynamo_does_not_get_through_is_an_error_of_dynamo(
    workers: HomeWorkers, folder: Path
) -> None:
    @torch._dynamo.error_on_graph_break(True)
    def unbreakable(x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return x + 1

    found = diagnose(unbreakable, numbers(3), backend="eager", folder=folder)
    assert (found.condition, found.diagnosis.stage) == (Condition.COMPILE_ERROR, Stage.DYNAMO)
    assert "Unsupported" in found.diagnosis.error


def test_a_function_that_cannot_travel_has_its_graphs_judged(
    workers: HomeWorkers, folder: Path
) -> None:
    lock = threading.Lock()

    def locked(x: torch.Tensor) -> torch.Tensor:
        assert lock is not None
        return torch.relu(x)

    found = diagnose(locked, numbers(3), backend="eager", folder=folder)
    assert found.condition is Condition.FINE
    assert "could not be sent to another process" in found.diagnosis.notes[0]
    wrong = diagnose(locked, numbers(3), folder=folder, **fault("nan", "relu"))
    assert wrong.condition is Condition.NAN


def test_a_function_without_ops_is_fine(workers: HomeWorkers, folder: Path) -> None:
    found = diagnose(lambda x: x, numbers(3), backend="eager", folder=folder)
    assert (found.condition, found.diagnosis.num_graphs) == (Condition.FINE, 0)
    assert "the function produces no graph" in found.diagnosis.fact


def fails(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("not today")


@pytest.mark.parametrize(
    ("function", "settings", "sentence"),
    [
        (3, {}, "got int instead of a function"),
        (fails, {}, "fails in eager mode, too (ValueError: not today). Fix that first."),
        (models.broken, {"backend": "inducer"}, "the backend inducer cannot be used"),
        (models.broken, {"backend": "inductor", "mode": "fast"}, "Unrecognized mode=fast"),
        (models.broken, fault("nan", "relu", nope=1), "has no option 'nope'"),
        (models.broken, fault("nan", "relux"), "'relux' is not an op that torch has"),
        (models.broken, {"max_queries": 0}, "Give positive numbers"),
        (models.broken, {"timeout_s": 0}, "Give positive numbers"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    workers: HomeWorkers, folder: Path, function: Any, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(CompileError) as raised:
        diagnose(function, numbers(3), **({"backend": "eager"} | settings), folder=folder)
    assert sentence in str(raised.value)
    assert "Traceback" not in str(raised.value)
    assert not folder.exists()


def test_a_folder_that_cannot_be_made_is_one_sentence(workers: HomeWorkers, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="Name another one"):
        diagnose(models.broken, numbers(3), backend="eager", folder=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["repro.py", "repro_inputs.pt"])
def test_a_repro_never_takes_the_place_of_a_file_of_the_users(
    workers: HomeWorkers, folder: Path, name: str
) -> None:
    folder.mkdir()
    (folder / name).write_text("import torch  # mine")
    with pytest.raises(OutputError, match=f"has a {name} that no diagnosis wrote"):
        diagnose(nn.ReLU(), numbers(3), folder=folder, **fault("nan", "relu"))
    assert [(one.name, one.read_text()) for one in folder.iterdir()] == [
        (name, "import torch  # mine")
    ]


def test_a_repro_takes_the_place_of_an_earlier_one(workers: HomeWorkers, folder: Path) -> None:
    for op in ("relu", "tanh"):
        found = diagnose(lambda x: x.relu().tanh(), numbers(3), folder=folder, **fault("nan", op))
        assert found.repro == folder / "repro.py"
        assert f"Tensor.{op} " in found.repro.read_text()


def test_without_queries_left_the_best_so_far_is_kept_and_flagged(
    workers: HomeWorkers, folder: Path
) -> None:
    settings = fault("runtime_error", "relu", also="tanh")
    found = diagnose(models.deep, numbers(4), max_queries=9, folder=folder, **settings)
    one = found.diagnosis
    assert (one.condition, one.is_minimal, one.is_verified) == (
        Condition.RUNTIME_ERROR,
        False,
        True,
    )
    assert len(one.suspects) > 2


def test_an_interrupt_at_any_time_keeps_what_was_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = fault("accuracy_error", "relu", also="mul")
    asked: list[str] = []
    for number in range(1, 40):
        workers = stay_at_home(monkeypatch)
        workers.interrupt_at = number
        folder = tmp_path / str(number)
        try:
            found = diagnose(models.deep, numbers(4), folder=folder, **settings)
        except KeyboardInterrupt:
            assert "point_at" not in workers.calls, "it was known to fail"
            assert not folder.exists()
            continue
        if len(workers.calls) < number:  # it came to an end before
            break
        asked.append(workers.calls[number - 1])
        assert found.condition is Condition.WRONG_RESULT
        assert found.repro is not None
        assert found.repro.exists()
        is_complete = found.diagnosis.is_verified and found.diagnosis.stage is not None
        assert is_complete or found.diagnosis.notes.count(INTERRUPTED) == 1
        others = [note for note in found.diagnosis.notes if note != INTERRUPTED]
        assert not any("interrupted" in note for note in others)
    else:
        raise AssertionError("it never ends")
    assert {"point_at", "check", "describe", "attempt", "write"} <= set(asked)


def test_a_backend_that_cannot_be_sent_is_told_at_once(workers: HomeWorkers) -> None:
    lock = threading.Lock()

    def backend(graph: Any, inputs: Any) -> Any:
        with lock:
            return graph.forward

    with pytest.raises(CompileError, match=r"the backend .*backend cannot be sent to the process"):
        diagnose(models.deep, numbers(4), backend=backend)
    assert not workers.calls


def test_whoever_interrupts_does_not_wait_for_further_compilations(
    workers: HomeWorkers, folder: Path
) -> None:
    models.BUILT.clear()
    workers.interrupt_at = 5
    found = diagnose(models.deep, numbers(4), backend=models.counts, folder=folder)
    assert found.repro is not None
    compiled = [one for one in workers.calls if one in ("check", "point_at")]
    assert workers.calls[4] == "check"
    assert len(models.BUILT) == len(compiled) - 1  # all but the one that was interrupted


def test_folders_are_numbered_and_others_are_left_alone(
    workers: HomeWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shardscope-diagnosis").mkdir()
    (tmp_path / "shardscope-diagnosis" / "mine").write_text("mine")
    model, given = nn.ReLU(), numbers(3)
    first = diagnose(model, given, **fault("nan", "relu"))
    second = diagnose(model, given, **fault("nan", "relu"))
    assert [str(one.repro) for one in (first, second)] == [
        "shardscope-diagnosis-2/repro.py",
        "shardscope-diagnosis-3/repro.py",
    ]
    diagnose(model, given, backend="eager")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["shardscope-diagnosis", "shardscope-diagnosis-2", "shardscope-diagnosis-3"]
    kept = [path.name for path in (tmp_path / "shardscope-diagnosis").iterdir()]
    assert kept == ["mine"]
