"""Two failures of one origin look the same, however the program around them shrinks."""

from __future__ import annotations

import pytest
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InductorError, LoweringException

from shardscope.compile.diagnose.accuracy.check_result import find_cause, make_signature


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("no kernel for relu_3 at 0x7f01", "no kernel for relu at 0x55"),
        ("shapes [3, 4] and [5] differ", "shapes [7] and [1, 2] differ"),
        ("no attribute 'arg0_1'", "no attribute 'buf7'"),
        ("tensor a (3) must match b (4)", "tensor a (16) must match b (17)"),
        ("expected 0.25, got 1e-05", "expected 3, got 4"),
        ("node %relu_2 failed", "node %add failed"),
        ("no relu (/home/me/train.py:12)", "no relu (/tmp/out/repro.py:45)"),
        ("no relu (train.py:12)", "no relu (../repro.py:45)"),
        (
            "kernel.cpp\n/tmp/a.cpp:3: error: x12 is no y",
            "other.cpp\n/tmp/a.cpp:9: error: x7 is no y",
        ),
    ],
)
def test_names_numbers_and_shapes_do_not_distinguish_failures(left, right):
    assert make_signature(ValueError(left)) == make_signature(ValueError(right))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (ValueError("no kernel for relu"), ValueError("no kernel for gelu")),
        (ValueError("no"), TypeError("no")),
        (ValueError(""), ValueError("no")),
    ],
)
def test_failures_of_other_origins_differ(left, right):
    assert make_signature(left) != make_signature(right)


def test_wrappers_are_taken_off():
    cause = KeyError("which")
    try:
        try:
            raise cause
        except KeyError as error:
            raise LoweringException(error, "relu", [], {}) from None
    except LoweringException as error:
        lowered = error
    wrapped = BackendCompilerFailed(len, InductorError(lowered, None), None)
    assert find_cause(wrapped) is cause
    assert make_signature(wrapped) == make_signature(KeyError("other"))
