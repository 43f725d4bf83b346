"""The values of tensors, as they were before something ran and are again after it."""

from __future__ import annotations

from typing import final

import torch

from shardscope._torch.fakes import FakeTensor
from shardscope._torch.private import find_name

__all__ = ["KeptTensors"]


_set_version_counter = find_name(
    "torch._C._autograd._unsafe_set_version_counter",
    "restore tensor versions, so that an earlier autograd graph stays valid",
)


@final
class KeptTensors:
    """Remembers values, and puts back those that changed; tensors on devices wait on the host."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor, int | None]] = {}

    def keep(self, tensor: torch.Tensor) -> None:
        """Remember a tensor's values; one without data has none."""
        if id(tensor) in self._kept or tensor.is_meta or isinstance(tensor, FakeTensor):
            return
        with torch.no_grad():
            copy = tensor.detach().clone() if tensor.is_cpu else tensor.detach().cpu()
        self._kept[id(tensor)] = (tensor, copy, _version(tensor))

    def put_back(self) -> None:
        """Give each tensor that changed its values again."""
        with torch.no_grad():
            for tensor, values, version in self._kept.values():
                if _version(tensor) != version or not _is_same(tensor, values):
                    _restore(tensor, values)
                    _set_version(tensor, version)
        self._kept.clear()


def _version(tensor: torch.Tensor) -> int | None:
    """Inference tensors have none."""
    return None if tensor.is_inference() else tensor._version


def _is_same(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    # Changes through .data leave the version as it was.
    now, before = _list_plain(tensor.detach().to(values.device)), _list_plain(values)
    return len(now) == len(before) and all(
        one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
        for one, other in zip(now, before, strict=True)
    )


def _list_plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Dense tensors with the values of one of whatever kind."""
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.is_quantized:
        return [tensor.int_repr()]
    return [tensor if tensor.layout is torch.strided else tensor.to_dense()]


def _restore(tensor: torch.Tensor, values: torch.Tensor) -> None:
    if tensor.is_nested:
        for one, other in zip(tensor.unbind(), values.unbind(), strict=True):
            one.data.copy_(other)
    elif tensor.shape != values.shape or tensor.dtype != values.dtype:
        tensor.data = values.to(tensor.device)
    elif tensor.is_inference():
        with torch.inference_mode():
            tensor.copy_(values)
    elif tensor.layout is not torch.strided:
        tensor.copy_(values)  # .data of a sparse tensor is another one
    else:
        tensor.data.copy_(values)


def _set_version(tensor: torch.Tensor, version: int | None) -> None:
    # A graph that was recorded before must not believe that what it saved has changed.
    if version is not None:
        _set_version_counter((tensor,), (version,))
