"""Copies the user's functions and backend into a script, with the definitions they need."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import symtable
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from types import FunctionType, ModuleType
from typing import Any, final

import torch

from shardscope.compile.diagnose.repro.literals import (
    Names,
    exchange_names,
    format_value,
    wrap_call,
)
from shardscope.compile.diagnose.subgraph import Compiler
from shardscope.compile.diagnose.subgraph.op_names import (
    NotPrintable,
    format_target,
    is_importable,
    module_to_import,
)
from shardscope.compile.diagnose.worker import pickle_for_script

_MOST_DEFINITIONS = 40
_MOST_CHARACTERS = 20_000
_MODULES_IN_LITERALS = re.compile(r"\b(torch(?:\.\w+)*\.\w+)")


@final
class Definitions:
    """The imports, constants and functions of the user at the top of a script."""

    def __init__(self) -> None:
        self.names = Names()
        self.imports: set[str] = set()
        self.lines: list[str] = []
        self._defined: dict[str, Any] = {}
        self._aliases: dict[str, str] = {}

    def add_import(self, module: str) -> None:
        """Add an import of a module; "" adds none."""
        if module:
            self.imports.add(f"import {module}")

    def import_for_literal(self, text: str) -> None:
        """Import the modules that a literal refers to, such as those of enums."""
        for name in _MODULES_IN_LITERALS.findall(text):
            self.add_import(module_to_import(name))

    def define(self, value: Any, requested: str = "") -> str:
        """Define a function, class or constant in the script, and return its name."""
        if isinstance(value, ModuleType) and value.__name__ == requested:
            self._import_as(requested, requested)
            return requested
        preferred = requested or getattr(value, "__name__", "") or "value"
        preferred = "user_function" if preferred == "<lambda>" else preferred
        existing = [name for name, defined in self._defined.items() if defined is value]
        if existing:
            return existing[0]
        if not preferred.isidentifier():
            raise NotPrintable(f"{preferred} is not a name.")
        name = preferred if self.names.reserve(preferred) else self.names.give(preferred)
        self._defined[name] = value
        if len(self._defined) > _MOST_DEFINITIONS:
            raise NotPrintable(f"it needs more than {_MOST_DEFINITIONS} other definitions.")
        self._write(name, value)
        if sum(map(len, self.lines)) > _MOST_CHARACTERS:
            raise NotPrintable(f"its source is longer than {_MOST_CHARACTERS} characters.")
        return name

    def _write(self, name: str, value: Any) -> None:
        """Add the lines that define `name` as `value`."""
        if isinstance(value, ModuleType):
            self._import_as(value.__name__, name)
        elif isinstance(value, functools.partial):
            self.lines += [f"{name} = {self._format_partial(value)}", ""]
        elif is_importable(value):
            self._alias(name, format_target(value))
        elif isinstance(value, FunctionType | type):
            self._copy(name, value)
        elif isinstance(value, torch.Tensor):
            raise NotPrintable(f"{name} is a tensor.")
        else:
            text = format_value(value)
            self.import_for_literal(text)
            self.lines += [f"{name} = {text}", ""]

    def _import_as(self, module: str, name: str) -> None:
        root = module.split(".")[0]
        if root != "torch" and root not in sys.stdlib_module_names:
            raise NotPrintable(f"it uses the module {module}, which is not torch's.")
        self.imports.add(f"import {module}" if module == name else f"import {module} as {name}")

    def _alias(self, name: str, path: str) -> None:
        if name == path:
            return
        self.add_import(module_to_import(path))
        self.lines += [f"{name} = {path}", ""]

    def _format_partial(self, value: functools.partial[Any]) -> str:
        self.add_import("functools")
        parts = [self._refer(value.func), *map(self._format_part, value.args)]
        parts += [
            f"{key}={self._format_part(argument)}" for key, argument in value.keywords.items()
        ]
        return f"functools.partial({', '.join(parts)})"

    def _format_part(self, value: Any) -> str:
        return self._refer(value) if callable(value) else format_value(value)

    def refer(self, value: Any) -> str:
        """An expression for a callable: its public name in torch, or a name defined here.

        If that is not possible, the definitions remain unchanged.
        """
        before = (set(self.imports), list(self.lines), dict(self._defined))
        try:
            return self._refer(value)
        except NotPrintable:
            self.imports, self.lines, self._defined = before
            raise

    def _refer(self, value: Any) -> str:
        if isinstance(value, functools.partial):
            return self._format_partial(value)
        if is_importable(value):
            path = format_target(value)
            self.add_import(module_to_import(path))
            return path
        name = self.define(value)
        return self._find_alias(name) if name in self.names.replacements() else name

    def _find_alias(self, name: str) -> str:
        """An alias for an object of the user whose name the script itself uses."""
        if name not in self._aliases:
            self._aliases[name] = self.names.give(f"user_{name}")
            self.lines += [f"{self._aliases[name]} = {name}", "", ""]
        return self._aliases[name]

    def _copy(self, name: str, value: Any) -> None:
        """Copy a function or class of the user, after the definitions that it refers to."""
        called = name if value.__name__ == "<lambda>" else value.__name__
        if isinstance(value, FunctionType) and any(
            not attribute.startswith("_") for attribute in vars(value)
        ):
            raise NotPrintable(f"{called} has attributes that its source does not set.")
        source = _read_source(value, called)
        namespace = _namespace_of(value)
        renamed = {} if name == called else {called: name}
        for used in _names_used(source):
            if used in namespace and used != called:
                new_name = self.define(namespace[used], used)
                if new_name != used:
                    renamed[used] = new_name
        _check_can_be_renamed(source, renamed)
        self.lines += [*exchange_names(source, renamed).rstrip().splitlines(), "", ""]


def _check_can_be_renamed(source: str, names: Mapping[str, str]) -> None:
    """Refuse source in which a name to replace is also a local variable or a keyword argument."""
    for name in names:
        tables = _walk_tables(_read_tables(source))
        is_local = any(
            symbol.is_local() or symbol.is_parameter()
            for table in tables
            if table.get_type() != "module"
            for symbol in table.get_symbols()
            if symbol.get_name() == name
        )
        if is_local or re.search(rf"[(,]\s*{name}\s*=[^=]", source):
            raise NotPrintable(f"two different things are called {name}.")


def _read_tables(source: str) -> symtable.SymbolTable:
    """The symbol tables of some source; annotations are never evaluated in a script."""
    return symtable.symtable(f"from __future__ import annotations\n{source}", "source", "exec")


def _read_source(value: Any, name: str) -> str:
    """The source of a function or class, as a statement that defines `name`."""
    try:
        source = textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError, IndentationError):
        raise NotPrintable(f"the source of {name} cannot be read.") from None
    if getattr(value, "__name__", "") == "<lambda>":
        source = f"{name} = {_find_lambda(source, name)}\n"
    try:
        tree = ast.parse(source)
    except SyntaxError:
        raise NotPrintable(f"the source of {name} does not stand alone.") from None
    statement = tree.body[0]
    if len(tree.body) != 1 or getattr(statement, "name", name) != name:
        raise NotPrintable(f"the source of {name} does not define it.")
    return source


def _find_lambda(source: str, name: str) -> str:
    """The only lambda in some lines, which may be incomplete statements; lambdas inside it
    are fine.
    """
    lambdas, end = [], 0
    while (start := source.find("lambda", end)) >= 0:
        end = _find_end(source, start)
        if end:
            lambdas.append(source[start:end])
        end = end or start + 1
    if len(lambdas) != 1:
        raise NotPrintable(f"the source of {name} has {len(lambdas)} lambdas.")
    return " ".join(lambdas[0].split())


def _find_end(source: str, start: int) -> int:
    """The end of the longest lambda that begins at `start`; 0 if there is none."""
    for end in range(len(source), start, -1):
        try:
            tree = ast.parse(f"({source[start:end]}\n)", mode="eval")
        except (SyntaxError, ValueError):
            continue
        if isinstance(tree.body, ast.Lambda):
            return end
    return 0


def _namespace_of(value: Any) -> dict[str, Any]:
    """The globals and closure variables of a function, or the globals of a class."""
    if not isinstance(value, FunctionType):
        return dict(vars(sys.modules.get(value.__module__, object())))
    value = inspect.unwrap(value)  # as getsource() does
    namespace = dict(value.__globals__)
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            namespace[name] = cell.cell_contents
        except ValueError:  # not set yet
            namespace.pop(name, None)
    return namespace


def _names_used(source: str) -> list[str]:
    """Names that some source reads from outside."""
    tables = _walk_tables(_read_tables(source))
    return sorted({name for table in tables for name in _names_outside(table)})


def _walk_tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _walk_tables(child)


def _names_outside(table: symtable.SymbolTable) -> Iterator[str]:
    for symbol in table.get_symbols():
        is_outside = symbol.is_global() or table.get_type() == "module"
        is_used = symbol.is_referenced() or symbol.is_declared_global()  # `global n; n += 1`
        if is_used and is_outside:
            yield symbol.get_name()


@final
@dataclass
class Compilation:
    """A function that compiles another one, as source; tensors for the file of inputs, and
    notes.
    """

    lines: list[str] = field(default_factory=list)
    saved: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def print_compilation(
    compiler: Compiler,
    name: str,
    definitions: Definitions,
    *,
    has_symbolic_sizes: bool,
    is_full_graph: bool = True,
) -> Compilation:
    """The function `name`, which compiles as `compiler` does.

    If dynamo captured symbolic sizes, it is compiled with `dynamic=True`: torch would treat the
    sizes as static otherwise.
    """
    compilation = Compilation()
    parts = ["f", f"backend={_format_backend(compiler, definitions, compilation)}"]
    options = dict(compiler.options or {})
    # Inductor's options are its configuration; torch accepts them or a mode, not both.
    is_merged = compiler.backend == "inductor" and compiler.mode is None
    if is_merged:
        options |= dict(compiler.config)
    if options:
        parts.append(f"options={_format_options(options, compilation)}")
    if compiler.mode is not None:
        parts.append(f"mode={format_value(compiler.mode)}")
    dynamic = True if has_symbolic_sizes else compiler.dynamic
    if dynamic is not None:
        parts.append(f"dynamic={dynamic}")
    if is_full_graph:
        parts.append("fullgraph=True")
    if compiler.config and not is_merged:
        compilation.lines = _patch_config(compiler, parts, name, definitions)
        return compilation
    body = wrap_call("return torch.compile", parts, "", indent="    ")
    compilation.lines = [f"def {name}(f):", *body]
    return compilation


def _patch_config(
    compiler: Compiler, parts: list[str], name: str, definitions: Definitions
) -> list[str]:
    definitions.add_import("torch._inductor.config")
    patch = f"torch._inductor.config.patch({format_value(dict(compiler.config))})"
    return [
        f"def {name}(f):",
        *wrap_call("compiled = torch.compile", parts, "", indent="    "),
        f"    return {patch}(compiled)",
    ]


def _format_backend(compiler: Compiler, definitions: Definitions, compilation: Compilation) -> str:
    if isinstance(compiler.backend, str):
        return format_value(compiler.backend)
    registered = _find_registered(compiler.backend)
    if registered:
        return format_value(registered)
    try:
        return definitions.refer(compiler.backend)
    except NotPrintable as error:
        compilation.notes.append(f"The backend is pickled in the file of inputs, because {error}")
        return pickle_into(compiler.backend, "backend", compilation)


def _find_registered(backend: Any) -> str:
    """The name under which an installed package registers the backend, or ""."""
    path = f"{getattr(backend, '__module__', '')}:{getattr(backend, '__qualname__', '')}"
    if is_importable(backend):
        return ""
    return next(
        (
            entry.name
            for entry in entry_points(group="torch_dynamo_backends")
            if entry.value == path
        ),
        "",
    )


def _format_options(options: dict[str, Any], compilation: Compilation) -> str:
    try:
        return format_value(options)
    except NotPrintable as error:
        compilation.notes.append(f"The options are pickled in the file of inputs, because {error}")
        return pickle_into(options, "options", compilation)


def pickle_into(value: Any, name: str, compilation: Compilation) -> str:
    """Pickle a value into the file of inputs, and return an expression that loads it.

    torch.load accepts only tensors here, so the pickle is stored as a tensor of bytes.
    """
    data = bytearray(pickle_for_script(value))
    compilation.saved[name] = torch.frombuffer(data, dtype=torch.uint8)
    compilation.notes.append(f"Unpickling the {name} needs cloudpickle.")
    return f'pickle.loads(bytes(load_saved()["{name}"].tolist()))'
