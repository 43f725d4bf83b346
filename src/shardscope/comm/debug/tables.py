"""What a `CommDebugMode` learnt, as the coloured table and the JSON tree that torch writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardscope.comm.debug.operations import Operation
from shardscope.comm.debug.position import GLOBAL

__all__ = ["DebugResults", "build_tree", "format_module_table", "format_table", "strip_colours"]

_TRIVIAL = frozenset(
    {
        "aten._to_copy.default",
        "aten.as_strided.default",
        "aten.detach.default",
        "aten.t.default",
        "aten.transpose.int",
        "aten.view.default",
    }
)
_YELLOW, _RED, _PLAIN = "\033[1;33m", "\033[1;31m", "\033[0m"
_COLOUR = re.compile(r"\x1B\[[0-?]*[ -/]*[@-~]")


@dataclass(frozen=True, slots=True)
class DebugResults:
    """The four dictionaries that tables are made of, each by module name."""

    modules: dict[str, dict[str, Any]]
    children: dict[str, list[str]]
    counts: dict[str, dict[str, dict[Any, int]]]
    operations: dict[str, dict[str, list[Operation]]]

    def walk(self, name: str = GLOBAL) -> Iterator[str]:
        """Every module, each before what it encloses."""
        yield name
        for child in self.children.get(name, ()):
            yield from self.walk(child)

    def counts_of(self, name: str, which: str) -> dict[Any, int]:
        """Collectives of a module in its forward or backward."""
        return self.counts[name][which] if name in self.counts else {}

    def operations_of(self, name: str, noise_level: int) -> _Passes:
        """Ops of a module by pass; none where the noise level wants none."""
        if noise_level < 1 or name not in self.operations:
            return _Passes([], [], [])
        return _split(self.operations[name]["operations_list"])


@dataclass(frozen=True, slots=True)
class _Passes:
    forward: list[Operation]
    backward: list[Operation]
    checkpointing: list[Operation]


def _split(operations: list[Operation]) -> _Passes:
    passes = _Passes([], [], [])
    for operation in operations:
        if operation["is_activation_checkpointing"]:
            passes.checkpointing.append(operation)
        elif operation["is_bw"]:
            passes.backward.append(operation)
        else:
            passes.forward.append(operation)
    return passes


def _select(operations: list[Operation], noise_level: int) -> list[Operation]:
    """1: ops on DTensors that are not trivial; 2: all that are not trivial; 3: all."""
    if noise_level > 2:
        return operations
    kept = [operation for operation in operations if str(operation["name"]) not in _TRIVIAL]
    return kept if noise_level > 1 else [op for op in kept if op["input_sharding"]]


def format_table(results: DebugResults, noise_level: int) -> str:
    """The table of modules with their collectives and, from level 1 on, their ops."""
    lines: list[str] = []
    for name in results.walk():
        lines += _module_lines(name, results.modules[name], noise_level)
        lines += _pass_lines(results, name, noise_level)
    return "".join(f"{line}\n" for line in lines)


def _module_lines(name: str, module: dict[str, Any], noise_level: int) -> Iterator[str]:
    indent = "    " * module["depth"]
    yield f"{indent}{name}"
    if noise_level < 1:
        return
    if "module_type" in module:
        yield f"{indent}*module type: {module['module_type']}"
    if "parameters" in module:
        yield f"{indent}*Parameter List"
        for parameter, placements in module["parameters"].items():
            yield f"{indent} *{parameter}: {placements}"


def _pass_lines(results: DebugResults, name: str, noise_level: int) -> Iterator[str]:
    depth = results.modules[name]["depth"]
    passes = results.operations_of(name, noise_level)
    sections: tuple[tuple[str, dict[Any, int], list[Operation]], ...] = (
        ("FORWARD PASS", results.counts_of(name, "forward"), passes.forward),
        ("BACKWARD PASS", results.counts_of(name, "backward"), passes.backward),
        ("ACTIVATION CHECKPOINTING", {}, passes.checkpointing),
    )
    for title, counts, operations in sections:
        if counts or operations:
            yield f"{'    ' * depth}  {title}"
            yield from _count_lines(counts, "    " * (depth + 1))
            for operation in _select(operations, noise_level):
                yield from _operation_lines(operation, "    " * (depth + 1))


def _count_lines(counts: dict[Any, int], indent: str) -> Iterator[str]:
    for collective, count in counts.items():
        yield f"{_YELLOW}{indent}*{collective}: {count}{_PLAIN}"


def _operation_lines(operation: Operation, indent: str) -> Iterator[str]:
    yield f"{_YELLOW}{indent}**{operation['name']}{_PLAIN}"
    if operation["input_shape"]:
        yield f"{_RED}{indent}  shape: {operation['input_shape']}{_PLAIN}"
        yield f"{_RED}{indent}  sharding: {operation['input_sharding']}{_PLAIN}"
        yield f"{_RED}{indent}  device mesh: {operation['device_mesh']}{_PLAIN}"


def format_module_table(results: DebugResults) -> str:
    """The older table: modules with their collectives, both passes together."""
    lines: list[str] = []
    for name in results.walk():
        indent = "  " * results.modules[name]["depth"]
        lines.append(f"{indent}{name}")
        lines += _count_lines(_both_passes(results, name), f"{indent}  ")
    return "".join(f"{line}\n" for line in lines)


def _both_passes(results: DebugResults, name: str) -> dict[Any, int]:
    forward, backward = (results.counts_of(name, which) for which in ("forward", "backward"))
    return {key: forward.get(key, 0) + backward.get(key, 0) for key in {**forward, **backward}}


def build_tree(results: DebugResults, noise_level: int, name: str = GLOBAL) -> dict[str, Any]:
    """The tree that a visualiser made for torch's JSON reads."""
    module = results.modules[name] if noise_level > 0 else {}
    passes = results.operations_of(name, noise_level)
    return {
        "fqn": name,
        "module_type": module.get("module_type", ""),
        "parameters": list(module.get("parameters", {}).items()),
        "children": [
            build_tree(results, noise_level, child) for child in results.children.get(name, ())
        ],
        "collectives_forward": _as_pairs(results.counts_of(name, "forward")),
        "collectives_backward": _as_pairs(results.counts_of(name, "backward")),
        "operations_forward": _as_texts(passes.forward, noise_level),
        "operations_backward": _as_texts(passes.backward, noise_level),
        "operations_checkpointing": _as_texts(passes.checkpointing, noise_level),
    }


def _as_pairs(counts: dict[Any, int]) -> list[tuple[str, int]]:
    return [(str(collective), count) for collective, count in counts.items()]


def _as_texts(operations: list[Operation], noise_level: int) -> list[Operation]:
    return [
        {
            **operation,
            "name": str(operation["name"]),
            "input_shape": [str(shape) for shape in operation["input_shape"]],
            "input_sharding": [str(placements) for placements in operation["input_sharding"]],
        }
        for operation in _select(operations, noise_level)
    ]


def strip_colours(text: str) -> str:
    """`text` without its escape sequences."""
    return _COLOUR.sub("", text)
