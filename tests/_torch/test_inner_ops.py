"""Ops that torch keeps to itself and that exported programs name."""

from __future__ import annotations

import pytest

from shardscope._torch.inner_ops import INNER_OPS, inner_op


@pytest.mark.parametrize("name", INNER_OPS)
def test_torch_still_has_the_op(name: str) -> None:
    assert inner_op(name) is not None, (
        f"torch moved aten._{name}; _torch/inner_ops.py needs it to cut programs that name it."
    )


def test_an_op_that_nobody_watches_is_not_handed_out() -> None:
    with pytest.raises(AssertionError, match="list conj among the inner ops"):
        inner_op("conj")
