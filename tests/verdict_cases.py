"""Results that are right and results that are wrong, for whoever judges numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardscope.numerics import RandomRounding, convert_inputs_to_fp64, fp64_mode

__all__ = ["NEARER", "REWRITTEN", "RIGHT", "WRONG", "Rewrite", "Triple", "numbers"]

NAN, INF = float("nan"), float("inf")
SHORT = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Triple:
    """What the compiled function gave, what eager execution did, and double precision."""

    compiled: Any
    eager: Any
    exact: Any


def numbers(*shape: int, scale: float = 1.0, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def rounded(exact: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A result as eager execution gives it, and in double precision."""
    return exact.to(dtype), exact


def changed(tensor: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    copied = tensor.clone()
    given = change(copied)
    return given if isinstance(given, Tensor) else copied


def off(exact: Tensor, change: Callable[[Tensor], Any], dtype: Any = torch.float32) -> Triple:
    eager, exact = rounded(exact, dtype)
    return Triple(changed(eager, change), eager, exact)


def put(index: Any, value: Any) -> Callable[[Tensor], None]:
    def change(tensor: Tensor) -> None:
        tensor[index] = value

    return change


def whole(values: Any, change: Callable[[Tensor], Any], dtype: Any = torch.int64) -> Triple:
    tensor = torch.as_tensor(values).to(dtype)
    return Triple(changed(tensor, change), tensor, tensor.clone())


def mixed(small: float, dtype: Any = torch.float32, large: float = 1.0) -> Tensor:
    """Many large numbers and a few small ones."""
    pair = numbers(4000, scale=large), numbers(20, seed=2).sign() * small
    return (torch.cat(pair) * 1.1).to(dtype).double() * 1.7


def with_nan(at: int = 0) -> Tensor:
    exact = numbers(100).double() * 1.7
    exact[at] = NAN
    return exact


X = numbers(40, 40).double() * 1.7
MANY = numbers(200_000).double() * 1.7

WRONG: dict[str, Triple] = {
    # what torch's own comparison lets pass
    "a NaN in both, and another number wrong": off(with_nan(), put(7, 3.0)),
    "a NaN in both, and all else doubled": off(with_nan(), lambda y: y * 2),
    "NaN at another place": Triple(with_nan(1).float(), with_nan(0).float(), with_nan(0)),
    "signs of 1e-5 flipped": off(mixed(1e-5), lambda y: torch.where(y.abs() < 1e-4, -y, y)),
    "all signs of 1e-5 flipped": off(X * 1e-5, torch.neg),
    "1e-4 zeroed": off(mixed(1e-4), lambda y: torch.where(y.abs() < 3e-4, 0.0, y)),
    "all 1e-4 zeroed": off(X * 1e-4, torch.zeros_like),
    "doubled": off(X, lambda y: y * 2),
    "whole numbers off by one": whole(range(100), lambda y: y + 1),
    # NaN and infinity
    "a NaN where none is": off(X, put((3, 4), NAN)),
    "no NaN where one is": off(with_nan(), put(0, 0.5)),
    "no NaN, all of them": off(with_nan().fill_(NAN), torch.zeros_like),
    "infinite where it is not": off(X, put((3, 4), INF)),
    "not infinite where it is": off(changed(X, put((3, 4), INF)), put((3, 4), 3e38)),
    "the other infinity": off(changed(X, put((3, 4), INF)), put((3, 4), -INF)),
    "NaN for infinity": off(changed(X, put((3, 4), INF)), put((3, 4), NAN)),
    "a number that eager has not, and a wrong one": Triple(
        torch.tensor([1.0, 2.0]), torch.tensor([1.0, INF]), torch.tensor([1.0, 3.0]).double()
    ),
    # single elements, rows, orders
    "one element of many": off(MANY, put(123_456, 1.0)),
    "one element by a thousandth": off(X, lambda y: y[3, 4].mul_(1.001) * 0 + y),
    "the last row zero": off(X, put(-1, 0.0)),
    "the last row of the one before": off(X, lambda y: torch.cat([y[:-1], y[-2:-1]])),
    "transposed": off(X, lambda y: y.t().contiguous()),
    "rows in another order": off(X, lambda y: y.flip(0)),
    "the state before an update": Triple(X.float(), (X * 0.99 + 0.01).float(), X * 0.99 + 0.01),
    "scaled by a thousandth": off(X, lambda y: y * 1.001),
    "shifted by little": off(X, lambda y: y + 1e-4),
    "nothing in it": off(X, torch.zeros_like),
    "small where it is zero": off(X.relu(), lambda y: torch.where(y == 0, 1e-6, y)),
    # sizes of numbers
    "tiny and doubled": off(X * 1e-30, lambda y: y * 2),
    "huge and off": off(X * 1e37, lambda y: y * 1.01),
    "beyond normal, zeroed": off(X * 1e-40, torch.zeros_like),
    "of many sizes, the smallest zeroed": off(
        torch.logspace(0, -20, 500).double() * 1.7, lambda y: torch.where(y < 1e-15, 0.0, y)
    ),
    # dtypes
    **{
        f"{name} in {str(dtype).removeprefix('torch.')}": triple
        for dtype in SHORT
        for name, triple in {
            "1e-4 zeroed": off(
                mixed(1e-4, dtype), lambda y: torch.where(y.abs() < 3e-4, 0.0, y), dtype
            ),
            "signs of 1e-3 flipped": off(
                mixed(1e-3, dtype), lambda y: torch.where(y.abs() < 3e-3, -y, y), dtype
            ),
            "one element half as large again": off(X, lambda y: y[3, 4].mul_(1.5) * 0 + y, dtype),
            "scaled by three hundredths": off(X, lambda y: y * 1.03, dtype),
            "a NaN where none is": off(X, put((3, 4), NAN), dtype),
        }.items()
    },
    "of another dtype": off(X, lambda y: y.double()),
    "half as precise": off(X, lambda y: y.bfloat16().float()),
    "whole numbers of another dtype": whole(range(9), lambda y: y.int()),
    "float8, one off": off(X, put((3, 4), 16.0), torch.float8_e4m3fn),
    "complex, conjugate": off(torch.complex(X, X.t()), torch.conj_physical, torch.complex64),
    "complex, one part": off(torch.complex(X, X.t()), put((3, 4), 1j), torch.complex64),
    # shapes
    "of another shape": off(X, lambda y: y[None]),
    "empty, of another shape": off(X[:0], lambda y: y.reshape(3, 0)),
    "a single number": off(X[0, 0], lambda y: y * 1.01),
    "a single number, negative": off(X[0, 0], torch.neg),
    # whole numbers and truth values
    "one whole number of many": whole(range(10_000), put(777, 0)),
    "large whole numbers": whole([2**60, 2**60 + 1], lambda y: y + 1),
    "overflown": whole([2**31 + 5, 7], lambda y: y.int().long()),
    "bytes": whole([0, 255], lambda y: y + 1, torch.uint8),
    "unsigned": Triple(*(torch.tensor([v], dtype=torch.uint32) for v in (2**31 + 1, 2**31, 2**31))),
    "one truth value": whole([True] * 100, put(7, False), torch.bool),
    "all truth values": whole([True, False] * 50, torch.logical_not, torch.bool),
    "complementary": whole([1, 2], torch.bitwise_not),
    # no tensors
    "none for a tensor": Triple(None, X.float(), X),
    "a tensor for none": Triple(X.float(), None, None),
    "another number": Triple(3, 2, 2),
    "another float": Triple(0.5, 0.25, 0.25),
    "a float that is NaN": Triple(NAN, 0.25, 0.25),
    "a truth value for a number": Triple(True, 1, 1),
    "a number for a truth value": Triple(0, False, False),
}


def pair(exact: Tensor, dtype: Any = torch.float32) -> Triple:
    return off(exact, lambda y: y.clone(), dtype)


RIGHT: dict[str, Triple] = {
    "the same": pair(X),
    "NaN at the same places": pair(with_nan()),
    "NaN everywhere": pair(with_nan().fill_(NAN)),
    "infinities at the same places": pair(changed(X, put((3, 4), -INF))),
    "NaN and the last place": off(with_nan(), lambda y: torch.nextafter(y, 2 * y)),
    "the last place": off(X, lambda y: torch.nextafter(y, 2 * y)),
    "the last place of few": off(X[:1, :3], lambda y: torch.nextafter(y, 2 * y)),
    "the last place of one": off(X[0, 0], lambda y: torch.nextafter(y, 2 * y)),
    "the last place of tiny numbers": off(X * 1e-40, lambda y: torch.nextafter(y, 2 * y)),
    "the other zero": off(X.relu(), lambda y: torch.where(y == 0, -0.0, y)),
    "empty": pair(X[:0]),
    "empty in one dim": pair(X[None, :, :0]),
    "complex, the last place": off(
        torch.complex(X, X.t()),
        lambda y: torch.complex(torch.nextafter(y.real, 2 * y.real), y.imag),
        torch.complex64,
    ),
    "float8": pair(X, torch.float8_e4m3fn),
    "whole numbers": whole(range(9), lambda y: y + 0),
    "truth values": whole([True, False], lambda y: y | y, torch.bool),
    "a choice that double precision makes otherwise": Triple(
        torch.tensor([1, 5]), torch.tensor([1, 4]), torch.tensor([1, 5])
    ),
    "an infinity that only the dtype has": Triple(
        torch.tensor([INF], dtype=torch.float16),
        torch.tensor([65504.0], dtype=torch.float16),
        torch.tensor([70000.0]).double(),
    ),
    "none": Triple(None, None, None),
    "numbers": Triple(3, 3, 3),
    "floats that are NaN": Triple(NAN, NAN, NAN),
    "truth": Triple(True, True, True),
}

NEARER: dict[str, Triple] = {
    "numbers where eager has infinities": Triple(
        torch.tensor([3.0, 4.0], dtype=torch.float16),
        torch.tensor([3.0, INF], dtype=torch.float16),
        torch.tensor([3.0, 4.0]).double(),
    ),
    "numbers where eager has NaN only": Triple(
        torch.tensor([3.0, 4.0]), torch.tensor([NAN, NAN]), torch.tensor([3.0, 4.0]).double()
    ),
    "single precision where eager is short": Triple(
        X.float(), (X + numbers(40, 40, scale=0.01)).float(), X
    ),
}


@dataclass(frozen=True, eq=False)
class Rewrite:
    """A function, the same as a compiler may write it, and what it is given."""

    original: Callable[..., Tensor]
    other: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]

    def run(self, function: Callable[..., Tensor]) -> dict[str, Tensor]:
        """What it gives, with the gradients of its inputs."""
        inputs = [one.detach().clone().requires_grad_() for one in self.inputs]
        output = function(*inputs)
        seeds = numbers(*output.shape, seed=3).bfloat16().to(output.dtype)
        gradients = torch.autograd.grad(output, inputs, seeds, allow_unused=True)
        named = {f"gradient {i}": one for i, one in enumerate(gradients) if one is not None}
        return {"output": output.detach(), **named}

    def run_exact(self) -> dict[str, Tensor]:
        with fp64_mode(self.inputs[0].dtype):
            wide = Rewrite(self.original, self.other, convert_inputs_to_fp64(self.inputs))
            return wide.run(wide.original)

    def run_rounded(self, seed: int) -> dict[str, Tensor]:
        with RandomRounding(seed):
            return self.run(self.original)


def _rewrites(dtype: torch.dtype) -> dict[str, Rewrite]:
    x, w = numbers(32, 64).to(dtype), numbers(64, 64, seed=4).to(dtype)

    def single(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The same computed in single precision throughout, and rounded at the end."""
        return lambda *given: function(*(one.float() for one in given)).to(dtype)

    def alike(function: Callable[..., Tensor], *inputs: Tensor) -> Rewrite:
        return Rewrite(function, single(function), inputs or (x,))

    def norm(y: Tensor) -> Tensor:
        return (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True) + 1e-5).sqrt()

    def norm_of_squares(y: Tensor) -> Tensor:
        mean = y.mean(-1, keepdim=True)
        scale = ((y * y).mean(-1, keepdim=True) - mean * mean + 1e-5).rsqrt()
        return (y - mean) * scale

    def fuse(a: Tensor, b: Tensor) -> Tensor:
        return torch.addcmul(a.double(), a.double(), b[:32].double()).to(dtype)

    return {
        "gelu": alike(functional.gelu),
        "softmax": alike(lambda y: torch.softmax(y * 3, -1)),
        "a norm by hand": alike(norm),
        "layer norm from squares": Rewrite(
            lambda y: functional.layer_norm(y, (64,)), single(norm_of_squares), (x,)
        ),
        "root mean square": alike(lambda y: y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6)),
        "gates": alike(lambda y: functional.silu(y + 1) * y.tanh() - y.sigmoid()),
        "sums that cross zero": alike(lambda y: (y + y.roll(1, 0) - y.roll(2, 1)).relu()),
        "steps": alike(lambda y: (y / 0.1).round() * 0.1),
        "choices": alike(lambda y: torch.where(y * 1.7 - y.roll(1) > 0, y, -y)),
        "logsumexp": alike(lambda y: (y * 5).exp().sum(-1).log()),
        "cross entropy": alike(lambda y: functional.cross_entropy(y, torch.arange(32))),
        "matmul in halves": Rewrite(
            torch.matmul,
            single(lambda a, b: a[:, :32] @ b[:32] + a[:, 32:] @ b[32:]),
            (x, w),
        ),
        "matmuls that cancel": alike(lambda a, b: torch.tanh(a @ b) @ b - a @ b, x, w),
        "division by multiplication": Rewrite(lambda y: y / 3, lambda y: y * (1 / 3), (x,)),
        "large numbers added": Rewrite(
            lambda y: (y + 1000) - 1000, lambda y: (y + 1000.5) - 1000.5, (x,)
        ),
        "multiply and add at once": Rewrite(lambda a, b: a * b[:32] + a, fuse, (x, w)),
        "sum by columns": Rewrite(
            lambda y: y.sum(), lambda y: y.float().cumsum(0)[-1].cumsum(0)[-1].to(dtype), (x,)
        ),
        "mean": Rewrite(
            lambda y: y.mean(), lambda y: (y.float().sum(0).sum() / y.numel()).to(dtype), (x,)
        ),
    }


def _add_up(y: Tensor) -> Tensor:
    """One after the other, as nobody should."""
    total = torch.zeros(len(y))
    for column in y.unbind(1):
        total = total + column
    return total


REWRITTEN: dict[str, Rewrite] = {
    f"{name} in {str(dtype).removeprefix('torch.')}": rewrite
    for dtype in (torch.float32, *SHORT)
    for name, rewrite in _rewrites(dtype).items()
}
REWRITTEN["a long sum, naively"] = Rewrite(lambda y: y.sum(1), _add_up, (numbers(20, 2000).abs(),))
REWRITTEN["a long sum of both signs, naively"] = Rewrite(
    lambda y: y.sum(1), _add_up, (numbers(20, 2000),)
)
