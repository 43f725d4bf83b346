"""A plan: the style or placements of each module or tensor, in one form; also read from and
written as TOML.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, final

import tomlkit

from shardscope.errors import OutputError, PlanError
from shardscope.plan.parse import Entry, TomlValue, read_entry, style_table
from shardscope.plan.placement_syntax import describe_placement, format_placement, read_placement
from shardscope.plan.placements import Partial, Placement
from shardscope.plan.styles import (
    Colwise,
    ModuleInput,
    ModuleOutput,
    Replicated,
    Rowwise,
    Sequence,
    Styles,
    is_torch_style,
)
from shardscope.plan.transformers import read_transformers
from shardscope.record import read_text_file, write_file

_TABLES = ("plan", "inputs", "outputs")


def read_toml(path: str | PathLike[str]) -> dict[str, dict[str, object]]:
    """The tables of a plan file; those that the file lacks are empty."""
    try:
        tables = tomllib.loads(read_text_file(path))
    except OSError as error:
        reason = error.strerror or str(error)
        raise PlanError(
            f"The plan {str(path)!r} cannot be read: {reason}. Check the path."
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise PlanError(
            f"The plan {str(path)!r} is not TOML: {error}. Write entries under [plan], such as "
            '"layers.*.wq" = "colwise".'
        ) from error
    except UnicodeDecodeError as error:
        raise PlanError(
            f"The plan {str(path)!r} is not text in UTF-8 (byte {error.start}). Give a TOML file."
        ) from error
    except RecursionError as error:
        raise PlanError(
            f"The plan {str(path)!r} is nested too deeply. Write entries under [plan]."
        ) from error
    except ValueError as error:  # a path with a null byte, or a number of thousands of digits
        raise PlanError(f"The plan {str(path)!r} cannot be read: {error}. Correct it.") from error
    return {name: _table(tables, name, str(path)) for name in _check_tables(tables, str(path))}


def write_toml(path: str | PathLike[str], tables: Mapping[str, Mapping[str, TomlValue]]) -> None:
    """Write the tables to the file, in their order."""
    try:
        if Path(path).is_fifo():
            write_file(toml_of(tables).encode(), path)  # raises if nothing reads the pipe
        else:
            Path(path).write_text(toml_of(tables), encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"The plan cannot be written to {str(path)!r}: {reason}.") from error


def toml_of(tables: Mapping[str, Mapping[str, TomlValue]]) -> str:
    """The tables as TOML; empty ones are left out."""
    blocks = [
        "\n".join(
            [
                f"[{name}]",
                *(
                    f"{tomlkit.key(key).as_string()} = {_value(value)}"
                    for key, value in table.items()
                ),
            ]
        )
        for name, table in tables.items()
        if table
    ]
    return "\n\n".join(blocks) + "\n"


def _check_tables(tables: Mapping[str, object], path: str) -> tuple[str, ...]:
    unknown = [name for name in tables if name not in _TABLES]
    if unknown:
        raise PlanError(
            f"The plan {path!r} has {unknown[0]!r} at its top level, which plans do not have. "
            "Write entries under [plan], [inputs] or [outputs]."
        )
    return _TABLES


def _table(tables: Mapping[str, object], name: str, path: str) -> dict[str, object]:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise PlanError(f"The plan {path!r} has {name} = {table!r}. Make it a table: [{name}].")
    return table


def _value(value: TomlValue) -> str:
    if isinstance(value, dict):  # tomlkit writes inline tables without spaces inside the braces
        pairs = [f"{tomlkit.key(key).as_string()} = {_value(item)}" for key, item in value.items()]
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return tomlkit.item(value).as_string()


@final
@dataclass(frozen=True, repr=False)
class IOConstraint:
    """A path or position, with placements by axis (None: the default one) or one for each axis."""

    side: str  # inputs or outputs
    key: str
    by_axis: tuple[tuple[str | None, Placement], ...] = ()
    in_order: tuple[Placement, ...] = ()

    @property
    def location(self) -> str:
        return f"The plan's {self.side[:-1]} {self.key!r}"

    def to_toml(self) -> TomlValue:
        """The placements as a TOML value."""
        if self.in_order:
            return [format_placement(placement) for placement in self.in_order]
        if self.by_axis[0][0] is None:
            return format_placement(self.by_axis[0][1])
        return {str(axis): format_placement(placement) for axis, placement in self.by_axis}

    def __repr__(self) -> str:
        if self.in_order:
            return f"{self.key!r}: [{', '.join(map(describe_placement, self.in_order))}]"
        if self.by_axis[0][0] is None:
            return f"{self.key!r}: {describe_placement(self.by_axis[0][1])}"
        placements = ", ".join(
            f"{axis!r}: {describe_placement(placement)}" for axis, placement in self.by_axis
        )
        return f"{self.key!r}: {{{placements}}}"


def read_io_constraint(key: object, value: object, *, side: str) -> IOConstraint:
    """Parse what the user wrote as `key: value` under `inputs` or `outputs`."""
    if isinstance(key, bool) or not isinstance(key, (str, int)) or (key != 0 and not key):
        raise PlanError(
            f"The plan's {side} have the key {key!r}. Give a path, such as 'batch.ids', or a "
            "position, such as 0."
        )
    constraint = IOConstraint(side, str(key))
    if isinstance(value, Mapping):
        if not value:
            raise PlanError(
                f"{constraint.location} is empty. Give placements, such as {{'dp': Shard(0)}}."
            )
        read = tuple(
            (str(axis), _read_io_placement(constraint, placement))
            for axis, placement in value.items()
        )
        return IOConstraint(side, constraint.key, by_axis=read)
    if isinstance(value, (list, tuple)) and value:
        return IOConstraint(
            side,
            constraint.key,
            in_order=tuple(_read_io_placement(constraint, placement) for placement in value),
        )
    return IOConstraint(
        side, constraint.key, by_axis=((None, _read_io_placement(constraint, value)),)
    )


def _read_io_placement(constraint: IOConstraint, value: object) -> Placement:
    placement = read_placement(value, f"{constraint.location}'s placement")
    if isinstance(placement, Partial) and constraint.side == "inputs":
        raise PlanError(
            f"{constraint.location} is {describe_placement(placement)}, but an input cannot be "
            f"partial. Give Shard(dim) "
            "or Replicate()."
        )
    return placement


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
    inputs: tuple[IOConstraint, ...]
    outputs: tuple[IOConstraint, ...]

    def __init__(
        self,
        entries: Mapping[str, Any] | None = None,
        *,
        inputs: Mapping[Any, Any] | None = None,  # keys are paths or positions
        outputs: Mapping[Any, Any] | None = None,
    ) -> None:
        parsed = [
            read_entry(*item) for item in _items(entries, "plan", "{'layers.*.wq': Colwise()}")
        ]
        object.__setattr__(self, "entries", tuple(parsed))
        for side, values in (("inputs", inputs), ("outputs", outputs)):
            items = _items(values, f"plan's {side}", "{'tokens': {'dp': Shard(0)}}")
            constraints = tuple(read_io_constraint(key, value, side=side) for key, value in items)
            object.__setattr__(self, side, constraints)

    @staticmethod
    def of(given: object) -> Plan:
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
    def from_transformers(model: object, *, prefix: str | None = None) -> Plan:
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
        entries = {entry.pattern: _entry_to_toml(entry) for entry in self.entries}
        inputs, outputs = (
            {constraint.key: constraint.to_toml() for constraint in side}
            for side in (self.inputs, self.outputs)
        )
        write_toml(path, {"plan": entries, "inputs": inputs, "outputs": outputs})

    def __repr__(self) -> str:
        parts = [f"{{{_shorten(self.entries)}}}"]
        for side in ("inputs", "outputs"):
            if constraints := getattr(self, side):
                parts.append(f"{side}={{{_shorten(constraints)}}}")
        return f"Plan({', '.join(parts)})"


def _shorten(entries: Collection[object]) -> str:
    """Entries with commas between them, as many as fit on a few lines of a terminal."""
    shown: list[str] = []
    for entry in map(repr, entries):
        if sum(map(len, shown)) + len(entry) > _MAX_REPR and shown:
            return f"{', '.join(shown)}, … {len(entries) - len(shown)} more"
        shown.append(entry)
    return ", ".join(shown)


def _items(values: object, what: str, example: str) -> list[tuple[object, object]]:
    if values is None:
        return []
    if not isinstance(values, Mapping):
        raise PlanError(
            f"The {what} is {type(values).__name__}, not a mapping. Give it as {example}."
        )
    return list(values.items())


def _entry_to_toml(entry: Entry) -> TomlValue:
    if entry.in_order:
        return [format_placement(placement) for placement in entry.in_order]
    if entry.by_axis[0][0] is None:
        return _styles_to_toml(entry.by_axis[0][1])
    return {str(axis): _styles_to_toml(styles) for axis, styles in entry.by_axis}


def _styles_to_toml(styles: Styles) -> TomlValue:
    tables = [style_table(style) for style in styles]
    return tables[0] if len(tables) == 1 else tables
