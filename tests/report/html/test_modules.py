"""The module tree on a page, with figures added up by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sample_recordings import make_collective, make_recording
from shardscope.record import (
    Collective,
    CollectiveKind,
    Coverage,
    Finding,
    Level,
    Mark,
    MarkKind,
    MemoryKind,
    MemoryProfile,
    MemoryUse,
    Module,
    OpCoverage,
    OpVerdict,
    Parameter,
    Phase,
    RankSpan,
    Recording,
    Severity,
)
from shardscope.report.html.html import build_page
from shardscope.report.html.page_modules import Modules

NAMES = ("", "layers", "layers.0", "layers.0.up", "layers.1", "layers.1.up", "head")


def parameter(name: str, shape: tuple[int, ...], **changes: Any) -> Parameter:
    num = 4
    for size in shape:
        num *= size
    facts = {"local_shape": shape, "dtype": "float32", "global_bytes": num, "local_bytes": num // 2}
    return Parameter(name=name, shape=shape, **(facts | changes))


def module(name: str, *parameters: Parameter, **changes: Any) -> Module:
    kind = {"": "Net", "layers": "ModuleList"}.get(name, "Linear" if "up" in name else "Block")
    facts = {"type": kind, "ranks": (RankSpan(0),), "parameters": parameters}
    return Module(name=name, **(facts | changes))


def call(owner: str | None, phase: Phase, num_bytes: int, **changes: Any) -> Collective:
    facts = {"owner": owner, "trigger": owner, "phase": phase, "axis": "tp"}
    sizes = {"input_bytes": num_bytes, "wire_bytes": 2 * num_bytes}
    return make_collective(**(facts | sizes | changes))


def make_model(*, calls: tuple[Collective, ...] = (), **changes: Any) -> Recording:
    modules = tuple(
        module(name, parameter("weight", (2, 3))) if name.endswith("up") else module(name)
        for name in NAMES
    )
    return make_recording(calls, **({"modules": modules, "ranks": (0,)} | changes))


def read(recording: Recording) -> Modules:
    return build_page(recording).modules


def column(modules: Modules, name: str) -> dict[str, Any]:
    return dict(zip(modules.path, getattr(modules, name), strict=True))


def test_modules_are_in_tree_order() -> None:
    modules = read(make_model())
    assert modules.path == NAMES
    assert modules.label == ("Net", "layers", "0", "up", "1", "up", "head")
    assert modules.type == ("Net", "ModuleList", "Block", "Linear", "Block", "Linear", "Block")
    assert modules.parent == (-1, 0, 1, 2, 1, 4, 0)
    assert modules.end == (7, 6, 4, 4, 6, 6, 7)


def test_calls_belong_to_rows_of_their_module() -> None:
    kind = CollectiveKind.ALL_GATHER
    page = build_page(
        make_model(
            calls=(
                call("layers.0", Phase.FORWARD, 100, kind=kind, order=0),
                call("layers.0.up", Phase.FORWARD, 10, order=1),
                call("layers.0.up", Phase.BACKWARD, 1, order=2),
                call("head", Phase.BACKWARD, 1000, order=3),
            )
        )
    )
    assert page.communication is not None
    traffic, phases = page.communication.traffic, page.communication.phases
    assert [page.modules.path[at] for at in traffic.owner] == [
        "layers.0",
        "layers.0.up",
        "layers.0.up",
        "head",
    ]
    assert [phases[at] for at in traffic.phase] == ["forward", "forward", "backward", "backward"]
    assert traffic.wire_bytes == (200, 20, 2, 2000)
    kinds = [page.communication.kinds[at] for at in traffic.kind]
    assert kinds == ["all_gather", "all_reduce", "all_reduce", "all_reduce"]


def test_what_belongs_to_no_module_comes_last() -> None:
    page = build_page(make_model(calls=(call(None, Phase.OPTIMIZER, 5),)))
    assert page.modules.path[-1] == "outside any module"
    assert page.modules.parent[-1] == -1
    assert page.communication is not None
    assert page.communication.calls.owner == (len(NAMES),)


def test_a_path_that_is_no_module_maps_to_its_ancestor() -> None:
    modules = (*(module(name) for name in NAMES[:2]), module("shared", aliases=("twin", "twin.b")))
    source = make_model(
        modules=modules,
        coverage=(),
        memory=(
            MemoryProfile(
                rank=0,
                peak_bytes=15,
                peak_order=0,
                peak_phase=Phase.FORWARD,
                peak_module="layers.9.gone",
                at_peak=tuple(
                    MemoryUse(kind=MemoryKind.ACTIVATIONS, module=name, num_bytes=size)
                    for name, size in (("layers.9.gone", 1), ("twin.b.c", 2), ("other", 4))
                ),
            ),
        ),
    )
    page = build_page(source)
    (curve,) = page.memory
    assert page.modules.path[curve.peak_module] == "layers"
    bytes_by_path = {page.modules.path[row.module]: row.num_bytes for row in curve.at_peak}
    assert bytes_by_path == {"layers": 1, "shared": 2, "": 4}
    assert column(page.modules, "total_peak_bytes") == {"": 7, "layers": 1, "shared": 2}


def test_identical_layers_fold_into_the_first() -> None:
    calls = tuple(call(f"layers.{i}.up", Phase.FORWARD, 10, order=i) for i in range(2))
    modules = read(make_model(calls=calls))
    first, second = modules.path.index("layers.0"), modules.path.index("layers.1")
    assert (modules.first_identical[first], modules.repeat[first]) == (first, 2)
    assert (modules.first_identical[second], modules.repeat[second]) == (first, 1)
    unchanged_positions = [at for at in range(len(NAMES)) if at != second]
    assert [modules.first_identical[at] for at in unchanged_positions] == unchanged_positions


def _finding(subject: str) -> Finding:
    facts = {"fact": "it is wrong", "remedy": "mend it", "severity": Severity.ERROR}
    return Finding(rule="odd", subject=subject, **facts)


@pytest.mark.parametrize(
    "changes",
    [
        {"calls": (call("layers.1.up", Phase.FORWARD, 10),)},
        {"findings": (_finding("layers.1.up.weight"),)},
        {
            "modules": (
                *(module(name) for name in NAMES[:4]),
                module("layers.1", marks=(Mark(kind=MarkKind.COMPILED),)),
                *(module(name) for name in NAMES[5:]),
            )
        },
        {
            "modules": (
                *(module(name) for name in NAMES[:5]),
                module("layers.1.up", parameter("weight", (2, 4))),
            )
        },
    ],
    ids=["a call", "a finding", "a mark", "a parameter"],
)
def test_a_layer_that_differs_does_not_fold(changes: dict[str, Any]) -> None:
    modules = read(make_model(**changes))
    second = modules.path.index("layers.1")
    assert modules.first_identical[second] == second


def test_findings_are_counted_where_they_are() -> None:
    subjects = (
        "layers.0.up.weight",
        "layers.*.up (×2)",
        "Net",
        "step",
        "head, layers",
    )
    modules = read(make_model(findings=tuple(map(_finding, subjects))))
    assert column(modules, "num_findings") == {
        "": 5,
        "layers": 3,
        "layers.0": 2,
        "layers.0.up": 2,
        "layers.1": 1,
        "layers.1.up": 1,
        "head": 1,
    }


def test_tied_parameters_and_forms_of_a_module_count_once() -> None:
    tied = {"alias_group": "layers.0.up.weight"}
    modules = (
        module(""),
        module("layers.0.up", parameter("weight", (2, 3), **tied)),
        module("head", parameter("weight", (2, 3), **tied), parameter("bias", (5,), local_bytes=8)),
        module("head", parameter("bias", (5,), local_bytes=12), ranks=(RankSpan(1),)),
        module("head2", parameter("running", (100,), is_buffer=True)),
    )
    modules_view = read(make_recording(modules=modules, ranks=(0, 1)))
    assert column(modules_view, "total_parameters") == {
        "": 11,
        "layers": 6,
        "layers.0": 6,
        "layers.0.up": 6,
        "head": 11,
        "head2": 0,
    }
    assert column(modules_view, "total_parameter_bytes")[""] == 44
    assert (
        column(modules_view, "total_local_bytes")[""] == 24
    )  # 12 of the weight, 12 of the larger bias


def test_marks_are_described_in_words() -> None:
    marks = (
        Mark(kind=MarkKind.FULLY_SHARD, axes=("dp",)),
        Mark(kind=MarkKind.TENSOR_PARALLEL, detail="ColwiseParallel"),
    )
    modules = read(make_recording(modules=(module("", marks=marks),)))
    assert modules.marks == ("fully_shard over dp, tensor_parallel (ColwiseParallel)",)


def test_a_recording_without_modules_has_those_it_names() -> None:
    profile = MemoryProfile(
        rank=0,
        peak_bytes=1,
        peak_order=0,
        peak_phase=Phase.FORWARD,
        at_peak=(MemoryUse(kind=MemoryKind.GRADIENTS, module="a.b", num_bytes=1),),
    )
    modules = read(make_recording(memory=(profile,)))
    assert modules.path == ("", "a", "a.b")
    assert modules.total_peak_bytes == (1, 1, 1)


def test_modules_that_are_only_named_stand_by_their_numbers() -> None:
    names = ("layers.10.b", "layers.2.b", "layers.2.a", "head", "layers.10.a")
    op = OpCoverage(op="mm", schema="", verdict=OpVerdict.SHARDED, modules=names)
    coverage = Coverage(rank=0, level=Level.EXPORTED, axes=(), has_plan=True, ops=(op,))
    page = build_page(make_recording(coverage=(coverage,)))
    leaves = [path for path in page.modules.path if path in names]
    assert leaves == ["layers.2.b", "layers.2.a", "layers.10.b", "layers.10.a", "head"]
    (row,) = page.coverage[0].ops
    assert [page.modules.path[at] for at in row.modules] == list(names)
