"""What torch has since 2.13, and versions before it, which we support too, do not."""

from __future__ import annotations

import re

import torch

__all__ = ["IS_OLDER", "find_missing"]

IS_OLDER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)

_NAMES = (
    "batch_p2p_ops",
    "irecv",
    "isend",
    "nccl_reduce_scatter_offset",
    "_user_meta",
    "_warmup_backward_result",
    "_warmup_forward_vote",
)
_MISSING = re.compile(rf"has no (?:op \S+::|attribute ')({'|'.join(_NAMES)})\b")


def find_missing(error: BaseException) -> str | None:
    """Which of these names an error is about, in a sentence; None in a torch that has them."""
    found = _MISSING.search(str(error)) if IS_OLDER else None
    return f"torch {torch.__version__} has no {found[1]}" if found else None
