"""A plan: which module or tensor lies how, as the user wrote it, in one form."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, final

from shardscope.errors import PlanError
from shardscope.parallel.plan.entries import Entry, Styles, read_entry
from shardscope.parallel.plan.spelling import spell
from shardscope.parallel.plan.styles import (
    Colwise,
    ModuleInput,
    ModuleOutput,
    Replicated,
    Rowwise,
    Sequence,
)
from shardscope.parallel.plan.tables import Plain, style_table
from shardscope.parallel.plan.toml import read_toml, write_toml
from shardscope.parallel.plan.torch_styles import is_torch_style
from shardscope.parallel.plan.transformers import read_transformers
from shardscope.parallel.plan.values import Wish, read_wish

__all__ = ["Plan"]

_MAX_REPR = 240  # characters of entries
_STYLES = (Colwise, Rowwise, Sequence, Replicated, ModuleInput, ModuleOutput)


@final
@dataclass(frozen=True, init=False, repr=False)
class Plan:
    """Styles of modules and tensors by name or pattern, and placements of inputs and outputs.

    An exact name has precedence over patterns, and an earlier pattern over a later one. `*` matches
    one part of a name, `**` any number of parts, `[8-15]` these numbers. A style without an axis is
    for the axis `tp`, or for the only axis. `inputs` and `outputs` have placements by path
    (`batch.ids`) or position; what is not named is replicated.

    Examples:
        >>> plan = Plan({"layers.*.up": Colwise(), "layers.*.down": Rowwise()})
        >>> plan.write("plan.toml")
    """

    entries: tuple[Entry, ...]
    inputs: tuple[Wish, ...]
    outputs: tuple[Wish, ...]

    def __init__(
        self,
        entries: Mapping[str, Any] | None = None,
        *,
        inputs: Mapping[Any, Any] | None = None,  # keys are paths or positions
        outputs: Mapping[Any, Any] | None = None,
    ) -> None:
        read = [read_entry(*item) for item in _items(entries, "plan", "{'layers.*.wq': Colwise()}")]
        object.__setattr__(self, "entries", tuple(read))
        for side, values in (("inputs", inputs), ("outputs", outputs)):
            items = _items(values, f"plan's {side}", "{'tokens': {'dp': Shard(0)}}")
            wishes = tuple(read_wish(key, value, side=side) for key, value in items)
            object.__setattr__(self, side, wishes)

    @staticmethod
    def of(given: Any) -> Plan:
        """The plan that was given: a Plan, a mapping, the path of a TOML file, or one style.

        One style is for the module that the program was exported from.
        """
        if isinstance(given, Plan):
            return given
        if isinstance(given, (str, PathLike)):
            return Plan.read(given)
        if is_torch_style(given) or isinstance(given, _STYLES) or given in _STYLES:
            return Plan({"": given})
        if given is None or isinstance(given, Mapping):
            return Plan(given)
        raise PlanError(
            f"The plan is {type(given).__name__}. Give a mapping, such as "
            "{'layers.*.wq': Colwise()}, a Plan, or the path of a TOML file."
        )

    @staticmethod
    def read(path: str | PathLike[str]) -> Plan:
        """Read a plan from a TOML file.

        Args:
            path: The file.

        Examples:
            >>> plan = Plan.read("plan.toml")
        """
        tables = read_toml(path)
        try:
            return Plan(tables["plan"], inputs=tables["inputs"], outputs=tables["outputs"])
        except PlanError as error:
            raise PlanError(f"In {str(path)!r}: {error}") from error

    @staticmethod
    def from_transformers(model: Any, *, prefix: str | None = None) -> Plan:
        """The plan that a transformers model or its config comes with, or such a mapping.

        For about twenty kinds of models without one (GPT-2, BERT, T5, ViT), it is a plan of ours.
        A mapping's keys are taken as they are, or under `prefix` (`model`, for those of
        `base_model_tp_plan`). Styles that leave weights replicated are dropped.
        """
        return Plan(read_transformers(model, prefix=prefix))

    def with_values(
        self, *, inputs: Mapping[Any, Any] | None = None, outputs: Mapping[Any, Any] | None = None
    ) -> Plan:
        """The plan with placements for more of the program's inputs and outputs."""
        joined = Plan(inputs=inputs, outputs=outputs)
        object.__setattr__(joined, "entries", self.entries)
        object.__setattr__(joined, "inputs", (*joined.inputs, *self.inputs))
        object.__setattr__(joined, "outputs", (*joined.outputs, *self.outputs))
        return joined

    def write(self, path: str | PathLike[str]) -> None:
        """Write the plan as TOML, which `Plan.read` reads."""
        entries = {entry.pattern: _plain_entry(entry) for entry in self.entries}
        inputs, outputs = (
            {wish.key: wish.plain() for wish in side} for side in (self.inputs, self.outputs)
        )
        write_toml(path, {"plan": entries, "inputs": inputs, "outputs": outputs})

    def __repr__(self) -> str:
        parts = [f"{{{_shorten(self.entries)}}}"]
        for side in ("inputs", "outputs"):
            if wishes := getattr(self, side):
                parts.append(f"{side}={{{_shorten(wishes)}}}")
        return f"Plan({', '.join(parts)})"


def _shorten(entries: Collection[object]) -> str:
    """Entries with commas between them, as many as fit on a few lines of a terminal."""
    shown: list[str] = []
    for entry in map(repr, entries):
        if sum(map(len, shown)) + len(entry) > _MAX_REPR and shown:
            return f"{', '.join(shown)}, … {len(entries) - len(shown)} more"
        shown.append(entry)
    return ", ".join(shown)


def _items(values: Any, what: str, example: str) -> list[tuple[Any, Any]]:
    if values is None:
        return []
    if not isinstance(values, Mapping):
        raise PlanError(
            f"The {what} is {type(values).__name__}, not a mapping. Give it as {example}."
        )
    return list(values.items())


def _plain_entry(entry: Entry) -> Plain:
    if entry.in_order:
        return [spell(one) for one in entry.in_order]
    if entry.by_axis[0][0] is None:
        return _plain_styles(entry.by_axis[0][1])
    return {str(axis): _plain_styles(styles) for axis, styles in entry.by_axis}


def _plain_styles(styles: Styles) -> Plain:
    plain = [style_table(one) for one in styles]
    return plain[0] if len(plain) == 1 else plain
