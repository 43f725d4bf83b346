"""Wrong results are reported, and different rounding is not."""

from __future__ import annotations

import enum

import pytest
import torch

from shardscope.numerics import ValueVerdict, compare, compare_value
from shardscope.record import Condition
from verdict_cases import NEARER, REWRITTEN, RIGHT, WRONG, Rewrite, Triple, numbers


def judge(case: Triple) -> ValueVerdict:
    return compare_value("y", case.compiled, case.eager, lambda: {"y": case.exact})


@pytest.mark.parametrize("name", WRONG)
def test_wrong_results_are_never_accepted(name):
    verdict = judge(WRONG[name])
    assert verdict.condition.is_bad
    assert verdict.fact.startswith("y ")


@pytest.mark.parametrize("name", [name for name in WRONG if "doubl" in name or "NaN" in name])
def test_wrong_results_are_found_without_double_precision_too(name):
    case = WRONG[name]
    assert compare_value("y", case.compiled, case.eager, lambda: None).condition.is_bad


@pytest.mark.parametrize("name", RIGHT)
def test_correct_results_are_fine(name):
    assert not judge(RIGHT[name]).condition.is_bad


@pytest.mark.parametrize("name", NEARER)
def test_what_is_nearer_to_double_precision_is_more_accurate(name):
    assert judge(NEARER[name]).condition is Condition.MORE_ACCURATE


def compare_rewrite(case: Rewrite, function) -> list[ValueVerdict]:
    samples: list[dict[str, torch.Tensor]] = []

    def run_perturbed(count: int):
        while len(samples) < count:
            samples.append(case.run_rounded(len(samples) + 1))
        return samples[:count]

    return list(compare(case.run(function), case.run(case.original), case.run_exact, run_perturbed))


@pytest.mark.parametrize("name", REWRITTEN)
def test_a_program_that_is_written_otherwise_is_fine(name):
    case = REWRITTEN[name]
    assert [
        verdict.fact for verdict in compare_rewrite(case, case.other) if verdict.condition.is_bad
    ] == []


@pytest.mark.parametrize("name", [name for name in REWRITTEN if "float16" not in name])
def test_a_rewritten_program_with_a_single_wrong_element_is_wrong(name):
    case = REWRITTEN[name]

    def spoil(*inputs):
        output = case.other(*inputs)
        change = torch.zeros_like(output).flatten()
        change[-1] = output.detach().abs().max() * 0.25
        return output + change.view_as(output)

    verdict = compare_rewrite(case, spoil)[0]
    assert verdict.condition is Condition.WRONG_RESULT


def test_skipped_roundings_make_it_more_accurate():
    case = REWRITTEN["matmuls that cancel in bfloat16"]
    verdict = compare_rewrite(case, case.other)[0]
    assert verdict.condition is Condition.MORE_ACCURATE
    assert verdict.deviation.relative_rmse < verdict.deviation.eager_rmse * 0.75


def test_a_verdict_says_how_far_off_and_where():
    case = WRONG["one element of many"]
    verdict = judge(case)
    deviation = verdict.deviation
    assert deviation.worst_index == (123_456,)
    assert deviation.got == 1.0
    assert deviation.expected == pytest.approx(float(case.exact[123_456]))
    assert deviation.eager_rmse < 1e-7 < deviation.relative_rmse
    assert deviation.max_ulp > 1e5
    assert verdict.fact.startswith("y is off by ")
    assert "in 1 of 200,000 elements, worst at [123456]: 1 instead of" in verdict.fact


def test_a_nan_is_reported_with_the_expected_value():
    verdict = judge(WRONG["a NaN where none is"])
    assert verdict.condition is Condition.NAN
    assert verdict.fact.startswith("y has NaN instead of ")
    assert verdict.deviation.worst_index == (3, 4)
    assert verdict.deviation.got is None


def test_iterators_of_another_kind_are_fine():
    verdict = compare_value("output 0", iter((1,)), iter([1]), lambda: None)
    assert verdict.condition is Condition.FINE


class Kind(enum.Enum):
    SINE = "sin"
    COSINE = "cos"


def test_python_numbers_may_differ_by_rounding_and_further_values_may_not():
    def judge_plain(compiled, eager):
        return compare_value("y", compiled, eager, lambda: None).condition

    assert judge_plain(1 + 2.0000001j, 1 + 2j) is Condition.FINE
    assert judge_plain(complex("nan"), complex("nan")) is Condition.FINE
    assert judge_plain(1 + 2.1j, 1 + 2j) is Condition.WRONG_RESULT
    assert judge_plain(Kind.SINE, Kind.COSINE) is Condition.WRONG_RESULT
    assert judge_plain(torch.strided, torch.sparse_coo) is Condition.WRONG_RESULT
    assert judge_plain(range(3), range(4)) is Condition.WRONG_RESULT


def test_integers_are_reported_without_rounding():
    verdict = judge(WRONG["large whole numbers"])
    big = 2**60
    assert verdict.fact == (
        f"y differs in 2 of 2 elements, first at [0]: {big + 1} instead of {big}"
    )


def test_values_that_only_a_single_run_has_are_wrong():
    verdicts = list(compare({"a": 1, "b": 2}, {"a": 1, "c": 3}, lambda: None))
    assert [(verdict.name, verdict.condition.is_bad) for verdict in verdicts] == [
        ("a", False),
        ("c", True),
        ("b", True),
    ]


def test_a_choice_between_nearly_equal_numbers_may_differ():
    def choose(y):
        return (y[0] * 3 - y[1]).argmax(-1)

    row = torch.tensor([[1.0, 1.0, 0.5]])
    inputs = torch.stack([row, torch.zeros_like(row)])
    near = inputs.clone()
    near[0, 0, 1] += 1e-7
    samples = [{"y": choose(near)}, {"y": choose(inputs)}]
    verdict = compare_value("y", choose(near), choose(inputs), lambda: None, lambda _: samples)
    assert verdict.condition is Condition.FINE
    wrong = torch.tensor([2])
    verdict = compare_value("y", wrong, choose(inputs), lambda: None, lambda _: samples)
    assert verdict.condition is Condition.WRONG_RESULT


def test_without_further_runs_few_elements_are_still_judged():
    exact = numbers(3).double() * 1.7
    eager = exact.float()
    verdict = compare_value("y", eager * 1.01, eager, lambda: {"y": exact})
    assert verdict.condition is Condition.WRONG_RESULT


def test_infinite_errors_survive_a_recording():
    verdict = judge(WRONG["tiny and doubled"])
    assert all(
        abs(error) < float("inf")
        for error in (verdict.deviation.relative_rmse, verdict.deviation.max_ulp)
    )


def test_objects_of_unknown_classes_are_not_compared():
    assert compare_value("y", object(), object(), lambda: None).condition is Condition.FINE


def test_numbers_that_are_all_noise_are_not_more_accurate():
    """The gradient of a bias before a norm is nothing but noise."""
    noise = numbers(40, 40)
    verdict = compare_value("y", noise * 1e-8, noise * 1e-7, lambda: {"y": noise.double() * 1e-20})
    assert verdict.condition is Condition.FINE
