"""One op after a value that is cut: along each of its dims in turn, evenly and not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from parallel_cases.case import Case, drawn
from shardscope.parallel import Shard

__all__ = ["op_cases"]


class Each(nn.Module):
    """The op's results on a value that is cut along one dim, on one that is cut along another, …"""

    def __init__(self, op: Callable[[Tensor], Any], shape: tuple[int, ...], num_dims: int) -> None:
        super().__init__()
        self.op = op
        self.factors = nn.ParameterList(nn.Parameter(torch.randn(shape)) for _ in range(num_dims))

    def forward(self, x: Tensor) -> list[Any]:
        return [self.op(x * factor) for factor in self.factors]


Op = Callable[[Tensor], Any]

# Of (4, 6, 8): along dims by name and by their negative, with and without keepdim.
SMOOTH: dict[str, Op] = {
    "activations": lambda x: (F.gelu(x), F.silu(x), F.softplus(x), F.hardtanh(x), F.leaky_relu(x)),
    "functions": lambda x: (x.tanh(), x.erf(), x.exp(), x.abs().log1p(), (x * x + 1).rsqrt()),
    "powers": lambda x: (x**2, 2.0**x, x.abs() ** 0.5),
    "clamp": lambda x: (x.clamp(-0.5, 0.7), x.clamp(x.mean(0), x.mean(0) + 1)),
    "where": lambda x: (torch.where(x > 0, x, 0.1 * x), x.masked_fill(x > 0.5, 2.0)),
    "itself": lambda x: (x * x, x.lerp(x * x, 0.3), torch.addcmul(x, x, x), x.maximum(-x)),
    "minus its transpose": lambda x: x[:, :, :6] - x[:, :, :6].transpose(1, 2),
    "plus a row": lambda x: x * torch.tensor(2.0) + torch.arange(8.0, dtype=x.dtype),
    "plus a column": lambda x: x + torch.arange(6.0, dtype=x.dtype)[:, None],
    "to float and back": lambda x: x.float().to(x.dtype),
    "softmax(0)": lambda x: x.softmax(0),
    "softmax(1)": lambda x: x.softmax(1),
    "softmax(-1)": lambda x: x.softmax(-1),
    "softmax(-2), to float": lambda x: F.softmax(x, -2, dtype=torch.float32),
    "log_softmax(0)": lambda x: x.log_softmax(0),
    "log_softmax(-1)": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: (x.logsumexp(-1), x.logsumexp((0, 1), keepdim=True)),
    "cumsum(0)": lambda x: x.cumsum(0),
    "cumsum(-1)": lambda x: x.cumsum(-1),
    "cumprod(-2)": lambda x: x.cumprod(-2),
    "logcumsumexp(-1)": lambda x: torch.logcumsumexp(x, -1),
    "cummax": lambda x: x.cummax(1).values,
    "sum": lambda x: (x.sum(), x.sum(-1), x.sum((0, 2)), x.sum(1, keepdim=True), x.sum([])),
    "mean": lambda x: (x.mean(), x.mean(0), x.mean((-1, -2), keepdim=True)),
    "prod": lambda x: (x.prod(-1), x.prod(0, keepdim=True)),
    "var": lambda x: (x.var(), x.var(-1), x.var((0, 1), correction=0, keepdim=True)),
    "std": lambda x: (x.std(0), x.std(-1, unbiased=False)),
    "var_mean": lambda x: torch.var_mean(x, -1),
    "norm": lambda x: (x.norm(), x.norm(dim=-1), x.norm(p=1, dim=0, keepdim=True)),
    "vector_norm": lambda x: (torch.linalg.vector_norm(x, 3, -1), F.normalize(x, dim=1)),
    "infinity norm": lambda x: torch.linalg.vector_norm(x, float("inf"), 1),
    "amax": lambda x: (x.amax(-1), x.amin(0), x.amax((1, 2), keepdim=True)),
    "max along a dim": lambda x: (x.max(-1).values, x.min(0).values),
    "max of all": lambda x: (x.max(), x.min()),
    "aminmax": lambda x: (torch.aminmax(x, dim=-1).min, torch.aminmax(x, dim=0).max),
    "median": lambda x: x.median(-1).values,
    "topk": lambda x: (x.topk(3, -1).values, x.topk(2, 0, largest=False).values),
    "sort": lambda x: (x.sort(-1).values, x.sort(0, descending=True).values),
    "kthvalue": lambda x: x.kthvalue(2, 1).values,
    "cat": lambda x: (torch.cat([x, x], 0), torch.cat([x, 2 * x], -1)),
    "cat with what is whole": lambda x: torch.cat([x, torch.ones_like(x[:, :1])], 1),
    "stack": lambda x: (torch.stack([x, 2 * x]), torch.stack([x, x], -1)),
    "split": lambda x: [*x.split(2, 0), *x.split([1, 7], -1), *x.split(4, 1)],
    "chunk": lambda x: [*x.chunk(2, -1), *x.chunk(3, 1)],
    "unbind": lambda x: [2 * one for one in x.unbind(1)],
    "tensor_split": lambda x: x.tensor_split(3, -1),
    "slice": lambda x: (x[1:3], x[:, ::2], x[..., 2:], x[..., -3:-1]),
    "select": lambda x: (x[1], x[:, -1], x[..., 0], x.select(2, 5)),
    "narrow": lambda x: x.narrow(-1, 1, 6),
    "index": lambda x: (x[:, torch.tensor([2, 0, 2])], x[torch.tensor([1, 3])]),
    "index by two": lambda x: x[torch.tensor([0, 1]), :, torch.tensor([5, 2])],
    "index by a mask": lambda x: x * (x > 0),
    "index_select": lambda x: (
        x.index_select(-1, torch.tensor([7, 0])),
        x.index_select(0, torch.tensor([2])),
    ),
    "gather": lambda x: (
        x.gather(1, torch.ones(4, 2, 8, dtype=torch.long)),
        torch.take_along_dim(x, x.argmax(-1, keepdim=True), -1),
    ),
    "scatter": lambda x: x.scatter(1, torch.ones(4, 1, 8, dtype=torch.long), x[:, :1] * 2),
    "scatter_add": lambda x: x.scatter_add(-1, torch.zeros(4, 6, 3, dtype=torch.long), x[..., :3]),
    "index_add": lambda x: x.index_add(1, torch.tensor([0, 2]), x[:, 1:3]),
    "index_copy": lambda x: x.index_copy(0, torch.tensor([3]), x[:1] * 2),
    "index_put": lambda x: x.index_put((torch.tensor([0, 1]),), x[2:] * 3),
    "flip": lambda x: (x.flip(0), x.flip(-1), x.flip((1, 2))),
    "roll": lambda x: (x.roll(1, 0), x.roll(-2, -1), x.roll((1, 1), (0, 1)), x.roll(3)),
    "pad": lambda x: (
        F.pad(x, (1, 2)),
        F.pad(x, (0, 0, 1, -1)),
        F.pad(x, (0, 0, 0, 0, 1, 1), value=2.0),
    ),
    "pad by reflection": lambda x: F.pad(x, (2, 1), "reflect"),
    "tril": lambda x: (x.tril(), x.triu(1), x.transpose(0, 2).tril(-1)),
    "diagonal": lambda x: (x.diagonal(dim1=0, dim2=1), x.diagonal(1, 1, 2)),
    "diag_embed": lambda x: x.diag_embed(),
    "einsum": lambda x: (
        torch.einsum("bij,bkj->bik", x, x),
        torch.einsum("bij->ji", x),
        torch.einsum("bij,b->j", x, x[:, 0, 0]),
    ),
    "matmul": lambda x: (x @ x.mT, x.mT @ x, x @ torch.ones(8, dtype=x.dtype)),
    "bmm": lambda x: torch.bmm(x, x.transpose(1, 2)),
    "baddbmm": lambda x: torch.baddbmm(x[:, :, :6], x, x.mT, beta=0.5, alpha=2),
    "mm": lambda x: (x[0] @ x[1].T, torch.addmm(x[0, 0, :6], x[1], x[2].T)),
    "outer": lambda x: (torch.outer(x[0, 0], x[:, 1, 1]), x[0].mv(x[1, 1]), x[0, 0].dot(x[1, 1])),
    "kron": lambda x: torch.kron(x[0, 0], x[0, :, 0]),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "cosine similarity": lambda x: F.cosine_similarity(x, x.roll(1, 0), dim=-1),
    "view": lambda x: (x.view(24, 8), x.view(4, 48), x.reshape(-1), x.view(2, 2, 6, 4, 2)),
    "reshape that mixes dims": lambda x: (x.reshape(8, 24), x.reshape(3, 64), x.view(16, 12)),
    "flatten": lambda x: (x.flatten(1), x.flatten(0, 1), x.unflatten(-1, (2, 4))),
    "transpose": lambda x: (x.transpose(0, -1), x.permute(1, 2, 0), x.movedim(0, 1), x.mT),
    "transpose and reshape": lambda x: x.transpose(1, 2).reshape(4, 48),
    "unsqueeze and squeeze": lambda x: (
        x.unsqueeze(1),
        x[:, :1].squeeze(1),
        x.unsqueeze(-1).squeeze(),
    ),
    "expand": lambda x: (x.unsqueeze(0).expand(3, -1, -1, -1), x[:, :1].expand(-1, 5, -1)),
    "repeat": lambda x: (x.repeat(2, 1, 1), x.repeat(1, 1, 2), x.repeat_interleave(2, 1)),
    "broadcast": lambda x: torch.broadcast_tensors(x, x[:1]),
    "meshgrid": lambda x: torch.meshgrid(x[0, 0], x[0, :, 0], indexing="ij"),
    "unfold": lambda x: x.unfold(-1, 4, 2),
    "as rows of the last": lambda x: x.contiguous().view(-1, x.size(-1)).sum(0),
    "layer_norm": lambda x: (F.layer_norm(x, (8,)), F.layer_norm(x, (6, 8))),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "rms_norm by hand": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "group_norm": lambda x: F.group_norm(x, 3),
    "instance_norm": lambda x: F.instance_norm(x),
    "batch_norm without state": lambda x: F.batch_norm(x, None, None, training=True),
    "glu": lambda x: F.glu(x, -1),
    "swiglu": lambda x: F.silu(x[..., :4]) * x[..., 4:],
    "maxout": lambda x: x.view(4, 6, 4, 2).amax(-1),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 2),
    "max_pool1d": lambda x: F.max_pool1d(x, 3, 1, 1),
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x, 2),
    "interpolate": lambda x: (
        F.interpolate(x, scale_factor=2),
        F.interpolate(x, size=5, mode="linear"),
    ),
    "conv1d": lambda x: F.conv1d(x, torch.ones(2, 6, 3, dtype=x.dtype), padding=1),
    "grouped conv1d": lambda x: F.conv1d(x, torch.ones(6, 1, 3, dtype=x.dtype), groups=6),
    "conv_transpose1d": lambda x: F.conv_transpose1d(
        x, torch.ones(6, 2, 3, dtype=x.dtype), stride=2
    ),
    "linear": lambda x: F.linear(
        x, torch.ones(3, 8, dtype=x.dtype), torch.arange(3.0, dtype=x.dtype)
    ),
    "bilinear": lambda x: F.bilinear(x, x, torch.ones(2, 8, 8, dtype=x.dtype)),
    "mse_loss": lambda x: (
        F.mse_loss(x, x * x),
        F.mse_loss(x, x + 1, reduction="none"),
        F.mse_loss(x, x * 2, reduction="sum"),
    ),
    "smooth losses": lambda x: (
        F.smooth_l1_loss(x, x * x),
        F.huber_loss(x, 2 * x),
        F.l1_loss(x, x * x),
    ),
    "kl_div": lambda x: F.kl_div(x.log_softmax(-1), (2 * x).softmax(-1), reduction="batchmean"),
    "bce with logits": lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).to(x.dtype)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.ones(4, 8, dtype=torch.long)),
    "cross_entropy, smoothed": lambda x: F.cross_entropy(
        x.flatten(0, 1), torch.arange(24) % 8, label_smoothing=0.1
    ),
    "cross_entropy, some ignored": lambda x: F.cross_entropy(
        x.flatten(0, 1), torch.where(torch.arange(24) % 3 == 0, -100, torch.arange(24) % 8)
    ),
    "cross_entropy, weighted": lambda x: F.cross_entropy(
        x,
        torch.ones(4, 8, dtype=torch.long),
        weight=torch.arange(1.0, 7.0, dtype=x.dtype),
        reduction="none",
    ),
    "nll_loss": lambda x: F.nll_loss(x.log_softmax(1), torch.ones(4, 8, dtype=torch.long)),
    "complex": lambda x: torch.view_as_real(
        torch.view_as_complex(x.view(4, 6, 4, 2))
        * torch.polar(torch.ones(4, dtype=x.dtype), torch.arange(4.0, dtype=x.dtype))
    ),
    "fft": lambda x: torch.fft.rfft(x, dim=1).abs(),
    "in place": lambda x: x.clone().add_(1).mul_(x).clamp_(max=2),
    "written through a view": lambda x: _write_through(x),
    "copied into": lambda x: torch.zeros_like(x).copy_(x) + x.new_zeros(8),
    "filled like": lambda x: x + torch.full_like(x, 2) + torch.ones_like(x) + x.new_full((6, 8), 1),
    "its size": lambda x: x * x.shape[-1] / x.size(0) + x.numel(),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "causal attention": lambda x: F.scaled_dot_product_attention(x, x + 1, x, is_causal=True),
}

# Results without gradients, or ops without them.
ROUGH: dict[str, Op] = {
    "argmax": lambda x: (x.argmax(-1), x.argmin(0, keepdim=True), x.argmax()),
    "argsort": lambda x: (x.argsort(-1), x.argsort(0, descending=True)),
    "topk with indices": lambda x: tuple(x.topk(3, -1)),
    "sort with indices": lambda x: tuple(x.sort(dim=1, stable=True)),
    "comparisons": lambda x: (x > 0, x.eq(x), torch.isnan(x), x.isfinite().all(), (x > 5).any(-1)),
    "all and any": lambda x: ((x > -9).all(), (x > 1).any(0), (x < 0).all(-1, keepdim=True)),
    "count": lambda x: ((x > 0).sum(), (x > 0).sum(-1), torch.count_nonzero(x > 0, dim=1)),
    "rounding": lambda x: (x.round(), x.floor(), x.ceil(), x.trunc(), x.sign(), x // 0.3),
    "to integers": lambda x: ((x * 5).long() % 3, (x * 5).int().bitwise_and(3)),
    "one_hot": lambda x: F.one_hot((x > 0).long(), 3),
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0], dtype=x.dtype)),
    "searchsorted": lambda x: torch.searchsorted(x.sort(-1).values, x),
    "cummax with indices": lambda x: tuple(x.cummax(-1)),
    "unique by sorting": lambda x: (x.sort(-1).values.diff(dim=-1) > 0).sum(-1),
    "isin": lambda x: torch.isin((x * 3).long(), torch.tensor([0, 1])),
    "max with indices": lambda x: (*x.max(-1), *x.min(0)),
    "histogram": lambda x: (x.unsqueeze(-1) > torch.tensor([0.0, 1.0], dtype=x.dtype)).sum((0, 1)),
    "nan_to_num": lambda x: (x / (x > 0)).nan_to_num(1.0, posinf=2.0, neginf=3.0),
}

RANDOM: dict[str, Op] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout2d": lambda x: F.dropout1d(x, 0.5),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like and randn": lambda x: x * torch.randn_like(x) + torch.randn(8),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()),
    "attention with dropout": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
    "alpha dropout in place": lambda x: F.dropout(x.clone(), 0.2, inplace=True),
    "multinomial": lambda x: x[0] * torch.multinomial(x[:, 0].softmax(-1), 1).sum(),
}

IMAGES: dict[str, Op] = {
    "conv2d": lambda x: F.conv2d(
        x, torch.ones(3, 4, 3, 3, dtype=x.dtype), torch.ones(3, dtype=x.dtype), padding=1
    ),
    "strided conv2d": lambda x: F.conv2d(
        x, torch.ones(4, 2, 2, 2, dtype=x.dtype), stride=2, groups=2
    ),
    "dilated conv2d": lambda x: F.conv2d(
        x, torch.ones(2, 4, 3, 3, dtype=x.dtype), dilation=2, padding="same"
    ),
    "conv_transpose2d": lambda x: F.conv_transpose2d(
        x, torch.ones(4, 3, 2, 2, dtype=x.dtype), stride=2
    ),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, stride=1, padding=1),
    "adaptive pools": lambda x: (F.adaptive_avg_pool2d(x, 1), F.adaptive_max_pool2d(x, 2)),
    "interpolate2d": lambda x: (
        F.interpolate(x, scale_factor=2),
        F.interpolate(x, size=(3, 5), mode="bilinear"),
    ),
    "pixel shuffle": lambda x: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2)),
    "group_norm2d": lambda x: F.group_norm(x, 2, torch.arange(4.0, dtype=x.dtype)),
    "batch_norm2d": lambda x: F.batch_norm(
        x, torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype)
    ),
    "im2col": lambda x: F.unfold(x, 2),
    "pad2d": lambda x: F.pad(x, (1, 1, 2, 0), mode="replicate"),
    "patches": lambda x: (
        x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).reshape(2, 9, 16)
    ),
}


def _write_through(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:3].mul_(2)
    y[0, :, ::2] = 0.5
    y.view(24, 8)[3].add_(y[1, 1].detach())
    return y


# Of those whose gradients the proofs of rules do not settle: ops that are taken apart, that ranks
# spell in their own way, or that fall back.
TRAINED = """activations|where|itself|minus its transpose|softmax(0)|softmax(-1)|log_softmax(-1)|
logsumexp|cumsum(-1)|sum|mean|var|norm|amax|max along a dim|topk|sort|cat|cat with what is whole|
stack|split|chunk|slice|select|index|index by two|gather|scatter|index_add|index_put|flip|roll|pad|
tril|diagonal|einsum|matmul|baddbmm|outer|cdist|view|reshape that mixes dims|transpose|
expand|repeat|layer_norm|rms_norm|group_norm|batch_norm without state|glu|conv1d|linear|mse_loss|
cross_entropy|cross_entropy, smoothed|cross_entropy, some ignored|nll_loss|complex|fft|in place|
written through a view|copied into|its size|causal attention|dropout|rand_like|
attention with dropout|conv2d|conv_transpose2d|max_pool2d|group_norm2d|batch_norm2d"""


def op_cases() -> Iterator[Case]:
    """Every op on ranks that hold uneven pieces, or none; trained where the pieces are even."""
    images = {name: (op, {"shape": (2, 4, 6, 6)}) for name, op in IMAGES.items()}
    random = {name: (op, {"is_random": True}) for name, op in RANDOM.items()}
    plain = {name: (op, {}) for name, op in {**SMOOTH, **ROUGH}.items()}
    trained = TRAINED.replace("\n", "").split("|")
    for index, (name, (op, more)) in enumerate({**plain, **random, **images}.items()):
        yield _run(name, op, mesh="tp=3", by_hand=index % 3 == 0, **more)
        if name in trained:
            trained.remove(name)
            even = {"mesh": "tp=2", "trains": True, "runs": False, **more}
            yield _run(name, op, by_hand=index % 3 == 1, **even)
    assert not trained, f"no such ops: {trained}"


def _run(
    name: str,
    op: Op,
    *,
    mesh: str,
    shape: tuple[int, ...] = (4, 6, 8),
    trains: bool = False,
    **more: Any,
) -> Case:
    dims = (0, len(shape) - 1) if trains else range(len(shape))
    return Case(
        f"{name}, {'trained' if trains else 'uneven'}",
        lambda: Each(op, shape, len(dims)),
        lambda: (drawn(*shape),),
        {f"factors.{index}": Shard(dim) for index, dim in enumerate(dims)},
        mesh=mesh,
        trains=trains,
        **{"tolerance": 1e-6 if "float" in name else 1e-9, **more},
    )
