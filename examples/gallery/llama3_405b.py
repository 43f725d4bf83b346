"""Llama 3 405B on 512 GPUs: shardscope trace llama3_405b.py --mesh dp=64,tp=8."""

from llama3 import LLAMA3_405B, make_target

model, batch, parallelize, step, optimizer = make_target(LLAMA3_405B, batch_size=1)
