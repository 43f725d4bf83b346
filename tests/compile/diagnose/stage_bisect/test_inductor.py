"""Finds the part of Inductor that causes a failure, with parts that are broken on purpose.

Each compilation takes Inductor seconds, so that there is one test for each kind of part.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._inductor import config as inductor_config

from plain_judge import capture, judge, locate_stage_here
from shardscope._torch.inductor import without_caches
from shardscope.compile.diagnose.stage_bisect.bisect import StageFinding
from shardscope.compile.diagnose.subgraph.subgraph import Compiler, Subgraph
from shardscope.record import Condition, Stage

aten = torch.ops.aten

# Loading Inductor makes torch warn of itself.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def locate(subgraph: Subgraph, condition: Condition = Condition.WRONG_RESULT) -> StageFinding:
    compiler = Compiler("inductor")
    with without_caches():  # which do not know what is broken here
        outcome = judge(subgraph, compiler)
    assert outcome.condition is condition, outcome
    return locate_stage_here(subgraph, compiler, outcome=outcome)


def make_subgraph() -> Subgraph:
    x = torch.linspace(-2, 2, 12).reshape(3, 4)
    return capture(lambda x: (x + 1).relu(), x, with_gradients=False)


def test_code_that_is_generated_wrongly_is_attributed_to_the_op_and_its_kernel() -> None:
    subgraph = capture(torch.relu, torch.linspace(-2, 2, 12), with_gradients=False)
    with inductor_config.patch({"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"}):
        finding = locate(subgraph)
    assert finding.stage is Stage.BACKEND
    assert finding.part == "lowering of aten.relu.default, in kernel cpp_fused_relu_0"


def test_a_kernel_that_the_compiler_of_cpp_refuses_is_attributed_to_the_op() -> None:
    with inductor_config.patch({"cpp.inject_relu_bug_TESTING_ONLY": "compile_error"}):
        finding = locate(make_subgraph(), Condition.COMPILE_ERROR)
    assert (finding.stage, finding.part.split(",")[0]) == (
        Stage.BACKEND,
        "lowering of aten.relu.default",
    )


def break_relu(graph: torch.fx.Graph) -> None:
    for node in graph.nodes:
        if node.target is aten.relu.default:
            node.target = aten.neg.default


def test_a_wrong_pass_is_located_by_name() -> None:
    with inductor_config.patch(post_grad_custom_pre_pass=break_relu):
        finding = locate(make_subgraph())
    assert (finding.stage, finding.part) == (
        Stage.BACKEND,
        "post-grad pass 'post_grad_custom_pre_pass'",
    )


def test_a_wrong_entry_of_inductors_table_is_a_decomposition_that_is_the_cause() -> None:
    from torch._inductor.decomposition import decompositions

    def wrong_silu(x: Any) -> Any:
        return x * torch.sigmoid(x) * 2

    subgraph = capture(
        lambda x: torch.nn.functional.silu(x) + 1, torch.ones(4), with_gradients=False
    )
    with patch.dict(decompositions, {aten.silu.default: wrong_silu}):
        from torch._inductor.decomposition import fast_random_decomps

        fast_random_decomps.cache_clear()
        finding = locate(subgraph)
    fast_random_decomps.cache_clear()
    assert (finding.stage, finding.part) == (Stage.DECOMPOSITION, "decomposition of aten.silu")
