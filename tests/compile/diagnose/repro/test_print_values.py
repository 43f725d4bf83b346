"""Inputs come back as they were: numbers, strides, shared memory, and what asks for gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from repro_scripts import WRONG, assert_same, assert_tidy, capture, load
from shardscope.compile.diagnose.repro.write import write_repro
from shardscope.compile.diagnose.subgraph.op_names import NotPrintable
from shardscope.compile.diagnose.subgraph.subgraph import Compiler, Subgraph

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def _own_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


def pass_through(inputs: tuple[Any, ...]) -> Subgraph:
    """A program that returns its inputs."""
    graph = fx.Graph()
    graph.output(tuple(graph.placeholder(f"L_self_parameters_x{i}_") for i in range(len(inputs))))
    return Subgraph(fx.GraphModule(nn.Module(), graph), inputs, False)


def write_and_make(inputs: tuple[Any, ...], folder: Path) -> tuple[str, tuple[Any, ...]]:
    path = write_repro(pass_through(inputs), Compiler("inductor"), WRONG, folder=folder)
    text = path.read_text()
    assert_tidy(text)
    return text, load(path)["make_inputs"]()


def bits(tensor: torch.Tensor) -> bytes:
    """The numbers with the sign of zeros; of NaN, that it is one."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    if plain.is_floating_point():
        plain = plain.double().nan_to_num(nan=1e300, posinf=INF, neginf=-INF)
    return bytes(plain.flatten().view(torch.uint8).tolist()) if plain.numel() else b""


TENSORS: dict[str, torch.Tensor] = {
    "float": torch.tensor([[0.1, -0.2, 1e-45], [3.4e38, 1 / 3, 1e10]]),
    "special": torch.tensor([NAN, INF, -INF, -0.0, 0.0, 1e-40]),
    "negative zeros": -torch.zeros(3),
    "double": torch.tensor([0.1, 1 / 3, 5e-324, 1.7e308], dtype=torch.float64),
    "half": torch.tensor([0.1, 65504.0, 6e-8, NAN], dtype=torch.float16),
    "bfloat16": torch.tensor([[0.1, 1e38], [-3.0, INF]], dtype=torch.bfloat16),
    "float8": torch.tensor([0.1, 448.0, -0.5, 0.0]).to(torch.float8_e4m3fn),
    "complex": torch.tensor([1 + 2j, complex(NAN, -0.0), complex(-INF, 0.5), -3 - 4j]),
    "complex double": torch.tensor([0.1 + 0.2j], dtype=torch.complex128),
    "conjugated": torch.tensor([1 + 2j, 0.1 - 3j]).conj(),
    "integers": torch.tensor([[-(2**63), 2**63 - 1], [0, 5]]),
    "bytes": torch.tensor([0, 255, 7], dtype=torch.uint8),
    "short": torch.tensor([-5, 300], dtype=torch.int16),
    "truth": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5),
    "whole scalar": torch.tensor(7),
    "empty": torch.empty(0, 3, dtype=torch.float16),
    "transposed": torch.tensor([[1.5, 2.5, 3.5], [4.5, 5.5, 6.5]]).T,
    "channels last": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "strided": torch.arange(20.0)[3::4],
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
    "flipped diagonal": torch.arange(9.0).view(3, 3).diagonal(),
    "leaf": torch.tensor([1.0, 2.0], requires_grad=True),
    "transposed leaf": torch.tensor([[1.0, 2.0, 0.5]]).expand(2, 3).clone().T.requires_grad_(),
    "parameter": nn.Parameter(torch.tensor([1.0, -2.0])),
    "frozen parameter": nn.Parameter(torch.tensor([1.0, -2.0]), requires_grad=False),
    "big": torch.arange(100.0).sin().view(10, 10),
    "big transposed leaf": torch.arange(100.0).sin().view(4, 25).T.requires_grad_(),
    "big expanded": torch.arange(100.0).sin().view(100, 1).expand(100, 3),
    "big zeros": torch.zeros(500, 2),
    "big mask": torch.full((30, 30), -INF),
    "big constant": torch.full((30, 30), 0.1, dtype=torch.bfloat16),
    "big truth": torch.ones(20, 20, dtype=torch.bool),
    "counting": torch.arange(1000),
}
IN_A_FILE = {"big", "big transposed leaf", "big expanded"}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    tensor = TENSORS[name]
    _, (created,) = write_and_make((tensor,), tmp_path)
    assert bits(created) == bits(tensor)
    for ask in ("dtype", "shape", "device", "requires_grad", "is_leaf"):
        assert getattr(created, ask) == getattr(tensor, ask)
    assert created.stride() == tensor.stride()
    assert type(created) is type(tensor)
    assert (tmp_path / "repro_inputs.pt").exists() == (name in IN_A_FILE)


def test_a_tensor_without_data_has_none_in_the_script(tmp_path: Path) -> None:
    _, (created,) = write_and_make((torch.empty(3, 4, device="meta"),), tmp_path)
    assert (created.device.type, created.shape) == ("meta", (3, 4))


def test_what_is_no_tensor_is_written_as_it_is(tmp_path: Path) -> None:
    values = (3, None, True, 2.5, "a'\"b", (1, [2]), torch.float16, torch.device("cpu"), INF)
    _, created = write_and_make(values, tmp_path)
    assert created == values


@pytest.mark.parametrize("size", [8, 400])
def test_inputs_that_share_memory_still_do(size: int, tmp_path: Path) -> None:
    base = torch.arange(float(size)).sin()
    inputs = (base[: size // 2], base[1:], base.view(2, -1).T.requires_grad_(), base[1:])
    inputs = (*inputs, inputs[0])
    _, created = write_and_make(inputs, tmp_path)
    for left, right in zip(created, inputs, strict=True):
        assert bits(left) == bits(right)
        assert left.stride() == right.stride()
        assert left.requires_grad == right.requires_grad
    assert len({left.untyped_storage().data_ptr() for left in created}) == 1
    assert created[4] is created[0]
    with torch.no_grad():
        created[0][1] = 42.0
    assert created[1][0] == 42.0


def test_each_call_gets_inputs_of_its_own(tmp_path: Path) -> None:
    path = write_repro(
        pass_through((torch.ones(2), torch.randn(9, 9))),
        Compiler("inductor"),
        WRONG,
        folder=tmp_path,
    )
    make = load(path)["make_inputs"]
    for left, right in zip(make(), make(), strict=True):
        left.add_(1)
        assert not torch.equal(left, right)


def test_a_few_hundred_numbers_are_inlined_and_the_rest_goes_into_a_file(tmp_path: Path) -> None:
    text, _ = write_and_make(tuple(torch.randn(8, 8) for _ in range(20)), tmp_path)
    assert 7 <= text.count("torch.tensor(") <= 9
    assert len(torch.load(tmp_path / "repro_inputs.pt", weights_only=True)) == 12


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.eye(3).to_sparse(), "input 0 is a tensor of layout torch.sparse_coo"),
        (torch.Generator(), "input 0 cannot be written as code"),
        (object(), "input 0 cannot be written as code: object cannot be reached by a name"),
    ],
)
def test_a_value_that_cannot_be_written_as_code_is_refused(
    value: Any, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(NotPrintable, match=reason):
        write_repro(pass_through((value,)), Compiler("inductor"), WRONG, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def with_attributes(**attributes: Any) -> fx.GraphModule:
    """A graph that calls modules and reads tensors which it holds."""
    root = nn.Module()
    graph = fx.Graph()
    value = graph.placeholder("print")  # a name that Python has
    for name, attribute in attributes.items():
        setattr(root, name, attribute)
        if isinstance(attribute, nn.Module):
            value = graph.call_module(name, (value,))
        else:
            value = graph.call_function(torch.add, (value, graph.get_attr(name)))
    graph.output((value,))
    return fx.GraphModule(root, graph)


def test_modules_and_tensors_that_a_graph_holds_become_inputs(tmp_path: Path) -> None:
    torch.manual_seed(1)
    graph = with_attributes(
        up=nn.Linear(4, 3),
        shift=torch.tensor([1.0, NAN, 3.0]),
        norm=nn.BatchNorm1d(3),
        drop=nn.Dropout(0.5).eval(),
        act=nn.GELU(approximate="tanh"),
    )
    subgraph = Subgraph(graph, (torch.randn(2, 4, requires_grad=True),), True)
    path = write_repro(subgraph, Compiler("inductor"), WRONG, folder=tmp_path)
    text = path.read_text()
    assert "def f(print_1, up, shift, norm, drop, act):" in text
    assert "torch.nn.Linear(in_features=4, out_features=3, bias=True)" in text
    assert_tidy(assert_same(subgraph, path))


def test_a_module_of_the_users_is_refused(tmp_path: Path) -> None:
    class Own(nn.Module):
        def forward(self, x):
            return x

    subgraph = Subgraph(with_attributes(own=Own()), (torch.ones(1),), False)
    with pytest.raises(NotPrintable, match="Own, which is not torch's"):
        write_repro(subgraph, Compiler("inductor"), WRONG, folder=tmp_path)


def test_sizes_that_were_left_open_are_left_open_again(tmp_path: Path) -> None:
    subgraph = capture(
        lambda x: x.view(x.shape[0] * 2, -1) + x.shape[0], torch.ones(3, 4), dynamic=True
    )
    path = write_repro(subgraph, Compiler("inductor"), WRONG, folder=tmp_path)
    assert "dynamic=True" in assert_same(subgraph, path)


def test_simpler_inputs_are_used_if_it_still_fails_with_them(tmp_path: Path) -> None:
    inputs = (
        torch.randn(3),
        torch.randn(20, 20, requires_grad=True),
        torch.randint(5, 9, (100,), dtype=torch.int32),
        torch.rand(100) < 0.5,
        torch.randn(100).bfloat16(),
        7,
    )
    subgraph = pass_through(inputs)
    tried: list[tuple[Any, ...]] = []

    def still_fails(values: tuple[Any, ...]) -> bool:
        tried.append(values)
        return len(tried) == 2

    path = write_repro(
        subgraph, Compiler("inductor"), WRONG, folder=tmp_path, still_fails=still_fails
    )
    assert torch.equal(tried[0][0], torch.ones(3))
    text = path.read_text()
    assert "torch.manual_seed(0)\n    x0 = " in text
    assert "x1 = torch.randn((20, 20)).requires_grad_()" in text
    created = load(path)["make_inputs"]()
    for left, right in zip(created, tried[1], strict=True):
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
    assert int(created[2].min()) >= 5
    assert not (tmp_path / "repro_inputs.pt").exists()


def test_inputs_stay_as_they_are_if_it_fails_with_nothing_else(tmp_path: Path) -> None:
    inputs = (torch.randn(3), torch.randn(20, 20))
    calls: list[Any] = []
    path = write_repro(
        pass_through(inputs),
        Compiler("inductor"),
        WRONG,
        folder=tmp_path,
        still_fails=lambda values: bool(calls.append(values)),
    )
    assert len(calls) == 2
    assert all(map(torch.equal, load(path)["make_inputs"](), inputs))
