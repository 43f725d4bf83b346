"""The comparison of numbers that is pasted into repros."""

from __future__ import annotations

import inspect

import torch

__all__ = ["check", "comparison_source"]


def comparison_source() -> str:
    """The source of `check`."""
    return inspect.getsource(check)


def check(compiled: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> str:
    """How the compiled result is wrong, or nothing."""
    if compiled.shape != eager.shape or compiled.dtype != eager.dtype:
        return f"{compiled.dtype} {list(compiled.shape)}, not {eager.dtype} {list(eager.shape)}"
    if not eager.is_floating_point() and not eager.is_complex():
        return "" if torch.equal(compiled, eager) else "other numbers"
    found, given, true = (one.cpu().to(torch.complex128) for one in (compiled, eager, exact))
    finite = torch.isfinite(given)
    if not torch.equal(finite, torch.isfinite(found)):
        return "NaN or infinity in other places"
    off, floor = ((one - true).abs()[finite] for one in (found, given))
    if not off.numel():
        return ""
    unit = torch.finfo(eager.dtype).eps * float(true.abs()[finite].max())
    limit = 32 * max(float(floor.max()), unit)
    return "" if float(off.max()) <= limit else f"off by {float(off.max()):.3g} (limit {limit:.3g})"
