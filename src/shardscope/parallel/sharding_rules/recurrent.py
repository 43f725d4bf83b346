"""Recurrent layers, sharded along the batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardscope.parallel.ir.placements import Placement, Shard, Strategy
from shardscope.parallel.sharding_rules.builders import make_strategy
from shardscope.parallel.sharding_rules.context import OpCall
from shardscope.parallel.sharding_rules.registry import rule

aten = torch.ops.aten


@rule(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
def shard_recurrent(call: OpCall) -> Iterator[Strategy]:
    """The batch dim. Not with dropout between layers, which draws masks for the full batch."""
    is_random = call["train"] and call["dropout"] > 0 and call["num_layers"] > 1
    if call.tensor("input").num_dims != 3 or is_random:
        return
    batch = Shard(0 if call["batch_first"] else 1)
    states: list[Placement] = [Shard(1)] * (len(call.outputs) - 1)
    hidden = states if call.op == aten.lstm.input else states[0]
    yield make_strategy(call, {"input": batch, "hx": hidden}, [batch, *states])
