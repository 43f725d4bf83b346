"""The words of a report that readers may not know, with their meanings.

They are rows of docs/glossary.md, which a test compares them with: the wheel has no docs.
"""

from __future__ import annotations

TERMS = {
    "recording": "the data of one run, as frozen records; what every renderer reads",
    "instrument": "a function that produces a recording: `trace`, `audit`, `memory`, …",
    "finding": "something a user should act on, with a rule, a location and a remedy",
    "severity": "error, warning or info: how much a finding matters, and what `--fail-on` "
    "compares with",
    "gap": "something that was observed but not understood, or not observed; never shown as zero",
    "simulated world": "one process that runs as one rank of a world of any size; nothing is sent",
    "identical ranks": "ranks whose records are equal, shown as one",
    "phase": "forward, backward, optimizer or another part of a step",
    "step": "one forward, backward and optimizer step",
    "recompute": "running a checkpointed function again in backward",
    "span": "a measured interval of time with a name",
    "mark": "how a module was wrapped or sharded: FSDP, DDP, a tensor-parallel style, compiled, "
    "checkpointed",
    "owner": "the module that a collective belongs to",
    "trigger": "the module that was running when a collective was issued",
    "cause": "why a collective was issued: FSDP's all-gather, an implicit redistribution, the "
    "user's call, …",
    "call site": "the user's source line behind a collective or an op",
    "implicit redistribution": "a redistribution that DTensor inserted by itself",
    "bucket": "parameters whose gradients DDP reduces together",
    "FSDP group": "parameters that FSDP gathers and reduces together",
    "alias, tie": "a further name of a shared module; parameters that are one tensor",
    "collective": "one call of a communication op on one rank, transfers included",
    "kind": "what a collective does: `all_reduce`, `all_gather`, …",
    "peer": "the root of a broadcast or reduce, or the other rank of a transfer",
    "send matrix": "bytes sent from rank to rank",
    "traffic, wire bytes, ring estimate": "bytes that a rank sends if its group runs a ring",
    "layout": "which rank holds which slice of a tensor",
    "level": "how far a model's ops are decomposed: exported, core ATen, Inductor",
    "move": "an input that DTensor redistributes before an op runs",
    "coverage verdict": "what happens to an op with sharded inputs: local, sharded, "
    "redistributed, decomposed, replicated, missing or wrong",
    "blocker": "an op that keeps a model from being sharded, those with most FLOPs first",
    "memory kind": "parameters, gradients, optimizer state, activations, gathered, communication, "
    "temporaries",
    "peak, reserved, needed": "what `memory` predicts of a step",
    "mesh, axis": "ranks arranged in a grid; a dimension of that grid",
    "placement": "how a tensor is distributed along one axis: `Replicate`, `Shard`, `Partial`",
    "replicated": "every rank holds the full tensor",
    "sharded": "every rank holds a part of the tensor along one dim",
    "partial": "every rank holds a term of the tensor, which is their sum (or other reduction)",
    "shard": "the part of a tensor that one rank holds",
    "full tensor": "the tensor that the shards make up",
    "reshard": "a change of placement, by communication or by slicing",
    "fallback": "an op that runs on replicated inputs because no strategy applies",
    "variation": "something that some ranks alone were made to see, to find out whether ranks "
    "still issue the same",
    "parity": "whether a parallel version computes what the single device does",
    "noise floor": "the difference that rounding alone explains, measured with double precision",
    "verdict": "the result of a check: agrees, differs, not comparable",
    "first divergence": "the first module or op whose result differs",
    "agreement": "how two tensors compare: equal, close, rounded, random, differs, …",
    "suspect": "the likely cause of a difference, or an op that a failure needs",
    "stage": "a step of the compiler: dynamo, AOT autograd, the partitioner, Inductor",
    "repro": "a script that shows a failure with torch alone",
    "break site, break event": "a line that breaks a graph; how often it did",
    "recompilation": "a compilation because a guard failed",
    "guard": "a condition on which a compiled graph is valid",
    "skipped frame": "a function, or the rest of one, that falls back to eager",
    "fingerprint": "a hash of the ops and shapes of graphs, equal for equal graphs",
    "folding": "showing identical layers as one, with figures per layer",
    "plan": "which style or placement each module or tensor has, as the user wrote it",
}
"""Meanings by word; words that share a row are joined by commas, as in the glossary."""
