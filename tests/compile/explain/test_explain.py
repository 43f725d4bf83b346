"""What explanations say: reasons, fixes, guards, ops, times, findings."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shardscope import explain, explaining, load, save
from shardscope._torch.dynamo import read_durations
from shardscope.compile.explain.assemble import measure_stages
from shardscope.errors import CompileError
from shardscope.record import Explanation, GraphEnd, OpKind, Recompile


def explain_one(function: Callable[..., Any], *args: Any) -> Explanation:
    return explain(function, *args).explanations[0]


def recompile(function: Any, *calls: tuple[Any, ...]) -> Recompile:
    """Why the last of the calls had it compiled again."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager")
    with explaining() as explained:
        for arguments in calls:
            compiled(*arguments)
    return explained.explanation.recompiles[-1]


@torch.compiler.disable
def left_out(x: torch.Tensor) -> torch.Tensor:
    return x


def branching(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("function", "break_id", "fix"),
    [
        (lambda x: x * x.sum().item(), "GB0124", "keep the value a tensor"),
        (branching, "GB0170", "torch.where"),
        (lambda x: (print(end=""), x + 1)[1], "GB0059", "print outside"),
        (lambda x: (torch._dynamo.graph_break(), x + 1)[1], "GB0025", "remove the call"),
        (lambda x: left_out(x) + 1, "GB0098", "remove @torch.compiler.disable"),
        (lambda x: x[x > 0] + 1, "GB0036", "torch.where"),
    ],
)
def test_a_break_has_torchs_number_and_hints_and_an_example_of_a_fix(
    function: Any, break_id: str, fix: str
) -> None:
    (site,) = explain_one(function, torch.ones(4)).break_sites
    assert site.break_id == break_id
    assert fix in site.fix
    assert site.explanation
    assert site.hints
    assert "0x" not in site.explanation + " ".join(site.hints)
    assert site.source.file.endswith("test_explain.py")
    assert site.source.text


def test_a_break_in_the_standard_library_is_charged_to_the_line_that_called_it() -> None:
    import logging

    def log(x: torch.Tensor) -> torch.Tensor:
        logging.getLogger("quiet").debug("x")
        return x + 1

    sources = {site.source.text for site in explain_one(log, torch.ones(4)).break_sites}
    assert sources == {'logging.getLogger("quiet").debug("x")'}


def test_breaks_within_torch_are_charged_once_to_the_lines_that_call_it() -> None:
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = layer(x).sum()
        loss.backward()
        optimizer.step()
        return loss  # type: ignore[no-any-return]

    weight = layer.weight.detach().clone()
    told = explain_one(train, torch.ones(2, 4))
    sites = [(site.source.text, site.num_events) for site in told.break_sites]
    assert sites == [("loss.backward()", 1), ("optimizer.step()", 1)]
    assert "torch breaks the graph here itself" in told.break_sites[1].fix
    assert torch.equal(layer.weight, weight)
    assert layer.weight.grad is None


def test_a_function_at_its_recompile_limit_is_explained_as_any_other() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(choose, backend="eager")
    for number in range(10):
        compiled(X, str(number))
    told = explain_one(choose, X, "a")
    assert (told.num_graphs, told.num_skipped_frames) == (1, 0)


def test_bookkeeping_of_functorch_and_autocast_is_not_an_op() -> None:
    def cast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x.T

    assert [op.op for op in explain_one(cast, X).graphs[0].ops][1:3] == [
        "Tensor.T",
        "operator.matmul",
    ]
    assert explain_one(cast, X).num_ops == 2
    assert explain_one(torch.vmap(torch.sin), X).num_ops == 1


class Attributed(nn.Module):
    """Computes with what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = 1.5
        self.parts = [1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale + len(self.parts)  # type: ignore[no-any-return]


X = torch.ones(4, 3)


def double(x: Any) -> Any:
    return x * 2


def choose(x: Any, n: Any) -> Any:
    return x + 1 if n == "a" else x - 1


def optional(x: Any, n: Any) -> Any:
    return x + 1 if n is None else x - 1


def add_all(x: Any, n: Any) -> Any:
    return x + sum(n)


def multiply(x: Any, n: Any) -> Any:
    return x * n


@pytest.mark.parametrize(
    ("function", "calls", "description"),
    [
        (double, ((X,), (torch.ones(5, 3),)), "tensor x: size 0 is 5, was 4"),
        (double, ((X,), (torch.ones(4),)), "tensor x: has 1 dims, had 2"),
        (double, ((X,), (X.double(),)), "tensor x: dtype is float64, was float32"),
        (double, ((X,), (torch.ones(3, 4).t(),)), "tensor x: stride 0 is 1, was 3"),
        (
            double,
            ((X,), (torch.ones(4, 3, requires_grad=True),)),
            "tensor x: requires a gradient, did not before",
        ),
        (multiply, ((X, X + 1), (X, 2)), "n: is of type int, was a tensor"),
        (multiply, ((X, 2), (X, 3)), "n is 3, was 2"),
        (multiply, ((X, 2), (X, 3), (X, 1.5)), "n: is of type float, was int"),
        (choose, ((X, "a"), (X, "b")), "n is 'b', was 'a'"),
        (optional, ((X, None), (X, 3)), "n is 3, was None"),
        (add_all, ((X, [1]), (X, [1, 2])), "len(n) is 2, was 1"),
        (lambda x, n: x + n.get("a", 0), ((X, {}), (X, {"a": 1})), "n: has the key 'a', had not"),
        (lambda x, n: x + n, ((X, X), (X, X + 1)), "x and n were the same object, and are not now"),
        (lambda x, n: n(x), ((X, torch.sin), (X, torch.cos)), "n: is a different object"),
    ],
)
def test_a_failed_guard_is_described_in_words(function: Any, calls: Any, description: str) -> None:
    found = recompile(function, *calls)
    assert found.description.startswith(description)
    assert found.guard
    assert found.number == len(calls) - 1


def test_a_changed_attribute_of_a_module_is_named_with_both_values() -> None:
    model = Attributed()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    x = torch.ones(2, 4)
    with explaining() as explained:
        compiled(x)
        model.scale = 2.5
        compiled(x)
        model.parts.append(2)
        compiled(x)
        with torch.no_grad():
            compiled(x)
    told = explained.explanation
    assert [one.description for one in told.recompiles] == [
        "self.scale is 2.5, was 1.5",
        "len(self.parts) is 2, was 1",
        "grad_mode was changed outside the function",
    ]
    assert [one.number for one in told.recompiles] == [1, 2, 3]
    assert [one.is_recompile for one in told.graphs] == [False, True, True, True]
    assert [one.rule for one in explained.recording.findings] == ["recompiles"]


def test_the_recompile_limit_is_an_error() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, name: x * 2 if name else x, backend="eager")
    with explaining() as explained:
        for number in range(10):
            compiled(X, str(number))
    (limit,) = [one for one in explained.recording.findings if one.rule == "recompile-limit"]
    assert limit.severity == "error"
    assert explained.explanation.skipped_frames[0].reason.startswith("it was recompiled too often")


def test_modules_that_a_function_calls_have_the_names_it_has_for_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4))

    def with_loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()  # type: ignore[no-any-return]

    (graph,) = explain_one(with_loss, torch.ones(2, 4)).graphs
    assert [op.module for op in graph.ops] == ["model.0", ""]


def test_ops_have_readable_names_modules_lines_and_results() -> None:
    model = nn.Sequential(Attributed(), nn.ReLU())
    (graph,) = explain_one(model, torch.ones(2, 4)).graphs
    assert [(op.op, op.module, op.result) for op in graph.ops] == [
        ("torch.nn.functional.linear", "0.layer", "float32[2, 4]"),
        ("operator.mul", "0", "float32[2, 4]"),
        ("operator.add", "0", "float32[2, 4]"),
        ("torch.nn.functional.relu", "1", "float32[2, 4]"),
    ]
    lines = {op.source.text for op in graph.ops if op.source is not None and op.module == "0"}
    assert lines == {
        "return self.layer(x) * self.scale + len(self.parts)  # type: ignore[no-any-return]"
    }
    assert (graph.num_inputs, graph.num_outputs, graph.end) == (3, 1, GraphEnd.RETURN)


def test_methods_builtins_and_overloads_are_distinguished() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.sin.default(torch.relu(x).cos() + 1)  # type: ignore[no-any-return]

    (graph,) = explain_one(function, X).graphs
    assert [(op.kind, op.op) for op in graph.ops] == [
        (OpKind.FUNCTION, "torch.relu"),
        (OpKind.METHOD, "Tensor.cos"),
        (OpKind.FUNCTION, "operator.add"),
        (OpKind.FUNCTION, "aten.sin.default"),
    ]


def test_what_is_inside_a_higher_order_op_says_so() -> None:
    def choose(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))  # type: ignore[no-any-return]

    (graph,) = explain_one(choose, X).graphs
    inside = {op.op: op.within for op in graph.ops if op.within}
    assert inside == {"Tensor.sin": "cond.cond_true_0", "Tensor.cos": "cond.cond_false_0"}


def test_arguments_of_any_name_are_the_functions() -> None:
    def function(x: torch.Tensor, *, guards: int, target: int, fn: int) -> torch.Tensor:
        return x * guards * target * fn

    recording = explain(function, X, guards=2, target=3, fn=4)
    assert recording.explanations[0].num_ops == 3


def test_any_backend_is_explained_and_its_stages_are_timed() -> None:
    torch._dynamo.reset()
    with explaining(target="mine") as explained:
        x = X.clone().requires_grad_()
        torch.compile(lambda x: x.sin() + 1, backend="aot_eager")(x).sum().backward()
    told = explained.explanation
    assert (told.target, told.num_graphs, told.num_ops) == ("mine", 1, 2)
    stages = ["other", "tracing", "guards", "backend", "aot", "backward"]
    assert [one.stage for one in told.stages] == stages
    assert min(one.total_ns for one in told.stages) > 0, told.stages


def test_compiling_backward_when_it_runs_is_a_stage_and_takes_nothing_off_another() -> None:
    before = dict.fromkeys(read_durations(), (0, 0.0))
    after = before | {
        "frames": (1, 9.0),
        "backend": (1, 8.0),
        "aot": (1, 7.0),
        "inductor": (2, 8.5),
        "backward": (1, 3.0),
        "inductor in backward": (1, 2.5),
    }
    spent = {one.stage: one.total_ns for one in measure_stages(before, after)}
    seconds = {stage: ns and ns / 1e9 for stage, ns in spent.items()}
    assert seconds == {"other": 1, "backend": 1, "aot": 1, "inductor": 8.5, "backward": 0.5}
    # A stage that took less than what it is supposed to have called says nothing of itself.
    after |= {"backward": (0, 0.0), "inductor in backward": (0, 0.0)}
    assert {one.stage: one.total_ns for one in measure_stages(before, after)}["aot"] is None


def test_two_models_at_once_are_explained_together() -> None:
    torch._dynamo.reset()
    with explaining() as outer, explaining() as inner:
        torch.compile(lambda x: x + 1, backend="eager")(X)
        torch.compile(lambda x: x * 2, backend="eager")(X)
    assert outer.explanation.num_graphs == inner.explanation.num_graphs == 2


def test_a_compiled_model_is_explained_from_scratch() -> None:
    model = torch.compile(nn.Linear(3, 3), backend="eager")
    model(X)
    assert explain_one(model, X).num_graphs == 1


def test_guards_are_there_if_asked_without_addresses() -> None:
    torch._dynamo.reset()
    with explaining(guards=True) as explained:
        torch.compile(lambda x: x + 1, backend="eager")(X)
    (frame,) = explained.explanation.guards
    assert any(guard.startswith("check_tensor(x, ") for guard in frame.guards)
    assert explain_one(lambda x: x + 1, X).guards == ()


def test_an_exception_ends_the_block_and_is_in_the_explanation() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    with pytest.raises(ValueError, match="mine"), explaining() as explained:
        raise ValueError("mine", compiled(X))
    assert explained.explanation.num_graphs == 1
    assert explained.explanation.failure.startswith("ValueError: ('mine', tensor(")


def test_a_break_that_is_forbidden_is_a_site_and_no_skipped_function() -> None:
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported), explaining() as explained:
        torch.compile(lambda x: print(x), backend="eager", fullgraph=True)(X)
    told = explained.explanation
    assert (told.num_break_sites, told.num_skipped_frames) == (1, 0)


def test_nothing_is_to_be_read_before_the_block_ends() -> None:
    with explaining() as explained, pytest.raises(CompileError, match="after the block"):
        _ = explained.explanation


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(CompileError, match="got int, which cannot be called"):
        explain(3)  # type: ignore[arg-type]


def test_a_model_without_shapes_yet_is_refused() -> None:
    with pytest.raises(CompileError, match="Call the model once before"):
        explain(nn.LazyLinear(4), X)


def test_explain_says_so_if_the_compiler_is_off() -> None:
    with torch._dynamo.config.patch(disable=True), pytest.raises(CompileError, match="off"):
        explain(lambda x: x, X)


def test_a_recording_with_an_explanation_is_saved_and_loaded(tmp_path: Any) -> None:
    recording = explain(lambda x: x * x.sum().item(), X)
    assert load(save(recording, tmp_path / "run.json")) == recording


@pytest.mark.parametrize(
    "inputs", [(torch.ones(0, 3),), (torch.ones(2, 3, device="meta"),)], ids=["empty", "meta"]
)
def test_odd_inputs_are_explained(inputs: tuple[torch.Tensor, ...]) -> None:
    assert explain_one(lambda x: x * 2 + 1, *inputs).num_ops == 2


@contextlib.contextmanager
def _while_writing() -> Iterator[torch.Tensor]:
    yield torch.ones(1) + 1


def test_a_stream_that_a_logger_has_replaced_is_not_part_of_the_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = sys.stdout.write

    def write_and_log(text: str) -> int:
        with _while_writing():
            return write(text)

    monkeypatch.setattr(sys.stdout, "write", write_and_log)

    def say(x: torch.Tensor) -> torch.Tensor:
        print("hello")
        return x.sin()

    explanation = explain_one(say, torch.ones(4))
    assert [graph.function.rpartition(".")[2] for graph in explanation.graphs] == ["say"]
    assert explanation.skipped_frames == ()
    assert len(explanation.break_sites) == 1
