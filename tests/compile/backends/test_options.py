"""Options that a backend does not take are refused in a sentence that lists what it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardscope.compile import backends
from shardscope.errors import BackendError


def compile_with(name: str, options: Any, mode: str | None = None) -> Any:
    gm = torch.fx.symbolic_trace(lambda x: (torch.relu(x),))
    return getattr(backends, name)(gm, [torch.ones(2)], options=options, mode=mode)


@pytest.mark.parametrize("name", [one for one in backends.__all__ if one[0].islower()])
def test_every_backend_refuses_options_and_modes_it_does_not_know(name: str) -> None:
    with pytest.raises(BackendError, match=rf"shardscope_{name} has no option 'nonsense'.*It tak"):
        compile_with(name, {"nonsense": 1})
    with pytest.raises(BackendError, match=rf"shardscope_{name} was given mode='max-autotune'"):
        compile_with(name, None, mode="max-autotune")
    with pytest.raises(BackendError, match=rf"shardscope_{name} was given options 3, which are no"):
        compile_with(name, 3)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("eager", {"print": True}, r"has no option 'print'\. It takes no options\."),
        (
            "pre_dispatch_eager",
            {"prnt": True},
            r"'prnt' \(did you mean 'print'\?\)\. It takes",
        ),
        ("pre_dispatch_eager", {"print": 1}, "was given print=1, not True to print"),
        ("eager_noexcept", {"message": 3}, "was given message=3, not a sentence"),
        ("eager_with_modes", None, "needs the option 'modes': a list of modes"),
        ("eager_with_modes", {"modes": [3]}, r"was given modes=\[3\], not a list of modes"),
        ("aot_eager", {"fw_compiler": "inductor"}, "was given fw_compiler='inductor', not a funct"),
        ("aot_eager_decomp_partition_with_mode", {}, "needs the option 'mode': a TorchDispatchM"),
        ("aot_eager_decomp_partition_with_mode", {"mode": 3}, "was given mode=3, not a TorchDisp"),
        (
            "aot_eager_decomp_partition_crossref",
            {"check": "some"},
            "was given check='some', not 'off', 'custom_ops' or 'all'",
        ),
        (
            "aot_eager_decomp_partition_crossref",
            {"check": torch.ones(2)},
            "not 'off', 'custom_ops' or 'all'",
        ),
        ("fault_nan", {}, "needs the option 'op': an op in any spelling"),
        ("fault_nan", {"op": "relu", "nth": 0}, "was given nth=0, not which occurrence .* from 1"),
        ("fault_nan", {"op": "relu", "nth": True}, "was given nth=True"),
        ("fault_nan", {"op": "relu", "stage": "late"}, "was given stage='late', not 'graph', 'dec"),
        ("fault_nan", {"op": "relu", "by": 2}, "has no option 'by'"),
        (
            "fault_accuracy_error",
            {"op": "relu", "by": float("inf")},
            "was given by=inf, not a",
        ),
        (
            "fault_nan",
            {"op": "relux"},
            ("op='relux' is not an op that torch has. Did you mean 'relu'?"),
        ),
        ("fault_nan", {"op": "relu", "also": "siin"}, "op='siin' is not an op that torch has"),
        (
            "fault_compile_error",
            {"op": "relu", "direction": "backward"},
            "compile error in backward cannot be at stage 'graph'.*Use stage 'decomposed' or",
        ),
        (
            "fault_nan",
            {"op": "F.linear", "stage": "partitioned"},
            "Op 'linear' never reaches stage 'partitioned': it is decomposed .* into addmm or mm",
        ),
    ],
)
def test_errors_on_options_list_the_accepted_options(
    name: str, options: dict[str, Any] | None, sentence: str
) -> None:
    with pytest.raises(BackendError, match=sentence):
        compile_with(name, options)


def test_torch_compile_passes_the_sentence_on() -> None:
    torch.compiler.reset()
    compiled = torch.compile(torch.relu, backend="shardscope_eager", options={"chek": "all"})
    with pytest.raises(RuntimeError, match="shardscope_eager has no option 'chek'"):
        compiled(torch.ones(2))


def test_the_default_mode_is_no_mode() -> None:
    assert compile_with("eager", None, mode="default")(torch.ones(2))[0].tolist() == [1, 1]
