"""Measure the size and shape of the source: files, imports, cycles, vocabulary, `Any`.

Run it before and after a restructuring, and compare the two tables:

    python benchmarks/structure.py            # the tables
    python benchmarks/structure.py --stories  # also how many modules a `trace`, `parallelize`
                                              # and `diagnose` pass through (a minute)

Counted are the files of `src/shardscope`. An import of a name that a package re-exports counts as
an import of the module that defines the name, so that packages with exports in their `__init__`
do not look as if each of their modules had one importer.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "shardscope"
# Modules on top of all packages: the public API, and what `recording.html()` calls.
FRONT = ("shardscope", "shardscope.compat", "shardscope.testing", "shardscope.drawing")
ANALYSES = ("comm", "shard", "compile", "parallel", "numerics")


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Source:
    """All modules of the package, parsed once."""

    def __init__(self) -> None:
        self.paths = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}
        self.texts = {name: path.read_text() for name, path in self.paths.items()}
        self.trees = {name: ast.parse(text) for name, text in self.texts.items()}
        self.packages = {n for n, path in self.paths.items() if path.name == "__init__.py"}
        self.exports = {name: dict(self._read_exports(name)) for name in self.packages}
        self.edges = {name: set(self._read_imports(name)) - {name} for name in self.paths}

    def _read_exports(self, package: str) -> Iterator[tuple[str, str]]:
        """Names that a package offers, each with the module that it comes from.

        Both spellings count: `from … import name`, and a table {"name": "module"} for names that
        are imported when first used.
        """
        for node in ast.walk(self.trees[package]):
            if isinstance(node, ast.ImportFrom):
                yield from ((a.asname or a.name, node.module or "") for a in node.names)
            elif isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                        name, module = key.value, value.value
                        if isinstance(module, str) and module.startswith("shardscope."):
                            yield str(name), module

    def _resolve(self, module: str, name: str) -> str:
        """The module that `from module import name` reads the name from."""
        if f"{module}.{name}" in self.paths:
            return f"{module}.{name}"
        seen = set()
        while module in self.packages and module not in seen:
            seen.add(module)
            module = self.exports[module].get(name, module)
        return module

    def _read_imports(self, importer: str) -> Iterator[str]:
        is_package = importer in self.packages
        for node in ast.walk(self.trees[importer]):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardscope"):
                if is_package and (node.module or "").startswith(importer + "."):
                    continue  # a re-export
                for alias in node.names:
                    yield self._resolve(node.module or "", alias.name)
            elif isinstance(node, ast.Import):
                yield from (a.name for a in node.names if a.name in self.paths)
            elif isinstance(node, ast.Constant) and not is_package and node.value in self.paths:
                yield str(node.value)


def top_level(module: str) -> str:
    return (*module.split("."), "")[1]


def folder(source: Source, module: str) -> str:
    """The subpackage of a module; a file at the top is a package of its own."""
    parent = module.rpartition(".")[0]
    return module if module in source.packages or parent == "shardscope" else parent


def find_cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components with more than one member (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in edges.get(node, ()):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = []
            while True:
                component.append(stack.pop())
                if component[-1] == node:
                    break
            if len(component) > 1:
                components.append(sorted(component))

    for node in edges:
        if node not in index:
            visit(node)
    return components


def subpackage_edges(source: Source) -> dict[str, set[str]]:
    edges: dict[str, set[str]] = defaultdict(set)
    for module, targets in source.edges.items():
        home = folder(source, module)
        if module in FRONT:
            continue  # on top of everything
        edges[home] |= {folder(source, target) for target in targets} - {home}
    return edges


def code_lines(text: str) -> set[int]:
    """Numbers of the lines that hold code: no comments, docstrings or blank lines."""
    lines: set[int] = set()
    skipped = {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENDMARKER,
    }  # fmt: skip
    previous = tokenize.INDENT
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and previous in (
            tokenize.INDENT, tokenize.DEDENT, tokenize.NEWLINE, tokenize.NL, tokenize.COMMENT,
        )  # fmt: skip
        if token.type not in skipped and not is_docstring:
            lines.update(range(token.start[0], token.end[0] + 1))
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            previous = token.type
    return lines


def import_lines(tree: ast.AST) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        is_all = isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        )
        if isinstance(node, (ast.Import, ast.ImportFrom)) or is_all:
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def count_names(texts: Iterable[str]) -> Counter[str]:
    names: Counter[str] = Counter()
    for text in texts:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                names[token.string] += 1
    return names


# Each file of these packages is a renderer, an op family, or the code of a command.
_RENDERERS = ("report.text", "report.html", "report.export", "report.compare", "report.tui")
_FAMILIES = ("parallel.sharding_rules", "cli", "plugins")


def is_exempt(source: Source, module: str) -> bool:
    """Whether a module may have one importer: it is an entry point, a renderer or an op family.

    Entry points are the modules that the public API, `compat` and `testing` name, and modules that
    are started by their name.
    """
    name = module.removeprefix("shardscope.")
    if name.startswith((*_RENDERERS, *_FAMILIES)):
        return True
    is_started = '__name__ == "__main__"' in source.texts[module]
    return is_started or any(
        module in source.texts[front] for front in FRONT if front in source.texts
    )


def measure(source: Source) -> Iterator[tuple[str, str]]:
    modules = [name for name in source.paths if name not in source.packages]
    importers: Counter[str] = Counter()
    for targets in source.edges.values():
        importers.update(targets)
    code = {name: code_lines(text) for name, text in source.texts.items()}
    num_code = sum(map(len, code.values()))
    num_imports = sum(len(code[n] & import_lines(source.trees[n])) for n in source.paths)
    single = [name for name in modules if importers[name] == 1]
    crossing = Counter(
        (top_level(module), top_level(target))
        for module, targets in source.edges.items()
        for target in targets
        if {top_level(module), top_level(target)} <= set(ANALYSES)
        and top_level(module) != top_level(target)
    )
    basenames = Counter(name.rpartition(".")[2] for name in modules)
    repeated = sum(count for count in basenames.values() if count > 1)
    lengths = sorted(len(text.splitlines()) for text in source.texts.values())

    yield "source files", f"{len(source.paths)}"
    yield "lines", f"{sum(lengths):,} ({num_code:,} of code); longest file {lengths[-1]}"
    yield (
        "modules with one importer",
        f"{len(single)} of {len(modules)} ({len(single) / len(modules):.0%})",
    )
    helpers = [name for name in single if not is_exempt(source, name)]
    yield (
        "of these neither entry point, renderer nor op family",
        f"{len(helpers)} ({len(helpers) / len(modules):.0%})",
    )
    yield "modules whose basename repeats", f"{repeated} ({repeated / len(modules):.0%})"
    yield "import and __all__ lines", f"{num_imports:,} ({num_imports / num_code:.1%} of code)"
    yield "`one` as an identifier", f"{count_names(source.texts.values())['one']:,}"
    cycles = find_cycles(subpackage_edges(source))
    yield (
        "import cycles between subpackages",
        f"{len(cycles)} {[len(c) for c in cycles] if cycles else ''}",
    )
    yield (
        "imports between " + ", ".join(ANALYSES),
        f"{sum(crossing.values())} "
        + ", ".join(f"{a}→{b} {count}" for (a, b), count in sorted(crossing.items())),
    )
    for package in ("parallel", "numerics"):
        own = [n for n in source.paths if top_level(n) == package]
        num_any = count_names(source.texts[n] for n in own)["Any"]
        lines = sum(len(code[n]) for n in own)
        yield f"`Any` per 1,000 lines of code in {package}", f"{1000 * num_any / lines:.0f}"
    fan_out = Counter({name: len(targets) for name, targets in source.edges.items()})
    yield (
        "largest fan-out",
        ", ".join(f"{n.removeprefix('shardscope.')} {c}" for n, c in fan_out.most_common(3)),
    )


# Each story is a short script; a module counts if one of its functions was called, other than by
# an import, in the script's process or in one that it started.
_STORIES = {
    "trace → show": """
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardscope import simulate, trace
with simulate({"tp": 2}, device="cpu") as world:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    parallelize_module(model, world.mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    with trace(model) as run:
        model(torch.randn(4, 8)).sum().backward()
run.save("run.json")
from shardscope.cli import main
main(["show", "run.json"])
""",
    "parallelize": """
import torch
from shardscope import parallelize
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
exported = torch.export.export(model, (torch.randn(4, 8),))
parallelize(exported, {"tp": 2}, {"0": "colwise", "1": "rowwise"}).exported(0)
""",
    "diagnose → repro": """
import torch
from shardscope import diagnose
def function(x):
    return torch.relu(x + 1) * 2
fault = {"backend": "shardscope_fault_accuracy_error", "options": {"op": "relu"}}
assert diagnose(function, torch.randn(4), **fault).repro
""",
}

_HOOK = """
import os, sys, threading
_seen = set()
def _note_call(frame, event, argument):
    code = frame.f_code
    name = code.co_filename
    if event == "call" and name not in _seen and "/src/shardscope/" in name:
        caller = frame  # calls made while a module is imported do not count
        while caller and not (
            caller.f_code.co_name == "<module>"
            and caller.f_globals.get("__name__", "").startswith("shardscope")
        ):
            caller = caller.f_back
        if caller is None and not code.co_name.startswith("<"):
            _seen.add(name)
            file = os.open(os.environ["STORY_MODULES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, (name + chr(10)).encode())
            os.close(file)
sys.setprofile(_note_call)
threading.setprofile(_note_call)
"""


def count_story_modules(script: str) -> Counter[str]:
    """How many modules of each package run a function of theirs while `script` runs."""
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "sitecustomize.py").write_text(_HOOK)
        seen = Path(scratch, "seen.txt")
        environment = {
            **os.environ,
            "STORY_MODULES": str(seen),
            "PYTHONPATH": f"{scratch}{os.pathsep}{SOURCE.parent}",
        }
        Path(scratch, "story.py").write_text(script)
        subprocess.run(
            [sys.executable, "story.py"], cwd=scratch, env=environment, check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        files = {Path(line) for line in seen.read_text().splitlines()}
    return Counter(path.relative_to(SOURCE).parts[0] for path in files)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stories", action="store_true", help="also run the three stories")
    arguments = parser.parse_args()
    rows = list(measure(Source()))
    if arguments.stories:
        for story, script in _STORIES.items():
            counts = count_story_modules(script)
            rows.append((f"modules called by {story}", f"{counts.total()}: " + ", ".join(
                f"{package} {count}" for package, count in sorted(counts.items())
            )))  # fmt: skip
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:<{width}}  {value}")


if __name__ == "__main__":
    main()
