"""Writes a TARGET for a model that was found in source: its constructor, an input, its sharding."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from shardscope.cli.source_scan import ClassSource, Parameter, SourceFile, find_package
from shardscope.errors import TargetError

_BATCH, _SEQUENCE, _IMAGE = 4, 32, 64
_SIZES = {
    "vocab": "256",
    "class": "10",
    "channel": "3",
    "layer": "2",
    "depth": "2",
    "block": "2",
    "head": "4",
    "expert": "4",
    "len": "128",
    "position": "128",
    "context": "128",
    "kernel": "3",
    "patch": "8",
    "image": "64",
    "step": "1",
}
"""Sizes for parameters without a default, by a word in their names; others are 64 wide."""
_WIDTH = "64"
_LENGTHS = ("len", "position", "context", "block_size")
"""Words in the names of settings that limit the number of tokens."""
_UNSET = "-1"  # what programs write for a setting that they compute later
_TARGETS = ("targets", "target", "labels", "label", "y")
_OPTIONAL = ("mask", "cache", "past", "state", "hidden")
"""Words in the names of inputs that may be None."""
_NUMBERED = {
    "step": "1000",
    "time": "1000",
    "class": "10",
    "label": "10",
    "noise": "1000",
    "domain": "2",
    "task": "2",
}
"""Words in the names of inputs with a number for each sample, and below which it is."""
_INDICES = ("idx", "ids", "index", "indices", "sparse", "categor", "token")
_INPUT_CODE = {
    "Embedding": (
        "torch.randint(first.num_embeddings, (BATCH, SEQUENCE))",
        "Token ids: as many kinds as the first embedding has.",
    ),
    "Linear": ("torch.randn(BATCH, first.in_features)", "As wide as the first linear layer."),
    "Conv1d": ("torch.randn(BATCH, first.in_channels, SEQUENCE)", "The first layer's channels."),
    "Conv2d": (
        f"torch.randn(BATCH, first.in_channels, {_IMAGE}, {_IMAGE})",
        "Images with the first layer's channels.",
    ),
    "LSTM": ("torch.randn(BATCH, SEQUENCE, first.input_size)", "As wide as the first layer."),
    "GRU": ("torch.randn(BATCH, SEQUENCE, first.input_size)", "As wide as the first layer."),
}


def render_target(source: SourceFile, name: str, target: Path) -> str:
    """The text of a target at the path `target`, for what `name` is in the source.

    What could not be read from the source is guessed, and the line says so.
    """
    made = source.instances.get(name, name)
    item = source.classes.get(made)
    sharding = source.find_sharding()
    imported = [name, *([sharding.name] if sharding else [])]
    length = _choose_length(source, item)
    lines = [
        f'"""What shardscope runs: {name} of {source.path.name}, an input, and how it is sharded.',
        "",
        f"    shardscope trace {target.name} --mesh dp=8",
        "",
        'Written by `shardscope init`. Lines marked "guessed" are where to look first.',
        '"""',
        "",
        *_import_lines(source, imported, item, target),
        "",
        f"BATCH, SEQUENCE = {_BATCH}, {length}  # guessed: samples of a rank, and tokens",
        "",
        "",
        "def model():",
        *_model_lines(source, name, item),
        "",
        "",
        "def batch(model):",
        *_batch_lines(source, made, item),
        "",
        "",
        "def parallelize(model, mesh):",
        *_sharding_lines(sharding.name if sharding else None),
        "",
        "",
        "# Stepped after each step by `shardscope memory`, which counts its state.",
        "def optimizer(model):",
        "    return torch.optim.AdamW(model.parameters())",
    ]
    return "\n".join(lines) + "\n"


def _import_lines(
    source: SourceFile, names: list[str], item: ClassSource | None, target: Path
) -> Iterator[str]:
    configs = [
        config.name
        for parameter in (item.parameters if item else ())
        if parameter.is_required and (config := source.find_config(parameter))
    ]
    root, module = find_package(source.path)
    if not all(part.isidentifier() for part in module.split(".")):
        raise TargetError(
            f"{source.path} cannot be imported by that name. Rename it, such as model.py."
        )
    relative = os.path.relpath(root, target.resolve().parent)
    if relative != ".":
        yield "import sys"
        yield "from pathlib import Path"
        yield ""
    yield "import torch"
    yield "from torch import nn"
    yield "from torch.distributed.fsdp import fully_shard"
    yield ""
    if relative != ".":
        yield f'sys.path.insert(0, str(Path(__file__).resolve().parent / "{relative}"))'
        yield ""
    aliases = [f"{name} as build" if name == "model" else name for name in (*names, *configs)]
    yield f"from {module} import {', '.join(dict.fromkeys(aliases))}"


def _model_lines(source: SourceFile, name: str, item: ClassSource | None) -> Iterator[str]:
    if name in source.functions:
        yield f"    return {'build' if name == 'model' else name}()"
        return
    if name in source.instances or item is None:
        yield "    # Built when its file is imported, so only once."
        yield f"    return {'build' if name == 'model' else name}"
        return
    arguments = list(_list_arguments(source, item))
    if len(arguments) < 2:
        text, comment = arguments[0] if arguments else ("", "")
        yield f"    return {name}({text}){f'  # {comment}' if comment else ''}"
        return
    yield f"    return {name}("
    for argument, comment in arguments:
        yield f"        {argument},{f'  # {comment}' if comment else ''}"
    yield "    )"


def _list_arguments(source: SourceFile, item: ClassSource) -> Iterator[tuple[str, str]]:
    for parameter in item.parameters:
        if not parameter.is_required and parameter.default != _UNSET:
            continue
        config = source.find_config(parameter)
        if config is not None:
            inner = ", ".join(argument for argument, _ in _list_arguments(source, config))
            guessed = "guessed" if inner else ""
            yield f"{parameter.name}={config.name}({inner})", guessed
        else:
            yield f"{parameter.name}={_guess_value(parameter)}", "guessed"


def _choose_length(source: SourceFile, item: ClassSource | None) -> int:
    """How many tokens an input has: no more than the model's settings allow by default."""
    parameters = list(item.parameters) if item else []
    for parameter in list(parameters):
        config = source.find_config(parameter)
        parameters += config.parameters if config else ()
    limits = [
        int(parameter.default)
        for parameter in parameters
        if parameter.default.isdecimal() and any(word in parameter.name for word in _LENGTHS)
    ]
    return min([_SEQUENCE, *filter(None, limits)])


def _guess_value(parameter: Parameter) -> str:
    name, annotation = parameter.name.lower(), parameter.annotation.lower()
    if annotation == "bool" or name.startswith(("use_", "is_", "has_")):
        return "False"
    if annotation == "float" or "drop" in name or "eps" in name:
        return "0.0"
    if "none" in annotation or "optional" in annotation:
        return "None"
    if annotation.startswith(("list", "tuple", "sequence")):
        return f"[{_WIDTH}, {_WIDTH}]"
    return next((size for word, size in _SIZES.items() if word in name), _WIDTH)


def _batch_lines(source: SourceFile, made: str, item: ClassSource | None) -> Iterator[str]:
    inputs = [parameter for parameter in (item.inputs if item else ()) if parameter.is_required]
    kind = source.find_input_layer(made)
    if kind:
        code, comment = _INPUT_CODE[kind]
        yield f"    # Guessed. {comment} Replace it by an input of yours."
        layers = f"layer for layer in model.modules() if isinstance(layer, nn.{kind})"
        yield f"    first = next({layers})"
        yield f"    inputs = {code}"
    else:
        yield "    # Guessed from the first layer with weights. Replace it by an input of yours."
        yield "    for first in model.modules():"
        for layer, (code, _) in _INPUT_CODE.items():
            yield f"        if isinstance(first, nn.{layer}):"
            yield f"            inputs = {code}"
            yield "            break"
        yield "    else:"
        yield f"        inputs = torch.randn(BATCH, {_WIDTH})"
    rest = [_guess_input(parameter, kind) for parameter in inputs[1:]]
    yield f"    return {', '.join(['inputs', *rest])}  # guessed" if rest else "    return inputs"


def _guess_input(parameter: Parameter, kind: str) -> str:
    """A further input: labels are token ids or classes; others are guessed by their names."""
    name = parameter.name.lower()
    if name in _TARGETS:
        return "inputs.clone()" if kind == "Embedding" else "torch.zeros(BATCH, dtype=torch.long)"
    if name == "t":
        return "torch.randint(1000, (BATCH,))"
    for word, bound in _NUMBERED.items():
        if word in name:
            return f"torch.randint({bound}, (BATCH,))"
    if any(word in name for word in _OPTIONAL):
        return "None"
    if kind != "Embedding" and any(word in name for word in _INDICES):
        return "torch.zeros(BATCH, SEQUENCE, dtype=torch.long)"
    return "inputs.clone()"


def _sharding_lines(function: str | None) -> Iterator[str]:
    if function is not None:
        yield f"    return {function}(model, mesh)"
        return
    yield "    # FSDP2 with a group for each layer. Replace it by your own sharding."
    yield "    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]"
    yield "    for layer in max(lists, key=len, default=()):"
    yield '        fully_shard(layer, mesh=mesh["dp"])'
    yield '    return fully_shard(model, mesh=mesh["dp"])'
