"""Hundreds of programs, cut: what all ranks compute together is what one device computes.

Each is verified as the product does it, and by hand: every rank called as a user would, in a
thread of its own, its results put together from indices, against the model itself.
"""

from __future__ import annotations

import pytest
import torch

from older_torch import TORCH
from parallel_cases import all_cases
from parallel_cases.by_hand import check_case
from parallel_cases.case import Case, kinds
from parallel_cases.layers import layer_cases
from parallel_cases.ops import op_cases
from parallel_cases.together import group, together
from shardscope.parallel.passes.schedule import trace_collectives
from shardscope.parallel.program import ParallelProgram
from shardscope.record import Agreement

CASES = all_cases()
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*degrees of freedom",  # of a rank that has nothing
    "ignore:.*non-contiguous, this will lower the performance",
    "ignore:The .grad attribute of a Tensor that is not a leaf",  # torch.cond asks
)


# One op or layer that is trained has its outputs compared there; its rules are proven elsewhere.
SMALL = {case.name for case in (*op_cases(), *layer_cases())}
OPS = {tuple(case.name for case in cases) for cases in group(op_cases()) if len(cases) > 1}
TOGETHER = {name for names in OPS for name in names}
ALONE = {name: case for name, case in CASES.items() if name not in TOGETHER}
RUN = [
    name
    for name, case in ALONE.items()
    if case.runs and not (case.trains and case.counts is None and name in SMALL)
]


@pytest.mark.parametrize("names", sorted(OPS), ids=lambda names: f"{names[0]} … {names[-1]}")
def test_results_and_gradients_of_ops_are_those_of_one_device(names: tuple[str, ...]) -> None:
    cases = [CASES[name] for name in names]
    try:
        check_alone(together(cases))
    except Exception as error:
        wrong = {name: failure for name in names if (failure := describe_failure(CASES[name]))}
        raise AssertionError(f"wrong alone: {wrong}; together: {error}") from error


def check_alone(case: Case) -> None:
    check(case, case.parallelize(training=case.trains))


def describe_failure(case: Case) -> str | None:
    try:
        check_alone(case)
    except Exception as error:  # noqa: BLE001  # whatever it is, the case is named
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("name", RUN)
def test_outputs_and_buffers_are_those_of_one_device(name: str) -> None:
    case = CASES[name]
    if case.since > TORCH:
        pytest.skip(f"torch {torch.__version__} cannot export {name}")
    program = case.parallelize()
    check(case, program)
    for give in case.others:
        with case.defaults(seed=2):
            given = (give(), case.named())
        check_case(case, program, given=given)
    if case.counts is not None:
        assert kinds(program.exported(0).graph.nodes) == case.counts


@pytest.mark.parametrize("name", [name for name, case in ALONE.items() if case.trains])
def test_gradients_are_those_of_one_device(name: str) -> None:
    case = CASES[name]
    program = case.parallelize(training=True)
    check(case, program)
    for give in case.others:
        with case.defaults(seed=2):
            given = (give(), case.named())
        check_case(case, program, given=given)
    if case.joint_counts is not None:
        assert kinds(program.joint(0).graph_module.graph.nodes) == case.joint_counts


def check(case: Case, program: ParallelProgram) -> None:
    agreements = {verdict.agreement for verdict in program.verify()}
    assert agreements, program.not_verified
    if not case.is_random:
        assert Agreement.RANDOM not in agreements
    # The small ones are proven by their rules, each cut, run and joined by hand there.
    if case.by_hand and not case.is_random and case.name not in SMALL:
        check_case(case, program)
    check_schedule(program)


def check_schedule(program: ParallelProgram) -> None:
    """The traced schedule has as many collectives as each rank's program."""
    for coordinate in program.mesh.coordinates:
        rank = program.mesh.rank_at(coordinate)
        graph = program.joint(rank).graph_module if program.is_training else program.exported(rank)
        schedule = [
            str(collective.kind)
            for collective in trace_collectives(
                program.graph, coordinate, gradients=program.gradients
            )
        ]
        assert sum(kinds(graph.graph.nodes).values()) == len(schedule)
