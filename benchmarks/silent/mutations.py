"""Mutations of the collectives of correct programs: dropped, doubled, scaled, regrouped, redimmed.

A `Site` is a call of a collective, of an autograd function around collectives, or of a layout, in
the files of the correct programs. `mutated(site, kind)` exchanges the code of the function that
contains the call, so that lines stay as they are.
"""

from __future__ import annotations

import ast
import copy
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Shard

FILES = (
    "correct_models",
    "correct_steps",
    "correct_layouts",
    "correct_by_hand",
    "correct_pipelines",
)
KINDS = ("drop", "double", "scale", "group", "dim")
_SIZE, _RANK = "dist.get_world_size(GROUP)", "dist.get_rank(GROUP)"
_REPEATED = f"torch.cat([X] * {_SIZE}, DIM)"
_OWN_CHUNK = f"X.chunk({_SIZE}, DIM)[{_RANK}].contiguous()"
_ONE_AXIS = {"drop one axis": "MARK if axis == _last_axis() else CALL"}
# For each callee, its positional arguments, and the expression of each mutation; MARK and CALL are
# the mark of the place and the call as it is. A part of the name after a space is a variant.
TEMPLATES: dict[str, tuple[str, dict[str, str]]] = {
    "dist.all_reduce": (
        "X",
        {
            "drop": "MARK",
            "double": "(CALL, CALL)[-1]",
            "scale mean": f"(CALL, X.div_({_SIZE}))[-1]",
            "scale factor": "(CALL, X.mul_(3))[-1]",
        },
    ),
    "dist.all_gather": (
        "PARTS X",
        {
            "drop": "[part.copy_(X) for part in PARTS]",
            "scale factor": "(CALL, [part.mul_(3) for part in PARTS])[-1]",
        },
    ),
    "dist.reduce_scatter_tensor": (
        "OUT X",
        {
            "drop": f"OUT.copy_(X.chunk({_SIZE})[{_RANK}])",
            "scale mean": f"(CALL, OUT.div_({_SIZE}))[-1]",
            "scale factor": "(CALL, OUT.mul_(3))[-1]",
        },
    ),
    "dist.all_gather_into_tensor": (
        "OUT X",
        {
            "drop": f"OUT.copy_(torch.cat([X] * {_SIZE}))",
            "scale factor": "(CALL, OUT.mul_(3))[-1]",
        },
    ),
    "dist.all_to_all_single": (
        "OUT X",
        {"drop": "OUT.copy_(X)", "scale factor": "(CALL, OUT.mul_(3))[-1]"},
    ),
    "Copy.apply": ("X GROUP", {}),
    "Reduce.apply": ("X GROUP", {}),
    "Gather.apply": ("X DIM GROUP", {"drop": _REPEATED}),
    "GatherForAll.apply": ("X DIM GROUP", {"drop": _REPEATED}),
    "Scatter.apply": ("X DIM GROUP", {"drop": _OWN_CHUNK}),
    "ReduceScatter.apply": ("X DIM GROUP", {"drop": _OWN_CHUNK, "scale mean": f"CALL / {_SIZE}"}),
    "AllToAll.apply": ("X GIVEN TAKEN GROUP", {"drop": "X"}),
    "RingPass.apply": ("X GROUP", {"drop": "X"}),
    "all_gather": ("X DIM GROUP", {"drop": _REPEATED}),
    "reduce_scatter": ("X DIM GROUP", {"drop": _OWN_CHUNK, "scale mean": f"CALL / {_SIZE}"}),
    "all_to_all": ("X GIVEN TAKEN GROUP", {"drop": "X"}),
    "pass_along": ("X STEP GROUP", {"drop": "X"}),
    "all_reduce": ("X", {"drop": "X", "scale mean": f"CALL / {_SIZE}"}),
    "sum_over_data": (
        "X RANKS MESH",
        {
            "drop": "X",
            "double": "sum_over_data(CALL, RANKS, MESH)",
            "scale mean": "CALL.div_(data_size(RANKS, MESH))",
            "scale factor": "CALL.mul_(3)",
        },
    ),
    "RowwiseParallel": ("", {"drop": "_without_reduction(CALL)"}),
    "Shard": ("X", {"dim": "Shard(_OTHER_DIM)"}),
    "fully_shard": ("X", {"drop": "_leave_out(X)", "scale mean": "_sum_gradients(CALL)"}),
    "DistributedDataParallel": ("X", {"drop": "_without_sync(CALL)"}),
}
for _name in ("Copy.apply", "Reduce.apply"):
    TEMPLATES[_name][1].update({"drop": "X", "scale mean": f"CALL / {_SIZE}"})
    TEMPLATES[_name][1]["double"] = f"{_name}(CALL, GROUP)"
TEMPLATES["all_reduce"][1]["double"] = "all_reduce(CALL, group=GROUP)"
for _name, (_, _templates) in TEMPLATES.items():
    if not _name.startswith(("dist.", "Shard", "sum_", "Row", "fully", "Dist")):
        _templates["scale factor"] = "CALL * 3"


@final
@dataclass(frozen=True)
class Site:
    """A call in a file of the correct programs; `key` is the style's, if the call is in a dict."""

    file: str
    line: int
    column: int
    function: str  # the outermost function, or the method, that contains the call
    callee: str
    key: str = ""

    @property
    def name(self) -> str:
        """The file, the line and the callee."""
        return f"{self.file}:{self.line}:{self.column} {self.callee}"

    def kinds(self, num_axes: int) -> list[str]:
        """The mutations of the call on a mesh with this many axes."""
        kinds = list(TEMPLATES[self.callee][1])
        if "GROUP" in self.arguments and num_axes > 1:
            kinds.append("group")
        if "DIM" in self.arguments:
            kinds += ["dim -1", "dim 1"]
        if "axis" in self.arguments and num_axes > 1:
            kinds += ["drop one axis", "group one axis"]
        return kinds

    @property
    def arguments(self) -> dict[str, ast.expr]:
        """The arguments of the call by the names in the templates."""
        return _arguments(_find_call(self), self.callee)


def _tree(file: str) -> ast.Module:
    return _trees[file]


_trees = {file: ast.parse((Path(__file__).parent / f"{file}.py").read_text()) for file in FILES}


def list_sites() -> list[Site]:
    """All calls that can be mutated."""
    return [site for file in FILES for site in _list_sites(file)]


def _list_sites(file: str) -> Iterator[Site]:
    for owner, function in _functions(_tree(file)):
        keys = _style_keys(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and (callee := ast.unparse(node.func)) in TEMPLATES:
                is_dim = not node.args or not isinstance(node.args[0], ast.Constant)
                if callee == "Shard" and is_dim and not isinstance(node.args[0], ast.UnaryOp):
                    continue
                yield Site(file, node.lineno, node.col_offset, owner, callee, keys.get(node, ""))


def list_lines(site: Site) -> range:
    """The lines of the function, or the method, that contains a call."""
    functions = dict(_functions(_tree(site.file)))
    function = functions[site.function]
    return range(function.lineno, (function.end_lineno or function.lineno) + 1)


def _style_keys(function: ast.AST) -> dict[ast.AST, str]:
    """The key of the style that each node belongs to."""
    keys: dict[ast.AST, str] = {}
    for node in ast.walk(function):
        pairs: list[tuple[Any, ast.AST]] = []
        if isinstance(node, ast.Dict):
            pairs = list(zip(node.keys, node.values, strict=True))
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            pairs = [(node.targets[0].slice, node.value)]
        for key, value in pairs:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                keys |= dict.fromkeys(ast.walk(value), key.value)
    return keys


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield f"{node.name}.{method.name}", method


@functools.cache
def _find_call(site: Site) -> ast.Call:
    return next(
        node
        for node in ast.walk(_tree(site.file))
        if isinstance(node, ast.Call)
        and (node.lineno, node.col_offset) == (site.line, site.column)
        and ast.unparse(node.func) == site.callee
    )


def _arguments(call: ast.Call, callee: str) -> dict[str, ast.expr]:
    named = dict(zip(TEMPLATES[callee][0].split(), call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg == "group":
            named["GROUP"] = keyword.value
    group = ast.unparse(named.get("GROUP", ast.Constant(None)))
    if "get_group(axis)" in group:
        named["axis"] = ast.Name("axis", ast.Load())
    return named


class _Fill(ast.NodeTransformer):
    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self._values.get(node.id, node))


def _fill(text: str, values: Mapping[str, ast.expr]) -> ast.expr:
    return _Fill(values).visit(ast.parse(text, mode="eval").body)


def _mutate(site: Site, kind: str, number: int) -> ast.expr:
    """The expression that takes the place of a call."""
    call, values = _find_call(site), dict(site.arguments)
    is_backward = site.function.endswith(".backward")
    argument = "X" if site.callee.startswith("dist.all_reduce") else "None"
    context = "ctx" if is_backward else "None"
    values["CALL"] = call
    values.setdefault("GROUP", ast.Constant(None))
    values["MARK"] = _fill(f"_mark({number}, {argument}, {context})", values)
    what, _, variant = kind.partition(" ")
    if what == "mark":
        text = "CALL"
    elif what == "group":
        values["CALL"] = _Replace(values["GROUP"], _fill("_other_group(GROUP)", values)).visit(
            copy.deepcopy(call)
        )
        text = "(CALL)"
        if variant:
            values["AS_IS"] = call
            text = "CALL if axis == _last_axis() else AS_IS"
    elif what == "dim" and site.callee != "Shard":
        other = _fill(f"(DIM) + ({variant})", values)
        values["CALL"] = _Replace(values["DIM"], other).visit(copy.deepcopy(call))
        text = "CALL"
    elif kind in _ONE_AXIS:
        text = _ONE_AXIS[kind]
    else:
        text = TEMPLATES[site.callee][1][kind]
        if site.callee == "Shard":
            dim = ast.literal_eval(values["X"])
            values["_OTHER_DIM"] = ast.Constant({1: 0, 0: 1, -1: 1}[dim])
    expression = _fill(f"(MARK, {text})[-1]", values)
    for node in ast.walk(expression):
        ast.copy_location(node, call)
    return ast.fix_missing_locations(expression)


class _Replace(ast.NodeTransformer):
    """Replaces an expression that is written in the same way."""

    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self._old, self._new = ast.dump(old), new

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if ast.dump(node) == self._old:
            return self._new
        return super().generic_visit(node)

    visit = generic_visit


class _Exchange(ast.NodeTransformer):
    def __init__(self, expressions: Mapping[tuple[int, int, str], ast.expr]) -> None:
        self._expressions = expressions

    def visit_Call(self, node: ast.Call) -> ast.AST:
        new = self._expressions.get((node.lineno, node.col_offset, ast.unparse(node.func)))
        return self.generic_visit(node) if new is None else new

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Let forward of an autograd function say where it was called."""
        self.generic_visit(node)
        if node.name == "forward" and node.args.args and node.args.args[0].arg == "ctx":
            first = node.body[0]
            remember = ast.parse("ctx.place = _place()").body[0]
            for inner in ast.walk(remember):
                ast.copy_location(inner, first)
            node.body.insert(0, remember)
        return node


_alive: list[Any] = []  # code whose ids others may remember


@contextmanager
def mutated(sites: Mapping[Site, str]) -> Iterator[None]:
    """Mutate calls, each by a kind, until the context ends."""
    numbers = {site: number for number, site in enumerate(list_sites())}
    before: list[tuple[FunctionType, CodeType]] = []
    try:
        for file in FILES:
            chosen = {site: kind for site, kind in sites.items() if site.file == file}
            module = import_module(f"benchmarks.silent.{file}")
            expressions = {
                (site.line, site.column, site.callee): _mutate(site, kind, numbers[site])
                for site, kind in chosen.items()
            }
            names = {site.function for site in chosen}
            before += _exchange_code(module, expressions, names)
        yield
    finally:
        for function, code in before:
            function.__code__ = code


def _exchange_code(
    module: ModuleType, expressions: Mapping[tuple[int, int, str], ast.expr], names: set[str]
) -> list[tuple[FunctionType, CodeType]]:
    tree = _Exchange(expressions).visit(copy.deepcopy(_tree(module.__name__.rpartition(".")[2])))
    namespace = {**vars(module), "torch": torch, "dist": dist} | _HELPERS
    vars(module).update({"dist": dist, "torch": torch, **_HELPERS})
    exec(compile(ast.fix_missing_locations(tree), str(module.__file__), "exec"), namespace)
    before = []
    for name, _ in _functions(_tree(module.__name__.rpartition(".")[2])):
        is_place = name.endswith(".forward")
        if name in names or is_place:
            old, new = _find_function(vars(module), name), _find_function(namespace, name)
            before.append((old, old.__code__))
            _alive.extend([new, new.__code__, namespace])
            old.__code__ = new.__code__
    return before


def _find_function(namespace: Mapping[str, Any], name: str) -> FunctionType:
    owner, _, method = name.partition(".")
    found = namespace[owner]
    if method:
        found = vars(found)[method]
        found = getattr(found, "__func__", getattr(found, "fget", None) or found)
    return found


# What the mutated code calls.

Place = tuple[tuple[str, ...], frozenset[tuple[str, int]]]
_state = threading.local()
marks: dict[int, dict[str, set[Any]]] = {}
"""By the number of a site: the modules, the lines and the parameters that reach it."""


def watch(model: nn.Module, mesh: Any) -> None:
    """Remember the mesh and the names of modules and parameters of this rank."""
    _state.mesh, _state.model = mesh, model
    _state.names = None


def _place() -> Place:
    """The modules that are running, from the outside, and the lines of the programs."""
    frame, lines, running = sys._getframe(1), set(), []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.stem in FILES:
            lines.add((path.name, frame.f_lineno))
        if frame.f_code.co_name == "_call_impl" and isinstance(
            frame.f_locals.get("self"), nn.Module
        ):
            running.append(frame.f_locals["self"])
        frame = frame.f_back
    names = _module_names()
    return tuple(names.get(id(module), "?") for module in running), frozenset(lines)


def _module_names() -> dict[int, str]:
    from benchmarks.silent.correct_steps import plain_name

    model = getattr(_state, "model", None)
    if model is None:
        return {}
    return {id(module): plain_name(f"{name}.")[:-1] for name, module in model.named_modules()}


def _mark(number: int, tensor: Any, ctx: Any) -> None:
    from benchmarks.silent.correct_steps import plain_name

    mark = marks.setdefault(number, {"modules": set(), "lines": set(), "parameters": set()})
    modules, lines = _place()
    if ctx is not None:
        modules, more = getattr(ctx, "place", ((), frozenset()))
        lines |= more
    if modules:
        mark["modules"].add(modules[0])
    mark["lines"] |= lines
    model = getattr(_state, "model", None)
    if isinstance(tensor, Tensor) and model is not None and not modules:
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            local = getattr(gradient, "_local_tensor", gradient)
            if local is not None and local.data_ptr() == tensor.data_ptr():
                mark["parameters"].add(plain_name(name))


def _other_group(group: Any) -> Any:
    mesh = _state.mesh
    groups = [mesh.get_group(axis) for axis in mesh.mesh_dim_names]
    return next(other for other in groups if other is not group and other != group)


def _last_axis() -> str:
    return str(_state.mesh.mesh_dim_names[-1])


def _without_reduction(style: Any) -> Any:
    """A row-wise layer whose output stays a partial sum, or is this rank's chunk of it."""
    if isinstance(style.output_layouts[0], Shard):
        (layout,) = style.output_layouts

        def chunk(module: nn.Module, inputs: Any, output: Any) -> Any:
            mesh = _state.mesh["tp"]
            return output.chunk(mesh.size(), layout.dim)[mesh.get_local_rank()].contiguous()

        return _Hooked(type(style)(output_layouts=Partial()), chunk)
    return type(style)(output_layouts=Partial())


class _Hooked:
    def __new__(cls, style: Any, hook: Callable[..., Any]) -> Any:
        apply = style._apply

        def apply_with_hook(module: nn.Module, mesh: Any) -> nn.Module:
            module = apply(module, mesh)
            module.register_forward_hook(hook)
            return module

        style._apply = apply_with_hook
        return style


def _leave_out(module: nn.Module) -> nn.Module:
    """Shard the module without the parameters of its last child with parameters."""
    from torch.distributed.fsdp import fully_shard

    children = [child for child in module.children() if list(child.parameters(recurse=False))]
    left_out = set(children[-1].parameters()) if children else set()
    mesh = _state.mesh
    return fully_shard(module, mesh=mesh, ignored_params=left_out)


def _sum_gradients(module: Any) -> Any:
    """Sum gradients over ranks instead of averaging them."""
    module.set_gradient_divide_factor(1.0)
    return module


def _without_sync(wrapper: Any) -> Any:
    """Never reduce gradients."""
    wrapper.require_backward_grad_sync = False
    return wrapper


_HELPERS: dict[str, Any] = {
    function.__name__: function
    for function in (
        _mark, _place, _other_group, _last_axis, _without_reduction, _leave_out, _sum_gradients,
        _without_sync,
    )
}  # fmt: skip
