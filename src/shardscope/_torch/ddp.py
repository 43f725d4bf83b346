"""DDP's reducer: its buckets, and how to make it work on tensors without data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardscope._torch.dispatch import TorchDispatchMode, detect_fake_mode, disable_dispatch_modes
from shardscope._torch.fake import without_data
from shardscope._torch.private import find_class
from shardscope._torch.tree import map_leaves
from shardscope.errors import WorldError

_NEED = "let DDP reduce gradients without data"

REPLICATED = find_class(
    "torch.distributed._composable.replicate.DDP",
    "recognise modules that `replicate` was applied to",
)
"""The base class that `replicate`, DDP without a wrapper, adds to modules."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters whose gradients are reduced together."""

    index: int
    num_elements: int
    parameters: tuple[torch.Tensor, ...]


def is_replicated(module: nn.Module) -> bool:
    """Whether `replicate`, DDP without a wrapper, was applied to `module`."""
    return isinstance(module, REPLICATED)


def read_buckets(module: DistributedDataParallel) -> list[Bucket]:
    """The current buckets. Not to be called in backward, where the reducer holds its lock."""
    # The reducer returns buckets only as zero tensors of their size: without data they are free.
    with without_data():
        buckets = module.reducer._get_zeros_like_grad_buckets()
    return [
        Bucket(bucket.index(), bucket.buffer().numel(), tuple(bucket.parameters()))
        for bucket in buckets
    ]


def has_final_buckets(module: DistributedDataParallel) -> bool:
    """Whether the reducer of `module` has its final buckets: it may rebuild them once."""
    if getattr(module, "_has_rebuilt_buckets", False):
        return True
    return bool(module.find_unused_parameters) and not module.static_graph


def is_in_comm_hook(frame: FrameType | None) -> bool:
    """Whether `frame` is inside a communication hook, a function with a `GradBucket` argument."""
    while frame is not None:
        if any(type(value) is dist.GradBucket for value in frame.f_locals.values()):
            return True
        frame = frame.f_back
    return False


@contextmanager
def reducers_without_data() -> Iterator[None]:
    """Make DDP work on tensors without data: only the reducer's own counters have data."""
    with ExitStack() as stack:
        # The number and shapes of the parameters, which rank 0 sends and each rank compares.
        _replace(stack, dist, "_verify_params_across_processes", _without_fakes)
        for name in ("__init__", "_rebuild_buckets", "_set_static_graph"):
            _replace(stack, dist.Reducer, name, _with_counts)
        _replace(stack, DistributedDataParallel, "_build_params_for_reducer", _refuse_sparse)
        yield


def _replace(stack: ExitStack, owner: Any, name: str, wrap: Callable[..., Any]) -> None:
    function = getattr(owner, name)
    stack.callback(setattr, owner, name, function)
    setattr(owner, name, wrap(function))


def _without_fakes(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if detect_fake_mode() is None:
            return function(*args, **kwargs)
        with disable_dispatch_modes():
            return function(*args, **kwargs)

    return call


def _with_counts(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if detect_fake_mode() is None:
            return function(*args, **kwargs)
        with _CountsWithData():
            return function(*args, **kwargs)

    return call


def _refuse_sparse(list_parameters: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap DDP's listing of parameters, and raise if any of their gradients is sparse."""

    @functools.wraps(list_parameters)
    def list_dense(module: DistributedDataParallel) -> Any:
        parameters, are_sparse = list_parameters(module)
        if any(are_sparse) and detect_fake_mode() is not None:
            raise WorldError(
                "DistributedDataParallel got a model with sparse gradients (nn.Embedding(…, "
                "sparse=True)) in a simulated world whose tensors have no data, on which their "
                'sizes depend. Use sparse=False, or simulate with device="cpu" and without '
                "materialize(); with the command line, add --data."
            )
        return parameters, are_sparse

    return list_dense


@final
class _CountsWithData(TorchDispatchMode):
    """Gives data to the int32 tensors that the reducer creates, where other tensors have none.

    They hold the order of buckets and which parameters were used; buckets have the dtype of
    gradients.
    """

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is not torch.int32:
            return op(*args, **kwargs)
        if kwargs.get("device") is not None and kwargs["device"].type == "cuda":
            # C++ would copy it through pinned memory, which has no data here.
            kwargs["device"] = torch.device("cpu")
        with disable_dispatch_modes():
            return _Counts(op(*args, **kwargs))


@final
class _Counts(torch.Tensor):
    """A tensor with data, on which ops are computed even where other tensors have none.

    The fake tensor mode leaves ops on classes that it does not know to the class.
    """

    data_tensor: torch.Tensor

    def __new__(cls, tensor: torch.Tensor) -> Self:
        counts: Self = torch.Tensor._make_subclass(cls, tensor)
        counts.data_tensor = tensor
        return counts

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        shown: dict[int, _Counts] = {}

        def unwrap(value: Any) -> Any:
            if not isinstance(value, _Counts):
                return value
            shown[id(value.data_tensor)] = value
            return value.data_tensor

        def wrap(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return shown[id(value)] if id(value) in shown else _Counts(value)

        with disable_dispatch_modes():
            args, kwargs = map_leaves(unwrap, args), map_leaves(unwrap, kwargs or {})
            return map_leaves(wrap, op(*args, **kwargs))
