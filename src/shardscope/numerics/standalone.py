"""The comparison in a few lines of torch, for repro scripts that import nothing else."""

from __future__ import annotations

import inspect

import torch


def comparison_source() -> str:
    """The source of `check` and of the function it calls; it needs only `import torch`."""
    return inspect.getsource(check_numbers) + "\n\n" + inspect.getsource(check)


def check(compiled, eager, exact, others=()):  # type: ignore[no-untyped-def]
    """What is wrong with the outputs of a compiled function; empty if nothing is.

    `eager` and `exact` are the outputs of eager execution, in its own precision and in double
    precision; `others` are lists of outputs of eager execution with perturbed rounding, if any.
    """
    if len(compiled) != len(eager):
        return f"{len(compiled)} outputs instead of {len(eager)}"
    for i, (c, e) in enumerate(zip(compiled, eager)):  # noqa: B905
        x = exact[i] if exact else None
        if not isinstance(e, torch.Tensor) or not isinstance(c, torch.Tensor):
            if type(c) is not type(e) or (c != e and (c == c or e == e)):
                return f"output {i} is {c!r:.80} instead of {e!r:.80}"
            continue
        for what in ("shape", "dtype", "device"):
            if getattr(c, what) != getattr(e, what):
                return f"output {i}: {what} {getattr(c, what)} instead of {getattr(e, what)}"
        if not e.numel():
            continue
        dtype, more = e.dtype, [outputs[i].detach().cpu() for outputs in others]
        c, e = c.detach().cpu(), e.detach().cpu()
        x = e if x is None else x.detach().cpu()
        if not dtype.is_floating_point and not dtype.is_complex:
            wrong = (c != e) & (c != x)
            for sample in more:
                wrong &= c != sample
            if wrong.any():
                return f"output {i} differs in {int(wrong.sum())} of {wrong.numel()} elements"
        elif fact := check_numbers(c, e, x, more):  # type: ignore[no-untyped-call]
            return f"output {i} {fact}"
    return ""


def check_numbers(c, e, x, more):  # type: ignore[no-untyped-def]
    """What is wrong with one tensor: compiled, eager, in double precision, and perturbed runs."""
    # NaN and infinities: where eager execution has them, or double precision.
    dtype = e.dtype
    rounded = x.to(dtype)
    real = torch.view_as_real if dtype.is_complex else lambda tensor: tensor
    c, e, x, rounded, *more = (
        real(tensor.resolve_conj()).double() for tensor in (c, e, x, rounded, *more)
    )
    kinds = [
        tensor.isnan().int() + 2 * (tensor == torch.inf) + 3 * (tensor == -torch.inf)
        for tensor in (c, e, x, rounded, *more)
    ]
    is_unexplained = torch.stack([kinds[0] != kind for kind in kinds[1:]]).all(0)
    if is_unexplained.any():
        return f"has NaN or infinity elsewhere, in {int(is_unexplained.sum())} elements"
    target = torch.where(x.isfinite(), x, e)
    known = c.isfinite() & target.isfinite()
    is_new = known & ~e.isfinite()
    target = torch.where(known, target, 0.0)
    off = torch.where(known, c - target, 0.0).abs()
    error = torch.where(known & e.isfinite(), e - target, 0.0).abs()
    # Each element: a few units in the last place, and eager's errors at similar magnitudes.
    info = torch.finfo(dtype)
    unit = (target.abs() * info.eps).clamp(min=info.smallest_normal * info.eps)
    bound = 2 * unit + 2 * error
    size = torch.where(target == 0, -1100, torch.frexp(target).exponent)
    for noise in [error, *((sample - e).abs().nan_to_num(0, 0, 0) for sample in more)]:
        for power in set(size.flatten().tolist()):
            like = (size - power).abs() <= 1
            typical = noise[like].sqrt().mean().square()
            here = size == power
            bound[here] += 12 * typical + (4 * noise[here] if noise is not error else 0)
    bound = torch.where(is_new, 64 * info.eps * target.abs(), bound)
    # All together: twice the error of eager execution, and more where elements are few.
    few = 24 / off.numel() ** 0.5
    noises = [error, *((sample - target).nan_to_num(0, 0, 0) for sample in more)]
    rms = max(float(noise.square().mean().sqrt()) for noise in noises)
    limit = (2 + few) * rms + 0.3 * (1 + few) * float(unit.square().mean().sqrt())
    worst = int((off - bound).argmax())
    if (off > bound).any() or float(off.square().mean().sqrt()) > limit:
        got, wanted = float(c.flatten()[worst]), float(target.flatten()[worst])
        return f"is wrong: {got:.6g} instead of {wanted:.6g} at {worst} (flattened)"
    return ""
