"""Every condition of a compiled fragment is told, and told rightly."""

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
    fragment,
    layer,
    layered,
    numbers,
    raises,
    returns,
    returns_number,
    wrong_backward,
)
from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.judging.judge import Judge, glance, judge
from shardscope.errors import BackendError, CompileError
from shardscope.record import Condition, Phase


def test_what_eager_execution_gives_is_fine():
    outcome = judge(layered(), Compiler(eager))
    assert (outcome.condition, outcome.fact, outcome.deviation) == (Condition.FINE, "", None)


def test_a_wrong_output_is_told_with_its_place():
    def spoil(outputs):
        outputs[0].data[3] = 100.0
        return outputs

    outcome = judge(layered(), Compiler(after(spoil)))
    assert (outcome.condition, outcome.phase) == (Condition.WRONG_RESULT, Phase.FORWARD)
    assert outcome.fact.startswith("output 0 is off by ")
    assert "in 1 of 8 elements, worst at [3]: 100 instead of" in outcome.fact
    assert (outcome.deviation.tensor, outcome.deviation.worst_index) == ("output 0", (3,))


def test_wrong_gradients_alone_are_a_fault_of_backward():
    outcome = judge(layered(), Compiler(wrong_backward))
    assert (outcome.condition, outcome.phase) == (Condition.WRONG_RESULT, Phase.BACKWARD)
    assert outcome.deviation.tensor == "gradient of input 0"


def test_gradients_are_known_as_well_as_results():
    # What is pulled back must be the same in all precisions, or it hides what is wrong.
    outcome = judge(layered(), Compiler(partial(wrong_backward, factor=1.0001)))
    assert (outcome.condition, outcome.phase) == (Condition.WRONG_RESULT, Phase.BACKWARD)
    assert outcome.deviation.eager_rmse < 1e-6


def test_gradients_are_not_asked_for_where_none_are_wanted():
    piece = fragment(layer, numbers(8, 16), numbers(16, 16, seed=2), with_gradients=False)
    assert judge(piece, Compiler(wrong_backward)).condition is Condition.FINE


def test_an_output_cut_off_from_its_inputs_is_a_fault_of_backward():
    outcome = judge(layered(), Compiler(after(lambda outputs: [one.detach() for one in outputs])))
    assert (outcome.condition, outcome.phase) == (Condition.WRONG_RESULT, Phase.BACKWARD)
    assert outcome.fact == "gradient of input 0 is missing"


def test_a_glance_names_the_outputs_that_are_off_and_pulls_nothing_back():
    piece = fragment(lambda x: (x + 1, x * 2, x * 3), numbers(5).requires_grad_())
    spoil = after(lambda outputs: [outputs[0], outputs[1] + 1, outputs[2] + 1])
    outcome, wrong = glance(piece, Compiler(spoil))
    assert (outcome.deviation.tensor, list(wrong)) == ("output 1", ["output 1", "output 2"])
    outcome, wrong = glance(piece, Compiler(wrong_backward))
    assert (outcome.condition, wrong) == (Condition.FINE, {})
    assert judge(piece, Compiler(wrong_backward)).condition is Condition.WRONG_RESULT
    assert glance(piece, Compiler(raises))[0].condition is Condition.COMPILE_ERROR


def test_a_backward_that_is_compiled_when_it_first_runs_has_a_phase_of_its_own():
    phases = []
    judge(layered(), Compiler("aot_eager"), announce=phases.append)
    first = phases[: phases.index("compiling backward") + 2]
    assert first == ["compiling", "running", "backward", "compiling backward", "backward"]


def test_a_nan_is_told_as_such():
    outcome = judge(layered(), Compiler(after(lambda outputs: [outputs[0] * float("nan")])))
    assert outcome.condition is Condition.NAN
    assert outcome.fact.startswith("output 0 has NaN instead of ")


def test_nan_that_the_function_itself_gives_is_fine():
    piece = fragment(lambda x: torch.log(x), numbers(50))
    assert judge(piece, Compiler(eager)).condition is Condition.FINE
    outcome = judge(piece, Compiler(after(lambda outputs: [outputs[0].nan_to_num()])))
    assert outcome.condition is Condition.NAN


def test_skipped_roundings_are_more_accurate():
    def chain(x, w):
        for _ in range(6):
            x = torch.tanh(x @ w) - x
        return x

    def single(graph, inputs):
        return lambda *given: [one.bfloat16() for one in graph(*(each.float() for each in given))]

    piece = fragment(
        chain, numbers(16, 16, dtype=torch.bfloat16), numbers(16, 16, seed=2, dtype=torch.bfloat16)
    )
    outcome = judge(piece, Compiler(single))
    assert outcome.condition is Condition.MORE_ACCURATE
    assert outcome.deviation.relative_rmse < outcome.deviation.eager_rmse


def test_reassociated_sums_are_fine():
    def resummed(graph, inputs):
        def run(x, w):
            halves = x[:, :8] @ w[:8] + x[:, 8:] @ w[8:]
            return (torch.relu(halves).flip(-1).cumsum(-1)[:, -1],)

        return run

    assert judge(layered(), Compiler(resummed)).condition is Condition.FINE


@pytest.mark.parametrize(
    ("when", "condition", "phase"),
    [
        ("compiling", Condition.COMPILE_ERROR, Phase.FORWARD),
        ("running", Condition.RUNTIME_ERROR, Phase.FORWARD),
        ("backward", Condition.RUNTIME_ERROR, Phase.BACKWARD),
    ],
)
def test_errors_are_told_by_when_they_are_raised(when, condition, phase):
    outcome = judge(layered(), Compiler(raises(ValueError("no such thing as 7"), when=when)))
    assert (outcome.condition, outcome.phase) == (condition, phase)
    assert outcome.error == "ValueError: no such thing as 7"
    assert outcome.signature == "builtins.ValueError: no such thing as #"


class Mute(Exception):  # noqa: N818 - it is as bad as any
    def __str__(self):
        raise RuntimeError("it cannot say")


@pytest.mark.parametrize("error", [Mute(), SystemExit(5)])
@pytest.mark.parametrize("when", ["compiling", "running"])
def test_errors_of_any_kind_are_outcomes(error, when):
    outcome = judge(layered(), Compiler(raises(error, when=when)))
    assert outcome.condition is {"compiling": Condition.COMPILE_ERROR}.get(
        when, Condition.RUNTIME_ERROR
    )
    assert type(error).__name__ in outcome.fact


def test_backward_that_cannot_be_compiled_is_a_compile_error_of_backward():
    outcome = judge(layered(), Compiler(fails_late))
    assert (outcome.condition, outcome.phase) == (Condition.COMPILE_ERROR, Phase.BACKWARD)
    assert outcome.signature.endswith("NotImplementedError: no backward here")


def test_a_backend_that_returns_no_function_is_a_compile_error():
    outcome = judge(layered(), Compiler(returns_number))
    assert outcome.condition is Condition.COMPILE_ERROR
    # As dynamo puts it, so that a script which runs torch.compile finds the same.
    assert outcome.signature == "builtins.AssertionError: compiler_fn did not return callable"


def test_a_boxed_function_fails_as_it_does_under_torch_compile():
    from functorch.compile import make_boxed_func

    outcome = judge(layered(), Compiler(lambda graph, inputs: make_boxed_func(graph.forward)))
    assert outcome.condition is Condition.RUNTIME_ERROR


def test_inputs_changed_in_place_are_compared():
    def update(state, x):
        state.mul_(0.9).add_(x)
        return x * 2

    piece = fragment(update, numbers(5, grad=False), numbers(5, grad=False, seed=2))
    assert judge(piece, Compiler(eager)).condition is Condition.FINE
    outcome = judge(piece, Compiler(returns(lambda state, x: (x * 2,))))
    assert outcome.condition is Condition.WRONG_RESULT
    assert outcome.fact.startswith("input 0, changed in place is off by ")


def test_an_input_that_only_the_compiled_function_changes_is_told():
    def spoil(x):
        result = x * 2
        x.zero_()
        return (result,)

    piece = fragment(lambda x: x * 2, numbers(5, grad=False), with_gradients=False)
    outcome = judge(piece, Compiler(returns(spoil)))
    assert outcome.condition is Condition.WRONG_RESULT
    assert outcome.fact.startswith("input 0, changed in place is off by ")
    assert torch.equal(piece.inputs[0], numbers(5, grad=False))


def test_inputs_that_share_memory_still_do():
    def update(whole, part):
        part.add_(1)
        return whole * 2

    whole = numbers(4, 6, grad=False)
    piece = fragment(update, whole, whole[:, 1:3], with_gradients=False)
    assert judge(piece, Compiler(eager)).condition is Condition.FINE
    outcome = judge(piece, Compiler(returns(lambda whole, part: (part.add_(1), whole * 2)[1:])))
    assert outcome.condition is Condition.FINE
    outcome = judge(piece, Compiler(returns(lambda whole, part: (part.add(1), whole * 2)[1:])))
    assert outcome.condition is Condition.WRONG_RESULT


def test_outputs_may_be_views_constants_nothing_or_inputs():
    def many(x, n):
        return x, x.t(), x > 0, n, None, 3, x.argmax()

    piece = fragment(many, numbers(4, 4), 5)
    assert judge(piece, Compiler(eager)).condition is Condition.FINE
    for index, wrong in ((3, 6), (4, 0), (5, 4), (2, torch.ones(4, 4, dtype=torch.bool))):
        spoil = after(lambda given, i=index, w=wrong: [*given[:i], w, *given[i + 1 :]])
        outcome = judge(piece, Compiler(spoil))
        assert (outcome.condition, outcome.fact.split()[:2]) == (
            Condition.WRONG_RESULT,
            ["output", str(index)],
        )


def test_a_fragment_may_have_no_outputs():
    piece = fragment(lambda x: (), numbers(3))
    assert judge(piece, Compiler(eager)).condition is Condition.FINE
    assert judge(piece, Compiler(after(lambda given: [1]))).condition is Condition.WRONG_RESULT


def test_missing_outputs_and_bare_tensors_are_wrong():
    piece = fragment(lambda x: (x, x + 1), numbers(3))
    outcome = judge(piece, Compiler(after(lambda given: given[:1])))
    assert (outcome.condition, outcome.fact) == (Condition.WRONG_RESULT, "output 1 is missing")
    outcome = judge(piece, Compiler(after(lambda given: given[0])))
    assert outcome.condition is Condition.WRONG_RESULT


def test_another_dtype_is_wrong_even_if_the_numbers_are_right():
    outcome = judge(layered(), Compiler(after(lambda given: [given[0].double()])))
    assert outcome.fact == "output 0 has dtype float64 instead of float32"


def test_ops_without_double_precision_are_held_to_eager_execution():
    @torch.library.custom_op("shardscope_tests::single_only", mutates_args=())
    def single_only(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float32:
            raise RuntimeError("float32 only")
        return x.exp()

    def run(x):
        return torch.ops.shardscope_tests.single_only(x) * 3

    piece = fragment(run, numbers(50, grad=False), with_gradients=False)
    near = returns(lambda x: (x.exp() * torch.tensor(3.0) * (1 + 1e-7),))
    assert judge(piece, Compiler(near)).condition is Condition.FINE
    outcome = judge(piece, Compiler(after(lambda given: [given[0] * 1.001])))
    assert outcome.condition is Condition.WRONG_RESULT
    assert "does not run in double precision" in outcome.fact


def test_a_function_that_fails_by_itself_is_nobodys_outcome():
    piece = fragment(lambda x: x.view(7), numbers(3))
    with pytest.raises(CompileError, match="the function itself fails in eager mode"):
        judge(piece, Compiler(eager))


def test_an_unknown_backend_is_the_users_mistake():
    with pytest.raises(CompileError, match=r"the backend nobody cannot be used .*Check its name"):
        judge(layered(), Compiler("nobody"))
    with pytest.raises(CompileError, match=r"the backend inductr .* Did you mean 'inductor'\?"):
        judge(layered(), Compiler("inductr"))


def test_an_unknown_option_is_the_users_mistake():
    with pytest.raises(CompileError, match="Unexpected optimization option nonsense"):
        judge(layered(), Compiler("inductor", options={"nonsense": 1}))
    with pytest.raises(BackendError):
        judge(layered(), Compiler(raises(BackendError("no option x"), when="compiling")))


def test_options_and_mode_reach_a_backend():
    seen = {}

    def backend(graph, inputs, **given):
        seen.update(given)
        return graph.forward

    judge(layered(), Compiler(backend, options={"speed": 3}))
    assert seen == {"options": {"speed": 3}}
    judge(layered(), Compiler(backend, mode="max-autotune"))
    assert seen["mode"] == "max-autotune"


def test_phases_are_announced():
    phases = []
    judge(layered(), Compiler(eager), announce=phases.append)
    assert phases == ["compiling", *["running", "backward"] * 2]


def test_a_backend_that_spoils_its_graph_spoils_only_a_copy():
    def backend(graph, inputs):
        run = fragment(layer, *inputs).graph
        for node in list(graph.graph.nodes):
            node.target = "gone"
        for one in inputs:
            one.data.zero_()
        return run.forward

    piece = layered()
    judged = Judge(piece)
    assert judged.judge(Compiler(backend)).condition is Condition.FINE
    assert judged.judge(Compiler(eager)).condition is Condition.FINE


def test_eager_runs_are_made_once_for_several_compilers():
    calls = []

    class Counting(nn.Module):
        def forward(self, x):
            calls.append(x.dtype)
            return (x * 2,)

    counting = Counting()
    piece = fragment(lambda x: x * 2, numbers(5))
    piece.graph.forward = counting.forward
    judged = Judge(piece)
    wrong = returns(lambda x: (x * 3,))
    for _ in range(3):
        judged.judge(Compiler(wrong))
    assert calls.count(torch.float64) == 1


def test_expanded_and_parameter_inputs_keep_their_kind():
    seen = []

    def backend(graph, inputs):
        seen.extend(inputs)
        return graph.forward

    parameter = nn.Parameter(numbers(3, 1))
    spread = numbers(1, 4, grad=False).expand(3, 4)
    assert judge(fragment(lambda w, x: w * x, parameter, spread), Compiler(backend)).is_bad is False
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
def test_tensors_of_all_kinds_are_judged(value):
    piece = fragment(lambda x: x * 2, value, with_gradients=False)
    assert judge(piece, Compiler(eager)).condition is Condition.FINE
    outcome = judge(piece, Compiler(returns(lambda x: (x * 3,))))
    assert outcome.is_bad is bool(value.numel())


def test_tensors_without_data_are_judged_by_their_shape():
    piece = fragment(lambda x: x * 2, torch.empty(2, 3, device="meta"), with_gradients=False)
    assert judge(piece, Compiler(eager)).condition is Condition.FINE
    assert judge(piece, Compiler(returns(lambda x: (x[0],)))).is_bad


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_is_judged_with_its_configuration():
    def run(x, w):
        return functional.dropout(torch.softmax(x @ w, -1), 0.5)

    piece = fragment(run, *layered().inputs)
    assert judge(piece, Compiler("inductor")).condition is Condition.RNG
    steady = Compiler("inductor", config={"fallback_random": True})
    assert judge(piece, steady).condition in (Condition.FINE, Condition.MORE_ACCURATE)
