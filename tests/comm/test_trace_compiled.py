"""Compiled graphs stay compiled, and each collective they issue is counted once per run."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

from shardscope import World, simulate, trace
from shardscope.record import CollectiveKind, Compiled, Phase
from small_models import MLP, Net, batch, everyone, facts, shard_net, split_mlp
from warm_python import run_python

K = CollectiveKind
FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
BACKENDS = ["eager", "aot_eager", "inductor"]

# Importing inductor sets this off, wherever it is imported first.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script.*` is deprecated")

each_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture
def world() -> Iterator[World]:
    torch._dynamo.reset()
    with simulate({"dp": 4}) as world:
        yield world
    torch._dynamo.reset()


class Scaled(nn.Module):
    """One all-reduce of 128 bytes between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = funcol.all_reduce(self.first(x), "sum", everyone())
        return self.second(x)


def compile_counted(model: nn.Module, backend: str) -> tuple[nn.Module, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, backend=counter, fullgraph=True), counter


@each_backend
def test_graph_compiled_before_the_trace_is_counted_once_per_run(
    world: World, backend: str
) -> None:
    model = Scaled()
    compiled, counter = compile_counted(model, backend)
    with torch.no_grad():
        expected = compiled(batch())
        with trace(model) as t:
            for _ in range(3):
                assert torch.equal(compiled(batch()), expected)
        compiled(batch())
    assert counter.frame_count == 1
    assert facts(t, "kind", "input_bytes", "phase") == [(K.ALL_REDUCE, 128, FORWARD)] * 3
    assert t.recording.gaps == ()


@each_backend
def test_graph_compiled_inside_the_trace_is_counted_once_per_run(
    world: World, backend: str
) -> None:
    model = Scaled()
    compiled, counter = compile_counted(model, backend)
    with torch.no_grad():
        with trace(model) as t:
            for _ in range(3):
                compiled(batch())
        compiled(batch())
    assert counter.frame_count == 1
    assert facts(t, "kind", "input_bytes", "phase") == [(K.ALL_REDUCE, 128, FORWARD)] * 3


@each_backend
@pytest.mark.parametrize("is_compiled_before", [True, False])
def test_compiled_backward_is_counted_once_per_run(
    world: World, backend: str, is_compiled_before: bool
) -> None:
    model = split_mlp(MLP(), world.mesh)
    compiled, counter = compile_counted(model, backend)
    x = batch().requires_grad_()
    if is_compiled_before:
        compiled(x).sum().backward()
    with trace(model) as t:
        for _ in range(2):
            compiled(x).sum().backward()
    assert counter.frame_count == 1
    assert (
        facts(t, "kind", "phase", "axis", "input_bytes")
        == [
            (K.ALL_REDUCE, FORWARD, "dp", 128),
            (K.ALL_REDUCE, BACKWARD, "dp", 128),
        ]
        * 2
    )
    assert {owner for (owner,) in facts(t, "owner")} == {""}  # what was compiled
    assert t.recording.gaps == ()


@each_backend
def test_results_are_the_same_with_and_without(world: World, backend: str) -> None:
    results = []
    for is_traced in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Scaled()
        x = batch().requires_grad_()
        compiled, _ = compile_counted(model, backend)
        with trace(model) if is_traced else torch.enable_grad():
            loss = compiled(x).square().sum()
        results.append(loss.item())
    assert results[0] == results[1]


def test_graph_is_the_cause(world: World) -> None:
    model = Scaled()
    compiled, _ = compile_counted(model, "eager")
    with torch.no_grad(), trace(model) as t:
        compiled(batch())
    (call,) = t.recording.collectives
    assert isinstance(call.cause, Compiled)
    assert call.owner == ""
    # The compiler's code stands where the function begins.
    assert call.source.function == "Scaled.forward"
    assert call.source.text == "def forward(self, x: torch.Tensor) -> torch.Tensor:"


def test_layers_compiled_one_by_one_own_their_collectives(world: World) -> None:
    net = Net(block=Scaled)
    for layer in net.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    with torch.no_grad(), trace(net) as t:
        net(batch())
        net(batch())
    assert (
        facts(t, "kind", "owner")
        == [
            (K.ALL_REDUCE, "layers.0"),
            (K.ALL_REDUCE, "layers.1"),
        ]
        * 2
    )


# torch.compile itself sets this off where it looks at a hooked input that is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_backward_of_compiled_layers_belongs_to_them(world: World, backend: str) -> None:
    net = split_mlp(Net(block=MLP), world.mesh)
    for layer in net.layers:
        layer.compile(backend=backend, fullgraph=True)
    with trace(net) as t:
        net(batch()).sum().backward()
    assert facts(t, "phase", "owner", "cause") == [
        (FORWARD, "layers.0", Compiled(graph="forward")),
        (FORWARD, "layers.1", Compiled(graph="forward")),
        (BACKWARD, "layers.1", Compiled(graph="backward")),
        (BACKWARD, "layers.0", Compiled(graph="backward")),
    ]


def test_nothing_is_recompiled_by_entering_leaving_or_nesting(world: World) -> None:
    model = Scaled()
    compiled, counter = compile_counted(model, "eager")
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        compiled(batch())
        for _ in range(2):
            with trace(model):
                compiled(batch())
                with trace() as inner:
                    compiled(batch())
            compiled(batch())
    assert counter.frame_count == 1
    assert len(inner.recording.collectives) == 1


def test_graph_is_the_same_inside_the_trace(world: World) -> None:
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph.code)
        return graph

    for is_traced in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(Scaled(), backend=keep, fullgraph=True)
        with trace() if is_traced else torch.enable_grad():
            compiled(batch())
    assert graphs[0] == graphs[1]
    assert "all_reduce" in graphs[0]


def test_graph_breaks_are_the_programs_own(world: World) -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Scaled()
            self.second = Scaled()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    counts = []
    for is_traced in (False, True):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        model = Breaks()
        compiled = torch.compile(model, backend=counter)
        with trace(model) if is_traced else torch.enable_grad() as t, torch.no_grad():
            compiled(batch())
            compiled(batch())
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] == 2
    assert len(t.recording.collectives) == 4


def test_eager_collective_between_graphs_is_seen(world: World) -> None:
    barrier = torch._dynamo.disable(dist.barrier)

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        barrier()
        return x + 1

    compiled = torch.compile(step, backend="eager")
    with trace() as t:
        compiled(batch())
        compiled(batch())
    assert [kind for (kind,) in facts(t, "kind")] == [K.BARRIER] * 2


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_c10d_calls_that_the_compiler_rewrites_are_counted_once(world: World, backend: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        dist.all_reduce(x)
        return x + 1

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    with trace() as t:
        for _ in range(3):
            compiled(batch())
    assert facts(t, "kind", "input_bytes", "reduce_op") == [(K.ALL_REDUCE, 128, "sum")] * 3


# dynamo reads the gradients of activations (torch 2.14 and newer), which would be an error of its.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_fully_sharded_compiled_blocks_own_their_collectives(world: World) -> None:
    net = Net(block=lambda: nn.Linear(8, 8))
    for layer in net.layers:
        layer.compile(backend="aot_eager")
    shard_net(net, world.mesh)
    with trace(net) as t:
        net(batch()).sum().backward()
    collectives = facts(t, "phase", "kind", "owner")
    assert [o for phase, kind, o in collectives if (phase, kind) == (FORWARD, K.ALL_GATHER)] == [
        "",
        "layers.0",
        "layers.1",
    ]
    assert [o for _, kind, o in collectives if kind == K.REDUCE_SCATTER] == [
        "layers.1",
        "layers.0",
        "",
    ]


def test_exporting_a_model_counts_nothing(world: World) -> None:
    model = Scaled()
    with torch.no_grad(), trace(model) as t:
        program = torch.export.export(model, (batch(),))
    assert t.recording.collectives == ()
    assert any("all_reduce" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize(("tracing_mode", "num_issued"), [("fake", 0), ("real", 1)])
def test_tracing_a_graph_by_hand_counts_what_it_really_issues(
    world: World, tracing_mode: str, num_issued: int
) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x * 2, "sum", everyone()) + 1

    with trace() as t:
        graph = make_fx(step, tracing_mode=tracing_mode)(batch())
        assert len(t.recording.collectives) == num_issued
        graph(batch())
    assert [kind for (kind,) in facts(t, "kind")] == [K.ALL_REDUCE] * (num_issued + 1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_function_is_no_module(world: World, backend: str) -> None:
    @torch.compile(backend=backend)
    def scaled_sum(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x * 2, "sum", everyone()) + 1

    model = nn.Linear(8, 8)
    with trace(model) as t:
        scaled_sum(batch())
    assert facts(t, "phase", "owner", "trigger") == [(Phase.FORWARD, None, None)]
    assert [module.name for module in t.recording.modules] == [""]


@each_backend
def test_collectives_of_a_compiled_function_have_a_phase_and_a_gap_for_their_module(
    world: World, backend: str
) -> None:
    model = Scaled()

    @torch.compile(backend=backend)
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    with trace(model) as t:
        step(model, batch())
        step(model, batch())
    assert facts(t, "phase", "owner", "cause") == [(FORWARD, None, Compiled(graph="forward"))] * 2
    (gap,) = t.recording.gaps
    assert gap.place == "compiled function"
    assert re.match(r"its collectives have no module \(.*test_trace_compiled.py:\d+\): ", gap.fact)


def test_backward_of_a_compiled_function_adds_no_second_gap(world: World) -> None:
    model = split_mlp(MLP(), world.mesh)
    step = torch.compile(lambda x: model(x).sum(), backend="aot_eager")
    with trace(model) as t:
        step(batch().requires_grad_()).backward()
    assert set(facts(t, "phase", "cause")) == {
        (FORWARD, Compiled(graph="forward")),
        (BACKWARD, Compiled(graph="backward")),
    }
    assert [gap.place for gap in t.recording.gaps] == ["compiled function"]


def test_compiled_backward_is_backward(world: World) -> None:
    model = nn.Linear(8, 8)
    model.weight.register_hook(lambda grad: funcol.all_reduce(grad, "sum", everyone()))
    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        trace(model) as t,
    ):
        torch.compile(lambda: model(batch()).sum().backward(), backend="eager")()
    assert {phase for (phase,) in facts(t, "phase")} == {Phase.BACKWARD}
    assert [module.name for module in t.recording.modules] == [""]


def test_compiled_code_is_known_wherever_it_is_kept(tmp_path: Path) -> None:
    program = """
        import torch
        import torch.distributed as dist
        import torch._inductor.config as inductor
        from shardscope import simulate, trace

        # Or an empty cache has g++ try sets of instructions and prepare headers, for seconds.
        inductor.cpp.vec_isa_ok = inductor.cpp_cache_precompile_headers = False

        def reduce(x):
            y = x + 1
            dist.all_reduce(y)
            return y

        with simulate({"dp": 2}), trace() as t:
            torch.compile(reduce)(torch.ones(4))
            reduce(torch.ones(4))
        print([(c.cause.__class__.__name__, c.source.function) for c in t.recording.collectives])
    """
    folder = tmp_path / "torchinductor_of_mine"
    folder.mkdir()
    (folder / "program.py").write_text(textwrap.dedent(program))
    ran = run_python(
        folder / "program.py",
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kept")},
        timeout_s=240,
    )
    assert ran.stdout.strip() == "[('Compiled', 'reduce'), ('Call', 'reduce')]", ran.stderr
