"""Hugging Face's Trainer with FSDP2 on a small Llama."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        tokens = torch.randint(0, 256, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,
    max_steps=20,
    logging_steps=1,
    save_steps=1,
    bf16=True,
    report_to=[],
    fsdp="full_shard auto_wrap",
    fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
)
Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=Tokens()).train()
