"""Recognizes losses that start inside a module, such as those that balance experts.

Their gradient is added in backward to what comes from the module's output.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardscope.numerics import to_fp64_on_cpu
from shardscope.parallel.parity.evidence import target_in_fp64
from shardscope.parallel.parity.probe import ModuleProbe
from shardscope.parallel.parity.result import Origin, OriginKind

_MAX_REST = 1e-3  # of a difference that the loss may leave unexplained
_IN_CODE = (OriginKind.GRADIENT_OF_OUTPUT, OriginKind.GRADIENT_OF_INPUT)


def find_attached_factor(
    origin: Origin, run_single: Callable[[ModuleProbe], object]
) -> float | None:
    """By what the gradient of a loss is multiplied that starts in the code of the origin's module.

    The part of the gradient that starts there is what is left on the single device when the
    gradient of the module's output is zero; `run_single` runs that with a probe. None if there is
    no such part, or if a multiple of it does not explain the difference on every rank.
    """
    if origin.kind not in _IN_CODE or not origin.module or not origin.comparison.full:
        return None
    probe = ModuleProbe((origin.module, torch.zeros(())))
    run_single(probe)
    target = target_in_fp64(origin.comparison.case)
    snapshot = probe.snapshots.get(origin.comparison.case.name)
    part = None if snapshot is None else to_fp64_on_cpu(snapshot)
    if part is None or part.shape != target.shape or not bool(part.any()):
        return None
    factors = []
    for full in origin.comparison.full_in_fp64():
        excess = full - target
        factor = float((part * excess).sum() / part.square().sum())
        if float((excess - factor * part).norm()) > _MAX_REST * float(excess.norm()):
            return None
        factors.append(1.0 + factor)
    return factors[0] if max(factors) - min(factors) <= _MAX_REST else None
