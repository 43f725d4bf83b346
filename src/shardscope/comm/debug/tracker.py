"""`advanced_module_tracker`: the modules that were called, how they nest and what they hold.

The attributes are those of torch's tracker, so that what reaches into them keeps working.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardscope._torch.dispatch import without_modes
from shardscope._torch.fsdp import sharded_parameters
from shardscope._torch.modules import own_parameters
from shardscope.comm.debug.position import GLOBAL, Positions

__all__ = ["ModuleTracker"]


@final
class ModuleTracker:
    """A watcher of module calls, to be told of each after `positions` was."""

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
        """The module at work on this thread."""
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
        """The module at work on this thread and all that enclose it."""
        return {GLOBAL, *self.enclosing(self.name)}

    @property
    def module_depth_dict(self) -> dict[str, int]:
        """Depth by module, as older versions of torch kept it."""
        return {name: helper["depth"] for name, helper in self.module_helper_dict.items()}

    def enter(self, module: nn.Module) -> None:
        """Take note of a module that is called for the first time."""
        try:
            name = self._positions.running()[-1]
            if not self.has_met(name):
                self._add(name, module, self.enclosing(name))
        except Exception as error:  # noqa: BLE001 - watching must not kill
            self._report_gap("module", f"it was called but not understood ({error!r})")

    def exit(self, _: nn.Module) -> None:
        """Nothing to do: `positions` knows."""

    def enclosing(self, name: str) -> list[str]:
        """The modules around `name`, outermost first, and `name` itself; none for Global."""
        if name == GLOBAL:
            return []
        running = self._positions.running()
        if name not in running:
            return self._known_enclosing(name)
        chain = running[: running.index(name) + 1]
        if self._positions.current().is_recompute:  # what runs began in the midst of the model
            chain = [*self._known_enclosing(chain[0]), *chain]
        return list(dict.fromkeys(chain))

    def has_met(self, name: str) -> bool:
        """Whether a module of this name was noted."""
        return name in self.module_helper_dict

    def add_uncalled(self, name: str, module: nn.Module | None) -> None:
        """Take note of a module that owns a collective but was not called, or not yet."""
        self._add(name, module, self._known_enclosing(name))

    def print_paramater_info(self) -> None:
        """Print every parameter; the name is torch's."""
        print(self.module_parameters_dict)

    def print_sharding_info(self) -> None:
        """Print the placements of every DTensor parameter."""
        for name, placements in self.sharding_dict.items():
            print(f"{name}: {placements}")

    def _known_enclosing(self, name: str) -> list[str]:
        """As the first call of `name` was enclosed, or else by its name."""
        if name in self._enclosing:
            return self._enclosing[name]
        parts = name.split(".")
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
        return [*(prefix for prefix in prefixes if self.has_met(prefix)), name]

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
                with without_modes():  # our own looking is no op of the model's
                    self._add_parameters(name, module)
            except Exception as error:  # noqa: BLE001 - watching must not kill
                self._report_gap(name, f"its parameters could not be read ({error!r})")

    def _add_parameters(self, name: str, module: nn.Module) -> None:
        if isinstance(module, FSDPModule):
            self._sharded.update(sharded_parameters(module))
        for parameter_name, parameter in own_parameters(module):
            # A gathered parameter shows its full self; what the rank holds is the shard.
            held = self._sharded.get((id(module), parameter_name), parameter).data
            self.module_parameters_dict.setdefault(name, {})[parameter_name] = held
            if isinstance(held, DTensor):
                self.sharding_dict[f"{name}.{parameter_name}"] = held.placements
                shown = self.module_helper_dict[name].setdefault("parameters", {})
                shown[parameter_name] = str(held.placements)
