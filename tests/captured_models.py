"""Functions whose graphs, as dynamo captures them, are awkward to cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from shardscope.compile.diagnose.subgraph.subgraph import Subgraph, copy_tensor

__all__ = ["CASES", "capture"]

Case = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]


def capture(
    function: Callable[..., Any], *args: Any, dynamic: bool | None = None
) -> list[Subgraph]:
    """The graphs that dynamo makes of a call, with what each is called with."""
    found: list[Subgraph] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            values = tuple(_copy(value) for value in inputs)
            found.append(Subgraph(graph, values, torch.is_grad_enabled()))
            return graph.forward(*inputs)

        return run

    torch.compiler.reset()
    torch.compile(function, backend=keep, dynamic=dynamic)(*args)
    return found


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return copy_tensor(value).requires_grad_(value.requires_grad)


def data(*size: int, requires_grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(*size, generator=generator).requires_grad_(requires_grad)


def convolutions() -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )
    return model, (data(2, 3, 8, 8),)


def attention() -> Any:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return model, (data(2, 5, 8),)


def dropout() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.GELU(), nn.Dropout(0.2))
    return model, (data(3, 4),)


def recurrence() -> Any:
    cell = nn.LSTMCell(4, 4)

    def run(x: torch.Tensor) -> torch.Tensor:
        h, c = torch.zeros(2, 4), torch.zeros(2, 4)
        for step in range(3):
            h, c = cell(x[:, step], (h, c))
        return h + c

    return run, (data(2, 3, 4),)


def writes_in_place() -> Any:
    def run(x: torch.Tensor, buffer: torch.Tensor) -> Any:
        y = x.sin()
        y.mul_(2).add_(1)
        buffer.copy_(y.detach())
        z = buffer.clone() * y
        buffer.zero_()
        y.neg_()
        z += y
        return z, buffer + 1, torch.clamp_(z.cos(), 0)

    return run, (data(3, 4, requires_grad=True), data(3, 4))


def writes_through_views() -> Any:
    def run(x: torch.Tensor) -> Any:
        y = x.cos()
        flat, row, turned = y.view(-1), y[1], y.t()
        before = turned * 2
        flat[0] = 5
        row.add_(1)
        middle = turned.exp()
        turned[2:].mul_(3)
        y[:, 1] = row[0]
        after = flat.sum() + row.sum()
        y.unsqueeze_(0)
        return before, middle, after, y + 1, row

    return run, (data(4, 4, requires_grad=True),)


def writes_to_inputs() -> Any:
    def run(x: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> Any:
        cache[at] = x.detach()
        window = cache[1:3]
        cache.index_add_(0, at, x.detach())
        total = window.sum() * x
        window.fill_(2)
        return total, cache.mean(), window * x[0]

    return run, (data(2, 4, requires_grad=True), data(5, 4), torch.tensor([1, 3]))


def indexing() -> Any:
    def run(x: torch.Tensor, at: torch.Tensor) -> Any:
        table = x[at, :2]
        mask = x > 0
        filled = x.masked_fill(mask, 0.5)
        filled[mask] = 1.5
        filled[at[0]] += table[0, 0]
        return torch.where(mask, filled, x).gather(1, at[:, None]), table.long() + at[:, None]

    return run, (data(3, 4, requires_grad=True), torch.tensor([2, 0, 1]))


def several_outputs() -> Any:
    def run(x: torch.Tensor) -> Any:
        a, b, c = x.chunk(3, dim=1)
        values, places = (a * b).topk(2)
        d, e = c.sin().split([1, 3])
        f = torch.unbind(d + e)
        largest = x.max(dim=1)
        return torch.cat(f), values.sum() + places, largest.values * 2, torch.std_mean(x)

    return run, (data(4, 6, requires_grad=True),)


def conditions() -> Any:
    def run(x: torch.Tensor) -> Any:
        y = x.sin()
        z = torch.cond(y.sum() > 0, lambda a: a.exp() + 1, lambda a: a.cos() * 2, (y,))
        return z * y

    return run, (data(3, 4),)


def checkpoints() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def run(x: torch.Tensor) -> Any:
        y = checkpoint(model, x.sin(), use_reentrant=False)
        return checkpoint(lambda a: model(a).cos(), y * 2, use_reentrant=False).sum()

    return run, (data(3, 4, requires_grad=True),)


def autocasts() -> Any:
    model = nn.Linear(4, 4)

    def run(x: torch.Tensor) -> Any:
        y = model(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = model(y)
            with torch.autocast("cpu", enabled=False):
                z = z.float() @ y.t()
            w = z @ y
        return model(w.float()) + z.sum()

    return run, (data(3, 4),)


def gradients_off() -> Any:
    model = nn.Linear(4, 4)

    def run(x: torch.Tensor) -> Any:
        with torch.no_grad():
            target = model(x).softmax(1)
            with torch.enable_grad():
                shift = x.exp()
            target = target * 2
        y = model(x).log_softmax(1)
        with torch.inference_mode():
            seen = y.argmax(1) + 1
        return (target * y).sum() + shift.sum(), seen

    return run, (data(3, 4, requires_grad=True),)


def transforms() -> Any:
    def run(x: torch.Tensor) -> Any:
        y = x.sin()
        z = torch.func.vmap(lambda row: row.cumsum(0) * 2)(y)
        slope = torch.func.grad(lambda a: (a.cos() * y).sum())(x)
        return z * slope + y

    return run, (data(3, 4),)


def chosen_kernels() -> Any:
    def run(x: torch.Tensor) -> Any:
        y = x * 2
        with sdpa_kernel(SDPBackend.MATH):
            z = nn.functional.scaled_dot_product_attention(y, x, x, is_causal=True)
        return nn.functional.scaled_dot_product_attention(z, y, x) + 1

    return run, (data(1, 2, 4, 4, requires_grad=True),)


def derivatives() -> Any:
    def run(x: torch.Tensor) -> Any:
        def norm(y: torch.Tensor) -> torch.Tensor:
            return (y.sin() * y.flip(0)).sum()

        slopes = torch.func.jacrev(lambda y: y.cos() * y)(x * 2)
        pushed = torch.func.jacfwd(lambda y: y.exp() * y)(x)
        return torch.func.hessian(norm)(x) + 1, slopes @ pushed

    return run, (data(4),)


def odd_layouts() -> Any:
    def run(x: torch.Tensor) -> Any:
        wide = x[:, :1].expand(4, 4)
        turned = x.t()[1:]
        nothing = x[:0].cos()
        weaved = torch.as_strided(x.exp(), (2, 2), (5, 2), 1)
        return wide * 2, turned.sin(), torch.cat([nothing, x]), weaved * weaved

    return run, (data(4, 4, requires_grad=True),)


def complex_numbers() -> Any:
    def run(x: torch.Tensor) -> Any:
        phase = torch.complex(x, x * 2).conj()
        return phase.imag + 1, phase * 2, phase.real.clone().neg_()

    return run, (data(4, 4, requires_grad=True),)


def random_numbers() -> Any:
    def run(x: torch.Tensor) -> Any:
        y = x + torch.rand(4)
        z = nn.functional.dropout(y, 0.5) * torch.randn_like(x)
        return z.bernoulli_(0.3) + x.detach().clone().normal_()

    return run, (data(3, 4),)


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        convolutions,
        attention,
        dropout,
        recurrence,
        writes_in_place,
        writes_through_views,
        writes_to_inputs,
        indexing,
        several_outputs,
        conditions,
        checkpoints,
        autocasts,
        gradients_off,
        transforms,
        derivatives,
        chosen_kernels,
        odd_layouts,
        complex_numbers,
        random_numbers,
    )
}
