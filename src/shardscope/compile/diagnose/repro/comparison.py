"""The comparison of numbers that is pasted into repros."""

from __future__ import annotations

import inspect

import torch

__all__ = ["check", "comparison_source"]


def comparison_source() -> str:
    """The source of `check`, which needs `import torch` and nothing else."""
    return inspect.getsource(check)


def check(compiled, eager, exact, others=()):  # type: ignore[no-untyped-def]
    """What is wrong with the outputs of a compiled function; empty if nothing is."""
    for i, (one, given) in enumerate(zip(compiled, eager, strict=True)):
        if one.shape != given.shape or one.dtype != given.dtype:
            return f"output {i}: {one.dtype} {list(one.shape)} instead of {given.dtype}"
        if not given.is_floating_point() and not given.is_complex():
            if not torch.equal(one, given):
                return f"output {i} differs"
            continue
        true = exact[i] if exact else given
        found, wanted, true = (each.cpu().to(torch.complex128) for each in (one, given, true))
        finite = torch.isfinite(wanted)
        if not torch.equal(finite, torch.isfinite(found)):
            return f"output {i} has NaN or infinity elsewhere"
        off, floor = ((each - true).abs()[finite] for each in (found, wanted))
        if off.numel():
            unit = torch.finfo(given.dtype).eps * float(true.abs()[finite].max())
            limit = 32 * max(float(floor.max()), unit)
            if float(off.max()) > limit:
                return f"output {i} is off by {float(off.max()):.3g}"
    return ""
