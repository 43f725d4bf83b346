"""Recurrent layers, in pieces of the batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardscope.parallel.placements import Placement, Shard
from shardscope.parallel.rules.book import rule
from shardscope.parallel.rules.call import Call, Strategy
from shardscope.parallel.rules.terms import lay

__all__ = ["cut_recurrent"]

aten = torch.ops.aten


@rule(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
def cut_recurrent(call: Call) -> Iterator[Strategy]:
    """Dropout between layers draws masks for the whole batch, so it is not cut then."""
    is_random = call["train"] and call["dropout"] > 0 and call["num_layers"] > 1
    if call["input"].num_dims != 3 or is_random:
        return
    batch = Shard(0 if call["batch_first"] else 1)
    states: list[Placement] = [Shard(1)] * (len(call.outputs) - 1)
    hidden = states if call.op == aten.lstm.input else states[0]
    yield lay(call, {"input": batch, "hx": hidden}, [batch, *states])
