"""The call of torch.compile, with a backend that may be the user's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, final

import torch

from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.isolation.named_globals import pickle_for_script
from shardscope.compile.diagnose.repro.inlining import Definitions
from shardscope.compile.diagnose.repro.layout import lay_out_call
from shardscope.compile.diagnose.repro.literals import spell_value
from shardscope.compile.diagnose.repro.spelling import NotPrintable, is_importable

__all__ = ["Compilation", "pickle_into", "print_compilation"]


@final
@dataclass
class Compilation:
    """A function that compiles another, in source; what it needs from a file, and remarks."""

    lines: list[str] = field(default_factory=list)
    saved: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def print_compilation(
    compiler: Compiler,
    name: str,
    definitions: Definitions,
    *,
    has_open_sizes: bool,
    is_one_graph: bool = True,
) -> Compilation:
    """The function `name`, which compiles as `compiler` does.

    Where sizes were left open, they have to be again: torch would take their numbers for fixed.
    """
    made = Compilation()
    parts = ["f", f"backend={_spell_backend(compiler, definitions, made)}"]
    options = dict(compiler.options or {})
    # Inductor's options are its configuration; torch takes them or a mode.
    is_merged = compiler.backend == "inductor" and compiler.mode is None
    if is_merged:
        options |= dict(compiler.config)
    if options:
        parts.append(f"options={_spell_options(options, made)}")
    if compiler.mode is not None:
        parts.append(f"mode={spell_value(compiler.mode)}")
    dynamic = True if has_open_sizes else compiler.dynamic
    if dynamic is not None:
        parts.append(f"dynamic={dynamic}")
    if is_one_graph:
        parts.append("fullgraph=True")
    if compiler.config and not is_merged:
        made.lines = _patch_config(compiler, parts, name, definitions)
        return made
    body = lay_out_call("return torch.compile", parts, "", indent="    ")
    made.lines = [f"def {name}(f):", *body]
    return made


def _patch_config(
    compiler: Compiler, parts: list[str], name: str, definitions: Definitions
) -> list[str]:
    definitions.add_import("torch._inductor.config")
    patch = f"torch._inductor.config.patch({spell_value(dict(compiler.config))})"
    return [
        f"def {name}(f):",
        *lay_out_call("compiled = torch.compile", parts, "", indent="    "),
        f"    return {patch}(compiled)",
    ]


def _spell_backend(compiler: Compiler, definitions: Definitions, made: Compilation) -> str:
    if isinstance(compiler.backend, str):
        return spell_value(compiler.backend)
    registered = _find_registered(compiler.backend)
    if registered:
        return spell_value(registered)
    try:
        return definitions.refer(compiler.backend)
    except NotPrintable as error:
        made.notes.append(f"The backend is pickled in the file of inputs, because {error}")
        return pickle_into(compiler.backend, "backend", made)


def _find_registered(backend: Any) -> str:
    """The name under which an installed package offers the backend, or ""."""
    path = f"{getattr(backend, '__module__', '')}:{getattr(backend, '__qualname__', '')}"
    if is_importable(backend):
        return ""
    return next(
        (one.name for one in entry_points(group="torch_dynamo_backends") if one.value == path), ""
    )


def _spell_options(options: dict[str, Any], made: Compilation) -> str:
    try:
        return spell_value(options)
    except NotPrintable as error:
        made.notes.append(f"The options are pickled in the file of inputs, because {error}")
        return pickle_into(options, "options", made)


def pickle_into(value: Any, name: str, made: Compilation) -> str:
    """Put a value into the file of inputs, and give an expression that takes it out.

    torch.load trusts tensors alone, so it travels as one.
    """
    data = bytearray(pickle_for_script(value))
    made.saved[name] = torch.frombuffer(data, dtype=torch.uint8)
    made.notes.append(f"Unpickling the {name} needs cloudpickle.")
    return f'pickle.loads(bytes(load_saved()["{name}"].tolist()))'
