"""Write what the package prints and produces into a folder, to prove that a refactoring keeps it.

    python benchmarks/capture_outputs.py before     # on the old code
    python benchmarks/capture_outputs.py after      # on the new code
    diff -r before after

Captured are: every view, diff, page and export of the committed recordings; every `--help` text;
the public names with their signatures; the recording's JSON schema; which ops have a sharding
rule, a lowering or a decomposition; the private torch names in use; fresh recordings of the
examples without their times; and the programs that `parallelize` makes of a few models.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]

import torch  # noqa: E402
from click.testing import CliRunner  # noqa: E402

import shardscope  # noqa: E402
from shardscope.cli import main as shardscope_command  # noqa: E402
from shardscope.record import load, save  # noqa: E402

VIEWS = (
    "overview",
    "modules",
    "communication",
    "sharding",
    "coverage",
    "compiler",
    "memory",
    "proof",
)
TABLES = (
    "collectives", "coverage", "modules", "parameters", "memory", "spans", "breaks", "findings",
    "gaps",
)  # fmt: skip
EXAMPLE_RUNS = {
    "llama-trace": "trace examples/llama.py --mesh dp=16,tp=4",
    "llama-memory": "memory examples/llama.py --mesh dp=16,tp=4 --gpu-memory 80GiB",
    "llama-audit": "audit examples/llama.py --mesh dp=16,tp=4",
    "moe-trace": "trace examples/moe.py --mesh dp=4,ep=8",
    "moe-coverage": "coverage examples/moe.py --mesh dp=2,ep=2",
    "moe-audit": "audit examples/moe.py --mesh dp=4,ep=8",
    "vision-explain": "explain examples/vision.py",
}


def run_command(*args: str, columns: int = 100) -> str:
    """What a command prints, and its exit code."""
    environment = {"COLUMNS": str(columns), "NO_COLOR": "1"}
    result = CliRunner().invoke(shardscope_command, list(args), env=environment)
    return f"{result.output}\nexit code {result.exit_code}\n"


def recordings() -> Iterator[Path]:
    yield from sorted((ROOT / "tests" / "golden").glob("*.json"))
    yield from sorted((ROOT / "examples" / "recordings").glob("*.json.gz"))


def capture_commands(out: Path) -> None:
    """What commands that read a recording print and write."""
    scratch = out / "files"
    scratch.mkdir(parents=True)
    for path in recordings():
        name = path.name.split(".")[0]
        texts = [run_command("show", str(path)), run_command("show", str(path), columns=60)]
        texts += [run_command("show", str(path), "--view", view) for view in VIEWS]
        texts += [run_command("show", str(path), "--by", by) for by in ("axis", "kind", "cause")]
        texts += [run_command("show", str(path), "--no-fold")]
        (out / f"show-{name}.txt").write_text(_without_paths("\n".join(texts)))
        (out / f"repr-{name}.txt").write_text(repr(load(path)))
        for format_ in ("perfetto", "markdown", "json"):
            text = run_command("export", str(path), "--to", format_, "-o", "-")
            (scratch / f"{name}.{format_}").write_text(_without_paths(text))
        for format_ in ("tensorboard", "chakra"):
            ending = "{rank}.et" if format_ == "chakra" else "tb"
            run_command(
                "export", str(path), "--to", format_, "-o", str(scratch / f"{name}-{ending}")
            )
        for table in TABLES:
            text = run_command("export", str(path), "--to", "csv", "--table", table, "-o", "-")
            (scratch / f"{name}-{table}.csv").write_text(_without_paths(text))
        page = load(path).html()
        data = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.S)
        assert data is not None
        text = json.dumps(json.loads(data[1]), indent=1, sort_keys=True)
        (scratch / f"{name}-page.json").write_text(_without_paths(text))
        contract = scratch / f"{name}-contract.toml"
        run_command("contract", "record", str(path), "-o", str(contract))
    paths = list(recordings())
    texts = [run_command("diff", str(a), str(b)) for a in paths for b in paths if a != b]
    (out / "diff.txt").write_text(_without_paths("\n".join(texts)))


def capture_help(out: Path) -> None:
    def walk(command: Any, words: tuple[str, ...]) -> Iterator[str]:
        yield f"## {' '.join(words)}\n{run_command(*words, '--help')}"
        if hasattr(command, "list_commands"):
            context = command.make_context("shardscope", [], resilient_parsing=True)
            for name in command.list_commands(context):
                yield from walk(command.get_command(context, name), (*words, name))

    (out / "help.txt").write_text("\n".join(walk(shardscope_command, ())))


def capture_api(out: Path) -> None:
    """Public names, with the signatures of functions and of the public methods of classes."""
    import shardscope.compat
    import shardscope.record
    import shardscope.testing

    lines = []
    for module in (shardscope, shardscope.record, shardscope.compat, shardscope.testing):
        for name in sorted(module.__all__):
            value = getattr(module, name)
            lines.append(f"{module.__name__}.{name}{_signature(value)}")
            if inspect.isclass(value):
                for member in sorted(vars(value)):
                    if not member.startswith("_"):
                        lines.append(f"    .{member}{_signature(vars(value)[member])}")
    (out / "api.txt").write_text("\n".join(lines))
    from shardscope.record.schema import make_schema

    (out / "schema.json").write_text(json.dumps(make_schema(), indent=1, sort_keys=True))


def _signature(value: Any) -> str:
    try:
        text = re.sub(r"shardscope\.[\w.]+\.", "", str(inspect.signature(value)))
        return re.sub(r" at 0x[0-9a-f]+", "", text)
    except (TypeError, ValueError):
        return ""


def capture_registries(out: Path) -> None:
    """Which ops have a rule, a lowering, a decomposition; private torch names."""
    from private_names import find_private_names
    from shardscope.parallel.sharding_rules.registry import (
        DECOMPOSITIONS,
        LOWERINGS,
        RULES,
        load_rules,
    )

    load_rules()
    tables = {"rule": RULES, "lowering": LOWERINGS, "decomposition": DECOMPOSITIONS}
    lines = [f"{kind} {op}" for kind, table in tables.items() for op in table]
    (out / "ops.txt").write_text("\n".join(sorted(lines)))
    names: set[str] = set()
    for path in sorted((ROOT / "src" / "shardscope" / "_torch").rglob("*.py")):
        names |= find_private_names(path)
    (out / "private_names.txt").write_text("\n".join(sorted(names)))


def capture_examples(out: Path) -> None:
    """What instruments record of the examples, without times."""
    from regenerate import without_times

    for name, command in EXAMPLE_RUNS.items():
        with tempfile.TemporaryDirectory() as folder, _argv(command):
            file = Path(folder) / "recording.json"
            text = run_command(*shlex.split(command), "-o", str(file))
            save(without_times(load(file)), out / f"{name}.json", force=True)
        text = re.sub(r"\d+(\.\d+)? (ns|µs|ms|s|min)\b", "TIME", text.replace(folder, "FOLDER"))
        (out / f"{name}.txt").write_text(_without_paths(text))


def capture_programs(out: Path) -> None:
    """The code of every rank's program, for small models and plans."""
    nn = torch.nn
    mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    block = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    cases: dict[str, Callable[[], Any]] = {
        "mlp": lambda: shardscope.parallelize(
            mlp, {"tp": 2}, {"0": "colwise", "2": "rowwise"}, args=(torch.randn(4, 8),)
        ),
        "mlp-2d": lambda: shardscope.parallelize(
            mlp, {"dp": 2, "tp": 2}, {"0": "colwise", "2": "rowwise"}, args=(torch.randn(4, 8),)
        ),
        "block": lambda: shardscope.parallelize(
            block, {"tp": 2}, {"linear1": "colwise", "linear2": "rowwise"},
            args=(torch.randn(2, 3, 16),),
        ),
    }  # fmt: skip
    for name, build in cases.items():
        torch.manual_seed(0)
        try:
            program = build()
            texts = [program.exported(rank).graph_module.code for rank in range(2)]
            texts.append(str(program))
        except shardscope.ShardscopeError as error:
            texts = [str(error)]
        (out / f"program-{name}.txt").write_text(_without_paths("\n".join(texts)))


@contextmanager
def _argv(command: str) -> Iterator[None]:
    before = sys.argv
    sys.argv = ["shardscope", *shlex.split(command)]
    try:
        yield
    finally:
        sys.argv = before


def _without_paths(text: str) -> str:
    return text.replace(str(ROOT), "ROOT")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a new folder for the captured texts")
    out = parser.parse_args().folder.resolve()
    out.mkdir(parents=True)
    os.chdir(ROOT)
    for capture in (
        capture_commands, capture_help, capture_api, capture_registries, capture_programs,
        capture_examples,
    ):  # fmt: skip
        print(capture.__name__, flush=True)
        capture(out)


if __name__ == "__main__":
    main()
