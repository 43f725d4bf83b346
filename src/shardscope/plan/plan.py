"""A plan: how each module or tensor of a model is sharded, as a dict, a TOML file, or the
`tp_plan` of a transformers model, all read into one class, `Plan`.
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
from shardscope.plan.parse import NO_EFFECT_STYLES, Entry, TomlValue, read_entry, style_table
from shardscope.plan.placements import (
    Partial,
    Placement,
    describe_placement,
    format_placement,
    read_placement,
)
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
from shardscope.record import read_text_file, write_file
from shardscope.record.patterns import matches_name

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


# Styles that leave weights replicated. No pattern of such a plan overrides another, so entries
# with these styles are no exceptions to others, and can be left out.
_REPLICATED = NO_EFFECT_STYLES | {"replicate"}


def read_transformers(source: object, *, prefix: str | None) -> dict[str, object]:
    """The entries that shard something, by the names of the model's modules.

    `source` is a model, a config, or a mapping in the form that transformers writes plans in.
    """
    plan = dict(source) if isinstance(source, Mapping) else _plan_of(source)
    if not plan:
        raise PlanError(
            f"{type(source).__name__} has no tensor-parallel plan (tp_plan, _tp_plan, or its "
            "config's base_model_tp_plan), and shardscope has none for it. Write one, such as "
            "{'layers.*.q_proj': 'colwise', 'layers.*.o_proj': 'rowwise'}."
        )
    under = f"{prefix}." if prefix else ""
    return {f"{under}{key}": style for key, style in plan.items() if not _is_replicated(style)}


def _is_replicated(style: object) -> bool:
    return isinstance(style, str) and style.strip().lower() in _REPLICATED


def _plan_of(source: object) -> dict[str, object]:
    own = _mapping(source, "tp_plan") or _mapping(source, "_tp_plan")
    config = getattr(source, "config", source)  # a config has its plan itself
    plan = {**_mapping(config, "base_model_tp_plan"), **own}
    names = _names(source)
    if names is None:
        return plan
    if not plan:
        plan = _own_plan(config)
    prefix = getattr(source, "base_model_prefix", "") or ""
    prefixed = {_with_prefix(key, prefix, names): style for key, style in plan.items()}
    # A plan is for a family of models: entries for modules that this one lacks are dropped.
    return {key: style for key, style in prefixed.items() if _matches_any(key, names)}


def _own_plan(config: object) -> dict[str, object]:
    """Our plan for a model that comes without one, by its config."""
    is_multi_query = getattr(config, "multi_query", False)
    if is_multi_query and not getattr(config, "new_decoder_architecture", False):
        return _MULTI_QUERY.get(getattr(config, "model_type", ""), {})
    return _PLANS.get(getattr(config, "model_type", ""), {})


def _with_prefix(key: str, prefix: str, names: list[str]) -> str:
    """The key with the prefix of the base model if only that matches a module."""
    prefixed = f"{prefix}.{key}"
    return (
        prefixed
        if prefix and not _matches_any(key, names) and _matches_any(prefixed, names)
        else key
    )


def _matches_any(key: str, names: list[str]) -> bool:
    return any(matches_name(key, name) for name in names)


def _names(source: object) -> list[str] | None:
    """The names of all modules and parameters; None if it is not a model."""
    if not hasattr(source, "named_modules") or not hasattr(source, "named_parameters"):
        return None
    return [
        *(name for name, _ in source.named_modules(remove_duplicate=False)),
        *(name for name, _ in source.named_parameters(remove_duplicate=False)),
    ]


def _mapping(source: object, name: str) -> dict[str, object]:
    value = getattr(source, name, None)
    return dict(value) if isinstance(value, Mapping) else {}


def _pairs(columns: str, rows: str) -> dict[str, object]:
    """Megatron's layout: the first layers of each pair by columns, the second ones by rows."""
    return {
        **{f"**.{name}": "colwise" for name in columns.split()},
        **{f"**.{name}": "rowwise" for name in rows.split()},
    }


def _fused(parts: int) -> dict[str, object]:
    return {"style": "colwise", "fused": parts}


_BERT = _pairs("self.query self.key self.value intermediate.dense", "output.dense")
_BART = _pairs("q_proj k_proj v_proj fc1", "out_proj fc2")
_BLOOM = _pairs("query_key_value dense_h_to_4h", "self_attention.dense dense_4h_to_h")
_CLIP = _pairs("q_proj k_proj v_proj fc1", "self_attn.out_proj fc2")
_T5 = _pairs("q k v wi wi_0 wi_1 relative_attention_bias", "o wo")
_VIT = _pairs("q_proj k_proj v_proj fc1", "o_proj fc2")

# For models that come without a plan, by config.model_type. Embeddings and heads stay replicated.
_PLANS: dict[str, dict[str, object]] = {
    "albert": _pairs(
        "attention.query attention.key attention.value ffn", "attention.dense ffn_output"
    ),
    "bart": _BART,
    "beit": _VIT,
    "bert": _BERT,
    "bloom": _BLOOM,
    "camembert": _BERT,
    "clip": _CLIP,
    "clip_text_model": _CLIP,
    "clip_vision_model": _CLIP,
    "deberta-v2": _pairs(
        "self.query_proj self.key_proj self.value_proj intermediate.dense", "output.dense"
    ),
    "deit": _VIT,
    "detr": _VIT,
    "dinov2": _VIT,
    "distilbert": _pairs("q_lin k_lin v_lin ffn.lin1", "out_lin ffn.lin2"),
    "electra": _BERT,
    "falcon": _BLOOM,
    "gpt2": {
        "**.attn.c_attn": _fused(3),
        **_pairs("mlp.c_fc", "attn.c_proj mlp.c_proj"),
    },
    "gpt_neo": _pairs("q_proj k_proj v_proj c_fc", "out_proj c_proj"),
    "gptj": _pairs("q_proj k_proj v_proj fc_in", "out_proj fc_out"),
    "marian": _BART,
    "mbart": _BART,
    "modernbert": {
        "**.attn.Wqkv": _fused(3),
        "**.mlp.Wi": _fused(2),
        **_pairs("", "attn.Wo mlp.Wo"),
    },
    "mpnet": _pairs(
        "attn.q attn.k attn.v relative_attention_bias intermediate.dense", "attn.o output.dense"
    ),
    "mpt": {"**.attn.Wqkv": _fused(3), **_pairs("up_proj", "attn.out_proj down_proj")},
    "mt5": _T5,
    "opt": _BART,
    "pegasus": _BART,
    "persimmon": _pairs("query_key_value dense_h_to_4h", "self_attn.dense dense_4h_to_h"),
    "roberta": _BERT,
    "siglip": _CLIP,
    "siglip_text_model": _CLIP,
    "siglip_vision_model": _CLIP,
    "stablelm": _pairs("q_proj k_proj v_proj gate_proj up_proj", "o_proj down_proj"),
    "swin": {**_VIT, "**.relative_position_bias_table": "shard(1)"},
    "t5": _T5,
    "vit": _VIT,
    "wav2vec2": _pairs("q_proj k_proj v_proj intermediate_dense", "out_proj output_dense"),
    "whisper": _BART,
    "xlm-roberta": _BERT,
}
# If all heads share one key and value head in a fused weight, attention stays replicated.
_MULTI_QUERY: dict[str, dict[str, object]] = {
    "falcon": _pairs("dense_h_to_4h", "dense_4h_to_h"),
    "gpt_bigcode": _pairs("mlp.c_fc", "mlp.c_proj"),
}
