"""Small models of transformers, and the collectives that Megatron's layers would issue for them.

transformers is imported here and not at collection. No weights are downloaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardscope.parallel import Plan
from shardscope.plan.styles import ModuleOutput
from shardscope.record.patterns import matches_name
from trained_models import leaving_torch_alone

with leaving_torch_alone():
    import transformers

__all__ = ["MODELS", "Counts", "count_by_hand", "loss", "make"]

BATCH, LENGTH, VOCAB, WIDTH = 2, 8, 64, 32
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
BASE = {"hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": 4}
TEXT = {**BASE, "vocab_size": VOCAB, "max_position_embeddings": 64}
DECODER = {**TEXT, **TOKENS, "num_key_value_heads": 4}
HEADS = {"head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
IMAGE = {"image_size": 16, "patch_size": 8, "num_labels": 4}
# BART and its relatives have an encoder and a decoder, each with options of its own.
PAIR = {
    "d_model": WIDTH,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    **TOKENS,
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
}


@dataclass(frozen=True)
class Spec:
    """A class of transformers with the options of its config."""

    name: str  # LlamaForCausalLM
    config: str  # LlamaConfig
    options: Mapping[str, Any]
    layers: tuple[str, ...] = ("num_hidden_layers",)  # options that say how many there are
    inputs: tuple[str, ...] = ("input_ids",)


def _spec(stem: str, head: str = "ForCausalLM", *, text: str = "", **options: Any) -> Spec:
    return Spec(f"{stem}{head}", f"{stem}{text}Config", {**DECODER, **options})


def _encoder(stem: str, **options: Any) -> Spec:
    return Spec(f"{stem}ForMaskedLM", f"{stem}Config", {**TEXT, **options})


MODELS: dict[str, Spec] = {
    "llama": _spec("Llama"),
    "qwen3": _spec("Qwen3", **HEADS),
    "mixtral": _spec("Mixtral", num_local_experts=4),
    "gemma": _spec("Gemma", **HEADS),
    "gemma2": _spec("Gemma2", **HEADS),
    "gemma3": _spec("Gemma3", text="Text", **HEADS),
    "phi": _spec("Phi"),
    "phi3": _spec("Phi3"),
    "gpt2": Spec(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": WIDTH, "n_head": 4, "vocab_size": VOCAB, "n_positions": 64, **TOKENS},
        layers=("n_layer",),
    ),
    "bert": _encoder("Bert"),
    "t5": Spec(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": WIDTH,
            "d_kv": 8,
            "d_ff": 64,
            "num_heads": 4,
            "vocab_size": VOCAB,
            "decoder_start_token_id": 0,
        },
        layers=("num_layers",),
        inputs=("input_ids", "decoder_input_ids"),
    ),
    "vit": Spec(
        "ViTForImageClassification", "ViTConfig", {**BASE, **IMAGE}, inputs=("pixel_values",)
    ),
    "deit": Spec(
        "DeiTForImageClassification", "DeiTConfig", {**BASE, **IMAGE}, inputs=("pixel_values",)
    ),
    "falcon": Spec(
        "FalconForCausalLM",
        "FalconConfig",
        {"hidden_size": WIDTH, "num_attention_heads": 4, "vocab_size": VOCAB, **TOKENS},
    ),
    # Those below are for benchmarks/parallel_transformers.py.
    "albert": _encoder("Albert", embedding_size=16),
    "bart": Spec(
        "BartForConditionalGeneration",
        "BartConfig",
        PAIR,
        layers=("encoder_layers", "decoder_layers"),
        inputs=("input_ids", "decoder_input_ids"),
    ),
    "bloom": Spec(
        "BloomForCausalLM",
        "BloomConfig",
        {"hidden_size": WIDTH, "n_head": 4, "vocab_size": VOCAB},
        layers=("n_layer",),
    ),
    "clip": Spec(
        "CLIPTextModelWithProjection",
        "CLIPTextConfig",
        {**TEXT, **TOKENS, "projection_dim": 16},
    ),
    "cohere": _spec("Cohere"),
    "deberta-v2": _encoder("DebertaV2"),
    "deepseek-v3": _spec(
        "DeepseekV3",
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        **EXPERTS,
        **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    ),
    "dinov2": Spec(
        "Dinov2ForImageClassification",
        "Dinov2Config",
        {"hidden_size": WIDTH, "num_attention_heads": 4, "mlp_ratio": 2, **IMAGE},
        inputs=("pixel_values",),
    ),
    "distilbert": Spec(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"dim": WIDTH, "hidden_dim": 64, "n_heads": 4, "vocab_size": VOCAB},
        layers=("n_layers",),
    ),
    "electra": _encoder("Electra", embedding_size=WIDTH),
    "gpt-neox": _spec("GPTNeoX"),
    "gptj": Spec(
        "GPTJForCausalLM",
        "GPTJConfig",
        {"n_embd": WIDTH, "n_head": 4, "rotary_dim": 4, "vocab_size": VOCAB, "n_positions": 64},
        layers=("n_layer",),
    ),
    "granite": _spec("Granite"),
    "mistral": _spec("Mistral"),
    "modernbert": _encoder("ModernBert", cls_token_id=1, sep_token_id=1, **TOKENS),
    "olmo2": _spec("Olmo2"),
    "opt": _spec("OPT", ffn_dim=64, word_embed_proj_dim=WIDTH),
    "qwen2": _spec("Qwen2"),
    "qwen3-moe": _spec("Qwen3Moe", num_experts=4, **HEADS, **EXPERTS),
    "roberta": _encoder("Roberta", **TOKENS),
    "stablelm": _spec("StableLm"),
    "starcoder2": _spec("Starcoder2"),
    "whisper": Spec(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**PAIR, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16},
        layers=("encoder_layers", "decoder_layers"),
        inputs=("input_features", "decoder_input_ids"),
    ),
}


def make(name: str, *, num_layers: int = 2, **options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model in eval mode, the same each time, and what to call it with."""
    spec = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, spec.config)(
        **{**spec.options, **dict.fromkeys(spec.layers, num_layers), **options}
    )
    model: nn.Module = getattr(transformers, spec.name)(config)
    return model.eval(), {name: _input(name) for name in spec.inputs}


def _input(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if name == "pixel_values":
        return torch.randn(BATCH, 3, 16, 16, generator=generator)
    if name == "input_features":
        return torch.randn(BATCH, 8, 16, generator=generator)
    return torch.randint(2, VOCAB, (BATCH, LENGTH), generator=generator)


def loss(output: Any) -> Tensor:
    logits = output.text_embeds if "text_embeds" in output else output.logits
    value: Tensor = logits.float().square().mean()
    return value


Counts = tuple[Counter[str], Counter[str]]
"""Collectives by kind, forward and backward."""


def count_by_hand(model: nn.Module, inputs: Mapping[str, Tensor]) -> Counts:
    """The collectives of the model if its layers were written as Megatron's are.

    From the plan's styles and an eager forward pass alone. Forward, every call of a row-parallel
    layer (or vocabulary-parallel embedding, or group of experts) is an all-reduce, and every output
    that is to be gathered an all-gather. Backward, every tensor that enters column-parallel
    layers, however many, has its gradient all-reduced; so has every parameter that is replicated
    but used on shards; and an input that a row-parallel layer splits has its gradient gathered.
    """
    forward, backward = Counter[str](), Counter[str]()
    entered: dict[int, Tensor] = {}
    styles = _styles(model)

    def enter(*tensors: Any) -> None:
        for one in tensors:
            if isinstance(one, Tensor) and one.requires_grad:
                entered[id(one)] = one

    def watch(style: str) -> Callable[..., None]:
        def note(_: nn.Module, args: Any, kwargs: Any) -> None:
            if "colwise" in style:
                enter(args[0])
            if "gather" in style or style == "colwise_rep":
                forward["all_gather"] += 1
            if "rowwise" in style or style == "moe_tp_experts":
                forward["all_reduce"] += 1
            if style == "rowwise_split_input":
                backward["all_gather"] += 1
            if style == "moe_tp_experts":
                enter(*args, *kwargs.values())

        return note

    handles = []
    for name, module in model.named_modules():
        style = next((style for key, style in styles.items() if matches_name(key, name)), "")
        if style == "replicated_with_grad_allreduce":
            backward["all_reduce"] += sum(one.requires_grad for one in module.parameters())
        elif style:
            handles.append(module.register_forward_pre_hook(watch(style), with_kwargs=True))
    model(**inputs)
    for handle in handles:
        handle.remove()
    backward["all_reduce"] += len(entered)
    return forward, backward


def _styles(model: nn.Module) -> dict[str, str]:
    """By pattern, the names of styles: of the model's own plan, or else of ours."""
    own = getattr(model, "tp_plan", None)
    if own:
        return dict(own)
    plan = Plan.from_transformers(model)
    return {
        entry.pattern: type(style).__name__.lower()
        for entry in plan.entries
        for _, styles in entry.by_axis
        for style in styles
        if not isinstance(style, ModuleOutput)
    }
