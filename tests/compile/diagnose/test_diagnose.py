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
from shardscope.compile.diagnose.minimize import INTERRUPTED
from shardscope.compile.diagnose.pipeline import make_recording
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


def check_suspect(result: Diagnosed, op: str, line: str) -> None:
    """One op at one line, and a script that shows it."""
    (suspect,) = result.diagnosis.suspects
    assert (suspect.op, suspect.source.line) == (op, models.line_of(line))
    assert Path(suspect.source.file).name == "diagnosed_models.py"
    check_script(result)


def check_script(result: Diagnosed) -> None:
    diagnosis = result.diagnosis
    assert (diagnosis.is_minimal, diagnosis.is_verified) == (True, True), diagnosis.notes
    assert diagnosis.passing.startswith("the same ")
    assert result.repro is not None
    assert result.repro.name == "repro.py"
    assert "import shardscope" not in result.repro.read_text()
    assert result.diagnosis.script == result.repro.read_text()
    assert not list(result.repro.parent.glob("scratch*"))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_right_compilers_are_fine_with_odd_models(
    workers: HomeWorkers, folder: Path, backend: str
) -> None:
    model = models.Kept()
    kwargs = {"scale": torch.tensor(2.0)}
    result = diagnose(model, torch.arange(6), kwargs=kwargs, backend=backend, folder=folder)
    diagnosis = result.diagnosis
    assert (result.condition, diagnosis.num_graphs, diagnosis.stage, diagnosis.suspects) == (
        Condition.FINE,
        1,
        None,
        (),
    )
    assert (diagnosis.target, diagnosis.backend, result.repro, diagnosis.notes) == (
        "Kept",
        backend,
        None,
        (),
    )
    assert result.recording.findings == ()
    assert not folder.exists()


@pytest.mark.filterwarnings("ignore:.torch.jit")  # torch's own, of optimizers
def test_an_optimizer_that_does_not_outlive_the_call_is_diagnosed(
    workers: HomeWorkers, folder: Path
) -> None:
    tensor = numbers(4, requires_grad=True)
    result = diagnose(models.optimized, tensor, backend="aot_eager", folder=folder)
    assert (result.condition, result.diagnosis.notes) == (Condition.FINE, ())
    assert result.diagnosis.num_graphs > 0
    assert torch.equal(tensor, numbers(4))
    assert tensor.grad is None


def test_an_argument_that_becomes_the_result_of_something_is_diagnosed(
    workers: HomeWorkers, folder: Path
) -> None:
    weight = numbers(4, requires_grad=True)

    def write(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(weight).relu()

    result = diagnose(write, numbers(4), folder=folder, **fault("nan", "relu"))
    assert result.condition is Condition.NAN


def test_sparse_inputs_are_left_as_they_were(workers: HomeWorkers, folder: Path) -> None:
    tensor = torch.eye(3).to_sparse()
    result = diagnose(lambda x: x.to_dense().relu(), tensor, backend="eager", folder=folder)
    assert result.condition is Condition.FINE
    assert torch.equal(tensor.to_dense(), torch.eye(3))


def test_tensors_without_data_are_compared_by_what_is_known_of_them(
    workers: HomeWorkers, folder: Path
) -> None:
    result = diagnose(models.broken, torch.empty(3, device="meta"), backend="eager", folder=folder)
    assert result.condition is Condition.FINE
    assert "Call the function with tensors that have data" in result.diagnosis.notes[0]


def test_what_turns_modes_on_and_off_is_no_suspect(workers: HomeWorkers, folder: Path) -> None:
    result = diagnose(models.switched, numbers(3, 3), folder=folder, **fault("nan", "relu"))
    check_suspect(result, "torch.relu", "return torch.vmap(torch.relu)(x @ x)")


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
    result = diagnose(models.broken, *inputs, folder=folder, **settings)
    diagnosis = result.diagnosis
    assert (diagnosis.condition, diagnosis.stage, diagnosis.phase) == expected
    assert (diagnosis.graph, diagnosis.num_graphs) == (1, 2)
    assert diagnosis.suspects[0].source.function == "broken"
    check_suspect(result, "torch.relu", "x = torch.relu(x)")
    (finding,) = result.recording.findings
    assert finding.rule == f"compiled-{diagnosis.condition.replace('_', '-')}"
    assert finding.remedy.startswith("Report it with the repro")
    assert finding.source == diagnosis.suspects[0].source


@pytest.mark.parametrize(
    ("also", "op"), [("mul", "operator.mul"), ("tanh", "torch.tanh")], ids=["adjacent", "distant"]
)
def test_two_ops_that_fail_together_are_found(
    workers: HomeWorkers, folder: Path, also: str, op: str
) -> None:
    settings = fault("runtime_error", "relu", also=also)
    result = diagnose(models.deep, numbers(4), folder=folder, **settings)
    assert [suspect.op for suspect in result.diagnosis.suspects] == ["torch.relu", op]
    check_script(result)
    assert result.diagnosis.passing in {f"the same without {name}" for name in ("torch.relu", op)}


def by_closure(factor: float) -> Any:
    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        return lambda *tensor: [value * factor for value in graph(*tensor)]

    return backend


@pytest.mark.parametrize(
    "backend",
    [by_closure(3.0), lambda graph, _: lambda *x: [y + 1 for y in graph(*x)], models.Adds("sin")],
    ids=["closure", "lambda", "object"],
)
def test_a_backend_that_is_not_registered_is_diagnosed(
    workers: HomeWorkers, folder: Path, backend: Any
) -> None:
    result = diagnose(models.broken, numbers(4), backend=backend, folder=folder)
    assert result.condition is Condition.WRONG_RESULT
    assert result.diagnosis.graph == 0
    check_suspect(result, "torch.sin", "x = torch.sin(x)")


@pytest.mark.parametrize("has_grad", [True, False])
def test_a_model_that_is_compiled_already_is_diagnosed_as_it_is(
    workers: HomeWorkers, folder: Path, has_grad: bool
) -> None:
    model = torch.compile(models.Kept(), backend="eager")
    with torch.set_grad_enabled(has_grad):
        result = diagnose(model, torch.arange(6), folder=folder, **fault("nan", "relu"))
    assert (result.condition, result.diagnosis.target) == (Condition.NAN, "Kept")
    check_suspect(result, "torch.relu", "logits = self.head(torch.relu(h))")


def test_what_is_more_accurate_is_not_wrong(workers: HomeWorkers, folder: Path) -> None:
    def narrow(x: torch.Tensor) -> torch.Tensor:
        return (x.exp() - 1).square().log1p()

    tensor = numbers(500).bfloat16()
    result = diagnose(narrow, tensor, backend=models.rounds_late, folder=folder)
    assert result.condition is Condition.MORE_ACCURATE
    assert not result.recording.findings


def test_other_random_numbers_are_not_wrong(workers: HomeWorkers, folder: Path) -> None:
    result = diagnose(models.drawn, numbers(64), backend=models.draws_again, folder=folder)
    assert result.condition is Condition.RNG
    assert "only its random numbers differ" in result.diagnosis.fact
    assert not result.recording.findings


def test_what_gives_something_else_each_time_is_a_warning(
    workers: HomeWorkers, folder: Path
) -> None:
    result = diagnose(models.broken, numbers(8), backend=models.rests, folder=folder)
    assert result.condition is Condition.NONDETERMINISTIC
    assert result.recording.findings[0].severity == "warning"
    check_suspect(result, "torch.sin", "x = torch.sin(x)")


def test_what_dynamo_itself_changes_is_attributed_to_it(workers: HomeWorkers, folder: Path) -> None:
    def two_faced(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if torch.compiler.is_compiling() else x

    result = diagnose(two_faced, numbers(3), backend="eager", folder=folder)
    assert (result.condition, result.diagnosis.stage) == (Condition.WRONG_RESULT, Stage.DYNAMO)
    assert "Each of its graphs alone is correct" in result.diagnosis.notes[0]
    remedy = result.recording.findings[0].remedy
    assert remedy.startswith("Report it with the repro, and keep the function out")
    assert result.diagnosis.is_verified, result.diagnosis.notes


def test_an_error_that_only_a_graph_alone_has_is_no_fault_of_the_compiler(
    workers: HomeWorkers, folder: Path
) -> None:
    def jagged(x: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor([x[:2], x[:3]], layout=torch.jagged) * 2

    result = diagnose(jagged, numbers(8, 2), backend="aot_eager", folder=folder)
    assert result.condition is Condition.FINE, result.diagnosis.fact
    assert "Graph 0 could not be compared by itself" in result.diagnosis.notes[0]
    assert "results agree" in result.diagnosis.fact
    assert not folder.exists()


def test_ops_that_torch_has_no_name_for_are_shown_by_the_entire_function(
    workers: HomeWorkers, folder: Path
) -> None:
    def through_numpy(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(numpy.sin(x.numpy()))

    result = diagnose(
        through_numpy, numbers(3), folder=folder, **fault("nan", "sin", stage="decomposed")
    )
    (suspect,) = result.diagnosis.suspects
    assert (result.condition, suspect.op) == (Condition.NAN, "torch._dynamo.utils.wrapped_sin")
    assert result.diagnosis.is_verified, result.diagnosis.notes
    assert result.diagnosis.notes[-1] == "The script contains the entire function."


@pytest.mark.parametrize(
    ("backend", "remedy"),
    [
        ("inductor", "Report it; backend='aot_eager' or 'eager' may help until it is fixed."),
        ("aot_eager", "Report it; backend='eager' may help until it is fixed."),
        ("eager", "Report it."),
    ],
)
def test_the_remedy_never_suggests_the_failing_backend(backend: str, remedy: str) -> None:
    diagnosis = Diagnosis(
        rank=0, target="f", backend=backend, condition=Condition.RUNTIME_ERROR, fact="it fails"
    )
    assert make_recording(diagnosis).findings[0].remedy == remedy


def test_attributes_of_user_objects_are_compared(workers: HomeWorkers, folder: Path) -> None:
    def two_faced(x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(y=x + 1 if torch.compiler.is_compiling() else x)

    result = diagnose(two_faced, numbers(3), backend="eager", folder=folder)
    assert (result.condition, result.diagnosis.stage) == (Condition.WRONG_RESULT, Stage.DYNAMO)
    assert result.diagnosis.fact.startswith("output.y is off by")
    assert result.diagnosis.is_verified, result.diagnosis.notes


def test_what_dynamo_does_not_get_through_is_an_error_of_dynamo(
    workers: HomeWorkers, folder: Path
) -> None:
    @torch._dynamo.error_on_graph_break(True)
    def unbreakable(x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return x + 1

    result = diagnose(unbreakable, numbers(3), backend="eager", folder=folder)
    assert (result.condition, result.diagnosis.stage) == (Condition.COMPILE_ERROR, Stage.DYNAMO)
    assert "Unsupported" in result.diagnosis.error


def test_a_function_that_cannot_be_pickled_has_its_graphs_checked(
    workers: HomeWorkers, folder: Path
) -> None:
    lock = threading.Lock()

    def locked(x: torch.Tensor) -> torch.Tensor:
        assert lock is not None
        return torch.relu(x)

    result = diagnose(locked, numbers(3), backend="eager", folder=folder)
    assert result.condition is Condition.FINE
    assert "could not be sent to another process" in result.diagnosis.notes[0]
    wrong = diagnose(locked, numbers(3), folder=folder, **fault("nan", "relu"))
    assert wrong.condition is Condition.NAN


def test_a_function_without_ops_is_fine(workers: HomeWorkers, folder: Path) -> None:
    result = diagnose(lambda x: x, numbers(3), backend="eager", folder=folder)
    assert (result.condition, result.diagnosis.num_graphs) == (Condition.FINE, 0)
    assert "the function produces no graph" in result.diagnosis.fact


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
    with pytest.raises(OutputError, match=f"has a {name} that was not written by a diagnosis"):
        diagnose(nn.ReLU(), numbers(3), folder=folder, **fault("nan", "relu"))
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [
        (name, "import torch  # mine")
    ]


def test_a_repro_takes_the_place_of_an_earlier_one(workers: HomeWorkers, folder: Path) -> None:
    for op in ("relu", "tanh"):
        result = diagnose(lambda x: x.relu().tanh(), numbers(3), folder=folder, **fault("nan", op))
        assert result.repro == folder / "repro.py"
        assert f"Tensor.{op} " in result.repro.read_text()


def test_without_queries_left_the_best_so_far_is_kept_and_flagged(
    workers: HomeWorkers, folder: Path
) -> None:
    settings = fault("runtime_error", "relu", also="tanh")
    result = diagnose(models.deep, numbers(4), max_queries=9, folder=folder, **settings)
    diagnosis = result.diagnosis
    assert (diagnosis.condition, diagnosis.is_minimal, diagnosis.is_verified) == (
        Condition.RUNTIME_ERROR,
        False,
        True,
    )
    assert len(diagnosis.suspects) > 2


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
            result = diagnose(models.deep, numbers(4), folder=folder, **settings)
        except KeyboardInterrupt:
            assert "find_first_wrong_op" not in workers.calls, "it was known to fail"
            assert not folder.exists()
            continue
        if len(workers.calls) < number:  # it came to an end before
            break
        asked.append(workers.calls[number - 1])
        assert result.condition is Condition.WRONG_RESULT
        assert result.repro is not None
        assert result.repro.exists()
        is_complete = result.diagnosis.is_verified and result.diagnosis.stage is not None
        assert is_complete or result.diagnosis.notes.count(INTERRUPTED) == 1
        other_notes = [note for note in result.diagnosis.notes if note != INTERRUPTED]
        assert not any("interrupted" in note for note in other_notes)
    else:
        raise AssertionError("it never ends")
    assert {
        "find_first_wrong_op",
        "check_ops",
        "describe_suspects",
        "check_with_toggles",
        "write_script",
    } <= set(asked)


def test_a_backend_that_cannot_be_sent_is_reported_at_once(workers: HomeWorkers) -> None:
    lock = threading.Lock()

    def backend(graph: Any, inputs: Any) -> Any:
        with lock:
            return graph.forward

    with pytest.raises(CompileError, match=r"the backend .*backend cannot be sent to the process"):
        diagnose(models.deep, numbers(4), backend=backend)
    assert not workers.calls


def test_an_interrupt_does_not_wait_for_further_compilations(
    workers: HomeWorkers, folder: Path
) -> None:
    models.BUILT.clear()
    workers.interrupt_at = 5
    result = diagnose(models.deep, numbers(4), backend=models.counts, folder=folder)
    assert result.repro is not None
    compiled = [call for call in workers.calls if call in ("check_ops", "find_first_wrong_op")]
    assert workers.calls[4] == "check_ops"
    assert len(models.BUILT) == len(compiled) - 1  # all but the one that was interrupted


def test_folders_are_numbered_and_others_are_left_alone(
    workers: HomeWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shardscope-diagnosis").mkdir()
    (tmp_path / "shardscope-diagnosis" / "mine").write_text("mine")
    model, tensor = nn.ReLU(), numbers(3)
    first = diagnose(model, tensor, **fault("nan", "relu"))
    second = diagnose(model, tensor, **fault("nan", "relu"))
    assert [str(result.repro) for result in (first, second)] == [
        "shardscope-diagnosis-2/repro.py",
        "shardscope-diagnosis-3/repro.py",
    ]
    diagnose(model, tensor, backend="eager")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["shardscope-diagnosis", "shardscope-diagnosis-2", "shardscope-diagnosis-3"]
    file_names = [path.name for path in (tmp_path / "shardscope-diagnosis").iterdir()]
    assert file_names == ["mine"]
