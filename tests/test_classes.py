"""What holds for all classes: which may be overridden, and how instances look at a prompt."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from msgspec import Struct
from msgspec.structs import fields
from torch import nn

import sample_recordings as samples
from shardscope import Memory, Trace, diff, memory, simulate, trace
from shardscope.compat import CommDebugMode, ExplainWithBackend
from shardscope.contract import BreachKind, Contract, Figure, Limit, Violation
from shardscope.errors import ShardscopeError
from shardscope.parallel import Colwise, Plan
from shardscope.record import Axis, Module, RankSpan, Record, Recording
from shardscope.report.compare.changes import Changes
from shardscope.testing import BreachError
from source_trees import list_nodes

SOURCE = Path(__file__).parents[1] / "src" / "shardscope"
# Abstract, or records without behaviour to override, or errors, which are made to be inherited.
_OPEN_BASES = (
    "Protocol",
    "Struct",
    "Record",
    "Enum",
    "NamedTuple",
    "TypedDict",
    "Exception",
    "Error",
    "threading.local",
)
# People subclass torch's, and so may these; the demo's model plays the user's.
_OPEN = ("CommDebugMode", "SimpleProfiler", "nn.Module")
# Subclasses override the methods that they need.
_LISTENERS = ("Instrument", "TrainingListener")


def open_classes() -> Iterator[str]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in list_nodes(path):
            if isinstance(node, ast.ClassDef) and not _is_settled(node):
                yield f"{path.relative_to(SOURCE)}: {node.name}"


def _is_settled(node: ast.ClassDef) -> bool:
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    bases = [ast.unparse(base) for base in node.bases]
    return (
        "final" in decorators
        or any(decorator.startswith("dataclass") for decorator in decorators)
        or any(base.endswith(_OPEN_BASES) for base in bases)
        or node.name in _OPEN + _LISTENERS
        or any(base in _OPEN for base in bases)
    )


def test_every_class_is_abstract_or_final() -> None:
    assert list(open_classes()) == []


PUBLIC = (
    "shardscope",
    "shardscope.compat",
    "shardscope.contract",
    "shardscope.errors",
    "shardscope.parallel",
    "shardscope.record",
    "shardscope.report.compare.changes",
    "shardscope.testing",
    "shardscope.world",
)
_MAX_REPR = 320  # characters: four lines of a terminal
_LONG: dict[str, object] = {
    "text": "x" * 100_000,
    "texts": ("x" * 1_000,) * 1_000,
    "numbers": tuple(range(100_000)),
    "number": 10**300,
    "records": (samples.make_run(),) * 1_000,
    "mapping": dict.fromkeys(range(100_000)),
}


def public_classes() -> Iterator[type]:
    for name in PUBLIC:
        module = import_module(name)
        names = getattr(module, "__all__", [n for n in dir(module) if not n.startswith("_")])
        yield from filter(inspect.isclass, (getattr(module, name) for name in names))


# Those that take what they like, and show it; others check what they are given, or have no fields.
STRUCTS = sorted(
    {one for one in public_classes() if issubclass(one, Struct)}
    - {Changes, Contract, Limit, RankSpan, Record, Recording},
    key=lambda one: one.__qualname__,
)


def fits_a_terminal(one: object) -> bool:
    text = repr(one)
    return len(text) <= _MAX_REPR and "\n" not in text


@pytest.mark.parametrize("cls", STRUCTS)
def test_records_fit_a_terminal_whatever_is_in_them(cls: type[Struct]) -> None:
    for what, value in _LONG.items():
        assert fits_a_terminal(cls(**{field.name: value for field in fields(cls)})), what


def other_objects() -> Iterator[object]:
    yield from (error("x" * 100_000) for error in find_errors(ShardscopeError))
    run = samples.make_run(axes=(Axis(name="x" * 1_000, size=2),) * 100)
    modules = (Module(name="", type="M" * 1_000, ranks=()),) * 1_000
    yield from (Recording(run=run, modules=modules), RankSpan(2**19, 2**19, 2**19))
    yield diff(samples.make_recording(), samples.make_varied())
    yield Contract(tuple(Limit(figure=Figure.COUNT, most=1, module="m" * 99) for _ in range(99)))
    limit = Limit(figure=Figure.GAPS, most=0)
    violation = Violation(
        limit=limit, kind=BreachKind.TOO_MUCH, title="gaps", expected="0", actual="9" * 999
    )
    yield from (limit, BreachError([violation] * 99, num_limits=100, name="contract.toml"))
    yield Plan({f"layers.{layer}.attention.wq": Colwise() for layer in range(99)})
    yield from (CommDebugMode(), ExplainWithBackend("eager"), ExplainWithBackend("eager").output())
    with simulate({f"axis{number}": 1 for number in range(6)}) as world:
        model = nn.Linear(2, 2)
        yield from (world, trace(model), memory(model, lambda: model(torch.ones(2, 2))))


def find_errors(cls: type[Exception]) -> Iterator[type[Exception]]:
    if "__init__" not in vars(cls):  # others take more than a message, and look the same
        yield cls
    for below in cls.__subclasses__():
        yield from find_errors(below)


def test_other_objects_fit_a_terminal() -> None:
    shown = list(other_objects())
    assert {Memory, Trace, Plan, BreachError, Recording} <= set(map(type, shown))
    assert [repr(one)[:500] for one in shown if not fits_a_terminal(one)] == []


def test_a_recording_says_what_it_is_of() -> None:
    llama = samples.make_llama()
    assert repr(llama) == (
        "Recording(Llama, dp=128 × tp=8, 1 of 1,024 ranks, simulated: 2 groups, 389 modules, "
        "356 collectives)"
    )
    assert repr(samples.make_recording(groups=())) == "Recording(1 of 8 ranks: empty)"
    assert repr(samples.make_recording()) == "Recording(1 of 8 ranks: 1 group)"
    (first, *_) = llama.collectives
    assert repr(first).startswith(
        "Collective(rank=0, order=0, group='dp', group_order=0, kind='all"
    )
