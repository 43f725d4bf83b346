"""One rank's tensors, hung on a module under the model's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import Tensor, nn

from shardscope._torch.module_slots import Slot, hang

__all__ = ["State"]


@final
class State:
    """Finds tensors where the module keeps them, so that it may exchange them: `to`, loading."""

    def __init__(
        self, root: nn.Module, saved: Mapping[str, Any], others: Mapping[str, Any]
    ) -> None:
        self._slots: dict[str, Slot] = {}
        for name, thing in {**others, **saved}.items():
            if isinstance(thing, Tensor):
                self._slots[name] = hang(root, name, thing, is_saved=name in saved)
            else:
                self._slots[name] = ({name: thing}, name)
        self._order: list[Slot] = []

    def arrange(self, names: Sequence[str]) -> None:
        """The order in which the program takes them."""
        self._order = [self._slots[name] for name in names]

    def values(self) -> list[Any]:
        """The tensors as they are now, in the program's order."""
        return [table[key] for table, key in self._order]

    def find(self, name: str) -> Any:
        """One of them."""
        table, key = self._slots[name]
        return table[key]
