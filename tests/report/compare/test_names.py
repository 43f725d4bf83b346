"""Names that wrappers change are the same."""

from __future__ import annotations

import pytest

from compared_recordings import (
    MIB,
    list_changes,
    make_memory,
    make_module,
    make_parameter,
    make_traced,
)
from sample_recordings import make_recording
from shardscope.record import MemoryKind
from shardscope.report.compare.changes import Area
from shardscope.report.compare.compare_recordings import compare

HELD = MemoryKind.PARAMETERS


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("_orig_mod.layers.0", "layers.0"),
        ("layers.0._fsdp_wrapped_module.up", "layers.0.up"),
        ("layers._checkpoint_wrapped_module.0", "layers.0"),
        ("module._orig_mod.layers.0", "layers.0"),
        ("module", ""),
    ],
)
def test_modules_that_wrappers_renamed_are_the_same(wrapped, plain):
    before, after = make_traced({plain: 1, "": 1}), make_traced({wrapped: 1, "": 1})
    if wrapped == "module":
        before, after = make_traced({"": 1}), make_traced({wrapped: 1})
    assert not compare(before, after)
    assert not compare(after, before)


def test_a_module_that_is_really_called_module_keeps_its_name():
    before = make_traced({"module.a": 1})
    after = make_traced({"module.a": 1, "head": 1})
    assert list_changes(before, after, Area.COLLECTIVES) == [
        "added worse | head: all_reduce[tp] in forward: – → 1"
    ]


def test_names_that_wrappers_put_into_facts_are_cleaned_too():
    def recorded(prefix: str):
        parameter = make_parameter(
            fsdp_group=f"{prefix}layers.0", alias_group=f"{prefix}head.weight"
        )
        return make_recording(
            modules=(make_module(f"{prefix}layers.0", parameter),),
            memory=(make_memory((HELD, f"{prefix}layers.0", MIB)),),
        )

    assert not compare(recorded(""), recorded("_orig_mod."))
