"""The user's own functions, copied into a script with whatever they need."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import symtable
import sys
import textwrap
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, final

import torch

from shardscope.compile.diagnose.repro.literals import spell_value
from shardscope.compile.diagnose.repro.names import Names, exchange_names
from shardscope.compile.diagnose.repro.spelling import (
    NotPrintable,
    is_importable,
    module_of,
    spell_target,
)

__all__ = ["Definitions"]

_MOST_DEFINITIONS = 40
_MOST_CHARACTERS = 20_000
_MODULES_IN_LITERALS = re.compile(r"\b(torch(?:\.\w+)*\.\w+)")


@final
class Definitions:
    """What stands before the functions of a script: imports, constants, functions of the user's."""

    def __init__(self) -> None:
        self.names = Names()
        self.imports: set[str] = set()
        self.lines: list[str] = []
        self._defined: dict[str, Any] = {}
        self._aliases: dict[str, str] = {}

    def add_import(self, module: str) -> None:
        """Have a module imported; "" for none."""
        if module:
            self.imports.add(f"import {module}")

    def import_for_literal(self, text: str) -> None:
        """Have the modules imported that a literal names, such as those of enums."""
        for name in _MODULES_IN_LITERALS.findall(text):
            self.add_import(module_of(name))

    def define(self, value: Any, wish: str = "") -> str:
        """Have a function, class or constant defined, and return its name."""
        if isinstance(value, ModuleType) and value.__name__ == wish:
            self._import_as(wish, wish)
            return wish
        called = wish or getattr(value, "__name__", "") or "value"
        called = "user_function" if called == "<lambda>" else called
        known = [name for name, held in self._defined.items() if held is value]
        if known:
            return known[0]
        if not called.isidentifier():
            raise NotPrintable(f"{called} is not a name.")
        name = called if self.names.reserve(called) else self.names.give(called)
        self._defined[name] = value
        if len(self._defined) > _MOST_DEFINITIONS:
            raise NotPrintable(f"it needs more than {_MOST_DEFINITIONS} other definitions.")
        self._write(name, value)
        if sum(map(len, self.lines)) > _MOST_CHARACTERS:
            raise NotPrintable(f"its source is longer than {_MOST_CHARACTERS} characters.")
        return name

    def _write(self, name: str, value: Any) -> None:
        """The lines that give `name` its value."""
        if isinstance(value, ModuleType):
            self._import_as(value.__name__, name)
        elif isinstance(value, functools.partial):
            self.lines += [f"{name} = {self._spell_partial(value)}", ""]
        elif is_importable(value):
            self._alias(name, spell_target(value))
        elif isinstance(value, FunctionType | type):
            self._copy(name, value)
        elif isinstance(value, torch.Tensor):
            raise NotPrintable(f"{name} is a tensor.")
        else:
            text = spell_value(value)
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
        self.add_import(module_of(path))
        self.lines += [f"{name} = {path}", ""]

    def _spell_partial(self, value: functools.partial[Any]) -> str:
        self.add_import("functools")
        parts = [self._refer(value.func), *map(self._spell_part, value.args)]
        parts += [f"{key}={self._spell_part(one)}" for key, one in value.keywords.items()]
        return f"functools.partial({', '.join(parts)})"

    def _spell_part(self, value: Any) -> str:
        return self._refer(value) if callable(value) else spell_value(value)

    def refer(self, value: Any) -> str:
        """A name for something callable: torch's own, or one defined here.

        Where that cannot be done, nothing of it stays.
        """
        before = (set(self.imports), list(self.lines), dict(self._defined))
        try:
            return self._refer(value)
        except NotPrintable:
            self.imports, self.lines, self._defined = before
            raise

    def _refer(self, value: Any) -> str:
        if isinstance(value, functools.partial):
            return self._spell_partial(value)
        if is_importable(value):
            path = spell_target(value)
            self.add_import(module_of(path))
            return path
        name = self.define(value)
        return self._find_alias(name) if name in self.names.others() else name

    def _find_alias(self, name: str) -> str:
        """Another name for what is called as something of the script's: that would shadow it."""
        if name not in self._aliases:
            self._aliases[name] = self.names.give(f"user_{name}")
            self.lines += [f"{self._aliases[name]} = {name}", "", ""]
        return self._aliases[name]

    def _copy(self, name: str, value: Any) -> None:
        """A function or class of the user's, after what it refers to."""
        called = name if value.__name__ == "<lambda>" else value.__name__
        if isinstance(value, FunctionType) and any(not one.startswith("_") for one in vars(value)):
            raise NotPrintable(f"{called} has attributes that its source does not set.")
        source = _read_source(value, called)
        surroundings = _surroundings_of(value)
        renamed = {} if name == called else {called: name}
        for used in _names_used(source):
            if used in surroundings and used != called:
                given = self.define(surroundings[used], used)
                if given != used:
                    renamed[used] = given
        _check_can_be_renamed(source, renamed)
        self.lines += [*exchange_names(source, renamed).rstrip().splitlines(), "", ""]


def _check_can_be_renamed(source: str, names: Mapping[str, str]) -> None:
    """Refuse source in which a name means something else in places, or is an argument's."""
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
    """The names in some source; annotations are never evaluated in a script."""
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
    """The only lambda in some lines, which may not be whole statements; others may be inside it."""
    found, end = [], 0
    while (start := source.find("lambda", end)) >= 0:
        end = _find_end(source, start)
        if end:
            found.append(source[start:end])
        end = end or start + 1
    if len(found) != 1:
        raise NotPrintable(f"the source of {name} has {len(found)} lambdas.")
    return " ".join(found[0].split())


def _find_end(source: str, start: int) -> int:
    """Where the longest lambda that begins at `start` ends; 0 if none does."""
    for end in range(len(source), start, -1):
        try:
            tree = ast.parse(f"({source[start:end]}\n)", mode="eval")
        except (SyntaxError, ValueError):
            continue
        if isinstance(tree.body, ast.Lambda):
            return end
    return 0


def _surroundings_of(value: Any) -> dict[str, Any]:
    """What the names in a function or class mean."""
    if not isinstance(value, FunctionType):
        return dict(vars(sys.modules.get(value.__module__, object())))
    value = inspect.unwrap(value)  # as getsource() does
    found = dict(value.__globals__)
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not set yet
            found.pop(name, None)
    return found


def _names_used(source: str) -> list[str]:
    """Names that some source takes from outside."""
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
