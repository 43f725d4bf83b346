"""What is right and what is wrong in functions that are out of the ordinary."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import older_torch
from home_workers import HomeWorkers, stay_at_home
from older_torch import IS_OLDER
from shardscope import Diagnosed, diagnose
from shardscope.errors import CompileError
from shardscope.record import Condition, Stage


@pytest.fixture(autouse=True)
def workers(monkeypatch: pytest.MonkeyPatch) -> HomeWorkers:
    """Whoever is asked instead of a process."""
    return stay_at_home(monkeypatch)


@pytest.fixture
def look(tmp_path: Path) -> Callable[..., Diagnosed]:
    def look(
        fn: Callable[..., Any], *args: Any, backend: Any = "eager", **options: Any
    ) -> Diagnosed:
        return diagnose(fn, *args, backend=backend, folder=tmp_path / "found", **options)

    return look


def numbers(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(0))


def line_of(result: Diagnosed) -> str:
    (suspect,) = result.diagnosis.suspects
    assert suspect.source is not None
    return suspect.source.text


# ── Functions that are fine ──────────────────────────────────────────────────────────────────


class Store(nn.Module):
    seen: list[int] = []  # noqa: RUF012 - shared on purpose

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        Store.seen.append(self.num_calls)
        return x * self.num_calls


TOTAL = 0


def count(x: Tensor) -> Tensor:
    global TOTAL
    TOTAL += 1
    return x + TOTAL


def fill(items: dict[str, Any], queue: Any, x: Tensor) -> Tensor:
    items["y"] = x * 2
    queue.append(len(items))
    return items["y"]


def write(x: Tensor) -> Tensor:
    return x.mul_(2).sin()


def second_order(x: Tensor) -> Any:
    return torch.func.hessian(lambda y: (y.sin() * y.flip(0)).sum())(x)


def draw(x: Tensor) -> Tensor:
    return x * random.random() + torch.rand(3)


def ragged(*sizes: int, requires_grad: bool = False) -> Tensor:
    parts = [numbers(size, 2) for size in sizes]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=requires_grad)


HEALTHY: dict[str, Callable[[], tuple[Any, ...]]] = {
    "shared by a class": lambda: (Store(), numbers(3)),
    "a global number": lambda: (count, numbers(3)),
    "containers": lambda: (fill, {"x": 1}, collections.deque([1]), numbers(3)),
    "written to, and computed": lambda: (write, numbers(3).requires_grad_() * 2),
    "second derivatives": lambda: (second_order, numbers(4)),
    "random numbers": lambda: (draw, numbers(3)),
    "an array": lambda: (lambda array: array * 2 + 1, numpy.arange(3.0)),
    "nested": lambda: (lambda x: (x * 2).sin(), ragged(2, 3)),
    "nested, with gradients": lambda: (lambda x: (x * 2).sin(), ragged(2, 3, requires_grad=True)),
    "a generator": lambda: (lambda x: (x * step for step in range(2)), numbers(3)),
    "parametrized": lambda: (parametrizations.spectral_norm(nn.Linear(3, 3)), numbers(2, 3)),
    "without data": lambda: (lambda x: x * 2, torch.empty(3, device="meta")),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("case", HEALTHY)
def test_a_function_that_is_right_is_fine_and_leaves_no_trace(
    look: Callable[..., Diagnosed], case: str
) -> None:
    if case == "shared by a class" and IS_OLDER:
        pytest.skip("torch before 2.13 loses what a compiled function appends to a class's list")
    fn, *args = HEALTHY[case]()
    state = random.getstate(), torch.get_rng_state()
    result = look(fn, *args)
    assert result.condition is Condition.FINE, result.diagnosis
    assert not any("could not be sent" in note for note in result.diagnosis.notes)
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])
    assert (Store.seen, TOTAL) == ([], 0)


def draw_and_fail(x: Tensor) -> Tensor:
    raise ValueError(f"{random.random()} {torch.rand(1)} {numpy.random.rand()}, {x}")


@pytest.mark.parametrize(
    ("fn", "options"),
    [(draw_and_fail, {}), (draw, {"backend": "nonsense"})],
)
def test_a_diagnosis_that_fails_leaves_random_numbers_as_they_were(
    look: Callable[..., Diagnosed], fn: Callable[..., Any], options: dict[str, Any]
) -> None:
    def read() -> Any:
        return random.getstate(), torch.get_rng_state().tolist(), numpy.random.get_state()[1].sum()

    state = read()
    with pytest.raises(CompileError):
        look(fn, numbers(3), **options)
    assert read() == state


# ── What is changed, and not returned ────────────────────────────────────────────────────────


def reorder(cache: Any, x: Tensor) -> Tensor:
    cache.move_to_end("a")
    return x + 1


def forgetful(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
    """Gives what was computed, plus one, so that whatever holds it holds something else."""
    return lambda *given: [value + 1 for value in graph(*given)]


class Box:
    def __init__(self) -> None:
        self.value: Any = None
        self.parts: dict[str, Any] = {}


def put(box: Box, x: Tensor) -> None:
    box.parts["x"] = [x * 2]


def test_the_order_of_keys_is_compared(look: Callable[..., Diagnosed]) -> None:
    result = look(reorder, collections.OrderedDict(a=1, b=2), numbers(2))
    assert (result.condition, result.diagnosis.stage) == (Condition.WRONG_RESULT, Stage.DYNAMO)
    assert result.diagnosis.fact == (
        "argument 0, after the call is \"OrderedDict with the keys 2: 'a', 'b'\" instead of "
        "\"OrderedDict with the keys 2: 'b', 'a'\""
    )
    assert result.diagnosis.is_verified
    assert "collections.OrderedDict(" in result.diagnosis.script


@pytest.mark.parametrize("argument", [Box, list, dict, lambda: collections.deque()])
def test_what_is_put_into_an_argument_is_compared(
    look: Callable[..., Diagnosed], argument: Callable[[], Any]
) -> None:
    def put(holder: Any, x: Tensor) -> None:
        if isinstance(holder, Box):
            holder.parts["x"] = [x * 2]
        elif isinstance(holder, dict):
            holder["x"] = x * 2
        else:
            holder.append(x * 2)

    # The graph is checked too, and is wrong itself: only the worker has the entire function.
    result = look(put, argument(), numbers(2), backend=forgetful)
    assert result.condition is Condition.WRONG_RESULT


# ── Globals and class attributes ─────────────────────────────────────────────────────────────


class Tally:
    calls = 0


class Marked(nn.Module):
    mark = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).mark = 1 + torch.compiler.is_compiling()
        return x + 1


def set_global(x: Tensor) -> Tensor:
    global TOTAL
    TOTAL += 1 + torch.compiler.is_compiling()
    return x + 1


def create_global(x: Tensor) -> Tensor:
    global CREATED
    CREATED = 1 + torch.compiler.is_compiling()
    return x + 1


@torch.no_grad()
def set_global_without_grad(x: Tensor) -> Tensor:
    global TOTAL
    TOTAL += 1 + torch.compiler.is_compiling()
    return x + 1


def set_attribute_of_a_module(x: Tensor) -> Tensor:
    older_torch.COUNTED = 1 + torch.compiler.is_compiling()  # type: ignore[attr-defined]
    return x + 1


def set_class_attribute(x: Tensor) -> Tensor:
    Tally.calls += 1 + torch.compiler.is_compiling()
    return x + 1


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (set_global, "TOTAL"),
        (create_global, "CREATED"),
        (set_global_without_grad, "TOTAL"),
        (set_attribute_of_a_module, "older_torch.COUNTED"),
        (set_class_attribute, "Tally.calls"),
        (Marked(), "Marked.mark"),
    ],
)
def test_a_global_or_class_attribute_that_differs_is_wrong_and_shown_by_a_script(
    look: Callable[..., Diagnosed], fn: Callable[..., Any], name: str
) -> None:
    result = look(fn, numbers(2))
    assert result.condition is Condition.WRONG_RESULT
    assert result.diagnosis.fact == f"{name}, after the call is 2 instead of 1"
    assert result.diagnosis.is_verified, result.diagnosis.notes


# ── Errors of one and not of the other ───────────────────────────────────────────────────────


def check(x: Tensor, is_strict: bool = True) -> Tensor:
    if is_strict and not torch.compiler.is_compiling():
        raise ValueError("too strict")
    return x + 1


def look_up(table: Tensor, places: Tensor) -> Tensor:
    return functional.embedding(places, table) * 2


def clamps(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
    """A backend whose lookups never fail."""
    for node in graph.graph.find_nodes(op="call_function", target=functional.embedding):
        node.target = lambda places, table, *_: table[places.clamp(max=len(table) - 1)]
    graph.recompile()
    return graph.forward


def raises_otherwise(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
    """A backend whose code raises an error of its own."""

    def run(*given: Any) -> Any:
        raise KeyError("here")

    return run


def reshape_twice(x: Tensor) -> Tensor:
    try:
        return x.reshape(3, 3)
    except RuntimeError:
        return x.reshape(2, 2)


def test_an_error_that_dynamo_loses_is_missing_with_its_line(
    look: Callable[..., Diagnosed],
) -> None:
    result = look(check, numbers(2))
    diagnosis = result.diagnosis
    assert (diagnosis.condition, diagnosis.stage) == (Condition.MISSING_ERROR, Stage.DYNAMO)
    assert diagnosis.fact == "it returns, and eager execution raises ValueError: too strict"
    assert line_of(result) == 'raise ValueError("too strict")'
    assert diagnosis.is_verified, diagnosis.notes
    assert result.recording.findings[0].rule == "compiled-missing-error"


def test_an_error_that_the_backend_loses_is_missing_with_its_op_and_line(
    look: Callable[..., Diagnosed],
) -> None:
    result = look(look_up, numbers(3, 2), torch.tensor([1, 5]), backend=clamps)
    diagnosis = result.diagnosis
    assert (diagnosis.condition, diagnosis.stage) == (Condition.MISSING_ERROR, Stage.BACKEND)
    assert diagnosis.suspects[0].op == "torch.nn.functional.embedding"
    assert line_of(result) == "return functional.embedding(places, table) * 2"
    assert diagnosis.is_verified, diagnosis.notes


def test_another_error_than_the_functions_is_a_difference(look: Callable[..., Diagnosed]) -> None:
    result = look(look_up, numbers(3, 2), torch.tensor([1, 5]), backend=raises_otherwise)
    diagnosis = result.diagnosis
    assert (diagnosis.condition, diagnosis.stage) == (Condition.DIFFERENT_ERROR, Stage.BACKEND)
    assert diagnosis.fact.startswith(
        "it raises KeyError: 'here', and eager execution raises IndexError:"
    )
    assert line_of(result) == "return functional.embedding(places, table) * 2"
    assert diagnosis.is_verified, diagnosis.notes


def test_a_function_that_fails_either_way_is_refused_and_torch_prints_nothing(
    look: Callable[..., Diagnosed], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CompileError, match=r"look_up fails in eager mode, too \(IndexError"):
        look(look_up, numbers(3, 2), torch.tensor([1, 5]))
    assert capsys.readouterr() == ("", "")


@pytest.mark.skipif(
    torch.__version__ >= (2, 14), reason="dynamo catches errors of its fake tensors since 2.14"
)
def test_an_error_of_the_compiled_function_alone_has_its_line(
    look: Callable[..., Diagnosed],
) -> None:
    result = look(reshape_twice, numbers(2, 2))
    assert (result.condition, result.diagnosis.stage) == (Condition.COMPILE_ERROR, Stage.DYNAMO)
    assert line_of(result) == "return x.reshape(3, 3)"
    assert result.diagnosis.is_verified, result.diagnosis.notes


# ── Faults that need something ───────────────────────────────────────────────────────────────


def net(x: Tensor) -> Tensor:
    y = torch.relu(x.cos() - 0.5)
    return y.sum(0) * x.size(0)


def wrong_with_symbols(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    if any(isinstance(value, torch.SymInt) for value in inputs):
        for node in graph.graph.find_nodes(op="call_function", target=torch.relu):
            node.target = torch.sigmoid
        graph.recompile()
    return graph.forward


@pytest.mark.parametrize("is_marked", [False, True])
def test_a_fault_that_needs_open_sizes_is_traced_to_its_op(
    look: Callable[..., Diagnosed], is_marked: bool
) -> None:
    x = numbers(5, 4)
    if is_marked:
        torch._dynamo.mark_dynamic(x, 0)
    options = {} if is_marked else {"dynamic": True}
    result = look(net, x, backend=wrong_with_symbols, **options)
    diagnosis = result.diagnosis
    assert (diagnosis.condition, diagnosis.stage) == (Condition.WRONG_RESULT, Stage.BACKEND)
    assert line_of(result) == "y = torch.relu(x.cos() - 0.5)"
    assert (diagnosis.is_minimal, diagnosis.is_verified) == (True, True), diagnosis.notes
    assert "dynamic=True" in diagnosis.script


def test_a_fault_that_needs_an_input_that_is_no_leaf_is_traced_to_its_op(
    look: Callable[..., Diagnosed],
) -> None:
    x = numbers(3, 3).requires_grad_() + 1
    result = look(net, x, backend="shardscope_fault_non_leaf")
    diagnosis = result.diagnosis
    assert (diagnosis.condition, diagnosis.stage) == (Condition.COMPILE_ERROR, Stage.BACKEND)
    assert [suspect.op for suspect in diagnosis.suspects] == ["Tensor.cos"]
    assert (diagnosis.is_minimal, diagnosis.is_verified) == (True, True), diagnosis.notes
    assert ".requires_grad_().clone()" in diagnosis.script
    assert look(net, x.detach(), backend="shardscope_fault_non_leaf").condition is Condition.FINE


def two_faults(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
    into = {torch.relu: functional.relu6, torch.sigmoid: torch.tanh}
    for node in graph.graph.nodes:
        node.target = into.get(node.target, node.target)
    graph.recompile()
    return graph.forward


def hides_the_first(x: Tensor) -> Tensor:
    y = torch.relu(x * 20).clamp(max=1)
    return torch.sigmoid(x) + y


def hides_the_second(x: Tensor) -> Tensor:
    y = torch.sigmoid(x)
    return torch.relu(x * 20) + y.round().sin().sign() * 0


@pytest.mark.parametrize(
    ("fn", "op"), [(hides_the_first, "torch.sigmoid"), (hides_the_second, "torch.relu")]
)
def test_of_two_faults_the_one_that_reaches_the_result_is_the_cause(
    look: Callable[..., Diagnosed], fn: Callable[..., Any], op: str
) -> None:
    result = look(fn, numbers(20), backend=two_faults)
    assert [suspect.op for suspect in result.diagnosis.suspects] == [op]
    assert result.diagnosis.is_verified


def relu_into_relu6(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
    for node in graph.graph.find_nodes(op="call_function", target=torch.relu):
        node.target = functional.relu6
    graph.recompile()
    return graph.forward


relu_into_relu6_if_asked = lambda graph, inputs: (  # noqa: E731 - it gets an attribute
    relu_into_relu6(graph, inputs) if relu_into_relu6_if_asked.is_wrong else graph.forward  # type: ignore[attr-defined]
)
relu_into_relu6_if_asked.is_wrong = True  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("backend", [relu_into_relu6, relu_into_relu6_if_asked])
def test_a_fault_before_second_derivatives_is_traced_to_its_op(
    look: Callable[..., Diagnosed], backend: Any
) -> None:
    result = look(lambda x: second_order(torch.relu(x * 20)), numbers(4) * 3, backend=backend)
    assert [suspect.op for suspect in result.diagnosis.suspects] == ["torch.relu"]
    assert result.diagnosis.is_verified, result.diagnosis.notes


def spoil_saved(x: Tensor) -> Tensor:
    y = x.exp()
    y.mul_(2)  # exp's gradient needs it as it was
    return y.sum()


def test_what_eager_execution_cannot_pull_back_is_compared_forward(
    look: Callable[..., Diagnosed],
) -> None:
    x = numbers(3).requires_grad_()
    assert look(spoil_saved, x).condition is Condition.FINE
    result = look(spoil_saved, x, backend="aot_eager")  # which makes backward in forward
    assert (result.condition, result.diagnosis.stage) == (Condition.COMPILE_ERROR, Stage.AOT)
    assert [suspect.op for suspect in result.diagnosis.suspects] == ["Tensor.exp", "Tensor.mul_"]
    assert result.diagnosis.is_verified, result.diagnosis.notes


def check_sum(x: Tensor) -> Tensor:
    assert x.sum() > 1e9, "too small"
    return x


def test_an_assertion_that_fails_either_way_is_the_functions_own(
    look: Callable[..., Diagnosed],
) -> None:
    with pytest.raises(CompileError, match="check_sum fails in eager mode, too"):
        look(check_sum, numbers(3))


# ── Programs that use torch.compile themselves ───────────────────────────────────────────────


def always_raises(graph: fx.GraphModule, _: Any) -> Any:
    raise RuntimeError("this backend always raises")


@torch.compile(backend=always_raises)
def decorated(x: Tensor) -> Tensor:
    return x.sin() + 1


def calls_decorated(x: Tensor) -> Tensor:
    return decorated(x) * 2


def compiled_in_place() -> nn.Module:
    model = nn.Linear(2, 2)
    model.compile(backend=always_raises)
    return model


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: decorated, "decorated"),
        (lambda: calls_decorated, "decorated"),
        (compiled_in_place, "Linear"),
        (lambda: torch.compile(nn.Linear(2, 2), backend=always_raises), "Linear"),
        (lambda: nn.Sequential(torch.compile(nn.ReLU(), backend=always_raises)), "ReLU"),
    ],
    ids=["decorator", "inner function", "compiled in place", "wrapped module", "inner module"],
)
def test_a_torch_compile_of_the_program_itself_is_ignored_with_a_note(
    look: Callable[..., Diagnosed], make: Callable[[], Any], name: str
) -> None:
    result = look(make(), numbers(2))
    assert result.condition is Condition.FINE
    assert result.diagnosis.notes[0] == (
        f"The program itself applies torch.compile to {name}. That backend and its options were "
        "ignored, and eager was examined instead; pass them to diagnose to examine them."
    )
    result = look(make(), numbers(2), backend=always_raises)
    assert result.condition is Condition.COMPILE_ERROR
