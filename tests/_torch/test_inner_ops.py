"""Private aten ops that exported programs contain."""

from __future__ import annotations

import pytest

from shardscope._torch.dispatch import PRIVATE_ATEN_OPS, private_aten_op


@pytest.mark.parametrize("name", PRIVATE_ATEN_OPS)
def test_torch_has_the_private_op(name: str) -> None:
    assert private_aten_op(name) is not None, (
        f"torch moved aten._{name}; _torch/dispatch.py needs it to cut programs that name it."
    )


def test_an_op_that_is_not_listed_is_refused() -> None:
    with pytest.raises(AssertionError, match="list conj among the inner ops"):
        private_aten_op("conj")
