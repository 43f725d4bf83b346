"""Whether a parallel program can be verified here, on what, and what is said if it is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from shardscope._torch.dispatch import has_fakes
from shardscope._torch.programs import flatten
from shardscope.errors import ParallelError
from shardscope.parallel.flow import Origin
from shardscope.parallel.mesh import Mesh
from shardscope.record import TensorVerdict

__all__ = ["fill", "has_no_data", "refuse", "why_not"]

_MAX_RANKS = 64
_MAX_BYTES = 8 * 2**30  # of all ranks' state and the single device's, in double precision too
_MAX_MADE_UP_BYTES = 256 * 2**20


def why_not(program: ExportedProgram, mesh: Mesh, example: Any) -> str:
    """Why all ranks cannot be run in this process; "" if they can."""
    if example is None:
        return "the program was saved without example inputs; call verify(*inputs)"
    if mesh.num_ranks > _MAX_RANKS:
        return (
            f"{mesh.num_ranks} ranks are too many for one process; verify the same plan on a mesh "
            f"of at most {_MAX_RANKS}"
        )
    tensors = [*_tensors(program), *(one for one in flatten(example)[0] if _is_tensor(one))]
    num_bytes = sum(one.numel() * one.element_size() for one in tensors)
    is_made_up = any(has_no_data(one) for one in tensors)
    if is_made_up and num_bytes > _MAX_MADE_UP_BYTES:
        return (
            f"its {num_bytes / 2**30:.1f} GiB of tensors have no data; verify the same plan on a "
            "smaller configuration of the model"
        )
    if (3 + mesh.num_ranks) * num_bytes > _MAX_BYTES:
        return (
            f"{mesh.num_ranks} ranks of {num_bytes / 2**30:.1f} GiB do not fit in one process; "
            "verify the same plan on a smaller configuration of the model"
        )
    return ""


def fill(values: Sequence[Any]) -> list[Any]:
    """The values, with numbers of the same kind for tensors that have no data."""
    generator = torch.Generator().manual_seed(0)
    return [_numbers(one, generator) if has_no_data(one) else one for one in values]


def refuse(wrong: Sequence[TensorVerdict], culprit: Origin | None) -> ParallelError:
    """The sentence for a program that is not right."""
    first = wrong[0]
    more = f" (and {len(wrong) - 1} more tensors)" if len(wrong) > 1 else ""
    off = (
        ""
        if first.error is None
        else f" by {first.error:.1e}, where rounding explains {first.noise:.1e}"
    )
    place = "its forward agrees, its gradients do not"
    if culprit is not None:
        module = f" in {culprit.module}" if culprit.module else ""
        line = f" ({culprit.line})" if culprit.line else ""
        place = f"the first value that differs is {culprit.node}, {culprit.op}{module}{line}"
    return ParallelError(
        f"the parallel program does not compute what the original does: {first.kind} {first.name} "
        f"{first.agreement.replace('_', ' ')}{off}{more}; {place}. Leave that module out of the "
        "plan, and please report it: this is a bug in shardscope."
    )


def _tensors(program: ExportedProgram) -> Iterator[Tensor]:
    seen = {id(one): one for one in (*program.state_dict.values(), *program.constants.values())}
    yield from (one for one in seen.values() if _is_tensor(one))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def has_no_data(value: Any) -> bool:
    """Whether it is a tensor of which only the shape is known."""
    return isinstance(value, Tensor) and (value.is_meta or has_fakes(value))


def _numbers(like: Tensor, generator: torch.Generator) -> Tensor:
    shape, dtype = tuple(int(one) for one in like.shape), like.dtype
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        drawn = torch.randn(shape, generator=generator, dtype=wide)
        scaled: Tensor = drawn / max(1, *shape[-1:]) ** 0.5
        return scaled.to(dtype).requires_grad_(like.requires_grad)
    return torch.zeros(shape, dtype=dtype)
