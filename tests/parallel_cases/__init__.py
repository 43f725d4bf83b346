"""Programs with plans, of all kinds that people have: what `parallelize` has to get right."""

from __future__ import annotations

from parallel_cases.attention import attention_cases
from parallel_cases.case import Case
from parallel_cases.dynamic import dynamic_cases
from parallel_cases.layers import layer_cases
from parallel_cases.meshes import mesh_cases
from parallel_cases.ops import op_cases
from parallel_cases.signatures import signature_cases
from parallel_cases.state import state_cases
from parallel_cases.transformers import transformer_cases

__all__ = ["all_cases"]


def all_cases() -> dict[str, Case]:
    """Every case by its name."""
    cases = [
        *op_cases(),
        *layer_cases(),
        *attention_cases(),
        *transformer_cases(),
        *state_cases(),
        *signature_cases(),
        *mesh_cases(),
        *dynamic_cases(),
    ]
    named = {case.name: case for case in cases}
    assert len(named) == len(cases), "two cases have one name"
    return named
