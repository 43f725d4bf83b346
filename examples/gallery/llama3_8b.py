"""Llama 3 8B under FSDP2 on one host: shardscope trace llama3_8b.py --mesh dp=8."""

from llama3 import LLAMA3_8B, make_target

model, batch, parallelize, step, optimizer = make_target(LLAMA3_8B, batch_size=2)
