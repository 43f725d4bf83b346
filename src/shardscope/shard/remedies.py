"""What to do about an op that does not shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardscope._torch.dispatch import TORCHS_OWN, op_schema
from shardscope.record import Verdict
from shardscope.shard.trials import Trial

__all__ = ["registration", "suggest"]


def suggest(op: Any, verdict: Verdict, trials: Sequence[Trial]) -> str:
    """A sentence or a few lines of code; nothing where nothing need be done."""
    if verdict is Verdict.WRONG:
        wrong = [one.name_inputs() for one in trials if one.verdict is Verdict.WRONG]
        return (
            f"Do not shard {_join(wrong)}: redistribute to Replicate() before the op, "
            "and report it to PyTorch."
        )
    if verdict is Verdict.MISSING and any("mixed torch.Tensor" in one.detail for one in trials):
        return (
            "A plain tensor meets a DTensor here. Make it one with distribute_tensor(), or call "
            "the model within torch.distributed.tensor.experimental.implicit_replication()."
        )
    unknown = next((one.failed_op or op for one in trials if one.is_unknown), None)
    if verdict is Verdict.MISSING and unknown is not None:
        return _suggest_rule(unknown)
    if verdict is Verdict.MISSING and len(trials) > 1:  # even with every input whole
        return "Run it on plain tensors: x.full_tensor() before the op."
    if verdict is Verdict.MISSING:
        return "Redistribute its inputs to Replicate() before the op."
    if verdict is Verdict.REPLICATED:
        return "It runs replicated on every rank: keep it out of the sharded part, or rewrite it."
    return ""


def _suggest_rule(op: Any) -> str:
    lines = registration(op)
    if "_for_cpu" in str(op):
        return (
            "This is a CPU-only kernel. On CUDA the model calls another, which DTensor supports: "
            "test it on a CUDA device, or under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
        )
    if op.namespace in TORCHS_OWN:
        return (
            "Run it on local tensors (torch.distributed.tensor.experimental.local_map), "
            f"or register a rule:\n{lines}"
        )
    return f"Register it (torch.distributed.tensor.experimental.register_sharding):\n{lines}"


def registration(op: Any) -> str:
    """Three lines that tell DTensor how to run `op`: whole, to which better ways can be added."""
    schema = op_schema(op)
    arguments = [one for one in schema.arguments if not one.is_out]
    inputs = ["Replicate()" if "Tensor" in str(one.type) else "None" for one in arguments]
    outputs = ["Replicate()"] * len(schema.returns)
    name = schema.name.replace("::", "_").replace(".", "_")
    names = ", ".join(
        f"{one.name}=None" if one.has_default_value() else one.name for one in arguments
    )
    return (
        f"@register_sharding(torch.ops.{op})\n"
        f"def shard_{name}({names}):\n"
        f"    return [([{', '.join(outputs)}], [{', '.join(inputs)}])]"
    )


def _join(names: Sequence[str]) -> str:
    shown = list(dict.fromkeys(names))
    return ", ".join(shown[:3]) + (" and others" if len(shown) > 3 else "")
