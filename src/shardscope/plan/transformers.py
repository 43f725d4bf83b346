"""Tensor-parallel plans of transformers' models: those that they come with, and ours for others."""

from __future__ import annotations

from collections.abc import Mapping

from shardscope.errors import PlanError
from shardscope.plan.parse import NO_EFFECT_STYLES
from shardscope.record.patterns import matches_name

# Styles that leave weights replicated. No pattern of such a plan overrides another, so entries
# with these styles are no exceptions to others, and can be left out.
_REPLICATED = NO_EFFECT_STYLES | {"replicate"}


def read_transformers(source: object, *, prefix: str | None) -> dict[str, object]:
    """The entries that shard something, by the names of the model's modules.

    `source` is a model, a config, or a mapping in the form that transformers writes plans in.
    """
    plan = dict(source) if isinstance(source, Mapping) else _plan_of(source)
    if not plan:
        raise PlanError(
            f"{type(source).__name__} has no tensor-parallel plan (tp_plan, _tp_plan, or its "
            "config's base_model_tp_plan), and shardscope has none for it. Write one, such as "
            "{'layers.*.q_proj': 'colwise', 'layers.*.o_proj': 'rowwise'}."
        )
    under = f"{prefix}." if prefix else ""
    return {f"{under}{key}": style for key, style in plan.items() if not _is_replicated(style)}


def _is_replicated(style: object) -> bool:
    return isinstance(style, str) and style.strip().lower() in _REPLICATED


def _plan_of(source: object) -> dict[str, object]:
    own = _mapping(source, "tp_plan") or _mapping(source, "_tp_plan")
    config = getattr(source, "config", source)  # a config has its plan itself
    plan = {**_mapping(config, "base_model_tp_plan"), **own}
    names = _names(source)
    if names is None:
        return plan
    if not plan:
        plan = _own_plan(config)
    prefix = getattr(source, "base_model_prefix", "") or ""
    prefixed = {_with_prefix(key, prefix, names): style for key, style in plan.items()}
    # A plan is for a family of models: entries for modules that this one lacks are dropped.
    return {key: style for key, style in prefixed.items() if _matches_any(key, names)}


def _own_plan(config: object) -> dict[str, object]:
    """Our plan for a model that comes without one, by its config."""
    is_multi_query = getattr(config, "multi_query", False)
    if is_multi_query and not getattr(config, "new_decoder_architecture", False):
        return _MULTI_QUERY.get(getattr(config, "model_type", ""), {})
    return _PLANS.get(getattr(config, "model_type", ""), {})


def _with_prefix(key: str, prefix: str, names: list[str]) -> str:
    """The key with the prefix of the base model if only that matches a module."""
    prefixed = f"{prefix}.{key}"
    return (
        prefixed
        if prefix and not _matches_any(key, names) and _matches_any(prefixed, names)
        else key
    )


def _matches_any(key: str, names: list[str]) -> bool:
    return any(matches_name(key, name) for name in names)


def _names(source: object) -> list[str] | None:
    """The names of all modules and parameters; None if it is not a model."""
    if not hasattr(source, "named_modules") or not hasattr(source, "named_parameters"):
        return None
    return [
        *(name for name, _ in source.named_modules(remove_duplicate=False)),
        *(name for name, _ in source.named_parameters(remove_duplicate=False)),
    ]


def _mapping(source: object, name: str) -> dict[str, object]:
    value = getattr(source, name, None)
    return dict(value) if isinstance(value, Mapping) else {}


def _pairs(columns: str, rows: str) -> dict[str, object]:
    """Megatron's layout: the first layers of each pair by columns, the second ones by rows."""
    return {
        **{f"**.{name}": "colwise" for name in columns.split()},
        **{f"**.{name}": "rowwise" for name in rows.split()},
    }


def _fused(parts: int) -> dict[str, object]:
    return {"style": "colwise", "fused": parts}


_BERT = _pairs("self.query self.key self.value intermediate.dense", "output.dense")
_BART = _pairs("q_proj k_proj v_proj fc1", "out_proj fc2")
_BLOOM = _pairs("query_key_value dense_h_to_4h", "self_attention.dense dense_4h_to_h")
_CLIP = _pairs("q_proj k_proj v_proj fc1", "self_attn.out_proj fc2")
_T5 = _pairs("q k v wi wi_0 wi_1 relative_attention_bias", "o wo")
_VIT = _pairs("q_proj k_proj v_proj fc1", "o_proj fc2")

# For models that come without a plan, by config.model_type. Embeddings and heads stay replicated.
_PLANS: dict[str, dict[str, object]] = {
    "albert": _pairs(
        "attention.query attention.key attention.value ffn", "attention.dense ffn_output"
    ),
    "bart": _BART,
    "beit": _VIT,
    "bert": _BERT,
    "bloom": _BLOOM,
    "camembert": _BERT,
    "clip": _CLIP,
    "clip_text_model": _CLIP,
    "clip_vision_model": _CLIP,
    "deberta-v2": _pairs(
        "self.query_proj self.key_proj self.value_proj intermediate.dense", "output.dense"
    ),
    "deit": _VIT,
    "detr": _VIT,
    "dinov2": _VIT,
    "distilbert": _pairs("q_lin k_lin v_lin ffn.lin1", "out_lin ffn.lin2"),
    "electra": _BERT,
    "falcon": _BLOOM,
    "gpt2": {
        "**.attn.c_attn": _fused(3),
        **_pairs("mlp.c_fc", "attn.c_proj mlp.c_proj"),
    },
    "gpt_neo": _pairs("q_proj k_proj v_proj c_fc", "out_proj c_proj"),
    "gptj": _pairs("q_proj k_proj v_proj fc_in", "out_proj fc_out"),
    "marian": _BART,
    "mbart": _BART,
    "modernbert": {
        "**.attn.Wqkv": _fused(3),
        "**.mlp.Wi": _fused(2),
        **_pairs("", "attn.Wo mlp.Wo"),
    },
    "mpnet": _pairs(
        "attn.q attn.k attn.v relative_attention_bias intermediate.dense", "attn.o output.dense"
    ),
    "mpt": {"**.attn.Wqkv": _fused(3), **_pairs("up_proj", "attn.out_proj down_proj")},
    "mt5": _T5,
    "opt": _BART,
    "pegasus": _BART,
    "persimmon": _pairs("query_key_value dense_h_to_4h", "self_attn.dense dense_4h_to_h"),
    "roberta": _BERT,
    "siglip": _CLIP,
    "siglip_text_model": _CLIP,
    "siglip_vision_model": _CLIP,
    "stablelm": _pairs("q_proj k_proj v_proj gate_proj up_proj", "o_proj down_proj"),
    "swin": {**_VIT, "**.relative_position_bias_table": "shard(1)"},
    "t5": _T5,
    "vit": _VIT,
    "wav2vec2": _pairs("q_proj k_proj v_proj intermediate_dense", "out_proj output_dense"),
    "whisper": _BART,
    "xlm-roberta": _BERT,
}
# If all heads share one key and value head in a fused weight, attention stays replicated.
_MULTI_QUERY: dict[str, dict[str, object]] = {
    "falcon": _pairs("dense_h_to_4h", "dense_4h_to_h"),
    "gpt_bigcode": _pairs("mlp.c_fc", "mlp.c_proj"),
}
