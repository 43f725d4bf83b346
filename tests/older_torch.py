"""What torch has since a version, and older ones, which we support too, do not."""

from __future__ import annotations

import re

import torch

__all__ = ["IS_OLDER", "TORCH", "find_missing"]

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
IS_OLDER = TORCH < (2, 13)

_SINCE = {
    "batch_p2p_ops": (2, 13),
    "irecv": (2, 13),
    "isend": (2, 13),
    "nccl_reduce_scatter_offset": (2, 13),
    "_user_meta": (2, 13),
    "gather_into_tensor_": (2, 14),
    "gather_single": (2, 14),
    "_low_contention_all_gather_ce_multicast": (2, 14),
    "_low_contention_all_gather_ce_multicast_out": (2, 14),
    "nccl_all_to_all_nd": (2, 15),
}
_MISSING = re.compile(rf"has no (?:op \S+::|attribute ')({'|'.join(_SINCE)})\b")


def find_missing(error: BaseException) -> str | None:
    """Which of these names an error is about, in a sentence; None in a torch that has them."""
    found = _MISSING.search(str(error))
    if found is None or _SINCE[found[1]] <= TORCH:
        return None
    since = ".".join(map(str, _SINCE[found[1]]))
    return f"torch {torch.__version__} has no {found[1]}, which came with {since}"
