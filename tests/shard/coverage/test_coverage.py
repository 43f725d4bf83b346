"""What coverage() finds of any model: its ops at three levels, and where they come from."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from coverage_models import MODELS
from shardscope import Recording, coverage, load, save, simulate
from shardscope.attribution.tensors import empty_like
from shardscope.errors import CoverageError
from shardscope.record import Level, OpCoverage
from shardscope.shard.coverage.dispatch import Dispatcher
from shardscope.shard.coverage.levels import decompose
from shardscope.shard.coverage.model_run import Program, run_model
from shardscope.shard.coverage.torch_summary import inductor_graphs
from small_models import MLP, alone_on_gloo, batch


def ops(recording: Recording, level: str = "exported") -> dict[str, OpCoverage]:
    """The ops of a level by name, without `aten.`"""
    (found,) = [
        level_coverage for level_coverage in recording.coverage if level_coverage.level == level
    ]
    return {op.op.removeprefix("aten."): op for op in found.ops}


def cover(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, OpCoverage]:
    """The ops of the exported level."""
    return ops(coverage(model, *args, levels=["exported"], **kwargs))


def capture(model: nn.Module, *args: Any, level: str = "exported") -> Counter[str]:
    """How often each op is called, at the exported level forwards alone; nothing is judged."""
    device = torch.device("cpu")
    program = Program(model, args, {}, model, lambda tensor: empty_like(tensor, device))
    found = run_model(program, lambda *gap: pytest.fail(str(gap)))
    calls = found.written
    if level != "exported":
        dispatcher = Dispatcher(device=device, is_implicit=False)
        with dispatcher.watching():
            calls = decompose(
                found.called, Level(level), dispatcher, lambda *gap: pytest.fail(str(gap))
            )
    counts: Counter[str] = Counter()
    for call, use in calls.items():
        counts[str(call.op)] += use.num_calls
    return counts


@pytest.mark.parametrize("name", ["llama", "gpt2", "resnet", "vit", "moe"])
def test_the_exported_level_is_what_export_writes_down(name: str) -> None:
    model, args = MODELS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = torch.export.export(model, args).graph
    written = Counter(str(node.target) for node in graph.nodes if "aten" in str(node.target))
    del written["aten._assert_tensor_metadata.default"]  # a guard of export's
    assert capture(model, *args) == written


# What eager runs although nobody wants the result: statistics that are written back, attention
# weights that are averaged for nobody.
DEAD_CODE: dict[str, set[str]] = {
    "llama": set(),
    "gpt2": set(),
    "resnet": {"aten.copy_.default", "aten.empty.memory_format"},
    "vit": {"aten.mean.dim", "aten.view.default"},
    "moe": set(),
}


@pytest.mark.parametrize("name", DEAD_CODE)
def test_the_inductor_level_is_what_aot_autograd_gives_with_its_decompositions(name: str) -> None:
    model, args = MODELS[name]()
    if name == "gpt2":
        model.eval()  # AOT takes dropout apart as a CUDA device would
    named = Counter(
        str(node.target)
        for graph in inductor_graphs(model, args, {})
        for node in graph.graph.nodes
        if node.op == "call_function" and "getitem" not in str(node.target)
    )
    # AOT runs attention again in backward rather than keep its result.
    named["aten._scaled_dot_product_flash_attention_for_cpu.default"] //= 2
    found = capture(model, *args, level="inductor")
    del named["aten.clone.default"], found["aten.clone.default"]  # what AOT makes of no dropout
    assert +(named - found) == {}
    assert set(found - named) <= DEAD_CODE[name]


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_core_aten_has_no_op_that_its_table_decomposes(name: str) -> None:
    model, args = MODELS[name]()
    found = capture(model, *args, level="core_aten")
    table = {str(op) for op in torch.export.default_decompositions()}
    assert found
    assert not set(found) & table


class Where(nn.Module):
    """One op in each direction that belongs to a line of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return torch.sigmoid(y)


def test_forward_and_backward_ops_have_the_module_and_the_line_they_come_from() -> None:
    found = cover(nn.Sequential(Where(), Where()), torch.randn(4, 4))
    assert found["linear.default"].modules == ("0.inner", "1.inner")
    assert [source.text for source in found["linear.default"].sources] == ["y = self.inner(x)"]
    backward = found["sigmoid_backward.default"]
    assert (backward.num_forward, backward.num_backward) == (0, 2)
    assert backward.modules == ("1", "0")
    assert [source.text for source in backward.sources] == ["return torch.sigmoid(y)"]
    assert set(found["mm.default"].modules) == {"0.inner", "1.inner"}


def test_what_checkpointing_runs_again_is_backward_and_keeps_its_place() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Where()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    found = ops(coverage(Checkpointed(), torch.randn(4, 4), levels=["inductor"]), "inductor")
    assert (found["sigmoid.default"].num_forward, found["sigmoid.default"].num_backward) == (1, 1)
    assert found["sigmoid.default"].modules == ("block",)


def test_flops_are_those_of_torchs_counter_and_a_composite_has_those_of_its_parts() -> None:
    found = cover(nn.Linear(8, 16), torch.randn(4, 8))
    assert found["linear.default"].flops == 2 * 4 * 8 * 16
    assert found["mm.default"].flops == 2 * 4 * 8 * 16  # only the weight has a gradient


class Tied(nn.Module):
    """An embedding whose weight is also the output's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.out = nn.Linear(8, 16, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embed(tokens))


def test_tied_weights_are_one_tensor_and_stay_tied() -> None:
    model = Tied()
    found = cover(model, torch.zeros(2, 4, dtype=torch.long))
    assert model.out.weight is model.embed.weight
    assert found["add.Tensor"].num_backward == 1  # the gradients of its two uses are added up
    assert found["linear.default"].modules == ("out",)


@dataclass
class Answer:
    """What some models return."""

    value: Tensor
    more: tuple[Tensor, dict[str, Tensor]]


class Answering(nn.Module):
    """Three outputs, each with a gradient and an op of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, *, scale: float = 1.0, extra: Tensor | None = None) -> Answer:
        y = self.weight * x * scale
        return Answer(torch.sin(y), (torch.exp(y), {"t": torch.tanh(y), "ids": x.long()}))


def test_every_output_with_a_gradient_is_a_loss_whatever_it_is_wrapped_in() -> None:
    found = cover(Answering(), torch.ones(4), scale=2.0, extra=torch.ones(1))
    assert found["cos.default"].num_backward == 1  # of sin
    assert found["tanh_backward.default"].num_backward == 1


def test_a_loss_of_the_users_own_is_where_backward_begins() -> None:
    found = cover(Answering(), torch.ones(4), loss=lambda answer: answer.more[0].mean())
    assert found["mean.default"].num_forward == 1
    assert "tanh_backward.default" not in found


def test_a_model_without_gradients_has_no_backward() -> None:
    found = cover(Answering().requires_grad_(False), torch.ones(4))
    assert sum(entry.num_backward for entry in found.values()) == 0


class Choosing(nn.Module):
    """What it does depends on the values it is given, and how often on their number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for row in x[x.sum(-1) > 0].nonzero().tolist()[:2]:
            x = x + row[0]
        return self.linear(x).relu() if x.sum().item() > 0 else self.linear(x).tanh()


def test_a_model_that_reads_values_runs_on_its_data() -> None:
    found = cover(Choosing(), torch.ones(2, 4))
    assert found["add.Tensor"].num_forward == 2
    assert "relu.default" in found
    assert "tanh.default" not in found
    assert "tanh.default" in cover(Choosing(), -torch.ones(2, 4))


def test_a_model_on_meta_that_reads_values_is_refused_in_one_sentence() -> None:
    with torch.device("meta"):
        model, x = Choosing(), torch.ones(2, 4)
    with pytest.raises(CoverageError, match="the model reads values of tensors without data"):
        coverage(model, x)


def test_a_model_on_meta_is_covered_like_one_with_data() -> None:
    with torch.device("meta"):
        on_meta = Tied(), torch.zeros(2, 4, dtype=torch.long)
    assert cover(*on_meta) == cover(Tied(), torch.zeros(2, 4, dtype=torch.long))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_shows_the_ops_within_and_clean_names() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0].compile()
    assert cover(torch.compile(model), batch(2)[:, :4])["linear.default"].modules == ("0",)


def test_eval_and_train_differ_as_the_model_does() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    assert capture(model, torch.ones(2, 4), level="core_aten")["aten.bernoulli.p"] == 1
    model.eval()
    assert capture(model, torch.ones(2, 4), level="core_aten")["aten.bernoulli.p"] == 0


def test_a_forward_that_needs_autograd_is_covered_with_a_gap() -> None:
    class Force(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            (slope,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
            return slope

    recording = coverage(Force(), torch.ones(4, requires_grad=True), levels=["exported"])
    assert ops(recording)["pow.Tensor_Scalar"].num_forward
    assert [gap.place for gap in recording.gaps] == ["exported"]
    assert "does not run without autograd" in recording.gaps[0].fact


def test_the_recording_is_saved_and_loaded_like_any_other(tmp_path: Any) -> None:
    recording = coverage(MLP(), batch(), mesh={"dp": 2, "tp": 2})
    assert load(save(recording, tmp_path / "coverage.json.gz")) == recording
    assert [(axis.name, axis.size) for axis in recording.coverage[0].axes] == [("dp", 2), ("tp", 2)]
    assert recording.run.world_size == 4


def test_each_distinct_call_is_dispatched_once_however_many_layers_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []
    dispatch = Dispatcher.dispatch

    def counted(self: Dispatcher, call: Any) -> Any:
        counts[-1] += 1
        return dispatch(self, call)

    monkeypatch.setattr(Dispatcher, "dispatch", counted)
    for num_layers in (2, 6):
        counts.append(0)
        coverage(nn.Sequential(*(MLP() for _ in range(num_layers))), batch())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: coverage(torch.ones(2)), "got Tensor instead of a module"),
        (lambda: coverage(nn.LazyLinear(4), batch()), "parameters that have no shape yet"),
        (
            lambda: coverage(MLP(), batch(), levels=["fx"]),
            "The levels are exported, core_aten, ind",
        ),
        (
            lambda: coverage(MLP(), torch.ones(2, 3)),
            "the model's forward raised RuntimeError: a and b must",
        ),
        (
            lambda: coverage(MLP(), batch(), plan={"up.wait": Shard(0)}),
            "but the model has no such parameter",
        ),
        (lambda: coverage(MLP(), batch(), plan={"up.*": []}), "the mesh has 1 axis"),
    ],
)
def test_what_cannot_be_covered_is_refused_with_fact_and_remedy(
    call: Callable[[], object], sentence: str
) -> None:
    with pytest.raises(CoverageError, match=sentence):
        call()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.qkv = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.qkv(self.norm(x)).unflatten(-1, (4, 16)).transpose(1, 2)
        return functional.scaled_dot_product_attention(x, x, x)


def test_ops_in_a_simulated_cuda_world_are_those_of_cuda_and_are_computed_on_the_cpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("with a GPU the device is not simulated")
    with simulate({"tp": 2}, device="cuda"):
        with torch.device("meta"):
            model, x = Attention(), torch.empty(2, 8, 64)
        recording = coverage(model, x, levels=["exported"])
    assert recording.run.device_type == "cuda"
    verdicts = {name: str(op.verdict) for name, op in ops(recording).items()}
    expected = {
        "rms_norm.default": "decomposed",
        "_fused_rms_norm_backward.default": "sharded",
        "scaled_dot_product_attention.default": "decomposed",
        "_scaled_dot_product_efficient_attention_backward.default": "sharded",
    }
    assert {name: verdicts[name] for name in expected} == expected
    facts = {gap.place.removeprefix("aten."): gap.fact for gap in recording.gaps}
    assert set(facts) == set(expected)  # the values of all others were compared
    assert all("no kernel for the CPU, on which values are" in fact for fact in facts.values())


def test_a_real_process_group_is_refused() -> None:
    with alone_on_gloo(), pytest.raises(CoverageError, match="real ranks"):
        coverage(MLP(), batch())


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ({"up.weight": Shard(5)}, r"gives 'up.weight' Shard\(dim=5\), but up.weight has 2 dims"),
        ({"up.weight": None}, "gives 'up.weight' a NoneType, which is not a placement"),
        ({"up": "colwise"}, "gives 'up' a str, which is not a placement"),
        ({"up.weight": [Shard(0), Shard(1)]}, "2 placements, but the mesh has 1 axis"),
        (42, "got int for a plan"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused_with_the_pattern(
    plan: Any, sentence: str
) -> None:
    with pytest.raises(CoverageError, match=sentence):
        coverage(MLP(), batch(), plan=plan)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_a_script_is_refused_and_left_alone() -> None:
    script = torch.jit.script(nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(CoverageError, match="got a TorchScript model"):
        coverage(script, batch())
    assert all(type(parameter) is nn.Parameter for parameter in script.parameters())


@pytest.mark.parametrize("levels", [(), ["deep"], "deep"])
def test_levels_that_are_none_are_refused(levels: Any) -> None:
    with pytest.raises(CoverageError, match="The levels are exported, core_aten, inductor"):
        coverage(MLP(), batch(), levels=levels)


def test_a_mesh_of_one_rank_is_refused() -> None:
    with pytest.raises(CoverageError, match="a mesh of one rank"):
        coverage(MLP(), batch(), mesh={"tp": 1})


def test_a_loss_that_fails_is_named() -> None:
    with pytest.raises(CoverageError, match=r"^loss raised IndexError: too many"):
        coverage(MLP(), batch(), loss=lambda output: output["loss"])


def test_an_output_that_backward_cannot_begin_at_is_a_gap() -> None:
    class Sealed:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    class Model(MLP):
        def forward(self, x: Tensor) -> Any:
            return Sealed(super().forward(x))

    (gap,) = coverage(Model(), batch(), levels="exported").gaps
    assert gap.fact == "nothing in the output, a Sealed, has a gradient: give loss="


def test_attention_in_eval_is_written_as_export_writes_it() -> None:
    model = nn.TransformerEncoderLayer(16, 4, batch_first=True, dropout=0.0).eval()
    is_enabled = torch.backends.mha.get_fastpath_enabled()
    ops = capture(model, torch.ones(2, 3, 16))
    assert not any("_transformer_encoder_layer_fwd" in op for op in ops)
    assert ops["aten.linear.default"] == 4
    assert torch.backends.mha.get_fastpath_enabled() == is_enabled
