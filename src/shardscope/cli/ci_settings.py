"""What `shardscope ci` records and checks: the table `[ci]` of shardscope.toml, or its options."""

from __future__ import annotations

import ast
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from shardscope.cli.verb import PROGRAM_VERBS, suggest
from shardscope.contract import ContractFile
from shardscope.contract.toml_reader import (
    TomlLocation,
    find_lines,
    parse_contract,
    parse_toml,
    read_text,
)
from shardscope.errors import ContractError

_KEYS = ("record", "fail_on", "tolerance")
_EXAMPLE = "trace train.py --mesh dp=2,tp=4"
_DYNAMIC = {"import_module", "__import__", "run_path", "run_module"}


class RecordCommand(Struct, frozen=True):
    """A command that records, without the word shardscope: `trace train.py --mesh dp=8`."""

    text: str
    words: tuple[str, ...]

    @property
    def verb(self) -> str:
        """The command's name."""
        return self.words[0]

    def with_output(self, path: str) -> list[str]:
        """The words with the file for the recording, before a program's own arguments."""
        return [self.verb, "-o", path, "--force", *self.words[1:]]


class CISettings(Struct, frozen=True, kw_only=True):
    """What to record, the contract to check, and which changes since the base are failures."""

    commands: tuple[RecordCommand, ...]
    contract: ContractFile | None = None
    fail_on: tuple[str, ...] = ()
    tolerance: str = "0"


def read_settings(
    path: str,
    *,
    records: Sequence[str] = (),
    fail_on: Sequence[str] = (),
    tolerance: str | None = None,
) -> CISettings:
    """Read a contract file; what is given here replaces what the file says.

    A file without limits, or no file at all, is fine as long as there is something to record.
    """
    table, contract = _read_file(path)
    location = table.location if table else None
    texts = [line.strip() for text in records for line in text.splitlines() if line.strip()]
    if not texts and table:
        texts = list(table.read_names("record"))
    if not texts:
        raise ContractError(
            f"there is nothing to record: '{path}' has no list of commands. Add one below [ci], "
            f'such as record = ["{_EXAMPLE}"], or give --record "{_EXAMPLE}".'
        )
    return CISettings(
        commands=tuple(parse_command(text, location) for text in texts),
        contract=contract,
        fail_on=tuple(filter(None, fail_on)) or (table.read_names("fail_on") if table else ()),
        tolerance=tolerance or next(iter(table.read_names("tolerance") if table else ()), "0"),
    )


def parse_command(text: str, location: TomlLocation | None = None) -> RecordCommand:
    """Read a command line; raises if it is not of a verb that saves a recording."""

    def fail(fact: str) -> ContractError:
        return ContractError(f"--record: {fact}") if location is None else location.fail(fact)

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise fail(f"{text!r} is no command line ({error}). Close the quotes.") from error
    words = words[1:] if words[:1] == ["shardscope"] else words
    verb = words[0] if words else ""
    if verb not in PROGRAM_VERBS:
        raise fail(
            f"{text!r} saves no recording.{suggest(verb, PROGRAM_VERBS)} "
            f"Begin with one of {', '.join(PROGRAM_VERBS)}, as in {_EXAMPLE!r}."
        )
    own = words[: words.index("--")] if "--" in words else words
    if "-o" in own or any(word.startswith("--output") for word in own):
        raise fail(f"{text!r} names its output, which shardscope ci chooses. Remove -o.")
    return RecordCommand(text, tuple(words))


class _Table(Struct, frozen=True):
    """The table `[ci]` of a file."""

    location: TomlLocation
    values: dict[str, object]

    def read_names(self, key: str) -> tuple[str, ...]:
        if key not in self.values:
            return ()
        return self.location.at(key).as_names(self.values[key])


def _read_file(path: str) -> tuple[_Table | None, ContractFile | None]:
    if not os.path.exists(path):
        return None, None
    text = read_text(path)
    document = parse_toml(text, path)
    contract = parse_contract(text, name=path) if "contract" in document else None
    if "ci" not in document:
        return None, contract
    location = TomlLocation(path, find_lines(text)).at("ci")
    values = dict(location.as_table(document["ci"]))
    location.check_keys(values, _KEYS)
    return _Table(location, values), contract


def is_affected(commands: Iterable[RecordCommand], files: Sequence[str]) -> bool:
    """Whether a change of these files may change what the commands record.

    A Python file matters if a program imports it, directly or not, as far as its source tells;
    every other file matters.
    """
    paths = {Path(file).resolve() for file in files}
    if any(path.suffix != ".py" for path in paths):
        return True
    for command in commands:
        imported = _list_sources(command)
        if imported is None or imported & paths:
            return True
    return False


def _list_sources(command: RecordCommand) -> set[Path] | None:
    """The files that a command's program consists of; None if its source does not tell."""
    scripts = [Path(word) for word in command.words if word.endswith(".py")][:1]
    modules = [word for word in command.words[1:2] if not word.startswith("-")]
    if "-m" in command.words[:-1]:
        modules = [command.words[command.words.index("-m") + 1]]
    roots = [Path.cwd(), Path.cwd() / "src", *(script.resolve().parent for script in scripts)]
    starts = [script.resolve() for script in scripts if script.is_file()]
    starts = starts or [path for name in modules for path in _find_module(name, roots)]
    if not starts:
        return None
    seen: set[Path] = set()
    pending = list(starts)
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        imported = list_imports(path)
        if imported is None:
            return None
        pending += [source for name in imported for source in _find_module(name, roots)]
    return seen


def _find_module(name: str, roots: Iterable[Path]) -> Iterator[Path]:
    """The files that importing a dotted name runs, if it is in one of the folders."""
    parts = name.split(".")
    for root in roots:
        for end in range(1, len(parts) + 1):
            base = root.joinpath(*parts[:end])
            for path in (base / "__init__.py", base.with_suffix(".py")):
                if path.is_file():
                    yield path.resolve()


def list_imports(path: Path) -> set[str] | None:
    """The names that a file imports; None if it also imports by names that it computes."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _resolve_base(path, node)
            names |= {base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in _DYNAMIC:
            first = node.args[0] if node.args else None
            if not isinstance(first, ast.Constant):
                return None
            names.add(str(first.value))
    return names - {""}


def _resolve_base(path: Path, node: ast.ImportFrom) -> str:
    """The module that `from … import` names; a relative one is found from the file's package."""
    if not node.level:
        return node.module or ""
    folder = path.parent
    package: list[str] = []
    while (folder / "__init__.py").is_file():
        package.insert(0, folder.name)
        folder = folder.parent
    parents = package[: len(package) - node.level + 1]
    return ".".join([*parents, *([node.module] if node.module else [])])
