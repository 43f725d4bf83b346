"""Plans in the form that transformers gives its models, without transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from shardscope.errors import PlanError
from shardscope.parallel import Colwise, ModuleOutput, Partial, Plan, Replicate, Rowwise, Shard
from shardscope.parallel.plan.program_index import index_model
from shardscope.parallel.plan.resolve import resolve

BASE = {
    "embed_tokens": "embedding_rowwise",
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.experts.down_proj": "local_rowwise",
    "layers.*.mlp.experts": "gather",
    "layers.*.input_layernorm": "replicate",
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8, bias=False)
        self.q_norm = nn.RMSNorm(8)
        self.o_proj = nn.Linear(8, 8, bias=False)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.input_layernorm = nn.RMSNorm(8)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))


class ForCausalLM(nn.Module):
    base_model_prefix = "model"
    _tp_plan: dict[str, str] = {"lm_head": "colwise_rep"}  # noqa: RUF012 - as transformers has it

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(base_model_tp_plan=BASE)
        self.model = Base()
        self.lm_head = nn.Linear(8, 16, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight


FOR_MODEL = Plan(
    {
        "model.embed_tokens": Rowwise(),
        "model.layers.*.self_attn.q_proj": Colwise(),
        "model.layers.*.self_attn.o_proj": Rowwise(),
        "lm_head": Colwise(output=Replicate()),
    }
)


def test_a_models_plan_is_for_the_modules_that_it_has_under_their_names() -> None:
    assert Plan.from_transformers(ForCausalLM()) == FOR_MODEL


def test_a_plan_that_already_has_the_models_names_is_taken_once() -> None:
    model = ForCausalLM()
    model._tp_plan = {
        "model.layers.*.self_attn.o_proj": "rowwise",
        **{f"model.{key}": style for key, style in BASE.items()},
        "lm_head": "colwise_rep",
    }
    assert set(Plan.from_transformers(model).entries) == set(FOR_MODEL.entries)


def test_a_models_plan_fits_the_model() -> None:
    model = ForCausalLM()
    resolved = resolve(Plan.from_transformers(model), index_model(model), {"tp": 2})
    assert resolved.tensors["lm_head.weight"] == (Shard(0),)
    assert resolved.tensors["model.layers.1.self_attn.o_proj.weight"] == (Shard(1),)
    assert resolved.module_outputs["lm_head"] == ((Replicate(),),)


@pytest.mark.parametrize("source", [BASE, SimpleNamespace(base_model_tp_plan=BASE)])
def test_a_mapping_or_config_is_taken_as_it_is_or_under_a_prefix(source: Any) -> None:
    meant = {
        "embed_tokens": Rowwise(),
        "layers.*.self_attn.q_proj": Colwise(),
        "layers.*.self_attn.o_proj": Rowwise(),
        "layers.*.mlp.experts.down_proj": Rowwise(output=Partial()),
        "layers.*.mlp.experts": ModuleOutput(Replicate()),
    }
    assert Plan.from_transformers(source) == Plan(meant)
    under = {f"model.{key}": style for key, style in meant.items()}
    assert Plan.from_transformers(source, prefix="model") == Plan(under)


@pytest.mark.parametrize("source", [nn.Linear(2, 2), {}, SimpleNamespace(), None])
def test_a_model_without_a_plan_is_refused(source: Any) -> None:
    sentence = f"{type(source).__name__} has no tensor-parallel plan"
    with pytest.raises(PlanError, match=sentence):
        Plan.from_transformers(source)


class Attended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("q_proj", "out_proj")})
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)


def test_a_model_without_a_plan_gets_ours_for_its_type() -> None:
    model: Any = Attended()
    model.config = SimpleNamespace(model_type="opt")
    meant = {
        "**.q_proj": Colwise(),  # k_proj and v_proj are left out: it has none
        "**.fc1": Colwise(),
        "**.out_proj": Rowwise(),
        "**.fc2": Rowwise(),
    }
    assert Plan.from_transformers(model) == Plan(meant)
    model.config.model_type = "another"
    with pytest.raises(PlanError, match=r"and shardscope has none for it\. Write one"):
        Plan.from_transformers(model)


def test_what_only_transformers_code_can_do_is_refused() -> None:
    with pytest.raises(PlanError, match=r"entry 'layers\.\*\.router' gives 'ep_router', for which"):
        Plan.from_transformers({"layers.*.router": "ep_router"})
