"""What programs take and return: nests, nothing, numbers, the same thing twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from parallel_cases.case import Case, drawn
from parallel_cases.layers import PAIR, Mlp
from shardscope.parallel import Shard

__all__ = ["signature_cases"]

PLAN = {f"mlp.{name}": style for name, style in PAIR.items()}


class Holder(nn.Module):
    """Its MLP, for what each signature makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()


class TakesADict(Holder):
    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"logits": self.mlp(batch["x"]) + batch["y"], "extra": [batch["y"] * 2]}


class TakesANest(Holder):
    def forward(self, parts: tuple[Tensor, list[Any]], flags: dict[str, Any]) -> Any:
        x, (y, scale) = parts
        return self.mlp(x) * scale + y if flags["add"] else self.mlp(x)


class TakesOptions(Holder):
    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, flip: bool = False
    ) -> Tensor:
        y = self.mlp(x.flip(0) if flip else x) * scale
        return y if mask is None else y.masked_fill(mask, 0.0)


class TakesKeywords(Holder):
    def forward(self, *, x: Tensor, **more: Tensor) -> Tensor:
        return self.mlp(x) + more["bias"]


class TakesAnyNumber(Holder):
    def forward(self, *xs: Tensor) -> Tensor:
        return torch.stack([self.mlp(x) for x in xs]).sum(0)


class Returns(Holder):
    """What a function makes of the input, the hidden values and the output."""

    def __init__(self, make: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        h = self.mlp.up(x)
        return self.make(x, h, self.mlp.down(F.relu(h)))


RETURNS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "a nest": lambda x, h, y: {"a": [y, (h, {"b": y + 1})], "c": ()},
    "nothing beside": lambda x, h, y: (y, None, {"none": None}),
    "one thing twice": lambda x, h, y: (y, y, [h, h]),
    "its input": lambda x, h, y: (x, y),
    "a view of its input": lambda x, h, y: (x.view(2, 2, 8), y, x[0]),
    "a list of one": lambda x, h, y: [y],
    "numbers": lambda x, h, y: (y, 3, 2.5, "text", True),
    "a scalar": lambda x, h, y: y.sum(),
    "what is cut": lambda x, h, y: h,
    "what is cut, summed": lambda x, h, y: h.sum(),
    "what is cut, and its largest": lambda x, h, y: (h, h.amax(-1), h.argmax(-1)),
    "views of what is cut": lambda x, h, y: (h.T, h.view(4, 2, 8), h[:, ::2], h.chunk(4, -1)),
    "booleans and integers": lambda x, h, y: (h > 0, (h > 0).sum(), h.topk(2).indices, y),
    "complex numbers": lambda x, h, y: torch.complex(h, h * 2).exp(),
    "a constant": lambda x, h, y: (y, torch.arange(3)),
}


def signature_cases() -> Iterator[Case]:
    x = lambda *shape: lambda: (drawn(*shape),)  # noqa: E731
    yield Case("takes a dict", TakesADict, lambda: ({"x": drawn(4, 8), "y": drawn(4, 8)},), PLAN)
    yield Case(
        "takes a dict, one of it cut",
        TakesADict,
        lambda: ({"x": drawn(4, 8), "y": drawn(4, 8)},),
        PLAN,
        mesh="dp=2,tp=2",
        inputs={"batch.x": {"dp": Shard(0)}, "batch.y": {"dp": Shard(0)}},
    )
    nest = lambda: ((drawn(4, 8), [drawn(4, 8), 0.5]), {"add": True, "none": None})  # noqa: E731
    yield Case("takes a nest", TakesANest, nest, PLAN)
    yield Case(
        "takes nothing for an option",
        TakesOptions,
        x(4, 8),
        PLAN,
        named=lambda: {"mask": None, "scale": 2.0},
    )
    yield Case(
        "takes options",
        TakesOptions,
        lambda: (drawn(4, 8), drawn(4, 8) > 0),
        PLAN,
        named=lambda: {"scale": 3, "flip": True},
    )
    yield Case(
        "takes keywords",
        TakesKeywords,
        tuple,
        PLAN,
        named=lambda: {"x": drawn(4, 8), "bias": drawn(8)},
    )
    yield Case("takes any number", TakesAnyNumber, lambda: (drawn(4, 8), drawn(4, 8)), PLAN)
    for name, make in RETURNS.items():
        smooth = "numbers" not in name or "complex" in name
        make_model = lambda make=make: Returns(make)  # noqa: E731
        yield Case(f"returns {name}", make_model, x(4, 8), PLAN, trains=smooth, has_outputs=True)
        if name in ("a nest", "what is cut, summed", "views of what is cut", "one thing twice"):
            data = {"x": {"dp": Shard(0)}}
            yield Case(
                f"returns {name}, of cut data",
                make_model,
                x(4, 8),
                PLAN,
                mesh="dp=2,tp=2",
                inputs=data,
                has_outputs=True,
            )
    yield Case("an empty batch", Holding, x(0, 8), PLAN)
    yield Case("a batch of one", Holding, x(1, 8), PLAN)
    yield Case("a scalar in, a scalar out", Scalar, lambda: (drawn(),), PLAN)


class Holding(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class Scalar(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x.expand(8)).sum() * x
