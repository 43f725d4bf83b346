"""Tensors are compared against their own noise floor, never against a constant."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardscope.numerics import find_floor
from shardscope.parallel.equivalence import (
    AS_IT_IS,
    Case,
    Runs,
    StepResult,
    Task,
    TensorComparison,
    Variant,
    as_model,
    compare,
    compare_case,
    make_cases,
    run_all,
    run_task,
)
from shardscope.parallel.parity.recheck import recheck_fp64
from shardscope.record import Agreement, RankSpan, Suspect, TensorKind, TensorVerdict


def run_single(model, inputs, variant=AS_IT_IS) -> StepResult:
    """Forward and backward on a copy of a model or exported program."""
    (result,) = run_task(as_model(model), Task(inputs), variant)
    return result


def make_result(**tensors: torch.Tensor) -> StepResult:
    return StepResult(list(tensors.items()), {}, {})


def compare_tensors(
    reference: torch.Tensor, *ranks: torch.Tensor, fp64: torch.Tensor | None = None, **options
) -> TensorVerdict:
    (verdict,) = compare(
        make_result(y=reference),
        None if fp64 is None else make_result(y=fp64),
        [make_result(y=tensor) for tensor in ranks],
        **options,
    )
    return verdict


def numbers(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * scale


def test_the_same_bits_are_equal():
    assert compare_tensors(numbers(4, 4), numbers(4, 4).clone()).agreement is Agreement.EQUAL


def test_an_error_of_the_last_place_is_noise():
    y = numbers(40, 40)
    verdict = compare_tensors(y, y * (1 + 2e-7), fp64=y.double())
    assert verdict.agreement is Agreement.CLOSE
    assert 0 < verdict.error < 1e-6


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
@pytest.mark.parametrize("factor", [1 + 1e-5, -1.0, 2.0, 0.0])
def test_whatever_its_scale_a_result_that_is_off_differs(scale, factor):
    y = numbers(40, 40, scale=scale)
    assert compare_tensors(y, y * factor, fp64=y.double()).agreement is Agreement.DIFFERS


def test_a_single_wrong_element_of_many_is_found_and_named():
    y = numbers(300, 300)
    wrong = y.clone()
    wrong[7, 3] += 1e-3
    verdict = compare_tensors(y, wrong, fp64=y.double())
    assert (verdict.agreement, verdict.worst_index) == (Agreement.DIFFERS, (7, 3))


def test_a_result_may_be_off_by_as_much_as_the_single_device_is():
    fp64 = numbers(40, 40).double()
    noisy = (fp64 + 1e-3 * torch.randn_like(fp64)).float()
    rounded = (fp64 + 1e-3 * torch.randn_like(fp64)).float()
    assert compare_tensors(noisy, rounded, fp64=fp64).agreement is Agreement.CLOSE
    assert compare_tensors(fp64.float(), rounded, fp64=fp64).agreement is Agreement.DIFFERS


def test_a_sum_that_cancels_may_differ_by_the_noise_of_its_terms():
    """The sum is almost zero, and its allowed error is far more than a unit in its last place."""
    weights, rows = nn.Linear(4096, 1, bias=False), numbers(1, 4096, scale=100.0)
    with torch.no_grad():
        weights.weight[0, 2048:] = -weights.weight[0, :2048] * (rows[0, :2048] / rows[0, 2048:])
    (runs,) = run_all(weights, Task(rows))
    terms = (rows * weights.weight).detach()
    halves = make_result(
        **{"": terms[:, ::2].sum(1, keepdim=True) + terms[:, 1::2].sum(1, keepdim=True)}
    )
    (verdict, *_) = compare(runs.reference, runs.fp64, halves, perturbed_runs=runs.perturbed_runs)
    assert verdict.agreement in (Agreement.EQUAL, Agreement.CLOSE)


def test_nans_in_the_same_places_agree_and_elsewhere_do_not():
    y = numbers(4, 4)
    y[0, 0], y[1, 1] = torch.nan, torch.inf
    assert compare_tensors(y, y.clone()).agreement is not Agreement.NONFINITE
    moved = y.clone()
    moved[2, 2], moved[0, 0] = torch.nan, 0.0
    verdict = compare_tensors(y, moved)
    assert verdict.agreement is Agreement.NONFINITE
    assert verdict.detail == "1 NaN and 1 infinite; on the single device 1 NaN and 1 infinite"
    flipped = y.clone()
    flipped[1, 1] = -torch.inf
    assert compare_tensors(y, flipped).agreement is Agreement.NONFINITE


def test_numbers_beside_nans_are_compared():
    y = numbers(40, 40)
    y[0, 0] = torch.nan
    wrong = y.clone()
    wrong[1, 1] += 1
    assert compare_tensors(y, wrong).agreement is Agreement.DIFFERS


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_integers_are_compared_exactly(dtype):
    y = torch.tensor([0, 1, 1]).to(dtype)
    assert compare_tensors(y, y.clone()).agreement is Agreement.EQUAL
    assert compare_tensors(y, torch.tensor([0, 1, 0]).to(dtype)).agreement is Agreement.DIFFERS


def test_complex_numbers_are_compared():
    y = torch.complex(numbers(9), numbers(9))
    wrong = y.clone()
    wrong[4] += 1j
    verdict = compare_tensors(y, wrong)
    assert (verdict.agreement, verdict.worst_index) == (Agreement.DIFFERS, (4,))
    assert compare_tensors(y, y.clone()).agreement is Agreement.EQUAL


def test_another_dtype_agrees_by_rounding_and_may_be_allowed():
    y = numbers(40)
    verdict = compare_tensors(y, y.bfloat16())
    assert (verdict.agreement, verdict.suspect, verdict.dtype, verdict.detail) == (
        Agreement.ROUNDED,
        Suspect.ROUNDING,
        "float32",
        "dtype is bfloat16, not float32",
    )
    assert verdict.noise < 1e-6  # the single device's, not bfloat16's
    allowed = compare_tensors(y, y.bfloat16(), precision=torch.bfloat16)
    assert allowed.agreement is Agreement.CLOSE


def test_wrong_values_in_another_dtype_differ():
    y = numbers(40)
    verdict = compare_tensors(y, (1.2 * y).bfloat16())
    assert verdict.agreement is Agreement.DIFFERS
    assert verdict.detail == "dtype is bfloat16, not float32"
    assert compare_tensors(y, y, (1.2 * y).bfloat16()).agreement is Agreement.RANKS_DISAGREE


@pytest.mark.parametrize(
    ("wanted", "dtype", "agreement"),
    [
        (torch.float32, torch.float64, Agreement.EQUAL),
        (torch.int64, torch.int32, Agreement.EQUAL),
        (torch.float32, torch.int64, Agreement.DIFFERS),
        (torch.complex64, torch.float32, Agreement.DIFFERS),
    ],
)
def test_dtypes_of_the_same_kind_are_compared_by_value_and_different_kinds_differ(
    wanted, dtype, agreement
):
    y = torch.arange(6).to(wanted)
    verdict = compare_tensors(y, torch.arange(6).to(dtype))
    assert verdict.agreement is agreement
    assert verdict.detail == f"dtype is {dtype}, not {wanted}".replace("torch.", "")


def test_shards_in_another_dtype_are_joined():
    y = numbers(8, 5)
    assert compare_tensors(y, *y.bfloat16().chunk(2)).agreement is Agreement.ROUNDED
    assert compare_tensors(y, y[:4].bfloat16(), y[4:]).agreement is Agreement.ROUNDED


@pytest.mark.parametrize("dim", [0, 1])
def test_only_ranks_whose_own_shard_differs_are_named(dim):
    shards = list(numbers(8, 8).chunk(4, dim))
    shards[2] = shards[2] + 1
    assert compare_tensors(numbers(8, 8), *shards).ranks == (RankSpan(2, 1),)


def test_ranks_with_different_replicated_tensors_disagree():
    y = numbers(4, 4)
    verdict = compare_tensors(y, y.clone(), y + 1, y.clone())
    assert verdict.agreement is Agreement.RANKS_DISAGREE
    assert [tuple(span) for span in verdict.ranks] == [(1,)]
    assert compare_tensors(y, y + 1, y + 1).agreement is Agreement.DIFFERS


@pytest.mark.parametrize("dim", [0, 1])
def test_plain_shards_are_joined(dim):
    y = numbers(5, 5)
    shards = y.chunk(2, dim)
    assert compare_tensors(y, *shards).agreement is Agreement.EQUAL
    assert compare_tensors(y, *reversed(shards)).agreement is Agreement.DIFFERS
    assert compare_tensors(y, shards[0], shards[1] + 1).agreement is Agreement.DIFFERS


def test_shards_on_a_mesh_of_two_axes_are_joined():
    y = numbers(4, 6)
    shards = [shard for half in y.chunk(2, 0) for shard in half.chunk(2, 1)]
    assert compare_tensors(y, *shards, sizes=(2, 2)).agreement is Agreement.EQUAL
    halves = y.chunk(2, 0)
    alternating = (halves[0], halves[1], halves[0], halves[1])
    assert compare_tensors(y, *alternating, sizes=(2, 2)).agreement is Agreement.EQUAL


def test_shapes_that_do_not_fit_are_reported():
    verdict = compare_tensors(numbers(4, 4), numbers(3, 4), numbers(3, 4))
    assert verdict.agreement is Agreement.RESHAPED
    assert verdict.detail == "shape is [3, 4], and no such shards make up [4, 4]"


def test_missing_and_extra_gradients_are_distinguished_from_zero_gradients():
    single = StepResult([], {"w": numbers(3), "z": torch.zeros(3)}, {})
    rank = StepResult([], {"v": numbers(3), "u": torch.zeros(3)}, {})
    agreements = {v.name: v.agreement for v in compare(single, None, rank)}
    assert agreements == {
        "w": Agreement.MISSING,
        "z": Agreement.EQUAL,
        "v": Agreement.EXTRA,
        "u": Agreement.EQUAL,
    }


def test_tied_parameters_are_compared_once_unless_the_tie_is_broken():
    shared = numbers(3)
    tied = StepResult([], {"a.w": shared, "b.w": shared}, {})
    full = shared.clone()
    again = StepResult([], {"a.w": full, "b.w": full}, {})
    assert [v.name for v in compare(tied, None, again)] == ["a.w"]
    untied = StepResult([], {"a.w": shared * 0.5, "b.w": shared * 0.5}, {})
    assert [v.name for v in compare(tied, None, untied)] == ["a.w", "b.w"]


def test_only_buffers_that_a_run_changed_are_compared():
    result = StepResult([], {}, {"kept": numbers(3), "moved": numbers(3)}, frozenset({"moved"}))
    (verdict,) = compare(result, None, result)
    assert (verdict.kind, verdict.name) == (TensorKind.BUFFER, "moved")


def test_empty_tensors_are_equal():
    assert compare_tensors(torch.zeros(0, 3), torch.zeros(0, 3)).agreement is Agreement.EQUAL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_single_device_is_within_its_own_noise(dtype):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True).to(dtype)
    (runs,) = run_all(model, Task(numbers(3, 7, 32).to(dtype)))
    perturbed_runs = runs.perturbed_runs[0][0]
    verdicts = compare(
        runs.reference, runs.fp64, perturbed_runs, perturbed_runs=runs.perturbed_runs
    )
    assert {verdict.agreement for verdict in verdicts} <= {Agreement.EQUAL, Agreement.CLOSE}
    assert len(verdicts) == 1 + len(list(model.parameters()))


def test_a_run_of_the_single_device_leaves_everything_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    model[0].weight.grad = torch.ones(4, 4)
    x = numbers(5, 4)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    run_all(model, Task(x))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4))
    assert torch.get_default_dtype() is torch.float32
    assert torch.equal(x, numbers(5, 4))


def test_an_exported_program_gives_what_its_model_gives():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    x = numbers(5, 4)
    program = torch.export.export(model, (x,))
    of_model, of_program = run_single(model, x), run_single(program, (x,))
    assert {v.agreement for v in compare(of_model, None, of_program)} == {Agreement.EQUAL}
    assert list(of_program.gradients) == list(of_model.gradients)
    fp64 = run_single(program, (x,), Variant(is_fp64=True))
    assert fp64.outputs[0][1].dtype is torch.float64


def test_dtypes_in_the_code_of_a_model_become_double_in_the_fp64_run():
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))

        def forward(self, x):
            wide = x.float()
            scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
            return self.weight * scaled.to(torch.bfloat16) + torch.zeros(8, dtype=torch.float32)

    fp64 = run_single(Norm(), numbers(3, 8).bfloat16(), Variant(is_fp64=True))
    (_, y), *_ = fp64.outputs
    x = numbers(3, 8).bfloat16().double()
    wanted = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.allclose(y, wanted, rtol=1e-14, atol=0)


@pytest.mark.parametrize(("error", "is_wrong"), [(1e-13, False), (1e-8, True)])
def test_rounding_of_double_precision_is_no_difference_however_little_is_expected(error, is_wrong):
    """Adam divides by the size of a gradient, which makes rounding of small gradients larger."""
    y = numbers(20, 20).double()

    def compare_with(wrong: torch.Tensor, dtype: torch.dtype) -> TensorComparison:
        reference = y.to(dtype)
        floor = find_floor(reference.double(), y, [], dtype)
        ranks = (wrong.to(dtype),)
        kind = TensorKind.UPDATED
        return compare_case(Case(kind, "weight", reference, y, floor, ranks, (1,), dtype))

    wrong = y * (1 + error)
    rounded, fp64 = (compare_with(wrong, dtype) for dtype in (torch.float32, torch.float64))
    assert rounded.verdict.agreement in (Agreement.CLOSE, Agreement.EQUAL)
    assert fp64.verdict.agreement is Agreement.DIFFERS
    (decided,) = recheck_fp64([rounded], {(TensorKind.UPDATED, "weight"): fp64})
    assert (decided.verdict.agreement is Agreement.DIFFERS) is is_wrong


def recheck(single: list[torch.Tensor], ranks: list[torch.Tensor]) -> Agreement:
    """The verdict on a rank's tensor in float32, revised by that in double precision.

    `single` are the single device's runs in float32 and in double precision, each as it is and
    perturbed; `ranks` is what a rank has in both.
    """
    plain, moved, exact, moved_exact = (make_result(y=tensor) for tensor in single)
    runs = [Runs(plain, exact, ((moved, moved_exact),)), Runs(exact, None, ((moved_exact, None),))]
    compared = [
        compare_case(next(make_cases(run, [make_result(y=tensor)])))
        for run, tensor in zip(runs, ranks, strict=True)
    ]
    (decided,) = recheck_fp64(compared[:1], {(TensorKind.OUTPUT, "y"): compared[1]})
    return decided.verdict.agreement


@pytest.mark.parametrize(
    ("rank", "moved", "agreement"),
    [
        (1 + 2e-7, 1 + 1e-7, Agreement.CLOSE),
        (1.05, 1 + 1e-7, Agreement.DIFFERS),
        (1 + 2e-7, 1.02, Agreement.DIFFERS),  # chaotic, not another program
    ],
)
def test_where_double_precision_is_another_program_the_own_precision_decides(
    rank, moved, agreement
):
    y = numbers(4, 4)
    wide = y.double()
    single = [y, y * moved, 1.02 * wide, 1.02 * wide * (1 + 1e-15)]
    assert recheck(single, [y * rank, wide]) is agreement


def test_two_runs_that_round_zero_to_the_same_number_do_not_make_it_exact():
    noise = numbers(1, scale=1e-18).double()
    single = [1e9 * noise.float(), -1e9 * noise.float(), noise, noise.clone()]
    assert recheck(single, [1e9 * noise.float(), 2.5 * noise]) is Agreement.EQUAL
    assert recheck(single, [1e9 * noise.float(), 1e6 * noise]) is Agreement.DIFFERS
