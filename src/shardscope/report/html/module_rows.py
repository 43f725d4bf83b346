"""Data of the modules view: the module tree, in columns."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, final

from shardscope.record import Mark, MemoryKind, Module, Parameter, Recording
from shardscope.record.layer_names import fold_layer_ranges, has_layer_range
from shardscope.report.html.page_index import NOWHERE, Index
from shardscope.report.html.page_modules import Modules, PeakParts
from shardscope.report.model.holdings import sum_holdings
from shardscope.report.model.memory_peaks import find_worst
from shardscope.report.model.module_tree import ModuleNode, build_tree, find_runs, number_contents
from shardscope.report.model.traffic_totals import IdenticalRanks


class ParameterSizes(NamedTuple):
    """Number of elements and bytes of parameters."""

    num_elements: int = 0
    global_bytes: int = 0
    local_bytes: int = 0

    def plus(self, sizes: ParameterSizes) -> ParameterSizes:
        """Add two sizes."""
        return ParameterSizes(
            *(value + increment for value, increment in zip(self, sizes, strict=True))
        )


def gather_parameters(modules: Iterable[Module]) -> dict[str, list[Parameter]]:
    """Return the parameters of each module; if ranks differ in local size, the largest."""
    by_module: defaultdict[str, dict[str, Parameter]] = defaultdict(dict)
    for module in modules:
        known = by_module[module.name]
        for parameter in module.parameters:
            known_form = known.get(parameter.name)
            if known_form is None or (known_form.local_bytes or 0) < (parameter.local_bytes or 0):
                known[parameter.name] = parameter
    return {
        name: [parameter for parameter in by_name.values() if not parameter.is_buffer]
        for name, by_name in by_module.items()
    }


def measure(parameter: Parameter) -> ParameterSizes:
    """Return one parameter's sizes; `Modules.recorded` states whether bytes are known."""
    return ParameterSizes(
        math.prod(parameter.shape), parameter.global_bytes or 0, parameter.local_bytes or 0
    )


_ROOTS = {"", "(the root)", "the model", "the model itself", "the root", "the root module"}


@final
class FindingTargets:
    """Finds the modules that a finding's subject refers to."""

    def __init__(self, paths: Iterable[str], index: Index, *, model: str = "") -> None:
        """`model` is the root's type, which some findings use as its name."""
        self._index = index
        self._roots = _ROOTS | {model}
        self._layers: defaultdict[str, list[int]] = defaultdict(list)
        for position, path in enumerate(paths):
            if path and index.named(path) == position:
                self._layers[fold_layer_ranges(path)].append(position)
        self._cache: dict[str, tuple[int, ...]] = {}

    def find(self, subject: str) -> tuple[int, ...]:
        """Return positions of modules named by the subject, all that match if it is a pattern."""
        if subject not in self._cache:
            self._cache[subject] = self._find_positions(subject)
        return self._cache[subject]

    def _find_positions(self, subject: str) -> tuple[int, ...]:
        if subject in self._roots:
            root = self._index.module("")
            return () if root == NOWHERE else (root,)
        # `layers.*.wq (×32)`, `embed.weight, output.weight`
        name = subject if self._index.has(subject) else subject.split(" ")[0].rstrip(",")
        if has_layer_range(name):
            return self._find_layers(name)
        position = self._index.named(name) if name else NOWHERE
        return () if position == NOWHERE else (position,)

    def _find_layers(self, name: str) -> tuple[int, ...]:
        pattern = fold_layer_ranges(name)
        while pattern and pattern not in self._layers:
            pattern = pattern.rpartition(".")[0]
        return tuple(self._layers.get(pattern, ()))


@final
class ModuleTree:
    """Nodes by position, parents before their children."""

    def __init__(self, recording: Recording, rank_sets: tuple[IdenticalRanks, ...]) -> None:
        self.nodes: list[ModuleNode] = []
        self.parents: list[int] = []
        self._positions: dict[int, int] = {}  # by id() of a node; `nodes` keeps all nodes alive
        self._roots = build_tree(recording, rank_sets)
        for root in self._roots:
            self._walk(root, NOWHERE)
        self.index = Index(self._name_all(recording), nowhere=self._find_nowhere())
        model = next((module.type for module in recording.modules if not module.name), "")
        self.subjects = FindingTargets((node.path for node in self.nodes), self.index, model=model)

    def _walk(self, node: ModuleNode, parent: int) -> None:
        position = self._positions[id(node)] = len(self.nodes)
        self.nodes.append(node)
        self.parents.append(parent)
        for child in node.children:
            self._walk(child, position)

    def _find_nowhere(self) -> int:
        """Return the position of the node for calls outside any module: a last root with a path."""
        has_unowned = bool(self._roots) and bool(self._roots[-1].path)
        return self._positions[id(self._roots[-1])] if has_unowned else NOWHERE

    def _name_all(self, recording: Recording) -> Iterator[tuple[str, int]]:
        end = self._find_nowhere()
        positions: dict[str, int] = {}
        for position, node in enumerate(self.nodes if end == NOWHERE else self.nodes[:end]):
            positions.setdefault(node.path, position)
        yield from positions.items()
        for module in recording.modules:
            if module.name in positions:
                yield from ((alias, positions[module.name]) for alias in module.aliases)

    def find_ends(self) -> list[int]:
        """Return for each node the position after its last descendant."""
        ends = list(range(1, len(self.nodes) + 1))
        for position, parent in self._from_below():
            ends[parent] = max(ends[parent], ends[position])
        return ends

    def sum_subtrees(self, own: Mapping[int, int]) -> list[int]:
        """Return for each node the sum of its own and its descendants' values."""
        totals = [own.get(position, 0) for position in range(len(self.nodes))]
        for position, parent in self._from_below():
            totals[parent] += totals[position]
        return totals

    def _from_below(self) -> Iterator[tuple[int, int]]:
        """Yield each node that has a parent, with that parent; children before parents."""
        for position in range(len(self.nodes) - 1, -1, -1):
            if self.parents[position] != NOWHERE:
                yield position, self.parents[position]

    def find_identical(self, also: Callable[[int], Hashable]) -> tuple[list[int], list[int]]:
        """Return for each node the first identical sibling, and the length of each run of them.

        `also` returns what else has to be equal for the node at a position.
        """
        first_identical, repeat = list(range(len(self.nodes))), [1] * len(self.nodes)
        numbers: dict[int, int] = {}
        for root in self._roots:
            numbers |= number_contents(root, also=lambda node: also(self._positions[id(node)]))
        for node in self.nodes:
            for run in find_runs(node, numbers):
                first = self._positions[id(run[0])]
                repeat[first] = len(run)
                for child in run:
                    first_identical[self._positions[id(child)]] = first
        return first_identical, repeat


def make_modules(recording: Recording, tree: ModuleTree) -> Modules:
    """Make all columns of the modules view."""
    nodes = tree.nodes
    findings, marks = _count_findings(recording, tree), _describe_marks(recording.modules)
    # A layer with findings must not be folded into layers without.
    first_identical, repeat = tree.find_identical(
        lambda at: (findings[at], marks.get(nodes[at].path))
    )
    sizes = _add_parameters(recording, tree)
    own_peak = _find_peak(recording, tree)
    return Modules(
        recorded=tuple(_list_recorded(recording)),
        path=tuple(node.path for node in nodes),
        label=tuple(map(_label, nodes)),
        type=tuple("|".join(node.types) for node in nodes),
        parent=tuple(tree.parents),
        end=tuple(tree.find_ends()),
        first_identical=tuple(first_identical),
        repeat=tuple(repeat),
        total_parameters=tuple(size.num_elements for size in sizes),
        total_parameter_bytes=tuple(size.global_bytes for size in sizes),
        total_local_bytes=tuple(size.local_bytes for size in sizes),
        total_peak_bytes=tuple(tree.sum_subtrees(_sum_modules(own_peak))),
        marks=tuple(marks.get(node.path, "") for node in nodes),
        num_findings=tuple(tree.sum_subtrees(findings)),
        own_peak=_make_peak_parts(own_peak),
    )


def _list_recorded(recording: Recording) -> Iterator[str]:
    """Yield the groups of columns that were recorded, where a zero is a measured value."""
    instruments = recording.run.instruments
    if recording.collectives or "trace" in instruments:
        yield "wire"
    holdings = sum_holdings(recording)
    if holdings is not None:
        yield "parameters"
        if holdings.local_bytes is not None:
            yield "local"
    if recording.memory:
        yield "peak"
    if instruments or recording.findings:
        yield "findings"


def _label(node: ModuleNode) -> str:
    return node.label if node.path else "|".join(node.types) or "model"


def _count_findings(recording: Recording, tree: ModuleTree) -> Counter[int]:
    return Counter(
        at for finding in recording.findings for at in tree.subjects.find(finding.subject)
    )


def _find_peak(recording: Recording, tree: ModuleTree) -> Counter[tuple[str, int]]:
    """Return the bytes at the peak of the rank that needs most memory, by kind and module."""
    bytes_at_peak: Counter[tuple[str, int]] = Counter()
    for use in find_worst(recording.memory).at_peak if recording.memory else ():
        bytes_at_peak[use.kind, tree.index.module(use.module)] += use.num_bytes
    return bytes_at_peak


def _sum_modules(bytes_at_peak: Counter[tuple[str, int]]) -> Counter[int]:
    sums: Counter[int] = Counter()
    for (_, module), num_bytes in bytes_at_peak.items():
        sums[module] += num_bytes
    return sums


def _make_peak_parts(bytes_at_peak: Counter[tuple[str, int]]) -> PeakParts:
    used = {kind for kind, _ in bytes_at_peak}
    kinds = [kind for kind in MemoryKind if kind in used]
    rows = sorted(
        (module, kinds.index(MemoryKind(kind)), num_bytes)
        for (kind, module), num_bytes in bytes_at_peak.items()
        if module != NOWHERE
    )
    return PeakParts(
        kinds=tuple(kind.replace("_", " ") for kind in kinds),
        module=tuple(module for module, _, _ in rows),
        kind=tuple(kind for _, kind, _ in rows),
        num_bytes=tuple(num_bytes for _, _, num_bytes in rows),
    )


def _describe_marks(modules: Sequence[Module]) -> dict[str, str]:
    words_by_module: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for module in modules:
        words_by_module[module.name] |= dict.fromkeys(map(_describe_mark, module.marks))
    return {name: ", ".join(words) for name, words in words_by_module.items()}


def _describe_mark(mark: Mark) -> str:
    over = f" over {' × '.join(mark.axes)}" if mark.axes else ""
    words = "; ".join(filter(None, [mark.detail, *mark.options]))
    return f"{mark.kind}{f' ({words})' if words else ''}{over}"


def _add_parameters(recording: Recording, tree: ModuleTree) -> list[ParameterSizes]:
    """Sum the parameters of each subtree; parameters that are tied count once."""
    parameters = gather_parameters(recording.modules)
    sums = [ParameterSizes()] * len(tree.nodes)
    tied: list[dict[str, ParameterSizes]] = [{} for _ in tree.nodes]
    for position in range(len(tree.nodes) - 1, -1, -1):
        parent = tree.parents[position]
        for parameter in parameters.get(tree.nodes[position].path, ()):
            if parameter.alias_group is None:
                sums[position] = sums[position].plus(measure(parameter))
            else:
                tied[position][parameter.alias_group] = measure(parameter)
        if parent != NOWHERE:
            sums[parent] = sums[parent].plus(sums[position])
            tied[parent] |= tied[position]
    for position, tied_sizes in enumerate(tied):
        for size in tied_sizes.values():
            sums[position] = sums[position].plus(size)
    return sums
