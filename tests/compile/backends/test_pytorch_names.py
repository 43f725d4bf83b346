"""PyTorch's own names do what PyTorch's do, and where those fail, what they should."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.backends.debugging as torchs
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from backend_cases import honest, misjudged, picky, run
from shardscope import compat

functional = nn.functional
BACKENDS = [
    "eager",
    "eager_noexcept",
    "eager_debug",
    "pre_dispatch_eager",
    "torchscript",
    "invoke_subgraph",
    "aot_eager",
    "aot_eager_default_partitioner",
    "aot_eager_decomp_partition",
    "aot_eager_decomp_partition_crossref",
    "aot_ts",
]
OTHERS = [
    "aot_eager_decomp_partition_with_mode",
    "boxed_nop",
    "boxed_nop_with_mode",
    "fake_crossref_boxed_nop",
    "get_nop_func",
    "ignore_builtins",
    "make_eager_backend_with_torch_function_mode",
    "make_eager_backend_with_torch_function_modes",
    "non_leaf_compile_error_TESTING_ONLY",
    "relu_accuracy_error_TESTING_ONLY",
    "relu_compile_error_TESTING_ONLY",
    "relu_runtime_error_TESTING_ONLY",
]


# Two are no functions of torch's, but objects that are called in the same way.
@pytest.mark.parametrize(
    "name", sorted({*BACKENDS, *OTHERS} - {"aot_eager_default_partitioner", "aot_ts"})
)
def test_signatures_are_torchs(name: str) -> None:
    ours = inspect.signature(getattr(compat, name)).parameters
    user_code = inspect.signature(getattr(torchs, name)).parameters
    assert list(ours) == list(user_code)
    assert [one.kind for one in ours.values()] == [one.kind for one in user_code.values()]
    assert [one.default for one in ours.values()] == [one.default for one in user_code.values()]


@pytest.mark.parametrize("name", BACKENDS)
def test_each_computes_what_the_function_does(name: str) -> None:
    ran = run(getattr(compat, name))
    torch.testing.assert_close(tuple(ran), tuple(run(None)))


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "torchscript"])
def test_what_they_do_not_know_is_warned_of(name: str, caplog: pytest.LogCaptureFixture) -> None:
    gm = torch.fx.symbolic_trace(lambda x: (torch.relu(x),))
    with caplog.at_level(logging.WARNING, logger="shardscope"):
        getattr(compat, name)(gm, [torch.ones(2)], nonsense=1)
    assert [one.getMessage() for one in caplog.records if one.name == "shardscope"] == [
        f"{name} ignores unknown options: nonsense."
    ]


def test_eager_noexcept_raises_what_torchs_raises() -> None:
    torch.compiler.reset()
    compiled = torch.compile(picky, backend=compat.eager_noexcept)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="picky takes no") as caught:
        compiled(-torch.ones(2))
    assert isinstance(caught.value.__cause__, ValueError)


def test_pre_dispatch_eager_prints_as_torchs_does(capsys: pytest.CaptureFixture[str]) -> None:
    run(compat.pre_dispatch_eager, has_grad=False)
    assert "torch.ops.aten.matmul.default" in capsys.readouterr().out


class Functions(TorchFunctionMode):
    """Notes what is called in it."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    """Notes which ops are dispatched in it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_function_modes_are_entered_at_every_call_even_from_a_generator() -> None:
    seen: list[str] = []
    backend = compat.make_eager_backend_with_torch_function_modes(Functions(seen) for _ in range(2))
    torch.compiler.reset()
    compiled = torch.compile(torch.sin, backend=backend)
    for _ in range(2):
        compiled(torch.ones(2))
    assert seen == ["sin"] * 4
    one = compat.make_eager_backend_with_torch_function_mode(Functions(seen))
    torch.compiler.reset()
    torch.compile(torch.sin, backend=one)(torch.ones(2))
    assert seen == ["sin"] * 5


def test_a_dispatch_mode_sees_the_ops() -> None:
    mode = Ops()

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return compat.aot_eager_decomp_partition_with_mode(gm, inputs, mode)

    run(backend)
    assert "aten.relu.default" in mode.seen
    mode.seen.clear()
    gm = torch.fx.symbolic_trace(lambda x: (torch.relu(x),))
    given = [torch.ones(2)]
    compat.boxed_nop_with_mode(gm, given, mode=mode)(given)
    assert mode.seen == ["aten.relu.default"]
    assert given == []


def test_boxed_nop_takes_a_list_and_empties_it() -> None:
    gm = torch.fx.symbolic_trace(lambda x: (torch.relu(x),))
    given = [-torch.ones(2)]
    (output,) = compat.boxed_nop(gm, given)(given)
    assert (output.tolist(), given) == ([0, 0], [])


def misjudging() -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    op = torch.ops.backend_cases.misjudged.default
    graph.output((graph.call_function(op, (graph.placeholder("x"),)),))
    return torch.fx.GraphModule({}, graph)


def test_crossref_checks_what_is_not_ignored() -> None:
    with pytest.raises(Exception, match="misjudged"):
        compat.fake_crossref_boxed_nop(misjudging(), [])([torch.ones(2)])
    compat.fake_crossref_boxed_nop(misjudging(), [], lambda op: True)([torch.ones(2)])
    assert compat.ignore_builtins(torch.ops.aten.sin.default)
    assert not compat.ignore_builtins(torch.ops.backend_cases.honest.default)
    assert honest is not misjudged


@pytest.mark.parametrize(("setting", "is_checked"), [(False, False), ("custom_ops", True)])
def test_get_nop_func_follows_torchs_setting(setting: Any, is_checked: bool) -> None:
    with torch._functorch.config.patch(fake_tensor_crossref=setting):
        compiled = compat.get_nop_func()(misjudging(), [])
    if not is_checked:
        assert compiled([torch.ones(2)])[0].dtype == torch.float64
        return
    with pytest.raises(Exception, match="misjudged"):
        compiled([torch.ones(2)])


RELUS: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.relu(x),
    lambda x: functional.relu(x),
    lambda x: functional.relu(x, inplace=True),
    lambda x: x.relu(),
    lambda x: x.relu_(),
    nn.ReLU(),
    nn.ReLU(inplace=True),
    lambda x: torch.ops.aten.relu(x),
]


@pytest.mark.parametrize("relu", RELUS)
def test_relu_faults_fire_on_every_spelling(relu: Callable[[Tensor], Tensor]) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch.compiler.reset()
    torch.compile(lambda x: relu(x * 1), backend=keep)(torch.ones(2))
    inputs = [-torch.ones(2)]
    (wrong,) = compat.relu_accuracy_error_TESTING_ONLY(graphs[0], inputs)(*inputs)
    assert wrong.tolist() == [0, 0]  # -1 + 1
    failing = compat.relu_runtime_error_TESTING_ONLY(graphs[0], inputs)
    with pytest.raises(AssertionError, match="ReluRuntimeError"):
        failing(*inputs)
    with pytest.raises(compat.ReluCompileError):
        compat.relu_compile_error_TESTING_ONLY(graphs[0], inputs)


def test_relu_faults_do_no_harm_without_relu() -> None:
    for backend in (
        compat.relu_accuracy_error_TESTING_ONLY,
        compat.relu_runtime_error_TESTING_ONLY,
        compat.relu_compile_error_TESTING_ONLY,
    ):
        torch.compiler.reset()
        assert torch.compile(torch.neg, backend=backend)(torch.ones(2)).tolist() == [-1, -1]


def test_in_place_relus_are_wrong_for_every_reference_to_the_tensor() -> None:
    def keep(x: Tensor) -> Any:
        y, z = x * 1, x * 1
        y.relu_()
        functional.relu(z, True)
        return y, z

    torch.compiler.reset()
    compiled = torch.compile(keep, backend=compat.relu_accuracy_error_TESTING_ONLY)
    assert [one.tolist() for one in compiled(torch.ones(2))] == [[2, 2], [2, 2]]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_an_input_that_is_not_a_leaf() -> None:
    leaf = torch.ones(2, requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(torch.sin, backend=compat.non_leaf_compile_error_TESTING_ONLY)
    compiled(leaf)
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="TestingOnlyCompileError"):
        compiled(leaf * 2)
