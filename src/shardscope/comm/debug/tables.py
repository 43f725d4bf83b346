"""Tables and JSON that torch's CommDebugMode writes, and its tracker of called modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardscope._torch.dispatch import disable_dispatch_modes
from shardscope._torch.fsdp import sharded_parameters
from shardscope._torch.modules import own_parameters
from shardscope.comm.debug.counts import GLOBAL, Operation, Positions

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
    """The data of the tables: four dictionaries by module name."""

    modules: dict[str, dict[str, Any]]
    children: dict[str, list[str]]
    counts: dict[str, dict[str, dict[Any, int]]]
    operations: dict[str, dict[str, list[Operation]]]

    def walk(self, name: str = GLOBAL) -> Iterator[str]:
        """All modules, each before its children."""
        yield name
        for child in self.children.get(name, ()):
            yield from self.walk(child)

    def counts_of(self, name: str, direction: str) -> dict[Any, int]:
        """Collectives of a module in its forward or backward."""
        return self.counts[name][direction] if name in self.counts else {}

    def operations_of(self, name: str, noise_level: int) -> _Passes:
        """Ops of a module by pass; none below noise level 1."""
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
    """Ops at a noise level: 1, nontrivial ops on DTensors; 2, all nontrivial ops; 3, all ops."""
    if noise_level > 2:
        return operations
    nontrivial = [operation for operation in operations if str(operation["name"]) not in _TRIVIAL]
    return nontrivial if noise_level > 1 else [op for op in nontrivial if op["input_sharding"]]


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
    forward, backward = (
        results.counts_of(name, direction) for direction in ("forward", "backward")
    )
    return {key: forward.get(key, 0) + backward.get(key, 0) for key in {**forward, **backward}}


def build_tree(results: DebugResults, noise_level: int, name: str = GLOBAL) -> dict[str, Any]:
    """The tree of modules in the JSON format of torch's visualizer."""
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
    """`text` without ANSI escape sequences."""
    return _COLOUR.sub("", text)


@final
class ModuleTracker:
    """Observes module calls, each after `positions` has; torch's `advanced_module_tracker`."""

    def __init__(self, positions: Positions, report_gap: Callable[[str, str], None]) -> None:
        self.module_helper_dict: dict[str, dict[str, Any]] = {GLOBAL: {"depth": 0}}
        self.module_parameters_dict: dict[str, dict[str, torch.Tensor]] = {}
        self.module_parents_dict: dict[str, set[str]] = {GLOBAL: set()}
        self.sharding_dict: dict[str, Any] = {}
        self.parent_dict: dict[str, list[str]] = {}
        self._positions = positions
        self._report_gap = report_gap
        self._enclosing: dict[str, list[str]] = {}
        self._sharded: dict[tuple[int, str], torch.Tensor] = {}

    @property
    def name(self) -> str:
        """The running module of this thread."""
        return self._positions.current().module

    @property
    def is_bw(self) -> bool:
        """Whether this thread is in a backward pass."""
        return self._positions.current().is_backward

    @property
    def activation_checkpointing(self) -> bool:
        """Whether this thread is recomputing activations."""
        return self._positions.current().is_recompute

    @property
    def parent_list(self) -> list[str]:
        """The modules called on this thread, outermost first."""
        return [GLOBAL, *self._positions.running()]

    @property
    def parents(self) -> set[str]:
        """The running module of this thread and all modules around it."""
        return {GLOBAL, *self.enclosing(self.name)}

    @property
    def module_depth_dict(self) -> dict[str, int]:
        """Depth by module, as in older versions of torch."""
        return {name: helper["depth"] for name, helper in self.module_helper_dict.items()}

    def enter(self, module: nn.Module) -> None:
        """Add a module when it is called for the first time."""
        try:
            name = self._positions.running()[-1]
            if not self.has_module(name):
                self._add(name, module, self.enclosing(name))
        except Exception as error:  # noqa: BLE001 - tracing must not fail the run
            self._report_gap("module", f"it was called but not understood ({error!r})")

    def exit(self, _: nn.Module) -> None:
        """Nothing to do: `positions` observes the end of calls."""

    def enclosing(self, name: str) -> list[str]:
        """The modules around `name`, outermost first, and `name` itself; none for Global."""
        if name == GLOBAL:
            return []
        running = self._positions.running()
        if name not in running:
            return self._known_enclosing(name)
        chain = running[: running.index(name) + 1]
        if self._positions.current().is_recompute:  # recomputation does not start at the root
            chain = [*self._known_enclosing(chain[0]), *chain]
        return list(dict.fromkeys(chain))

    def has_module(self, name: str) -> bool:
        """Whether a module of this name was added."""
        return name in self.module_helper_dict

    def add_uncalled(self, name: str, module: nn.Module | None) -> None:
        """Add a module that owns a collective but was not called, or not yet."""
        self._add(name, module, self._known_enclosing(name))

    def print_paramater_info(self) -> None:
        """Print every parameter; the name is torch's."""
        print(self.module_parameters_dict)

    def print_sharding_info(self) -> None:
        """Print the placements of every DTensor parameter."""
        for name, placements in self.sharding_dict.items():
            print(f"{name}: {placements}")

    def _known_enclosing(self, name: str) -> list[str]:
        """The modules around `name` in its first call, or else according to its name."""
        if name in self._enclosing:
            return self._enclosing[name]
        parts = name.split(".")
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
        return [*(prefix for prefix in prefixes if self.has_module(prefix)), name]

    def _add(self, name: str, module: nn.Module | None, enclosing: list[str]) -> None:
        self._enclosing[name] = enclosing
        self.module_parents_dict[name] = {GLOBAL, *enclosing}
        parent = enclosing[-2] if len(enclosing) > 1 else GLOBAL
        self.parent_dict.setdefault(parent, []).append(name)
        self.module_helper_dict[name] = {
            "module_type": str(type(module)).replace("<", "").replace(">", ""),
            "depth": len(enclosing),
        }
        if module is not None:
            try:
                with disable_dispatch_modes():  # reading parameters must not be listed as an op
                    self._add_parameters(name, module)
            except Exception as error:  # noqa: BLE001 - tracing must not fail the run
                self._report_gap(name, f"its parameters could not be read ({error!r})")

    def _add_parameters(self, name: str, module: nn.Module) -> None:
        if isinstance(module, FSDPModule):
            self._sharded.update(sharded_parameters(module))
        for parameter_name, parameter in own_parameters(module):
            # While gathered, a parameter is the full tensor; the rank's own part is the shard.
            local = self._sharded.get((id(module), parameter_name), parameter).data
            self.module_parameters_dict.setdefault(name, {})[parameter_name] = local
            if isinstance(local, DTensor):
                self.sharding_dict[f"{name}.{parameter_name}"] = local.placements
                shown = self.module_helper_dict[name].setdefault("parameters", {})
                shown[parameter_name] = str(local.placements)
