"""Every condition of a compiled subgraph is reported correctly."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from compile_backends import (
    after,
    eager,
    fails_late,
    layer,
    layered,
    numbers,
    raises,
    returns,
    returns_number,
    subgraph,
    wrong_backward,
)
from shardscope.compile.diagnose.accuracy.judge import (
    AccuracyChecker,
    check_accuracy,
    check_forward_once,
)
from shardscope.compile.diagnose.subgraph.subgraph import Compiler
from shardscope.errors import BackendError, CompileError
from shardscope.record import Condition, Phase


def test_what_eager_execution_gives_is_fine():
    outcome = check_accuracy(layered(), Compiler(eager))
    assert (outcome.condition, outcome.fact, outcome.deviation) == (Condition.FINE, "", None)


def test_a_wrong_output_is_reported_with_its_place():
    def spoil(outputs):
        outputs[0].data[3] = 100.0
        return outputs

    outcome = check_accuracy(layered(), Compiler(after(spoil)))
    assert (outcome.condition, outcome.phase) == (Condition.WRONG_RESULT, Phase.FORWARD)
    assert outcome.fact.startswith("output 0 is off by ")
    assert "in 1 of 8 elements, worst at [3]: 100 instead of" in outcome.fact
    assert (outcome.deviation.tensor, outcome.deviation.worst_index) == ("output 0", (3,))


def test_wrong_gradients_alone_are_a_fault_of_backward():
    outcome = check_accuracy(layered(), Compiler(wrong_backward))
    assert (outcome.condition, outcome.phase) == (Condition.WRONG_RESULT, Phase.BACKWARD)
    assert outcome.deviation.tensor == "gradient of input 0"


def test_gradients_are_known_as_well_as_results():
    # What is pulled back must be the same in all precisions, or it hides what is wrong.
    outcome = check_accuracy(layered(), Compiler(partial(wrong_backward, factor=1.0001)))
    assert (outcome.condition, outcome.phase) == (Condition.WRONG_RESULT, Phase.BACKWARD)
    assert outcome.deviation.eager_rmse < 1e-6


def test_gradients_are_not_asked_for_where_none_are_wanted():
    part = subgraph(layer, numbers(8, 16), numbers(16, 16, seed=2), with_gradients=False)
    assert check_accuracy(part, Compiler(wrong_backward)).condition is Condition.FINE


def test_an_output_detached_from_its_inputs_is_a_fault_of_backward():
    outcome = check_accuracy(
        layered(), Compiler(after(lambda outputs: [output.detach() for output in outputs]))
    )
    assert (outcome.condition, outcome.phase) == (Condition.WRONG_RESULT, Phase.BACKWARD)
    assert outcome.fact == "gradient of input 0 is missing"


def test_a_quick_check_names_the_outputs_that_are_off_and_pulls_nothing_back():
    part = subgraph(lambda x: (x + 1, x * 2, x * 3), numbers(5).requires_grad_())
    spoil = after(lambda outputs: [outputs[0], outputs[1] + 1, outputs[2] + 1])
    outcome, wrong = check_forward_once(part, Compiler(spoil))
    assert (outcome.deviation.tensor, list(wrong)) == ("output 1", ["output 1", "output 2"])
    outcome, wrong = check_forward_once(part, Compiler(wrong_backward))
    assert (outcome.condition, wrong) == (Condition.FINE, {})
    assert check_accuracy(part, Compiler(wrong_backward)).condition is Condition.WRONG_RESULT
    assert check_forward_once(part, Compiler(raises))[0].condition is Condition.COMPILE_ERROR


def test_a_backward_that_is_compiled_when_it_first_runs_has_a_phase_of_its_own():
    phases = []
    check_accuracy(layered(), Compiler("aot_eager"), report_phase=phases.append)
    first = phases[: phases.index("compiling backward") + 2]
    assert first == ["compiling", "running", "backward", "compiling backward", "backward"]


def test_a_nan_is_reported_as_such():
    outcome = check_accuracy(
        layered(), Compiler(after(lambda outputs: [outputs[0] * float("nan")]))
    )
    assert outcome.condition is Condition.NAN
    assert outcome.fact.startswith("output 0 has NaN instead of ")


def test_nan_that_the_function_itself_gives_is_fine():
    part = subgraph(lambda x: torch.log(x), numbers(50))
    assert check_accuracy(part, Compiler(eager)).condition is Condition.FINE
    outcome = check_accuracy(part, Compiler(after(lambda outputs: [outputs[0].nan_to_num()])))
    assert outcome.condition is Condition.NAN


def test_skipped_roundings_are_more_accurate():
    def chain(x, w):
        for _ in range(6):
            x = torch.tanh(x @ w) - x
        return x

    def single(graph, inputs):
        return lambda *given: [
            value.bfloat16() for value in graph(*(each.float() for each in given))
        ]

    part = subgraph(
        chain, numbers(16, 16, dtype=torch.bfloat16), numbers(16, 16, seed=2, dtype=torch.bfloat16)
    )
    outcome = check_accuracy(part, Compiler(single))
    assert outcome.condition is Condition.MORE_ACCURATE
    assert outcome.deviation.relative_rmse < outcome.deviation.eager_rmse


def test_reassociated_sums_are_fine():
    def resummed(graph, inputs):
        def run(x, w):
            halves = x[:, :8] @ w[:8] + x[:, 8:] @ w[8:]
            return (torch.relu(halves).flip(-1).cumsum(-1)[:, -1],)

        return run

    assert check_accuracy(layered(), Compiler(resummed)).condition is Condition.FINE


@pytest.mark.parametrize(
    ("when", "condition", "phase"),
    [
        ("compiling", Condition.COMPILE_ERROR, Phase.FORWARD),
        ("running", Condition.RUNTIME_ERROR, Phase.FORWARD),
        ("backward", Condition.RUNTIME_ERROR, Phase.BACKWARD),
    ],
)
def test_errors_are_reported_by_when_they_are_raised(when, condition, phase):
    outcome = check_accuracy(
        layered(), Compiler(raises(ValueError("no such thing as 7"), when=when))
    )
    assert (outcome.condition, outcome.phase) == (condition, phase)
    assert outcome.error == "ValueError: no such thing as 7"
    assert outcome.signature == "builtins.ValueError: no such thing as #"


class Mute(Exception):  # noqa: N818 - it is as bad as any
    def __str__(self):
        raise RuntimeError("it cannot say")


@pytest.mark.parametrize("error", [Mute(), SystemExit(5)])
@pytest.mark.parametrize("when", ["compiling", "running"])
def test_errors_of_any_kind_are_outcomes(error, when):
    outcome = check_accuracy(layered(), Compiler(raises(error, when=when)))
    assert outcome.condition is {"compiling": Condition.COMPILE_ERROR}.get(
        when, Condition.RUNTIME_ERROR
    )
    assert type(error).__name__ in outcome.fact


def test_backward_that_cannot_be_compiled_is_a_compile_error_of_backward():
    outcome = check_accuracy(layered(), Compiler(fails_late))
    assert (outcome.condition, outcome.phase) == (Condition.COMPILE_ERROR, Phase.BACKWARD)
    assert outcome.signature.endswith("NotImplementedError: no backward here")


def test_a_backend_that_returns_no_function_is_a_compile_error():
    outcome = check_accuracy(layered(), Compiler(returns_number))
    assert outcome.condition is Condition.COMPILE_ERROR
    # As dynamo puts it, so that a script which runs torch.compile finds the same.
    assert outcome.signature == "builtins.AssertionError: compiler_fn did not return callable"


def test_a_boxed_function_fails_as_it_does_under_torch_compile():
    from functorch.compile import make_boxed_func

    outcome = check_accuracy(
        layered(), Compiler(lambda graph, inputs: make_boxed_func(graph.forward))
    )
    assert outcome.condition is Condition.RUNTIME_ERROR


def test_inputs_changed_in_place_are_compared():
    def update(state, x):
        state.mul_(0.9).add_(x)
        return x * 2

    part = subgraph(update, numbers(5, grad=False), numbers(5, grad=False, seed=2))
    assert check_accuracy(part, Compiler(eager)).condition is Condition.FINE
    outcome = check_accuracy(part, Compiler(returns(lambda state, x: (x * 2,))))
    assert outcome.condition is Condition.WRONG_RESULT
    assert outcome.fact.startswith("input 0, changed in place is off by ")


def test_an_input_that_only_the_compiled_function_changes_is_reported():
    def spoil(x):
        result = x * 2
        x.zero_()
        return (result,)

    part = subgraph(lambda x: x * 2, numbers(5, grad=False), with_gradients=False)
    outcome = check_accuracy(part, Compiler(returns(spoil)))
    assert outcome.condition is Condition.WRONG_RESULT
    assert outcome.fact.startswith("input 0, changed in place is off by ")
    assert torch.equal(part.inputs[0], numbers(5, grad=False))


def test_inputs_that_share_memory_still_do():
    def update(whole, part):
        part.add_(1)
        return whole * 2

    whole = numbers(4, 6, grad=False)
    part = subgraph(update, whole, whole[:, 1:3], with_gradients=False)
    assert check_accuracy(part, Compiler(eager)).condition is Condition.FINE
    outcome = check_accuracy(
        part, Compiler(returns(lambda whole, part: (part.add_(1), whole * 2)[1:]))
    )
    assert outcome.condition is Condition.FINE
    outcome = check_accuracy(
        part, Compiler(returns(lambda whole, part: (part.add(1), whole * 2)[1:]))
    )
    assert outcome.condition is Condition.WRONG_RESULT


def test_outputs_may_be_views_constants_nothing_or_inputs():
    def many(x, n):
        return x, x.t(), x > 0, n, None, 3, x.argmax()

    part = subgraph(many, numbers(4, 4), 5)
    assert check_accuracy(part, Compiler(eager)).condition is Condition.FINE
    for index, wrong in ((3, 6), (4, 0), (5, 4), (2, torch.ones(4, 4, dtype=torch.bool))):
        spoil = after(lambda given, i=index, w=wrong: [*given[:i], w, *given[i + 1 :]])
        outcome = check_accuracy(part, Compiler(spoil))
        assert (outcome.condition, outcome.fact.split()[:2]) == (
            Condition.WRONG_RESULT,
            ["output", str(index)],
        )


def test_a_subgraph_may_have_no_outputs():
    part = subgraph(lambda x: (), numbers(3))
    assert check_accuracy(part, Compiler(eager)).condition is Condition.FINE
    assert (
        check_accuracy(part, Compiler(after(lambda given: [1]))).condition is Condition.WRONG_RESULT
    )


def test_missing_outputs_and_bare_tensors_are_wrong():
    part = subgraph(lambda x: (x, x + 1), numbers(3))
    outcome = check_accuracy(part, Compiler(after(lambda given: given[:1])))
    assert (outcome.condition, outcome.fact) == (Condition.WRONG_RESULT, "output 1 is missing")
    outcome = check_accuracy(part, Compiler(after(lambda given: given[0])))
    assert outcome.condition is Condition.WRONG_RESULT


def test_another_dtype_is_wrong_even_if_the_numbers_are_right():
    outcome = check_accuracy(layered(), Compiler(after(lambda given: [given[0].double()])))
    assert outcome.fact == "output 0 has dtype float64 instead of float32"


def test_ops_without_double_precision_are_held_to_eager_execution():
    @torch.library.custom_op("shardscope_tests::single_only", mutates_args=())
    def single_only(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float32:
            raise RuntimeError("float32 only")
        return x.exp()

    def run(x):
        return torch.ops.shardscope_tests.single_only(x) * 3

    part = subgraph(run, numbers(50, grad=False), with_gradients=False)
    near = returns(lambda x: (x.exp() * torch.tensor(3.0) * (1 + 1e-7),))
    assert check_accuracy(part, Compiler(near)).condition is Condition.FINE
    outcome = check_accuracy(part, Compiler(after(lambda given: [given[0] * 1.001])))
    assert outcome.condition is Condition.WRONG_RESULT
    assert "does not run in double precision" in outcome.fact


def test_a_function_that_fails_by_itself_has_no_outcome():
    part = subgraph(lambda x: x.view(7), numbers(3))
    with pytest.raises(CompileError, match="the function itself fails in eager mode"):
        check_accuracy(part, Compiler(eager))


def test_an_unknown_backend_is_the_users_mistake():
    with pytest.raises(CompileError, match=r"the backend nobody cannot be used .*Check its name"):
        check_accuracy(layered(), Compiler("nobody"))
    with pytest.raises(CompileError, match=r"the backend inductr .* Did you mean 'inductor'\?"):
        check_accuracy(layered(), Compiler("inductr"))


def test_an_unknown_option_is_the_users_mistake():
    with pytest.raises(CompileError, match="Unexpected optimization option nonsense"):
        check_accuracy(layered(), Compiler("inductor", options={"nonsense": 1}))
    with pytest.raises(BackendError):
        check_accuracy(layered(), Compiler(raises(BackendError("no option x"), when="compiling")))


def test_options_and_mode_reach_a_backend():
    seen = {}

    def backend(graph, inputs, **given):
        seen.update(given)
        return graph.forward

    check_accuracy(layered(), Compiler(backend, options={"speed": 3}))
    assert seen == {"options": {"speed": 3}}
    check_accuracy(layered(), Compiler(backend, mode="max-autotune"))
    assert seen["mode"] == "max-autotune"


def test_phases_are_announced():
    phases = []
    check_accuracy(layered(), Compiler(eager), report_phase=phases.append)
    assert phases == ["compiling", *["running", "backward"] * 2]


def test_a_backend_that_spoils_its_graph_spoils_only_a_copy():
    def backend(graph, inputs):
        run = subgraph(layer, *inputs).graph
        for node in list(graph.graph.nodes):
            node.target = "gone"
        for value in inputs:
            value.data.zero_()
        return run.forward

    part = layered()
    checker = AccuracyChecker(part)
    assert checker.check_accuracy(Compiler(backend)).condition is Condition.FINE
    assert checker.check_accuracy(Compiler(eager)).condition is Condition.FINE


def test_eager_runs_are_made_once_for_several_compilers():
    calls = []

    class Counting(nn.Module):
        def forward(self, x):
            calls.append(x.dtype)
            return (x * 2,)

    counting = Counting()
    part = subgraph(lambda x: x * 2, numbers(5))
    part.graph.forward = counting.forward
    checker = AccuracyChecker(part)
    wrong = returns(lambda x: (x * 3,))
    for _ in range(3):
        checker.check_accuracy(Compiler(wrong))
    assert calls.count(torch.float64) == 1


def test_expanded_and_parameter_inputs_keep_their_kind():
    seen = []

    def backend(graph, inputs):
        seen.extend(inputs)
        return graph.forward

    parameter = nn.Parameter(numbers(3, 1))
    spread = numbers(1, 4, grad=False).expand(3, 4)
    assert (
        check_accuracy(subgraph(lambda w, x: w * x, parameter, spread), Compiler(backend)).is_bad
        is False
    )
    assert isinstance(seen[0], nn.Parameter)
    assert seen[1].stride() == (0, 1)
    assert seen[0] is not parameter


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(3).to_sparse(),
        torch.zeros(0, 3),
        torch.tensor(1.5),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, dtype=torch.float64),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["sparse", "empty", "scalar", "complex", "double", "nested"],
)
def test_tensors_of_all_kinds_are_checked(value):
    part = subgraph(lambda x: x * 2, value, with_gradients=False)
    assert check_accuracy(part, Compiler(eager)).condition is Condition.FINE
    outcome = check_accuracy(part, Compiler(returns(lambda x: (x * 3,))))
    assert outcome.is_bad is bool(value.numel())


def test_tensors_without_data_are_checked_by_their_shape():
    part = subgraph(lambda x: x * 2, torch.empty(2, 3, device="meta"), with_gradients=False)
    assert check_accuracy(part, Compiler(eager)).condition is Condition.FINE
    assert check_accuracy(part, Compiler(returns(lambda x: (x[0],)))).is_bad


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_is_checked_with_its_configuration():
    def run(x, w):
        return functional.dropout(torch.softmax(x @ w, -1), 0.5)

    part = subgraph(run, *layered().inputs)
    assert check_accuracy(part, Compiler("inductor")).condition is Condition.RNG
    steady = Compiler("inductor", config={"fallback_random": True})
    assert check_accuracy(part, steady).condition in (Condition.FINE, Condition.MORE_ACCURATE)
