"""Whole functions through torch.compile: outputs, gradients and state, each run on its own copy."""

from __future__ import annotations

import functools
import pickle

import cloudpickle
import pytest
import torch
from torch import nn

from compile_backends import after, eager, raises, wrong_backward
from shardscope.compile.diagnose.accuracy.compare import _is_different_error, _is_within
from shardscope.compile.diagnose.accuracy.entire_function import check_function_accuracy
from shardscope.compile.diagnose.subgraph.subgraph import Compiler, RunValues
from shardscope.errors import CompileError
from shardscope.record import Condition, Phase


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                parameter.copy_(numbers(*parameter.shape, seed=seed))

    def forward(self, x, scale=1.0):
        y = torch.relu(self.norm(self.linear(x)))
        return {"y": y * scale, "loss": y.square().mean()}


def making(function, *args, **kwargs):
    program = cloudpickle.dumps((function, args, kwargs))
    return lambda: pickle.loads(program)


def test_a_model_that_is_compiled_rightly_is_fine():
    make = making(Model(), numbers(8, 6), scale=2.0)
    outcome = check_function_accuracy(make, Compiler(eager))
    assert (outcome.condition, outcome.fact) == (Condition.FINE, "")


def test_a_wrong_output_is_reported_by_its_path():
    make = making(Model(), numbers(8, 6))
    outcome = check_function_accuracy(
        make, Compiler(after(lambda given: [value * 1.1 for value in given]))
    )
    assert (outcome.condition, outcome.phase) == (Condition.WRONG_RESULT, Phase.FORWARD)
    assert outcome.deviation.tensor == "output['y']"


def test_wrong_gradients_of_parameters_are_reported():
    outcome = check_function_accuracy(making(Model(), numbers(8, 6)), Compiler(wrong_backward))
    assert (outcome.condition, outcome.phase) == (Condition.WRONG_RESULT, Phase.BACKWARD)
    assert outcome.deviation.tensor == "gradient of linear.weight"


def test_buffers_that_are_not_updated_are_reported():
    def forgetful(graph, inputs):
        def run(*given):
            return graph(
                *(value.clone() if value.dtype is torch.float32 else value for value in given)
            )

        return run

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(6))

        def forward(self, x):
            self.total.add_(x.sum(0))
            return x * 2

    outcome = check_function_accuracy(making(Counting(), numbers(8, 6)), Compiler(forgetful))
    assert outcome.condition is Condition.WRONG_RESULT
    assert outcome.deviation.tensor == "total, after the call"


def transpose_and_view(x):
    return x.sin().t(), x[1:]


def test_other_strides_or_memory_of_results_are_notes():
    copied = check_function_accuracy(
        making(transpose_and_view, numbers(2, 3)),
        Compiler(
            after(
                lambda given: [
                    value.clone(memory_format=torch.contiguous_format) for value in given
                ]
            )
        ),
    )
    assert copied.condition is Condition.FINE
    end = "in eager execution. That is no error by itself, and not part of the verdict."
    assert copied.notes == (
        "output[0] has the strides [2, 1] and memory of its own, and the strides [1, 3] and "
        f"memory of its own {end}",
        "output[1] has the strides [0, 1] and memory of its own, and the strides [0, 1] and "
        f"the memory of argument 0 {end}",
    )
    assert (
        check_function_accuracy(making(transpose_and_view, numbers(2, 3)), Compiler(eager)).notes
        == ()
    )


def step(model, x):
    model(x)["loss"].backward()


def test_a_function_that_calls_backward_itself_is_checked_by_the_gradients_it_leaves():
    make = making(step, Model(), numbers(8, 6))
    assert check_function_accuracy(make, Compiler(eager)).condition is Condition.FINE
    outcome = check_function_accuracy(make, Compiler(wrong_backward))
    assert (outcome.condition, outcome.phase) == (Condition.WRONG_RESULT, Phase.BACKWARD)


def test_methods_partials_and_closures_are_functions_too():
    model = Model()

    def closure(x):
        return model(x)["y"]

    for function in (model.forward, functools.partial(model.forward, scale=3.0), closure):
        make = making(function, numbers(8, 6))
        assert check_function_accuracy(make, Compiler(eager)).condition is Condition.FINE
        outcome = check_function_accuracy(make, Compiler(wrong_backward))
        assert outcome.condition is Condition.WRONG_RESULT


@pytest.mark.parametrize("when", ["compiling", "running"])
def test_errors_are_reported_by_when_they_are_raised(when):
    backend = raises(ValueError("no such thing as 7"), when=when)
    outcome = check_function_accuracy(making(Model(), numbers(8, 6)), Compiler(backend))
    expected = Condition.COMPILE_ERROR if when == "compiling" else Condition.RUNTIME_ERROR
    assert outcome.condition is expected
    assert outcome.signature == "builtins.ValueError: no such thing as #"


def test_a_function_that_fails_by_itself_has_no_outcome():
    with pytest.raises(CompileError, match="the function itself fails in eager mode"):
        check_function_accuracy(making(Model(), numbers(8, 7)), Compiler(eager))


def test_phases_are_announced():
    phases = []
    check_function_accuracy(
        making(Model(), numbers(8, 6)), Compiler(eager), report_phase=phases.append
    )
    assert phases == ["compiling", "compiling", "running", "backward"]


def test_a_program_with_several_graphs_is_checked_as_one_function():
    def broken(x):
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1, y.sum().item()

    make = making(broken, numbers(8, 6))
    assert check_function_accuracy(make, Compiler(eager)).condition is Condition.FINE


def test_other_random_numbers_are_reported_as_wrong_if_they_cannot_be_fixed():
    def redrawn(graph, inputs):
        def run(*given):
            torch.rand(1)
            return graph(*given)

        return run

    def drop(x):
        return torch.nn.functional.dropout(x, 0.5)

    outcome = check_function_accuracy(making(drop, numbers(8, 6)), Compiler(redrawn))
    assert outcome.condition is Condition.WRONG_RESULT


def test_state_beyond_the_limit_of_a_walk_is_a_note_and_no_evidence(monkeypatch):
    monkeypatch.setattr("shardscope.compile.call_state._MAX_OBJECTS", 20)

    def fill(x, table):
        if torch.compiler.is_compiling():
            table["first"] = [[0], [1]]  # moves the objects behind it beyond the limit
        else:
            table["first"] = [[0]]
        table["rest"] = [[place] for place in range(40)]
        return x + 1

    def keep(x, table):
        table["rest"] = [[place] for place in range(40)]
        return x + 1

    outcome = check_function_accuracy(making(keep, numbers(2), {}), Compiler(eager))
    assert outcome.condition is Condition.FINE
    assert outcome.notes == (
        "Only the first 20 objects that the call can reach or returns were compared and restored; "
        "changes in the others are not seen.",
    )
    outcome = check_function_accuracy(making(fill, numbers(2), {}), Compiler(eager))
    assert outcome.condition is Condition.WRONG_RESULT
    assert "list of 2" in outcome.fact
    assert "missing" not in outcome.fact


def test_a_value_that_a_run_lacks_is_neither_right_nor_within_the_noise_of_eager_runs():
    full = RunValues({"a": torch.ones(2)}, {})
    different = RunValues({"a": torch.zeros(2)}, {})
    empty = RunValues({}, {})
    assert not _is_within(empty, full, [different])
    assert not _is_within(different, full, [empty])
    assert not _is_different_error(full, empty, different)
