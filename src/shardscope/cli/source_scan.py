"""Reads Python source, without running it, for what a target needs: models, configs, inputs."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from shardscope.errors import TargetError

# How the names of base classes of models end: torch's, and those of libraries.
_MODULE_ENDINGS = (
    "Module",
    "PreTrainedModel",
    "ModelMixin",
    "LMHeadModel",
    "ForCausalLM",
    "ForMaskedLM",
    "Generation",
    "Classification",
)
_CONFIG_WORDS = ("config", "cfg", "args", "params", "hparams")
_BUILDER_VERBS = ("build", "make", "create", "get", "init")
_MODEL_WORDS = ("model", "net", "network", "transformer")
_MESH_WORDS = ("mesh", "device_mesh", "world_mesh")
_TOKEN_WORDS = ("idx", "ids", "input_ids", "token_ids", "tokens", "input_tokens")
_INPUT_LAYERS = ("Embedding", "Linear", "Conv1d", "Conv2d", "LSTM", "GRU")
# Top-level calls that only prepare: a file with others is a program, and importing it would run it.
_HARMLESS = ("basicConfig", "getLogger", "manual_seed", "filterwarnings", "append", "insert")


class Parameter(Struct, frozen=True):
    """A parameter of a function; `annotation` and `default` are source text, or empty."""

    name: str
    annotation: str = ""
    default: str = ""
    is_required: bool = True


class ClassSource(Struct, frozen=True, kw_only=True):
    """A class: its bases, the parameters of its constructor and, of a module, of `forward`."""

    name: str
    bases: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    inputs: tuple[Parameter, ...] = ()
    calls: tuple[str, ...] = ()  # names that its constructor calls, in order
    mentions: frozenset[str] = frozenset()  # names that any of its methods uses
    is_dataclass: bool = False


class FunctionSource(Struct, frozen=True):
    """A function at the top level of a file."""

    name: str
    parameters: tuple[Parameter, ...]

    @property
    def num_required(self) -> int:
        """How many arguments it must be called with."""
        return sum(parameter.is_required for parameter in self.parameters)


class SourceFile(Struct, frozen=True, kw_only=True):
    """What a Python file defines, as far as a target needs it."""

    path: Path
    classes: dict[str, ClassSource]
    functions: dict[str, FunctionSource]
    imported: frozenset[str]  # those of the classes that another file defines
    instances: dict[str, str]  # names at the top level, and the classes that they are made of
    is_program: bool  # importing it would do more than define things

    @property
    def is_target(self) -> bool:
        """Whether it has the two functions of a target."""
        return {"model", "batch"} <= self.functions.keys()

    @property
    def modules(self) -> list[ClassSource]:
        """The subclasses of nn.Module."""
        return [item for item in self.classes.values() if self._is_module(item)]

    def _is_module(self, item: ClassSource) -> bool:
        return any(
            base.endswith(_MODULE_ENDINGS)
            or base.rpartition(".")[0].endswith("nn")
            or (base in self.classes and base != item.name and self._is_module(self.classes[base]))
            for base in item.bases
        )

    def find_models(self) -> list[str]:
        """Names of what may be the model, the likeliest first: functions, instances, classes."""
        instances = [
            name
            for name, made in self.instances.items()
            if self._is_made_module(made) or name in _MODEL_WORDS
        ]
        builders = [name for name, item in self.functions.items() if _is_builder(item)]
        contained = {name: self._list_contained(name) for name in self.classes}
        outermost = [
            item.name
            for item in self.modules
            if item.name not in self.imported
            and not any(
                item.name in names
                for container, names in contained.items()
                if container != item.name
            )
        ]
        # The class that contains most others is the likeliest; of equal ones, the last.
        order = {name: index for index, name in enumerate(outermost)}
        outermost.sort(key=lambda name: (len(contained[name]), order[name]), reverse=True)
        return [*builders, *reversed(instances), *outermost]

    def _list_contained(self, name: str) -> set[str]:
        """The modules of the file that a module uses, also inside of others."""
        contained: set[str] = set()
        pending = [name]
        while pending:
            item = self.classes[pending.pop()]
            new = {word for word in item.mentions if self._is_made_module(word)} - contained
            contained |= new
            pending += new
        return contained - {name}

    def _is_made_module(self, name: str) -> bool:
        return name in self.classes and self._is_module(self.classes[name])

    def find_sharding(self) -> FunctionSource | None:
        """A function of a model and a mesh."""
        for item in self.functions.values():
            names = [parameter.name for parameter in item.parameters if parameter.is_required]
            if len(names) == 2 and names[0] in _MODEL_WORDS and names[1] in _MESH_WORDS:
                return item
        return None

    def find_config(self, parameter: Parameter) -> ClassSource | None:
        """The class of a constructor's parameter that holds settings."""
        annotated = self.classes.get(parameter.annotation.strip("'\""))
        if annotated is not None:
            return annotated
        if parameter.name not in _CONFIG_WORDS:
            return None
        endings = tuple(word.capitalize() for word in _CONFIG_WORDS)
        return next((item for name, item in self.classes.items() if name.endswith(endings)), None)

    def find_input_layer(self, name: str, seen: tuple[str, ...] = ()) -> str:
        """The kind of the first layer that a module constructs, also inside of others; or "".

        An input that is called like token ids goes to an embedding, wherever that is constructed.
        """
        item = self.classes.get(name)
        if item is not None and any(
            parameter.name in _TOKEN_WORDS for parameter in item.inputs[:1]
        ):
            return "Embedding"
        if item is None or name in seen:
            return ""
        for call in item.calls:
            kind = call if call in _INPUT_LAYERS else self.find_input_layer(call, (*seen, name))
            if kind:
                return kind
        return ""


def read_source(path: Path) -> SourceFile:
    """Read a file; raises TargetError if it is not valid Python."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise TargetError(f"{path}{line} cannot be read: {reason}. Name a Python file.") from error
    classes = {node.name: _read_class(node) for node in tree.body if isinstance(node, ast.ClassDef)}
    imported = dict(_read_imported(path, tree))
    return SourceFile(
        path=path,
        classes={**imported, **classes},
        imported=frozenset(imported) - frozenset(classes),
        functions={
            node.name: FunctionSource(node.name, tuple(_read_parameters(node)))
            for node in tree.body
            if isinstance(node, ast.FunctionDef)
        },
        instances=dict(_read_instances(tree)),
        is_program=any(map(_does_work, tree.body)),
    )


def _read_imported(path: Path, tree: ast.Module) -> Iterator[tuple[str, ClassSource]]:
    """Classes that a file imports by name from a file of its package, such as its config."""
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or node.level > 1 or not node.module:
            continue
        folders = [path.resolve().parent, *([] if node.level else [find_package(path)[0]])]
        names = {alias.name for alias in node.names}
        for folder in folders:
            imported = folder.joinpath(*node.module.split(".")).with_suffix(".py")
            if imported.is_file() and imported != path.resolve():
                yield from _read_named_classes(imported, names)


def _read_named_classes(path: Path, names: set[str]) -> Iterator[tuple[str, ClassSource]]:
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return
    for item in body:
        if isinstance(item, ast.ClassDef) and item.name in names:
            yield item.name, _read_class(item)


def find_package(path: Path) -> tuple[Path, str]:
    """The folder from which a file is imported, and its dotted name."""
    folder, name = path.resolve().parent, path.stem
    if name == "__init__":
        folder, name = folder.parent, folder.name
    while (folder / "__init__.py").is_file():
        folder, name = folder.parent, f"{folder.name}.{name}"
    return folder, name


def _read_class(node: ast.ClassDef) -> ClassSource:
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    constructor, forward = methods.get("__init__"), methods.get("forward")
    is_dataclass = any("dataclass" in ast.unparse(item) for item in node.decorator_list)
    parameters: Sequence[Parameter] = ()
    if constructor is not None:
        parameters = list(_read_parameters(constructor))[1:]
    elif is_dataclass:
        parameters = list(_read_fields(node))
    return ClassSource(
        name=node.name,
        bases=tuple(map(ast.unparse, node.bases)),
        parameters=tuple(parameters),
        inputs=tuple(list(_read_parameters(forward))[1:]) if forward is not None else (),
        calls=tuple(_list_calls(constructor)) if constructor is not None else (),
        mentions=frozenset(
            item.id
            for method in methods.values()
            for item in ast.walk(method)
            if isinstance(item, ast.Name)
        ),
        is_dataclass=is_dataclass,
    )


def _read_fields(node: ast.ClassDef) -> Iterator[Parameter]:
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            default = "" if item.value is None else ast.unparse(item.value)
            yield Parameter(
                item.target.id, ast.unparse(item.annotation), default, item.value is None
            )


def _read_parameters(node: ast.FunctionDef) -> Iterator[Parameter]:
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults))
    defaults += arguments.defaults
    pairs = [*zip(plain, defaults, strict=True)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    for argument, default in pairs:
        annotation = "" if argument.annotation is None else ast.unparse(argument.annotation)
        text = "" if default is None else ast.unparse(default)
        yield Parameter(argument.arg, annotation, text, default is None)


def _list_calls(node: ast.FunctionDef) -> Iterator[str]:
    """The names that a constructor calls, in the order of the source; the last part of each."""
    calls = [item for item in ast.walk(node) if isinstance(item, ast.Call)]
    for call in sorted(calls, key=lambda item: (item.lineno, item.col_offset)):
        if isinstance(call.func, ast.Name | ast.Attribute):
            yield ast.unparse(call.func).rpartition(".")[2]


def _read_instances(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            target = node.targets[0]
            if isinstance(target, ast.Name):
                yield target.id, ast.unparse(node.value.func)


def _is_builder(function: FunctionSource) -> bool:
    words = function.name.lower().split("_")
    is_named = words[-1] in _MODEL_WORDS and (len(words) == 1 or words[0] in _BUILDER_VERBS)
    return is_named and not function.num_required


def _does_work(node: ast.stmt) -> bool:
    """Whether a statement at the top level trains, or calls something for its effect."""
    if isinstance(node, ast.For | ast.While | ast.With):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ast.unparse(node.value.func).rpartition(".")[2] not in _HARMLESS
    return False
