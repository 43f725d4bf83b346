"""Styles by name: ours, and those that transformers writes in its tensor-parallel plans."""

from __future__ import annotations

from difflib import get_close_matches

from shardscope.errors import PlanError
from shardscope.parallel.placements import Partial, Replicate
from shardscope.parallel.plan.styles import (
    Colwise,
    ModuleOutput,
    Replicated,
    Rowwise,
    Sequence,
    Style,
)

__all__ = ["MEANINGLESS", "style_named"]

_NAMED: dict[str, Style] = {
    "colwise": Colwise(),
    "rowwise": Rowwise(),
    "sequence": Sequence(),
    "replicate": Replicated(),
    # What transformers calls them. Where it says how an input lies before (rowwise_rep,
    # rowwise_split_input), nothing is lost: here that is known from the program.
    "colwise_rep": Colwise(output=Replicate()),
    "colwise_gather_output": Colwise(output=Replicate()),
    "embedding_colwise": Colwise(output=Replicate()),
    "embedding_rowwise": Rowwise(),
    "gather": ModuleOutput(Replicate()),
    "local_colwise": Colwise(),
    "local_packed_colwise": Colwise(fused=2),
    "local_packed_rowwise": Rowwise(fused=2, output=Partial()),
    "local_rowwise": Rowwise(output=Partial()),
    "moe_tp_experts": ModuleOutput(Replicate()),
    "packed_colwise": Colwise(fused=2),
    "packed_rowwise": Rowwise(fused=2),
    "replicated": Replicated(),
    "rowwise_rep": Rowwise(),
    "rowwise_split_input": Rowwise(),
    "sequence_parallel": Sequence(),
}

MEANINGLESS = frozenset({"isolated", "local", "mla_kv_a_proj", "replicated_with_grad_allreduce"})
"""Names of transformers' that leave every weight whole, and arrange what we arrange unasked:
which tensors are local, and where gradients are summed."""

# Those hand tokens to experts by code of their own, which no program of one device has.
_EXPERT_PARALLEL = frozenset(
    {"ep_router", "grouped_gemm", "megamoe_experts", "megamoe_router", "moe_identity_expert"}
)


def style_named(name: str, place: str) -> Style:
    """The style of that name, given at `place`."""
    key = name.strip().lower()
    if key in _NAMED:
        return _NAMED[key]
    if key in MEANINGLESS:
        raise PlanError(
            f"{place} gives {name!r}, with which transformers keeps the weights replicated: "
            "here it has no effect. Remove it, or read the plan with Plan.from_transformers."
        )
    if key in _EXPERT_PARALLEL:
        raise PlanError(
            f"{place} gives {name!r}, for which transformers has its own code that hands tokens "
            "to experts. Give the placement of the experts' weights instead, such as "
            "'shard(0)' for their first dim."
        )
    raise PlanError(f"{place} gives {name!r}, which is not a style. {_suggest(key)}")


def _suggest(key: str) -> str:
    near = get_close_matches(key, _NAMED, n=1)
    if near:
        return f"Did you mean {near[0]!r}?"
    return "Give 'colwise', 'rowwise', 'sequence', 'replicate', or a placement such as 'shard(0)'."
